"""Adapters on llama.cpp, by their names: one that changes answers, and one that does not. One boot for all."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from gates import adapters, catalog
from gates.answers import Answer, Outcome
from gates.dialects.llamacpp import LLAMACPP
from gates.endpoint import Endpoint
from gates.gate import GateContext
from schemas.policy import CompatibilityRule
from schemas.result import GateResult, Severity, Verdict
from schemas.runner import Agreement, ReplicaState
from tests.support.chain import PROMPT, token
from tests.support.packed_adapter import LOUD, MUTE, with_adapters
from tests.support.real_engines import Booted, bias_bundle, booted

pytestmark = pytest.mark.timeout(120)
RANKING = {token("a"): 10.0, token("b"): 9.0, token("c"): 7.0}
WHOLE = 1900
"""Tokens that a caller asks for who hangs up; some hundred come before it is noticed."""
DRAINED = 400
"""Tokens of a stream that is under way when the engine is told to end."""


@dataclass
class Told:
    """What one engine with two adapters said and answered."""

    engine: Booted
    result: GateResult
    """Of the gate `compatibility`."""
    models: list[str]
    again: Answer
    """The base's answer after those of the adapters."""
    streamed: Answer
    unknown: Answer
    left: float
    """Tokens that were generated for a caller who hung up after the first."""
    drained: Answer
    states: list[ReplicaState] = field(default_factory=list)


def chat(endpoint: Endpoint, many: int, *, stream: bool = True):
    return endpoint.chat(PROMPT, max_tokens=many, stream=stream, top_logprobs=3)


def gate(engine: Booted) -> GateResult:
    context = GateContext(
        bundle=engine.bundle,
        root=engine.root,
        rule=CompatibilityRule(gate="compatibility", boot_seconds="400", answer_seconds="20"),
        endpoint=engine.endpoint(),
        engine=engine.ready.identity,
        process_id=engine.replica.process_id,
        ready_ms=engine.ready.ready_ms,
    )
    return catalog.run("compatibility", context)[0]


async def ask(engine: Booted, result: GateResult) -> Told:
    def named(name: str) -> Endpoint:
        return Endpoint(engine.replica.base_url, name, LLAMACPP)

    async with named("chain") as base, named("loud") as loud, named("no-such") as nobody:
        models = [one.id for one in await base.models()]
        again, streamed, unknown = [await chat(one, 8) for one in (base, loud, nobody)]
        left = await hung_up(engine, base)
        draining = asyncio.create_task(chat(loud, DRAINED))
        await at_work(base, least=1)
        await asyncio.to_thread(engine.replica.stop, grace_seconds=60)
        return Told(engine, result, models, again, streamed, unknown, left, await draining, [engine.replica.state])


async def hung_up(engine: Booted, base: Endpoint) -> float:
    """Leave an adapter's stream after its first token; return how many were generated."""
    before = (await base.metrics())[LLAMACPP.metrics.generated_tokens]
    body = json.dumps(LLAMACPP.chat("loud", PROMPT, max_tokens=WHOLE, stream=True).body).encode()
    host, port = engine.replica.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await reader.readuntil(b'"content":"a"')
    writer.transport.abort()
    return (await at_work(base, most=0))[LLAMACPP.metrics.generated_tokens] - before


async def at_work(endpoint: Endpoint, *, least: int = 0, most: int = 9) -> dict[str, float]:
    """Return the metrics once the requests at work are within bounds, or after 10 s."""
    for _ in range(500):
        metrics = await endpoint.metrics()
        if least <= metrics[LLAMACPP.metrics.running] <= most:
            break
        await asyncio.sleep(0.02)
    return metrics


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    place = tmp_path_factory.mktemp("adapters")
    bundle = bias_bundle("llamacpp", place / "bundle", RANKING)
    bundle = with_adapters(bundle, place / "bundle", {"loud": LOUD, "mute": MUTE})
    with booted(bundle, place / "bundle", place / "run") as engine:
        yield asyncio.run(ask(engine, gate(engine)))


def test_what_booted_has_the_adapters_of_the_bundle_and_lists_their_names(told):
    assert told.models == ["chain", "loud", "mute"]
    assert told.engine.ready.findings == ()
    (row,) = [one for one in told.engine.ready.compared if one.item == "adapters"]
    assert row.outcome is Agreement.EQUAL
    files = [f"{told.engine.root}/adapters/{name}/{name}.gguf" for name in ("loud", "mute")]
    assert row.found == f"0 {files[0]} at 0; 1 {files[1]} at 0"


def test_c079_one_that_answers_as_the_base_does_value_by_value_is_all_that_the_gate_finds(told):
    found = [(one.code, one.pointer) for one in told.result.findings if one.severity is not Severity.INFO]
    assert (told.result.verdict, found) == (Verdict.FAILED, [("adapter-no-effect", "model mute")])


def test_the_base_answers_after_an_adapter_as_it_did_before_and_a_stream_as_an_answer(told):
    first = [one.logprob for one in told.again.tokens]
    other = [one.logprob for one in told.streamed.tokens]
    assert (told.again.text, told.streamed.text) == ("a" * 8, "a" * 8)
    assert first[1:] == first[:-1]
    assert min(abs(one - two) for one, two in zip(first, other, strict=True)) > adapters.LEAST_EFFECT_NAT


def test_c089_a_name_that_nobody_has_is_refused(told):
    assert (told.unknown.outcome, told.unknown.status) == (Outcome.HTTP_4XX, 404)
    assert "served are chain, loud, mute" in told.unknown.detail


def test_who_hangs_up_ends_his_answer_and_who_stays_has_it_whole_when_the_engine_ends(told):
    assert 0 < told.left < WHOLE
    assert (told.drained.outcome, told.drained.text) == (Outcome.OK, "a" * DRAINED)
    assert told.states == [ReplicaState.STOPPED]
