"""Reads a directory that shall become a bundle: which files, what each is for, their hashes and what they tell.

Nothing is followed or changed on the way: a link, a special file or a name that some file system reads otherwise is
refused, and all refusals are told at once. Only files that the engine reads are opened, and one that was read before
and has the same device, inode, size, modification and change time is not opened again.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from gates import facts
from gates.files.contents import Reader, select
from gates.files.listing import Entry, LeftOut, Listing, list_directory
from gates.files.names import collisions, refuse_name
from gates.files.refusal import FileRefused
from schemas.bundle import MAX_FILES, Role
from schemas.common import canonical_json, folded, sha256_digest

_CHUNK = 1 << 20
# Times of two writes can be equal within one tick of the kernel's clock, 10 ms at most.
_CLOCK_TICK_NS = 20_000_000


class DirectoryRefused(Exception):
    """The directory cannot become a bundle. `refusals` has every reason, by file; of the whole, the file is empty."""

    def __init__(self, refusals: Iterable[FileRefused]) -> None:
        self.refusals = tuple(sorted(refusals, key=lambda refused: refused.file or ""))
        super().__init__("; ".join(f"{refused.file or '.'}: {refused}" for refused in self.refusals))


class Memory(Protocol):
    """Remembers what was read, by a key that names a file's exact state."""

    def get(self, key: str) -> str | None:
        """Return what was put under this key, or None."""

    def put(self, key: str, value: str) -> None:
        """Remember a value."""


@dataclass(frozen=True, slots=True)
class Found:
    """One file of the directory: its place in the bundle, where its bytes are, and what they tell."""

    path: str
    place: Path
    size: int
    sha256: str
    role: Role
    facts: Mapping[str, Any]
    was_read: bool


@dataclass(frozen=True, slots=True)
class Contents:
    """All files by path, and what was left out."""

    files: tuple[Found, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def revision(self) -> str:
        """Digest of the file list: the same files at the same paths have it on every machine."""
        return sha256_digest(canonical_json([{"path": f.path, "sha256": f.sha256, "size": f.size} for f in self.files]))

    def with_role(self, role: Role) -> list[Found]:
        """Return the files with this role, by path."""
        return [file for file in self.files if file.role is role]


@dataclass(frozen=True, slots=True)
class _Taken:
    """One file that is taken, before it is read."""

    entry: Entry
    role: Role


def read_directory(
    root: Path,
    reader: Reader,
    *,
    exclude: Iterable[str] = (),
    roles: Mapping[str, Role] | None = None,
    hard_links: bool = False,
    memory: Memory | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Contents:
    """Read a directory: what the engine reads of it, in one format and one quantization.

    Args:
        root: the directory. The user named it, so it may itself be reached through a link.
        reader: the engine that shall serve the files.
        exclude: patterns of relative paths, such as `original/*`; `*` also matches `/`.
        roles: path → role, for files that their name does not tell.
        hard_links: take files that have a further name elsewhere.
        memory: of earlier readings; without it every file is read.
        progress: called with bytes read and bytes in all, from several threads.

    Raises:
        DirectoryRefused: with every reason at once.
    """
    try:
        listing = list_directory(root, exclude=exclude, hard_links=hard_links)
    except FileRefused as refused:
        raise DirectoryRefused([refused]) from None
    return read_listing(listing, reader, roles=roles, memory=memory, progress=progress)


def read_listing(
    listing: Listing,
    reader: Reader,
    *,
    roles: Mapping[str, Role] | None = None,
    memory: Memory | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Contents:
    """Read files that were listed, wherever their bytes lie. Arguments and errors are those of `read_directory`."""
    entries = {entry.path: entry for entry in listing.entries}
    selection = select(entries, reader, roles)
    taken = [_Taken(entries[path], role) for path, role in sorted(selection.kept.items())]
    refusals = [*listing.refused, *selection.refused, *_refuse_names(taken, listing)]
    if listing.refused:  # then weights may be among what was refused, and their absence is no reason of its own
        refusals = [one for one in refusals if one.code != "weights-missing"]
    if refusals:
        raise DirectoryRefused(refusals)
    readings = _Readings(memory, sum(one.entry.state.st_size for one in taken), progress)
    files = readings.run(taken)
    if readings.refused:
        raise DirectoryRefused(readings.refused)
    left_out = sorted([*listing.left_out, *selection.left_out], key=lambda one: one.path)
    return Contents(tuple(files), tuple(left_out))


def _refuse_names(taken: list[_Taken], listing: Listing) -> Iterator[FileRefused]:
    """Refuse names of files that are taken, and any name that could be taken for one of them."""
    paths = {one.entry.path for one in taken}
    if len(paths) > MAX_FILES:
        said = f"holds {len(paths)} files; a bundle has at most {MAX_FILES}"
        yield FileRefused("too-many-files", said, file="", found=len(paths), expected=f"at most {MAX_FILES}")
    for path in sorted(paths):
        refused = refuse_name(path)
        if refused is not None:
            yield refused
    near = {folded(path) for path in paths}
    yield from collisions(entry.path for entry in listing.entries if folded(entry.path) in near)


# ------------------------------------------------------------------------------------------------- their bytes


class _Stopped(Exception):
    """Another thread gave up, or the user did."""


class _Readings:
    """Hashes files on threads, unless the memory has them, and asks each what it tells."""

    def __init__(self, memory: Memory | None, total: int, progress: Callable[[int, int], None] | None) -> None:
        self.memory, self.total, self.progress = memory, total, progress
        self.refused: list[FileRefused] = []
        self.stop = threading.Event()

    def run(self, files: list[_Taken]) -> list[Found]:
        remembered = {one.entry.path: self._remembered(one) for one in files}
        todo = [one for one in files if remembered[one.entry.path] is None]
        # The largest first: the last file to end should be a small one.
        todo.sort(key=lambda one: -one.entry.state.st_size)
        known = self.total - sum(one.entry.state.st_size for one in todo)
        if self.progress is not None and known:
            self.progress(known, self.total)
        pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="hash")
        read: dict[str, Found | None] = {}
        try:
            for one, told in zip(todo, pool.map(self._read, todo), strict=True):
                # Now, and not at the end, which whoever presses Ctrl-C does not wait for.
                self._remember(one, told)
                read[one.entry.path] = told
        finally:
            self.stop.set()
            pool.shutdown(cancel_futures=True)
        found = [remembered[one.entry.path] or read[one.entry.path] for one in files]
        return [one for one in found if one is not None]

    def _remembered(self, one: _Taken) -> Found | None:
        text = None if self.memory is None else self.memory.get(_key(one))
        if text is None:
            return None
        try:
            value = json.loads(text)
            if one.entry.is_kept and value["sha256"] != f"sha256:{one.entry.blob}":
                return None
            return _found(one, value["sha256"], value["facts"], was_read=False)
        except (ValueError, KeyError, TypeError):
            return None  # written by something else, or damaged: read the file

    def _remember(self, one: _Taken, found: Found | None) -> None:
        state = one.entry.state
        # Whole seconds in both times look like a file system with a coarse clock: two writes could share a time.
        coarse = state.st_ctime_ns % 10**9 == 0 and state.st_mtime_ns % 10**9 == 0
        in_future = state.st_ctime_ns > time.time_ns()
        if self.memory is not None and found is not None and not coarse and not in_future:
            value = {"sha256": found.sha256, "facts": found.facts}
            self.memory.put(_key(one), json.dumps(value, sort_keys=True, separators=(",", ":")))

    def _read(self, one: _Taken) -> Found | None:
        try:
            return self._read_exactly(one)
        except FileRefused as refused:
            refused.advice = refused.advice or "fetch the file again, or leave it out with --exclude"
            self.refused.append(refused.of(one.entry.path))
        except OSError as error:
            said = f"cannot be read: {error.strerror}"
            self.refused.append(FileRefused("file-unreadable", said, file=one.entry.path))
        return None

    def _read_exactly(self, one: _Taken) -> Found:
        entry, state = one.entry, one.entry.state
        # A file written in this very tick could be written again without a new time; wait the tick out.
        wait_ns = state.st_ctime_ns + _CLOCK_TICK_NS - time.time_ns()
        if 0 < wait_ns <= _CLOCK_TICK_NS:
            time.sleep(wait_ns / 1e9)
        # O_NONBLOCK: a pipe put in the file's place must not hang us.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with os.fdopen(os.open(entry.place, flags), "rb") as file:
            if _identity(os.fstat(file.fileno()), entry) != _identity(state, entry):
                raise FileRefused("source-unstable", "changed while the directory was read")
            # First what it tells: a file that is refused need not be hashed.
            told = facts.read(PurePosixPath(entry.path).name, one.role, file, state.st_size)
            file.seek(0)
            digest = self._hash(file, state.st_size)
            if _identity(os.fstat(file.fileno()), entry) != _identity(state, entry):
                raise FileRefused("source-unstable", "changed while it was read")
        if entry.blob is not None and len(entry.blob) == 64 and digest != f"sha256:{entry.blob}":
            said = f"has the SHA-256 {digest[7:]}, but lies in the Hub cache as {entry.blob}"
            raise FileRefused("digest-mismatch", said, found=digest[7:], expected=entry.blob)
        return _found(one, digest, told, was_read=True)

    def _hash(self, file: BinaryIO, size: int) -> str:
        hasher, left = hashlib.sha256(), size
        # One buffer, used again: a new one each time costs a tenth of the whole.
        buffer = memoryview(bytearray(min(_CHUNK, size)))
        # Not to the end of the file: it may be growing, faster than it is read.
        while left and (count := file.readinto(buffer[:left])):  # type: ignore[attr-defined] # every file has it
            if self.stop.is_set():
                raise _Stopped
            hasher.update(buffer[:count])
            left -= count
            if self.progress is not None:
                self.progress(count, self.total)
        return f"sha256:{hasher.hexdigest()}"


def _identity(state: os.stat_result, entry: Entry) -> tuple[int, ...]:
    """Return what changes when a file is written; of one in our store not the change time: new names change it too."""
    found = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
    return found if entry.is_kept else (*found, state.st_ctime_ns)


def _key(one: _Taken) -> str:
    reader = facts.reader_name(PurePosixPath(one.entry.path).name, one.role)
    return ":".join([*map(str, _identity(one.entry.state, one.entry)), reader])


def _found(one: _Taken, digest: str, told: Mapping[str, Any], *, was_read: bool) -> Found:
    entry = one.entry
    return Found(entry.path, entry.place, entry.state.st_size, digest, one.role, told, was_read)
