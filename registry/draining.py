"""A runner as the service shows it, and what one that drains still waits for."""

from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry import db, evidence, room, runners, waits
from registry.tables import JobRow, RunnerRow, TargetRow
from schemas.runner import Drain, Fingerprint, JobKind, JobState, Reservation, Runner, Undrained


def stream(runner: UUID) -> str:
    """Return where the log of a runner's drains is."""
    return f"runner/{runner}"


def generation(session: Session, row: RunnerRow) -> int:
    """Return how often people said of a runner that it drains, or does no more."""
    return evidence.next_position(session, stream(row.id)) - 1


def wire(session: Session, row: RunnerRow) -> Runner:
    """Return a runner as the service gives it out."""
    jobs = session.scalars(
        select(JobRow.id).where(JobRow.runner_id == row.id, JobRow.state == JobState.CLAIMED).order_by(JobRow.id)
    )
    held = room.reserved(session, row, db.now(session))
    return Runner(
        id=row.id,
        name=row.name,
        runner_class=row.runner_class,
        fingerprint=Fingerprint.model_validate(row.fingerprint),
        engines=row.engines,
        last_seen_at=row.last_seen_at,
        is_alive=runners.is_alive(session, row),
        slots=row.slots,
        jobs=list(jobs),
        reserved=Reservation(accelerators=sorted(held.devices), memory_bytes=held.memory_bytes),
        environments=row.environments or {},
        launcher=runners.launcher(row),
        disk_free_bytes=row.disk_free_bytes,
        drain=_drain(session, row),
        undrained=None
        if row.undrained_at is None
        else Undrained(since=row.undrained_at, by=row.undrained_by or "unknown", reason=row.undrain_reason),
        generation=generation(session, row),
    )


def _drain(session: Session, row: RunnerRow) -> Drain | None:
    """Return that a runner drains, and what that waits for; None when it takes jobs."""
    if row.drained_at is None:
        return None
    return Drain(
        since=row.drained_at,
        by=row.drained_by or "unknown",
        reason=row.drain_reason or "",
        waits_for=[_held(session, job, target) for job, target in held(session, row)],
        empty_at=row.empty_at,
    )


def held(session: Session, row: RunnerRow) -> list[tuple[JobRow, str | None]]:
    """Return the jobs that a runner holds, oldest first, each with the name of its target."""
    query = (
        select(JobRow, TargetRow.name)
        .join(TargetRow, TargetRow.id == JobRow.target_id, isouter=True)
        .where(JobRow.runner_id == row.id, JobRow.state == JobState.CLAIMED)
        .order_by(JobRow.id)
    )
    return [(job, target) for job, target in session.execute(query)]


def _held(session: Session, job: JobRow, target: str | None) -> str:
    is_lost = job.lease_until is not None and job.lease_until < db.now(session)
    if job.kind != JobKind.SERVE:
        rest = "the runner is not heard of, and another that fits takes it" if is_lost else "it ends by itself"
        return f"run {job.id}: {rest}"
    serves = f"the replica of bundle {job.bundle[7:19]}" + (f" on {target}" if target else "")
    if is_lost:
        # An engine outlives its runner: only the machine's end is certain to be its end.
        return f"{serves}: the runner is not heard of, its engine may serve on, and another that fits boots it anew"
    return f"{serves}: {_until(session, job)}"


def _until(session: Session, job: JobRow) -> str:
    if not job.is_wanted:
        return "its open requests end, then it stops"
    other = session.scalar(
        select(JobRow).where(JobRow.replaces == job.id, JobRow.state.in_([JobState.PENDING, JobState.CLAIMED]))
    )
    if other is None:
        return "it serves until another has taken its place, or the runner is stopped"
    if other.state == JobState.PENDING:
        if other.problem:
            return f"it serves until another has taken its place, which is tried again: {other.problem}"
        return f"it serves until another has taken its place, which waits for {waits.for_whom(session, other)}"
    runner = session.get(RunnerRow, other.runner_id) if other.runner_id else None
    state = other.replica["state"] if other.replica else other.progress or "claimed"
    where = f"on runner {runner.name}" if runner else "elsewhere"
    return f"it serves until another has taken its place, {where}: {state}"
