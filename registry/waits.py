"""What a release waits for when no entry of its log says so: a runner for its job, or the end of what that does."""

from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry import db, quotas, runners, scheduling
from registry.lifecycle import BEFORE_TRAFFIC
from registry.tables import JobRow, ProjectRow, ReleaseRow, RunnerRow
from schemas.release import SERVES_ON, Phase
from schemas.runner import JobKind, JobState, ReplicaState
from schemas.short import many, span


def why(session: Session, waiting: UUID) -> str | None:
    """Return what keeps a job that waits from being taken, in one sentence; None when there is none any more.

    What is due may still be taken within a second or two, so that this is also what a release says at first.
    """
    job = session.get(JobRow, waiting)
    if job is None:
        return None
    if (draining := _drains(session, job)) is not None:
        return f"{SERVES_ON} and runner {draining} drains: the replica that is to take its place {_since(session, job)}"
    return f"its {job.kind} job {_since(session, job)}"


def _drains(session: Session, job: JobRow) -> str | None:
    """Return the runner that drains whose ready replica a job is to take the place of; None where there is none."""
    old = session.get(JobRow, job.replaces) if job.replaces is not None else None
    if old is None or old.state != JobState.CLAIMED or old.replica is None or old.runner_id is None:
        return None
    runner = session.get_one(RunnerRow, old.runner_id)
    is_ready = old.replica["state"] == ReplicaState.READY
    return runner.name if is_ready and runner.drained_at is not None else None


def of_job(session: Session, job: JobRow) -> str | None:
    """Return what keeps a job that is due from being taken, in one sentence; None when it is held, over or not due."""
    if job.state != JobState.PENDING or job.due_at > db.now(session):
        return None
    return f"it {_since(session, job)}"


def _since(session: Session, job: JobRow) -> str:
    seconds = max(0, round((db.now(session) - job.due_at).total_seconds()))
    return f"has waited {span(seconds)} for {for_whom(session, job)}"


def doing(session: Session, release: ReleaseRow) -> str | None:
    """Return what a runner does for a release, or what the step of its canary waits for, in one line; None for neither.

    A runner says so every few seconds with its lease, a controller at each look. It is no evidence.
    """
    if release.phase == Phase.CANARY:
        return None if release.is_paused or release.held else release.progress
    if release.phase not in BEFORE_TRAFFIC:
        return None
    job = session.scalar(
        select(JobRow)
        .where(JobRow.release_id == release.id, JobRow.state == JobState.CLAIMED)
        .order_by(JobRow.id.desc())
        .limit(1)
    )
    return None if job is None or job.progress is None else f"{job.kind}: {job.progress}"


def for_whom(session: Session, job: JobRow) -> str:
    """Return what a job that is due waits for, without how long it has."""
    machines = [
        (runner, runners.held_count(session, runner))
        for runner in session.scalars(
            select(RunnerRow)
            .where(RunnerRow.project_id == job.project_id, RunnerRow.runner_class == job.runner_class)
            .order_by(RunnerRow.name)
        )
        if runners.is_alive(session, runner)
    ]
    if not machines:
        return _nobody(session, job)
    if drained := [runner.name for runner, _ in machines if runner.drained_at is not None]:
        machines = [(runner, held) for runner, held in machines if runner.drained_at is None]
        if not machines:
            return f"a runner of class {job.runner_class} that takes jobs: {', '.join(drained[:4])} drained"
    if (quota := _quota(session, job)) is not None:
        return quota
    alive = [runner for runner, _ in machines]
    if (why := scheduling.lacking(job, alive) or scheduling.occupied(session, job, alive)) is not None:
        return why
    if any(runner.slots is None or held < runner.slots - runners.kept_slots(runner) for runner, held in machines):
        return f"a runner of class {job.runner_class} to take it"
    taken, slots = sum(held for _, held in machines), sum(runner.slots or 0 for runner, _ in machines)
    kept = sum(runners.kept_slots(runner) for runner, _ in machines)
    rest = f"; {kept} {'is' if kept == 1 else 'are'} kept for what is live or was" if kept else ""
    return f"a free slot: runners of class {job.runner_class} hold {many(taken, 'job')} in {many(slots, 'slot')}{rest}"


def _nobody(session: Session, job: JobRow) -> str:
    """Return what a job waits for that no runner of its project and class could be heard to take.

    Of other projects nothing is told: who reads this need not know that there are any.
    """
    project = session.get_one(ProjectRow, job.project_id).name
    silent = f"none of project {project} has been heard of for {runners.ALIVE_SECONDS} s"
    known = select(RunnerRow.runner_class).where(RunnerRow.project_id == job.project_id).distinct()
    classes = sorted(session.scalars(known))
    if job.runner_class in classes:
        return f"a runner of class {job.runner_class}: {silent}"
    others = f"; its runners are of class {', '.join(classes[:4])}" if classes else ""
    return (
        f"a runner of class {job.runner_class}: {silent}, and runners belong to a project{others}; "
        f"start one with a token of `sluicegate token create NAME --role runner --project {project}`"
    )


def _quota(session: Session, job: JobRow) -> str | None:
    """Return which limit of its project holds a job back, in one sentence; None for none."""
    reached = quotas.exhausted(session, job.project_id, db.now(session))
    if job.kind != JobKind.SERVE:
        return reached.runner_seconds or reached.jobs
    if reached.jobs is None or not job.is_wanted:
        return None
    is_accepted = session.scalar(select(JobRow.id).where(JobRow.id == job.id, scheduling.is_accepted()))
    return None if is_accepted else reached.jobs
