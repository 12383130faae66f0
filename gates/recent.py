"""What was found last, kept by what it was found for."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")
FoundT = TypeVar("FoundT")


class Recent(Generic[KeyT, FoundT]):
    """At most so many of the things that were asked for last. Threads may share it."""

    def __init__(self, most: int) -> None:
        """Begin with nothing, and keep at most `most`."""
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[KeyT, FoundT] = OrderedDict()

    def get(self, key: KeyT) -> FoundT | None:
        """Return what is kept; None for nothing."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: KeyT, found: FoundT) -> None:
        """Keep something in place of what was asked for longest ago."""
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
