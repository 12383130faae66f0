"""Runners: the machines that run models, as they registered and were last seen."""

import contextlib
from datetime import timedelta
from uuid import UUID

from pydantic import TypeAdapter
from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from uuid6 import uuid7

from registry import auth, db
from registry.auth import Actor
from registry.tables import JobRow, ReleaseRow, RunnerRow
from schemas.common import format_instant
from schemas.problems import Conflict, NotFound
from schemas.release import Phase
from schemas.runner import JobKind, JobState, LauncherName, RunnerRegistration

ALIVE_SECONDS = 30
_LAUNCHER: TypeAdapter[LauncherName] = TypeAdapter(LauncherName)


def register(session: Session, project: UUID, body: RunnerRegistration) -> RunnerRow:
    """Register a runner, or refresh what is known of it: a name in a project is one runner.

    Raises:
        Conflict: the runner of this name is another machine, which was heard of a moment ago.
    """
    at = db.now(session)
    query = select(RunnerRow).where(RunnerRow.project_id == project, RunnerRow.name == body.name)
    before = session.scalars(query.with_for_update().execution_options(populate_existing=True)).one_or_none()
    if before is not None:
        if is_alive(session, before):
            _require_machine(before, body.boot_id, body.launcher)
        _keep_devices(session, before, body)
    values = {
        "runner_class": body.runner_class,
        "fingerprint": body.fingerprint.model_dump(mode="json", exclude_none=True),
        "engines": body.engines,
        "boot_id": body.boot_id,
        "slots": body.slots,
        "environments": body.environments,
        "launcher": body.launcher,
        "disk_free_bytes": body.disk_free_bytes,
        "device_ids": body.device_ids,
        "speaks": body.speaks,
        "last_seen_at": at,
    }
    runner = session.scalars(
        insert(RunnerRow)
        .values(id=uuid7(), project_id=project, name=body.name, registered_at=at, **values)
        .on_conflict_do_update(index_elements=["project_id", "name"], set_=values)
        .returning(RunnerRow.id)
    ).one()
    return get(session, project, runner)


def _require_machine(row: RunnerRow, boot_id: str, launcher: str | None) -> None:
    """Return when a runner speaks from the machine that has its name. A cluster runs it on one node or another."""
    if row.boot_id == boot_id or "kubernetes" in {row.launcher, launcher}:
        return
    raise Conflict(
        f"the runner {row.name} is another machine (boot {row.boot_id}; this one is {boot_id}), last heard of at "
        f"{format_instant(row.last_seen_at)}: give each runner a name of its own (SLUICEGATE_RUNNER__NAME). Where it "
        f"is the same one and was started again, it is let in {ALIVE_SECONDS} s after its last word"
    )


def _keep_devices(session: Session, row: RunnerRow, body: RunnerRegistration) -> None:
    """Have jobs keep the accelerators that they were given, whatever stands in their places now.

    One that is gone, or was divided, shifts the places of those behind it. Where their names are not known, a job that
    has some is taken to have all.
    """
    before, now = row.device_ids, body.device_ids
    cards = [one.model_dump(mode="json", exclude_none=True) for one in body.fingerprint.accelerators]
    if before == now if before and now else row.fingerprint["accelerators"] == cards:
        return
    held = select(JobRow).where(JobRow.runner_id == row.id, JobRow.state == JobState.CLAIMED).with_for_update()
    for job in session.scalars(held.order_by(JobRow.id)):
        if not job.devices:
            continue
        if before and now:
            had = [before[place] for place in job.devices if place < len(before)]
            job.devices = [now.index(name) for name in had if name in now]
        else:
            job.devices = list(range(len(cards)))
    session.flush()


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


def heartbeat(
    session: Session,
    project: UUID,
    runner: UUID,
    *,
    disk_free_bytes: int | None = None,
    boot_id: str | None = None,
) -> RunnerRow:
    """Record that a runner lives, and how much disk it has left, where it says so.

    Raises:
        NotFound.
        Conflict: it says on which machine it is, and another one has registered under its name since.
    """
    row = get(session, project, runner)
    if boot_id is not None:
        _require_machine(row, boot_id, None)
    row.last_seen_at = db.now(session)
    if disk_free_bytes is not None:
        row.disk_free_bytes = disk_free_bytes
    session.flush()
    return row


def drain(session: Session, actor: Actor, name: str, reason: str) -> RunnerRow:
    """Have a runner take no job any more; what serves on it is handed over, and the rest ends by itself.

    Again, it changes nothing.

    Raises:
        NotFound, NotPermitted: the actor's token is for some targets only.
    """
    row = to_change(session, actor, name)
    if row.drained_at is None:
        row.drained_at, row.drained_by, row.drain_reason = db.now(session), actor.name, reason
        row.undrained_at = row.undrained_by = row.undrain_reason = None
        _wake(session, row)
    return row


def undrain(session: Session, actor: Actor, name: str, reason: str | None = None) -> RunnerRow:
    """Let a runner take jobs again. Of one that takes them, it changes nothing. Raises NotFound, NotPermitted."""
    row = to_change(session, actor, name)
    if row.drained_at is not None:
        row.undrained_at, row.undrained_by, row.undrain_reason = db.now(session), actor.name, reason
    row.drained_at = row.drained_by = row.drain_reason = row.empty_at = None
    _wake(session, row)
    return row


def _wake(session: Session, row: RunnerRow) -> None:
    """Have the controller look at the targets that a runner serves: what is live there has another place now."""
    served = select(JobRow.target_id).where(
        JobRow.runner_id == row.id, JobRow.kind == JobKind.SERVE, JobRow.state == JobState.CLAIMED
    )
    phases = [Phase.GATED, Phase.APPROVED, Phase.CANARY, Phase.PROMOTED]
    session.flush()
    session.execute(
        update(ReleaseRow)
        .where(ReleaseRow.target_id.in_(served), ReleaseRow.phase.in_(phases))
        .values(due_at=db.now(session))
    )


def to_change(session: Session, actor: Actor, name: str) -> RunnerRow:
    """Return a runner that nobody else changes until the transaction ends. Raises NotFound, NotPermitted."""
    auth.require_whole_project(actor, "drain_runner")
    auth.confirm(session, actor)
    found = named(session, actor.project_id, name)
    # Whoever claims for it holds its row too: after this, what it holds is all that it will.
    return session.get_one(RunnerRow, found.id, with_for_update=True, populate_existing=True)


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
    """Return how many jobs a runner holds under leases that have not run out.

    One that was killed has none any more of what it held, and must be able to take that again.
    """
    held = select(func.count()).where(
        JobRow.runner_id == row.id, JobRow.state == JobState.CLAIMED, JobRow.lease_until >= db.now(session)
    )
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
