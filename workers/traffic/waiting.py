"""Somebody who waits for Envoy without holding the gateway's lock: for how long, and what nobody takes away meanwhile.

What it waits for is in a file that it holds locked, one each, so that it counts for exactly as long as its process
lives and it waits.
"""

import fcntl
import json
import math
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


class Wait:
    """One caller's wait: first until Envoy has taken the clusters that are in place, then until it reaches some.

    `is_last` says that the next try is the last one. `kept` are the clusters that nobody takes away meanwhile, and
    `reached` those that Envoy is to reach. `written` is the version of the clusters that it has put in place, and
    `refused` how many updates Envoy had refused before.
    """

    def __init__(self, folder: Path, *, taken_seconds: float, reached_seconds: float) -> None:
        """Wait so long for Envoy to take clusters, and from then on so long until it reaches them."""
        self.is_last = False
        self.kept: frozenset[str] = frozenset()
        self.reached: frozenset[str] = frozenset()
        self.written = ""
        self.refused = math.inf
        self._deadline = time.monotonic() + taken_seconds
        self._reached_seconds = reached_seconds
        self._is_taken = False
        self._folder = folder
        self._file: BinaryIO | None = None
        self._path = folder / f"{uuid4().hex}.json"

    def taken(self) -> None:
        """Take notice that Envoy has the clusters: from now on it is to reach them."""
        if not self._is_taken:
            self._is_taken = True
            self._deadline = time.monotonic() + self._reached_seconds
            self.is_last = False

    def is_over(self) -> bool:
        """Tell whether the time is up."""
        return time.monotonic() >= self._deadline

    def keep(self, clusters: Collection[str]) -> None:
        """Have nobody take these clusters away before this ends. Under the gateway's lock."""
        self.kept = frozenset(clusters)
        if self._file is None:
            self._folder.mkdir(exist_ok=True, mode=0o700)
            self._file = self._path.open("wb")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._file.write(json.dumps(sorted(clusters)).encode())
            self._file.flush()

    def end(self) -> None:
        """Wait for nothing any more. Repeating is harmless."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def kept(folder: Path) -> frozenset[str]:
    """Return the clusters that somebody waits for, and clear up after who is gone. Under the gateway's lock."""
    return frozenset(name for path in folder.glob("*.json") for name in _held(path))


def _held(path: Path) -> Iterable[str]:
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return [str(name) for name in json.loads(file.read())]
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass  # it has just ended
    return []


@contextmanager
def waiting(folder: Path, *, taken_seconds: float, reached_seconds: float) -> Iterator[Wait]:
    """Wait within the context."""
    wait = Wait(folder, taken_seconds=taken_seconds, reached_seconds=reached_seconds)
    try:
        yield wait
    finally:
        wait.end()
