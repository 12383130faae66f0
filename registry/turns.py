"""Nobody waits for ever: a runner is kept for what needs much of it, and what failed on one goes to another first."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from gates import fitting
from gates.fitting import Needs, Offer
from registry import room, runners
from registry.tables import JobRow, RunnerRow
from schemas.runner import JobKind, JobState

WAITED_SECONDS = 600.0
"""Once gates have waited so long for room that smaller ones take again and again, a runner is kept for them."""
OTHERS_SECONDS = 30.0
"""What failed for its runner's own sake, such as a full disk, is left to other runners for so long after it is due."""
MOST_WAITING = 16
"""Jobs that are looked at of those that have waited so long, or failed."""


@dataclass(frozen=True, slots=True)
class _Machine:
    row: RunnerRow
    offer: Offer
    held: Sequence[JobRow]

    @property
    def gates(self) -> int:
        return sum(one.kind != JobKind.SERVE for one in self.held)

    def has_room(self, needs: Needs, *, beside_gates: bool = True) -> bool:
        held = [one for one in self.held if beside_gates or one.kind == JobKind.SERVE]
        if self.row.slots is not None and len(held) >= self.row.slots - runners.kept_slots(self.row):
            return False
        return room.held_by(self.row, [(one.needs, one.devices) for one in held]).room(needs) is not None


def kept(session: Session, waiting: Sequence[JobRow], at: datetime) -> tuple[UUID, RunnerRow] | None:
    """Return for which job a runner is kept, and which; None while none has to be.

    It is the one whose turn it is, where it fits nowhere beside the gates that run and has waited for long, and the
    runner on which the fewest of these have to end. They end by themselves.

    Args:
        session: of the caller.
        waiting: gates and recordings of one class that are due, in their turn.
        at: now.
    """
    machines = _machines(session, waiting[0].project_id, waiting[0].runner_class, at) if waiting else []
    for job in waiting:
        needs = room.read(job.needs or {})
        if needs is None:
            continue
        fit = [one for one in machines if not fitting.obstacles(needs, one.offer)]
        if any(one.has_room(needs) for one in fit):
            return None  # it is its turn, and it is taken there
        if job.due_at > at - timedelta(seconds=WAITED_SECONDS):
            continue
        if emptied := [one for one in fit if one.has_room(needs, beside_gates=False)]:
            return job.id, min(emptied, key=lambda one: (one.gates, one.row.name)).row
    return None


def left_to_others(session: Session, runner: RunnerRow, at: datetime) -> list[UUID]:
    """Return the jobs that failed on a runner a moment ago for its own sake, and that another one could take."""
    failed = session.scalars(
        select(JobRow)
        .where(
            JobRow.avoids == runner.id,
            JobRow.runner_class == runner.runner_class,
            JobRow.state == JobState.PENDING,
            JobRow.due_at > at - timedelta(seconds=OTHERS_SECONDS),
        )
        .limit(MOST_WAITING)
    ).all()
    machines = _machines(session, runner.project_id, runner.runner_class, at) if failed else []
    others = [one.offer for one in machines if one.row.id != runner.id]
    return [job.id for job in failed if any(_fits(job, one) for one in others)]


def _fits(job: JobRow, offer: Offer) -> bool:
    if job.needs is None:
        return True
    needs = room.read(job.needs)
    return needs is not None and not fitting.obstacles(needs, offer)


def _machines(session: Session, project: UUID, runner_class: str, at: datetime) -> list[_Machine]:
    """Return the runners of a class that take jobs, each with what it holds."""
    of_class = select(RunnerRow).where(
        RunnerRow.project_id == project, RunnerRow.runner_class == runner_class, RunnerRow.drained_at.is_(None)
    )
    rows = [one for one in session.scalars(of_class) if runners.is_alive(session, one)]
    held = session.scalars(
        select(JobRow).where(
            JobRow.runner_id.in_([one.id for one in rows]), JobRow.state == JobState.CLAIMED, JobRow.lease_until >= at
        )
    ).all()
    return [_Machine(row, room.offer(row), [one for one in held if one.runner_id == row.id]) for row in rows]
