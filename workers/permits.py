"""Whether a release may go on: asked before traffic moves on, and again in the transaction that records it."""

from sqlalchemy.orm import Session

from registry import db, documents, evidence, releases, targets
from registry.tables import ReleaseRow
from schemas.holds import Hold
from schemas.problems import NotEligible
from schemas.release import Phase
from workers.control import Control, Held
from workers.restores import is_found


def why_not_on(control: Control, session: Session, release: ReleaseRow) -> str | None:
    """Return why a release may not go on now, by people or by its evidence; where the evidence forbids it, it holds."""
    if release.is_paused:
        return "it was paused"
    if is_found(session, release, "rollback"):
        return "its traffic was asked back"
    if release.phase == Phase.APPROVED and (stable := targets.stable_release(session, release.target_id)) is not None:
        # Whoever asks for that holds it too, and is refused once there is a canary beside it.
        evidence.hold(session, stable.id)
        if is_going_back(session, stable):
            return f"the traffic of release {stable.id} beside it was asked back"
    policy = documents.load_policy(session, release.project_id, release.policy)
    try:
        releases.require_eligible(session, release, policy, now=db.now(session))
    except NotEligible as problem:
        control.hold(session, release, f"held:evidence:{release.lease_token}", [problem.detail], Hold.NOT_ELIGIBLE)
        return problem.detail
    return None


def is_going_back(session: Session, stable: ReleaseRow) -> bool:
    """Tell whether a live release is to be taken back, and can be.

    Where nothing is before it, or what is does not become ready, which it holds for, another may follow it.
    """
    return is_found(session, stable, "rollback") and not stable.held and targets.way_back(session, stable) is not None


def is_let_on(control: Control, held: Held) -> bool:
    """Tell whether a release may go on now; see `why_not_on`."""
    return control.perform(held, lambda session, release: why_not_on(control, session, release)) is None
