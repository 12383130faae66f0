"""The lifecycle of a release, as one table: which entry may follow in which phase, and where it leads. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from schemas.evidence import Kind
from schemas.problems import TransitionRefused
from schemas.release import Phase

BEFORE_TRAFFIC = (Phase.CANDIDATE, Phase.STAGED, Phase.BOOTED, Phase.GATED, Phase.APPROVED)
OPEN = (*BEFORE_TRAFFIC, Phase.CANARY)

NEXT: dict[tuple[Phase, Kind], Phase] = {
    (Phase.CANDIDATE, Kind.STAGED): Phase.STAGED,
    (Phase.STAGED, Kind.ENGINE_BOOTED): Phase.BOOTED,
    (Phase.BOOTED, Kind.GATES_PASSED): Phase.GATED,
    (Phase.GATED, Kind.APPROVED): Phase.APPROVED,
    (Phase.APPROVED, Kind.APPROVAL_WITHDRAWN): Phase.GATED,
    (Phase.APPROVED, Kind.TRAFFIC_SHIFTED): Phase.CANARY,
    (Phase.CANARY, Kind.TRAFFIC_SHIFTED): Phase.CANARY,
    (Phase.CANARY, Kind.PROMOTED): Phase.PROMOTED,
    (Phase.CANARY, Kind.TRAFFIC_RESTORED): Phase.ROLLED_BACK,
    (Phase.PROMOTED, Kind.TRAFFIC_RESTORED): Phase.ROLLED_BACK,
    (Phase.PROMOTED, Kind.REPLACED): Phase.SUPERSEDED,
    (Phase.SUPERSEDED, Kind.REINSTATED): Phase.PROMOTED,
    **{(phase, Kind.REFUSED): Phase.REJECTED for phase in BEFORE_TRAFFIC},
}
"""(phase, kind) → next phase. What is neither here nor in NOTES is refused."""

NOTES: dict[Kind, frozenset[Phase]] = {
    # Once more for a second evaluation, and for each replica that serves live traffic.
    Kind.STAGED: frozenset(Phase) - {Phase.CANDIDATE},
    Kind.ENGINE_BOOTED: frozenset(Phase) - {Phase.CANDIDATE, Phase.STAGED},
    Kind.GATE_RECORDED: frozenset({Phase.STAGED, Phase.BOOTED}),
    Kind.APPROVAL_GRANTED: frozenset({Phase.GATED}),
    Kind.APPROVAL_WITHDRAWN: frozenset({Phase.GATED}),
    Kind.APPROVAL_NOT_REQUIRED: frozenset({Phase.GATED}),
    Kind.FINDING_ACCEPTED: frozenset({Phase.GATED}),
    # Once more when the release before is gone, and whenever the replica that serves alone has moved.
    Kind.TRAFFIC_SHIFTED: frozenset({Phase.PROMOTED}),
    Kind.STEP_PASSED: frozenset({Phase.CANARY, Phase.PROMOTED}),
    Kind.STOP_CONDITION_FIRED: frozenset({Phase.CANARY, Phase.PROMOTED}),
    Kind.PROMOTION_REQUESTED: frozenset({Phase.CANARY}),
    Kind.ROLLBACK_REQUESTED: frozenset({Phase.CANARY, Phase.PROMOTED}),
    Kind.RESTORE_OBSERVED: frozenset({Phase.ROLLED_BACK}),
    Kind.PAUSED: frozenset(OPEN),
    # A live release that held because its replica did not come back.
    Kind.RESUMED: frozenset({*OPEN, Phase.PROMOTED}),
    Kind.HELD: frozenset({*OPEN, Phase.PROMOTED}),
    # After an end: traffic that a controller had moved before it could learn of the end.
    Kind.ATTEMPT_ERRORED: frozenset({*OPEN, Phase.PROMOTED, Phase.ROLLED_BACK, Phase.REJECTED}),
    Kind.REPLICA_CHANGED: frozenset(Phase),
    # Whoever learns that a result was wrong may say so at any time; what has traffic keeps it.
    Kind.EVIDENCE_REVOKED: frozenset(Phase),
}
"""Kinds that are recorded without moving the phase, and the phases in which they may be."""


@dataclass(frozen=True, slots=True)
class State:
    """What the log of a release says, folded."""

    phase: Phase
    phase_since: datetime
    is_paused: bool = False
    held: tuple[str, ...] = ()
    reason: str | None = None
    step: int | None = None
    step_since: datetime | None = None
    weight_bp: int | None = None


def step(phase: Phase, kind: Kind) -> Phase:
    """Return the phase after one entry. Raises TransitionRefused when it has no place here."""
    if (phase, kind) in NEXT:
        return NEXT[phase, kind]
    if phase in NOTES.get(kind, frozenset()):
        return phase
    raise TransitionRefused(f"{kind} has no place on a {phase} release", phase=str(phase), kind=str(kind))


def advance(state: State, kind: Kind, body: Mapping[str, Any], at: datetime) -> State:
    """Return the state after one more entry.

    Args:
        state: before.
        kind: of the entry.
        body: of the entry, as its kind's model dumps it.
        at: when it was recorded.

    Raises:
        TransitionRefused: the entry has no place in this phase.
    """
    phase = step(state.phase, kind)
    if phase is not state.phase:
        # A new phase is a new situation: what held the old one no longer does.
        state = replace(state, phase=phase, phase_since=at, held=())
    told = _told(state, kind, body, at)
    return replace(told, held=tuple(map(_storable, told.held)), reason=told.reason and _storable(told.reason))


def _storable(text: str) -> str:
    """A reason may quote a model's output, and PostgreSQL keeps no NUL; evidence has the text as it was."""
    return text.replace("\0", "\ufffd")


def _told(state: State, kind: Kind, body: Mapping[str, Any], at: datetime) -> State:
    match kind:
        case Kind.PAUSED:
            return replace(state, is_paused=True, reason=str(body["reason"]))
        case Kind.RESUMED:
            # Who lets a canary go on gives its step a fresh start.
            since = at if state.phase is Phase.CANARY else state.step_since
            return replace(state, is_paused=False, held=(), reason=str(body["reason"]), step_since=since)
        case Kind.HELD:
            return replace(state, held=tuple(body["reasons"]), reason="; ".join(body["reasons"]))
        case Kind.REFUSED | Kind.STOP_CONDITION_FIRED:
            return replace(state, reason="; ".join(body["reasons"]))
        case Kind.FINDING_ACCEPTED:
            return replace(state, held=())
        case Kind.PROMOTION_REQUESTED:
            return replace(state, reason=str(body["reason"]), held=())
        case Kind.PROMOTED | Kind.ROLLBACK_REQUESTED | Kind.APPROVAL_WITHDRAWN:
            return replace(state, reason=str(body["reason"]))
        case Kind.TRAFFIC_SHIFTED:
            weight = int(body["desired"][-1]["weight_bp"])
            # Publishing the same step again, for a replica that moved, lets nothing go on that held.
            held = state.held if body.get("step") == state.step else ()
            return replace(state, step=body.get("step"), step_since=at, weight_bp=weight, held=held)
        case Kind.TRAFFIC_RESTORED:
            reasons = body.get("reasons") or [body.get("cause") or "restored"]
            return replace(state, weight_bp=0, reason="; ".join(reasons))
        case Kind.REPLACED:
            return replace(state, weight_bp=0, reason=f"replaced by release {body['release']}")
        case Kind.REINSTATED:
            return replace(state, weight_bp=10_000, reason=f"reinstated after release {body['release']}")
        case _:
            return state


def begin(at: datetime) -> State:
    """Return the state of a release whose only entry is `created`."""
    return State(phase=Phase.CANDIDATE, phase_since=at)


def fold(entries: Iterable[tuple[Kind, Mapping[str, Any], datetime]]) -> State:
    """Return the state of a release with this log, oldest entry first.

    Raises:
        TransitionRefused: the log is empty, does not begin with `created`, or holds an entry out of place.
    """
    state: State | None = None
    for kind, body, at in entries:
        if state is None:
            if kind is not Kind.CREATED:
                raise TransitionRefused(f"a log begins with created, not {kind}", kind=str(kind))
            state = begin(at)
        else:
            state = advance(state, kind, body, at)
    if state is None:
        raise TransitionRefused("the log is empty")
    return state
