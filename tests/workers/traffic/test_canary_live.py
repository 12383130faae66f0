"""From live streams to a judgement and back: real Envoy, real log, the rule that decides."""

import threading
import time
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from gates.canary import StepOutcome, judge_step
from gates.router import STABLE
from gates.tally import Tally
from schemas.policy import ErrorRatioCondition, Step, TtftCondition
from tests.support.gateway import TARGET, ask_many, shares, split, wait_until
from tests.support.streams import Script

STEP = Step(weight_bp=5_000, hold_seconds=Decimal(1), min_requests=59, max_seconds=Decimal(60))
CONDITIONS = (
    ErrorRatioCondition(metric="error_ratio", max_ratio=Decimal("0.05")),
    TtftCondition(metric="ttft", percentile=Decimal("0.9"), max_ms=1_000),
)


@pytest.fixture
def canary(running, stable, candidate):
    """A canary at half of the traffic, with live streams all the time; `broken` adds up what clients lost."""
    gateway = running.gateway
    gateway.apply(split(1, *shares(stable, candidate, 0)))
    gateway.prepare_rollback(TARGET, shares(stable, candidate, 0))
    stopping, answers = threading.Event(), []

    def clients():
        while not stopping.is_set():
            answers.append(ask_many(running.url(), 8, concurrency=8))

    thread = threading.Thread(target=clients)
    thread.start()
    yield gateway, answers
    stopping.set()
    thread.join()


def look_until_decided(gateway, tally, since, seen=None):
    """Do what the controller does at every look, until there is more to say than to wait."""
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        tally.expect(datetime.now(UTC))
        gateway.beat(TARGET)
        gateway.probe(TARGET)
        batch = gateway.log.read(since)
        since = batch.until
        tally.add(batch.records, garbled=batch.garbled, lost=batch.is_lost)
        tally.see(datetime.now(UTC), gateway.open_requests(tally.split))
        judgement = judge_step(tally, STEP, conditions=CONDITIONS, now=datetime.now(UTC))
        if seen is not None:
            seen.append(judgement)
        if judgement.outcome is not StepOutcome.WAITING:
            return judgement
        time.sleep(0.1)
    raise AssertionError(f"still {judgement}")


def begin(gateway, stable, candidate):
    applied = gateway.apply(split(2, *shares(stable, candidate, 5_000)))
    began = datetime.now(UTC)
    return Tally(applied.split, began), gateway.log.position_at(began)


def test_a_good_candidate_passes(canary, stable, candidate):
    gateway, answers = canary
    judgement = look_until_decided(gateway, *begin(gateway, stable, candidate))
    assert judgement.outcome is StepOutcome.PASSED, judgement
    assert sum(each.broken for each in answers) == 0


def test_a_slow_candidate_is_taken_back_without_a_broken_stream(canary, stable, candidate):
    gateway, answers = canary
    candidate.script = Script(ttft_ms=1_300)
    judgement = look_until_decided(gateway, *begin(gateway, stable, candidate))
    assert judgement.outcome is StepOutcome.FAILED, judgement
    assert judgement.reasons[0].startswith("ttft above 1000 ms")
    restored = gateway.restore(TARGET).split
    cluster = shares(stable, candidate, 0)[1].cluster
    wait_until(lambda: gateway.drained(cluster))
    since = gateway.log.end()
    wait_until(lambda: gateway.observe(TARGET, since).requests.get(STABLE, 0) >= 30)
    assert dict(gateway.observe(TARGET, since).requests).keys() == {STABLE}
    assert restored.revision == 3
    assert sum(each.broken for each in answers) == 0


def test_a_candidate_so_slow_that_nothing_of_it_has_ended_is_waited_for_and_then_blamed_for_its_slowness(
    canary, running, stable, candidate
):
    gateway, _ = canary
    candidate.script = Script(ttft_ms=4_000)
    tally, since = begin(gateway, stable, candidate)
    many = threading.Thread(target=ask_many, args=(running.url(), 80), kwargs={"concurrency": 80})
    many.start()
    seen = []
    judgement = look_until_decided(gateway, tally, since, seen)
    many.join()
    assert judgement.outcome is StepOutcome.FAILED, judgement
    assert judgement.reasons[0].startswith("ttft above 1000 ms")
    # For seconds only the stable arm's requests had ended: by the log alone the split was not the desired one.
    alone = [each for each in seen if each.reasons[0].startswith("0 of 59 requests, 0 refused, ")]
    ended = [next(each.n for each in look.measurements if each.name == "observed_weight") for look in alone]
    assert max(ended) >= 25
    assert max(int(look.reasons[0].split()[-3]) for look in alone) >= 25


def test_a_candidate_that_cuts_its_streams_is_taken_back(canary, stable, candidate):
    gateway, _ = canary
    candidate.script = Script(fault="cut")
    judgement = look_until_decided(gateway, *begin(gateway, stable, candidate))
    assert judgement.outcome is StepOutcome.FAILED, judgement
    assert "cut by the engine" in judgement.reasons[0]
