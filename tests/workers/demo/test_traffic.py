import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from gates.answers import Outcome
from gates.dialects.llamacpp import LLAMACPP
from tests.support.scripted_engine import (
    DONE,
    Script,
    ScriptedEngine,
    chat_event,
    chat_stream,
    event,
    scripted_engine,
)
from workers.demo import traffic
from workers.demo.traffic import Account, LiveTraffic, Shape, TrafficFailed

PATH = "/chat@demo/v1/chat/completions"
SHAPES = (
    Shape("plain", 0.7, lambda number: [{"role": "user", "content": f"q{number}"}], 4),
    Shape("other", 0.3, lambda number: [{"role": "user", "content": f"r{number}"}], 5),
)
WHOLE = Script(chunks=chat_stream("a", "b"), headers={"x-release-rev": "7", "x-release-arm": "candidate"})


def live(engine: ScriptedEngine, *, rate: float = 100.0, seed: int = 1) -> LiveTraffic:
    base = f"{engine.base_url}/chat@demo"
    return LiveTraffic(base, "gemma-demo", LLAMACPP, SHAPES, rate_per_second=rate, seed=seed)


async def until(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not claim():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def engine_with(script: Script) -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine({PATH: script}) as engine:
        yield engine


async def run(script: Script, *, streams: int = 5) -> Account:
    """Send at least some streams to an engine with a script and wait for their ends."""
    async with engine_with(script) as engine:
        sender = live(engine)
        sender.start()
        await until(lambda: len(sender.account.ends) >= streams)
        return await asyncio.to_thread(sender.stop)


async def test_whole_streams_are_counted_and_none_is_broken():
    account = await run(WHOLE)
    assert account.sent >= 5
    assert account.is_settled
    assert account.broken == []
    assert account.reasons() == []
    assert all(end.status == 200 and end.ttft_ms is not None for end in account.ends)
    assert {(end.revision, end.arm) for end in account.ends} == {(7, "candidate")}


ROLE = chat_event(role="assistant", content=None)
ENDS = {
    "503": (Script.json({"error": {"message": "no"}}, 503), Outcome.HTTP_5XX),
    "404": (Script.json({"error": {"message": "no"}}, 404), Outcome.HTTP_4XX),
    "cut": (Script(chunks=[ROLE, chat_event("a")], ending="cut"), Outcome.TRUNCATED),
    "no finish": (Script(chunks=[ROLE, chat_event("a"), DONE]), Outcome.TRUNCATED),
    "no [DONE]": (Script(chunks=chat_stream("a")[:-1]), Outcome.TRUNCATED),
    "nothing": (Script(chunks=[]), Outcome.TRUNCATED),
    "two finishes": (
        Script(chunks=[chat_event("a"), *[chat_event(finish_reason="stop")] * 2, DONE]),
        Outcome.MALFORMED,
    ),
    "aborted": (Script(chunks=[chat_event("a"), chat_event(finish_reason="abort"), DONE]), Outcome.TRUNCATED),
    "error event": (Script(chunks=[chat_event("a"), event({"error": {"message": "full"}})]), Outcome.ERROR_EVENT),
    "no UTF-8": (Script(chunks=[b"data: \xff\xfe\n\n", DONE]), Outcome.TRUNCATED),
}


@pytest.mark.parametrize("case", ENDS)
async def test_a_stream_without_200_one_finish_and_an_end_is_broken(case):
    script, outcome = ENDS[case]
    account = await run(script)
    assert account.is_settled
    assert len(account.broken) == account.sent
    assert {end.outcome for end in account.broken} == {outcome}
    assert account.reasons()[0].startswith(f"{account.sent} × {outcome}: ")


async def test_a_connection_that_breaks_after_the_end_has_broken_no_stream():
    account = await run(Script(chunks=chat_stream("a"), ending="cut"))
    assert account.broken == []


async def test_an_engine_that_is_not_there_breaks_every_stream():
    async with engine_with(WHOLE) as engine:
        sender = live(engine)
    sender.start()
    await until(lambda: len(sender.account.ends) >= 3)
    account = await asyncio.to_thread(sender.stop)
    assert len(account.broken) == account.sent
    assert {(end.status, end.outcome) for end in account.ends} == {(0, Outcome.CONNECT)}


async def test_an_answer_that_ends_at_once_is_a_whole_stream():
    account = await run(Script(chunks=[ROLE, chat_event(finish_reason="stop"), DONE]))
    assert {end.outcome for end in account.ends} == {Outcome.EMPTY}
    assert account.broken == []
    assert all(end.ttft_ms is None for end in account.ends)


async def test_stopping_waits_for_streams_that_are_open():
    async with engine_with(Script(chunks=chat_stream("a"), delay_seconds=0.4)) as engine:
        sender = live(engine, rate=20)
        sender.start()
        await until(lambda: sender.account.sent >= 3)
        assert not sender.account.is_settled
        account = await asyncio.to_thread(sender.stop)
    assert account.is_settled
    assert account.broken == []


async def test_each_shape_is_tried_alone_before_the_others_come():
    async with engine_with(Script(chunks=chat_stream("a"), delay_seconds=0.3)) as engine:
        sender = live(engine)
        sender.start()
        await until(lambda: sender.account.sent >= len(SHAPES) + 1)
        first = list(sender.account.ends)
        await asyncio.to_thread(sender.stop)
    assert [end.shape for end in first] == [shape.name for shape in SHAPES]
    assert first[1].sent_at >= first[0].sent_at + timedelta(milliseconds=first[0].duration_ms)


async def test_requests_are_sent_whether_or_not_earlier_ones_have_ended():
    async with engine_with(Script(chunks=chat_stream("a"), delay_seconds=2)) as engine:
        sender = live(engine)
        sender.start()
        await until(lambda: sender.account.sent >= 20)
        assert len(sender.account.ends) == len(SHAPES)
        await asyncio.to_thread(sender.stop)


async def test_open_streams_are_bounded(monkeypatch):
    monkeypatch.setattr(traffic, "CAP", 4)
    async with engine_with(Script(chunks=chat_stream("a"), delay_seconds=1)) as engine:
        sender = live(engine)
        sender.start()
        await until(lambda: sender.account.skipped >= 5)
        assert sender.account.sent == len(SHAPES) + 4
        await asyncio.to_thread(sender.stop)


async def test_streams_that_do_not_end_are_told_and_not_waited_for():
    async with engine_with(Script(chunks=[ROLE], ending="hang")) as engine:
        sender = live(engine, rate=20)
        sender.start()
        await until(lambda: sender.account.sent >= 1)
        with pytest.raises(TrafficFailed, match="have not ended"):
            await asyncio.to_thread(sender.stop, wait_seconds=0.2)
        engine.release()
        await asyncio.to_thread(sender.stop)


async def test_a_failure_of_the_generator_is_raised_where_it_is_stopped():
    def fail(number: int) -> list[dict[str, str]]:
        raise ValueError(f"no prompt {number}")

    async with engine_with(WHOLE) as engine:
        shape = Shape("failing", 1, fail, 4)
        sender = LiveTraffic(engine.base_url, "m", LLAMACPP, [shape], rate_per_second=100, seed=1)
        sender.start()
        await until(lambda: sender.account.sent >= 1)
        with pytest.raises(TrafficFailed, match="no prompt"):
            await asyncio.to_thread(sender.stop)


async def test_traffic_that_never_began_stops_with_nothing_sent():
    async with engine_with(WHOLE) as engine:
        assert live(engine).stop().sent == 0


async def test_requests_are_an_ordinary_clients_and_shapes_come_in_their_shares():
    async with engine_with(WHOLE) as engine:
        sender = live(engine)
        sender.start()
        await until(lambda: len(sender.account.ends) >= 150)
        account = await asyncio.to_thread(sender.stop)
    assert {asked.path for asked in engine.log} == {PATH}
    bodies = [json.loads(asked.body) for asked in engine.log]
    assert {frozenset(body) for body in bodies} == {
        frozenset({"model", "messages", "max_tokens", "temperature", "stream"})
    }
    assert {(body["model"], body["stream"]) for body in bodies} == {("gemma-demo", True)}
    assert {body["max_tokens"] for body in bodies} == {4, 5}
    assert 0.55 < sum(end.shape == "plain" for end in account.ends) / account.sent < 0.85


async def test_the_same_seed_draws_the_same_shapes():
    async def shapes(seed: int) -> list[str]:
        async with engine_with(WHOLE) as engine:
            sender = live(engine, seed=seed)
            sender.start()
            await until(lambda: len(sender.account.ends) >= 30)
            account = await asyncio.to_thread(sender.stop)
        return [end.shape for end in sorted(account.ends, key=lambda end: end.sent_at)][:30]

    assert await shapes(3) == await shapes(3)
