"""Blobs: bytes by digest, sent and fetched as streams and verified at both ends."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from registry.client.transport import Transport
from schemas.api import Missing, MissingBlobs, StoredBlob
from schemas.problems import DigestMismatch, NotFound

CHUNK_BYTES = 1 << 20
MAX_ASKED = 10_000

Progress = Callable[[int], None]
"""Called with the count of bytes that have just moved."""


class Blobs:
    """Blobs of the token's project."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Return those of these blobs that the project lacks, in the order asked, each once."""
        asked = list(dict.fromkeys(digests))
        found: list[str] = []
        for start in range(0, len(asked), MAX_ASKED):
            body = MissingBlobs(digests=asked[start : start + MAX_ASKED])
            found += self._transport.post(Missing, "/v1/blobs/missing", body).missing
        return found

    def size(self, digest: str) -> int | None:
        """Return a blob's size in bytes, or None when the project does not hold it."""
        try:
            return int(self._transport.send("HEAD", f"/v1/blobs/{digest}").headers.get("content-length", 0))
        except NotFound:
            return None

    def upload(self, digest: str, path: Path, *, progress: Progress | None = None) -> StoredBlob:
        """Send a file. The service stores nothing unless the bytes have this digest.

        Raises:
            DigestMismatch: the file has changed since it was hashed.
            TooLarge: the service takes no blob of this size.
            OSError: the file cannot be read.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size

            def chunks() -> Iterator[bytes]:
                left = size
                while left:
                    chunk = file.read(min(CHUNK_BYTES, left))
                    if not chunk:
                        raise DigestMismatch(f"{path.name} became shorter while it was sent")
                    left -= len(chunk)
                    yield chunk
                    if progress is not None:
                        progress(len(chunk))

            headers = {"content-length": str(size)}
            answer = self._transport.send("PUT", f"/v1/blobs/{digest}", body=chunks(), headers=headers, is_slow=True)
        return self._transport.parse(StoredBlob, answer)

    def read(self, digest: str, *, limit: int) -> bytes:
        """Return a small blob's bytes, at most `limit` of them. Raises NotFound, DigestMismatch, Unavailable."""
        raw = bytearray()
        with self._transport.stream(f"/v1/blobs/{digest}") as answer:
            for chunk in answer.iter_raw(CHUNK_BYTES):
                raw += chunk
                if len(raw) > limit:
                    raise DigestMismatch(f"{digest} is larger than the {limit} bytes expected")
        _check(digest, hashlib.sha256(raw).hexdigest())
        return bytes(raw)

    @contextmanager
    def stream(self, digest: str) -> Iterator[Iterator[bytes]]:
        """Read a blob's bytes as they arrive. They are the caller's to verify. Raises NotFound, Unavailable."""
        with self._transport.stream(f"/v1/blobs/{digest}") as answer:
            yield answer.iter_raw(CHUNK_BYTES)

    def download(self, digest: str, path: Path, *, progress: Progress | None = None) -> int:
        """Fetch a blob into a file, which appears whole and verified or not at all. Returns its size.

        Raises:
            NotFound: the project does not hold it.
            DigestMismatch: what arrived has another digest.
            Unavailable: the connection broke.
            OSError: the file cannot be written.
        """
        hasher, size = hashlib.sha256(), 0
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:32]}.", suffix=".part", dir=path.parent)
        part = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file, self._transport.stream(f"/v1/blobs/{digest}") as answer:
                for chunk in answer.iter_raw(CHUNK_BYTES):
                    file.write(chunk)
                    hasher.update(chunk)
                    size += len(chunk)
                    if progress is not None:
                        progress(len(chunk))
            _check(digest, hasher.hexdigest())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return size


def _check(digest: str, found: str) -> None:
    if digest != f"sha256:{found}":
        raise DigestMismatch(f"asked for {digest}, received sha256:{found}")
