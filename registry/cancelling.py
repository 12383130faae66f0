"""Runs that belong to no release are cancelled by whoever may ask for one."""

from uuid import UUID

from sqlalchemy.orm import Session

from registry import auth, db, evidence, jobs, quotas
from registry.auth import Actor
from registry.service import Service
from registry.tables import JobRow, TargetRow
from schemas.api import Act
from schemas.asked import RunCancelled
from schemas.evidence import Kind
from schemas.problems import TransitionRefused
from schemas.runner import JobKind, JobState

CANCELLED = "cancelled"
"""Name of the act in the stream of a run."""


def cancel(session: Session, service: Service, actor: Actor, run: UUID, body: Act) -> JobRow:
    """Let a run that belongs to no release go no further, as a recorded act. Asking twice changes nothing.

    One that nobody holds, or whose holder was lost, ends at once. A runner that holds it is told with its next renewal,
    and stops.

    Raises:
        NotFound.
        NotPermitted: the actor's token is for other targets.
        TransitionRefused: the run is of a release, or over.
    """
    row = jobs.get(session, actor.project_id, run)
    target = session.get(TargetRow, row.target_id) if row.target_id is not None else None
    if target is not None:
        auth.require_target(actor, target.name)
    auth.confirm(session, actor)
    # The lock that a runner's words take too: either it has ended the run, or it hears of this.
    session.refresh(row, with_for_update=True)
    if row.release_id is not None or row.kind == JobKind.SERVE:
        ends = f"sluicegate release reject {row.release_id} --reason …"
        raise TransitionRefused(f"run {row.id} is of release {row.release_id} and ends with it: {ends}")
    if row.is_wanted:
        _record(session, service, actor, row, body.reason)
    at = db.now(session)
    if row.state == JobState.CLAIMED and (row.lease_until is None or row.lease_until <= at):
        # Its runner is gone, and the next one that would find it may never come.
        quotas.spend(row, row.lease_until or at)
        jobs.finish(session, service, row, problem=None, at=at)
    return row


def _record(session: Session, service: Service, actor: Actor, row: JobRow, reason: str) -> None:
    if row.state not in jobs.OPEN:
        came = jobs.wire(session, row).outcome or ("recorded" if row.reference is not None else "undecided")
        raise TransitionRefused(f"run {row.id} is over, and was not cancelled: {came}")
    at = db.now(session)
    signed = evidence.state(
        service.signer,
        f"run/{row.id}",
        CANCELLED,
        actor.name,
        Kind.RUN_CANCELLED,
        RunCancelled(run=row.id, reason=reason),
        subjects={"bundle": row.bundle},
        now=at,
    )
    evidence.append(session, row.project_id, signed)
    row.problem = f"cancelled by {actor.name}: {reason}"[:2000]
    jobs.unwant(session, row, now=at)
