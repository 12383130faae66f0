"""What people asked: that a release's traffic be taken back. A request is for one time that the release is live.

A release that was replaced, and came back since the one after it was taken back, is live anew. What was asked before
is over by then: who wants its traffic back now says so again, with what is before it now.
"""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from registry import db, evidence, targets
from registry.logged import Logged
from registry.tables import ReleaseRow
from schemas.evidence import Kind
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


def asked(session: Session, release: ReleaseRow) -> Logged | None:
    """Return the first request of a release that counts still."""
    found = db.ask_any(session, _ASKED, {"stream": evidence.release_stream(release.id)})
    return None if found is None else evidence.find(session, evidence.release_stream(release.id), found.act)


_ASKED = db.Sql(
    """
    SELECT act FROM entries WHERE stream = :stream AND kind = 'rollback_requested' AND position > coalesce(
        (SELECT max(position) FROM entries WHERE stream = :stream AND kind = 'reinstated'), 0
    ) ORDER BY position LIMIT 1
    """
)


def going_back(session: Session, stable: ReleaseRow) -> Logged | None:
    """Return the request by which a live release is to be taken back, where it can be.

    Where nothing is before it, or what is does not become ready, which it holds for, another may follow it.
    """
    if stable.held or (request := asked(session, stable)) is None:
        return None
    return request if targets.way_back(session, stable) is not None else None


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
