"""What live traffic says about a canary step, outcome by outcome."""

import math
import random
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gates import canary, stats
from gates.canary import StepOutcome, is_silence, judge_step, judge_stop, progress
from gates.router import Split
from gates.tally import Tally
from schemas.policy import ErrorRatioCondition, Step
from tests.support.canary import (
    CANDIDATE,
    CONDITIONS,
    CUT,
    ERRORS,
    GOOD,
    ON_STABLE,
    PROBE,
    SLOW,
    SPLIT,
    STABLE,
    STEP,
    T0,
    records,
    tally,
)


def judge(found: Tally, seconds: float, *, step: Step = STEP, conditions=CONDITIONS):
    """Judge at an instant at which the log is alive."""
    now = T0 + timedelta(seconds=seconds)
    found.add([replace(PROBE, at=now - timedelta(seconds=1))])
    return judge_step(found, step, conditions=conditions, now=now)


def test_a_healthy_candidate_passes_when_the_hold_is_over():
    healthy = tally((GOOD, 80), (ON_STABLE, 240))
    early = judge(healthy, 29.9)
    assert (early.outcome, early.reasons) == (StepOutcome.WAITING, ("held 29.9 of 30 s",))
    judgement = judge(healthy, 30)
    assert judgement.outcome is StepOutcome.PASSED
    by_name = {each.name: each for each in judgement.measurements}
    assert (by_name["error_ratio"].k, by_name["error_ratio"].n) == (0, 80)
    assert by_name["error_ratio"].high == pytest.approx(1 - 0.05 ** (1 / 80))
    assert by_name["ttft"].value == 120.0
    assert by_name["ttft"].statistic == "p90"
    assert by_name["observed_weight"].value == 0.25
    # What the stable side showed meanwhile is there to be looked at.
    assert (by_name["baseline_error_ratio"].k, by_name["baseline_error_ratio"].n) == (0, 240)
    assert by_name["baseline_ttft"].n == 240
    assert [by_name[name].value for name in ("open_requests", "client_left", "refused")] == [0, 0, 0]
    assert [by_name[name].n for name in ("open_requests", "client_left", "refused")] == [1, 80, 80]


def test_errors_of_the_stable_side_are_told_beside_and_not_judged():
    judgement = judge(tally((GOOD, 80), (ON_STABLE, 234), (replace(ON_STABLE, flags=CUT.flags), 6)), 30)
    assert judgement.outcome is StepOutcome.PASSED
    beside = next(each for each in judgement.measurements if each.name == "baseline_error_ratio")
    assert (beside.k, beside.n, beside.value) == (6, 240, 0.025)


def test_a_step_waits_for_its_least_requests_and_says_so():
    judgement = judge(tally((GOOD, 59), (ON_STABLE, 180)), 60)
    assert judgement.outcome is StepOutcome.WAITING
    assert "59 of 60 requests" in judgement.reasons[0]


def test_how_far_a_waiting_step_is_is_told_in_one_line():
    judgement = judge(tally((GOOD, 59), (ON_STABLE, 180)), 20)
    assert progress(judgement, [STEP, STEP], 1, 19.6) == (
        "step 2 of 2: 59 of 60 requests, 0 refused, 0 in flight; held 20.0 of 30 s; begun 20 s ago, limit 2 min"
    )


def test_enough_requests_that_prove_too_little_still_wait_and_end_inconclusive():
    # Two of 60 is no breach of 5 %, but its upper bound is 10 %.
    found = tally((GOOD, 58), (CUT, 2), (ON_STABLE, 180))
    assert judge(found, 60).outcome is StepOutcome.WAITING
    judgement = judge(found, 120)
    assert judgement.outcome is StepOutcome.INCONCLUSIVE
    assert judgement.reasons == (
        "error_ratio: 2 of 60 over, limit 0.05 (2 cut by the engine)",
        "ttft above 400 ms: 2 of 60 over, limit 0.1",
    )
    assert judge(found, 121).outcome is StepOutcome.INCONCLUSIVE
    ratio = next(each for each in judgement.measurements if each.name == "error_ratio")
    assert (ratio.value, ratio.k, ratio.n, ratio.limit) == (2 / 60, 2, 60, 0.05)
    assert ratio.low == stats.lower_bound(2, 60)
    weight = next(each for each in judgement.measurements if each.name == "observed_weight")
    assert (weight.value, weight.k, weight.n, weight.limit) == (0.25, 60, 240, 0.25)


def test_a_hold_that_is_just_over_is_no_reason_to_wait():
    few = judge(tally((GOOD, 59), (ON_STABLE, 180)), 30)
    assert few.reasons == ("59 of 60 requests, 0 refused, 0 in flight",)


def test_a_share_that_is_off_by_chance_alone_passes():
    assert judge(tally((GOOD, 86), (ON_STABLE, 234)), 60).outcome is StepOutcome.PASSED
    assert judge(tally((GOOD, 74), (ON_STABLE, 246)), 60).outcome is StepOutcome.PASSED


@pytest.mark.parametrize("good", [60, 100])
def test_the_probability_of_a_split_is_twice_its_smaller_tail(good):
    found = tally((GOOD, good), (ON_STABLE, 240))
    n = good + 240
    p_value = 2 * min(stats.at_most(good, n, 0.25), stats.at_least(good, n, 0.25))
    assert canary._mismatch(found, p_value * 0.999) is None
    assert canary._mismatch(found, p_value * 1.001) is not None


def test_without_a_request_a_condition_says_that_anything_may_be():
    judgement = judge(tally(), 5)
    ratio = next(each for each in judgement.measurements if each.name == "error_ratio")
    assert (ratio.value, ratio.n, ratio.low, ratio.high) == (None, 0, 0.0, 1.0)


def test_a_bound_that_is_just_the_limit_is_within_it():
    assert canary._Share("error_ratio", 0, 1, 0.96).is_proved
    assert canary._Share("error_ratio", 3, 3, 1.0).is_proved
    assert not canary._Share("error_ratio", 0, 0, 1.0).is_proved


def test_no_traffic_is_a_reason_of_its_own():
    judgement = judge(tally((ON_STABLE, 10)), 120)
    assert judgement.outcome is StepOutcome.INCONCLUSIVE
    assert judgement.reasons[0].startswith("no traffic")


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, code=503, flags=frozenset({"UH"}), served=None, ttft_ms=None),
        CUT,
        replace(GOOD, served=STABLE.address),
        replace(GOOD, attempts=2),
        replace(GOOD, flags=frozenset({"SI"})),
    ],
    ids=["5xx", "cut", "other arm", "retried", "a flag nobody foresaw"],
)
def test_each_kind_of_error_takes_traffic_back_early(bad):
    judgement = judge(tally((GOOD, 4), (bad, 4)), 2, conditions=(ERRORS,))
    assert judgement.outcome is StepOutcome.FAILED
    assert judgement.reasons[0].startswith("error_ratio: 4 of 8 over, limit 0.05")


def test_a_slow_candidate_fails_on_ttft_alone():
    judgement = judge(tally((GOOD, 5), (SLOW, 5)), 5)
    assert judgement.outcome is StepOutcome.FAILED
    assert judgement.reasons == ("ttft above 400 ms: 5 of 10 over, limit 0.1",)


def test_a_failed_request_has_infinite_ttft():
    found = tally((GOOD, 6), (replace(CUT, ttft_ms=3.0), 4))
    assert found.arms["candidate"].over(400) == (4, 10)
    assert found.arms["candidate"].percentile_ms(Decimal("0.9")) == math.inf
    ttft = next(each for each in judge(found, 5).measurements if each.name == "ttft")
    assert (ttft.value, ttft.infinite, ttft.n) == (None, 4, 10)


def test_one_bad_request_alone_takes_nothing_back():
    strict = ErrorRatioCondition(metric="error_ratio", max_ratio=Decimal("0.001"))
    assert judge(tally((CUT, 1)), 1, conditions=(strict,)).outcome is StepOutcome.WAITING
    assert judge(tally((CUT, 2)), 1, conditions=(strict,)).outcome is StepOutcome.FAILED


def test_a_limit_of_nothing_fails_at_the_first_error_and_never_passes():
    nothing = ErrorRatioCondition(metric="error_ratio", max_ratio=Decimal(0))
    assert judge(tally((GOOD, 500), (CUT, 1)), 1, conditions=(nothing,)).outcome is StepOutcome.FAILED
    assert judge(tally((GOOD, 5_000), (ON_STABLE, 15_000)), 120, conditions=(nothing,)).outcome is (
        StepOutcome.INCONCLUSIVE
    )
    assert canary.least_requests((nothing,)) is None


def test_clients_that_give_up_on_a_hanging_candidate_are_over_the_bound():
    gave_up = replace(GOOD, flags=frozenset({"DC"}), code=0, ttft_ms=None, duration_ms=5_000.0)
    judgement = judge(tally((gave_up, 5)), 10)
    assert judgement.outcome is StepOutcome.FAILED
    assert judgement.reasons == ("ttft above 400 ms: 5 of 5 over, limit 0.1",)


def test_a_candidate_that_refuses_everything_proves_nothing():
    judgement = judge(tally((replace(GOOD, code=400, is_event_stream=False), 500), (ON_STABLE, 1_500)), 120)
    assert judgement.outcome is StepOutcome.INCONCLUSIVE
    assert "0 of 60 requests, 500 refused, 0 in flight" in judgement.reasons


def test_few_streams_among_many_requests_may_prove_the_ttft():
    whole = replace(GOOD, is_event_stream=False)
    assert judge(tally((GOOD, 30), (whole, 50), (ON_STABLE, 240)), 60).outcome is StepOutcome.PASSED
    judgement = judge(tally((GOOD, 20), (whole, 60), (ON_STABLE, 240)), 60)
    assert judgement.outcome is StepOutcome.WAITING
    assert judgement.reasons == ("ttft above 400 ms: 0 of 20 over, limit 0.1",)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"garbled": 1}, "1 lines of the access log could not be read"),
        ({"lost": True}, "lines of the access log are missing"),
    ],
)
def test_an_unreadable_log_never_passes(fault, reason):
    judgement = judge(tally((GOOD, 80), (ON_STABLE, 240), **fault), 60)
    assert judgement.outcome is StepOutcome.ERRORED
    assert judgement.reasons == (reason,)


def test_a_breach_outranks_a_faulty_log_and_unread_lines_count_as_good():
    assert judge(tally((GOOD, 2), (CUT, 8), garbled=3), 5).outcome is StepOutcome.FAILED
    assert judge(tally((CUT, 2), garbled=30), 5).outcome is StepOutcome.ERRORED


def test_a_probe_that_never_comes_is_an_error_however_healthy_it_was():
    found = tally((GOOD, 80), (ON_STABLE, 240))
    found.expect(T0 + timedelta(seconds=48))
    found.expect(T0 + timedelta(seconds=58))  # the first one that is missing counts
    late = judge_step(found, STEP, conditions=CONDITIONS, now=T0 + timedelta(seconds=59))
    assert late.outcome is StepOutcome.ERRORED
    assert late.reasons == ("the access log lacks a probe of 11 s ago",)
    found.add([replace(PROBE, at=T0 + timedelta(seconds=58))])
    assert judge_step(found, STEP, conditions=CONDITIONS, now=T0 + timedelta(seconds=60)).outcome is StepOutcome.PASSED


def test_a_controller_that_was_away_does_not_blame_the_log():
    found = tally((GOOD, 8), (ON_STABLE, 24))
    found.expect(T0 + timedelta(seconds=60))
    judgement = judge_step(found, STEP, conditions=CONDITIONS, now=T0 + timedelta(seconds=61))
    assert judgement.outcome is StepOutcome.WAITING


def test_a_silence_that_is_just_as_long_as_may_be_is_none():
    found = tally((GOOD, 80), (ON_STABLE, 240))
    newest_at = T0 + timedelta(seconds=50)
    found.add([replace(PROBE, at=newest_at)])
    at = newest_at + timedelta(seconds=canary.STALE_SECONDS)
    assert judge_step(found, STEP, conditions=CONDITIONS, now=at).outcome is StepOutcome.PASSED
    found.expect(newest_at + timedelta(microseconds=1))
    later = at + timedelta(microseconds=1)
    waiting = judge_step(found, STEP, conditions=CONDITIONS, now=later)
    assert (waiting.outcome, waiting.reasons) == (StepOutcome.WAITING, ("the access log has been silent for 10 s",))
    later += timedelta(microseconds=1)
    assert judge_step(found, STEP, conditions=CONDITIONS, now=later).outcome is StepOutcome.ERRORED


def test_nothing_passes_on_a_log_whose_newest_line_is_old():
    found = tally((GOOD, 80), (ON_STABLE, 240))
    judgement = judge_step(found, STEP, conditions=CONDITIONS, now=T0 + timedelta(seconds=60))
    assert judgement.outcome is StepOutcome.WAITING
    assert judgement.reasons == ("the access log has been silent for 58 s",)


def test_a_split_that_is_not_the_desired_one_never_passes():
    judgement = judge(tally((GOOD, 80), (ON_STABLE, 140)), 60)  # 36 % instead of 25 %
    assert judgement.outcome is StepOutcome.ERRORED
    assert judgement.reasons[0].startswith("split mismatch: 80 of 220")


def test_a_gross_mismatch_is_an_error_before_the_step_could_pass():
    judgement = judge(tally((GOOD, 20)), 2)
    assert judgement.outcome is StepOutcome.ERRORED
    assert "split mismatch: 20 of 20 requests went to the candidate where 25.00% is desired" in judgement.reasons


def test_a_request_drawn_for_a_cluster_outside_the_split_is_a_mismatch():
    judgement = judge(tally((GOOD, 1), (replace(GOOD, assigned="ghost"), 1)), 2)
    assert judgement.outcome is StepOutcome.ERRORED
    assert "1 to no arm of it" in judgement.reasons[0]


def test_the_whole_share_needs_no_stable_arm_and_tolerates_no_other():
    whole = Split("chat@prod", 8, (replace(CANDIDATE, weight_bp=10_000),))
    record = replace(GOOD, revision=8, assigned=CANDIDATE.cluster)
    assert judge(tally((record, 80), split=whole), 60).outcome is StepOutcome.PASSED
    stray = replace(record, assigned="ghost")
    assert judge(tally((record, 80), (stray, 1), split=whole), 60).outcome is StepOutcome.ERRORED


def test_another_revision_counts_as_error_but_not_for_the_split():
    older = replace(CUT, revision=6, at=T0 - timedelta(seconds=5), duration_ms=6_000.0)
    found = tally((older, 4))
    assert found.assigned.total() == 0
    assert judge(found, 2).outcome is StepOutcome.FAILED


@pytest.mark.parametrize("slow", [7, 40])
def test_a_candidate_whose_requests_have_not_ended_got_its_share_all_the_same(slow):
    found = tally((ON_STABLE, 80))
    assert judge(found, 5).outcome is StepOutcome.ERRORED
    found.see(T0, {"stable": 0, "candidate": slow})
    judgement = judge(found, 5)
    assert judgement.outcome is StepOutcome.WAITING
    assert judgement.reasons[0] == f"0 of 60 requests, 0 refused, {slow} in flight"
    assert next(each for each in judgement.measurements if each.name == "open_requests").value == slow
    ended = judge(found, 120)
    assert ended.outcome is StepOutcome.INCONCLUSIVE
    assert ended.reasons[0] == "no request of the candidate has ended in 120 s"


def test_a_stable_arm_whose_requests_have_not_ended_got_its_share_too():
    found = tally((GOOD, 20))
    found.see(T0, {"stable": 60, "candidate": 0})
    assert judge(found, 2).outcome is StepOutcome.WAITING
    # What was open a moment ago may have ended since without a line; what was open before that has one.
    found.see(T0 + timedelta(seconds=2), {"stable": 3, "candidate": 200})
    assert judge(found, 3).outcome is StepOutcome.WAITING
    found.see(T0 + timedelta(seconds=2.001), {"stable": 3, "candidate": 200})
    judgement = judge(found, 3)
    assert judgement.outcome is StepOutcome.ERRORED
    said = "20 of 20 requests went to the candidate (200 of its requests are open) where 25.00% is desired"
    assert judgement.reasons == (f"split mismatch: {said}",)


@pytest.mark.parametrize(
    ("waiting", "outcome"), [(0, "errored"), (10, "errored"), (50, "passed"), (1_000, "passed"), (1_000_000, "passed")]
)
def test_open_requests_count_up_to_the_desired_share_and_no_further(waiting, outcome):
    # 60 of 390 are 15 % where 25 % are desired; with 50 more it is 110 of 440, exactly the share.
    found = tally((GOOD, 60), (ON_STABLE, 330))
    found.see(T0, {"stable": 0, "candidate": waiting})
    assert judge(found, 60).outcome == outcome


@pytest.mark.parametrize(
    ("good", "stable", "waiting", "drawn"),
    [
        (60, 330, {"candidate": 0}, (60, 390)),
        (60, 330, {"candidate": 49}, (109, 439)),
        (60, 330, {"candidate": 51}, (110, 440)),
        (60, 330, {"stable": 9}, (60, 390)),
        (110, 290, {"stable": 39}, (110, 439)),
        (110, 290, {"stable": 41}, (110, 440)),
        (110, 290, {"candidate": 9}, (110, 400)),
        (110, 330, {"candidate": 9, "stable": 9}, (110, 440)),
        (0, 3, {"candidate": 9}, (1, 4)),
        (0, 0, {"candidate": 9, "stable": 9}, (0, 0)),
    ],
)
def test_a_draw_is_told_with_those_unwritten_that_bring_it_to_the_desired_share(good, stable, waiting, drawn):
    found = tally((GOOD, good), (ON_STABLE, stable))
    found.see(T0, waiting)
    assert canary._drawn(found, good + stable, 0.25) == drawn


def test_the_whole_share_is_not_doubted_because_of_open_requests():
    whole = Split("chat@prod", 8, (replace(CANDIDATE, weight_bp=10_000),))
    record = replace(GOOD, revision=8, assigned=CANDIDATE.cluster)
    found = tally((record, 80), split=whole)
    found.see(T0, {"candidate": 12})
    assert judge(found, 60).outcome is StepOutcome.PASSED
    found.add([replace(record, assigned="ghost")])
    assert judge(found, 60).outcome is StepOutcome.ERRORED


def test_a_candidate_without_weight_that_gets_requests_is_a_mismatch_whatever_is_open():
    none = Split("chat@prod", 7, (replace(STABLE, weight_bp=10_000), replace(CANDIDATE, weight_bp=0)))
    found = tally((ON_STABLE, 80), split=none)
    assert judge(found, 5).outcome is StepOutcome.WAITING
    found.add([GOOD])
    found.see(T0, {"stable": 500, "candidate": 500})
    assert judge(found, 5).outcome is StepOutcome.ERRORED


def test_a_silent_gateway_is_told_from_every_other_fault_and_its_last_probe_belongs_to_it():
    silent, unlogged = "the gateway has not answered for 12 s: no socket", "the access log lacks a probe of 14 s ago"
    assert is_silence([silent])
    assert is_silence([unlogged, silent])
    assert not is_silence([unlogged])
    assert not is_silence([silent, "lines of the access log are missing"])
    assert not is_silence([])
    lacking = tally((GOOD, 80), (ON_STABLE, 240))
    lacking.expect(T0 + timedelta(seconds=49))
    told = judge_stop(lacking, conditions=CONDITIONS, now=T0 + timedelta(seconds=60))
    assert told.reasons == ("the access log lacks a probe of 11 s ago",)


def test_nothing_passes_while_the_gateway_does_not_say_what_is_open_and_it_holds_when_that_lasts():
    found = tally((GOOD, 80), (ON_STABLE, 240))
    found.miss(T0 + timedelta(seconds=49), "no socket")
    found.miss(T0 + timedelta(seconds=55), "no answer")
    waiting = judge(found, 59)
    assert waiting.outcome is StepOutcome.WAITING
    assert waiting.reasons == ("the gateway has not said how many requests are open",)
    assert not [each for each in waiting.measurements if each.name == "open_requests"]
    assert judge(found, 59).outcome is StepOutcome.WAITING
    holding = judge(found, 59.5)
    assert holding.outcome is StepOutcome.ERRORED
    assert holding.reasons == ("the gateway has not answered for 10 s: no answer",)
    assert is_silence(holding.reasons)
    found.see(T0, {})
    assert judge(found, 60).outcome is StepOutcome.PASSED
    found.miss(T0 + timedelta(seconds=61), "no answer")
    assert judge(found, 62).outcome is StepOutcome.WAITING


def test_a_gateway_that_does_not_answer_stops_no_breach_and_its_split_is_not_doubted():
    found = tally((GOOD, 4), (CUT, 4))
    found.miss(T0, "no socket")
    assert judge(found, 60).outcome is StepOutcome.FAILED
    found = tally((GOOD, 80))
    found.miss(T0 + timedelta(seconds=59), "no socket")
    assert judge(found, 60).outcome is StepOutcome.WAITING
    never = Tally(SPLIT, T0)
    never.add([GOOD] * 80 + [ON_STABLE] * 240)
    assert judge(never, 60).outcome is StepOutcome.WAITING


def test_without_stop_conditions_nothing_passes():
    judgement = judge(tally((GOOD, 80), (ON_STABLE, 240)), 60, conditions=())
    assert judgement.outcome is StepOutcome.ERRORED
    assert judgement.reasons == ("the policy has no stop condition",)


def test_a_split_without_a_candidate_cannot_be_judged():
    alone = Split("chat@prod", 7, (replace(STABLE, weight_bp=10_000),))
    judgement = judge(tally((ON_STABLE, 80), split=alone), 60)
    assert judgement.outcome is StepOutcome.ERRORED
    assert "the split has no candidate" in judgement.reasons


def test_while_paused_a_breach_still_fails_and_nothing_passes():
    now = T0 + timedelta(seconds=5)
    assert judge_stop(tally((CUT, 4)), conditions=CONDITIONS, now=now).outcome is StepOutcome.FAILED
    healthy = tally((GOOD, 80), (ON_STABLE, 240))
    assert judge_stop(healthy, conditions=CONDITIONS, now=now).outcome is StepOutcome.WAITING


@pytest.mark.parametrize(("ratio", "floor"), [("0.05", 59), ("0.02", 149), ("0.01", 299), ("0.1", 29), ("1", 1)])
def test_the_least_sample_of_a_condition_is_the_one_that_just_passes(ratio, floor):
    condition = ErrorRatioCondition(metric="error_ratio", max_ratio=Decimal(ratio))
    assert canary.least_requests((condition,)) == floor
    assert stats.upper_bound(0, floor) <= float(ratio)
    assert floor == 1 or stats.upper_bound(0, floor - 1) > float(ratio)


def test_the_least_sample_of_several_conditions_is_the_largest():
    assert canary.least_requests(CONDITIONS) == 59
    assert canary.least_requests(()) is None


@pytest.mark.parametrize(("share", "least", "most"), [(0.005, 0.0, 0.02), (0.02, 0.04, 0.16), (0.1, 0.98, 1.0)])
def test_looking_at_every_request_costs_what_the_module_says(share, least, most):
    """1,500 requests a step, limit 2 %, a look after each: how often traffic is taken back."""
    limit = ErrorRatioCondition(metric="error_ratio", max_ratio=Decimal("0.02"))
    rng, taken_back, runs = random.Random(4), 0, 120
    # The largest n that breaches at each k, by the judge itself: a look between these cannot change the outcome.
    latest = {}
    for k in range(2, 60):
        low, high = k, 4_000
        while low < high:
            middle = (low + high + 1) // 2
            breached = canary._Share("error_ratio", k, middle, canary.limit_ratio(limit)).is_breached(0)
            low, high = (middle, high) if breached else (low, middle - 1)
        latest[k] = low
    for _ in range(runs):
        k = 0
        for n in range(1, 1_501):
            k += rng.random() < share
            if k >= 2 and n <= latest.get(k, n):
                taken_back += 1
                break
    assert least <= taken_back / runs <= most


@given(st.integers(0, 10_000), st.floats(0, 1e6), st.sampled_from(["0", "0.05", "1"]), st.integers(0, 2))
def test_nothing_passes_without_requests(others, seconds, ratio, garbled):
    step = Step(weight_bp=2_500, hold_seconds=Decimal(0), min_requests=1, max_seconds=Decimal(0))
    condition = ErrorRatioCondition(metric="error_ratio", max_ratio=Decimal(ratio))
    found = tally((replace(GOOD, target="other@prod"), min(others, 3)), garbled=garbled)
    assert judge(found, seconds, step=step, conditions=(condition,)).outcome is not StepOutcome.PASSED


@settings(deadline=None)
@given(st.lists(st.tuples(records, st.integers(0, 40)), max_size=6), st.sampled_from([CUT, SLOW]), st.integers(1, 30))
def test_more_trouble_never_turns_a_failure_into_a_pass(groups, bad, more):
    before = judge(tally(*groups), 60)
    after = judge(tally(*groups, (bad, more)), 60)
    if before.outcome is StepOutcome.FAILED:
        assert after.outcome is not StepOutcome.PASSED
    if after.outcome is StepOutcome.PASSED:
        assert before.outcome is not StepOutcome.FAILED


@settings(deadline=None)
@given(st.lists(st.tuples(records, st.integers(0, 40)), max_size=6))
def test_a_pass_rests_on_enough_good_requests_within_every_limit(groups):
    found = tally(*groups)
    if judge(found, 60).outcome is StepOutcome.PASSED:
        seen = found.arms["candidate"]
        assert seen.n >= STEP.min_requests
        assert stats.upper_bound(seen.errors, seen.n) <= 0.05
        assert stats.upper_bound(*seen.over(400)) <= 0.1
