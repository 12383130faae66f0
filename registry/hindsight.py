"""What a database's clock leaves behind that is set back: leases and turns further ahead than any that is given out.

Nobody would look at them before the clock had caught up. They are brought near: a lease to the whole of one, so that
whoever holds it has as long as it may believe, and a turn to now.
"""

from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from registry import db, failures
from registry.settings import Settings
from registry.tables import JobRow, ReleaseRow
from schemas.runner import JobState

FAR_SECONDS: Final = 60.0
"""Ahead of what is given out: what is nearer is reached soon enough, and processes may be set to different leases."""

# Asked at every sweep, and the answer is no. The ends of indexes tell; whether there is any row would be looked for in
# all that have ended, by a planner that expects to find one soon.
_IS_ANY_FAR = db.Sql(
    """
    SELECT coalesce((SELECT max(lease_until) FROM releases) > :lease, false)
        OR coalesce((SELECT max(due_at) FROM releases) > :turn, false)
        OR coalesce((SELECT max(lease_until) FROM jobs WHERE state = 'claimed') > :job_lease, false)
        OR coalesce((SELECT max(due_at) FROM jobs WHERE state = 'pending') > :job_turn, false)
    """
)


def bring_near(session: Session, settings: Settings, at: datetime) -> None:
    """Bring leases and turns near that lie far ahead of `at`. What somebody works on just now is left to them."""
    far = at + timedelta(seconds=FAR_SECONDS)
    lease, job_lease = timedelta(seconds=settings.release_lease_seconds), timedelta(seconds=settings.lease_seconds)
    longest = timedelta(seconds=failures.backoff(failures.MAX_FAILURES))
    beyond = {"lease": far + lease, "turn": far, "job_lease": far + job_lease, "job_turn": far + longest}
    if not db.ask_one(session, _IS_ANY_FAR, beyond)[0]:
        return
    _bring(session, ReleaseRow, ReleaseRow.lease_until, beyond["lease"], at + lease)
    _bring(session, ReleaseRow, ReleaseRow.due_at, beyond["turn"], at)
    _bring(session, JobRow, JobRow.lease_until, beyond["job_lease"], at + job_lease, JobRow.state == JobState.CLAIMED)
    _bring(session, JobRow, JobRow.due_at, beyond["job_turn"], at, JobRow.state == JobState.PENDING)


def _bring(
    session: Session,
    table: type[ReleaseRow | JobRow],
    column: InstrumentedAttribute[datetime] | InstrumentedAttribute[datetime | None],
    beyond: datetime,
    to: datetime,
    *conditions: ColumnElement[bool],
) -> None:
    rows = select(table.id).where(column > beyond, *conditions).with_for_update(skip_locked=True, key_share=True)
    if found := session.scalars(rows).all():
        session.execute(update(table).where(table.id.in_(found)).values({column: to}))
