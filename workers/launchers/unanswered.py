"""Orders whose answer never came: what they made, now or later, is nobody's, and has to be ended when it is seen."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


class Known:
    """What this process has started or taken up, and what it is ordering now. Safe to call from several threads."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}
        self._ordered: set[str] = set()
        self._lock = threading.Lock()

    @contextmanager
    def ordering(self, name: str) -> Iterator[None]:
        """Hold a name for somebody's who orders it now."""
        with self._lock:
            self._ordered.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._ordered.discard(name)

    def is_ordered(self, name: str) -> bool:
        """Tell whether a name is ordered now."""
        with self._lock:
            return name in self._ordered

    def add(self, handle: str, folder: str) -> None:
        """Know what runs, and for which folder."""
        with self._lock:
            self._folders[handle] = folder

    def folder(self, handle: str) -> str | None:
        """Return the folder of what runs; None when it is not known here."""
        with self._lock:
            return self._folders.get(handle)

    def is_nobody_s(self, handle: str, name: str, folder: str, is_wanted: Callable[[str], bool]) -> bool:
        """Tell whether what runs under a name is neither known for a job that is held, nor may be taken up yet.

        What stands alone in the folder of a job that is held may be: whoever has the job looks for it first.
        """
        with self._lock:
            if name in self._ordered:
                return False
            own = self._folders.get(handle)
            others = folder in self._folders.values()
        if not is_wanted(folder):
            return True
        return own is None and others
