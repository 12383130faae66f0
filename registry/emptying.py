"""Draining by a person's word, with a deadline where they set one: then what a runner still holds is ended.

Each word is an entry of the stream `runner/ID`, with what would have been lost at that moment. A deadline ends
engines through their own runner, with the next renewal of their leases, so that open requests may end; gates have lost
no attempt, and what serves is booted by another runner, where one fits.
"""

from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry import acts, attempts, draining, evidence, handover, runners
from registry.auth import Actor
from registry.service import Service
from registry.tables import JobRow, RunnerRow, TargetRow
from schemas.api import RunnerDrain
from schemas.evidence import Kind, RunnerDrained, RunnerUndrained
from schemas.runner import JobKind, JobState

MOST_LOSSES = 200


def stream(runner: UUID) -> str:
    """Return where the log of a runner's drains is."""
    return f"runner/{runner}"


def drain(session: Session, service: Service, actor: Actor, name: str, body: RunnerDrain) -> RunnerRow:
    """Have a runner take no job any more, and with a deadline end then what it still holds.

    Again, and without a deadline, it changes nothing; a deadline takes the place of the one before.

    Raises:
        NotFound, NotPermitted: the actor's token is for some targets only.
    """
    was = runners.to_change(session, actor, name).drained_at
    row = runners.drain(session, actor, name, body.reason)
    if was is not None and body.force_in_seconds is None:
        return row
    at = acts.moment(session)
    if body.force_in_seconds is not None:
        row.empty_at = at + timedelta(seconds=body.force_in_seconds)
        session.flush()
    said = RunnerDrained(
        runner=row.name,
        reason=body.reason,
        empty_at=row.empty_at,
        loses=losses(session, row)[:MOST_LOSSES] or None,
        since=row.drained_at,
    )
    _record(session, service, actor, row, Kind.RUNNER_DRAINED, said)
    return row


def undrain(session: Session, service: Service, actor: Actor, name: str, reason: str | None = None) -> RunnerRow:
    """Let a runner take jobs again; what was ended by a deadline stays so. Raises NotFound, NotPermitted."""
    was = runners.to_change(session, actor, name).drained_at
    row = runners.undrain(session, actor, name, reason)
    if was is not None:
        said = RunnerUndrained(runner=row.name, reason=reason, since=row.undrained_at)
        _record(session, service, actor, row, Kind.RUNNER_UNDRAINED, said)
    return row


def _record(
    session: Session,
    service: Service,
    actor: Actor,
    row: RunnerRow,
    kind: Kind,
    said: RunnerDrained | RunnerUndrained,
) -> None:
    of = stream(row.id)
    signed = evidence.state(
        acts.signer_of(session, service),
        of,
        f"drain:{evidence.next_position(session, of)}",
        actor.name,
        kind,
        said,
        subjects={"runner": evidence.name_digest(row.name)},
        now=acts.moment(session),
    )
    evidence.append(session, row.project_id, signed)


def losses(session: Session, row: RunnerRow) -> list[str]:
    """Return what would be lost if a runner were emptied now, a sentence for each job that it holds."""
    return [_loss(session, job, target) for job, target in draining.held(session, row)]


def _loss(session: Session, job: JobRow, target: str | None) -> str:
    if job.kind != JobKind.SERVE:
        return f"run {job.id} begins its gate again elsewhere; it has lost no attempt"
    what = f"the replica of bundle {job.bundle[7:19]}" + (f" on {target}" if target else "")
    if not job.is_wanted:
        return f"{what} is ending already"
    other = _other(session, job)
    if other is not None and handover.is_ready(other):
        return f"{what} ends before its traffic has moved to the one that is ready"
    share = _share(session, job)
    if share:
        return (
            f"{what} is the only one, and has {share / 100:g} % of the target's requests: they go back to what else is "
            "warm, or fail until another has booted"
        )
    return f"{what} is not kept warm any more, and nobody waits for it now: it boots again when it is needed"


def _share(session: Session, job: JobRow) -> int:
    """Return the share of its target's requests that a job's bundle had last, in basis points."""
    target = session.get(TargetRow, job.target_id) if job.target_id else None
    applied = target.applied if target is not None else []
    return sum(int(arm["weight_bp"]) for arm in applied if arm["bundle"] == job.bundle)


def _other(session: Session, job: JobRow) -> JobRow | None:
    """Return the job that is to take a replica's place."""
    return session.scalar(
        select(JobRow).where(
            JobRow.replaces == job.id, JobRow.is_wanted, JobRow.state.in_([JobState.PENDING, JobState.CLAIMED])
        )
    )


def is_over(session: Session, job: JobRow, at: datetime) -> bool:
    """Tell whether a held job's runner is past its deadline."""
    runner = session.get(RunnerRow, job.runner_id) if job.runner_id else None
    return runner is not None and runner.empty_at is not None and runner.empty_at <= at


def give_back(session: Session, service: Service, job: JobRow, at: datetime) -> bool:
    """Let a job that a deadline ended begin again on another runner, with no attempt lost.

    Returns:
        False for a replica whose place another takes: it ends here.
    """
    runner = session.get_one(RunnerRow, job.runner_id)
    if job.kind == JobKind.SERVE and _other(session, job) is not None:
        job.is_wanted = False
        session.flush()
        return False
    who = (
        f"by {runner.drained_by}: {runner.drain_reason}" if runner.drained_at is not None else "before its drain ended"
    )
    why = f"runner {runner.name} was emptied {who}"
    attempts.begin_anew(session, service, job, attempts.EMPTIED, why, at=at)
    return True
