"""Blobs that a runner's copy differed from: the service reads its own again, since other bundles share them.

What a runner hashed says nothing about the store by itself: its own disk may be the cause. So a doubt is kept with the
result that raised it, whoever is killed meanwhile, and settled by `damage.look`, which alone decides.
"""

import time
from datetime import datetime, timedelta
from uuid import UUID

import structlog
from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from gates.gate import MAX_FINDINGS
from gates.integrity import DIFFERS
from registry import damage, db, quarantine
from registry.logged import Logged
from registry.service import Service
from registry.tables import BlobDoubtRow, BundleBlobRow
from schemas.problems import NotFound, Unavailable
from schemas.result import GateResult, Verdict

READING = timedelta(minutes=30)
"""How long whoever took a doubt has for reading the blob. Then another reads it, which changes nothing twice."""
ROUND_SECONDS = 60.0
"""After so long one round begins with no further blob."""

log = structlog.get_logger("registry.doubts")


def of_result(session: Session, entry: Logged, bundle: str, result: GateResult) -> None:
    """Doubt the blobs that a failed integrity gate found changed; all of the bundle's where its list is full."""
    if result.gate != quarantine.INTEGRITY or result.verdict is not Verdict.FAILED:
        return
    differing = {str(one.expected) for one in result.findings if one.code == DIFFERS}
    blobs = select(BundleBlobRow.blob).where(
        BundleBlobRow.project_id == entry.project_id, BundleBlobRow.bundle == bundle
    )
    if len(result.findings) < MAX_FINDINGS:
        blobs = blobs.where(BundleBlobRow.blob.in_(differing))
    # In one order, so that of two results at once none waits for the other in a ring.
    for blob in sorted(set(session.scalars(blobs))):
        at = db.now(session)
        new = insert(BlobDoubtRow).values(
            digest=blob, project_id=entry.project_id, seen_by=entry.actor, doubted_at=at, due_at=at
        )
        # Whoever reads it just now began before: it is read once more.
        again = {"project_id": entry.project_id, "seen_by": entry.actor, "doubted_at": at, "due_at": at}
        session.execute(new.on_conflict_do_update(index_elements=["digest"], set_=again))


def settle(service: Service) -> int:
    """Read the doubted blobs again, longest waiting first. Returns how many were read.

    What cannot be read just now is tried again later; one that the store has lost is `blob gc`'s to tell.
    """
    until, read = time.monotonic() + ROUND_SECONDS, 0
    while time.monotonic() < until and (taken := _take(service)) is not None:
        digest, project, seen_by, doubted_at = taken
        try:
            found = damage.look(service, digest, project=project, seen_by=seen_by)
            log.info("doubt_settled", digest=digest, is_intact=found.is_intact, seen_by=seen_by)
            read += 1
        except NotFound:
            log.warning("doubted_blob_lost", digest=digest, seen_by=seen_by)
        except Unavailable as problem:
            log.warning("doubted_blob_unread", digest=digest, detail=problem.detail)
            return read
        with service.database.transaction() as session:
            # What was doubted anew meanwhile stays.
            mine = (BlobDoubtRow.digest == digest, BlobDoubtRow.doubted_at == doubted_at)
            session.execute(delete(BlobDoubtRow).where(*mine))
    return read


def _take(service: Service) -> tuple[str, UUID, str, datetime] | None:
    """Take the doubt that is due for longest, so that nobody else reads the same blob meanwhile."""
    with service.database.transaction() as session:
        longest = (
            select(BlobDoubtRow.digest)
            .where(BlobDoubtRow.due_at <= db.now(session))
            .order_by(BlobDoubtRow.due_at, BlobDoubtRow.digest)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        row = session.execute(
            update(BlobDoubtRow)
            .where(BlobDoubtRow.digest == longest.scalar_subquery())
            .values(due_at=func.clock_timestamp() + READING)
            .returning(BlobDoubtRow.digest, BlobDoubtRow.project_id, BlobDoubtRow.seen_by, BlobDoubtRow.doubted_at)
        ).one_or_none()
    return None if row is None else (row.digest, row.project_id, row.seen_by, row.doubted_at)
