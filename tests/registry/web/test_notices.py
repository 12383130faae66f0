"""What stands above a release's page: all that holds it at once, or how it ended."""

from uuid import uuid4

import pytest

from registry.auth import PERMISSIONS
from registry.web.notices import notices
from schemas.evidence import Kind
from schemas.holds import RESUMERS, WHAT_TO_DO, Hold, advice, holds, way_out
from schemas.release import BESIDE, LIVE, Phase, ReleaseDetail
from schemas.stories import replaces
from tests.registry.web.test_pages import START, entry


def release(phase: Phase, *log: tuple[Kind, dict[str, object]], **changes: object) -> ReleaseDetail:
    entries = [entry(kind, body, seconds) for seconds, (kind, body) in enumerate(log)]
    fields = {
        "id": uuid4(),
        "target": "chat@prod",
        "bundle": "sha256:" + "a" * 64,
        "bundle_name": "gemma",
        "policy": "sha256:" + "b" * 64,
        "phase": phase,
        "phase_since": START,
        "is_paused": False,
        "held": [],
        "waits": None,
        "reason": None,
        "created_at": START,
        "created_by": "kim",
        "predecessor": None,
        "step": None,
        "weight_bp": None,
        "version": "x:1",
        "gates": [],
        "quarantined": [],
        "doing": None,
        "log": entries,
    }
    return ReleaseDetail.model_validate(fields | changes)


def told(found: ReleaseDetail, required: int = 0) -> list[tuple[str, str, list[str]]]:
    return [(one.tone, one.title, one.lines) for one in notices(found, required=required)]


def said(hold: Hold, found: ReleaseDetail) -> str:
    return f"{advice(hold, found)}; {RESUMERS} may resume"


def holding(hold: Hold) -> ReleaseDetail:
    """A release that holds for one reason, in a phase in which there is that."""
    if hold is Hold.PAUSED:
        return release(Phase.BOOTED, (Kind.PAUSED, {"reason": "wait"}), is_paused=True)
    if hold is Hold.QUARANTINED:
        return release(Phase.PROMOTED, quarantined=["kim: withdrawn"])
    if hold is Hold.LIVE_GOES_BACK:
        return release(Phase.APPROVED, waits=f"{BESIDE} release 1 is being taken back, as kim asked: slow")
    if hold is Hold.NO_RUNNER:
        return release(Phase.CANDIDATE, waits="its evaluate job has waited 40 s for a runner of class gpu")
    is_undecided = hold is Hold.GATE_INCONCLUSIVE
    gate = {"gate": "load", "verdict": "inconclusive" if is_undecided else "errored"}
    cause = {Hold.GATE_INCONCLUSIVE: Hold.GATES_UNDECIDED, Hold.UNKNOWN: "of_a_later_version"}.get(hold, hold)
    earlier = (Kind.HELD, {"reasons": ["first"], "cause": "not_eligible"})
    later = (Kind.HELD, {"reasons": ["why"], "cause": str(cause)})
    has_traffic = hold in (Hold.STEP_ERRORED, Hold.STEP_INCONCLUSIVE, Hold.NO_WAY_BACK, Hold.WAY_BACK_FAILED)
    phase = Phase.CANARY if has_traffic else Phase.GATED
    none = dict.fromkeys(("summary", "entry", "duration_ms"))
    return release(phase, earlier, later, held=["why"], gates=[gate | none])


def test_the_table_has_one_sentence_on_what_to_do_for_each_reason():
    assert set(WHAT_TO_DO) == set(Hold)
    for hold, told_of in WHAT_TO_DO.items():
        assert "`sluicegate " in told_of.format(id="", bundle="", resume="`sluicegate ", end="`sluicegate "), hold
        assert "\n" not in told_of
        assert not told_of.endswith(".")


@pytest.mark.parametrize("hold", Hold)
def test_each_reason_for_which_a_release_holds_is_told_with_what_to_do(hold):
    found = holding(hold)
    assert holds(found) == [hold]
    out = way_out(found)
    assert out.startswith(advice(hold, found))
    assert str(found.id) in out
    deed = "rollback" if found.phase in LIVE else "reject"
    assert f"release {'reject' if deed == 'rollback' else 'rollback'} " not in out
    assert out.endswith("; managers and administrators may resume") == ("release resume" in out)
    assert [lines[-1] for _, _, lines in told(found)] == [out], "its page says it last, under the reason"


def test_what_holds_at_once_is_told_at_once_and_who_may_resume_only_once():
    paused = (Kind.PAUSED, {"reason": "wait"})
    both = release(Phase.CANARY, paused, is_paused=True, held=["x"], waits="its serve job has waited 3 s")
    assert holds(both) == [Hold.PAUSED, Hold.UNKNOWN, Hold.NO_RUNNER]
    out = way_out(both)
    assert out.count("may resume") == 1
    assert out.count("lets it go on") == 1, "what is to be done for both is said once"
    assert "runner list" in out
    assert "runner list" not in way_out(both, also_waits=False)
    assert holds(release(Phase.REJECTED, held=["x"], is_paused=True)) == []


def test_what_a_runner_does_for_a_release_is_said_beside_what_else_there_is():
    found = release(Phase.BOOTED, doing="evaluate: load 12/64")
    assert told(found) == [("plain", "Under way.", ["evaluate: load 12/64"])]


def test_a_replacement_that_waits_while_a_release_serves_on_is_no_warning():
    waits = "it serves on, and runner r1 drains: the replica that is to take its place has waited 51 s for a slot"
    assert told(release(Phase.PROMOTED, waits=waits)) == [("plain", "Moves.", [waits])]
    assert way_out(release(Phase.PROMOTED, waits=waits)) is None
    waiting = release(Phase.PROMOTED, waits="its serve job has waited")
    assert told(waiting) == [("warn", "Waits.", ["its serve job has waited", advice(Hold.NO_RUNNER, waiting)])]


def test_a_release_that_is_paused_and_held_and_waits_for_people_says_all_three():
    paused = (Kind.PAUSED, {"reason": "freeze until Monday"})
    found = release(Phase.GATED, paused, is_paused=True, held=["load: 3 of 60", "golden: a warning"], reason="last")
    assert told(found, required=2) == [
        ("warn", "Paused by maria.", ["freeze until Monday", said(Hold.PAUSED, found)]),
        ("warn", "Held.", ["load: 3 of 60", "golden: a warning", said(Hold.UNKNOWN, found)]),
        (
            "plain",
            "Waits for approval.",
            [f"2 people other than kim must agree: `sluicegate release approve {found.id} --reason …`"],
        ),
    ]


@pytest.mark.parametrize(("phase", "deed"), [(Phase.BOOTED, "reject"), (Phase.CANARY, "rollback")])
def test_a_paused_release_says_once_who_may_let_it_go_on_and_by_which_command(phase, deed):
    found = release(phase, (Kind.PAUSED, {"reason": "wait"}), is_paused=True, held=["too few requests"])
    (_, _, (reason, out)), (_, _, held) = told(found)
    assert (reason, held[0]) == ("wait", "too few requests")
    assert out.startswith(f"`sluicegate release resume {found.id} --reason …` lets it go on, ")
    assert f"`sluicegate release {deed} {found.id} --reason …` " in out
    assert out.endswith("; managers and administrators may resume")
    assert way_out(release(phase)) is None
    assert way_out(release(Phase.REJECTED, is_paused=True)) is None


def test_those_who_may_resume_are_named_as_the_permissions_have_them():
    assert PERMISSIONS["resume"] == {"manager", "admin"}, f"or say so in RESUMERS: {RESUMERS}"


def test_a_release_that_has_ended_says_each_reason_of_its_end_and_nothing_that_held_it_before():
    refused = (Kind.REFUSED, {"reasons": ["golden failed", "load failed"]})
    found = release(Phase.REJECTED, (Kind.PAUSED, {"reason": "x"}), refused, is_paused=True, reason="golden failed; …")
    assert told(found, required=1) == [("bad", "Rejected.", ["golden failed", "load failed"])]
    restored = (Kind.TRAFFIC_RESTORED, {"reasons": None, "cause": "controller_lost"})
    back = release(Phase.ROLLED_BACK, restored, reason="controller_lost")
    assert told(back) == [("bad", "Rolled back.", ["controller_lost"])]


@pytest.mark.parametrize(
    ("kind", "phase", "title"),
    [
        (Kind.PROMOTION_REQUESTED, Phase.CANARY, "maria asked to skip the rest."),
        (Kind.ROLLBACK_REQUESTED, Phase.CANARY, "maria asked to take it back."),
        (Kind.ROLLBACK_REQUESTED, Phase.PROMOTED, "maria asked to take it back."),
    ],
)
def test_what_people_have_asked_for_is_shown_until_it_is_done(kind, phase, title):
    assert told(release(phase, (kind, {"reason": "go"}), reason="go")) == [("warn", title, ["go"])]


def test_a_promotion_that_was_asked_for_is_over_once_it_is_promoted():
    found = release(Phase.PROMOTED, (Kind.PROMOTION_REQUESTED, {"reason": "go"}), reason="every step passed")
    assert told(found) == [("good", "", ["every step passed"])]


def test_a_release_that_nothing_holds_says_the_latest_reason_or_nothing():
    assert told(release(Phase.CANDIDATE)) == []
    assert told(release(Phase.BOOTED, reason="another model")) == [("plain", "", ["another model"])]


def test_what_took_nobody_s_place_does_not_claim_so():
    words = {phase: replaces(release(phase, predecessor=uuid4())) for phase in Phase}
    assert {phase for phase, word in words.items() if word is None} == {Phase.REJECTED, Phase.ROLLED_BACK}
    assert (words[Phase.CANARY], words[Phase.PROMOTED], words[Phase.SUPERSEDED]) == (
        "is to replace",
        "replaces",
        "replaced",
    )
    assert replaces(release(Phase.PROMOTED)) is None


@pytest.mark.parametrize(
    ("phase", "title"),
    [(Phase.GATED, "The bundle is quarantined."), (Phase.PROMOTED, "The bundle is quarantined, and serves on.")],
)
def test_a_quarantined_bundle_is_told_above_what_holds(phase, title):
    found = told(release(phase, quarantined=["kim: withdrawn"], held=["x"]))
    assert [(*one[:2], one[2][0]) for one in found[:2]] == [
        ("bad", title, "kim: withdrawn"),
        ("warn", "Held.", "x"),
    ]
