"""Blobs of a project. Bytes are stored once for all; that another project has them already never shows."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from registry import db, quotas
from registry.keys import Signer
from registry.quotas import Added
from registry.service import Service
from registry.storage.incoming import Incoming
from registry.tables import BlobRow, ProjectBlobRow, RecordRow
from schemas.common import canonical_json
from schemas.problems import DigestMismatch, NotFound, QuotaExceeded, Unavailable

RENEWED = timedelta(minutes=1)
"""How much of a blob's time of grace may be gone without being given back."""


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


def keep(
    service: Service,
    project: UUID,
    digest: str,
    staged: Incoming,
    *,
    is_record: bool = False,
    displaced: Callable[[], object] | None = None,
) -> tuple[int, bool]:
    """Verify what was received and store it. Owns its transaction; returns and raises as `store`.

    `is_record`: it is the raw record of a gate, which may be erased, and which no limit refuses. `displaced` is called
    before other bytes go that the store has under this digest.
    """
    staged.seal(digest)
    if staged.displaces and displaced is not None:
        displaced()
    with service.database.transaction() as session:
        return staged.size, admit(session, service, project, digest, staged, is_record=is_record)


def admit(
    session: Session, service: Service, project: UUID, digest: str, staged: Incoming, *, is_record: bool = False
) -> bool:
    """Put sealed bytes in their place and record that the project has shown that it holds them.

    Both happen under the blob's lock, so that whoever clears up sees both or neither. Returns whether that is new.

    Raises:
        QuotaExceeded.
    """
    # A key service may take half a second, for which nobody else shall wait.
    proven = proof(service.signer, project, digest, staged.size)
    hold(session, digest)
    if not is_record:
        # Before anything shows in the store. Placing may take long, and no other upload of the project waits for it.
        require_room(session, service, project, digest, staged.size)
    staged.place()
    at = db.now(session)
    added = session.execute(
        insert(BlobRow)
        .values(digest=digest, size=staged.size, created_at=at)
        .on_conflict_do_nothing(index_elements=["digest"])
        .returning(BlobRow.digest)
    )
    is_first = added.first() is not None
    if not is_first:
        mended = update(BlobRow).where(BlobRow.digest == digest, BlobRow.damaged_at.is_not(None))
        session.execute(mended.values(damaged_at=None))
    new = session.execute(
        insert(ProjectBlobRow)
        .values(
            project_id=project,
            digest=digest,
            created_at=at,
            used_at=at,
            proof=proven,
        )
        .on_conflict_do_nothing(index_elements=["project_id", "digest"])
        .returning(ProjectBlobRow.digest)
    )
    is_new = new.first() is not None
    if is_record:
        # What was erased and is sent again is a record again.
        session.execute(
            insert(RecordRow)
            .values(project_id=project, digest=digest, recorded_at=at, erased_at=None)
            .on_conflict_do_update(index_elements=["project_id", "digest"], set_={"recorded_at": at, "erased_at": None})
        )
    if not is_new:
        touch(session, project, [digest], at)
        # An older version took it, and signed nothing: the bytes have just been shown.
        unsigned = (
            ProjectBlobRow.project_id == project,
            ProjectBlobRow.digest == digest,
            ProjectBlobRow.proof.is_(None),
        )
        session.execute(update(ProjectBlobRow).where(*unsigned).values(proof=proven))
        return False
    try:
        quotas.count(session, service.settings, project, Added(bytes=staged.size), is_bound=not is_record)
    except QuotaExceeded:
        if is_first:
            # Another upload took the room meanwhile. What cannot be removed is cleared up as what has no row.
            with suppress(Unavailable):
                service.blobs.remove(digest)
        raise
    return True


def shown(project: UUID | str, digest: str, size: int) -> bytes:
    """Return what the service signs when a project has shown that it holds a blob."""
    return canonical_json({"blob": digest, "project": str(project), "size": size})


def proof(signer: Signer, project: UUID | str, digest: str, size: int) -> str:
    """Return what is kept beside a blob that a project holds: nobody else can say so."""
    signature = signer.sign(shown(project, digest, size)).signatures[0]
    return f"{signature.keyid}:{signature.sig}"


def require_room(session: Session, service: Service, project: UUID, digest: str, size: int) -> None:
    """Return when the project holds a blob, or has room for it just now. Raises QuotaExceeded."""
    if not sizes(session, project, [digest]):
        quotas.require_bytes(session, service.settings, project, size)


def room(session: Session, service: Service, project: UUID, digest: str) -> int | None:
    """Return how many bytes a blob may have just now, for `require_room` to let it pass; None for any number."""
    return None if sizes(session, project, [digest]) else quotas.room(session, service.settings, project)


def touch(session: Session, project: UUID, digests: Iterable[str], at: datetime) -> None:
    """Let the time of grace of blobs begin anew. One that somebody else touches just now is left to them."""
    mine = (
        select(ProjectBlobRow.digest)
        .where(
            ProjectBlobRow.project_id == project,
            ProjectBlobRow.digest.in_(set(digests)),
            ProjectBlobRow.used_at < at - RENEWED,
        )
        .with_for_update(skip_locked=True, key_share=True)
    )
    session.execute(
        update(ProjectBlobRow)
        .where(ProjectBlobRow.project_id == project, ProjectBlobRow.digest.in_(session.scalars(mine).all()))
        .values(used_at=at)
    )


def hold(session: Session, digest: str) -> None:
    """Let nobody else put a blob in its place or take it away until the transaction ends."""
    session.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:blob, 0))"), {"blob": f"blob/{digest}"})


def sizes(session: Session, project: UUID, digests: Iterable[str], *, is_needed: bool = False) -> dict[str, int]:
    """Return digest → size in bytes of those blobs that the project holds.

    `is_needed`: nobody clears them up until the transaction ends; whoever does so now is waited for.
    """
    asked = {"project": project, "digests": list(set(digests))}
    rows = db.ask(session, _SIZES_NEEDED if is_needed else _SIZES, asked)
    return {row.digest: row.size for row in rows}


_SELECT = (
    "SELECT blob.digest, blob.size FROM blobs AS blob JOIN project_blobs AS held ON held.digest = blob.digest"
    " WHERE held.project_id = :project AND blob.digest = ANY(CAST(:digests AS text[]))"
)
_SIZES, _SIZES_NEEDED = db.Sql(_SELECT), db.Sql(f"{_SELECT} FOR KEY SHARE OF held")


def missing(session: Session, project: UUID, digests: Sequence[str]) -> list[str]:
    """Return the blobs that the project does not hold, once each, in the order asked.

    Those that it holds are kept for a whole time of grace from now on.
    """
    held = sizes(session, project, digests)
    for digest in damaged(session, held):
        del held[digest]  # whoever has it sends it again
    if held:
        # Who asks goes on to register: what is told to be there must not go meanwhile.
        touch(session, project, held, db.now(session))
    return [digest for digest in dict.fromkeys(digests) if digest not in held]


def size(session: Session, project: UUID, digest: str) -> int:
    """Return the size of a blob, in bytes. Raises NotFound when the project does not hold it."""
    held = sizes(session, project, [digest])
    if digest not in held:
        raise NotFound(f"there is no blob {digest}", digest=digest)
    return held[digest]


def damaged(session: Session, digests: Iterable[str]) -> set[str]:
    """Return those of these blobs that the service found to have other bytes, and nobody has sent again since.

    Whoever is to rely on this asks for `sizes` before, as `is_needed`: what is found later waits for its lock.
    """
    return {row.digest for row in db.ask(session, _DAMAGED, {"digests": list(set(digests))})}


_DAMAGED = db.Sql("SELECT digest FROM blobs WHERE digest = ANY(CAST(:digests AS text[])) AND damaged_at IS NOT NULL")


def require_whole(session: Session, digest: str) -> None:
    """Return when nobody found a blob to be damaged. Raises DigestMismatch."""
    if damaged(session, [digest]):
        raise DigestMismatch(
            f"the store has other bytes under {digest}; whoever has the right ones may send them again",
            expected=digest,
        )
