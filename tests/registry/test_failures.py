"""What follows when an attempt failed: another try after a while, or none."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from registry import evidence, failures
from registry.keys import Signer
from registry.tables import EntryRow
from schemas.common import Closed
from schemas.evidence import Attempt, Kind, Note, ReplicaChanged
from schemas.failures import Cause
from schemas.runner import ReplicaReport

SIGNER = Signer(ec.generate_private_key(ec.SECP256R1()))
START = datetime(2026, 1, 1, tzinfo=UTC)


def log_of(*rows: tuple[Kind, str | None], minutes: float = 0.1) -> list[EntryRow]:
    """A release's log in which a live replica was ready, failed by a class, or was let go on, so often in a row."""
    log = []
    for place, (kind, word) in enumerate(rows):
        body: Closed = Note(reason="mended")
        if kind is Kind.REPLICA_CHANGED:
            body = ReplicaChanged(job=UUID(int=1), purpose="live", replica=ReplicaReport(state=word, cause="a test"))
        elif kind is Kind.ATTEMPT_ERRORED:
            body = Attempt(problem="engine-failed", detail="as scripted", cause=word, attempt=1, retry_in_seconds=5)
        actor = str(word) if kind is Kind.RESUMED else "runner"
        subjects = {"bundle": "sha256:" + "b" * 64}
        at = START + timedelta(minutes=minutes * place)
        signed = evidence.state(SIGNER, "release/1", f"job:{place}", actor, kind, body, subjects=subjects, now=at)
        log.append(
            EntryRow(kind=kind, act=signed.act, actor=actor, recorded_at=at, envelope=signed.envelope),
        )
    return log


READY, DEAD = (Kind.REPLICA_CHANGED, "ready"), (Kind.ATTEMPT_ERRORED, "killed")
NOW = datetime(2026, 1, 1, 0, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("rows", "cause", "expected"),
    [
        ([], "killed", (5.0, "killed")),
        ([DEAD] * 3, "killed", (40.0, "killed")),
        ([DEAD] * 18, "killed", (60.0, "killed")),
        ([DEAD] * 19, "killed", (None, "killed")),
        ([(Kind.ATTEMPT_ERRORED, None)] * 30, None, (60.0, None)),
        ([(Kind.ATTEMPT_ERRORED, None)] * 30, "killed", (60.0, "killed")),
        ([], "shape_mismatch", (None, "shape_mismatch")),
        ([READY], "shape_mismatch", (None, "shape_mismatch")),
        ([READY, DEAD] * 3 + [READY], "exited", (40.0, "exited")),
        ([READY, DEAD] * 4 + [READY], "exited", (None, "crash_loop")),
        ([READY, DEAD] * 4, "exited", (40.0, "exited")),
        ([*[READY, DEAD] * 4, (Kind.RESUMED, "controller"), READY], "exited", (None, "crash_loop")),
        ([*[READY, DEAD] * 4, (Kind.RESUMED, "maria"), READY], "exited", (5.0, "exited")),
    ],
)
def test_a_live_replica_is_tried_again_later_and_later_and_not_for_ever(rows, cause, expected) -> None:
    seen = failures.history(log_of(*rows))
    follows = failures.after_live(seen, None if cause is None else Cause(cause), NOW)
    assert (follows.wait_seconds, follows.cause) == expected


def test_deaths_of_long_ago_make_no_crash_loop() -> None:
    seen = failures.history(log_of(*[READY, DEAD] * 4, READY, minutes=10))
    follows = failures.after_live(seen, Cause.EXITED, datetime(2026, 1, 1, 1, 25, tzinfo=UTC))
    assert follows.cause == "exited"
    assert follows.wait_seconds is not None


@pytest.mark.parametrize(
    ("attempt", "cause", "wait"),
    [
        (1, None, 5.0),
        (2, None, 10.0),
        (3, None, None),
        (1, "killed", 5.0),
        (1, "port_in_use", 5.0),
        (3, "killed", None),
        (1, "exited", None),
        (1, "rank_lost", None),
        (1, "bad_argument", None),
    ],
)
def test_a_gate_s_engine_is_tried_again_only_after_what_says_nothing_about_the_bundle(attempt, cause, wait) -> None:
    assert failures.after(attempt, None if cause is None else Cause(cause)).wait_seconds == wait
