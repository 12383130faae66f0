"""Sending a file: small ones in one request, large ones in pieces that go on where they were cut."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from registry.client.transport import Transport
from schemas.api import StoredBlob, Upload, UploadCreate
from schemas.problems import (
    DigestMismatch,
    NotFound,
    OffsetMismatch,
    Problem,
    TooManyRequests,
    TooSlow,
    Unavailable,
)

CHUNK_BYTES = 1 << 20
PIECES_FROM_BYTES = 32 << 20
"""A file of this size or more is sent in pieces."""
PIECE_BYTES = 64 << 20
PATIENCE_SECONDS = 120.0
PAUSES_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0)

Progress = Callable[[int], None]
"""Called with the count of bytes that moved; a negative count for bytes that did and have to be sent again."""

_PASSING = (Unavailable, TooSlow, TooManyRequests, OffsetMismatch, NotFound)
"""What may be otherwise in a moment: the connection, the service, another who sends the same blob."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A blob that the service has, and what it took."""

    digest: str
    size: int
    sent: int
    """Bytes that went over the wire, also those that went twice."""
    resumed_at: int
    """Bytes of it that an earlier upload had brought there."""


class Uploader:
    """Sends files, in pieces of `piece` bytes when they have `in_pieces_from` bytes or more.

    `patience_seconds` is how long an upload is tried again while not one more byte arrives.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        in_pieces_from: int = PIECES_FROM_BYTES,
        piece: int = PIECE_BYTES,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._transport, self._from, self._piece = transport, in_pieces_from, piece
        self._patience_seconds = patience_seconds

    def upload(self, digest: str, path: Path, progress: Progress | None) -> Sent:
        """Send a file; see `registry.client.storage.Blobs.upload`."""
        with _opened(path) as (file, size):
            sending = _Sending(path.name, digest, size, file, progress)
            if size < self._from:
                return self._whole(sending)
            return self._in_pieces(sending)

    def _whole(self, sending: "_Sending") -> Sent:
        patience = _Patience(self._patience_seconds)
        headers = {"content-length": str(sending.size)}
        while True:
            sending.go_on_at(0)
            chunks = sending.chunks(sending.size)
            try:
                answer = self._transport.send(
                    "PUT", f"/v1/blobs/{sending.digest}", body=chunks, headers=headers, is_slow=True
                )
            except (Unavailable, TooSlow, TooManyRequests) as problem:
                patience.spend(problem)
                continue
            stored = self._transport.parse(StoredBlob, answer)
            return Sent(stored.digest, stored.size, sending.sent, 0)

    def _in_pieces(self, sending: "_Sending") -> Sent:
        patience = _Patience(self._patience_seconds)
        resumed_at: int | None = None
        is_doubtful = False
        while True:
            try:
                upload = self._begin(sending)
                resumed_at = upload.offset if resumed_at is None else resumed_at
                while not upload.is_complete:
                    patience.note(upload.offset)
                    if is_doubtful:
                        # The request that was cut may hold it still: nothing is sent before it is known to be free.
                        upload, is_doubtful = self._next(sending, upload, 0), False
                        continue
                    upload = self._next(sending, upload, self._piece)
            except _PASSING as problem:
                is_doubtful = True
                patience.spend(problem)
                continue
            sending.go_on_at(sending.size)
            return Sent(sending.digest, sending.size, sending.sent, resumed_at or 0)

    def _begin(self, sending: "_Sending") -> Upload:
        body = UploadCreate(digest=sending.digest, size=sending.size)
        # Asked twice it is the same upload.
        return self._transport.parse(Upload, self._transport.send("POST", "/v1/uploads", body=body, is_once=True))

    def _next(self, sending: "_Sending", upload: Upload, most: int) -> Upload:
        sending.go_on_at(upload.offset)
        length = min(most, sending.size - upload.offset)
        headers = {
            "content-length": str(length),
            "content-type": "application/partial-upload",
            "upload-offset": str(upload.offset),
        }
        answer = self._transport.send(
            "PATCH", f"/v1/uploads/{upload.id}", body=sending.chunks(length), headers=headers, is_slow=True
        )
        return self._transport.parse(Upload, answer)


class _Sending:
    """One file on its way, and what was told of it."""

    def __init__(self, name: str, digest: str, size: int, file: BinaryIO, progress: Progress | None) -> None:
        self.digest, self.size, self.sent = digest, size, 0
        self._name, self._file, self._progress = name, file, progress
        self._told = 0

    def go_on_at(self, offset: int) -> None:
        """Read on from here, and tell what the service has."""
        self._file.seek(offset)
        if self._progress is not None and offset != self._told:
            self._progress(offset - self._told)
        self._told = offset

    def chunks(self, length: int) -> Iterator[bytes]:
        """Yield the next bytes. Raises DigestMismatch when the file became shorter."""
        while length:
            chunk = self._file.read(min(CHUNK_BYTES, length))
            if not chunk:
                raise DigestMismatch(f"{self._name} became shorter while it was sent")
            length -= len(chunk)
            yield chunk
            self.sent += len(chunk)
            self._told += len(chunk)
            if self._progress is not None:
                self._progress(len(chunk))


class _Patience:
    """How long no progress is borne."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._furthest = -1
        self._tries = 0
        self._ends = time.monotonic() + seconds

    def note(self, offset: int) -> None:
        """Take note of how far it is."""
        if offset > self._furthest:
            self._furthest, self._tries = offset, 0
            self._ends = time.monotonic() + self._seconds

    def spend(self, problem: Problem) -> None:
        """Wait before the next try. Raises the problem when there have been enough."""
        pause = PAUSES_SECONDS[min(self._tries, len(PAUSES_SECONDS) - 1)]
        if time.monotonic() + pause > self._ends:
            raise problem
        self._tries += 1
        time.sleep(pause)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        yield file, os.fstat(descriptor).st_size
