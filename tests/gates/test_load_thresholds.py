"""Where exactly a load run passes, fails or cannot tell, and its numbers against arithmetic of another kind."""

import random
import statistics

import pytest
from scipy import stats as oracle

from gates.gate import JudgeInput
from gates.load_judgement import Growth, growth, judge
from gates.load_records import COLUMNS, Sample, read_run
from schemas.policy import RollbackRule
from schemas.result import Severity, Verdict
from schemas.suite import GoldenSuite
from tests.support import factories
from tests.support.load_run import break_row, good_records, load_rule, load_suite, put

SUITE = load_suite()
RULE = load_rule(SUITE)
WINDOW_US = SUITE.plan[-1].at_us


def judged(records, rule=RULE, suite=SUITE):
    return judge(JudgeInput(rule, records, None, suite))


def codes(found):
    return [each.code for each in found.findings if each.severity is not Severity.INFO]


def measured(found):
    return {(each.name, each.statistic): each for each in found.measurements}


# ---------------------------------------------------------------------------------------------- growth


def sample(at_us, done_us, outcome="ok"):
    return Sample(
        prompt="one",
        at_us=at_us,
        sent_us=at_us,
        token_us=at_us,
        finish_us=done_us,
        done_us=done_us,
        outcome=outcome,
        detail=None,
        finish_reason="stop",
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
        events=1,
    )


@pytest.mark.parametrize("seed", range(3))
def test_growth_is_what_counting_and_an_independent_regression_find(seed):
    source, window_us = random.Random(seed), 60_000_000
    samples = []
    for at_us in range(-500_000, window_us, 250_000):
        lasts = source.expovariate(1 / (1_500_000 + at_us / 100))
        samples.append(
            sample(at_us, at_us + round(lasts), source.choice(["ok", "ok", "timeout", "connect", "dropped"]))
        )
    instants = [(place + 0.5) * window_us / 600 for place in range(600)]
    counted = [each for each in samples if each.outcome != "dropped"]
    in_flight = [sum(each.at_us <= instant < each.done_us for each in counted) for instant in instants]
    blocks = [in_flight[begin : begin + 50] for begin in range(0, 600, 50)]
    means = [statistics.fmean(block) for block in blocks]
    found = growth(samples, window_us=window_us)
    assert (found.first, found.last) == (statistics.median(in_flight[:200]), statistics.median(in_flight[-200:]))
    assert found.peak == max(in_flight)
    expected = oracle.linregress(range(12), means, alternative="greater").pvalue
    assert 1e-12 < expected < 1
    assert found.p_value == pytest.approx(expected, rel=1e-6)


def test_growth_without_any_scatter_is_certain_and_none_is_no_growth():
    window_us = 12_000_000
    steady = growth([sample(0, 2 * window_us)], window_us=window_us)
    assert (steady.first, steady.last, steady.peak, steady.p_value) == (1, 1, 1, 1.0)
    idle = growth([sample(0, 2 * window_us, "dropped")], window_us=window_us)
    assert (idle.peak, idle.p_value) == (0, 1.0)
    rising = growth([sample(block * 1_000_000, 2 * window_us) for block in range(12)], window_us=window_us)
    assert (rising.first, rising.last, rising.p_value) == (2.5, 10.5, 0.0)
    falling = growth([sample(0, block * 1_000_000) for block in range(1, 13)], window_us=window_us)
    assert falling.p_value == 1.0


@pytest.mark.parametrize(
    ("first", "last", "has_grown"),
    [
        (4.0, 6.0, False),
        (4.0, 6.5, True),
        (1.0, 3.0, True),
        (1.0, 2.5, False),
        (8.0, 12.0, False),
        (8.0, 11.0, False),
        (0.0, 2.0, True),
    ],
)
def test_more_than_half_as_many_again_and_at_least_two_more_is_growth(first, last, has_grown):
    assert Growth(first, last, p_value=0.0, peak=12).has_grown is has_grown
    assert Growth(first, last, p_value=0.0, peak=12).is_overload is has_grown
    assert Growth(first, last, p_value=0.0, peak=12).is_doubtful is has_grown


@pytest.mark.parametrize(
    ("p_value", "is_overload", "is_doubtful"),
    [(0.0009, True, True), (0.001, False, True), (0.0099, False, True), (0.01, False, False), (0.5, False, False)],
)
def test_one_in_a_thousand_is_an_overload_and_one_in_a_hundred_a_doubt(p_value, is_overload, is_doubtful):
    found = Growth(first=1.0, last=9.0, p_value=p_value, peak=9)
    assert (found.is_overload, found.is_doubtful) == (is_overload, is_doubtful)


# ---------------------------------------------------------------------------------------------- bounds


def test_what_is_just_at_its_bound_is_within_it_and_a_microsecond_more_is_not():
    suite = load_suite(rate_per_second="2")
    rule = load_rule(suite, e2e_ms=850)
    found = judged(good_records(suite, ttft_ms=500, tpot_ms=50), rule, suite)
    assert found.verdict is Verdict.PASSED, found.summary
    assert measured(found)["attainment", "value"].k == 64
    over = judged(good_records(suite, ttft_ms=500.001, tpot_ms=50), rule, suite)
    assert codes(over) == ["ttft-over-bound", "e2e-over-bound", "attainment-too-low"]
    over = judged(good_records(suite, ttft_ms=499, tpot_ms=50.001), rule, suite)
    assert codes(over) == ["tpot-over-bound", "attainment-too-low"]


def test_the_numbers_of_a_run_are_those_of_its_rows():
    records = good_records(SUITE)
    break_row(records["requests"][5])
    at = SUITE.plan[9].at_us
    put(records["requests"][9], token_us=at + 600_000, last_us=None, finish_us=at + 635_000, done_us=at + 640_000)
    # An answer that ended with the window is of the window.
    put(records["requests"][20], done_us=WINDOW_US)
    found = measured(judged(records))
    for name, value, limit, misses in (("ttft", 40.0, 500, 2), ("tpot", 5.0, 50, 1), ("e2e", 75.0, 2000, 1)):
        half, most, over = found[name, "p50"], found[name, "p90"], found[f"{name}_over_bound", "value"]
        assert (half.value, half.infinite, half.limit, half.n) == (value, 1, None, 64)
        assert (most.value, most.infinite, most.limit, most.n) == (value, 1, limit, 64)
        assert (over.value, over.k, over.n, over.limit) == (misses / 64, misses, 64, pytest.approx(0.1))
    met, failed = found["attainment", "value"], found["error_ratio", "value"]
    assert (met.value, met.k, met.n, met.limit) == (62 / 64, 62, 64, 0.9)
    assert (failed.value, failed.k, failed.n, failed.limit) == (1 / 64, 1, 64, 0.06)
    for share in (met, failed):
        interval = oracle.binomtest(share.k, 64).proportion_ci(confidence_level=0.9, method="exact")
        assert (share.low, share.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    seconds = WINDOW_US / 1e6
    done = COLUMNS.index("done_us")
    ended = sum(row[done] <= WINDOW_US for row in records["requests"]) - 1
    numbers = {
        "requests": (64, "value"),
        "requests_at_least": (44, "value"),
        "misses_allowed": (1, "value"),
        "rate": (64 / seconds, "mean"),
        "goodput": (62 / seconds, "mean"),
        "output_tokens": (ended * 8 / seconds, "mean"),
    }
    for name, (value, statistic) in numbers.items():
        assert (found[name, statistic].value, found[name, statistic].n) == (pytest.approx(value, rel=1e-9), 64), name
    run = read_run(records, SUITE, requests=64)
    grown = growth([*run.warmup, *run.samples], window_us=WINDOW_US)
    assert found["in_flight_first_third", "p50"].value == grown.first
    assert found["in_flight_last_third", "p50"].value == grown.last
    assert found["in_flight_slope", "t_test"].value == grown.p_value
    assert grown.p_value != growth([*run.warmup, *run.samples], window_us=SUITE.plan[-2].at_us).p_value


def test_an_answer_that_does_not_say_its_tokens_adds_none_to_the_throughput():
    records = good_records(SUITE)
    put(records["requests"][3], completion_tokens=None)
    ended = sum(row[COLUMNS.index("done_us")] <= WINDOW_US for row in records["requests"]) - 1
    found = measured(judged(records))["output_tokens", "mean"]
    assert found.value == pytest.approx(ended * 8 * 1e6 / WINDOW_US, rel=1e-9)


def test_each_kind_of_failure_is_told_with_an_example_of_its_own():
    records = good_records(SUITE)
    for place, outcome in enumerate(("timeout", "connect", "truncated", "http_5xx"), start=1):
        break_row(records["requests"][place], outcome)
        put(records["requests"][place], detail=f"why {outcome}")
    told = {each.code: each.found for each in judged(records).findings if each.code.startswith("request-")}
    assert told == {
        "request-connect": "why connect",
        "request-http-5xx": "why http_5xx",
        "request-timeout": "why timeout",
        "request-truncated": "why truncated",
    }


def test_where_no_miss_is_allowed_that_is_not_none_of_them():
    suite = load_suite(100)
    found = measured(judged(good_records(suite), load_rule(suite, percentile="0.99"), suite))
    assert found["misses_allowed", "value"].value is None


# ---------------------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize(
    ("pids", "verdict"),
    [
        ([7, 7], Verdict.PASSED),
        ([7, 8], Verdict.ERRORED),
        ([8, 7], Verdict.ERRORED),
        ([7, None], Verdict.FAILED),
        ([None, 7], Verdict.PASSED),
        ([None, None], Verdict.PASSED),
    ],
)
def test_an_engine_that_was_seen_must_be_the_same_at_the_end(pids, verdict):
    records = good_records(SUITE)
    records["engine_pids"] = pids
    assert judged(records).verdict is verdict


def test_another_engine_is_said_before_whatever_else_was_wrong():
    records = good_records(SUITE)
    records["engine_pids"] = [7, 8]
    records["harness"].update(loop_lag_us=[25_000] * 10, cpu_us=3_000_000)
    assert codes(judged(records)) == ["engine-replaced", "loop-lag", "generator-busy"]


def test_another_rule_or_suite_judges_nothing():
    other = RollbackRule(gate="rollback", suite=SUITE.digest)
    assert judged(good_records(SUITE), rule=other).verdict is Verdict.ERRORED
    golden = GoldenSuite.model_validate(factories.golden_body())
    assert judged(good_records(SUITE), suite=golden).verdict is Verdict.ERRORED
