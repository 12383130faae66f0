"""Following the log: one connection that is made anew as often as it is cut."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import UUID

import httpx
from pydantic import ValidationError

from gates.sse import EventParser, NotUtf8
from registry.client.transport import Transport, shut
from schemas.api import Event
from schemas.evidence import Entry
from schemas.problems import Unavailable

SILENCE_SECONDS = 25.0
"""The service says something every 10 s: a connection that is silent for longer is lost."""
PAUSES_SECONDS = (0.1, 0.5, 1.0, 2.0)
"""Before each further try; the last one for all that follow."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which entries are followed: all that match everything named."""

    stream: str | None = None
    release: UUID | None = None
    target: str | None = None
    kinds: tuple[str, ...] = ()


class Following:
    """One reader of the log."""

    def __init__(
        self,
        transport: Transport,
        selection: Selection,
        on_away: Callable[[Unavailable], None],
        on_quiet: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._parameters = {
            "stream": selection.stream,
            "release": str(selection.release) if selection.release else None,
            "target": selection.target,
            "kind": [str(kind) for kind in selection.kinds] or None,
        }
        self._on_away, self._on_quiet = on_away, on_quiet
        self._is_enough = False
        self._cursor: str | None = None

    def follow(self, after: str | None, seconds: float | None) -> Iterator[Event]:
        """Yield events after a cursor; see `Client.events`."""
        self._cursor = after
        cutter = _Cutter(seconds)
        was_there = is_away = False
        failures = 0
        try:
            while not self._is_over(cutter):
                try:
                    for event in self._connected(cutter):
                        was_there, is_away, failures = True, False, 0
                        if event is not None:
                            yield event
                except Unavailable as problem:
                    if cutter.is_over() or self._transport.is_closed():
                        return
                    if not was_there:
                        raise
                    if not is_away:
                        self._on_away(problem)
                    is_away = True
                if not self._is_over(cutter):
                    cutter.wait(PAUSES_SECONDS[min(failures, len(PAUSES_SECONDS) - 1)])
                    failures += 1
        finally:
            cutter.cancel()

    def _is_over(self, cutter: "_Cutter") -> bool:
        return self._is_enough or cutter.is_over() or self._transport.is_closed()

    def _connected(self, cutter: "_Cutter") -> Iterator[Event | None]:
        """Yield None once there is an answer, then the events of one connection."""
        headers = {"accept": "text/event-stream", "cache-control": "no-store"}
        if self._cursor is not None:
            headers["last-event-id"] = self._cursor
        parser = EventParser()
        silence = cutter.at_most(SILENCE_SECONDS)
        with self._transport.stream(
            "/v1/events", parameters=self._parameters, headers=headers, silence_seconds=silence
        ) as answer:
            cutter.aim_at(answer)
            yield None
            for chunk in answer.iter_raw():
                try:
                    told = [
                        Event(cursor=one.id, entry=Entry.model_validate_json(one.data)) for one in parser.feed(chunk)
                    ]
                except (NotUtf8, ValidationError) as error:
                    detail = f"{self._transport.url} sent an event that is not Sluicegate's: {error}"
                    raise Unavailable(detail.splitlines()[0]) from None
                for event in told:
                    self._cursor = event.cursor
                    yield event
                self._cursor = parser.last_id or self._cursor
                if not told and self._on_quiet():
                    self._is_enough = True
                    return


class _Cutter:
    """Ends a wait for bytes when time is up, by closing the connection under it."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._aim: httpx.Response | None = None
        self._timer: threading.Timer | None = None
        if seconds is not None:
            self._timer = threading.Timer(seconds, self._cut)
            self._timer.daemon = True
            self._timer.start()

    def is_over(self) -> bool:
        """Tell whether time is up."""
        return self._end is not None and time.monotonic() >= self._end

    def at_most(self, seconds: float) -> float:
        """Return these seconds, or those that are left if fewer."""
        return seconds if self._end is None else max(0.05, min(seconds, self._end - time.monotonic()))

    def wait(self, seconds: float) -> None:
        """Pause, at the longest until time is up."""
        self._over.wait(self.at_most(seconds))

    def aim_at(self, answer: httpx.Response) -> None:
        """Cut this answer when time is up."""
        with self._lock:
            self._aim = answer
            if self._over.is_set():
                shut(answer)

    def cancel(self) -> None:
        """Cut nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._aim = None

    def _cut(self) -> None:
        with self._lock:
            self._over.set()
            if self._aim is not None:
                shut(self._aim)
