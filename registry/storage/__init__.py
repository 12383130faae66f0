"""Where blobs are kept, by digest. An adapter has three methods and one conformance suite."""

from collections.abc import Iterable
from typing import BinaryIO, Protocol


class Blobs(Protocol):
    """Immutable bytes named by their SHA-256. Nothing is ever visible under a digest that it does not have."""

    def put(self, chunks: Iterable[bytes], digest: str, *, limit: int) -> int:
        """Store bytes under their digest and return their size. Storing what is there changes nothing.

        Raises:
            DigestMismatch: the bytes have another digest.
            TooLarge: there are more than `limit` bytes.
        """

    def open(self, digest: str) -> BinaryIO:
        """Return a blob for reading. Raises NotFound when it is not there."""

    def exists(self, digest: str) -> bool:
        """Tell whether a blob is there."""
