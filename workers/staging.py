"""Puts a bundle's files where an engine reads them: linked from the blob store, or fetched over HTTP.

A staged folder comes into being whole: it is built under another name and renamed into place. It stays for later jobs
until its room is needed: then what no job holds goes, longest unused first. Its files are
read-only. What is linked from the store on this machine is not hashed here, the integrity gate does that where
the engine reads; what is fetched or copied is hashed on its way.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from registry.storage.incoming import READ_ONLY
from registry.storage.local import LocalBlobs
from schemas.bundle import Bundle, File
from schemas.evidence import Staged
from schemas.failures import Cause
from schemas.problems import Problem

PARTIAL = ".partial-"
_CANNOT_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS})

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

Fetch = Callable[[str], Iterable[bytes]]
"""Digest → the blob's bytes, in pieces."""


class DiskFull(Problem):
    """The runner's disk has no room for the bundle's files, and nothing there could make way; `cause` classes it."""

    kind, title, status = "disk-full", "Disk full", 409


@dataclass(frozen=True, slots=True)
class Place:
    """A staged bundle: the folder that the engine reads, and what it took to get it there.

    `was_there`: an earlier job had staged it.
    """

    root: Path
    facts: Staged
    was_there: bool = False


class Staging:
    """Stages bundles under one data folder. Safe to call from several threads and processes at once.

    What is held is known to this object alone: only the process that owns the folder may let anything go.
    """

    def __init__(self, data_dir: Path, store_dir: Path | None = None, *, kept_bytes: int = 0) -> None:
        """Use a data folder, and the blob store where it is on this machine.

        Args:
            data_dir: the folder.
            store_dir: of the blob store.
            kept_bytes: most bytes that are kept once a job has ended; 0 for as many as there is room for.
        """
        self._kept_bytes = kept_bytes
        self._holders: dict[str, set[str]] = {}
        self._lock = threading.Lock()
        self._staged = data_dir / "staged"
        self._staged.mkdir(parents=True, exist_ok=True)
        self._cache = LocalBlobs(data_dir / "blobs")
        self._incoming = data_dir / "blobs" / "incoming"
        self._store = LocalBlobs(store_dir) if store_dir is not None else None

    def root(self, bundle: Bundle) -> Path:
        """Return the folder of a bundle's files, staged or not."""
        return self._staged / bundle.digest.removeprefix("sha256:")

    def stage(self, bundle: Bundle, fetch: Fetch, progress: Callable[[str], None] = lambda _: None) -> Place:
        """Make every file of a bundle readable under one folder, which several jobs may share.

        Args:
            bundle: whose files.
            fetch: where blobs come from that are not in the store on this machine.
            progress: takes one line for people; an exception that it raises ends the staging.

        Raises:
            DigestMismatch, TooLarge: fetched bytes are not the ones asked for. Nothing is left of them.
            DiskFull: there is no room, also after all that no job holds was let go.
            OSError: the disk is not writable.
            Whatever `fetch` raises.
        """
        started = time.monotonic()
        root, size = self.root(bundle), sum(file.size for file in bundle.files)
        is_there = was_there = False
        while not is_there:
            try:
                with _locked(root.with_suffix(".lock"), progress):
                    was_there = _is_whole(root, bundle)
                    if not was_there:
                        self._build(bundle, root, fetch, progress)
                    os.utime(root)
                is_there = True
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                progress("the disk is full: letting go of what no job uses")
                if not self._let_go(besides=root):
                    problem = self._full(size, error)
                    self._forget_fetched(bundle)
                    raise problem from error
        duration_ms = round((time.monotonic() - started) * 1000)
        return Place(root, Staged(files=len(bundle.files), size=size, duration_ms=duration_ms), was_there)

    def discard(self, bundle: Bundle) -> None:
        """Forget a staged bundle, and what was fetched for it, since its bytes were found to be wrong."""
        root = self.root(bundle)
        with _locked(root.with_suffix(".lock"), lambda _: None):
            shutil.rmtree(root, ignore_errors=True)
            for file in bundle.files:
                self._cache.path(file.sha256).unlink(missing_ok=True)

    def hold(self, digest: str, job: str) -> None:
        """Keep a bundle's files for as long as a job is held, whether they are staged already or not."""
        with self._lock:
            self._holders.setdefault(digest.removeprefix("sha256:"), set()).add(job)

    def release(self, job: str) -> None:
        """Say that a job holds nothing any more; what is above the limit then goes, longest unused first."""
        with self._lock:
            for name in [name for name, holders in self._holders.items() if job in holders]:
                self._holders[name].discard(job)
                if not self._holders[name]:
                    del self._holders[name]
                # It was in use until now, however long ago it was staged: what served for a month is needed first.
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self._staged / name)
        while self._kept_bytes and self.used_bytes() > self._kept_bytes and self._let_go():
            pass

    def used_bytes(self) -> int:
        """Return the bytes of staged files that lie in this folder alone; what is linked to the store takes no room."""
        cached = {facts.st_ino: facts.st_size for _, facts in self._cached()}
        copied = sum(size for _, root in self._roots() for _, links, size in _inodes(root) if links == 1)
        return sum(cached.values()) + copied

    def _let_go(self, besides: Path | None = None) -> bool:
        """Remove the staged bundle that was unused for longest, and what was fetched for it. False when all is used."""
        with self._lock:
            free = [(used, root) for used, root in self._roots() if root.name not in self._holders and root != besides]
            for _, root in sorted(free):
                with contextlib.suppress(BlockingIOError), _lock_now(root.with_suffix(".lock")):
                    inodes = {inode for inode, _, _ in _inodes(root)}
                    shutil.rmtree(root)
                    for path, facts in self._cached():
                        # Another bundle may have it too.
                        if facts.st_ino in inodes and facts.st_nlink == 1:
                            path.unlink(missing_ok=True)
                    return True
        return False

    def _forget_fetched(self, bundle: Bundle) -> None:
        """Remove what was fetched for a bundle that finds no room: it would be in the way of every other one."""
        for file in bundle.files:
            path = self._cache.path(file.sha256)
            if _is_regular(path) and path.stat().st_nlink == 1:
                path.unlink()

    def _full(self, size: int, error: OSError) -> DiskFull:
        left = shutil.disk_usage(self._staged).free
        return DiskFull(
            f"{error.strerror}: the bundle's files are {size / 1e9:,.3f} GB, {left / 1e9:,.3f} GB are free in "
            f"{self._staged.parent}, and running jobs use the {self.used_bytes() / 1e9:,.3f} GB that are staged there; "
            "make room on that disk, or end what runs",
            cause=str(Cause.DISK_FULL),
        )

    def _roots(self) -> list[tuple[float, Path]]:
        """Return the folders of staged bundles, each behind the time at which it was used last."""
        found = _facts(path for path in self._staged.iterdir() if not path.name.startswith(PARTIAL))
        return [(facts.st_mtime, path) for path, facts in found if stat.S_ISDIR(facts.st_mode)]

    def _cached(self) -> list[tuple[Path, os.stat_result]]:
        return [(path, facts) for path, facts in _facts(self._cache.folder.glob("??/*")) if stat.S_ISREG(facts.st_mode)]

    def tidy(self) -> None:
        """Remove what a killed process left half done. For the only process that uses the folder, at its start."""
        for folder in self._staged.glob(f"{PARTIAL}*"):
            shutil.rmtree(folder)
        for file in self._incoming.iterdir():
            file.unlink()

    def _build(self, bundle: Bundle, root: Path, fetch: Fetch, progress: Callable[[str], None]) -> None:
        for left in (*self._staged.glob(f"{PARTIAL}{root.name}-*"), root):
            if left.exists():
                shutil.rmtree(left)
        partial = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{root.name}-", dir=self._staged))
        try:
            total, before = sum(file.size for file in bundle.files), 0
            for file in bundle.files:

                def moved(count: int, file: File = file, before: int = before) -> None:
                    progress(f"staged {(before + count) / 1e6:,.0f} of {total / 1e6:,.0f} MB: {file.path}")

                moved(0)
                target = partial / file.path
                target.parent.mkdir(parents=True, exist_ok=True)
                self._place(file, target, fetch, moved)
                before += file.size
            for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
                folder.chmod(0o755)
                _sync(folder)
            partial.rename(root)
            _sync(self._staged)
        finally:
            if partial.exists():
                shutil.rmtree(partial)

    def _place(self, file: File, target: Path, fetch: Fetch, moved: Callable[[int], None]) -> None:
        stored = self._store.path(file.sha256) if self._store is not None else None
        here = stored if stored is not None and _is_regular(stored) else None
        if here is not None and _link(here, target):
            return
        cached = self._cache.path(file.sha256)
        while True:
            if not _is_regular(cached):
                if here is not None:
                    self._cache.take(here, file.sha256, limit=file.size, moved=moved)
                else:
                    self._cache.put(_told(fetch(file.sha256), moved), file.sha256, limit=file.size)
            # Another job that made room may have let it go meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if not _link(cached, target):
                    shutil.copyfile(cached, target)
                    target.chmod(READ_ONLY)
                    cached.unlink(missing_ok=True)
                return


def _told(chunks: Iterable[bytes], moved: Callable[[int], None]) -> Iterator[bytes]:
    done = 0
    for chunk in chunks:
        yield chunk
        done += len(chunk)
        moved(done)


def _link(source: Path, target: Path) -> bool:
    """Link a file; False where the file systems or their rules do not allow it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _CANNOT_LINK:
            return False
        raise
    return True


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _is_whole(root: Path, bundle: Bundle) -> bool:
    """Tell, without reading a byte, whether a folder holds the bundle's files and nothing else."""
    if not root.is_dir():
        return False
    sizes = {file.path: file.size for file in bundle.files}
    folders = {parent.as_posix() for file in bundle.files for parent in PurePosixPath(file.path).parents} - {"."}
    for path in root.rglob("*"):
        name, facts = path.relative_to(root).as_posix(), path.lstat()
        if stat.S_ISDIR(facts.st_mode):
            if name not in folders:
                return False
        elif not stat.S_ISREG(facts.st_mode) or facts.st_size != sizes.pop(name, None):
            return False
    return not sizes


def _inodes(root: Path) -> Iterator[tuple[int, int, int]]:
    """Yield inode, links and size of each file under a folder."""
    # Unlike a glob, a walk passes by a folder that is gone meanwhile.
    for _, facts in _facts(Path(folder, name) for folder, _, names in os.walk(root) for name in names):
        if stat.S_ISREG(facts.st_mode):
            yield facts.st_ino, facts.st_nlink, facts.st_size


def _facts(paths: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield paths with what the disk says of them; what another job lets go of meanwhile is left out."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            yield path, path.lstat()


@contextlib.contextmanager
def _lock_now(path: Path) -> Iterator[None]:
    """Hold a lock that nobody has. Raises BlockingIOError."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Looked at again and again rather than waited for, so that a job that is over stops waiting.
                progress("waiting for another job that stages the same bundle")
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
