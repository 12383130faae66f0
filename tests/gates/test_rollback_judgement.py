"""What the records of a drill mean, from records written by hand."""

import copy
import json

import pytest

from gates.answers import Outcome
from gates.catalog import conclude, recompute
from gates.gate import GateContext, JudgeInput
from gates.rollback_judgement import CAUSES, COLD_START, CRASH, DURING_SHIFT, causes, judge, no_way_back
from gates.rollback_traffic import COLUMNS
from schemas.bundle import Bundle
from schemas.common import canonical_json
from schemas.policy import RollbackRule
from schemas.result import Severity, Verdict
from schemas.suite import LoadSuite
from tests.support import factories

SUITE = LoadSuite.model_validate(factories.load_body(requests=20, gap_us=100_000))
CHAT = Bundle.model_validate(factories.bundle_body())
RULE = RollbackRule(gate="rollback", suite=SUITE.digest)
CANDIDATE, ACCEPTED, ANEW = "127.0.0.1:1001", "127.0.0.1:1002", "127.0.0.1:1003"
BUNDLE = "sha256:" + "a" * 64
HI, HE = "1" * 64, "2" * 64


def row(name, at_us, *, served, output, revision, done_us=None, **changes):
    told = {
        "id": name,
        "prompt": "p0",
        "at_us": at_us,
        "sent_us": at_us + 100,
        "done_us": at_us + 5_000 if done_us is None else done_us,
        "outcome": "ok",
        "detail": None,
        "is_silent": False,
        "output": output,
        "served": served,
        "route": "split",
        "revision": revision,
        "code": 200,
    } | changes
    assert tuple(told) == COLUMNS
    return list(told.values())


def machine(foreign):
    """What two processors did for ten seconds: a share of them for others."""
    own, engine = 500_000, 6_000_000
    busy = own + engine + round(foreign * 20_000_000)
    return {"cores": 2, "wall_us": 10_000_000, "busy_us": busy, "engine_us": engine, "own_us": own}


IDLE = {"outcome": "http_5xx", "detail": "503", "served": None, "route": "idle", "code": 503, "output": None}


def exercise(cause, number, *, has_accepted=True):
    """A drill of a cause that goes as it should: the tenth request is open on the candidate at the trigger."""
    start = number * 10_000_000
    trigger = start + 950_000
    is_anew = has_accepted and CAUSES.index(cause) >= CAUSES.index(COLD_START)
    back = ANEW if is_anew else ACCEPTED if has_accepted else None
    after = {"served": back, "output": HI, "revision": 3} | ({} if has_accepted else IDLE)
    pids = [22, 23] if cause == COLD_START else [23, 23] if is_anew else [22, 22]
    requests = []
    for place, arrival in enumerate(SUITE.plan):
        at = start + arrival.at_us - SUITE.plan[0].at_us
        arm = {"served": CANDIDATE, "output": HE, "revision": 2} if at < trigger else after
        done = at + 90_000 if place == 9 else None
        requests.append(row(f"{cause}-{place}", at, done_us=done, **arm))
    return {
        "cause": cause,
        "trigger_us": trigger,
        "back": back,
        "gone_us": trigger + 2_000 if cause == CRASH else None,
        "ready_us": trigger + 4_000 if cause == COLD_START else None,
        "restored": {"revision": 3, "at_us": trigger + 5_000, "problem": None, "is_late": False},
        "again": {"revision": 3, "at_us": trigger + 6_000, "problem": None, "is_late": False},
        "machine": machine(0.1),
        "pids": {"candidate": [11, 11], "accepted": pids if has_accepted else [None, None]},
        "requests": requests,
        "probes": [row(f"{cause}-quiet-0", start + 4_000_000, **after)],
    }


def drill(*, has_accepted=True):
    return {
        "columns": list(COLUMNS),
        "candidate": {"bundle": "sha256:" + "b" * 64, "address": CANDIDATE},
        "accepted": {"bundle": BUNDLE, "address": ACCEPTED} if has_accepted else None,
        "answers": {"p0": [HI, HI]} if has_accepted else {},
        "exercises": [
            exercise(cause, place, has_accepted=has_accepted)
            for place, cause in enumerate(causes(has_accepted=has_accepted))
        ],
    }


def change(records, number, place, *, to="requests", **changes):
    """Change one row of one exercise."""
    told = records["exercises"][number][to][place]
    for name, value in changes.items():
        told[COLUMNS.index(name)] = value
    return records


def judged(records, rule=RULE, suite=SUITE):
    return judge(JudgeInput(rule, records, CHAT, suite))


def value(found, name):
    (one,) = [measured for measured in found.measurements if measured.name == name]
    return one.value


def codes(found):
    return [one.code for one in found.findings]


def test_a_drill_that_goes_back_for_every_cause_passes_and_says_how_fast():
    found = judged(drill())
    assert found.verdict is Verdict.PASSED, found.summary
    assert not found.findings
    assert value(found, "recovery_manual") == 55.0  # the first request after the trigger, sent 50.1 ms after it
    assert value(found, "acknowledged_manual") == 5.0
    assert value(found, "lost_requests") == 0
    assert value(found, "open_at_trigger") == len(CAUSES)
    assert "0 of 120 requests were lost" in found.summary


def test_a_result_tells_each_time_with_its_limit():
    records = drill()
    for place in range(10, 20):
        change(records, CAUSES.index(DURING_SHIFT), place, revision=2)
    change(records, CAUSES.index(DURING_SHIFT), 0, to="probes", done_us=34_950_000)
    for place in range(10, 20):
        change(records, CAUSES.index(COLD_START), place, revision=2)
    found = judged(records)
    assert found.verdict is Verdict.PASSED, found.summary
    assert found.summary == (
        f"Traffic went back to the accepted bundle {BUNDLE[:19]} after each of 6 causes, at most 4000 ms after it and"
        " 3055 ms where its engine had to boot first; 0 of 120 requests were lost."
    )
    limits = {one.name: (one.value, one.limit) for one in found.measurements}
    assert limits["recovery_during_shift"] == (4_000.0, 120_000.0)
    assert limits["recovery_cold_start"] == (3_055.0, 600_000.0)
    assert [name for name in limits if name.startswith("boot_")] == ["boot_cold_start"]
    assert limits["lost_requests"] == (0.0, 0.0)
    assert limits["told_no_traffic"] == limits["cut_by_crash"] == (0.0, None)


def test_a_target_that_has_accepted_nothing_is_told_503_and_that_is_said():
    found = judged(drill(has_accepted=False))
    assert found.verdict is Verdict.PASSED, found.summary
    assert found.summary.startswith("The target has accepted no bundle yet")
    assert value(found, "told_no_traffic") == 50
    assert value(found, "lost_requests") == 0


@pytest.mark.parametrize("reason", ["boot", "bytes", "blobs"])
def test_without_a_bundle_to_go_back_to_it_fails(reason):
    found = judged(no_way_back(reason, "it is so", bundle=BUNDLE, log_tail=["the last line"]))
    assert found.verdict is Verdict.FAILED
    assert codes(found) == ["no-way-back"]
    assert BUNDLE[:19] in found.summary
    assert found.findings[0].found == "the last line"


def test_a_router_that_does_not_acknowledge_fails_even_when_traffic_went_back():
    records = drill()
    failed = {"revision": None, "at_us": None, "problem": "no answer in 10 s", "is_late": True}
    records["exercises"][0]["restored"] = failed
    found = judged(records)
    assert found.verdict is Verdict.FAILED
    assert codes(found) == ["router-did-not-go-back"]
    assert "no answer in 10 s" in found.summary


def test_an_answer_that_comes_too_late_fails():
    rule = RULE.model_copy(update={"recovery_seconds": type(RULE.recovery_seconds)("0.05")})
    found = judged(drill(), rule)
    assert found.verdict is Verdict.FAILED
    assert set(codes(found)) == {"not-recovered"}


def test_an_engine_that_has_to_boot_first_has_a_time_of_its_own():
    seconds = type(RULE.recovery_seconds)
    assert value(judged(drill()), "boot_cold_start") == 4.0
    assert judged(drill(), RULE.model_copy(update={"cold_recovery_seconds": seconds("0.06")})).verdict is Verdict.PASSED
    found = judged(drill(), RULE.model_copy(update={"cold_recovery_seconds": seconds("0.05")}))
    assert codes(found) == ["not-recovered"]
    assert "cold_start: no answer of the accepted bundle" in found.summary
    warm = RULE.model_copy(update={"recovery_seconds": seconds("0.05"), "cold_recovery_seconds": seconds("0.06")})
    assert "cold_start" not in judged(drill(), warm).summary


def cold(records):
    return records["exercises"][CAUSES.index(COLD_START)]


def test_an_accepted_bundle_that_does_not_boot_again_fails():
    records = drill()
    failed = {"revision": None, "at_us": None, "problem": "exited: the engine exited with status 1", "is_late": False}
    records["exercises"] = records["exercises"][: CAUSES.index(COLD_START) + 1]
    cold(records).update(ready_us=None, back=ACCEPTED, restored=failed, again=failed, probes=[])
    cold(records)["pids"]["accepted"] = [22, None]
    for place in range(10, 20):
        change(records, CAUSES.index(COLD_START), place, served=CANDIDATE, revision=2, output=HE)
    found = judged(records)
    assert found.verdict is Verdict.FAILED, found.summary
    assert codes(found) == ["accepted-not-booted", "not-recovered"]
    assert value(found, "lost_requests") == 0


def test_the_plan_may_be_sent_again_once_the_engine_is_ready_and_nowhere_else():
    records = drill()
    more = copy.deepcopy(cold(records)["requests"])
    for row_ in more:
        for name in ("at_us", "sent_us", "done_us"):
            row_[COLUMNS.index(name)] += 3_000_000
        row_[COLUMNS.index("served")] = ANEW
    cold(records)["requests"] += more
    found = judged(records)
    assert found.verdict is Verdict.PASSED, found.summary
    assert "0 of 140 requests were lost" in found.summary
    elsewhere = drill()
    elsewhere["exercises"][0]["requests"] *= 2
    assert judged(elsewhere).verdict is Verdict.ERRORED


def test_answers_under_an_older_split_are_not_those_of_the_restored_one():
    records = drill()
    for place in range(20):
        change(records, 0, place, revision=2)
    change(records, 0, 0, to="probes", revision=2)
    assert codes(judged(records)) == ["not-recovered"]


def test_a_second_rollback_that_changes_something_fails():
    records = drill()
    records["exercises"][2]["again"]["revision"] = 4
    assert codes(judged(records)) == ["second-rollback-changed"]
    records["exercises"][2]["again"] = {"revision": None, "at_us": None, "problem": "there is none", "is_late": False}
    found = judged(records)
    assert codes(found) == ["second-rollback-changed"]
    assert "there is none" in found.summary


def test_traffic_on_the_candidate_long_after_the_acknowledgement_fails():
    records = change(drill(), 1, 19, served=CANDIDATE)
    records["exercises"][1]["requests"][19][COLUMNS.index("sent_us")] += 2_000_000
    records["exercises"][1]["requests"][19][COLUMNS.index("done_us")] += 2_000_000
    assert codes(judged(records)) == ["back-on-candidate"]


def test_another_answer_than_before_the_drill_fails():
    found = judged(change(drill(), 3, 0, to="probes", output=HE))
    assert found.verdict is Verdict.FAILED
    assert codes(found) == ["answers-differ"]
    assert found.findings[0].pointer == "p0"


def test_a_quiet_question_that_the_candidate_answers_fails():
    found = judged(change(drill(), 3, 0, to="probes", served=CANDIDATE))
    assert "not-answered-after" in codes(found)


@pytest.mark.parametrize("place", [0, 9, 15], ids=["before", "open at the trigger", "after"])
def test_a_lost_request_fails_unless_the_rule_allows_it(place):
    records = change(drill(), 0, place, outcome="truncated", detail="the connection was cut")
    found = judged(records)
    assert found.verdict is Verdict.FAILED
    assert codes(found) == ["requests-lost"]
    assert value(found, "lost_requests") == 1
    assert judged(records, RULE.model_copy(update={"lost_max": 1})).verdict is Verdict.PASSED


def test_a_stream_that_ends_as_if_it_were_whole_fails_whatever_the_rule_allows():
    records = change(drill(), 0, 9, outcome="truncated", is_silent=True)
    found = judged(records, RULE.model_copy(update={"lost_max": 1}))
    assert found.verdict is Verdict.FAILED
    assert codes(found) == ["stream-cut-silently"]


def test_what_was_open_on_a_killed_engine_is_counted_apart_and_what_came_later_is_not():
    number = CAUSES.index(CRASH)
    found = judged(change(drill(), number, 9, outcome="truncated", detail="the connection was cut"))
    assert found.verdict is Verdict.PASSED, found.summary
    assert value(found, "cut_by_crash") == 1
    late = change(drill(), number, 10, outcome="http_5xx", served=None, code=503)
    assert codes(judged(late)) == ["requests-lost"]
    on_accepted = change(drill(), number, 9, outcome="truncated", served=ACCEPTED)
    assert "requests-lost" in codes(judged(on_accepted))


def test_a_503_of_the_engine_is_lost_also_where_nothing_is_accepted():
    records = change(drill(has_accepted=False), 0, 3, outcome="http_5xx", code=503, output=None)
    assert codes(judged(records)) == ["requests-lost"]


@pytest.mark.parametrize("changes", [{"code": 502}, {"code": 504}, {"route": "hold"}, {"route": "split"}])
def test_only_the_gateways_own_503_means_no_traffic(changes):
    records = change(drill(has_accepted=False), 1, 15, **changes)
    assert codes(judged(records)) == ["requests-lost"]


@pytest.mark.parametrize("other", ["127.0.0.1:1000", "127.0.0.1:9999"])
def test_the_answer_of_an_engine_that_is_neither_side_is_not_the_accepted_bundles(other):
    records = change(drill(), 1, 0, to="probes", served=other)
    assert codes(judged(records)) == ["not-answered-after"]
    for place in range(10, 20):
        change(records, 1, place, served=other)
    assert codes(judged(records)) == ["not-recovered"]


@pytest.mark.parametrize("output", ["0" * 64, "3" * 64])
def test_an_answer_differs_in_either_direction(output):
    assert codes(judged(change(drill(), 1, 0, to="probes", output=output))) == ["answers-differ"]


def test_lost_requests_are_told_by_kind_by_engine_and_by_cause():
    records = change(drill(), 1, 3, outcome="truncated")
    for place in (14, 15):
        change(records, 2, place, outcome="timeout")
    found = judged(records)
    assert found.summary == (
        "3 requests got no whole answer (timeout, truncated; 1 of them on the candidate; gate_failed, slo_breach);"
        " 0 are allowed"
    )


def test_a_cut_by_a_crash_and_a_503_for_no_traffic_are_counted_apart():
    number = len(causes(has_accepted=False)) - 1
    records = change(drill(has_accepted=False), number, 9, outcome="truncated")
    found = judged(records)
    assert found.verdict is Verdict.PASSED, found.summary
    assert (value(found, "cut_by_crash"), value(found, "told_no_traffic")) == (1.0, 50.0)


@pytest.mark.parametrize(("sent_us", "is_lost"), [(4_999, False), (5_000, False), (5_001, True)])
def test_where_nothing_is_accepted_what_was_sent_up_to_the_acknowledgement_may_be_cut_by_a_crash(sent_us, is_lost):
    number = len(causes(has_accepted=False)) - 1
    records = drill(has_accepted=False)
    trigger = records["exercises"][number]["trigger_us"]
    changes = {"outcome": "truncated", "route": "split", "code": 200, "sent_us": trigger + sent_us}
    found = judged(change(records, number, 10, **changes))
    assert codes(found) == (["requests-lost"] if is_lost else [])


@pytest.mark.parametrize(("done_us", "is_lost"), [(-1, True), (0, False), (1, False)])
@pytest.mark.parametrize("has_accepted", [True, False])
def test_only_what_was_open_when_the_engine_was_killed_may_be_cut(has_accepted, done_us, is_lost):
    number = len(causes(has_accepted=has_accepted)) - 1
    records = drill(has_accepted=has_accepted)
    at = records["exercises"][number]["trigger_us"] + done_us
    found = judged(change(records, number, 9, outcome="truncated", route="a", done_us=at))
    assert codes(found) == (["requests-lost"] if is_lost else [])
    assert value(found, "cut_by_crash") == (0 if is_lost else 1)


@pytest.mark.parametrize(("sent_us", "is_lost"), [(2_000, False), (2_001, True)])
def test_what_was_sent_when_the_killed_engine_was_gone_is_lost(sent_us, is_lost):
    number = CAUSES.index(CRASH)
    records = drill()
    at = records["exercises"][number]["trigger_us"] + sent_us
    found = judged(change(records, number, 10, outcome="truncated", served=None, sent_us=at))
    assert codes(found) == (["requests-lost"] if is_lost else [])


def test_fewer_lost_requests_than_the_rule_allows_are_no_fault():
    records = change(drill(), 0, 3, outcome="truncated")
    assert judged(records, RULE.model_copy(update={"lost_max": 2})).verdict is Verdict.PASSED


def test_an_answer_at_the_limit_is_in_time_and_one_under_a_later_split_counts():
    seconds = type(RULE.recovery_seconds)
    exactly = {"recovery_seconds": seconds("0.055"), "cold_recovery_seconds": seconds("0.055")}
    records = drill()
    for place in range(10, 20):
        change(records, 1, place, revision=4)
    assert judged(records, RULE.model_copy(update=exactly)).verdict is Verdict.PASSED


def test_an_answer_counts_when_its_request_came_with_the_trigger_or_later():
    records = drill()
    trigger = records["exercises"][1]["trigger_us"]
    change(records, 1, 9, served=ACCEPTED, revision=3, output=HI, done_us=trigger + 1_000)
    assert value(judged(records), "recovery_gate_failed") == 55.0
    change(records, 1, 9, sent_us=trigger)
    assert value(judged(records), "recovery_gate_failed") == 1.0


def test_a_request_is_stale_only_later_than_a_router_takes_to_write():
    records = drill()
    at = records["exercises"][1]["restored"]["at_us"] + 1_000_000
    change(records, 1, 19, served=CANDIDATE, sent_us=at, done_us=at)
    assert judged(records).verdict is Verdict.PASSED
    assert codes(judged(change(records, 1, 19, sent_us=at + 1, done_us=at + 1))) == ["back-on-candidate"]
    assert codes(judged(busy(records, 1)))[0] == "machine-busy"


def test_a_boot_that_was_waited_for_in_vain_on_a_busy_machine_is_nobodys_fault():
    records = drill()
    failed = {"revision": None, "at_us": None, "problem": "not ready in 600 s", "is_late": True}
    number = CAUSES.index(COLD_START)
    records["exercises"] = records["exercises"][: number + 1]
    cold(records).update(ready_us=None, back=ACCEPTED, restored=failed, again=failed, probes=[])
    cold(records)["pids"]["accepted"] = [22, None]
    for place in range(10, 20):
        change(records, number, place, served=CANDIDATE, revision=2, output=HE)
    assert judged(records).verdict is Verdict.FAILED
    assert judged(busy(records, number)).verdict is Verdict.ERRORED


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 6),
        ({"sent_us": 10_950_000}, 6),
        ({"sent_us": 10_950_001}, 5),
        ({"done_us": 10_950_000}, 6),
        ({"done_us": 10_949_999}, 5),
        ({"served": ACCEPTED}, 5),
        ({"served": "127.0.0.1:1000"}, 5),
    ],
)
def test_a_stream_was_open_when_the_candidate_had_it_at_the_trigger(changes, count):
    assert value(judged(change(drill(), 1, 9, **changes)), "open_at_trigger") == count


@pytest.mark.parametrize("cause", [each for each in CAUSES if each != CRASH])
def test_one_open_stream_of_any_cause_but_the_crash_is_enough(cause):
    records = drill()
    for number, each in enumerate(CAUSES):
        if each != cause:
            at = records["exercises"][number]["requests"][9][COLUMNS.index("at_us")]
            change(records, number, 9, done_us=at + 1_000)
    assert not judged(records).findings


def test_a_cause_that_came_with_the_end_of_the_last_request_met_it():
    records = drill()
    last = records["exercises"][0]["requests"][19][COLUMNS.index("done_us")]
    records["exercises"][0].update(trigger_us=last)
    records["exercises"][0]["restored"]["at_us"] = records["exercises"][0]["again"]["at_us"] = last + 1
    assert judged(records).verdict is Verdict.PASSED
    records["exercises"][0].update(trigger_us=last + 1)
    assert judged(records).verdict is Verdict.ERRORED


def test_a_drill_whose_triggers_met_no_open_stream_says_so():
    records = drill()
    for number, cause in enumerate(CAUSES):
        if cause != CRASH:
            at = records["exercises"][number]["requests"][9][COLUMNS.index("at_us")]
            change(records, number, 9, done_us=at + 1_000)
    found = judged(records)
    assert found.verdict is Verdict.PASSED
    assert [(one.code, one.severity) for one in found.findings] == [("no-stream-open", Severity.INFO)]


def busy(records, number, foreign=0.21):
    records["exercises"][number]["machine"] = machine(foreign)
    return records


def test_answers_that_timed_out_on_a_machine_that_others_kept_busy_are_nobodys_fault():
    records = change(drill(), 2, 15, outcome="timeout")
    assert judged(records).verdict is Verdict.FAILED
    found = judged(busy(records, 2))
    assert found.verdict is Verdict.ERRORED
    assert [(one.code, one.severity) for one in found.findings] == [
        ("machine-busy", Severity.BLOCK),
        ("requests-lost", Severity.INFO),
    ]
    assert found.summary.startswith("Other processes used 21% of the machine's 2 processors meanwhile")
    assert "1 requests got no whole answer (timeout" in found.summary
    assert value(found, "foreign_cpu") == pytest.approx(0.21)
    # In that very exercise, and by being slow alone.
    assert judged(busy(change(drill(), 2, 15, outcome="timeout"), 3)).verdict is Verdict.FAILED
    assert judged(change(busy(records, 2), 2, 16, outcome="truncated")).verdict is Verdict.FAILED
    assert judged(busy(drill(), 2)).verdict is Verdict.PASSED
    unseen = change(drill(), 2, 15, outcome="timeout")
    unseen["exercises"][2]["machine"] = machine(0.9) | {"engine_us": None}
    assert judged(unseen).verdict is Verdict.FAILED


def test_what_came_too_late_on_a_busy_machine_is_nobodys_fault_and_a_refusal_is():
    rule = RULE.model_copy(update={"recovery_seconds": type(RULE.recovery_seconds)("0.05")})
    records = drill()
    for number in range(len(CAUSES)):
        assert judged(records, rule).verdict is Verdict.FAILED
        busy(records, number)
    assert judged(records, rule).verdict is Verdict.ERRORED
    failed = {"revision": None, "at_us": None, "problem": "no answer in 10 s", "is_late": True}
    records["exercises"][0]["restored"] = failed
    assert judged(records).verdict is Verdict.ERRORED
    records["exercises"][0]["restored"] = failed | {"is_late": False}
    assert judged(records).verdict is Verdict.FAILED


def test_an_answer_that_is_another_one_is_a_fault_however_busy_the_machine_is():
    records = busy(change(drill(), 3, 0, to="probes", output=HE), 3, 0.9)
    assert codes(judged(records)) == ["answers-differ"]
    silent = busy(change(drill(), 3, 0, to="probes", outcome="timeout"), 3)
    assert codes(judged(silent))[0] == "machine-busy"


@pytest.mark.parametrize("outcome", [one for one in Outcome if one not in {Outcome.OK, Outcome.TIMEOUT}])
def test_no_other_end_than_a_timeout_is_excused_by_a_busy_machine(outcome):
    lost = busy(change(drill(), 2, 15, outcome=outcome.value), 2)
    assert (judged(lost).verdict, codes(judged(lost))) == (Verdict.FAILED, ["requests-lost"])
    unanswered = busy(change(drill(), 3, 0, to="probes", outcome=outcome.value), 3)
    assert codes(judged(unanswered)) == ["not-answered-after"]


def relabelled(records, one, other):
    """Exchange the causes of two exercises."""
    first, second = records["exercises"][one], records["exercises"][other]
    first["cause"], second["cause"] = second["cause"], first["cause"]
    return records


def without(records, *path):
    at = records
    for name in path[:-1]:
        at = at[name]
    del at[path[-1]]
    return records


@pytest.mark.parametrize(
    "spoil",
    [
        lambda records: {},
        lambda records: records | {"columns": ["id"]},
        lambda records: records | {"exercises": []},
        lambda records: records | {"exercises": records["exercises"][:-1]},
        lambda records: records | {"exercises": records["exercises"][::-1]},
        lambda records: records | {"answers": {}},
        lambda records: records | {"columns": [*COLUMNS, "more"]},
        lambda records: records | {"columns": ["a", *COLUMNS[1:]]},
        lambda records: records | {"answers": {"p0": [HI, HE]}},
        lambda records: records | {"answers": {"p0": []}},
        lambda records: records | {"answers": {"p0": [HI], "p9": [HI]}},
        lambda records: records | {"answers": {"a": [HI]}},
        lambda records: records | {"answers": {"p0": [None, None]}},
        lambda records: without(records, "exercises", 0, "requests", 4),
        lambda records: without(records, "exercises", 0, "restored", "problem"),
        lambda records: without(records, "exercises", 0, "machine"),
        lambda records: records["exercises"][0]["machine"].update(wall_us=0) or records,
        lambda records: change(records, 0, 2, outcome=None),
        lambda records: change(records, 0, 2, done_us=None),
        lambda records: change(records, 0, 2, done_us=1, sent_us=2),
        lambda records: change(records, 0, 2, sent_us="soon"),
        lambda records: change(records, 0, 2, prompt="other"),
        lambda records: records["exercises"][0]["pids"].update(candidate=[11, 12]) or records,
        lambda records: records["exercises"][5]["pids"].update(candidate=[11, None]) or records,
        lambda records: records["exercises"][3]["pids"].update(accepted=[22, 23]) or records,
        lambda records: records["exercises"][5]["pids"].update(accepted=[23, 24]) or records,
        lambda records: cold(records)["pids"].update(accepted=[22, 22]) or records,
        lambda records: cold(records)["pids"].update(accepted=[22]) or records,
        lambda records: [each["pids"].update(accepted=[22, 22]) for each in records["exercises"]] and records,
        lambda records: relabelled(records, 0, 1),
        lambda records: relabelled(records, 1, 2),
        lambda records: cold(records)["pids"].update(accepted=[22, None]) or records,
        lambda records: cold(records).update(back=None) or records,
        lambda records: cold(records).update(ready_us=None) or records,
        lambda records: records["exercises"][0].update(back=ANEW) or records,
        lambda records: records["exercises"][0].update(ready_us=1) or records,
        lambda records: records | {"exercises": records["exercises"][:4] + records["exercises"][5:]},
        lambda records: records["exercises"][0].update(trigger_us=9_000_000) or records,
    ],
)
def test_records_that_are_torn_or_show_nothing_are_errored(spoil):
    records = spoil(copy.deepcopy(drill()))
    context = GateContext(bundle=CHAT, root=None, rule=RULE, suite=SUITE)
    result, raw = conclude("rollback", context, records, duration_ms=1)
    assert result.verdict is Verdict.ERRORED
    assert recompute(raw, SUITE, None, context.bundle) == result


def test_the_records_of_a_drill_give_the_same_result_again():
    context = GateContext(bundle=CHAT, root=None, rule=RULE, suite=SUITE)
    result, raw = conclude("rollback", context, drill(), duration_ms=7)
    assert result.verdict is Verdict.PASSED
    assert recompute(raw, SUITE, None, context.bundle) == result
    assert result.against == BUNDLE
    # One bit of one record more, and the verdict is another.
    body = json.loads(raw)
    change(body["records"], CAUSES.index(DURING_SHIFT), 12, outcome="timeout")
    assert recompute(canonical_json(body), SUITE, None, context.bundle).verdict is Verdict.FAILED


def test_another_rule_or_suite_judges_nothing():
    assert judged(drill(), suite=None).verdict is Verdict.ERRORED
