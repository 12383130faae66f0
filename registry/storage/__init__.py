"""Where blobs are kept, by digest: in a folder, or in a bucket. One contract, and one suite of tests for all."""

from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, Protocol
from uuid import UUID

from registry.settings import Settings
from registry.storage.incoming import Incoming
from registry.storage.local import LocalBlobs


class Blobs(Protocol):
    """Immutable bytes named by their SHA-256. Nothing is ever visible under a digest that it does not have.

    Every method raises Unavailable when what keeps the blobs does not answer.
    """

    def put(self, chunks: Iterable[bytes], digest: str, *, limit: int) -> int:
        """Store bytes under their digest and return their size. Storing what is there changes nothing.

        Raises:
            DigestMismatch: the bytes have another digest.
            TooLarge: there are more than `limit` bytes.
        """

    def stage(self) -> Incoming:
        """Return a new file to receive bytes in. It is gone when it is closed, unless it was placed."""

    def part(self, upload: UUID) -> Incoming | None:
        """Return the file that an upload in pieces grows in, held for one writer; None while another has it."""

    def received(self, upload: UUID) -> int:
        """Return how many bytes of an upload in pieces are there."""

    def silence(self, upload: UUID) -> float:
        """Return the seconds since an upload in pieces last grew; infinite when nothing of it is there."""

    def drop(self, upload: UUID) -> None:
        """Remove what is there of an upload in pieces."""

    def open(self, digest: str, *, is_verified: bool = False) -> BinaryIO:
        """Return a blob for reading.

        `is_verified`: the end is not reached when what was read has another digest; DigestMismatch is raised there.

        Raises:
            NotFound: it is not there.
        """

    def exists(self, digest: str) -> bool:
        """Tell whether a blob is there."""

    def is_intact(self, digest: str) -> bool:
        """Tell whether a blob is there and has the bytes that it is named after. Reads all of it."""

    def lost(self, digests: Sequence[str]) -> list[str]:
        """Return those of these digests, which are in order, whose blobs are not there."""

    def digests(self, older_than: float) -> Iterator[str]:
        """Yield, in order, what was last written before a time, in seconds since 1970."""

    def remove(self, digest: str) -> None:
        """Remove a blob for good. Nothing happens when it is not there."""

    def discard_abandoned(self, older_than_seconds: float, parts_older_than_seconds: float | None = None) -> int:
        """Remove what a crash cut off; returns how many.

        Args:
            older_than_seconds: since the last byte of a request came.
            parts_older_than_seconds: the same for uploads in pieces, which may go on later; None for the same age.
        """

    def check(self) -> None:
        """Return when blobs can be reached; takes seconds at most."""

    def close(self) -> None:
        """Give back what is held open."""


def opened(settings: Settings) -> Blobs:
    """Return the store that the settings name. Nothing is asked of a server yet."""
    if settings.storage is None:
        return LocalBlobs(settings.storage_dir)
    # The S3 client takes a tenth of a second and 30 MB; who has a folder needs neither.
    from registry.storage.s3 import S3Blobs

    return S3Blobs.at(
        settings.storage, settings.storage_dir, endpoint=settings.storage_endpoint, region=settings.storage_region
    )
