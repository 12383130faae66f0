"""Finds what a person names, over everything a project has: by exact names and by beginnings of digests and ids.

Each question is answered by an index or by a bounded list; none reads a table through.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry import auth
from registry.auth import Actor
from registry.documents import LEAST_PREFIX, begins
from registry.tables import EntryRow, JobRow, ProjectDocumentRow, ReleaseRow, RunnerRow, TargetRow, TokenRow
from schemas.evidence import Kind
from schemas.stories import job_state

MOST_HITS = 20
"""Hits of each sort that are shown."""
MOST_TOKENS = 2000
"""Tokens of a project, the newest first, among which a name is looked for."""
LONGEST = 200
"""Characters of what is looked for."""
ADDRESSES = {"bundle": "/bundles", "policy": "/policies", "suite": "/suites", "reference": "/references"}
_DIGEST = re.compile(rf"(?:sha256:)?([0-9a-f]{{{LEAST_PREFIX},64}})")
_ID = re.compile(r"[0-9a-f]{8}(?:-?[0-9a-f]{0,4}){0,3}-?[0-9a-f]{0,12}")
_AFTER = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class Hit:
    """One thing that was found: what it is, its name, what tells it from others, and its page."""

    sort: str
    name: str
    detail: str
    address: str


def search(session: Session, actor: Actor, text: str) -> list[Hit]:
    """Return what a text names in the actor's project, of what they may list: at most `MOST_HITS` of each sort."""
    named, project = text.strip()[:LONGEST].strip(), actor.project_id
    if not named:
        return []
    found = [*_by_digest(session, project, named.lower()), *_by_id(session, project, named.lower())]
    name = named.removeprefix("@") or named
    tokens = _tokens(session, project, name) if auth.may(actor, "list_tokens") else ()
    return [*found, *_by_name(session, project, name), *tokens]


def _by_digest(session: Session, project: UUID, named: str) -> Iterator[Hit]:
    match = _DIGEST.fullmatch(named)
    if match is None:
        return
    documents = select(ProjectDocumentRow).where(
        ProjectDocumentRow.project_id == project, *begins(ProjectDocumentRow.digest, match[1])
    )
    for row in session.scalars(documents.order_by(ProjectDocumentRow.digest).limit(MOST_HITS)):
        yield _document(row)
    entries = select(EntryRow.entry_digest, EntryRow.kind, EntryRow.stream, EntryRow.actor).where(
        *begins(EntryRow.entry_digest, match[1]), EntryRow.project_id == project
    )
    for digest, kind, stream, actor in session.execute(entries.order_by(EntryRow.entry_digest).limit(MOST_HITS)):
        address = f"/results/{digest}" if kind == Kind.GATE_RECORDED else _stream(stream)
        yield Hit("entry", digest[7:19], f"{kind.replace('_', ' ')} by {actor}", address or f"/log?kind={kind}")


def _stream(stream: str) -> str | None:
    """Return the page of what a stream tells of, where its name is enough for that."""
    kind, _, identity = stream.partition("/")
    return f"/{kind}s/{identity}" if kind in {"release", "run"} else None


def _by_id(session: Session, project: UUID, named: str) -> Iterator[Hit]:
    digits = named.replace("-", "")
    if not _ID.fullmatch(named) or len(digits) > 32:
        return
    low, high = UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))
    rows = session.execute(
        select(ReleaseRow, TargetRow.name)
        .join(TargetRow, TargetRow.id == ReleaseRow.target_id)
        .where(ReleaseRow.project_id == project, ReleaseRow.id.between(low, high))
        .order_by(ReleaseRow.id.desc())
        .limit(MOST_HITS)
    )
    for release, target in rows:
        yield Hit(
            "release", str(release.id), f"{release.phase.replace('_', ' ')} on {target}", f"/releases/{release.id}"
        )
    # What a release had measured is found by the release.
    runs = select(JobRow).where(JobRow.project_id == project, JobRow.id.between(low, high), JobRow.release_id.is_(None))
    for run in session.scalars(runs.order_by(JobRow.id.desc()).limit(MOST_HITS)):
        yield Hit("run", str(run.id), f"{run.kind}, {job_state(run.kind, run.state)}", f"/runs/{run.id}")
    runners = select(RunnerRow).where(RunnerRow.project_id == project, RunnerRow.id.between(low, high))
    for runner in session.scalars(runners.limit(MOST_HITS)):
        yield _runner(runner)


def _by_name(session: Session, project: UUID, named: str) -> Iterator[Hit]:
    for kind in ADDRESSES:
        rows = select(ProjectDocumentRow).where(
            ProjectDocumentRow.project_id == project,
            ProjectDocumentRow.kind == kind,
            *_begins(ProjectDocumentRow.name, named),
            ProjectDocumentRow.deleted_at.is_(None),
        )
        order = (ProjectDocumentRow.name, ProjectDocumentRow.id.desc())
        for row in session.scalars(rows.order_by(*order).limit(MOST_HITS)):
            yield _document(row)
    targets = select(TargetRow).where(TargetRow.project_id == project, *_begins(TargetRow.name, named))
    for target in session.scalars(targets.order_by(TargetRow.name).limit(MOST_HITS)):
        yield Hit("target", target.name, f"served by {target.runner_class}", f"/targets/{target.name}")
    runners = select(RunnerRow).where(RunnerRow.project_id == project, *_begins(RunnerRow.name, named))
    for runner in session.scalars(runners.order_by(RunnerRow.name).limit(MOST_HITS)):
        yield _runner(runner)


def _tokens(session: Session, project: UUID, named: str) -> Iterator[Hit]:
    newest = (
        select(TokenRow.name, TokenRow.role, TokenRow.id)
        .where(TokenRow.project_id == project)
        .order_by(TokenRow.id.desc())
        .limit(MOST_TOKENS)
        .subquery()
    )
    tokens = select(newest.c.name, newest.c.role).where(newest.c.name.startswith(named, autoescape=True)).distinct()
    for name, role in session.execute(tokens.order_by(newest.c.name).limit(MOST_HITS)):
        yield Hit("token", name, f"what its holder did, as {role}", f"/log?actor={quote(name)}")


def _begins(column: Any, named: str) -> tuple[Any, Any]:
    """Return the conditions of a name that begins so, as an index over names answers them."""
    return column >= named, column < named + _AFTER


def _document(row: ProjectDocumentRow) -> Hit:
    detail = row.digest[7:19] + (" (deleted)" if row.deleted_at is not None else "")
    return Hit(row.kind, row.name, detail, f"{ADDRESSES[row.kind]}/{row.digest}")


def _runner(row: RunnerRow) -> Hit:
    return Hit("runner", row.name, f"of class {row.runner_class}", f"/runners/{row.id}")
