"""The log of a whole project, newest first, a page at a time: also of one kind, one target, one actor."""

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import select, tuple_
from sqlalchemy.orm import Session

from registry import cursors, evidence
from registry.cursors import Cursor
from registry.evidence import Selection
from registry.logged import Logged
from registry.tables import EntryRow

MOST_LOOKED = 2000
"""Entries that one page is looked for among: what is rare is found page by page, and no query reads the whole log."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One page of the log."""

    rows: list[Logged]
    following: Cursor | None
    """After which the next page goes on; None at the end of the log."""


def newest(
    session: Session,
    project: UUID,
    *,
    kind: str | None = None,
    target: UUID | None = None,
    actor: str | None = None,
    after: Cursor | None = None,
    limit: int,
) -> Leaf:
    """Return a page of a project's log, newest first, of all that matches everything named.

    It may be short, or empty, and have a next one: then nothing else was found among `MOST_LOOKED` entries.

    Args:
        session: of the caller.
        project: whose log.
        kind: only of this kind.
        target: only of this target and its releases.
        actor: only by this person, runner or part of the service.
        after: the last one that was looked at; None begins with the newest.
        limit: most entries.
    """
    horizon = cursors.horizon(session)
    seen = after or Cursor.ahead_of(horizon)
    chosen = Selection(target=target, kinds=(kind,) if kind else (), actor=actor)
    # Without a choice each entry is one of the page, and no end has to be set to the search.
    last = _beyond(session, project, after=seen, before=horizon) if chosen != Selection() else None
    rows = evidence.browse(
        session,
        project,
        chosen,
        after=seen,
        before=horizon,
        limit=limit + 1,
        is_newest_first=True,
        down_to=last or cursors.START,
    )
    if len(rows) > limit:
        return Leaf(rows[:limit], evidence.cursor_of(rows[limit - 1]))
    return Leaf(rows, last)


def _beyond(session: Session, project: UUID, *, after: Cursor, before: int) -> Cursor | None:
    """Return the cursor of the entry that is `MOST_LOOKED` before another; None where there are not that many."""
    place = tuple_(EntryRow.transaction_id, EntryRow.sequence)
    query = (
        select(EntryRow.transaction_id, EntryRow.sequence)
        .where(
            EntryRow.project_id == project,
            place < tuple_(cursors.number(after.transaction), after.sequence),
            EntryRow.transaction_id < cursors.number(before),
        )
        .order_by(EntryRow.transaction_id.desc(), EntryRow.sequence.desc())
        .offset(MOST_LOOKED - 1)
        .limit(1)
    )
    row = session.execute(query).one_or_none()
    return None if row is None else Cursor(*row)
