"""Handing live replicas over when their runner drains: another boots elsewhere, and only then does the old one end.

A drain ends no replica by itself. Beside each that serves, one more is asked for, which no drained runner takes; once
it is ready the controller moves the traffic, and once that is in force the old one is wanted no more and drains. Where
no other runner fits, the old one serves on for as long as it takes.
"""

from datetime import datetime
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry import jobs, targets
from registry.tables import JobRow, RunnerRow
from schemas.runner import JobKind, JobState, ReplicaState


def leaving(session: Session, target: UUID) -> set[UUID]:
    """Return the serve jobs of a target that a runner holds which drains."""
    return set(
        session.scalars(
            select(JobRow.id)
            .join(RunnerRow, RunnerRow.id == JobRow.runner_id)
            .where(
                JobRow.target_id == target,
                JobRow.kind == JobKind.SERVE,
                JobRow.state == JobState.CLAIMED,
                RunnerRow.drained_at.is_not(None),
            )
        )
    )


def begin(session: Session, target: UUID, now: datetime) -> list[JobRow]:
    """Ask for a replica beside each that serves on a runner that drains. Returns the new jobs."""
    going = leaving(session, target)
    if not going:
        return []
    targets.lock(session, target)  # none is asked for twice
    held = jobs.serving(session, target)
    serving = [job for job in held if job.is_wanted]
    # One at most takes a place, also while that one ends. Its end has the controller look again.
    has_other = {job.replaces for job in held}
    staying = {job.bundle for job in serving if job.id not in going}
    made = []
    for job in serving:
        # What is not ready serves nobody. When it fails, its next try is no drained runner's.
        if job.id in going and job.id not in has_other and job.bundle not in staying and is_ready(job):
            staying.add(job.bundle)
            made.append(_beside(session, job, now))
    return made


def _beside(session: Session, job: JobRow, now: datetime) -> JobRow:
    return jobs.create(
        session,
        job.project_id,
        JobKind.SERVE,
        bundle=job.bundle,
        policy=job.policy,
        runner_class=job.runner_class,
        release=job.release_id,
        target=job.target_id,
        created_by=job.created_by,
        now=now,
        replaces=job.id,
    )


def replaced(session: Session, target: UUID, kept: UUID) -> list[JobRow]:
    """Return the other wanted replicas of a job's bundle, if that job's own is ready and stays where it is.

    They were handed over; or they were to take its place, and the drain is over.
    """
    if kept in leaving(session, target):
        return []
    wanted = [job for job in jobs.serving(session, target) if job.is_wanted]
    bundle = next((job.bundle for job in wanted if job.id == kept and is_ready(job)), None)
    return [job for job in wanted if job.bundle == bundle and job.id != kept]


def is_ready(job: JobRow) -> bool:
    """Tell whether a serve job's replica was ready when it was last heard of."""
    return job.replica is not None and job.replica["state"] == ReplicaState.READY
