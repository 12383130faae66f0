"""A pulse of this process, so that a measurement knows when the one who measured stood still."""

import threading
import time
from types import TracebackType
from typing import Final, Self

BEAT_SECONDS: Final = 0.1
STILL_SECONDS: Final = 5.0
"""A process that was stopped or starved this long cannot tell a slow engine from its own absence."""


class Pulse:
    """Beats in a thread while a block runs; `longest_seconds` is the longest time without a beat.

    The clock goes on while the process is stopped, so a SIGSTOP or a machine that was suspended shows as one long gap.
    """

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._last = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        self.longest_seconds = max(self.longest_seconds, now - self._last)
        self._last = now

    def __enter__(self) -> Self:
        """Start."""
        self._last = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop, and count the time since the last beat too."""
        self._ended.set()
        self._thread.join()
        self._look()
