"""Runners: the machines that run models, as they registered and were last seen."""

import contextlib
from datetime import timedelta
from uuid import UUID

from pydantic import TypeAdapter
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from uuid6 import uuid7

from registry import db
from registry.tables import JobRow, RunnerRow
from schemas.problems import NotFound
from schemas.runner import Fingerprint, JobState, LauncherName, Runner, RunnerRegistration

ALIVE_SECONDS = 30
_LAUNCHER: TypeAdapter[LauncherName] = TypeAdapter(LauncherName)


def register(session: Session, project: UUID, body: RunnerRegistration) -> RunnerRow:
    """Register a runner, or refresh what is known of it: a name in a project is one runner."""
    at = db.now(session)
    values = {
        "runner_class": body.runner_class,
        "fingerprint": body.fingerprint.model_dump(mode="json", exclude_none=True),
        "engines": body.engines,
        "boot_id": body.boot_id,
        "slots": body.slots,
        "environments": body.environments,
        "launcher": body.launcher,
        "last_seen_at": at,
    }
    runner = session.scalars(
        insert(RunnerRow)
        .values(id=uuid7(), project_id=project, name=body.name, registered_at=at, **values)
        .on_conflict_do_update(index_elements=["project_id", "name"], set_=values)
        .returning(RunnerRow.id)
    ).one()
    return get(session, project, runner)


def get(session: Session, project: UUID, runner: UUID) -> RunnerRow:
    """Return a runner. Raises NotFound when the project has no such runner."""
    row = session.get(RunnerRow, runner, populate_existing=True)
    if row is None or row.project_id != project:
        raise NotFound(f"there is no runner {runner}")
    return row


def named(session: Session, project: UUID, name: str) -> RunnerRow:
    """Return a runner by its identity or its name. Raises NotFound when the project has no such runner."""
    with contextlib.suppress(ValueError, NotFound):
        return get(session, project, UUID(name))
    query = select(RunnerRow).where(RunnerRow.project_id == project, RunnerRow.name == name)
    row = session.scalars(query.execution_options(populate_existing=True)).one_or_none()
    if row is None:
        raise NotFound(f"there is no runner {name}")
    return row


def heartbeat(session: Session, project: UUID, runner: UUID) -> RunnerRow:
    """Record that a runner lives."""
    row = get(session, project, runner)
    row.last_seen_at = db.now(session)
    session.flush()
    return row


def browse(session: Session, project: UUID, *, after: UUID | None, limit: int) -> list[RunnerRow]:
    """Return a project's runners, newest first, before a cursor."""
    query = select(RunnerRow).where(RunnerRow.project_id == project)
    if after is not None:
        query = query.where(RunnerRow.id < after)
    return list(session.scalars(query.order_by(RunnerRow.id.desc()).limit(limit)))


def is_alive(session: Session, row: RunnerRow) -> bool:
    """Tell whether a runner was heard of lately."""
    return db.now(session) - row.last_seen_at < timedelta(seconds=ALIVE_SECONDS)


def held_count(session: Session, row: RunnerRow) -> int:
    """Return how many jobs a runner holds."""
    held = select(func.count()).where(JobRow.runner_id == row.id, JobRow.state == JobState.CLAIMED)
    return session.scalar(held) or 0


def kept_slots(row: RunnerRow) -> int:
    """Return how many of a runner's slots are kept for bundles that are live or were, so that a rollback finds one."""
    return 1 if row.slots is not None and row.slots > 1 else 0


def has_only_kept_slots(session: Session, row: RunnerRow) -> bool:
    """Tell whether a runner's free slots are those that are kept. One that did not say how many it has keeps none."""
    return row.slots is not None and kept_slots(row) > 0 and held_count(session, row) >= row.slots - kept_slots(row)


def launcher(row: RunnerRow) -> LauncherName:
    """Return how a runner starts engines: as processes where it did not say."""
    return _LAUNCHER.validate_python(row.launcher or "process")


def wire(session: Session, row: RunnerRow) -> Runner:
    """Return a runner as the service gives it out."""
    held = session.scalars(
        select(JobRow.id).where(JobRow.runner_id == row.id, JobRow.state == JobState.CLAIMED).order_by(JobRow.id)
    )
    return Runner(
        id=row.id,
        name=row.name,
        runner_class=row.runner_class,
        fingerprint=Fingerprint.model_validate(row.fingerprint),
        engines=row.engines,
        last_seen_at=row.last_seen_at,
        is_alive=is_alive(session, row),
        slots=row.slots,
        jobs=list(held),
        environments=row.environments or {},
        launcher=launcher(row),
    )
