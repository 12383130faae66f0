"""Gates make room for what is live: where a replica for traffic finds no place, the least needed work is put back.

A job is told to end when its holder next renews its lease, so nobody but the holder ever ends an engine. What was put
back has lost no attempt, and takes its turn again.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from gates import fitting
from gates.fitting import Needs
from registry import room, runners, scheduling
from registry.tables import JobRow, ReleaseRow, RunnerRow
from schemas.release import Phase
from schemas.runner import JobKind, JobState

MOST_URGENT = 16
"""Replicas that are looked at, of those that wait for room."""
WAIT_SECONDS = 5.0
"""What is live waits so long for a runner that has room, before a gate makes some."""


def is_to_end(session: Session, job: JobRow, at: datetime) -> bool:
    """Tell whether a held job has to make room for traffic; marks what ends with it. The caller holds the job's row."""
    if job.kind == JobKind.SERVE:
        return False
    if job.preempted_for is not None:
        return True
    machines = _runners(session, job)
    for urgent in _urgent(session, job, at):
        if _is_room_made(session, urgent):
            return False
        plans = [plan for one in machines if (plan := _plan(session, one, urgent, at)) is not None]
        if not plans:
            continue  # no end of anything helps it, and others need not wait for that
        chosen = min(plans, key=_cost)
        for victim in chosen:
            victim.preempted_for = urgent.id
        session.flush()
        return job in chosen
    return False


def made_room(session: Session, job: JobRow) -> str:
    """Return for what a job made room, in one sentence."""
    urgent = session.get(JobRow, job.preempted_for) if job.preempted_for else None
    what = f"the replica of bundle {urgent.bundle}" if urgent is not None else "a replica"
    runner = session.get(RunnerRow, job.runner_id) if job.runner_id else None
    return f"it made room on runner {runner.name if runner else 'unknown'} for {what}, which is for live traffic"


def _urgent(session: Session, job: JobRow, at: datetime) -> Sequence[JobRow]:
    """Return what is live, or was, and has waited for a runner of a held job's class, locked; most needed first.

    Last comes what is to take the place of a replica that serves.
    """
    return session.scalars(
        select(JobRow)
        .join(ReleaseRow, ReleaseRow.id == JobRow.release_id)
        .where(
            JobRow.project_id == job.project_id,
            JobRow.runner_class == job.runner_class,
            JobRow.state == JobState.PENDING,
            JobRow.kind == JobKind.SERVE,
            JobRow.is_wanted,
            JobRow.due_at <= at - timedelta(seconds=WAIT_SECONDS),
            scheduling.is_accepted(),
        )
        .order_by(scheduling.is_served_for(), ReleaseRow.phase == Phase.SUPERSEDED, JobRow.due_at)
        .limit(MOST_URGENT)
        # Of several holders that renew at once, one decides who makes room.
        .with_for_update(skip_locked=True, of=JobRow)
    ).all()


def _is_room_made(session: Session, urgent: JobRow) -> bool:
    making = select(JobRow.id).where(
        JobRow.runner_class == urgent.runner_class,
        JobRow.state == JobState.CLAIMED,
        JobRow.preempted_for == urgent.id,
    )
    return session.scalar(making.limit(1)) is not None


def _runners(session: Session, job: JobRow) -> list[RunnerRow]:
    of_class = select(RunnerRow).where(
        RunnerRow.project_id == job.project_id,
        RunnerRow.runner_class == job.runner_class,
        RunnerRow.drained_at.is_(None),
    )
    return [one for one in session.scalars(of_class.order_by(RunnerRow.name)) if runners.is_alive(session, one)]


def _plan(session: Session, runner: RunnerRow, urgent: JobRow, at: datetime) -> list[JobRow] | None:
    """Return the fewest, least needed jobs whose end makes room on a runner; none where it has room, None for never."""
    needs = room.read(urgent.needs) if urgent.needs is not None else None
    if needs is None and urgent.needs is not None:
        return None
    if needs is not None and fitting.obstacles(needs, room.offer(runner)):
        return None
    held = list(
        session.scalars(
            select(JobRow).where(
                JobRow.runner_id == runner.id, JobRow.state == JobState.CLAIMED, JobRow.lease_until >= at
            )
        )
    )
    slots = runner.slots
    if slots is not None and scheduling.can_wait(session, urgent):
        slots -= runners.kept_slots(runner)
    ended: list[JobRow] = []
    may_end = sorted((one for one in held if one.kind != JobKind.SERVE), key=_worth)
    while not _has_room(runner, slots, needs, [one for one in held if one not in ended]):
        if not may_end:
            return None
        ended.append(may_end.pop(0))
    for spared in reversed(tuple(ended)):
        rest = [one for one in ended if one is not spared]
        if _has_room(runner, slots, needs, [one for one in held if one not in rest]):
            ended = rest
    return ended


def _has_room(runner: RunnerRow, slots: int | None, needs: Needs | None, held: Sequence[JobRow]) -> bool:
    if slots is not None and len(held) >= slots:
        return False
    reserved = room.held_by(runner, [(one.needs, one.devices) for one in held])
    return needs is None or reserved.room(needs) is not None


def _worth(job: JobRow) -> tuple[int, float]:
    """Order jobs by what their end loses: recordings, gates asked for, a release's; of each the newest first."""
    kind = 0 if job.kind == JobKind.RECORD else 1 if job.release_id is None else 2
    return kind, -(job.claimed_at.timestamp() if job.claimed_at else 0.0)


def _cost(plan: Sequence[JobRow]) -> tuple[int, tuple[int, float]]:
    return len(plan), max(map(_worth, plan), default=(0, 0.0))
