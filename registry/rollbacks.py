"""What people asked: that a release's traffic be taken back. A request is for one time that the release is live.

A release that was replaced, and came back since the one after it was taken back, is live anew. What was asked before
is over by then: who wants its traffic back now says so again, with what is before it now.

Who says `to_nothing` gives an order: the target serves nothing next, and no earlier version is waited for or put in
force, also where another person has asked before that traffic go back to one.
"""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from registry import db, evidence, targets
from registry.logged import Logged
from registry.tables import ReleaseRow
from schemas.evidence import Kind
from schemas.problems import Conflict
from schemas.release import BESIDE, Phase

ACT = "rollback"


def requests(log: Sequence[Logged]) -> list[Logged]:
    """Return the requests of a release's log that count still, oldest first."""
    return [entry for entry in log[_since(log) :] if entry.kind == Kind.ROLLBACK_REQUESTED]


def act(log: Sequence[Logged]) -> str:
    """Return what a request is called now: there is one of each name."""
    since = _since(log)
    return f"{ACT}:{log[since - 1].position}" if since else ACT


def _since(log: Sequence[Logged]) -> int:
    """Return the place behind the entry by which a release came back last; 0 where it never did."""
    return max((place for place, entry in enumerate(log, 1) if entry.kind == Kind.REINSTATED), default=0)


def to_nothing(asked: Sequence[Logged]) -> Logged | None:
    """Return that one of the requests which count by which the target is to serve nothing; None where none says so."""
    return next((entry for entry in asked if evidence.claim_of(entry.envelope)["body"].get("to_nothing")), None)


def may_leave_nothing(asked: Sequence[Logged]) -> bool:
    """Tell whether a target may serve nothing: that was said, or there was no earlier version when it was asked."""
    bodies = [evidence.claim_of(entry.envelope)["body"] for entry in asked]
    return any(body.get("to_nothing") or body.get("no_way_back") for body in bodies)


def next_act(release: ReleaseRow, log: Sequence[Logged], *, is_to_nothing: bool) -> str | None:
    """Return what a request is called that is made now; None where it was made already."""
    if not (counting := requests(log)):
        return act(log)
    if not is_to_nothing or release.phase != Phase.PROMOTED or to_nothing(counting) is not None:
        return None
    # The earlier version that it was asked to go back to is gone, or does not boot, or is not wanted any more.
    return f"{act(log)}:to_nothing"


def require_alone(session: Session, release: ReleaseRow, *, is_to_nothing: bool) -> None:
    """Return when no other release of the target has traffic that a rollback of this one would be about.

    Raises:
        Conflict: another release is in canary beside it, and would go back to this one; or it is in canary itself, and
            the live release beside it would serve on, of which it was said that nothing shall.
    """
    holder = targets.candidate_release(session, release.target_id)
    if release.phase == Phase.PROMOTED and holder is not None and holder.phase == Phase.CANARY:
        raise Conflict(
            f"release {holder.id} is in canary on this target and would go back to {release.id}; "
            f"roll that one back first: `sluicegate release rollback {holder.id} --reason …`",
            holder=str(holder.id),
        )
    live = targets.stable_release(session, release.target_id) if is_to_nothing else None
    if live is not None and live.id != release.id:
        raise Conflict(
            f"release {live.id} is live beside {release.id} and would serve on; roll this one back first: "
            f"`sluicegate release rollback {release.id} --reason …`, then "
            f"`sluicegate release rollback {live.id} --to-nothing --reason …` lets the target serve nothing",
            holder=str(live.id),
        )


def asked(session: Session, release: ReleaseRow) -> Logged | None:
    """Return the first request of a release that counts still."""
    return next(iter(counting(session, release)), None)


def counting(session: Session, release: ReleaseRow) -> list[Logged]:
    """Return the requests of a release that count still, oldest first, without the rest of its log."""
    stream = evidence.release_stream(release.id)
    acts = [row.act for row in db.ask(session, _ASKED, {"stream": stream})]
    return [entry for each in acts if (entry := evidence.find(session, stream, each)) is not None]


_ASKED = db.Sql(
    """
    SELECT act FROM entries WHERE stream = :stream AND kind = 'rollback_requested' AND position > coalesce(
        (SELECT max(position) FROM entries WHERE stream = :stream AND kind = 'reinstated'), 0
    ) ORDER BY position
    """
)


def going_back(session: Session, stable: ReleaseRow) -> Logged | None:
    """Return the request by which a live release is to be taken back, where it can be.

    Where nothing is before it, or what is does not become ready, which it holds for, another may follow it; not where
    it goes to nothing, which waits for nothing.
    """
    counts = counting(session, stable)
    if (order := to_nothing(counts)) is not None:
        return order
    if stable.held or not counts:
        return None
    return counts[0] if targets.way_back(session, stable) is not None else None


def waits(session: Session, release: ReleaseRow) -> str | None:
    """Return that a release gets no traffic before the live one beside it is taken back; None where it does."""
    if release.phase != Phase.APPROVED or release.is_paused or release.held:
        return None
    stable = targets.stable_release(session, release.target_id)
    request = None if stable is None else going_back(session, stable)
    if stable is None or request is None:
        return None
    why = evidence.claim_of(request.envelope)["body"]["reason"]
    return f"{BESIDE} release {stable.id} is being taken back, as {request.actor} asked: {why}"
