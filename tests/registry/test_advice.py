"""What a person is told who asks for something that a release does not take."""

import re
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from uuid import UUID

import pytest
import typer.main

from registry.advice import ALLOWED, INSTEAD, IS, LONGEST_REASON, Deed, require
from registry.cli import program
from registry.lifecycle import NEXT, NOTES, State
from schemas.evidence import Kind
from schemas.problems import TransitionRefused
from schemas.release import TERMINAL, Phase

RELEASE = UUID("01a22898-d199-7470-8203-0958ed552ee6")
AT = datetime(2026, 1, 1, tzinfo=UTC)
ENTRY = {
    Deed.APPROVE: Kind.APPROVAL_GRANTED,
    Deed.WITHDRAW: Kind.APPROVAL_WITHDRAWN,
    Deed.REJECT: Kind.REFUSED,
    Deed.PAUSE: Kind.PAUSED,
    Deed.RESUME: Kind.RESUMED,
    Deed.PROMOTE: Kind.PROMOTION_REQUESTED,
    Deed.ROLLBACK: Kind.ROLLBACK_REQUESTED,
}


def told(deed: Deed, phase: Phase, **changes: object) -> str | None:
    """What is said of a deed in a phase, or None when it is done."""
    state = replace(State(phase=phase, phase_since=AT, reason="golden failed", weight_bp=2500), **changes)
    try:
        require(deed, state, release=RELEASE, target="chat@prod")
    except TransitionRefused as refusal:
        return f"{refusal.detail} {refusal.members}"
    return None


@pytest.mark.parametrize("deed", Deed)
def test_a_deed_is_done_exactly_where_the_log_has_a_place_for_its_entry(deed: Deed) -> None:
    kind = ENTRY[deed]
    places = NOTES.get(kind, frozenset()) | {phase for phase, moving in NEXT if moving is kind}
    assert ALLOWED[deed] == places


@pytest.mark.parametrize(("deed", "phase"), list(product(Deed, Phase)))
def test_what_is_not_done_is_answered_with_what_the_release_is_and_what_can_be_done(deed: Deed, phase: Phase) -> None:
    detail = told(deed, phase)
    if phase in ALLOWED[deed] and deed is not Deed.RESUME:
        assert detail is None
        assert (deed, phase) not in INSTEAD
        return
    assert detail is not None
    what, _, instead = detail.partition("; ")
    assert what.startswith(f"release {RELEASE} {IS[phase].split('{')[0]}")
    assert len(instead) > 20
    members = {"phase": str(phase), "act": str(deed)}
    assert detail.endswith(f" {members}")
    assert not re.search(r"[{}]|_granted|_requested|no place", detail.rpartition(" {")[0])
    if phase in {Phase.REJECTED, Phase.ROLLED_BACK}:
        assert "(golden failed)" in what
    if phase is Phase.CANARY:
        assert "25 % of the traffic" in what


def test_a_release_that_is_paused_or_holds_is_resumed_while_it_is_under_way_and_never_afterwards() -> None:
    for phase in Phase:
        is_open = phase in ALLOWED[Deed.RESUME]
        assert (told(Deed.RESUME, phase, is_paused=True) is None) == is_open
        assert (told(Deed.RESUME, phase, held=("load inconclusive",)) is None) == is_open


def test_every_command_that_a_refusal_names_is_one() -> None:
    root = typer.main.get_command(program.app)
    named = re.findall(r"`sluicegate (\w+) (\w+)", " ".join(INSTEAD.values()))
    assert len(named) > 20
    for group, name in named:
        assert name in root.commands[group].commands  # type: ignore[attr-defined]


def test_a_release_that_has_ended_is_offered_a_successor_wherever_it_was_meant_to_go_on() -> None:
    for deed, phase in product((Deed.APPROVE, Deed.RESUME, Deed.PROMOTE), TERMINAL):
        assert "sluicegate release create --target chat@prod" in str(told(deed, phase))


def test_nothing_to_take_back_is_said_so_in_every_phase_without_traffic() -> None:
    for phase in Phase:
        if phase not in ALLOWED[Deed.ROLLBACK]:
            assert "nothing to take back" in str(told(Deed.ROLLBACK, phase))


def test_a_long_reason_is_cut_and_braces_in_it_are_only_text() -> None:
    detail = str(told(Deed.PAUSE, Phase.REJECTED, reason="{release} " + "x" * 1000))
    assert "({release} xxx" in detail
    assert detail.count("x") == LONGEST_REASON - len("{release} ")
    assert "…" in detail
    assert "no reason was recorded" in str(told(Deed.PAUSE, Phase.REJECTED, reason=None))
