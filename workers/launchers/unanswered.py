"""Orders whose answer never came: what they made, now or later, is nobody's, and has to be ended when it is seen."""

import threading
import time

LATE_SECONDS = 900.0
"""How long after an order what it makes may still appear: what hung works off what it was asked once it goes on."""


class Unanswered:
    """Names under which something may run that nobody knows of. Safe to call from several threads."""

    def __init__(self, late_seconds: float = LATE_SECONDS) -> None:
        """Look out for each name for so long."""
        self._late_seconds = late_seconds
        self._since: dict[str, float] = {}
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        """Tell whether a name is still looked out for."""
        with self._lock:
            return name in self._since

    def add(self, name: str) -> None:
        """Look out for a name from now on."""
        with self._lock:
            self._since[name] = time.monotonic()

    def settle(self, name: str) -> None:
        """Look out for a name no more: it was ended, or is ordered anew, so that whoever orders it sees it."""
        with self._lock:
            self._since.pop(name, None)

    def names(self) -> list[str]:
        """Return the names to look for, without those that nothing can appear under any more."""
        with self._lock:
            oldest = time.monotonic() - self._late_seconds
            self._since = {name: since for name, since in self._since.items() if since >= oldest}
            return list(self._since)
