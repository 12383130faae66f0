"""Bytes on their way in: a file on this machine that nobody sees as a blob before it is whole and verified."""

import fcntl
import hashlib
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self
from uuid import UUID

from registry.storage.blocks import Blocks
from schemas.problems import DigestMismatch, TooLarge

READ_ONLY = 0o444
_TOLD_BYTES = 32 << 20
_FICLONE = 0x40049409
"""The kernel's request to let a file share the blocks of another (linux/fs.h)."""
PART = ".part"
"""Ending of a file that an upload in pieces grows in; the others are of one request each."""


class Incoming(ABC):
    """One file that receives bytes. One thread at a time; close it, or use it as a context.

    `size` is the count of bytes in it. `displaces` says, once they are sealed, that the store has other bytes under
    their digest, which they will take the place of.
    """

    def __init__(self, path: Path, file: BinaryIO, *, is_kept: bool) -> None:
        """Write at the end of `file`, which lies at `path`. `is_kept`: it outlives its closing."""
        self._path, self._file = path, file
        self._is_kept = is_kept
        self.displaces = False
        self.size = file.seek(0, os.SEEK_END)
        # Bytes of an earlier request were not seen here: those are read again, once, when all is there.
        self._hasher = None if self.size else hashlib.sha256()

    def write(self, chunk: bytes, *, limit: int) -> None:
        """Take bytes. Raises TooLarge, and takes nothing, when there would be more than `limit` of them."""
        if self.size + len(chunk) > limit:
            raise TooLarge(f"more than the {limit} bytes that may come were sent", limit=limit)
        self._file.write(chunk)
        self.size += len(chunk)
        if self._hasher is not None:
            self._hasher.update(chunk)

    def draw(self, source: BinaryIO, *, limit: int, moved: Callable[[int], None] = lambda _: None) -> None:
        """Take all bytes of an open file: shared with it where the file system can do that, otherwise copied.

        They are hashed on the way; what is shared, once it is here. `moved` is told now and then how many bytes that
        is; what it raises ends this.

        Raises:
            TooLarge: there are more than `limit` bytes.
        """
        if not self.size and _cloned(source, self._file):
            self._take_over(limit)
            moved(self.size)
            return
        self._file.flush()
        told = self.size
        with Blocks(self._file, self.size) as blocks:
            while block := blocks.fill(source):
                if self.size + len(block) > limit:
                    raise TooLarge(f"more than the {limit} bytes that may come were there", limit=limit)
                blocks.write(block)
                self.size += len(block)
                if self._hasher is not None:
                    self._hasher.update(block)
                if self.size - told >= _TOLD_BYTES:
                    moved(self.size)
                    told = self.size
            blocks.end()
        moved(self.size)
        self._file.seek(0, os.SEEK_END)

    def _take_over(self, limit: int) -> None:
        """Count the bytes that came by sharing. What they are is read here: the source may change, these do not."""
        size = self._file.seek(0, os.SEEK_END)
        if size > limit:
            self._file.truncate(0)
            self._file.seek(0)
            raise TooLarge(f"more than the {limit} bytes that may come were there", limit=limit)
        self.size, self._hasher = size, None

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

    def again(self) -> BufferedReader:
        """Open what was written from its beginning, also where somebody has taken the file's name away meanwhile."""
        return Path(f"/proc/self/fd/{self._file.fileno()}").open("rb")

    @abstractmethod
    def seal(self, digest: str) -> None:
        """Verify the bytes and bring them where only `place` is left. May take as long as reading all of them.

        Raises:
            DigestMismatch: they have another digest.
        """

    @abstractmethod
    def place(self) -> None:
        """Let the sealed bytes be the blob of their digest, at once. Repeating it changes nothing.

        Raises:
            ValueError: they are not sealed.
        """

    def _require(self, digest: str, found: str) -> None:
        """Return when the bytes have this digest. `found` is their SHA-256, in hexadecimal."""
        if f"sha256:{found}" != digest:
            raise DigestMismatch(
                f"{self.size} bytes were received, and their digest is sha256:{found}, not {digest}",
                expected=digest,
                received=f"sha256:{found}",
                size=self.size,
            )

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


class Spool(ABC):
    """The folder that bytes arrive in, whatever they are kept in afterwards.

    Uploads in pieces go on in any process that has the folder: their offset is the length of their file.
    """

    def __init__(self, folder: Path) -> None:
        """Use a folder; it is made when it is missing."""
        self._incoming = folder
        self._incoming.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def _receive(self, path: Path, file: BinaryIO, *, is_kept: bool) -> Incoming:
        """Return what receives bytes at the end of a file."""

    def stage(self) -> Incoming:
        """Return a new file to receive bytes in. It is gone when it is closed, unless it was placed."""
        handle, name = tempfile.mkstemp(dir=self._incoming)
        return self._receive(Path(name), os.fdopen(handle, "w+b"), is_kept=False)

    def part(self, upload: UUID) -> Incoming | None:
        """Return the file that an upload in pieces grows in, held for one writer; None while another has it.

        It stays when it is closed. The hold ends with the process, however that ends.
        """
        path = self._part(upload)
        file = locked(path)
        return None if file is None else self._receive(path, file, is_kept=True)

    def received(self, upload: UUID) -> int:
        """Return how many bytes of an upload in pieces are there."""
        try:
            return self._part(upload).stat().st_size
        except FileNotFoundError:
            return 0

    def silence(self, upload: UUID) -> float:
        """Return the seconds since an upload in pieces last grew; infinite when nothing of it is there."""
        try:
            return max(0.0, time.time() - self._part(upload).stat().st_mtime)
        except FileNotFoundError:
            return float("inf")

    def drop(self, upload: UUID) -> None:
        """Remove what is there of an upload in pieces."""
        self._part(upload).unlink(missing_ok=True)

    def put(self, chunks: Iterable[bytes], digest: str, *, limit: int) -> int:
        """Store bytes under their digest and return their size.

        They are hashed while they are written to a file of their own, and take their place only when they are whole.
        A blob that is there already stays, unless it is damaged: then the sent bytes take its place.

        Raises:
            DigestMismatch: the bytes have another digest.
            TooLarge: there are more than `limit` bytes.
        """
        with self.stage() as staged:
            for chunk in chunks:
                staged.write(chunk, limit=limit)
            staged.seal(digest)
            staged.place()
            return staged.size

    def discard_abandoned(self, older_than_seconds: float, parts_older_than_seconds: float | None = None) -> int:
        """Remove what a crash cut off; returns how many files.

        Args:
            older_than_seconds: since the last byte of a request's file.
            parts_older_than_seconds: the same for uploads in pieces, which may go on later; None for the same age.
        """
        removed, now = 0, time.time()
        for path in self._incoming.iterdir():
            age = older_than_seconds
            if path.suffix == PART and parts_older_than_seconds is not None:
                age = parts_older_than_seconds
            # Another process may end its upload just now.
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < now - age:
                    path.unlink()
                    removed += 1
        return removed

    def _part(self, upload: UUID) -> Path:
        return self._incoming / f"{upload}{PART}"


def _cloned(source: BinaryIO, target: BinaryIO) -> bool:
    """Let an empty file share the bytes of another; False where the file system cannot, or they lie on two."""
    try:
        fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError:
        return False
    return True


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
