"""Bytes on their way in: a file that nobody sees under a digest before it is whole, verified and on disk."""

import fcntl
import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self

from schemas.problems import DigestMismatch, TooLarge

READ_ONLY = 0o444


class Store(Protocol):
    """Where a blob of a digest belongs."""

    def path(self, digest: str) -> Path:
        """Return its place."""


class Incoming:
    """One file that receives bytes. One thread at a time; close it, or use it as a context.

    `size` is the count of bytes in it.
    """

    def __init__(self, store: Store, path: Path, file: BinaryIO, *, is_kept: bool) -> None:
        """Write at the end of `file`, which lies at `path`. `is_kept`: it outlives its closing."""
        self._store, self._path, self._file = store, path, file
        self._is_kept = is_kept
        self.size = file.seek(0, os.SEEK_END)
        # Bytes of an earlier request were not seen here: those are read again, once, when all is there.
        self._hasher = None if self.size else hashlib.sha256()
        self._digest: str | None = None
        self._is_wanted = True

    def write(self, chunk: bytes, *, limit: int) -> None:
        """Take bytes. Raises TooLarge, and takes nothing, when there would be more than `limit` of them."""
        if self.size + len(chunk) > limit:
            raise TooLarge(f"more than the {limit} bytes that may come were sent", limit=limit)
        self._file.write(chunk)
        self.size += len(chunk)
        if self._hasher is not None:
            self._hasher.update(chunk)

    def cut(self, size: int) -> None:
        """Forget every byte after the first `size`."""
        self._file.flush()
        self._file.truncate(size)
        self.size = self._file.seek(0, os.SEEK_END)
        self._hasher = None

    def sync(self) -> None:
        """Return when what was written is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def seal(self, digest: str) -> None:
        """Verify the bytes and bring them to disk. May take as long as reading all of them.

        Raises:
            DigestMismatch: they have another digest.
        """
        self._file.flush()
        if self._hasher is None:
            with self._path.open("rb") as again:
                self._hasher = hashlib.file_digest(again, "sha256")
        found = f"sha256:{self._hasher.hexdigest()}"
        if found != digest:
            raise DigestMismatch(
                f"{self.size} bytes were received, and their digest is {found}, not {digest}",
                expected=digest,
                received=found,
                size=self.size,
            )
        # What is there and intact stays the file that it is: runners may have links to it.
        self._is_wanted = not holds(self._store.path(digest), digest)
        os.fsync(self._file.fileno())
        self._digest = digest

    def place(self) -> None:
        """Let the sealed bytes be the blob of their digest, at once. Repeating it changes nothing.

        Raises:
            ValueError: they are not sealed.
        """
        if self._digest is None:
            raise ValueError("only sealed bytes can become a blob")
        path = self._store.path(self._digest)
        if not self._is_wanted and path.is_file():
            return
        path.parent.mkdir(exist_ok=True)
        beside = self._path
        if self._is_kept:
            # The part stays until what it belongs to is recorded: whoever is killed in between goes on from it.
            beside = self._path.with_suffix(".placed")
            beside.unlink(missing_ok=True)
            try:
                os.link(self._path, beside)
            except OSError:
                beside = self._path  # a file system without hard links
        os.fchmod(self._file.fileno(), READ_ONLY)
        beside.replace(path)
        _sync(path.parent)
        _sync(path.parent.parent)

    def remove(self) -> None:
        """Take the file away. What was placed stays."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file; one that is not kept is removed."""
        if not self._is_kept:
            self.remove()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def locked(path: Path) -> BinaryIO | None:
    """Open a file to be grown, made when it is missing, locked against other writers; None while another has it."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            file: BinaryIO = os.fdopen(descriptor, "r+b")
        except PermissionError:
            # It was sealed, and its process killed before that was recorded: nothing is left to be written.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            file = os.fdopen(descriptor, "rb")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        if _is_at(path, descriptor):
            return file
        # It was finished or removed between opening and locking.
        file.close()


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        there, mine = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def holds(path: Path, digest: str) -> bool:
    """Tell whether a file is there and has the bytes of a digest."""
    try:
        with path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == digest
    except FileNotFoundError:
        return False


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
