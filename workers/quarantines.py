"""What a release does when its bundle is quarantined: without traffic it is rejected, with some it is taken back.

What is live after its soak serves on: there may be nothing to fall back to, and which of two risks is the smaller
one, people decide (`target show` tells them).
"""

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from registry import db, quarantine
from registry.lifecycle import BEFORE_TRAFFIC
from registry.tables import ProjectDocumentRow, ReleaseRow
from schemas.evidence import Kind, Reasoned
from workers.control import Control

CAUSE = "bundle_quarantined"


def sentences(session: Session, release: ReleaseRow) -> list[str]:
    """Return why a release's bundle is quarantined, one sentence each; nothing when it is not."""
    found = quarantine.reasons(session, release.project_id, release.bundle)
    return [f"the bundle is quarantined: {why}"[:4000] for why in found[:50]]


def is_rejected(control: Control, session: Session, release: ReleaseRow) -> bool:
    """Reject a release without traffic whose bundle is quarantined, and tell whether it was. Nothing stops this."""
    reasons = sentences(session, release)
    if reasons:
        control.act(session, release, "refusal:quarantine", Kind.REFUSED, Reasoned(reasons=reasons, cause=CAUSE))
    return bool(reasons)


def wake(control: Control) -> int:
    """Make releases due that wait without traffic for something, and whose bundle is quarantined. Returns how many.

    What has traffic, or is in its soak, is looked at all the time anyway.
    """
    with control.service.database.transaction() as session:
        quarantined = select(ProjectDocumentRow.digest).where(
            ProjectDocumentRow.project_id == ReleaseRow.project_id,
            ProjectDocumentRow.digest == ReleaseRow.bundle,
            ProjectDocumentRow.quarantined_at.is_not(None),
        )
        waiting = (
            select(ReleaseRow.id)
            .where(ReleaseRow.phase.in_(BEFORE_TRAFFIC), ReleaseRow.due_at.is_(None), quarantined.exists())
            # Whoever holds one takes it a step on, or makes it due again.
            .with_for_update(skip_locked=True, key_share=True)
        )
        woken = session.scalars(
            update(ReleaseRow)
            .where(ReleaseRow.id.in_(session.scalars(waiting).all()))
            .values(due_at=db.now(session))
            .returning(ReleaseRow.id)
        ).all()
    return len(woken)
