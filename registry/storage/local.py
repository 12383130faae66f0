"""Blobs in a folder: `sha256/ab/abcdef…`, read-only files that come into being whole."""

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from schemas.common import DIGEST_PATTERN
from schemas.problems import DigestMismatch, NotFound, TooLarge

_DIGEST = re.compile(DIGEST_PATTERN)
READ_ONLY = 0o444


class LocalBlobs:
    """A content-addressed folder on one file system."""

    def __init__(self, directory: Path) -> None:
        """Use a folder; it is made when it is missing."""
        self._root = directory / "sha256"
        self._incoming = directory / "incoming"
        self._root.mkdir(parents=True, exist_ok=True)
        self._incoming.mkdir(exist_ok=True)

    def discard_abandoned(self, older_than_seconds: float) -> int:
        """Remove what uploads that were cut off by a crash left behind; returns how many files."""
        oldest = time.time() - older_than_seconds
        removed = 0
        for path in self._incoming.iterdir():
            # Another process may end its upload just now.
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()
                    removed += 1
        return removed

    def put(self, chunks: Iterable[bytes], digest: str, *, limit: int) -> int:
        """Store bytes under their digest and return their size.

        They are hashed while they are written to a file of their own, which takes its place only when it is whole
        and on disk. A file that is there already stays, unless it is damaged: then the sent bytes take its place.

        Raises:
            DigestMismatch: the bytes have another digest.
            TooLarge: there are more than `limit` bytes.
        """
        path = self.path(digest)
        handle, name = tempfile.mkstemp(dir=self._incoming)
        try:
            with os.fdopen(handle, "wb") as file:
                size = _write(file, chunks, digest, limit)
                if _holds(path, digest):
                    return size
                file.flush()
                os.fchmod(file.fileno(), READ_ONLY)
                os.fsync(file.fileno())
            path.parent.mkdir(exist_ok=True)
            Path(name).replace(path)
            _sync(path.parent)
            _sync(self._root)
        finally:
            Path(name).unlink(missing_ok=True)
        return size

    def open(self, digest: str) -> BinaryIO:
        """Return a blob for reading. Raises NotFound when it is not there."""
        try:
            return self.path(digest).open("rb")
        except FileNotFoundError:
            raise NotFound(f"there is no blob {digest}") from None

    def exists(self, digest: str) -> bool:
        """Tell whether a blob is there."""
        return self.path(digest).is_file()

    def path(self, digest: str) -> Path:
        """Return the place of a blob, whether it is there or not. Raises ValueError for what is no digest."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError("a blob is named sha256: and 64 hexadecimal digits")
        hexadecimal = digest.removeprefix("sha256:")
        return self._root / hexadecimal[:2] / hexadecimal


def _holds(path: Path, digest: str) -> bool:
    """Tell whether a file is there and has the bytes that it is named after."""
    try:
        with path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == digest
    except FileNotFoundError:
        return False


def _write(file: BinaryIO, chunks: Iterable[bytes], digest: str, limit: int) -> int:
    size, seen = 0, hashlib.sha256()
    for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise TooLarge(f"a blob holds at most {limit} bytes", limit=limit)
        seen.update(chunk)
        file.write(chunk)
    if f"sha256:{seen.hexdigest()}" != digest:
        raise DigestMismatch(
            f"{size} bytes were received, and their digest is sha256:{seen.hexdigest()}, not {digest}",
            expected=digest,
            received=f"sha256:{seen.hexdigest()}",
            size=size,
        )
    return size


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
