"""Live traffic: streaming chat requests through the gateway at drawn instants, and how each of them ended.

Open loop: a request is sent at its instant whether or not earlier ones have ended, so that a slow bundle meets the
same load as a fast one. The generator is one thread with one event loop. It is bounded: beyond `CAP` open streams it
skips an instant and counts that.
"""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp

from gates.answers import Answer, Outcome, Stream
from gates.dialects.base import Dialect
from gates.sse import NotUtf8

CAP: Final = 128
STREAM_SECONDS: Final = 180.0
"""A stream that has not ended by then is broken."""
SHAPE: Final = 2.0
"""Of the gamma that gaps are drawn from: less bursty than 1, Poisson, since everything here shares two cores."""
_WHOLE: Final = frozenset({Outcome.OK, Outcome.EMPTY})


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of prompt: how often it is sent, and the conversation of its n-th request."""

    name: str
    share: float
    messages: Callable[[int], list[dict[str, str]]]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """How one stream ended, as its client saw it.

    `revision` and `arm` are what the gateway said of itself, None when it said nothing.
    """

    sent_at: datetime
    shape: str
    status: int
    outcome: Outcome
    detail: str
    ttft_ms: float | None
    duration_ms: float
    revision: int | None
    arm: str | None

    @property
    def is_broken(self) -> bool:
        """Whether the status is not 200, or one finish and `[DONE]` are not both there.

        A model may end its answer at once; a stream that says so is whole.
        """
        return self.status != 200 or self.outcome not in _WHOLE


@dataclass(slots=True)
class Account:
    """Every stream that was sent. Safe to read from another thread; `ends` only grows."""

    sent: int = 0
    skipped: int = 0
    ends: list[StreamEnd] = field(default_factory=list)

    @property
    def broken(self) -> list[StreamEnd]:
        """Streams that did not end as they should."""
        return [end for end in self.ends if end.is_broken]

    @property
    def is_settled(self) -> bool:
        """Whether every stream that was sent has ended."""
        return len(self.ends) == self.sent

    def reasons(self) -> list[str]:
        """Return why streams broke, one line a kind, most frequent first."""
        kinds = Counter(f"{end.outcome}: {end.detail or f'status {end.status}'}" for end in self.broken)
        return [f"{count} × {what}" for what, count in kinds.most_common()]


class TrafficFailed(Exception):
    """Live traffic cannot be accounted for: the generator failed, or streams do not end."""


class LiveTraffic:
    """Sends streams from `start` to `stop`.

    Args:
        base_url: the target's address at the gateway, without `/v1`.
        model: name that requests carry.
        dialect: how answers are read.
        shapes: kinds of prompt; their shares are relative.
        rate_per_second: mean rate.
        seed: of the draw of gaps and shapes.
        account: where every stream is noted; a new one by default.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        dialect: Dialect,
        shapes: Sequence[Shape],
        *,
        rate_per_second: float,
        seed: int,
        account: Account | None = None,
    ) -> None:
        self.account = Account() if account is None else account
        self._url = base_url.rstrip("/") + dialect.chat_path
        self._model = model
        self._dialect = dialect
        self._shapes = shapes
        self._rate = rate_per_second
        self._source = random.Random(seed)  # noqa: S311 - repeatable traffic; nothing secret hangs on it
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="live-traffic", daemon=True)
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Begin to send."""
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def stop(self, *, wait_seconds: float = STREAM_SECONDS) -> Account:
        """Send no more, wait until the open streams have ended, and return the account.

        Raises:
            TrafficFailed: the generator itself failed, or streams are still open after the wait.
        """
        if self._loop is not None:
            with suppress(RuntimeError):  # closed: the thread has ended before
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(wait_seconds)
        if self._failure is not None:
            raise TrafficFailed(f"the traffic generator failed: {self._failure!r}") from self._failure
        if self._thread.is_alive():
            raise TrafficFailed(f"{self.account.sent - len(self.account.ends)} streams have not ended")
        return self.account

    def _run(self) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.run_until_complete(self._send_all())
        except Exception as error:  # edge: the thread has no caller; `stop` raises it there
            self._failure = error
        finally:
            loop.close()

    async def _send_all(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False) as session,
            asyncio.TaskGroup() as streams,
        ):
            await self._send_first(session)
            due = time.monotonic()
            while True:
                due += self._source.gammavariate(SHAPE, 1 / (SHAPE * self._rate))
                shape = self._source.choices(self._shapes, [each.share for each in self._shapes])[0]
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), max(0.0, due - time.monotonic()))
                if self._stopping.is_set():
                    return
                account = self.account
                if account.sent - len(account.ends) >= CAP:
                    account.skipped += 1
                    continue
                account.sent += 1
                streams.create_task(self._send(session, shape, account.sent - 1))

    async def _send_first(self, session: aiohttp.ClientSession) -> None:
        """Send one request of each shape and wait for it: as a service is tried before its users come."""
        for shape in self._shapes:
            self.account.sent += 1
            await self._send(session, shape, self.account.sent - 1)

    def body(self, shape: Shape, number: int) -> dict[str, Any]:
        """Return a request as an ordinary client writes it: no word about the engine's caches."""
        return {
            "model": self._model,
            "messages": shape.messages(number),
            "max_tokens": shape.max_tokens,
            "temperature": 0,
            "stream": True,
        }

    async def _send(self, session: aiohttp.ClientSession, shape: Shape, number: int) -> None:
        stream = Stream(self._dialect)
        sent_at, began_ns = datetime.now(UTC), time.perf_counter_ns()
        status, headers, failure = 0, {}, ""
        try:
            async with session.post(
                self._url,
                data=json.dumps(self.body(shape, number)).encode(),
                headers={"content-type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=STREAM_SECONDS),
            ) as response:
                status, headers = response.status, dict(response.headers)
                async for chunk in response.content.iter_any():
                    if status == 200:
                        stream.feed(time.perf_counter_ns(), chunk)
        except (aiohttp.ClientError, TimeoutError, NotUtf8) as error:
            failure = str(error) or type(error).__name__
        answer = stream.read()
        first_ns = answer.first_token_ns
        self.account.ends.append(
            StreamEnd(
                sent_at=sent_at,
                shape=shape.name,
                status=status,
                outcome=_outcome(status, failure, answer, is_done=stream.is_done),
                detail=failure or answer.detail,
                ttft_ms=None if first_ns is None else (first_ns - began_ns) / 1e6,
                duration_ms=(time.perf_counter_ns() - began_ns) / 1e6,
                revision=_number(headers.get("x-release-rev")),
                arm=headers.get("x-release-arm"),
            )
        )


def _outcome(status: int, failure: str, answer: Answer, *, is_done: bool) -> Outcome:
    if status == 0:
        return Outcome.CONNECT
    if status != 200:
        return Outcome.HTTP_5XX if status >= 500 else Outcome.HTTP_4XX
    # A connection that breaks after `[DONE]` has broken no stream.
    if failure and not is_done:
        return Outcome.TRUNCATED
    return answer.outcome


def _number(text: str | None) -> int | None:
    with suppress(TypeError, ValueError):
        return int(text or "")
    return None
