"""BIAS on every engine: one ranking of tokens after any token, so that each way of choosing has one known outcome.

Each engine is booted once, asked everything, and then ended while streams are open.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from gates.answers import Answer, Outcome
from gates.dialects.base import Request, Sampling
from gates.endpoint import Endpoint
from schemas.runner import ReplicaState
from tests.support.chain import PROMPT, token
from tests.support.real_engines import ENGINES, Booted, bias_bundle, booted

pytestmark = pytest.mark.timeout(400)

RANKING = {token("a"): 10.0, token("b"): 9.0, token("c"): 7.0}
DRAIN_SECONDS = 6.0
SHORT, LONG = 100, 1900
QUESTIONS = {
    "greedy": {},
    "alternatives": {"top_logprobs": 3},
    "pushed": {"extra": {"logit_bias": {str(token("b")): 2}}},
    "barred": {"extra": {"logit_bias": {str(token("a")): -100}}},
    "one candidate": {"sampling": Sampling(temperature=2.0, top_k=1, seed=3)},
    "a nucleus of two": {"sampling": Sampling(temperature=1.0, top_p=0.9, seed=3), "max_tokens": 96},
    "what is at least a fifth as likely": {"sampling": Sampling(temperature=1.0, min_p=0.2, seed=3), "max_tokens": 96},
    "repetition made dear": {"sampling": Sampling(repeat_penalty=3.0)},
    "stopped": {"extra": {"stop": ["aaa"]}},
}
DEFAULTS = {"temperature": "0", "repetition_penalty": "2"}
UNNAMED = {
    "nothing is named": ({"temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed"}, 8),
    "all but the temperature is named": ({"temperature"}, 96),
}
"""Question → values that it does not name, and tokens asked for."""


@dataclass
class Told:
    """What one engine answered, and what was seen of its end."""

    answers: dict[str, Answer]
    short: Answer
    long: Answer
    refused: Answer
    signalled: float
    """When it was told to end, in seconds of the clock of answers."""
    ended: float
    states: list[ReplicaState] = field(default_factory=list)


async def ask(endpoint: Endpoint, name: str) -> Answer:
    question = {"max_tokens": 8, **QUESTIONS[name]}
    return await endpoint.chat(PROMPT, stream=False, **question)


async def ask_without(endpoint: Endpoint, name: str) -> Answer:
    """Ask and leave sampling to what the bundle says."""
    unnamed, many = UNNAMED[name]
    request = endpoint.dialect.chat("chain", PROMPT, max_tokens=many)
    left_out = {endpoint.dialect.sampling_fields[one] for one in unnamed}
    body = {key: value for key, value in (request.body or {}).items() if key not in left_out}
    return await endpoint.generate(Request(request.path, body))


async def ask_and_end(engine: Booted) -> Told:
    async with engine.endpoint() as endpoint, engine.endpoint() as later:
        answers = {name: await ask(endpoint, name) for name in QUESTIONS}
        answers |= {name: await ask_without(endpoint, name) for name in UNNAMED}
        streams = [asyncio.create_task(endpoint.chat(PROMPT, max_tokens=many)) for many in (SHORT, LONG)]
        await working(endpoint)
        signalled = time.perf_counter()
        ending = asyncio.create_task(asyncio.to_thread(engine.replica.stop, grace_seconds=DRAIN_SECONDS + 20))
        refused = await later.chat(PROMPT, max_tokens=1, stream=False)
        while refused.outcome is Outcome.OK:  # the signal is on its way
            refused = await later.chat(PROMPT, max_tokens=1, stream=False)
        short, long = await asyncio.gather(*streams)
        await ending
    return Told(answers, short, long, refused, signalled, time.perf_counter(), [engine.replica.state])


async def working(endpoint: Endpoint) -> None:
    """Return when the engine is at work on both streams, or has been."""
    name = endpoint.dialect.metrics.running
    for _ in range(200):
        if (await endpoint.metrics())[name] >= 1:
            return
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module", params=ENGINES)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    place = tmp_path_factory.mktemp(request.param)
    bundle = bias_bundle(request.param, place / "bundle", RANKING, DEFAULTS)
    with booted(bundle, place / "bundle", place / "run", drain_seconds=DRAIN_SECONDS) as engine:
        yield asyncio.run(ask_and_end(engine))


@pytest.mark.parametrize(
    ("name", "text", "finish"),
    [
        ("greedy", "a" * 8, "length"),
        ("pushed", "b" * 8, "length"),
        ("barred", "b" * 8, "length"),
        ("one candidate", "a" * 8, "length"),
        ("stopped", "", "stop"),
    ],
)
def test_the_likeliest_token_is_taken_as_the_request_makes_it(told, name, text, finish):
    answer = told.answers[name]
    assert (answer.text, answer.finish_reason) == (text, finish)
    assert answer.outcome in {Outcome.OK, Outcome.EMPTY}


@pytest.mark.parametrize("name", ["a nucleus of two", "what is at least a fifth as likely"])
def test_a_sampled_answer_has_the_tokens_that_are_left_and_no_others(told, name):
    """The first has 0.70 of the likelihood, the second 0.26, the third 0.03: both of the first come in 96 draws."""
    assert set(told.answers[name].text) == {"a", "b"}


def test_a_penalty_takes_from_what_came_before(told):
    """An "a" is in the prompt, so that it has 10 / 3 from the beginning; 9 and 7 come once each, and then have less."""
    assert told.answers["repetition made dear"].text == "bcaaaaaa"


def test_where_a_request_names_nothing_the_values_of_the_bundle_apply(told):
    """By the penalty "a" has 5, so that 9 and 7 come once each, as above.

    Of 96 draws at any temperature but 0, some would not be the likeliest.
    """
    assert told.answers["nothing is named"].text == "bcaaaaaa"
    assert told.answers["all but the temperature is named"].text == "a" * 96


def test_alternatives_are_told_with_the_distances_of_the_ranking(told):
    # A number of 16 bits tells 10 from 9 to within a sixteenth.
    for one in told.answers["alternatives"].tokens:
        assert [other.id for other in one.top] == list(RANKING)
        best, second, third = (other.logprob for other in one.top)
        assert best - second == pytest.approx(1.0, abs=0.1)
        assert best - third == pytest.approx(3.0, abs=0.1)


def test_an_engine_that_is_told_to_end_takes_nothing_new(told):
    assert told.refused.outcome in {Outcome.CONNECT, Outcome.HTTP_5XX, Outcome.TRUNCATED}
    assert told.refused.text == ""


def test_streams_that_end_within_the_drain_are_whole(told):
    assert (told.short.outcome, told.short.text, told.short.finish_reason) == (Outcome.OK, "a" * SHORT, "length")


def test_no_stream_is_cut_before_the_drain_is_over(told):
    assert set(told.long.text) == {"a"}
    if told.long.outcome is Outcome.OK:
        assert (len(told.long.text), told.long.finish_reason) == (LONG, "length")
    else:
        assert told.long.done_ns / 1e9 - told.signalled >= DRAIN_SECONDS
        assert len(told.long.text) < LONG


def test_it_is_gone_once_the_drain_is_over(told):
    assert told.states == [ReplicaState.STOPPED]
    assert told.ended - told.signalled < DRAIN_SECONDS + 90  # a busy machine takes its time to end it
