"""How much one token may ask: a bucket of requests that fills at a steady rate, kept in this process alone."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

KEPT = 10_000
"""Tokens remembered; the one that was silent longest is forgotten first, and then has a full bucket again."""


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float


class Rates:
    """Counts requests of each token.

    Args:
        per_second: requests a second that a token may send for ever; 0 lets everything through.
        burst: requests that it may send at once after a silence.
        clock: seconds that never go back.
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._burst, self._clock = per_second, burst, clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, who: str) -> float:
        """Take one request out of a bucket. Returns 0, or the seconds until there is one to take."""
        if not self._per_second:
            return 0.0
        with self._lock:
            now = self._clock()
            bucket = self._buckets.pop(who, None) or _Bucket(float(self._burst), now)
            self._buckets[who] = bucket
            while len(self._buckets) > KEPT:
                self._buckets.popitem(last=False)
            bucket.left = min(float(self._burst), bucket.left + (now - bucket.at) * self._per_second)
            bucket.at = now
            if bucket.left >= 1.0:
                bucket.left -= 1.0
                return 0.0
            return (1.0 - bucket.left) / self._per_second
