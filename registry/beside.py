"""What is judged and shown with a release and is not in it, each in one statement."""

from typing import Any

from sqlalchemy.orm import Session

from registry import db, documents, quarantine, targets
from registry.tables import IN_PROGRESS, ReleaseRow
from schemas.release import Phase
from schemas.runner import JobState

# The last entry of a bundle by which it was quarantined, or that was lifted, and what is live on a target.
_FACTS = db.Sql(
    """
    SELECT
        (SELECT sequence FROM entries WHERE stream = :stream AND kind = ANY(CAST(:kinds AS text[]))
            ORDER BY position DESC LIMIT 1) AS doubt,
        (SELECT bundle FROM releases WHERE target_id = :target AND phase = :live) AS live
    """
)


def facts(session: Session, release: ReleaseRow) -> tuple[str | None, int | None]:
    """Return the bundle that traffic would go back to, and the sequence before which no result counts."""
    asked = {
        "stream": documents.stream(release.project_id, release.bundle),
        "kinds": list(quarantine.KINDS),
        "target": release.target_id,
        "live": Phase.PROMOTED.value,
    }
    found = db.ask_one(session, _FACTS, asked)
    if found.live is not None and release.phase in IN_PROGRESS:
        return found.live, found.doubt
    before = targets.way_back_past_live(session, release)
    return before.bundle if before is not None else None, found.doubt


def shown(session: Session, release: ReleaseRow) -> Any:
    """Return what is shown with a release and is not in it.

    `target` and `bundle_name`, `is_quarantined`; `waiting`: a job of the release that is due, if any; and
    `is_asked_back`: whether it was ever asked that the target's live release be taken back.
    """
    asked = {"release": release.id, "project": release.project_id, "target": release.target_id}
    return db.ask_one(session, _SHOWN, {**asked, "bundle": release.bundle, "pending": JobState.PENDING.value})


_SHOWN = db.Sql(
    """
    SELECT target.name AS target, member.name AS bundle_name, member.quarantined_at IS NOT NULL AS is_quarantined,
        (SELECT id FROM jobs WHERE release_id = :release AND state = :pending AND due_at <= clock_timestamp()
            ORDER BY id LIMIT 1) AS waiting,
        EXISTS (
            SELECT FROM releases AS live JOIN entries AS asked ON asked.stream = 'release/' || CAST(live.id AS text)
            WHERE live.target_id = :target AND live.phase = 'promoted' AND asked.kind = 'rollback_requested'
        ) AS is_asked_back
    FROM targets AS target, project_documents AS member
    WHERE target.id = :target AND member.project_id = :project AND member.digest = :bundle
    """
)
