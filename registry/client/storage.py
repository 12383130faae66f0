"""Blobs: bytes by digest, sent and fetched as streams and verified at both ends."""

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from registry.client.transport import Transport
from registry.client.uploads import Progress, Sent, Uploader
from schemas.api import BlobCheck, Collect, Collected, Missing, MissingBlobs, Upload
from schemas.problems import DigestMismatch, NotFound

CHUNK_BYTES = 1 << 20
MAX_ASKED = 10_000


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

    def upload(
        self, digest: str, path: Path, *, progress: Progress | None = None, uploader: Uploader | None = None
    ) -> Sent:
        """Send a file. The service stores nothing unless the bytes have this digest.

        A large file goes in pieces, and on where it stopped: after a cut connection, a restarted service, or when
        this is called again later. `uploader` says from which size on, and how long it is tried.

        Raises:
            DigestMismatch: the file has changed since it was hashed.
            TooLarge: the service takes no blob of this size.
            Unavailable, TooSlow, TooManyRequests: not one more byte arrived for so long as the uploader tries.
            OSError: the file cannot be read.
        """
        return (uploader or Uploader(self._transport)).upload(digest, path, progress)

    def uploads(self) -> Iterator[Upload]:
        """List the project's uploads that are under way, newest first."""
        return self._transport.pages(Upload, "/v1/uploads")

    def give_up(self, upload: UUID) -> None:
        """Take an upload away with what has arrived of it. Raises NotFound."""
        self._transport.send("DELETE", f"/v1/uploads/{upload}")

    def collect(self, *, is_dry_run: bool) -> Collected:
        """Clear up blobs of every project that nothing needs. Raises NotPermitted."""
        body = Collect(is_dry_run=is_dry_run)
        return self._transport.post(Collected, "/v1/blobs/collections", body, is_slow=True)

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

    def check(self, digest: str) -> BlobCheck:
        """Let the service read a blob of its store again, which quarantines what is made of it when it is damaged.

        Raises NotFound, Unavailable.
        """
        return self._transport.post(BlobCheck, f"/v1/blobs/{digest}/checks", None, is_slow=True)

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
