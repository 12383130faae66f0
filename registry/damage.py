"""A blob of the store that has other bytes than it is named after: whoever meets it, the service reads it again.

Only that decides. Then it counts as not there until somebody sends the right bytes, and every bundle that is made of
it is quarantined, in every project.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from uuid import UUID

import structlog
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from registry import acts, db, quarantine
from registry.auth import Actor
from registry.service import Service
from registry.tables import BlobRow, BundleBlobRow, ProjectBlobRow
from schemas.api import BlobCheck
from schemas.problems import DigestMismatch, NotFound

READ_BYTES = 1 << 20

log = structlog.get_logger("registry.damage")


def pieces(service: Service, actor: Actor, digest: str, length: int) -> Iterator[bytes]:
    """Return the bytes of a stored blob in pieces of up to `length`. It is opened only when they are asked for.

    They are hashed on the way, and the last piece is given out only when all were right: otherwise the blob is
    examined, and DigestMismatch ends the answer before it is whole.

    Raises:
        NotFound: the store has lost it. Raised at once, so that an answer is not begun.
    """
    if not service.blobs.exists(digest):
        raise NotFound(f"the store has no blob {digest}", digest=digest)
    return _pieces(service, actor, digest, length)


def _pieces(service: Service, actor: Actor, digest: str, length: int) -> Iterator[bytes]:
    last = b""
    try:
        with service.blobs.open(digest, is_verified=True) as file:
            while piece := file.read(length):
                if last:
                    yield last
                last = piece
    except DigestMismatch:
        examine(service, actor, digest)
        raise
    if last:
        yield last


def examine(service: Service, actor: Actor, digest: str) -> BlobCheck:
    """Read a blob of the store again for somebody who asks. Does and raises as `look`."""
    return look(service, digest, project=actor.project_id, seen_by=actor.name)


def displaced(service: Service, actor: Actor, digest: str) -> None:
    """Look at a blob that somebody has sent again, before its right bytes take the place of others. Raises as `look`.

    Else nobody would ever hear of what was served, and booted, in the meantime.
    """
    with suppress(NotFound):  # it went meanwhile
        examine(service, actor, digest)


def look(service: Service, digest: str, *, project: UUID, seen_by: str) -> BlobCheck:
    """Read a blob of the store again; when its bytes are others, record that, and quarantine what is made of it.

    `project` and `seen_by` are where it was met, and by whom. One that is right again counts as there again. The
    quarantines stay: those a person lifts.

    Raises:
        NotFound: the store has lost it, which is no damage.
        Unavailable: the store cannot be read.
    """
    found = _found(service, digest)
    with service.database.transaction() as session:
        # Who registers a bundle holds these, and asks what is damaged only then: of the two, one sees the other.
        holders = select(ProjectBlobRow.digest).where(ProjectBlobRow.digest == digest)
        session.execute(holders.order_by(ProjectBlobRow.project_id).with_for_update())
        at = None if found is None else db.now(session)
        changed = BlobRow.damaged_at.is_(None) if found else BlobRow.damaged_at.is_not(None)
        session.execute(update(BlobRow).where(BlobRow.digest == digest, changed).values(damaged_at=at))
        made_of_it = [] if found is None else _bundles(session, digest)
    for holder, bundle in made_of_it:
        # Who saw it is told in the project where that was, and in no other.
        damage = quarantine.Damage(digest, str(found), seen_by if holder == project else None)
        acts.perform(
            service, partial(quarantine.of_blob, service=service, project=holder, bundle=bundle, damage=damage)
        )
    if found is not None:
        log.error("blob_damaged", digest=digest, found=found, seen_by=seen_by, bundles=len(made_of_it))
    mine = sorted(bundle for holder, bundle in made_of_it if holder == project)
    return BlobCheck(digest=digest, is_intact=found is None, found=found, quarantined=mine)


def _found(service: Service, digest: str) -> str | None:
    """Return the digest that a blob's bytes have instead of its own; None when they are right."""
    try:
        with service.blobs.open(digest, is_verified=True) as file:
            while file.read(READ_BYTES):
                pass
    except DigestMismatch as problem:
        return str(problem.members["received"])
    return None


def _bundles(session: Session, digest: str) -> list[tuple[UUID, str]]:
    rows = select(BundleBlobRow.project_id, BundleBlobRow.bundle).where(BundleBlobRow.blob == digest)
    return sorted((row.project_id, row.bundle) for row in session.execute(rows))
