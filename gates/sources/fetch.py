"""Fetches files of any source into the store: several at once, each resumed, bounded, verified and then kept.

The source is asked for bytes and believed nothing. A file is kept when it has the size and digest that the source
listed; where it listed none, when its end was received, and what was received names it. Only what passes is tried
again; what is wrong for good leaves no byte behind.
"""

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gates.files.refusal import FileRefused
from gates.sources.source import Item, Opened, Resolved, Source, SourceRefused, SourceUnavailable
from gates.sources.store import FetchStore, Part

Progress = Callable[[int, int | None], None]
ResultT = TypeVar("ResultT")

SOON = 2
"""Further tries of what has not answered once."""
_CHUNK = 1 << 20
_STEP = 1 << 20
"""Bytes that have to arrive before the tries are counted anew: one byte a try would never end."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is fetched at once and how long it is tried.

    Attributes:
        at_once: files fetched at one time.
        largest: bytes of the largest file that is taken, where its source does not list a size.
        pauses: seconds before each further try while nothing arrives; then it is given up.
    """

    at_once: int = 6
    largest: int = 1 << 40
    pauses: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file that is there and verified. `received` is how many of its bytes came now."""

    item: Item
    sha256: str
    size: int
    place: Path
    received: int


class _Stopped(Exception):
    """Another file cannot be fetched, so this one is not needed."""


def patiently(act: Callable[[], ResultT], bounds: Bounds) -> ResultT:
    """Return what an act returns, trying it again a few times while its source cannot be reached.

    Raises:
        SourceUnavailable: after the last try. SourceRefused: at once.
    """
    for pause in bounds.pauses[:SOON]:
        try:
            return act()
        except SourceUnavailable as problem:
            time.sleep(problem.wait_seconds or pause)
    return act()


def fetch(
    source: Source,
    resolved: Resolved,
    items: Iterable[Item],
    store: FetchStore,
    *,
    bounds: Bounds | None = None,
    progress: Progress | None = None,
) -> list[Fetched]:
    """Fetch files, the largest first. Returns them in the order asked.

    Args:
        source: that lists them.
        resolved: what it resolved to.
        items: of its list, which are not on this machine already.
        store: that keeps them.
        bounds: on what is done at once, and for how long.
        progress: called with (bytes that were there or arrived, bytes in all if they are known), from several threads.

    Raises:
        SourceRefused: a file is not what was listed, or cannot be trusted. Nothing of it is left.
        SourceUnavailable: a file did not arrive in all tries. What has arrived of it stays, and is gone on from.
    """
    asked = list(items)
    work = _Fetch(source, resolved, store, bounds or Bounds(), progress)
    work.expect(asked)
    order = sorted(range(len(asked)), key=lambda place: -(asked[place].size or 0))
    with ThreadPoolExecutor(work.bounds.at_once, thread_name_prefix="fetch") as pool:
        futures = {place: pool.submit(work.one, asked[place]) for place in order}
        try:
            wait(futures.values(), return_when=FIRST_EXCEPTION)
        finally:
            # After a failure, or an interrupt, the other files need not arrive.
            if any(not one.done() or one.exception() is not None for one in futures.values()):
                work.stop.set()
                for one in futures.values():
                    one.cancel()
    failed = [one.exception() for one in futures.values() if not one.cancelled() and one.exception() is not None]
    for error in sorted(failed, key=lambda error: isinstance(error, _Stopped)):
        if error is not None:
            raise error
    return [futures[place].result() for place in range(len(asked))]


class _Fetch:
    """One call of `fetch`: what its threads share."""

    def __init__(
        self, source: Source, resolved: Resolved, store: FetchStore, bounds: Bounds, progress: Progress | None
    ) -> None:
        self.source, self.resolved, self.store, self.bounds = source, resolved, store, bounds
        self.progress, self.total = progress, 0
        self.stop = threading.Event()

    def expect(self, items: list[Item]) -> None:
        """Take note of what is to come. Raises SourceRefused when the store may not, or cannot, hold it."""
        self.total = sum(item.size or 0 for item in items)
        try:
            self.store.prepare()
            missing = sum(
                item.size or 0 for item in items if item.sha256 is None or not self.store.holds(item.sha256, item.size)
            )
            free = shutil.disk_usage(self.store.root).free
        except OSError as error:
            raise self._unwritable(error) from None
        if missing > free:
            said = f"needs {missing} bytes in {self.store.root}, where {free} are free"
            advice = "make room, or name another place with --cache"
            raise SourceRefused("disk-full", said, file="", found=free, expected=missing, advice=advice)

    def one(self, item: Item) -> Fetched:
        """Fetch one file. Raises as `fetch`, naming it."""
        key = _key(self.resolved, item)
        try:
            # Broken tries that moved the file on are followed by fresh ones: a long file may be cut many times.
            tries = 0
            before = -1
            while True:
                try:
                    return self._held(item, key)
                except SourceUnavailable as problem:
                    reached = self._reached(key)
                    if before < 0:
                        before = reached
                    elif reached - before >= _STEP:
                        tries, before = 0, reached
                    if tries >= self._most_tries(problem, reached):
                        raise
                    if self.stop.wait(problem.wait_seconds or self.bounds.pauses[tries]):
                        raise _Stopped from None
                    tries += 1
        except FileRefused as refused:
            raise refused.of(item.path) from None
        except OSError as error:
            raise self._unwritable(error).of(item.path) from None

    def _most_tries(self, problem: SourceUnavailable, reached: int) -> int:
        # A host that has not answered at all is rather wrong than busy, and somebody waits for the answer.
        is_wrong = reached == 0 and problem.code in {"name-unknown", "unreachable"}
        return min(len(self.bounds.pauses), SOON if is_wrong else len(self.bounds.pauses))

    def _reached(self, key: str) -> int:
        try:
            return (self.store.root / "parts" / key).stat().st_size
        except FileNotFoundError:
            return 0

    def _unwritable(self, error: OSError) -> SourceRefused:
        said = f"cannot be kept in {self.store.root}: {error.strerror}"
        return SourceRefused("store-unwritable", said, file="", advice="make room, or name another place with --cache")

    def _held(self, item: Item, key: str) -> Fetched:
        with self.store.part(key, lambda: self._known(item, key) is None) as part:
            if part is None:
                sha256 = self._known(item, key)
                if sha256 is None:
                    raise SourceUnavailable("store-changed", "was thrown out of the store meanwhile")
                place = self.store.place(sha256)
                size = place.lstat().st_size
                self._moved(size)
                return Fetched(item, sha256, size, place, 0)
            try:
                fetched = self._received(item, part)
            except SourceRefused:
                part.discard()
                raise
        if item.sha256 is None and self._is_named(item):
            self.store.name(key, fetched.sha256)
        return fetched

    def _known(self, item: Item, key: str) -> str | None:
        """Return the digest of a file that is there already and has its bytes still, or None."""
        self._go_on()
        sha256 = item.sha256 or (self.store.known(key) if self._is_named(item) else None)
        if sha256 is None or not self.store.holds(sha256, item.size):
            return None
        return sha256 if self.store.is_whole(sha256, item.git_blob, self._go_on) else None

    def _go_on(self) -> None:
        if self.stop.is_set():
            raise _Stopped

    def _is_named(self, item: Item) -> bool:
        """Tell whether the source has another name of a file's bytes that cannot move."""
        return item.git_blob is not None or item.version is not None

    def _received(self, item: Item, part: Part) -> Fetched:
        """Receive a file; one that was begun earlier and ends wrong is received once more from its start."""
        was_begun = part.size > 0
        try:
            return self._once(item, part)
        except SourceRefused:
            if not was_begun:
                raise
        part.begin(None)
        return self._once(item, part)

    def _once(self, item: Item, part: Part) -> Fetched:
        sums = _Sums(item, self.bounds.largest)
        try:
            self._reread(item, part, sums)
        except SourceRefused:
            part.begin(None)
            sums = _Sums(item, self.bounds.largest)
        start = sums.count
        if item.size is None or start < item.size or start == 0:
            with self.source.open(self.resolved, item, offset=start, tag=part.tag) as opened:
                if opened.offset != start or start == 0:
                    self._moved(-start)
                    sums, start = _Sums(item, self.bounds.largest), 0
                    part.begin(opened.tag)
                check_opened(item, opened)
                self._write(opened, part, sums)
                sums.finish(opened.size)
        sha256 = sums.verify()
        return Fetched(item, sha256, sums.count, part.keep(sha256), sums.count - start)

    def _reread(self, item: Item, part: Part, sums: "_Sums") -> None:
        """Take what is there into the sums from its beginning; what has neither name nor digest is begun anew."""
        if part.tag is None and item.sha256 is None and item.git_blob is None:
            part.begin(None)
        part.file.seek(0)
        while chunk := part.file.read(_CHUNK):
            sums.add(chunk)
            self._go_on()
        self._moved(sums.count)

    def _write(self, opened: Opened, part: Part, sums: "_Sums") -> None:
        for chunk in opened.chunks:
            sums.add(chunk)
            part.file.write(chunk)
            self._moved(len(chunk))
            self._go_on()
        part.file.flush()

    def _moved(self, count: int) -> None:
        if self.progress is not None and count:
            self.progress(count, self.total or None)


class _Sums:
    """Running digests of a file, and the bound on its size."""

    def __init__(self, item: Item, largest: int) -> None:
        self._item, self.count = item, 0
        self._most = largest if item.size is None else item.size
        self._sha256 = hashlib.sha256()
        self._git = None
        if item.git_blob is not None and item.size is not None:
            # Git's name of a file; a weak digest, and the only one that the source has.
            self._git = hashlib.sha1(f"blob {item.size}\0".encode(), usedforsecurity=False)

    def add(self, chunk: bytes) -> None:
        """Take bytes. Raises SourceRefused at the first one too many."""
        self.count += len(chunk)
        if self.count > self._most:
            said = f"goes on after {self._most} bytes, where it should end"
            raise SourceRefused("body-too-long", said, found=f"more than {self._most}", expected=self._most)
        self._sha256.update(chunk)
        if self._git is not None:
            self._git.update(chunk)

    def finish(self, announced: int | None) -> None:
        """Check that the end was reached. Raises SourceRefused."""
        expected = announced if self._item.size is None else self._item.size
        if expected is not None and self.count != expected:
            said = f"ends after {self.count} of {expected} bytes"
            raise SourceRefused("body-too-short", said, found=self.count, expected=expected)

    def verify(self) -> str:
        """Return the SHA-256. Raises SourceRefused when it, or git's name, is another than the source listed."""
        self.finish(None)
        found = f"sha256:{self._sha256.hexdigest()}"
        advice = "the server or something on the way is broken or hostile: do not use this copy"
        if self._item.sha256 is not None and found != self._item.sha256:
            said = "has other bytes than its source lists"
            raise SourceRefused("digest-mismatch", said, found=found, expected=self._item.sha256, advice=advice)
        if self._git is not None and self._git.hexdigest() != self._item.git_blob:
            said, name = "has other bytes than its commit names", f"git blob {self._git.hexdigest()}"
            raise SourceRefused("digest-mismatch", said, found=name, expected=self._item.git_blob, advice=advice)
        return found


def check_opened(item: Item, opened: Opened) -> None:
    """Return when a file is announced with the size that was listed. Raises SourceRefused."""
    if item.size is not None and opened.size is not None and opened.size != item.size:
        said = f"is announced with {opened.size} bytes, and its source lists {item.size}"
        raise SourceRefused("size-mismatch", said, found=opened.size, expected=item.size)


def _key(resolved: Resolved, item: Item) -> str:
    """Return the name of a file's part: its digest, so that all who fetch it share it; else where it comes from."""
    if item.sha256 is not None:
        return item.sha256.removeprefix("sha256:")
    named = [resolved.kind, resolved.location, resolved.revision, item.path, item.version, item.git_blob, item.address]
    return hashlib.sha256("\0".join(map(str, named)).encode()).hexdigest()
