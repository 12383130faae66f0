"""What follows when a job's attempt failed: another try after a while, or none."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from registry import evidence
from registry.logged import Logged
from schemas.evidence import Kind
from schemas.failures import FAILURES, Cause, is_final, is_transient
from schemas.runner import ReplicaState

MAX_ATTEMPTS = 3
"""Times a job that does not serve is tried before it ends with its problem."""
MAX_FAILURES = 20
"""Failures of a live replica in a row, all of them its engine's, before it is tried no more."""
CRASHES = 5
"""Times that a live replica may become ready and die within `CRASH_WINDOW` before it is tried no more."""
CRASH_WINDOW = timedelta(minutes=30)
BACKOFF_SECONDS = 5.0
EMPTIED = "emptied"
"""In the act of an attempt that ended since its runner had to be empty: nobody failed."""
BESIDE = "beside"
"""In the act of a failed attempt of a replica that was to take the place of one that serves still."""


@dataclass(slots=True)
class History:
    """How a release's live replica fared in whatever jobs, since a person or an approval last let it go on.

    `failures` in a row, `engine_failures` of them with a class, `why` the last one failed, `crashes` the instants at
    which one that had been ready died, `is_ready` whether the last one became ready, `is_over` whether it is tried no
    more.
    """

    failures: int = 0
    engine_failures: int = 0
    why: str = ""
    crashes: list[datetime] = field(default_factory=list)
    is_ready: bool = False
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Next:
    """What follows: the wait in seconds before the next try, None when there is none; and the class, as it is now."""

    wait_seconds: float | None
    cause: Cause | None
    act: str = "attempt"
    """Name of the failed attempt's act."""


def backoff(failures: int) -> float:
    """Return the seconds before the next try after so many failures in a row."""
    return BACKOFF_SECONDS * min(2 ** max(0, failures - 1), 12) if failures else 0.0


def history(log: Sequence[Logged]) -> History:
    """Return how a release's live replica fared.

    An approval, a person who lets the release go on and traffic that came back begin anew. A replica that was ready
    begins a new row of failures; that it died is not forgotten by that.
    """
    seen = History()
    for row in log:
        is_by_person = row.kind == Kind.RESUMED and row.actor != "controller"
        if is_by_person or row.kind in {Kind.APPROVED, Kind.REINSTATED}:
            seen = History()
        elif row.kind == Kind.RESUMED:
            seen.failures = seen.engine_failures = 0
        elif row.kind == Kind.REPLICA_CHANGED:
            body = evidence.claim_of(row.envelope)["body"]
            if body["purpose"] == "live" and body["replica"]["state"] == ReplicaState.READY:
                seen.failures = seen.engine_failures = 0
                seen.is_ready = True
        elif row.kind == Kind.ATTEMPT_ERRORED and row.act.startswith("job:") and not _is_nobodys(row.act):
            body = evidence.claim_of(row.envelope)["body"]
            cause = body.get("cause")
            if seen.is_ready and cause is not None:
                seen.crashes.append(row.recorded_at)
            seen.failures += 1
            seen.engine_failures += cause is not None
            seen.why = f"{body['problem']}: {body['detail']}"
            seen.is_ready = False
            seen.is_over = body.get("retry_in_seconds") is None
    return seen


def _is_nobodys(act: str) -> bool:
    return f":{BESIDE}:" in act or f":{EMPTIED}:" in act


def after(attempt: int, cause: Cause | None) -> Next:
    """Say what follows when a job that does not serve failed in its `attempt`th try.

    Only what says nothing about the bundle is tried again. Without a class it was no engine that failed.
    """
    is_last = attempt >= MAX_ATTEMPTS or (cause is not None and not is_transient(cause))
    return Next(None if is_last else backoff(attempt), cause)


def after_live(seen: History, cause: Cause | None, at: datetime) -> Next:
    """Say what follows when a live replica failed.

    Args:
        seen: how it fared before.
        cause: class of this failure; None when it was no engine that failed.
        at: now.
    """
    failures = seen.failures + 1
    if cause is None:
        return Next(backoff(failures), None)
    crashes = sum(at - one <= CRASH_WINDOW for one in seen.crashes) + seen.is_ready
    if crashes >= CRASHES:
        return Next(None, Cause.CRASH_LOOP)
    if is_final(cause) or seen.engine_failures + 1 >= MAX_FAILURES:
        return Next(None, cause)
    return Next(backoff(max(failures, crashes)), cause)


def told(detail: str, cause: Cause | None, reported: Cause | None) -> str:
    """Return what is said of a failure, beginning with its class where that is not the one that was reported."""
    return detail if cause is None or cause is reported else f"{cause}: {FAILURES[cause].meaning} The last: {detail}"
