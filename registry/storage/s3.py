"""Blobs in a bucket: `PREFIX/sha256/ab/abcdef…`, objects that come into being whole.

Bytes arrive in a folder on this machine. When they are known to be the right ones they are sent: small ones at once,
large ones in parts, which show under no key before they are completed. Every part carries its SHA-256.
"""

import hashlib
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final, Self

import structlog

from gates.bucket import Address, Bucket, Part
from registry.storage.incoming import Incoming, Spool
from registry.storage.verified import verified
from schemas.common import DIGEST_PATTERN
from schemas.problems import NotFound, Problem, Unavailable

AT_ONCE_BYTES: Final = 8 << 20
"""A blob of this size or less is sent in one request."""
PART_BYTES: Final = 16 << 20
MOST_PARTS: Final = 10_000
IN_FLIGHT: Final = 4
"""Parts of one blob that are sent at once, each from memory."""
_PIECE = 1 << 20

_DIGEST = re.compile(DIGEST_PATTERN)

log = structlog.get_logger(__name__)


class S3Blobs(Spool):
    """A content-addressed prefix of one bucket, and a folder for what arrives.

    Several processes may use one bucket. An upload in pieces goes on only where its folder is.
    """

    def __init__(self, bucket: Bucket, prefix: str, folder: Path, *, part_bytes: int = PART_BYTES) -> None:
        """Use a bucket, which has to be there, and a folder, which is made when it is missing.

        Args:
            bucket: that keeps the blobs.
            prefix: of their keys; empty, or with `/` at its end.
            folder: for what arrives.
            part_bytes: least size of a part; a blob of more than 10,000 of them has larger ones.
        """
        super().__init__(folder / "incoming")
        self.bucket, self.part_bytes = bucket, part_bytes
        self._root = f"{prefix}sha256/"

    @classmethod
    def at(cls, address: str, folder: Path, *, endpoint: str | None, region: str | None) -> Self:
        """Use `s3://bucket/prefix`; see `gates.bucket.Bucket`. Raises ValueError for what is no address."""
        place = Address.parse(address)
        return cls(Bucket(place.bucket, endpoint=endpoint, region=region), place.prefix, folder)

    def _receive(self, path: Path, file: BinaryIO, *, is_kept: bool) -> Incoming:
        return _IncomingObject(self, path, file, is_kept=is_kept)

    def open(self, digest: str, *, is_verified: bool = False) -> BinaryIO:
        """Return a blob for reading; see `registry.storage.Blobs`. Raises NotFound when it is not there."""
        try:
            file = self.bucket.open(self.key(digest))
        except NotFound:
            raise NotFound(f"there is no blob {digest}") from None
        return verified(file, digest) if is_verified else file

    def exists(self, digest: str) -> bool:
        """Tell whether a blob is there."""
        return self.bucket.size(self.key(digest)) is not None

    def is_intact(self, digest: str) -> bool:
        """Tell whether a blob is there and has the bytes that it is named after. Reads all of it."""
        hasher = hashlib.sha256()
        try:
            with self.bucket.open(self.key(digest)) as file:
                while piece := file.read(_PIECE):
                    hasher.update(piece)
        except NotFound:
            return False
        return f"sha256:{hasher.hexdigest()}" == digest

    def lost(self, digests: Sequence[str]) -> list[str]:
        """Return those of these digests, which are in order, whose blobs are not there: by listings, not one by one."""
        if not digests:
            return []
        found: set[str] = set()
        last = self.key(digests[-1])
        # From just before the first: its key without the last digit sorts before it.
        for one in self.bucket.list(self._root, after=self.key(digests[0])[:-1]):
            if one.key > last:
                break
            found.add(one.key)
        return [digest for digest in digests if self.key(digest) not in found]

    def digests(self, older_than: float) -> Iterator[str]:
        """Yield, in order, what was last written before a time, in seconds since 1970 by the server's clock."""
        for one in self.bucket.list(self._root):
            digest = f"sha256:{one.key.rsplit('/', 1)[-1]}"
            is_blob = _DIGEST.fullmatch(digest) and self.key(digest) == one.key
            if is_blob and one.modified.timestamp() < older_than:
                yield digest

    def remove(self, digest: str) -> None:
        """Remove a blob for good, with every older version of its object."""
        self.bucket.remove(self.key(digest))

    def discard_abandoned(self, older_than_seconds: float, parts_older_than_seconds: float | None = None) -> int:
        """Remove what a crash cut off, here and in the bucket; returns how many files and uploads."""
        removed = super().discard_abandoned(older_than_seconds, parts_older_than_seconds)
        for upload in self.bucket.unfinished(self._root):
            if upload.touched.timestamp() < time.time() - older_than_seconds:
                self.bucket.abort(upload.key, upload.upload)
                removed += 1
        return removed

    def check(self) -> None:
        """Return when the bucket can be listed. Raises Unavailable."""
        self.bucket.check()

    def close(self) -> None:
        """Give the connections to the server back."""
        self.bucket.close()

    def key(self, digest: str) -> str:
        """Return the key of a blob, whether it is there or not. Raises ValueError for what is no digest."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError("a blob is named sha256: and 64 hexadecimal digits")
        hexadecimal = digest.removeprefix("sha256:")
        return f"{self._root}{hexadecimal[:2]}/{hexadecimal}"


class _IncomingObject(Incoming):
    """A file whose bytes become an object."""

    def __init__(self, store: S3Blobs, path: Path, file: BinaryIO, *, is_kept: bool) -> None:
        super().__init__(path, file, is_kept=is_kept)
        self._store = store
        self._digest: str | None = None
        self._delivery: _Delivery | None = None

    def seal(self, digest: str) -> None:
        self._file.flush()
        if self._hasher is not None:
            # Nothing is sent that is known to be wrong.
            self._require(digest, self._hasher.hexdigest())
        self._give_up()
        self._digest = None
        if not self._is_there(digest):
            self._delivery = self._sent(digest)
        elif self._hasher is None:
            with self.again() as again:
                self._require(digest, hashlib.file_digest(again, "sha256").hexdigest())
        self._digest = digest

    def place(self) -> None:
        if self._digest is None:
            raise ValueError("only sealed bytes can become a blob")
        if self._delivery is None:
            if self._store.exists(self._digest):
                return
            # It was there, and somebody has cleared it up since.
            self._delivery = self._sent(self._digest)
        self._delivery.finish()

    def close(self) -> None:
        """Let go of the file; one that is not kept is removed, and so is what of it was sent and not placed."""
        try:
            self._give_up()
        finally:
            super().close()

    def _is_there(self, digest: str) -> bool:
        """Tell whether the bucket has the right bytes, which then stay: another object would be another version."""
        size = self._store.bucket.size(self._store.key(digest))
        is_there = size == self.size and self._store.is_intact(digest)
        self.displaces = size is not None and not is_there
        return is_there

    def _sent(self, digest: str) -> "_Delivery":
        delivery = _Delivery(self._store, digest)
        with self.again() as file:
            try:
                self._require(digest, delivery.send(file, self.size))
            except BaseException:
                delivery.give_up()
                raise
        return delivery

    def _give_up(self) -> None:
        if self._delivery is not None:
            self._delivery.give_up()
        self._delivery = None


class _Delivery:
    """Bytes on their way to the bucket: they are sent, and then finished or given up."""

    def __init__(self, store: S3Blobs, digest: str) -> None:
        self._store, self._bucket = store, store.bucket
        self._digest, self._key = digest, store.key(digest)
        self._raw: bytes | None = None
        self._upload: str | None = None
        self._parts: list[Part] = []

    def send(self, file: BinaryIO, size: int) -> str:
        """Send what is larger than one request takes, and return the SHA-256 of all, in hexadecimal."""
        if size <= AT_ONCE_BYTES:
            self._raw = file.read()
            return hashlib.sha256(self._raw).hexdigest()
        length = max(self._store.part_bytes, -(-size // MOST_PARTS))
        hasher = hashlib.sha256()
        self._upload = self._bucket.begin(self._key)
        under_way: deque[Future[Part]] = deque()
        pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="s3-part")
        try:
            while chunk := file.read(length):
                hasher.update(chunk)
                if len(under_way) == IN_FLIGHT:
                    self._parts.append(under_way.popleft().result())
                number = len(self._parts) + len(under_way) + 1
                under_way.append(pool.submit(self._bucket.part, self._key, self._upload, number, chunk))
            self._parts += [future.result() for future in under_way]
        except NotFound as problem:
            raise Unavailable(f"the upload of blob {self._digest} was taken away on the S3 server") from problem
        finally:
            pool.shutdown(cancel_futures=True)
        return hasher.hexdigest()

    def finish(self) -> None:
        """Let the bytes be the object, at once. Repeating it changes nothing."""
        if self._raw is not None:
            is_confirmed = self._bucket.put(self._key, self._raw)
        elif self._upload is not None:
            is_confirmed = self._complete(self._upload)
        else:
            return
        if not is_confirmed and not self._store.is_intact(self._digest):
            self._bucket.remove(self._key)
            raise Unavailable(f"the S3 server did not keep the bytes of blob {self._digest} that it was sent")
        self._raw = self._upload = None

    def _complete(self, upload: str) -> bool:
        try:
            self._bucket.complete(self._key, upload, self._parts)
        except NotFound:
            # An answer may have been lost on its way: then it is complete, which only its bytes can tell.
            return False
        return all(part.is_confirmed for part in self._parts)

    def give_up(self) -> None:
        """Take away what was sent and is not finished. What cannot be is cleared up later."""
        self._raw = None
        if self._upload is not None:
            try:
                self._bucket.abort(self._key, self._upload)
            except Problem as problem:
                log.warning("parts_not_removed", blob=self._digest, error=str(problem))
        self._upload = None
