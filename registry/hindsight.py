"""What a database's clock leaves behind that is set back: leases and turns further ahead than any that is given out.

Nobody would look at them before the clock had caught up. They are brought near: a lease to the whole of one, so that
whoever holds it has as long as it may believe, and a turn to now.
"""

from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from registry import failures
from registry.settings import Settings
from registry.tables import JobRow, ReleaseRow
from schemas.runner import JobState

FAR_SECONDS: Final = 60.0
"""Ahead of what is given out: what is nearer is reached soon enough, and processes may be set to different leases."""


def bring_near(session: Session, settings: Settings, at: datetime) -> None:
    """Bring leases and turns near that lie far ahead of `at`. What somebody works on just now is left to them."""
    far = at + timedelta(seconds=FAR_SECONDS)
    lease = timedelta(seconds=settings.release_lease_seconds)
    _bring(session, ReleaseRow, ReleaseRow.lease_until, far + lease, at + lease)
    _bring(session, ReleaseRow, ReleaseRow.due_at, far, at)
    lease = timedelta(seconds=settings.lease_seconds)
    longest = timedelta(seconds=failures.backoff(failures.MAX_FAILURES))
    _bring(session, JobRow, JobRow.lease_until, far + lease, at + lease, JobRow.state == JobState.CLAIMED)
    _bring(session, JobRow, JobRow.due_at, far + longest, at, JobRow.state == JobState.PENDING)


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
