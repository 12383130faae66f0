"""Erasing the raw records of gates: the bytes go, the evidence that was judged from them stays and says so."""

from datetime import timedelta
from uuid import UUID

import structlog
from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from registry import auth, blobs, collection, db, evidence
from registry.auth import Actor
from registry.logged import Logged
from registry.service import Service
from registry.tables import BundleBlobRow, ProjectBlobRow, RecordRow
from schemas.api import Erase
from schemas.evidence import Kind, RecordsErased
from schemas.problems import Conflict, InvalidDocument, NotFound, Problem

SWEPT = 100
"""Records that one sweep erases."""

log = structlog.get_logger(__name__)


def stream(project: UUID, digest: str) -> str:
    """Return the stream of what happened to records."""
    return f"records/{project}/{digest}"


def erase(session: Session, service: Service, actor: Actor, body: Erase) -> tuple[Logged, bool]:
    """Erase the records of a gate's result, as a recorded act.

    Returns:
        The entry that says so, and whether this call wrote it: what is erased stays as it was told first.

    Raises:
        NotFound: the project has no such entry.
        InvalidDocument: the entry is no gate's result, or names no records.
        Conflict: a bundle is made of the same bytes.
        NotPermitted: the actor's token is for some targets only.
    """
    auth.require_whole_project(actor, "erase_records")
    auth.confirm(session, actor)
    row = evidence.by_digest(session, actor.project_id, body.entry)
    if row is None:
        raise NotFound(f"there is no entry {body.entry}", digest=body.entry)
    records = evidence.claim_of(row.envelope)["body"].get("records") if row.kind == Kind.GATE_RECORDED else None
    if records is None:
        detail = f"must name an entry of kind {Kind.GATE_RECORDED} that has records"
        raise InvalidDocument(f"/entry {detail}", errors=[{"pointer": "/entry", "detail": detail}])
    return _erase(session, service, actor.project_id, records, actor.name, "person", body.reason)


def _erase(
    session: Session, service: Service, project: UUID, digest: str, by: str, cause: str, reason: str
) -> tuple[Logged, bool]:
    blobs.hold(session, digest)
    at = db.now(session)
    record = session.get(RecordRow, (project, digest), with_for_update=True, populate_existing=True)
    if record is None:
        raise NotFound(f"the project has no records {digest}", digest=digest)
    latest = erased(session, project, digest)
    if record.erased_at is not None and latest is not None:
        # The store may have been away when its bytes should go; they do not when somebody has sent them again.
        db.after_commit(session, lambda: collection.remove_file(service, digest))
        return latest, False
    holder = session.scalar(
        select(BundleBlobRow.bundle).where(BundleBlobRow.project_id == project, BundleBlobRow.blob == digest).limit(1)
    )
    if holder is not None:
        raise Conflict(f"bundle {holder} is made of the same bytes as the records {digest}", holder=holder)
    where = stream(project, digest)
    body = RecordsErased.model_validate({"records": digest, "cause": cause, "reason": reason})
    act = f"erased:{evidence.next_position(session, where)}"
    signed = evidence.state(
        service.signer, where, act, by, Kind.RECORDS_ERASED, body, subjects={"records": digest}, now=at
    )
    row, _ = evidence.append(session, project, signed)
    record.erased_at = at
    session.flush()
    if session.scalar(select(exists().where(ProjectBlobRow.project_id == project, ProjectBlobRow.digest == digest))):
        is_last = collection.drop(session, service, project, digest)
        if is_last:
            db.after_commit(session, lambda: collection.remove_file(service, digest))
    return row, True


def erased(session: Session, project: UUID, digest: str) -> Logged | None:
    """Return the entry by which records were erased last, or None when they never were."""
    row = evidence.latest(session, stream(project, digest))
    return row if row is not None and row.kind == Kind.RECORDS_ERASED else None


def expire(service: Service) -> int:
    """Erase records whose time is over. Returns how many."""
    days = service.settings.record_days
    if not days:
        return 0
    with service.database.transaction() as session:
        oldest = db.now(session) - timedelta(days=days)
        shared = exists().where(
            BundleBlobRow.project_id == RecordRow.project_id, BundleBlobRow.blob == RecordRow.digest
        )
        due = session.execute(
            select(RecordRow.project_id, RecordRow.digest)
            .where(RecordRow.erased_at.is_(None), RecordRow.recorded_at < oldest, ~shared)
            .order_by(RecordRow.recorded_at)
            .limit(SWEPT)
        ).all()
    count = 0
    for project, digest in due:
        try:
            with service.database.transaction() as session:
                reason = f"records are kept for {days:g} days"
                count += _erase(session, service, project, digest, "controller", "retention", reason)[1]
        except Problem as problem:
            log.warning("records_not_erased", project=str(project), records=digest, error=str(problem))
    return count
