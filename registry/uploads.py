"""Uploads in pieces: a blob that arrives in several requests, and goes on where it was cut.

What has arrived is a file; a row says whose it is. The file's length is the offset, so that a process which is killed
loses nothing that had reached the file, and its lock ends with whoever writes it.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from uuid6 import uuid7

from registry import blobs, db, quotas
from registry.auth import Actor
from registry.quotas import Added
from registry.service import Service
from registry.storage.incoming import Incoming
from registry.tables import UploadRow
from schemas.api import Upload, UploadCreate
from schemas.problems import DigestMismatch, InvalidDocument, NotFound, OffsetMismatch, TooLarge

SWEPT = 100
"""Uploads that one sweep looks at."""


def begin(session: Session, service: Service, actor: Actor, body: UploadCreate) -> tuple[Upload, bool]:
    """Begin an upload, or take up the one that is under way: whoever lost its id asks again.

    Returns:
        The upload, and whether this call began it. One of a blob that the project has is complete and has no id.

    Raises:
        TooLarge: the service takes no blob of this size.
        InvalidDocument: the project has the blob, and it has another size.
        QuotaExceeded.
    """
    limit = service.settings.max_blob_bytes
    if body.size > limit:
        raise TooLarge(f"a blob holds at most {limit} bytes", limit=limit)
    held = blobs.sizes(session, actor.project_id, [body.digest]).get(body.digest)
    if blobs.damaged(session, [body.digest]):
        held = None  # what is there has to be replaced
    if held is not None:
        if held != body.size:
            detail = f"the blob of this digest has {held} bytes"
            raise InvalidDocument(f"/size: {detail}", errors=[{"pointer": "/size", "detail": detail}])
        return _complete(None, body.digest, body.size), False
    at = db.now(session)
    added = session.scalar(
        insert(UploadRow)
        .values(
            id=uuid7(),
            project_id=actor.project_id,
            digest=body.digest,
            size=body.size,
            created_at=at,
            created_by=actor.name,
            touched_at=at,
        )
        .on_conflict_do_nothing(index_elements=["project_id", "digest", "size"])
        .returning(UploadRow.id)
    )
    row = session.scalars(
        select(UploadRow).where(
            UploadRow.project_id == actor.project_id, UploadRow.digest == body.digest, UploadRow.size == body.size
        )
    ).one_or_none()
    if row is None:  # it was finished or taken away between the two statements
        return begin(session, service, actor, body)
    if added is not None:
        quotas.count(session, service.settings, actor.project_id, Added(bytes=body.size, uploads=1))
    return wire(service, row, at), added is not None


def get(session: Session, project: UUID, upload: UUID) -> UploadRow:
    """Return an upload that is under way. Raises NotFound when there is none, or no longer."""
    row = session.get(UploadRow, upload, populate_existing=True)
    if row is None or row.project_id != project:
        raise NotFound(f"there is no upload {upload}; it may be complete, or have been silent for too long")
    return row


def browse(session: Session, project: UUID, *, after: UUID | None, limit: int) -> list[UploadRow]:
    """Return a project's uploads that are under way, newest first, before a cursor."""
    query = select(UploadRow).where(UploadRow.project_id == project)
    if after is not None:
        query = query.where(UploadRow.id < after)
    return list(session.scalars(query.order_by(UploadRow.id.desc()).limit(limit)))


def wire(service: Service, row: UploadRow, now: datetime) -> Upload:
    """Return an upload as the service gives it out."""
    heard = max(row.touched_at, now - timedelta(seconds=min(service.blobs.silence(row.id), 1e9)))
    return Upload(
        id=row.id,
        digest=row.digest,
        size=row.size,
        offset=service.blobs.received(row.id),
        is_complete=False,
        created_by=row.created_by,
        expires_at=heard + timedelta(seconds=service.settings.upload_seconds),
    )


def _complete(upload: UUID | None, digest: str, size: int) -> Upload:
    return Upload(id=upload, digest=digest, size=size, offset=size, is_complete=True, created_by=None, expires_at=None)


def take(service: Service, actor: Actor, upload: UUID, offset: int) -> tuple[UploadRow, Incoming]:
    """Hold an upload for one request that goes on at an offset. Close what is returned.

    Raises:
        NotFound.
        OffsetMismatch: it goes on elsewhere, or another request holds it; `offset` says where it is.
    """
    with service.database.transaction() as session:
        get(session, actor.project_id, upload)
        part = service.blobs.part(upload)
        if part is None:
            raise OffsetMismatch(
                f"another request writes to upload {upload} just now; ask for its offset when that has ended",
                offset=service.blobs.received(upload),
                is_held=True,
            )
        try:
            # Between the look and the hold it may have been completed.
            row = get(session, actor.project_id, upload)
            if part.size != offset:
                raise OffsetMismatch(
                    f"upload {upload} goes on at offset {part.size}, not at {offset}", offset=part.size, is_held=False
                )
        except NotFound:
            part.remove()
            part.close()
            raise
        except OffsetMismatch:
            part.close()
            raise
    return row, part


def settle(
    service: Service, row: UploadRow, part: Incoming, *, displaced: Callable[[], object] | None = None
) -> Upload:
    """Bring what a request sent to disk; when all is there, verify it and make it a blob of the project.

    `displaced` is called before other bytes go that the store has under its digest.

    Raises:
        DigestMismatch: the bytes are others than was said. The upload is over: begin it anew.
        QuotaExceeded: the project's limit was lowered meanwhile. The upload stays, and may be completed later.
        NotFound: it was taken away meanwhile.
    """
    part.sync()
    if part.size < row.size:
        with service.database.transaction() as session:
            at = db.now(session)
            session.execute(update(UploadRow).where(UploadRow.id == row.id).values(touched_at=at))
            return wire(service, get(session, row.project_id, row.id), at)
    try:
        part.seal(row.digest)
    except DigestMismatch:
        with service.database.transaction() as session:
            session.execute(delete(UploadRow).where(UploadRow.id == row.id))
        part.remove()
        raise
    if part.displaces and displaced is not None:
        displaced()
    with service.database.transaction() as session:
        ended = session.scalar(delete(UploadRow).where(UploadRow.id == row.id).returning(UploadRow.id))
        if ended is None:
            raise NotFound(f"upload {row.id} was taken away before it was complete")
        blobs.admit(session, service, row.project_id, row.digest, part)
    part.remove()
    return _complete(row.id, row.digest, row.size)


def cancel(session: Session, service: Service, actor: Actor, upload: UUID) -> None:
    """Take an upload away with what has arrived. Whoever writes to it just now is told at the end. Raises NotFound."""
    row = get(session, actor.project_id, upload)
    session.delete(row)
    session.flush()
    db.after_commit(session, lambda: service.blobs.drop(upload))


def expire(service: Service) -> int:
    """Take away uploads that have been silent for too long. Returns how many."""
    seconds = service.settings.upload_seconds
    gone: list[UUID] = []
    with service.database.transaction() as session:
        at = db.now(session)
        rows = session.scalars(
            select(UploadRow)
            .where(UploadRow.touched_at < at - timedelta(seconds=seconds))
            .order_by(UploadRow.touched_at)
            .limit(SWEPT)
            .with_for_update(skip_locked=True)
        )
        for row in rows:
            silence = service.blobs.silence(row.id)
            if silence < seconds:
                # It grows, in a request that has not ended.
                row.touched_at = at - timedelta(seconds=silence)
            else:
                session.delete(row)
                gone.append(row.id)
    for upload in gone:
        service.blobs.drop(upload)
    return len(gone)
