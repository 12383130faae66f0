"""What a stack tells people: nobody who watches over it waits for a reader.

A terminal that was stopped (Ctrl-S, a marked text) or a pipe that nobody reads takes no more. Whoever would write there
himself would stand still with it, and no part would be started again, nor traffic be taken back.
"""

import contextlib
import os
import queue
import threading
from typing import Final, TextIO

MOST_LINES: Final = 1000
"""Lines that wait for a reader; further ones are left out here, and are in the log."""
LAST_SECONDS: Final = 1.0
"""How long the last lines are waited for."""


class Terminal:
    """Writes in a thread of its own, in order."""

    def __init__(self, stream: TextIO) -> None:
        """Begin to write what is told."""
        self._stream = stream
        self._waiting: queue.Queue[str | None] = queue.Queue(MOST_LINES)
        self._thread = threading.Thread(target=self._write, name="terminal", daemon=True)
        self._thread.start()

    def tell(self, text: str) -> None:
        """Have a text written, where somebody reads."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(text)

    def close(self) -> None:
        """Return once all is written, or when nobody reads."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(LAST_SECONDS)

    def _write(self) -> None:
        while (text := self._waiting.get()) is not None:
            left = f"{text}\n".encode()
            # The terminal may be gone, and the stack must still stop in order. The stream's own lock is left alone:
            # whoever ends this process takes it.
            with contextlib.suppress(OSError):
                while left:
                    left = left[os.write(self._stream.fileno(), left) :]
