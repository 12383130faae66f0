"""Bodies that are bytes: received by the event loop, so that no thread ever waits for a slow caller."""

import errno
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread
from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from registry.api.middleware import unbounded
from registry.auth import Actor
from registry.service import Service
from registry.storage.incoming import Incoming
from schemas.problems import TooLarge, TooManyRequests, Unavailable

CHUNK_BYTES = 512 * 1024
WRITERS = 8
"""Threads that write what has arrived: each for a moment."""
SEALERS = 4
"""Threads that verify what has arrived: each for as long as reading it takes."""
BUSY_SECONDS = 2

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

ResultT = TypeVar("ResultT")


class Bodies:
    """Places for blobs that are received at once. No caller has more of them than are still free.

    So whoever comes finds one, whatever the others do: of 256, one caller takes 128, two take 85 each.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._held: Counter[object] = Counter()
        self._writers = anyio.CapacityLimiter(WRITERS)
        self._sealers = anyio.CapacityLimiter(SEALERS)

    @contextmanager
    def place(self, actor: Actor) -> Iterator[None]:
        """Hold a place for one body. Raises TooManyRequests when the caller has its share."""
        who = actor.token or actor.name
        with self._lock:
            free = self._places - self._held.total()
            if self._held[who] >= free:
                raise TooManyRequests(
                    f"{self._held[who]} blobs are being received from this token; wait for one to end",
                    retry_after_seconds=BUSY_SECONDS,
                )
            self._held[who] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[who] -= 1
                if not self._held[who]:
                    del self._held[who]

    async def write(self, call: Callable[[], ResultT]) -> ResultT:
        """Run something short in a thread. Raises Unavailable when the store is full."""
        return await _run(call, self._writers)

    async def seal(self, call: Callable[[], ResultT]) -> ResultT:
        """Run something that reads a whole blob in a thread. Raises as `write`."""
        return await _run(call, self._sealers)


async def _run(call: Callable[[], ResultT], limiter: anyio.CapacityLimiter) -> ResultT:
    try:
        return await anyio.to_thread.run_sync(call, limiter=limiter)
    except OSError as error:
        if error.errno in _FULL:
            raise Unavailable("the blob store has no room; its operator has to make some") from error
        raise


async def receive(
    request: Request,
    actor: Actor,
    service: Service,
    keep: Callable[[Incoming], ResultT],
    *,
    limit: int,
    grown: Callable[[int], None] = lambda _: None,
) -> ResultT:
    """Receive a whole blob into a file of its own and return what `keep` returns for it.

    `grown` is told before each piece, in a thread, how many bytes there would be; what it raises ends this.

    Raises:
        TooLarge: there are, or were announced, more than `limit` bytes.
        TooManyRequests, Unavailable: as `Bodies` says, or the caller went away.
    """
    require_room(request, limit)
    bodies: Bodies = request.app.state.bodies
    with bodies.place(actor):
        staged = await bodies.write(service.blobs.stage)
        try:
            async for piece in pieces(request):
                await bodies.write(partial(_take, staged, piece, limit, grown))
            return await bodies.seal(lambda: keep(staged))
        finally:
            with anyio.CancelScope(shield=True):
                await bodies.write(staged.close)


def _take(staged: Incoming, piece: bytes, limit: int, grown: Callable[[int], None]) -> None:
    grown(staged.size + len(piece))
    staged.write(piece, limit=limit)


def require_room(request: Request, limit: int) -> None:
    """Return when the body that is announced has at most `limit` bytes. Raises TooLarge."""
    size = announced(request)
    if size > limit:
        raise TooLarge(f"the body has {size} bytes, and at most {limit} may come", limit=limit)


def announced(request: Request) -> int:
    """Return how many bytes a request says that it brings; 0 when it says nothing."""
    said = request.headers.get("content-length", "")
    return int(said) if said.isdecimal() else 0


async def pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives, in pieces of about `CHUNK_BYTES`; also what came before it was cut.

    Raises:
        Unavailable: the caller went away.
        HTTPException: it came too slowly; see `registry.api.middleware`.
    """
    unbounded(request)
    part = bytearray()
    try:
        async for chunk in request.stream():
            part += chunk
            if len(part) >= CHUNK_BYTES:
                yield bytes(part)
                part.clear()
    except HTTPException:
        if part:
            yield bytes(part)
        raise
    except ClientDisconnect:
        if part:
            yield bytes(part)
        raise Unavailable("the caller went away before the body was complete") from None
    if part:
        yield bytes(part)
