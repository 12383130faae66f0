"""Blobs of a project. Bytes are stored once for all; that another project has them already never shows."""

from collections.abc import Iterable, Iterator, Sequence
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from registry import db
from registry.service import Service
from registry.tables import BlobRow, ProjectBlobRow
from schemas.problems import NotFound


def store(service: Service, project: UUID, digest: str, chunks: Iterable[bytes], *, limit: int) -> tuple[int, bool]:
    """Verify and store bytes, and make the project one that holds them. Owns its transaction: receiving is slow.

    Returns:
        The size in bytes, and whether the project is new to the blob.

    Raises:
        DigestMismatch: the bytes have another digest.
        TooLarge: there are more than `limit` bytes.
    """
    size = service.blobs.put(chunks, digest, limit=limit)
    with service.database.transaction() as session:
        return size, admit(session, project, digest, size)


def admit(session: Session, project: UUID, digest: str, size: int) -> bool:
    """Record that a project has shown that it holds bytes in the store. Returns whether that is new."""
    at = db.now(session)
    session.execute(
        insert(BlobRow)
        .values(digest=digest, size=size, created_at=at)
        .on_conflict_do_nothing(index_elements=["digest"])
    )
    new = session.execute(
        insert(ProjectBlobRow)
        .values(project_id=project, digest=digest, created_at=at)
        .on_conflict_do_nothing(index_elements=["project_id", "digest"])
        .returning(ProjectBlobRow.digest)
    )
    return new.first() is not None


def sizes(session: Session, project: UUID, digests: Iterable[str]) -> dict[str, int]:
    """Return digest → size in bytes of those blobs that the project holds."""
    rows = session.execute(
        select(BlobRow.digest, BlobRow.size)
        .join(ProjectBlobRow, ProjectBlobRow.digest == BlobRow.digest)
        .where(ProjectBlobRow.project_id == project, BlobRow.digest.in_(set(digests)))
    )
    return {row.digest: row.size for row in rows}


def missing(session: Session, project: UUID, digests: Sequence[str]) -> list[str]:
    """Return the blobs that the project does not hold, once each, in the order asked."""
    held = sizes(session, project, digests)
    return [digest for digest in dict.fromkeys(digests) if digest not in held]


def size(session: Session, project: UUID, digest: str) -> int:
    """Return the size of a blob, in bytes. Raises NotFound when the project does not hold it."""
    held = sizes(session, project, [digest])
    if digest not in held:
        raise NotFound(f"there is no blob {digest}", digest=digest)
    return held[digest]


def pieces(service: Service, digest: str, length: int) -> Iterator[bytes]:
    """Return the bytes of a stored blob in pieces of up to `length`. It is opened only when they are asked for.

    Raises:
        NotFound: the store has lost it. Raised at once, so that an answer is not begun.
    """
    if not service.blobs.exists(digest):
        raise NotFound(f"the store has no blob {digest}", digest=digest)
    return _pieces(service, digest, length)


def _pieces(service: Service, digest: str, length: int) -> Iterator[bytes]:
    with service.blobs.open(digest) as file:
        while piece := file.read(length):
            yield piece
