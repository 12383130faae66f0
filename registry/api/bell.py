"""The bell: one listener a process, which wakes the streams that have something new to tell."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from uuid import UUID

import psycopg
import structlog
from sqlalchemy import URL

CHANNEL = "sluicegate_entries"
"""A trigger on `entries` notifies it with "transaction project stream"."""
MAX_STREAMS = 256
"""Streams a process serves at once."""
LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.01, 0.25
RETRY_SECONDS = 1.0
WATCH_SECONDS = 15.0
LINGER_SECONDS = 15.0
"""How long it listens on once nobody waits: who comes back at once finds it listening."""

log = structlog.get_logger("registry.api")


@dataclass(frozen=True, slots=True)
class _Note:
    transaction: int
    project: str | None
    """None for any: what was written before somebody listened is not known."""
    stream: str | None


@dataclass(eq=False, slots=True)
class Waiter:
    """One stream that waits."""

    project: str
    stream: str | None
    who: str
    rung: asyncio.Event = field(default_factory=asyncio.Event)

    def wants(self, note: _Note) -> bool:
        """Tell whether a note is of something that this stream tells."""
        return note.project is None or (self.project == note.project and self.stream in (None, note.stream))


class Bell:
    """Listens to the database while it is entered and somebody waits, and rings for those who do.

    Whoever listens is told of every entry, which costs processor time with each write: so nobody listens for nobody.

    An entry can be told when every older transaction has ended (see `registry.cursors`), which may be a moment after
    its own commit: then the bell looks again, with growing pauses, until it can ring.
    """

    def __init__(self, url: URL) -> None:
        """Prepare for a database."""
        self._url = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._waiters: set[Waiter] = set()
        self._is_wanted = asyncio.Event()
        self._left_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self.is_closing = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="bell")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def close(self) -> None:
        """Wake everyone for the last time: streams end when the bell is closing. Call it in the event loop."""
        self.is_closing = True
        self._ring_all()

    def has_place(self, who: str) -> bool:
        """Tell whether a further stream of a caller may wait: nobody has more of them than are still free."""
        return sum(one.who == who for one in self._waiters) < MAX_STREAMS - len(self._waiters)

    @contextlib.contextmanager
    def waiting(self, project: UUID, stream: str | None, who: str) -> Iterator[Waiter]:
        """Be woken for a project's entries, or one stream's, until the end of the block; `who` is the caller."""
        waiter = Waiter(str(project), stream, who)
        self._waiters.add(waiter)
        self._is_wanted.set()
        try:
            yield waiter
        finally:
            self._waiters.discard(waiter)
            if not self._waiters:
                self._is_wanted.clear()
                self._left_at = time.monotonic()

    @property
    def _is_left(self) -> bool:
        """Whether nobody has waited for a while."""
        return not self._waiters and time.monotonic() - self._left_at >= LINGER_SECONDS

    def _ring_all(self) -> None:
        for waiter in self._waiters:
            waiter.rung.set()

    async def _run(self) -> None:
        while True:
            await self._is_wanted.wait()
            try:
                await self._listen()
            except psycopg.Error as error:
                log.warning("bell_lost", error=str(error).splitlines()[0] if str(error) else repr(error))
                await asyncio.sleep(RETRY_SECONDS)

    async def _listen(self) -> None:
        """Ring for those who wait, until nobody does."""
        connecting = psycopg.AsyncConnection.connect(
            self._url, autocommit=True, connect_timeout=10, application_name="sluicegate bell"
        )
        async with await connecting as connection:
            await connection.execute(f"LISTEN {CHANNEL}")
            # What was committed before this is not told. What of it can be, is looked for now; the rest, once it can.
            self._ring_all()
            horizon, following = await _look(connection)
            held = self._ring([_Note(following - 1, None, None)], horizon)
            pause = LEAST_PAUSE_SECONDS
            while not self._is_left:
                timeout = pause if held else WATCH_SECONDS
                is_new = False
                async for note in connection.notifies(timeout=timeout, stop_after=1):
                    parts = note.payload.split(" ", 2)
                    # Whoever may connect may also notify.
                    if len(parts) == 3 and parts[0].isascii() and parts[0].isdecimal():
                        held.append(_Note(int(parts[0]), parts[1], parts[2]))
                        is_new = True
                pause = LEAST_PAUSE_SECONDS if is_new else min(2 * pause, MOST_PAUSE_SECONDS)
                horizon, _ = await _look(connection)
                held = self._ring(held, horizon)

    def _ring(self, held: list[_Note], horizon: int) -> list[_Note]:
        """Wake those who wait for what can be told. Returns what cannot yet."""
        told = [note for note in held if note.transaction < horizon]
        for waiter in self._waiters:
            if any(waiter.wants(note) for note in told):
                waiter.rung.set()
        return [note for note in held if note.transaction >= horizon]


async def _look(connection: psycopg.AsyncConnection) -> tuple[int, int]:
    """Return below which number every transaction has ended, and the number of the next one to begin."""
    answer = await connection.execute(_SNAPSHOT)
    row = await answer.fetchone()
    return (int(row[0]), int(row[1])) if row else (0, 0)


_SNAPSHOT = (
    "SELECT pg_snapshot_xmin(snapshot)::text, pg_snapshot_xmax(snapshot)::text FROM pg_current_snapshot() AS snapshot"
)
