"""Draining by a person's word, with a deadline where they set one: then what a runner still holds is ended.

Each word is an entry of the stream `runner/ID`, with what would have been lost at that moment. A deadline ends
engines through their own runner, with the next renewal of their leases, so that open requests may end; gates have lost
no attempt, and what serves is booted by another runner, where one fits.
"""

from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry import acts, attempts, conditions, draining, evidence, handover, runners
from registry.auth import Actor
from registry.service import Service
from registry.tables import JobRow, RunnerRow, TargetRow
from schemas.api import RunnerDrain
from schemas.common import format_instant
from schemas.evidence import Kind, RunnerDrained, RunnerUndrained
from schemas.problems import Conflict
from schemas.runner import JobKind, JobState

MOST_LOSSES = 200


def drain(
    session: Session, service: Service, actor: Actor, name: str, body: RunnerDrain, *, if_match: str | None = None
) -> RunnerRow:
    """Have a runner take no job any more, and with a deadline end then what it still holds.

    Whoever drains it may ask again: without a deadline it changes nothing, and a deadline takes the place of the one
    before. Anybody else says with `if_match` that they saw that it drains.

    Raises:
        NotFound, NotPermitted: the actor's token is for some targets only.
        Conflict: somebody else drains it.
        StaleEdit: it is of another generation than `if_match`.
    """
    row = runners.to_change(session, actor, name)
    is_drained = row.drained_at is not None
    if is_drained and body.force_in_seconds is None and _holder(session, row) == actor.name:
        return row
    _require_version(session, row, if_match)
    if is_drained and if_match is None:
        _require_holder(session, actor, row)
    if is_drained and body.force_in_seconds is None:
        return row
    row = runners.drain(session, actor, name, body.reason)
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


def undrain(
    session: Session,
    service: Service,
    actor: Actor,
    name: str,
    reason: str | None = None,
    *,
    if_match: str | None = None,
) -> RunnerRow:
    """Let a runner take jobs again; what was ended by a deadline stays so. Asking twice changes nothing.

    Raises:
        NotFound, NotPermitted.
        StaleEdit: it is of another generation than `if_match`.
    """
    row = runners.to_change(session, actor, name)
    is_drained = row.drained_at is not None
    if is_drained or row.undrained_by != actor.name:
        _require_version(session, row, if_match)
    row = runners.undrain(session, actor, name, reason)
    if is_drained:
        said = RunnerUndrained(runner=row.name, reason=reason, since=row.undrained_at)
        _record(session, service, actor, row, Kind.RUNNER_UNDRAINED, said)
    return row


def _holder(session: Session, row: RunnerRow) -> str | None:
    """Return who said last that a runner drains, and with which deadline."""
    last = evidence.latest(session, draining.stream(row.id))
    return row.drained_by if last is None else last.actor


def _require_version(session: Session, row: RunnerRow, if_match: str | None) -> None:
    last = evidence.latest(session, draining.stream(row.id))
    conditions.require(f"the drain of runner {row.name}", str(last.position if last else 0), if_match, last)


def _require_holder(session: Session, actor: Actor, row: RunnerRow) -> None:
    """Refuse to change a drain of somebody else that the actor may not have seen."""
    holder = _holder(session, row)
    if row.drained_at is None or holder == actor.name:
        return
    ends = f", and what it holds at {format_instant(row.empty_at)} is ended" if row.empty_at else ""
    seen = draining.generation(session, row)
    raise Conflict(
        f"runner {row.name} is drained by {row.drained_by} since {format_instant(row.drained_at)}: {row.drain_reason}"
        f"{ends}; look again, and say what you saw with `--if-match {seen}`",
        holder=holder,
        version=str(seen),
        **conditions.changed_by(evidence.latest(session, draining.stream(row.id))),
    )


def _record(
    session: Session,
    service: Service,
    actor: Actor,
    row: RunnerRow,
    kind: Kind,
    said: RunnerDrained | RunnerUndrained,
) -> None:
    of = draining.stream(row.id)
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
