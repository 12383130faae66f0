"""What older versions kept without an entry is recorded once, as it is found: from then on it cannot change unseen.

A project's own entries say up to which version that was done (`adopted`). Version 1: what the project is, and which
secret each token has whose signed entry does not say so. Version 2: who asked for each run that belongs to no release,
and for what; which blobs the project holds; and which keys signed before. After that nothing more is ever taken over:
a token or a run that nobody's entry tells of stays one that `evidence verify` names, and so does a project that was
taken over twice.

Order of locks: the project, then streams and its blobs' rows, those by digest. Whoever clears up, takes a blob in or
names a damaged one holds the blob, then its row, and never waits for a project: so neither waits for the other in turn.
"""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import structlog
from sqlalchemy import Text, cast, exists, func, select, update
from sqlalchemy.orm import Session

from registry import auth, blobs, evidence, keys, projects, runs
from registry.service import Service
from registry.tables import BlobRow, EntryRow, JobRow, ProjectBlobRow, ProjectRow, TargetRow, TokenRow
from schemas.evidence import Kind, TokenFound
from schemas.runner import JobKind

BY = "service"
BATCH = 200
"""Runs recorded, and blobs signed, at a time: whoever is killed meanwhile goes on there."""

log = structlog.get_logger(__name__)


def adopt(service: Service) -> None:
    """Record what projects keep that has no entry."""
    with service.database.reading() as session:
        found = [project for project in session.scalars(select(ProjectRow.id)) if _is_behind(_said(session, project))]
    for project in found:
        with service.database.reading() as session:
            unasked = _unasked(session, project)
        for place in range(0, len(unasked), BATCH):
            with service.database.transaction() as session:
                _adopt_runs(session, service, project, unasked[place : place + BATCH])
        after = ""
        while (last := _adopt_some_blobs(service, project, after)) is not None:
            after = last
        with service.database.transaction() as session:
            auth.hold_project(session, project)
            # Another process may have been first.
            if _is_behind(said := _said(session, project)):
                _adopt_runs(session, service, project, _unasked(session, project))
                _sign(session, project, _proofs(service, project, _unsigned(session, project)))
                _adopt(session, service, session.get_one(ProjectRow, project), said)


def version(body: dict[str, Any]) -> int:
    """Return up to which version a project's entry says that all has been recorded."""
    said = body.get("adopted", 1)
    return said if isinstance(said, int) else 1


def _said(session: Session, project: UUID) -> list[dict[str, Any]] | None:
    """Return what a project's own entries say, oldest first; None when one cannot be read: that is no older version."""
    of = (EntryRow.stream == projects.stream(project), EntryRow.kind == Kind.PROJECT_SET)
    envelopes = session.scalars(select(EntryRow.envelope).where(*of).order_by(EntryRow.position))
    try:
        return [evidence.claim_of(envelope)["body"] for envelope in envelopes]
    except ValueError:
        return None


def _is_behind(said: list[dict[str, Any]] | None) -> bool:
    return said is not None and all(version(body) < projects.ADOPTED for body in said)


def _adopt(session: Session, service: Service, project: ProjectRow, said: list[dict[str, Any]] | None) -> None:
    if said:
        # What it is has an entry, and its row is held to that.
        facts = {name: said[-1].get(name) for name in projects.facts(project)}
        projects.record(session, service, project, by=BY, said=facts | _keys(session, service))
        return
    facts = projects.facts(project) | {"was_found": True} | _keys(session, service)
    projects.record(session, service, project, by=BY, said=facts)
    unbound = {
        str(body["token"])
        for row in evidence.read(session, projects.stream(project.id))
        if row.kind == Kind.TOKEN_CREATED and "bound" not in (body := evidence.claim_of(row.envelope)["body"])
    }
    tokens = session.scalars(select(TokenRow).where(TokenRow.project_id == project.id).order_by(TokenRow.id))
    found = [token for token in tokens if str(token.id) in unbound]
    for token in found:
        body = TokenFound(
            token=token.id, created_at=token.created_at, revoked_at=token.revoked_at, bound=auth.bound(token)
        )
        auth.record_token(session, service, token, f"token:{token.id}:found", BY, Kind.TOKEN_FOUND, body)
    log.info("project_adopted", project=project.name, tokens=len(found))


def _adopt_some_blobs(service: Service, project: UUID, after: str) -> str | None:
    """Sign that a project holds the next blobs without a signature. Returns the last one's digest; None for no more."""
    with service.database.reading() as session:
        found = _unsigned(session, project, after=after, limit=BATCH)
    if not found:
        return None
    # A key service may take half a second for each, for which nobody else shall wait.
    proofs = _proofs(service, project, found)
    with service.database.transaction() as session:
        auth.hold_project(session, project)
        if not _is_behind(_said(session, project)):
            return None  # another process was first: what has no signature now is nobody's
        _sign(session, project, proofs)
    return found[-1][0]


def _unsigned(session: Session, project: UUID, *, after: str = "", limit: int | None = None) -> list[tuple[str, int]]:
    """Return the blobs that a project holds and nobody has signed for, by digest, each with its size."""
    held = (
        select(ProjectBlobRow.digest, BlobRow.size)
        .join(BlobRow, BlobRow.digest == ProjectBlobRow.digest)
        .where(ProjectBlobRow.project_id == project, ProjectBlobRow.proof.is_(None), ProjectBlobRow.digest > after)
    )
    return [(row.digest, row.size) for row in session.execute(held.order_by(ProjectBlobRow.digest).limit(limit))]


def _proofs(service: Service, project: UUID, found: Sequence[tuple[str, int]]) -> dict[str, str]:
    return {digest: blobs.proof(service.signer, project, digest, size) for digest, size in found}


def _sign(session: Session, project: UUID, proofs: dict[str, str]) -> None:
    """Keep beside blobs what was signed of them, in their order; one that is cleared up meanwhile is passed by."""
    for digest, proof in proofs.items():
        unsigned = (ProjectBlobRow.project_id == project, ProjectBlobRow.proof.is_(None))
        session.execute(update(ProjectBlobRow).where(*unsigned, ProjectBlobRow.digest == digest).values(proof=proof))


def _keys(session: Session, service: Service) -> dict[str, Any]:
    """Return the keys that have signed until now: the one that signs now vouches for them."""
    others = [key.key_id for key in keys.history(session) if key.key_id != service.signer.key_id]
    return {"keys": others} if others else {}


def _unasked(session: Session, project: UUID) -> list[UUID]:
    """Return a project's runs without a release of which no entry says who asked for them, oldest first."""
    asked = exists().where(EntryRow.stream == func.concat("run/", cast(JobRow.id, Text)), EntryRow.act == runs.ASKED)
    mine = (JobRow.project_id == project, JobRow.release_id.is_(None), JobRow.kind != JobKind.SERVE)
    return list(session.scalars(select(JobRow.id).where(*mine, ~asked).order_by(JobRow.id)))


def _adopt_runs(session: Session, service: Service, project: UUID, found: Sequence[UUID]) -> None:
    rows = select(JobRow, TargetRow.name).outerjoin(TargetRow, TargetRow.id == JobRow.target_id)
    for job, target in session.execute(rows.where(JobRow.id.in_(found)).order_by(JobRow.id)).all():
        evidence.append(session, project, runs.asked(service, job, target, by=BY, was_found=True))
    log.info("runs_adopted", project=str(project), runs=len(found))
