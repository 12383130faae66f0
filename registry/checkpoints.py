"""Checkpoints: signed statements over all of a project's streams, each over what was recorded since the one before."""

import time
from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from gates.evidence import heads_of, root_of
from registry import db, keys
from registry.service import Service
from registry.tables import CheckpointRow, EntryRow
from schemas.checkpoint import CHECKPOINT, MAX_SEALED, Checkpoint, KeyValidity, Sealed
from schemas.common import canonical_json, sha256_digest, strict_json
from schemas.evidence import GENESIS, STATEMENT_TYPE, Envelope, Statement
from schemas.problems import NotFound, Unavailable

PATIENCE_SECONDS = 5.0
"""How long is waited for transactions that may hold a lower sequence and have not ended."""
_NAP_SECONDS = 0.01


def make(service: Service, project: UUID, *, by: str) -> tuple[CheckpointRow, bool]:
    """Seal everything that a project has recorded until now. It holds no lock that a writer waits for.

    Returns:
        The last checkpoint, and whether this call made one: when nothing was recorded since, none is made.

    Raises:
        NotFound: the project has no entry.
        Unavailable: a transaction of another caller would not end.
    """
    until = _settled(service, project)
    is_new, is_more = False, True
    while is_more:
        stored, is_more = _next(service, project, until, by)
        is_new |= stored
    with service.database.reading() as session:
        row = last(session, project)
    if row is None:
        raise NotFound("there is no evidence yet: nothing to seal")
    return row, is_new


def _settled(service: Service, project: UUID) -> int:
    """Return a sequence at and below which no entry can appear any more; 0 when there is none.

    A sequence is given out in order, to transactions that have their number already (see `evidence.append`). So
    whoever holds one below the highest that is visible now has a lower number than a transaction that begins now.
    """
    with service.database.reading() as session:
        sequence = session.scalar(select(func.max(EntryRow.sequence)).where(EntryRow.project_id == project)) or 0
        mine = session.scalar(text("SELECT pg_current_xact_id()::text"))
    ends = time.monotonic() + PATIENCE_SECONDS
    while True:
        with service.database.reading() as session:
            reached = text("SELECT pg_snapshot_xmin(pg_current_snapshot()) > CAST(CAST(:mine AS text) AS xid8)")
            if session.scalar(reached, {"mine": mine}):
                return sequence
        if time.monotonic() > ends:
            raise Unavailable("a transaction has been under way for long, and might still add to the log; try again")
        time.sleep(_NAP_SECONDS)


def _next(service: Service, project: UUID, until: int, by: str) -> tuple[bool, bool]:
    """Make one checkpoint over at most MAX_SEALED entries.

    Returns:
        Whether it was stored, and whether there may be more to seal: also where another caller was first.
    """
    with service.database.reading() as session:
        before = last(session, project)
        rows = session.execute(
            select(EntryRow.sequence, EntryRow.stream, EntryRow.position, EntryRow.entry_digest)
            .where(
                EntryRow.project_id == project,
                EntryRow.sequence > (before.sequence if before else 0),
                EntryRow.sequence <= until,
            )
            .order_by(EntryRow.sequence)
            .limit(MAX_SEALED)
        ).all()
        if not rows:
            return False, False
        made_at = keys.signing_time(session, key_id := service.signer.key_id)
        history = keys.history(session)
    sealed = Sealed(
        project=project,
        number=before.number + 1 if before else 1,
        previous=before.digest if before else GENESIS,
        made_at=made_at,
        made_by=by,
        sequence=rows[-1].sequence,
        entries=len(rows) + (before.entries if before else 0),
        streams=sum(row.position == 1 for row in rows) + (before.streams if before else 0),
        heads=heads_of((row.stream, row.position, row.entry_digest) for row in rows),
        keys=[
            KeyValidity(key_id=key.key_id, valid_from=key.valid_from, valid_until=key.valid_until)
            for key in sorted(history, key=lambda key: key.key_id)
        ],
    )
    is_stored = _store(service, sealed, root_of((row.sequence, row.entry_digest) for row in rows), key_id)
    return is_stored, not is_stored or len(rows) == MAX_SEALED


def _store(service: Service, sealed: Sealed, root: str, key_id: str) -> bool:
    """Sign a checkpoint and store it, and tell whether it did.

    It did not where another caller has stored one in its place, and where another key signs by now than the one that
    was to: that began after the moment that the checkpoint says.
    """
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": "evidence", "digest": {"sha256": root.removeprefix("sha256:")}}],
        "predicateType": CHECKPOINT,
        "predicate": sealed.model_dump(mode="json", exclude_none=True),
    }
    Statement.model_validate(statement)
    envelope = service.signer.sign(canonical_json(statement))
    raw = canonical_json(envelope.model_dump(mode="json", by_alias=True))
    signer = envelope.signatures[0].keyid
    if signer != key_id:
        return False
    with service.database.transaction() as session:
        keys.signing_time(session, signer)
        stored = session.scalar(
            insert(CheckpointRow)
            .values(
                project_id=sealed.project,
                number=sealed.number,
                sequence=sealed.sequence,
                entries=sealed.entries,
                streams=sealed.streams,
                made_at=sealed.made_at,
                made_by=sealed.made_by,
                envelope=raw,
                digest=sha256_digest(raw),
                previous=sealed.previous,
                key_id=signer,
            )
            .on_conflict_do_nothing(index_elements=["project_id", "number"])
            .returning(CheckpointRow.number)
        )
    return stored is not None


def last(session: Session, project: UUID) -> CheckpointRow | None:
    """Return a project's last checkpoint."""
    query = select(CheckpointRow).where(CheckpointRow.project_id == project)
    return session.scalar(query.order_by(CheckpointRow.number.desc()).limit(1))


def every(session: Session, project: UUID) -> Iterator[CheckpointRow]:
    """Yield a project's checkpoints, oldest first."""
    query = select(CheckpointRow).where(CheckpointRow.project_id == project).order_by(CheckpointRow.number)
    yield from session.scalars(query.execution_options(yield_per=20))


def browse(session: Session, project: UUID, *, after: int, limit: int) -> list[CheckpointRow]:
    """Return a project's checkpoints after a number, oldest first."""
    query = select(CheckpointRow).where(CheckpointRow.project_id == project, CheckpointRow.number > after)
    return list(session.scalars(query.order_by(CheckpointRow.number).limit(limit)))


def sealed(session: Session, project: UUID, number: int) -> list[EntryRow]:
    """Return the entries that a checkpoint added to the ones before, by sequence. Raises NotFound."""
    row, before = (session.get(CheckpointRow, (project, place)) for place in (number, number - 1))
    if row is None:
        raise NotFound(f"there is no checkpoint {number}")
    query = select(EntryRow).where(
        EntryRow.project_id == project,
        EntryRow.sequence > (before.sequence if before else 0),
        EntryRow.sequence <= row.sequence,
    )
    return list(session.scalars(query.order_by(EntryRow.sequence)))


_DUE = db.Sql(
    """
    SELECT projects.id FROM projects
    LEFT JOIN LATERAL (
        SELECT sequence, made_at FROM checkpoints WHERE project_id = projects.id ORDER BY number DESC LIMIT 1
    ) AS latest ON true
    WHERE (latest.made_at IS NULL OR latest.made_at <= clock_timestamp() - :age)
    AND EXISTS (SELECT 1 FROM entries WHERE project_id = projects.id AND sequence > coalesce(latest.sequence, 0))
    """
)


def due(service: Service) -> list[UUID]:
    """Return the projects whose last checkpoint is older than the settings say, with something new to seal."""
    with service.database.reading() as session:
        return [
            row.id for row in db.ask(session, _DUE, {"age": timedelta(seconds=service.settings.checkpoint_seconds)})
        ]


def wire(row: CheckpointRow, *, with_envelope: bool = False) -> Checkpoint:
    """Return a checkpoint as the service gives it out."""
    return Checkpoint(
        project=row.project_id,
        number=row.number,
        digest=row.digest,
        previous=row.previous,
        made_at=row.made_at,
        made_by=row.made_by,
        sequence=row.sequence,
        entries=row.entries,
        streams=row.streams,
        key_id=row.key_id,
        envelope=Envelope.model_validate(strict_json(row.envelope)) if with_envelope else None,
    )
