"""Blobs in a folder: `sha256/ab/abcdef…`, read-only files that come into being whole."""

import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

from registry.storage.incoming import Incoming, holds, locked
from schemas.common import DIGEST_PATTERN
from schemas.problems import NotFound

_DIGEST = re.compile(DIGEST_PATTERN)
PART = ".part"
"""Ending of a file that an upload in pieces grows in; the others are of one request each."""


class LocalBlobs:
    """A content-addressed folder on one file system."""

    def __init__(self, directory: Path) -> None:
        """Use a folder; it is made when it is missing."""
        self._root = directory / "sha256"
        self._incoming = directory / "incoming"
        self._root.mkdir(parents=True, exist_ok=True)
        self._incoming.mkdir(exist_ok=True)

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

    def stage(self) -> Incoming:
        """Return a new file to receive bytes in. It is gone when it is closed, unless it was placed."""
        handle, name = tempfile.mkstemp(dir=self._incoming)
        return Incoming(self, Path(name), os.fdopen(handle, "w+b"), is_kept=False)

    def part(self, upload: UUID) -> Incoming | None:
        """Return the file that an upload in pieces grows in, held for one writer; None while another has it.

        It stays when it is closed. The hold ends with the process, however that ends.
        """
        path = self._part(upload)
        file = locked(path)
        return None if file is None else Incoming(self, path, file, is_kept=True)

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

        They are hashed while they are written to a file of their own, which takes its place only when it is whole
        and on disk. A file that is there already stays, unless it is damaged: then the sent bytes take its place.

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

    def open(self, digest: str) -> BinaryIO:
        """Return a blob for reading. Raises NotFound when it is not there."""
        try:
            return self.path(digest).open("rb")
        except FileNotFoundError:
            raise NotFound(f"there is no blob {digest}") from None

    def exists(self, digest: str) -> bool:
        """Tell whether a blob is there."""
        return self.path(digest).is_file()

    def files(self, older_than: float) -> Iterator[str]:
        """Yield the digests of the files in the store that were last written before a time, in seconds since 1970."""
        for folder in sorted(self._root.iterdir()):
            for path in sorted(folder.iterdir()):
                with suppress(FileNotFoundError):  # it may go meanwhile
                    if _DIGEST.fullmatch(f"sha256:{path.name}") and path.stat().st_mtime < older_than:
                        yield f"sha256:{path.name}"

    def is_intact(self, digest: str) -> bool:
        """Tell whether a blob is there and has the bytes that it is named after. Reads all of it."""
        return holds(self.path(digest), digest)

    def path(self, digest: str) -> Path:
        """Return the place of a blob, whether it is there or not. Raises ValueError for what is no digest."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError("a blob is named sha256: and 64 hexadecimal digits")
        hexadecimal = digest.removeprefix("sha256:")
        return self._root / hexadecimal[:2] / hexadecimal

    def _part(self, upload: UUID) -> Path:
        return self._incoming / f"{upload}{PART}"
