"""What the log says of attempts at a job that came to nothing."""

from datetime import datetime

from sqlalchemy.orm import Session

from registry import evidence, failures
from registry.service import Service
from registry.tables import JobRow, ReleaseRow, RunnerRow
from schemas.api import Complete
from schemas.evidence import Attempt, Kind
from schemas.problems import LeaseLost
from schemas.release import TERMINAL, Phase
from schemas.runner import JobState

STOPPED = "runner-stopped"
"""Problem of an attempt whose runner was stopped, such as to be replaced by a newer one."""
PREEMPTED = "preempted"
"""Problem of an attempt that made room for what is live."""
EMPTIED = "runner-emptied"
"""Problem of an attempt that its runner's deadline ended, and of a job that was told to end for it."""
ACTS = {STOPPED: "stopped", PREEMPTED: PREEMPTED, EMPTIED: failures.EMPTIED}
"""Problem of an attempt that ended by somebody else's act → what its own act is called in the log."""


def tell_lost(session: Session, service: Service, row: JobRow, *, at: datetime) -> None:
    """Record that whoever held a job let its lease run out: what it had said so far is all there is of that attempt."""
    runner = session.get(RunnerRow, row.runner_id) if row.runner_id else None
    detail = f"runner {runner.name if runner else 'unknown'} was not heard of for as long as its lease lasts"
    said = Complete(fencing_token=row.fencing_token, problem="runner-lost", detail=detail)
    left = None if row.attempt >= failures.MAX_ATTEMPTS else 0.0
    errored(session, service, row, said, at=at, retry_in=left, act=f"lost:{row.fencing_token}")


def begin_anew(session: Session, service: Service, row: JobRow, problem: str, why: str, *, at: datetime) -> None:
    """Let a job that somebody else's act ended take its turn again: no attempt is lost, and no gate with a verdict."""
    said = Complete(fencing_token=row.fencing_token, problem=problem, detail=why)
    errored(session, service, row, said, at=at, retry_in=0.0, act=f"{ACTS[problem]}:{row.fencing_token}")
    row.state, row.due_at, row.lease_until = JobState.PENDING, at, None
    row.attempt -= 1
    row.devices, row.preempted_for = [], None
    row.problem, row.progress = f"{problem}: {why}"[:2000], "waiting for its turn again"
    session.flush()


def errored(
    session: Session,
    service: Service,
    row: JobRow,
    said: Complete,
    *,
    at: datetime,
    retry_in: float | None,
    act: str | None = None,
) -> None:
    """Record that an attempt ended in a problem, unless the log that it belongs to is closed."""
    stream = evidence.release_stream(row.release_id) if row.release_id else f"run/{row.id}"
    if row.release_id:
        release = session.get(ReleaseRow, row.release_id)
        if release is None or Phase(release.phase) in TERMINAL:
            return
    signed = evidence.state(
        service.signer,
        stream,
        f"job:{row.id}:{act or f'attempt:{row.attempt}'}",
        "runner",
        Kind.ATTEMPT_ERRORED,
        Attempt(
            problem=said.problem or "unknown",
            detail=said.detail or "no detail was given",
            cause=said.cause,
            attempt=row.attempt,
            retry_in_seconds=retry_in,
        ),
        subjects={"bundle": row.bundle},
        now=at,
    )
    if row.release_id:
        evidence.record(session, signed)
    else:
        evidence.append(session, row.project_id, signed)


def require_wanted(row: JobRow) -> None:
    """Let nothing count that a run measured after it was cancelled. Raises LeaseLost."""
    if row.release_id is None and not row.is_wanted:
        raise LeaseLost(f"run {row.id} was cancelled")
