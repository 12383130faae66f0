"""Blobs in a folder: `sha256/ab/abcdef…`, read-only files that come into being whole."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from registry.storage.incoming import READ_ONLY, Incoming, Spool
from registry.storage.verified import verified
from schemas.common import DIGEST_PATTERN
from schemas.problems import NotFound, Unavailable

_DIGEST = re.compile(DIGEST_PATTERN)


class LocalBlobs(Spool):
    """A content-addressed folder on one file system."""

    def __init__(self, directory: Path) -> None:
        """Use a folder; it is made when it is missing."""
        super().__init__(directory / "incoming")
        self._root = directory / "sha256"
        self._root.mkdir(exist_ok=True)

    @property
    def folder(self) -> Path:
        """The folder of the blobs, each in one of its own folders."""
        return self._root

    def _receive(self, path: Path, file: BinaryIO, *, is_kept: bool) -> Incoming:
        return _IncomingFile(self, path, file, is_kept=is_kept)

    def take(self, path: Path, digest: str, *, limit: int, moved: Callable[[int], None] = lambda _: None) -> int:
        """Store a file of this machine under its digest and return its size, without a copy where that can be.

        `moved` is told now and then how many bytes that is; what it raises ends this, and leaves nothing.

        Raises:
            DigestMismatch: it has another digest.
            TooLarge: it has more than `limit` bytes.
            OSError: it is no regular file or cannot be read, or there is no room.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with os.fdopen(os.open(path, flags), "rb", buffering=0) as source, self.stage() as staged:
            staged.draw(source, limit=limit, moved=moved)
            staged.seal(digest)
            staged.place()
            return staged.size

    def open(self, digest: str, *, is_verified: bool = False) -> BinaryIO:
        """Return a blob for reading; see `registry.storage.Blobs`. Raises NotFound when it is not there."""
        try:
            file = self.path(digest).open("rb")
        except FileNotFoundError:
            raise NotFound(f"there is no blob {digest}") from None
        return verified(file, digest) if is_verified else file

    def exists(self, digest: str) -> bool:
        """Tell whether a blob is there."""
        return self.path(digest).is_file()

    def is_intact(self, digest: str) -> bool:
        """Tell whether a blob is there and has the bytes that it is named after. Reads all of it."""
        return holds(self.path(digest), digest)

    def lost(self, digests: Sequence[str]) -> list[str]:
        """Return those of these digests whose blobs are not there."""
        return [digest for digest in digests if not self.exists(digest)]

    def digests(self, older_than: float) -> Iterator[str]:
        """Yield, in order, the files in the store that were last written before a time, in seconds since 1970."""
        for folder in sorted(self._root.iterdir()):
            for path in sorted(folder.iterdir()):
                digest = f"sha256:{path.name}"
                is_blob = _DIGEST.fullmatch(digest) and self.path(digest) == path
                with suppress(FileNotFoundError):  # it may go meanwhile
                    if is_blob and path.stat().st_mtime < older_than:
                        yield digest

    def remove(self, digest: str) -> None:
        """Remove a blob for good. Nothing happens when it is not there."""
        self.path(digest).unlink(missing_ok=True)

    def check(self) -> None:
        """Return when the folder is there. Raises Unavailable."""
        if not self._root.is_dir():
            raise Unavailable("the folder of the blobs is not there")

    def close(self) -> None:
        """Give back what is held open, which is nothing."""

    def path(self, digest: str) -> Path:
        """Return the place of a blob, whether it is there or not. Raises ValueError for what is no digest."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError("a blob is named sha256: and 64 hexadecimal digits")
        hexadecimal = digest.removeprefix("sha256:")
        return self._root / hexadecimal[:2] / hexadecimal


class _IncomingFile(Incoming):
    """A file that becomes a blob by its name."""

    def __init__(self, store: LocalBlobs, path: Path, file: BinaryIO, *, is_kept: bool) -> None:
        super().__init__(path, file, is_kept=is_kept)
        self._store = store
        self._digest: str | None = None
        self._is_wanted, self._is_placed = True, False

    def seal(self, digest: str) -> None:
        self._file.flush()
        if self._hasher is None:
            with self.again() as again:
                self._hasher = hashlib.file_digest(again, "sha256")
        self._require(digest, self._hasher.hexdigest())
        # What is there and intact stays the file that it is: runners may have links to it.
        self._is_wanted = not holds(self._store.path(digest), digest)
        self.displaces = self._is_wanted and self._store.exists(digest)
        os.fsync(self._file.fileno())
        self._digest = digest

    def place(self) -> None:
        if self._digest is None:
            raise ValueError("only sealed bytes can become a blob")
        path = self._store.path(self._digest)
        if self._is_placed or (not self._is_wanted and path.is_file()):
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
        self._is_placed = True


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
