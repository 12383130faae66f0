"""What people may do to a release in each phase, and for everything else what the release is and what to do instead.

Pure. The lifecycle's own table says which entries may follow; this one speaks to the person who asked for an act.
"""

from enum import StrEnum
from uuid import UUID

from registry.lifecycle import OPEN, State
from schemas.problems import TransitionRefused
from schemas.release import Phase

LONGEST_REASON = 300
"""Characters of a release's reason that a refusal repeats."""


class Deed(StrEnum):
    """What a person does to a release, by the name of its command."""

    APPROVE = "approve"
    WITHDRAW = "withdraw"
    REJECT = "reject"
    PAUSE = "pause"
    RESUME = "resume"
    PROMOTE = "promote"
    ROLLBACK = "rollback"


ALLOWED: dict[Deed, frozenset[Phase]] = {
    Deed.APPROVE: frozenset({Phase.GATED}),
    Deed.WITHDRAW: frozenset({Phase.GATED, Phase.APPROVED}),
    Deed.REJECT: frozenset(OPEN) - {Phase.CANARY},
    Deed.PAUSE: frozenset(OPEN),
    # One that is live holds when its replica did not come back.
    Deed.RESUME: frozenset({*OPEN, Phase.PROMOTED}),
    Deed.PROMOTE: frozenset({Phase.CANARY}),
    Deed.ROLLBACK: frozenset({Phase.CANARY, Phase.PROMOTED}),
}
"""Deed → the phases in which it is done. To resume, a release must also be paused or held."""

IS: dict[Phase, str] = {
    Phase.CANDIDATE: "waits for a runner, and no gate has run",
    Phase.STAGED: "has its files staged, and no gate has run",
    Phase.BOOTED: "has an engine that booted, and its gates have not all passed",
    Phase.GATED: "has passed its gates and waits for approval",
    Phase.APPROVED: "is approved and has no traffic yet",
    Phase.CANARY: "is in canary with {weight} of the traffic",
    Phase.PROMOTED: "is live with all of the traffic",
    Phase.SUPERSEDED: "was {reason}",
    Phase.REJECTED: "was rejected ({reason})",
    Phase.ROLLED_BACK: "was rolled back ({reason})",
}
"""Phase → what a release in it is, after its name."""

_WATCH = "`sluicegate release watch {release} --until gated` ends when they have"
_APPROVE = "`sluicegate release approve {release} --reason …`"
_REJECT = "`sluicegate release reject {release} --reason …`"
_BACK = "`sluicegate release rollback {release} --reason …`"
_ANOTHER = "start another with `sluicegate release create --target {target} --bundle … --policy …`"
_EARLY = (Phase.CANDIDATE, Phase.STAGED, Phase.BOOTED)
_OVER = (Phase.SUPERSEDED, Phase.REJECTED, Phase.ROLLED_BACK)

INSTEAD: dict[tuple[Deed, Phase], str] = {
    **{(Deed.APPROVE, phase): f"people approve what has passed: {_WATCH}" for phase in _EARLY},
    (Deed.APPROVE, Phase.APPROVED): "nobody's approval is missing",
    (Deed.APPROVE, Phase.CANARY): f"nobody's approval is missing; {_BACK} takes the traffic back",
    (Deed.APPROVE, Phase.PROMOTED): f"nobody's approval is missing; {_BACK} takes the traffic back",
    **{(Deed.APPROVE, phase): f"what has ended is not approved any more: {_ANOTHER}" for phase in _OVER},
    **{(Deed.WITHDRAW, phase): "nobody has approved it yet: there is nothing to withdraw" for phase in _EARLY},
    (Deed.WITHDRAW, Phase.CANARY): f"what has traffic is taken back: {_BACK}",
    (Deed.WITHDRAW, Phase.PROMOTED): f"what has traffic is taken back: {_BACK}",
    **{(Deed.WITHDRAW, phase): "it has ended, and stands on no approval any more" for phase in _OVER},
    (Deed.REJECT, Phase.CANARY): f"what has traffic is not rejected but taken back: {_BACK}",
    (Deed.REJECT, Phase.PROMOTED): f"what has traffic is not rejected but taken back: {_BACK}",
    **{(Deed.REJECT, phase): "it has no traffic and cannot get any: there is nothing to reject" for phase in _OVER},
    (Deed.REJECT, Phase.SUPERSEDED): "it has no traffic: there is nothing to reject",
    (
        Deed.PAUSE,
        Phase.PROMOTED,
    ): f"it has nowhere to go on to: there is nothing to pause; {_BACK} takes the traffic back",
    **{(Deed.PAUSE, phase): "what has ended does not move: there is nothing to pause" for phase in _OVER},
    (Deed.RESUME, Phase.CANDIDATE): "it is neither paused nor held: a runner takes it by itself, and "
    "`sluicegate runner list --alive` shows which there are",
    (Deed.RESUME, Phase.STAGED): "it is neither paused nor held, and goes on by itself",
    (Deed.RESUME, Phase.BOOTED): "it is neither paused nor held, and goes on by itself",
    (Deed.RESUME, Phase.GATED): f"it is neither paused nor held, and goes on when people agree: {_APPROVE}",
    (Deed.RESUME, Phase.APPROVED): "it is neither paused nor held, and goes on when a replica is ready",
    (Deed.RESUME, Phase.CANARY): "it is neither paused nor held, and goes on when it has served enough requests",
    (Deed.RESUME, Phase.PROMOTED): "it is neither paused nor held: there is nothing to resume",
    **{(Deed.RESUME, phase): f"what has ended is not resumed: {_ANOTHER}" for phase in _OVER},
    **{(Deed.PROMOTE, phase): f"its gates come first: {_WATCH}" for phase in _EARLY},
    (Deed.PROMOTE, Phase.GATED): f"approval comes first: {_APPROVE}",
    (Deed.PROMOTE, Phase.APPROVED): "its canary comes first, and begins when a replica is ready",
    (Deed.PROMOTE, Phase.PROMOTED): "there is nothing left to promote",
    **{(Deed.PROMOTE, phase): f"what has ended is not promoted: {_ANOTHER}" for phase in _OVER},
    **{
        (Deed.ROLLBACK, phase): f"there is nothing to take back; {_REJECT} ends it"
        for phase in (*_EARLY, Phase.GATED, Phase.APPROVED)
    },
    (Deed.ROLLBACK, Phase.SUPERSEDED): "there is nothing to take back from it: `sluicegate target show {target}` says "
    "which release has the traffic now",
    (Deed.ROLLBACK, Phase.REJECTED): "it never had traffic: there is nothing to take back",
    (Deed.ROLLBACK, Phase.ROLLED_BACK): "it has no traffic any more: there is nothing to take back",
}
"""(deed, phase) → why it is not done, and what can be done. `resume` has one for each phase: see ALLOWED."""


def require(deed: Deed, state: State, *, release: UUID, target: str) -> None:
    """Return when a deed may be done to a release in this state.

    Raises:
        TransitionRefused: it may not; the problem says what the release is, and what to do instead.
    """
    if state.phase in ALLOWED[deed] and (deed is not Deed.RESUME or state.is_paused or state.held):
        return
    detail = f"release {{release}} {IS[state.phase]}; {INSTEAD[deed, state.phase]}"
    said = {
        "release": release,
        "target": target,
        "weight": f"{(state.weight_bp or 0) / 100:g} %",
        "reason": _reason(state),
    }
    raise TransitionRefused(detail.format_map(said), phase=str(state.phase), act=str(deed))


def _reason(state: State) -> str:
    reason = state.reason or "no reason was recorded"
    return reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}…"
