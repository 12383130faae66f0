"""Numbers that cannot all be true, pair by pair, and that what our own gates measure never contradicts itself."""

import pytest

from gates.catalog import conclude
from gates.consistency import contradictions, held_to_itself
from gates.gate import GateContext, Judged
from schemas.bundle import Bundle
from schemas.result import Measurement, Verdict
from tests.gates.test_load_judgement import RULE, SUITE, good_records
from tests.support.factories import bundle_body


def measured(name, statistic, value, n=200, *, unit="ms", **more):
    return Measurement(name=name, unit=unit, statistic=statistic, value=value, n=n, **more)


def ratio(name, k, n, value=None, **more):
    return measured(name, "value", k / n if value is None else value, n, unit="ratio", k=k, **more)


CONTRADICTORY = {
    "throughput: mean 410.61 is above peak 113": [
        measured("throughput", "mean", 410.61),
        measured("throughput", "peak", 113.0),
    ],
    "throughput: mean 410.61 is above max 113": [
        measured("throughput", "max", 113.0),
        measured("throughput", "mean", 410.61),
    ],
    "ttft: p50 90 is above p99 80": [measured("ttft", "p99", 80.0), measured("ttft", "p50", 90.0)],
    "ttft: p50 inf is above p99 80": [measured("ttft", "p50", None, infinite=150), measured("ttft", "p99", 80.0)],
    "ttft: p50 is of 200, p99 of 190": [measured("ttft", "p50", 9.0), measured("ttft", "p99", 90.0, 190)],
    "attainment 150 and error_ratio 60 are more than the 200 requests": [
        ratio("attainment", 150, 200),
        ratio("error_ratio", 60, 200),
    ],
    "attainment is of 200 requests, error_ratio of 190": [ratio("attainment", 150, 200), ratio("error_ratio", 0, 190)],
    "goodput 12 is above rate 10": [measured("rate", "mean", 10.0), measured("goodput", "mean", 12.0)],
    "requests 200 took no time: rate has no value": [
        measured("requests", "value", 200.0),
        measured("rate", "mean", None),
    ],
    "error_ratio value: k 201 is more than n 200": [measured("error_ratio", "value", None, unit="ratio", k=201)],
    "error_ratio value: value 0.5 is not k 1 of n 200": [ratio("error_ratio", 1, 200, 0.5)],
    "error_ratio value: low 0.2 is above value 0.1": [ratio("error_ratio", 20, 200, low=0.2)],
    "error_ratio value: high 0.05 is below value 0.1": [ratio("error_ratio", 20, 200, high=0.05)],
    "ttft p50: infinite 201 is more than n 200": [measured("ttft", "p50", None, infinite=201)],
}


@pytest.mark.parametrize("message", CONTRADICTORY)
def test_two_numbers_that_cannot_both_be_true_are_named(message):
    (found,) = contradictions(CONTRADICTORY[message])
    assert found.message == message
    judged = held_to_itself(Judged(Verdict.PASSED, "fine", CONTRADICTORY[message], []))
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert [(one.code, one.message) for one in judged.findings] == [("report-inconsistent", message)]


def test_a_failure_stays_one_whatever_its_numbers_say():
    numbers = CONTRADICTORY["goodput 12 is above rate 10"]
    assert held_to_itself(Judged(Verdict.FAILED, "bad", numbers, [])).verdict is Verdict.FAILED


def test_what_a_load_run_measures_contradicts_nothing():
    bundle = Bundle.model_validate(bundle_body())
    context = GateContext(bundle=bundle, root=None, rule=RULE, suite=SUITE)
    result, _ = conclude("load", context, good_records(SUITE), duration_ms=1)
    assert result.verdict is Verdict.PASSED
    assert len(result.measurements) > 20
    assert contradictions(result.measurements) == []
