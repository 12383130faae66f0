"""Whether a release may go on: asked before traffic moves on, and again in the transaction that records it."""

from sqlalchemy.orm import Session

from registry import db, documents, evidence, releases, rollbacks, targets
from registry.tables import ReleaseRow
from schemas.holds import Hold
from schemas.problems import NotEligible
from schemas.release import Phase
from workers.control import Control, Held


def why_not_on(control: Control, session: Session, release: ReleaseRow) -> str | None:
    """Return why a release may not go on now, by people or by its evidence; where the evidence forbids it, it holds."""
    if release.is_paused:
        return "it was paused"
    if rollbacks.asked(session, release) is not None:
        return "its traffic was asked back"
    if release.phase == Phase.APPROVED and (stable := targets.stable_release(session, release.target_id)) is not None:
        # Whoever asks for that holds it too, and is refused once there is a canary beside it.
        evidence.hold(session, stable.id)
        if rollbacks.going_back(session, stable) is not None:
            return f"the traffic of release {stable.id} beside it was asked back"
    policy = documents.load_policy(session, release.project_id, release.policy)
    try:
        releases.require_eligible(session, release, policy, now=db.now(session))
    except NotEligible as problem:
        control.hold(session, release, f"held:evidence:{release.lease_token}", [problem.detail], Hold.NOT_ELIGIBLE)
        return problem.detail
    return None


def is_let_on(control: Control, held: Held) -> bool:
    """Tell whether a release may go on now; see `why_not_on`."""
    return control.perform(held, lambda session, release: why_not_on(control, session, release)) is None
