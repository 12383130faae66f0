"""Clearing up blobs: only what no bundle and no kept record needs goes, and only after a time of grace.

A blob's row is locked and looked at again before it goes. Whoever registers a bundle locks it too (a foreign key), so
of the two one is first; and the database itself refuses to drop a row that a bundle needs.
"""

import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from uuid import UUID

from sqlalchemy import ColumnElement, and_, delete, exists, select, tuple_
from sqlalchemy.orm import Session

from registry import blobs, db, quotas
from registry.quotas import Added
from registry.service import Service
from registry.tables import BlobRow, BundleBlobRow, ProjectBlobRow, RecordRow
from schemas.api import Collected

BATCH = 500
STRAY_SECONDS = 3600.0
"""A file without a row that is so old belongs to nobody: it is in its place for a moment before its row is."""
MAX_TOLD = 1000


def collect(service: Service, *, is_dry_run: bool) -> Collected:
    """Clear up everything, and tell which blobs the store has lost: that stops nothing."""
    count, size = 0, 0
    for project, digest, length in _unneeded(service):
        if is_dry_run or let_go(service, project, digest):
            count, size = count + 1, size + length
    missing = list(_missing(service))
    return Collected(
        is_dry_run=is_dry_run,
        blobs=count,
        bytes=size,
        strays=_strays(service, is_dry_run=is_dry_run),
        missing=missing[:MAX_TOLD],
        missing_count=len(missing),
    )


def collect_some(service: Service, limit: int) -> int:
    """Clear up a few blobs. Returns how many."""
    return sum(let_go(service, project, digest) for project, digest, _ in islice(_unneeded(service), limit))


def _needed() -> ColumnElement[bool]:
    """Whether a bundle is made of a blob, or it is a record that is kept."""
    return exists().where(
        BundleBlobRow.project_id == ProjectBlobRow.project_id, BundleBlobRow.blob == ProjectBlobRow.digest
    ).correlate(ProjectBlobRow) | exists().where(
        RecordRow.project_id == ProjectBlobRow.project_id,
        RecordRow.digest == ProjectBlobRow.digest,
        RecordRow.erased_at.is_(None),
    ).correlate(ProjectBlobRow)


def _unneeded(service: Service) -> Iterator[tuple[UUID, str, int]]:
    """Yield (project, digest, bytes) of what seems to be needed no more."""
    last: tuple[UUID, str] | None = None
    while True:
        with service.database.transaction() as session:
            oldest = db.now(session) - timedelta(seconds=service.settings.blob_grace_seconds)
            place = tuple_(ProjectBlobRow.project_id, ProjectBlobRow.digest)
            query = (
                select(ProjectBlobRow.project_id, ProjectBlobRow.digest, BlobRow.size)
                .join(BlobRow, BlobRow.digest == ProjectBlobRow.digest)
                .where(ProjectBlobRow.used_at < oldest, ~_needed())
                .order_by(ProjectBlobRow.project_id, ProjectBlobRow.digest)
                .limit(BATCH)
            )
            rows = session.execute(query if last is None else query.where(place > tuple_(*last))).all()
        yield from ((row.project_id, row.digest, row.size) for row in rows)
        if len(rows) < BATCH:
            return
        last = rows[-1].project_id, rows[-1].digest


def let_go(service: Service, project: UUID, digest: str) -> bool:
    """Take a blob from a project, and from the store when no other has it. Returns False when it is needed after all.

    The row goes first. Whoever is killed before the file goes leaves a stray, which the next `collect` finds.
    """
    with service.database.transaction() as session:
        blobs.hold(session, digest)
        oldest = db.now(session) - timedelta(seconds=service.settings.blob_grace_seconds)
        of = and_(ProjectBlobRow.project_id == project, ProjectBlobRow.digest == digest)
        locked = session.scalar(select(ProjectBlobRow.used_at).where(of).with_for_update())
        # A statement of its own: it sees who registered while this one waited for the lock.
        if locked is None or locked >= oldest or session.scalar(select(_needed()).where(of)):
            return False
        is_last = drop(session, service, project, digest)
    if is_last:
        remove_file(service, digest)
    return True


def drop(session: Session, service: Service, project: UUID, digest: str) -> bool:
    """Take a blob's row from a project. The caller holds the blob. Returns whether no other project has it."""
    size = session.scalars(select(BlobRow.size).where(BlobRow.digest == digest)).one()
    session.execute(delete(ProjectBlobRow).where(ProjectBlobRow.project_id == project, ProjectBlobRow.digest == digest))
    is_last = not session.scalar(select(exists().where(ProjectBlobRow.digest == digest)))
    if is_last:
        session.execute(delete(BlobRow).where(BlobRow.digest == digest))
    quotas.count(session, service.settings, project, Added(bytes=-size), is_bound=False)
    return is_last


def remove_file(service: Service, digest: str) -> bool:
    """Remove a file that no row names. Returns whether it was removed."""
    with service.database.transaction() as session:
        blobs.hold(session, digest)
        if session.get(BlobRow, digest) is not None:
            return False
        service.blobs.remove(digest)
        return True


def _missing(service: Service) -> Iterator[str]:
    last = ""
    while True:
        with service.database.transaction() as session:
            query = select(BlobRow.digest).where(BlobRow.digest > last).order_by(BlobRow.digest).limit(BATCH)
            digests = session.scalars(query).all()
        yield from service.blobs.lost(digests)
        if len(digests) < BATCH:
            return
        last = digests[-1]


def _strays(service: Service, *, is_dry_run: bool) -> int:
    count, found = 0, service.blobs.digests(older_than=time.time() - STRAY_SECONDS)
    while batch := list(islice(found, BATCH)):
        with service.database.transaction() as session:
            known = set(session.scalars(select(BlobRow.digest).where(BlobRow.digest.in_(batch))))
        for digest in batch:
            if digest not in known and (is_dry_run or remove_file(service, digest)):
                count += 1
    return count
