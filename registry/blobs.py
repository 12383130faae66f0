"""Blobs of a project. Bytes are stored once for all; that another project has them already never shows."""

from collections.abc import Iterable, Iterator, Sequence
from uuid import UUID

from sqlalchemy import select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from registry import db
from registry.service import Service
from registry.storage.incoming import Incoming
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
    with service.blobs.stage() as staged:
        for chunk in chunks:
            staged.write(chunk, limit=limit)
        return keep(service, project, digest, staged)


def keep(service: Service, project: UUID, digest: str, staged: Incoming) -> tuple[int, bool]:
    """Verify what was received and store it. Owns its transaction; returns and raises as `store`."""
    staged.seal(digest)
    with service.database.transaction() as session:
        return staged.size, admit(session, project, digest, staged)


def admit(session: Session, project: UUID, digest: str, staged: Incoming) -> bool:
    """Put sealed bytes in their place and record that the project has shown that it holds them.

    Both happen under the blob's lock, so that whoever clears up sees both or neither. Returns whether that is new.
    """
    hold(session, digest)
    staged.place()
    at = db.now(session)
    session.execute(
        insert(BlobRow)
        .values(digest=digest, size=staged.size, created_at=at)
        .on_conflict_do_nothing(index_elements=["digest"])
    )
    new = session.execute(
        insert(ProjectBlobRow)
        .values(project_id=project, digest=digest, created_at=at)
        .on_conflict_do_nothing(index_elements=["project_id", "digest"])
        .returning(ProjectBlobRow.digest)
    )
    return new.first() is not None


def hold(session: Session, digest: str) -> None:
    """Let nobody else put a blob in its place or take it away until the transaction ends."""
    session.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:blob, 0))"), {"blob": f"blob/{digest}"})


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
