"""Requests of a rollback drill: a plan sent open loop from a thread of its own, and quiet questions one by one.

Unlike the load gate's, these requests are judged by who answered and how they ended, not by their latency. So the
generator shares the process, and every request carries an id by which the router's log tells who served it.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self

from gates.answers import CUT, Answer, Outcome
from gates.endpoint import Endpoint
from gates.errors import InstrumentError
from gates.tally import LogRecord
from schemas.suite import LoadSuite, Prompt

REQUEST_ID: Final = "x-request-id"
DETAIL: Final = 200


@dataclass(slots=True)
class Sent:
    """One request. Instants are whole microseconds on the drill's clock, None when they never came.

    `outcome` is that of `gates.answers`. `is_silent`: the answer ended as if it were whole, and was not. `output` is
    the SHA-256 of everything generated. `served`, `route`, `revision` and `code` are the router's word: the engine
    that answered last, the route, the split and the status; all None for a request that never reached it.
    """

    id: str
    prompt: str
    at_us: int
    sent_us: int | None = None
    done_us: int | None = None
    outcome: str | None = None
    detail: str | None = None
    is_silent: bool = False
    output: str | None = None
    served: str | None = None
    route: str | None = None
    revision: int | None = None
    code: int | None = None

    def row(self) -> list[Any]:
        """Return the request as a row of the records."""
        return [getattr(self, column) for column in COLUMNS]

    def attribute(self, record: LogRecord) -> None:
        """Take the router's word."""
        self.served, self.route, self.revision, self.code = record.served, record.route, record.revision, record.code


COLUMNS: Final = tuple(column.name for column in fields(Sent))
"""What a row of the records holds, in this order."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Microseconds since the drill began; monotonic, with one reading of the wall clock to place a log's lines."""

    origin_ns: int = field(default_factory=time.perf_counter_ns)
    unix_us: int = field(default_factory=lambda: time.time_ns() // 1000)

    def now(self) -> int:
        """Return the present."""
        return self.of(time.perf_counter_ns())

    def of(self, perf_ns: int) -> int:
        """Return an instant of `time.perf_counter_ns`."""
        return (perf_ns - self.origin_ns) // 1000

    def of_wall(self, instant: datetime) -> int:
        """Return an instant of the wall clock, as the router's log has them."""
        return round(instant.timestamp() * 1e6) - self.unix_us


async def _send(endpoint: Endpoint, prompt: Prompt, sent: Sent, clock: Clock, seconds: float) -> None:
    messages = [message.model_dump(mode="json") for message in prompt.messages]
    request = endpoint.dialect.chat(endpoint.model, messages, max_tokens=prompt.max_tokens, stream=True)
    sent.sent_us = clock.now()
    answer = await endpoint.generate(request, timeout_seconds=seconds, headers={REQUEST_ID: sent.id})
    sent.output = answer.digest
    sent.outcome, sent.detail = answer.outcome.value, answer.detail[:DETAIL] or None
    sent.is_silent = _is_silent(answer)
    sent.done_us = clock.of(answer.done_ns)


def _is_silent(answer: Answer) -> bool:
    is_told = answer.detail.startswith(CUT) or answer.finish_reason is not None
    return answer.outcome is Outcome.TRUNCATED and answer.status == 200 and not is_told


class Traffic:
    """A suite's plan, sent once. Use as a context manager: it starts at once, and nothing is sent after its end."""

    def __init__(self, endpoint: Endpoint, suite: LoadSuite, prefix: str, clock: Clock) -> None:
        """Send to this endpoint; ids of requests begin with the prefix."""
        self._endpoint, self._suite, self._clock = endpoint, suite, clock
        self._prompts = {prompt.id: prompt for prompt in suite.prompts}
        self.requests = [
            Sent(f"{prefix}{number}", arrival.prompt, arrival.at_us) for number, arrival in enumerate(suite.plan)
        ]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drill-traffic", daemon=True)
        self._failure: BaseException | None = None

    @property
    def sent(self) -> int:
        """Requests sent so far."""
        return sum(each.sent_us is not None for each in self.requests)

    @property
    def in_flight(self) -> int:
        """Requests that are open now."""
        return sum(each.sent_us is not None and each.done_us is None for each in self.requests)

    @property
    def is_over(self) -> bool:
        """Whether every request has ended."""
        return not self._thread.is_alive()

    def finish(self) -> list[Sent]:
        """Wait for the end of every request, and return them. Raises InstrumentError when the plan was not sent."""
        self._thread.join()
        if self._failure is not None or any(each.done_us is None for each in self.requests):
            raise InstrumentError(f"The drill's traffic was not sent to its end: {self._failure}; run the gate again.")
        return self.requests

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._until_stopped())
        except (OSError, RuntimeError, ValueError, ExceptionGroup) as error:
            self._failure = error

    async def _until_stopped(self) -> None:
        sending = asyncio.create_task(self._send_all())
        sending.add_done_callback(lambda _: self._stop.set())
        await asyncio.to_thread(self._stop.wait)
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending

    async def _send_all(self) -> None:
        seconds = float(self._suite.request_seconds)
        async with self._endpoint as endpoint, asyncio.TaskGroup() as group:
            start = self._clock.now()
            for each in self.requests:
                each.at_us += start
                # Sleeps even when it is late already: requests that were started must get their turn.
                await asyncio.sleep(max(0.0, (each.at_us - self._clock.now()) / 1e6))
                group.create_task(_send(endpoint, self._prompts[each.prompt], each, self._clock, seconds))


def ask(endpoint: Endpoint, prompts: Sequence[Prompt], prefix: str, clock: Clock, *, seconds: float) -> list[Sent]:
    """Ask one prompt after another, with nothing beside it."""

    async def run() -> list[Sent]:
        asked = []
        async with endpoint:
            for number, prompt in enumerate(prompts):
                asked.append(Sent(f"{prefix}{number}", prompt.id, clock.now()))
                await _send(endpoint, prompt, asked[-1], clock, seconds)
        return asked

    return asyncio.run(run())
