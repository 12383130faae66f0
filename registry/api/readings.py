"""What reads for long for somebody who only asks: blobs that are read again, evidence that is verified.

It has threads and places of its own, so that nobody who sends bytes, or decides something, waits behind it. A token has
one such reading under way, a process a few, and a token that has had its time waits until some has come back. All is
counted in this process alone; who is refused is told when to ask again.
"""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio
import anyio.to_thread

from registry.auth import Actor
from schemas.problems import TooManyRequests

AT_ONCE = 2
"""Readings of a kind that a process does at once; none waits for a thread."""
BUSY_SECONDS = 2
BURST_SECONDS = 30.0
"""How long a token may have blobs read after a silence; a last reading that is longer is paid back later."""
SHARE = 0.25
"""Share of one thread's time that a token may have for ever."""
KEPT = 10_000
"""Tokens remembered; the one that was silent longest is forgotten first."""

ResultT = TypeVar("ResultT")


class Readings:
    """Places for readings of one kind.

    Args:
        what: how a refusal calls them.
        share: seconds of reading that come back to a token each second; None for as many as it asks for.
        clock: seconds that never go back.
    """

    def __init__(self, what: str, *, share: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._share, self._clock = what, share, clock
        self._lock = threading.Lock()
        self._threads = anyio.CapacityLimiter(AT_ONCE)
        self._under_way: set[object] = set()
        self._left: OrderedDict[object, tuple[float, float]] = OrderedDict()

    async def run(self, actor: Actor, call: Callable[[], ResultT]) -> ResultT:
        """Read in a thread of its own; it ends there, also when the caller goes away. Raises TooManyRequests."""
        with self.place(actor):
            return await anyio.to_thread.run_sync(call, limiter=self._threads)

    @contextmanager
    def place(self, actor: Actor) -> Iterator[None]:
        """Hold a place for one reading, and count its time. Raises TooManyRequests."""
        who = actor.token or actor.name
        with self._lock:
            self._require(who)
            self._under_way.add(who)
            began = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._under_way.discard(who)
                self._spend(who, began)

    def _require(self, who: object) -> None:
        if who in self._under_way:
            raise _busy(f"{self._what} for this token is under way; wait for it to end", BUSY_SECONDS)
        if len(self._under_way) >= AT_ONCE:
            raise _busy(f"{self._what} is under way for {AT_ONCE} others; wait for one to end", BUSY_SECONDS)
        if self._share is not None and (left := self._allowance(who)) <= 0:
            wait = math.ceil((1.0 - left) / self._share)
            raise _busy(f"{self._what} has taken this token's time; wait for {wait} s", wait)

    def _allowance(self, who: object) -> float:
        """Return how many seconds a token has left now."""
        left, at = self._left.get(who, (BURST_SECONDS, self._clock()))
        return min(BURST_SECONDS, left + (self._clock() - at) * (self._share or 0.0))

    def _spend(self, who: object, began: float) -> None:
        if self._share is None:
            return
        # What came back meanwhile came for time that it had.
        left, at = self._allowance(who), self._clock()
        self._left[who] = left - (at - began), at
        self._left.move_to_end(who)
        while len(self._left) > KEPT:
            self._left.popitem(last=False)


def _busy(detail: str, seconds: int) -> TooManyRequests:
    return TooManyRequests(detail, retry_after_seconds=seconds)
