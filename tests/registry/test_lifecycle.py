from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from registry.lifecycle import BEFORE_TRAFFIC, NEXT, NOTES, OPEN, State, advance, begin, fold, step
from schemas.evidence import BODIES, Kind
from schemas.problems import TransitionRefused
from schemas.release import LIVE, TERMINAL, Phase

AT = datetime(2026, 1, 1, tzinfo=UTC)
LATER = AT + timedelta(minutes=1)
SPLIT = [{"bundle": "sha256:" + "a" * 64, "weight_bp": 9000}, {"bundle": "sha256:" + "b" * 64, "weight_bp": 1000}]
RELEASE = "01a22898-d199-7470-8203-0958ed552ee6"
BODY = {
    Kind.REFUSED: {"reasons": ["golden failed", "load failed"]},
    Kind.STOP_CONDITION_FIRED: {"reasons": ["too slow"], "step": 0},
    Kind.HELD: {"reasons": ["load inconclusive"]},
    Kind.PAUSED: {"reason": "lunch"},
    Kind.RESUMED: {"reason": "back"},
    Kind.PROMOTED: {"reason": "every step passed"},
    Kind.APPROVAL_WITHDRAWN: {"reason": "one answer is wrong"},
    Kind.PROMOTION_REQUESTED: {"reason": "go"},
    Kind.ROLLBACK_REQUESTED: {"reason": "stop"},
    Kind.TRAFFIC_SHIFTED: {"desired": SPLIT, "step": 0},
    Kind.TRAFFIC_RESTORED: {"desired": SPLIT[:1], "reasons": ["too slow"]},
    Kind.REPLACED: {"release": RELEASE},
    Kind.REINSTATED: {"release": RELEASE},
}
PATH = [
    Kind.STAGED,
    Kind.ENGINE_BOOTED,
    Kind.GATE_RECORDED,
    Kind.GATES_PASSED,
    Kind.APPROVAL_GRANTED,
    Kind.APPROVED,
    Kind.TRAFFIC_SHIFTED,
    Kind.STEP_PASSED,
    Kind.TRAFFIC_SHIFTED,
    Kind.PROMOTED,
]


def log(*kinds):
    return [(kind, BODY.get(kind, {}), AT) for kind in (Kind.CREATED, *kinds)]


# The table once more, written down independently: where each kind leads from each phase; "." leaves it where it is,
# and a kind has no place in a phase that its line does not name.
TABLE = """
    staged candidate>staged staged. booted. gated. approved. canary. promoted. superseded. rolled_back. rejected.
    engine_booted staged>booted booted. gated. approved. canary. promoted. superseded. rolled_back. rejected.
    gate_recorded staged. booted.
    gates_passed booted>gated
    refused candidate>rejected staged>rejected booted>rejected gated>rejected approved>rejected
    approval_granted gated.
    approval_withdrawn gated. approved>gated
    approval_not_required gated.
    finding_accepted gated.
    approved gated>approved
    traffic_shifted approved>canary canary>canary promoted.
    step_passed canary. promoted.
    stop_condition_fired canary. promoted.
    traffic_restored canary>rolled_back promoted>rolled_back
    restore_observed rolled_back.
    promotion_requested canary.
    rollback_requested canary. promoted.
    promoted canary>promoted
    replaced promoted>superseded
    reinstated superseded>promoted
    paused candidate. staged. booted. gated. approved. canary.
    resumed candidate. staged. booted. gated. approved. canary. promoted.
    held candidate. staged. booted. gated. approved. canary. promoted.
    attempt_errored candidate. staged. booted. gated. approved. canary. promoted. rolled_back. rejected.
    replica_changed candidate. staged. booted. gated. approved. canary. promoted. superseded. rolled_back. rejected.
    evidence_revoked candidate. staged. booted. gated. approved. canary. promoted. superseded. rolled_back. rejected.
"""


def written_table():
    for line in TABLE.split("\n"):
        kind, *places = line.split() or [None]
        for place in places:
            before, _, after = place.partition(">")
            yield (Phase(before.rstrip(".")), Kind(kind)), Phase(after or before.rstrip("."))


WRITTEN = dict(written_table())


@pytest.mark.parametrize(("phase", "kind"), list(product(Phase, Kind)))
def test_an_entry_moves_a_release_only_as_the_table_says(phase, kind):
    if (phase, kind) in WRITTEN:
        assert step(phase, kind) is WRITTEN[phase, kind]
    else:
        with pytest.raises(TransitionRefused) as refused:
            step(phase, kind)
        assert refused.value.members == {"phase": phase, "kind": kind}


def test_no_kind_both_moves_a_phase_and_is_a_note_in_it():
    assert not {(phase, kind) for kind, phases in NOTES.items() for phase in phases} & set(NEXT)
    assert {*NEXT, *((phase, kind) for kind, phases in NOTES.items() for phase in phases)} == set(WRITTEN)


@pytest.mark.parametrize(("phase", "kind"), list(product(Phase, Kind)))
def test_advancing_obeys_the_same_table(phase, kind):
    before = State(phase=phase, phase_since=AT, held=("why",))
    try:
        expected = step(phase, kind)
    except TransitionRefused:
        with pytest.raises(TransitionRefused):
            advance(before, kind, BODY.get(kind, {}), LATER)
        return
    after = advance(before, kind, BODY.get(kind, {}), LATER)
    assert after.phase is expected
    assert after.phase_since == (LATER if expected is not phase else AT)


def test_every_phase_is_reached_from_the_first():
    reached = {Phase.CANDIDATE}
    while grown := {after for (before, _), after in NEXT.items() if before in reached} - reached:
        reached |= grown
    assert reached == set(Phase)


def test_no_path_reaches_traffic_without_passed_gates_and_an_approval():
    paths, complete = [(Phase.CANDIDATE, ())], []
    while paths:
        phase, taken = paths.pop()
        if phase in LIVE:
            complete.append(taken)
            continue
        for (before, kind), after in NEXT.items():
            # A withdrawn approval leads back, and from there on once more: the second round is like the first.
            if before is phase and after is not phase and taken.count(kind) < 2:
                paths.append((after, (*taken, kind)))
    assert complete
    assert any(Kind.APPROVAL_WITHDRAWN in taken for taken in complete)
    for taken in complete:
        assert taken[-2:] == (Kind.APPROVED, Kind.TRAFFIC_SHIFTED)
        assert taken.index(Kind.GATES_PASSED) < taken.index(Kind.APPROVED) < taken.index(Kind.TRAFFIC_SHIFTED)
        assert taken.index(Kind.STAGED) < taken.index(Kind.ENGINE_BOOTED) < taken.index(Kind.GATES_PASSED)


def test_what_has_ended_stays_ended_except_that_a_superseded_release_may_be_reinstated():
    leaving = {(before, kind) for (before, kind), after in NEXT.items() if before in TERMINAL and after is not before}
    assert leaving == {(Phase.SUPERSEDED, Kind.REINSTATED)}


def test_traffic_can_be_taken_back_from_every_phase_that_has_some():
    for phase in LIVE:
        assert NEXT[phase, Kind.TRAFFIC_RESTORED] is Phase.ROLLED_BACK


def test_a_release_without_traffic_can_be_refused_and_one_with_traffic_cannot():
    refusable = {before for before, kind in NEXT if kind is Kind.REFUSED}
    assert refusable == set(BEFORE_TRAFFIC) == set(OPEN) - LIVE


def test_every_kind_that_the_lifecycle_knows_has_a_body():
    assert {kind for _, kind in NEXT} | set(NOTES) <= set(BODIES)


def test_a_log_folds_to_the_phase_at_its_end():
    assert [fold(log(*PATH[:length])).phase for length in range(len(PATH) + 1)] == [
        Phase.CANDIDATE,
        Phase.STAGED,
        Phase.BOOTED,
        Phase.BOOTED,
        Phase.GATED,
        Phase.GATED,
        Phase.APPROVED,
        Phase.CANARY,
        Phase.CANARY,
        Phase.CANARY,
        Phase.PROMOTED,
    ]


@pytest.mark.parametrize("kinds", [[], [Kind.STAGED]])
def test_a_log_that_does_not_begin_with_created_is_refused(kinds):
    with pytest.raises(TransitionRefused):
        fold([(kind, {}, AT) for kind in kinds])


def test_created_stands_only_at_the_beginning():
    with pytest.raises(TransitionRefused):
        fold(log(Kind.CREATED))


def test_a_hold_ends_when_the_phase_moves_when_it_is_resumed_and_when_the_next_step_begins():
    held = fold(log(Kind.STAGED, Kind.ENGINE_BOOTED, Kind.HELD))
    assert held.held == ("load inconclusive",)
    assert held.reason == "load inconclusive"
    assert advance(held, Kind.GATES_PASSED, {}, LATER).held == ()
    assert advance(held, Kind.RESUMED, BODY[Kind.RESUMED], LATER).held == ()
    assert advance(held, Kind.GATE_RECORDED, {}, LATER).held == ("load inconclusive",)
    warned = fold(log(Kind.STAGED, Kind.ENGINE_BOOTED, Kind.GATES_PASSED, Kind.HELD))
    assert advance(warned, Kind.FINDING_ACCEPTED, {}, LATER).held == ()
    canary = fold([*log(*PATH[:8]), (Kind.HELD, BODY[Kind.HELD], AT)])
    again, onward = ({"desired": SPLIT, "step": step} for step in (0, 1))
    assert advance(canary, Kind.TRAFFIC_SHIFTED, again, LATER).held == ("load inconclusive",)
    assert advance(canary, Kind.TRAFFIC_SHIFTED, onward, LATER).held == ()
    assert advance(canary, Kind.PROMOTION_REQUESTED, BODY[Kind.PROMOTION_REQUESTED], LATER).held == ()


def test_resuming_a_canary_gives_its_step_a_fresh_start():
    canary = fold(log(*PATH[:7], Kind.PAUSED))
    assert (canary.step_since, advance(canary, Kind.RESUMED, BODY[Kind.RESUMED], LATER).step_since) == (AT, LATER)
    gated = fold(log(*PATH[:4], Kind.PAUSED))
    assert advance(gated, Kind.RESUMED, BODY[Kind.RESUMED], LATER).step_since is None


def test_a_pause_outlives_a_change_of_phase():
    paused = fold(log(Kind.PAUSED, Kind.STAGED, Kind.ENGINE_BOOTED))
    assert paused.is_paused
    assert paused.reason == "lunch"
    assert not advance(paused, Kind.RESUMED, BODY[Kind.RESUMED], LATER).is_paused


def test_the_candidates_weight_is_the_last_one_shifted_to():
    assert fold(log(*PATH[:6])).weight_bp is None
    canary = fold(log(*PATH[:7]))
    assert (canary.step, canary.weight_bp, canary.step_since) == (0, 1000, AT)
    assert fold(log(*PATH[:7], Kind.TRAFFIC_RESTORED)).weight_bp == 0
    replaced = fold(log(*PATH, Kind.REPLACED))
    assert (replaced.phase, replaced.weight_bp) == (Phase.SUPERSEDED, 0)
    assert fold(log(*PATH, Kind.REPLACED, Kind.REINSTATED)).weight_bp == 10_000


def test_a_live_release_may_record_its_traffic_anew_and_nothing_else_changes():
    live = fold(log(*PATH))
    alone = {"desired": [{"bundle": SPLIT[1]["bundle"], "weight_bp": 10_000}], "step": live.step}
    after = advance(live, Kind.TRAFFIC_SHIFTED, alone, LATER)
    assert (after.phase, after.phase_since, after.step, after.weight_bp) == (Phase.PROMOTED, AT, live.step, 10_000)


def test_the_reason_is_that_of_the_latest_decision():
    assert fold(log(Kind.REFUSED)).reason == "golden failed; load failed"
    assert fold(log(*PATH)).reason == "every step passed"
    assert fold(log(*PATH[:7], Kind.TRAFFIC_RESTORED)).reason == "too slow"
    no_reasons = [*log(*PATH[:7]), (Kind.TRAFFIC_RESTORED, {"desired": [], "cause": "controller_lost"}, AT)]
    assert fold(no_reasons).reason == "controller_lost"
    neither = [*log(*PATH[:7]), (Kind.TRAFFIC_RESTORED, {"desired": []}, AT)]
    assert fold(neither).reason == "restored"
    canary = fold(log(*PATH[:7]))
    for kind, said in ((Kind.PROMOTION_REQUESTED, "go"), (Kind.ROLLBACK_REQUESTED, "stop"), (Kind.RESUMED, "back")):
        assert advance(canary, kind, BODY[kind], LATER).reason == said
    assert advance(canary, Kind.STOP_CONDITION_FIRED, BODY[Kind.STOP_CONDITION_FIRED], LATER).reason == "too slow"
    replaced = fold(log(*PATH, Kind.REPLACED))
    assert replaced.reason == f"replaced by release {RELEASE}"
    assert advance(replaced, Kind.REINSTATED, BODY[Kind.REINSTATED], LATER).reason == (
        f"reinstated after release {RELEASE}"
    )


def test_a_reason_that_quotes_a_nul_can_be_stored():
    held = fold([*log(Kind.STAGED), (Kind.HELD, {"reasons": ["token a\0b"]}, AT)])
    assert (held.held, held.reason) == (("token a\ufffdb",), "token a\ufffdb")


def test_a_new_release_is_a_candidate_since_it_was_created():
    new = begin(AT)
    assert (new.phase, new.phase_since, new.is_paused, new.held, new.reason) == (Phase.CANDIDATE, AT, False, (), None)
    assert (new.step, new.step_since, new.weight_bp) == (None, None, None)
