"""Who served when: what a target served at an instant, and every change of it, from evidence alone."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from registry import db, evidence
from registry.evidence import MOVES_TRAFFIC
from registry.logged import Logged
from registry.tables import EntryRow, ReleaseRow, TargetRow
from schemas.evidence import Kind, SplitEntry, Traffic
from schemas.problems import InvalidDocument, NotFound
from schemas.release import ServedAt, TargetChange

BECOMES_LIVE = (Kind.PROMOTED, Kind.REINSTATED)
CHANGES = (*MOVES_TRAFFIC, *BECOMES_LIVE, Kind.REPLACED)
PAGE = 50
_ASKED = dict.fromkeys((Kind.REINSTATED, Kind.TRAFFIC_RESTORED), (Kind.ROLLBACK_REQUESTED,))
"""Change that takes traffic back → what people said before it. Before every other one they promoted, or approved."""
LATE = 8
"""A change of weights is recorded after the gateway has acknowledged it: so many entries behind an instant are looked
at for what was in force before it."""


def served_at(session: Session, target: TargetRow, at: datetime) -> ServedAt:
    """Return what a target served at an instant. Raises InvalidDocument for one that is yet to come."""
    if at > db.now(session):
        detail = "is yet to come"
        raise InvalidDocument(f"the instant {at.isoformat()} {detail}", errors=[{"pointer": "/at", "detail": detail}])
    live, split = _live(session, target, at), _split(session, target, at)
    of_live = None if live is None else session.get_one(ReleaseRow, _release(live))
    body = None if split is None else Traffic.model_validate(_body(split))
    return ServedAt(
        target=target.name,
        at=at,
        live_release=None if of_live is None else of_live.id,
        live_bundle=None if of_live is None else of_live.bundle,
        live_since=None if live is None else live.recorded_at,
        live_by=None if live is None else who(session, live),
        live_reason=None if live is None else _reason(live),
        live_entry=None if live is None else live.entry_digest,
        split=[] if body is None else body.desired,
        split_since=None if body is None else body.applied_at,
        split_entry=None if split is None else split.entry_digest,
    )


def _live(session: Session, target: TargetRow, at: datetime) -> Logged | None:
    """Return the entry that made a release live which was so at an instant.

    Read backwards: the first release that became live is the one, unless its traffic was taken back after that. A
    restore of one that never became live ended a canary, beside which the live one went on.
    """
    ended: set[UUID] = set()
    upto: int | None = None
    while True:
        kinds = (*BECOMES_LIVE, Kind.TRAFFIC_RESTORED)
        rows = evidence.of_target(session, target.id, kinds, upto=upto, by=at, limit=PAGE)
        for row in rows:
            if row.kind == Kind.TRAFFIC_RESTORED:
                ended.add(_release(row))
            else:
                return None if _release(row) in ended else row
        if len(rows) < PAGE:
            return None
        upto = rows[-1].sequence - 1


def _split(session: Session, target: TargetRow, at: datetime) -> Logged | None:
    """Return the entry of the weights that the gateway had acknowledged by an instant."""
    late = evidence.of_target_since(session, target.id, MOVES_TRAFFIC, at, limit=LATE)
    in_force = [row for row in late if Traffic.model_validate(_body(row)).applied_at <= at]
    return next(iter(in_force[::-1] or evidence.of_target(session, target.id, MOVES_TRAFFIC, by=at, limit=1)), None)


def browse(session: Session, target: TargetRow, *, after: UUID | None, limit: int) -> Sequence[Logged]:
    """Return the changes of what a target serves, newest first, before the entry named by a cursor.

    Raises:
        NotFound: the cursor is none of this target.
    """
    upto: int | None = None
    if after is not None:
        last = evidence.by_id(session, after)
        if last is None or last.project_id != target.project_id:
            raise NotFound("there is no such entry to go on after")
        upto = last.sequence - 1
    return evidence.of_target(session, target.id, CHANGES, upto=upto, limit=limit)


def wire(session: Session, row: Logged) -> TargetChange:
    """Return a change as the service gives it out."""
    release = session.get_one(ReleaseRow, _release(row))
    moved = Traffic.model_validate(_body(row)) if row.kind in MOVES_TRAFFIC else None
    split: list[SplitEntry] | None = None if moved is None else moved.desired
    return TargetChange(
        at=row.recorded_at if moved is None else moved.applied_at,
        kind=row.kind,
        release=release.id,
        bundle=release.bundle,
        split=split,
        by=who(session, row),
        actor=row.actor,
        reason=_reason(row) or _step(session, row),
        entry=row.entry_digest,
        sequence=row.sequence,
    )


def who(session: Session, row: Logged) -> str:
    """Return who is answerable: who asked for the promotion or the rollback, else who approved, else the recorder."""
    of, asked = row.stream, _ASKED.get(Kind(row.kind), (Kind.PROMOTION_REQUESTED, Kind.APPROVAL_GRANTED))
    if row.kind in (Kind.REINSTATED, Kind.REPLACED):
        of = evidence.release_stream(UUID(str(_body(row)["release"])))
    before = select(EntryRow.kind, EntryRow.actor).where(
        EntryRow.stream == of, EntryRow.kind.in_(asked), EntryRow.sequence <= row.sequence
    )
    if Kind.ROLLBACK_REQUESTED in asked:
        # What was asked before a release came back is over.
        came_back = select(func.coalesce(func.max(EntryRow.sequence), 0)).where(
            EntryRow.stream == of, EntryRow.kind == Kind.REINSTATED, EntryRow.sequence < row.sequence
        )
        before = before.where(EntryRow.sequence > came_back.scalar_subquery())
    found = session.execute(before).all()
    for kind in asked:
        people = sorted({actor for said, actor in found if said == kind})
        if people:
            return ", ".join(people)
    return row.actor


def _reason(row: Logged) -> str | None:
    body = _body(row)
    if row.kind == Kind.REINSTATED:
        return f"release {body['release']} was taken back"
    if row.kind == Kind.REPLACED:
        return f"replaced by release {body['release']}"
    reasons = body.get("reasons") or [body.get("reason") or body.get("cause")]
    return "; ".join(str(one) for one in reasons if one) or None


def _step(session: Session, row: Logged) -> str | None:
    """Return why a step of a canary began, whose entry gives no reason: what stands before it in the log has it."""
    step = _body(row).get("step")
    if row.kind != Kind.TRAFFIC_SHIFTED or step is None:
        return None
    kinds = (Kind.STEP_PASSED, Kind.PROMOTION_REQUESTED, Kind.TRAFFIC_SHIFTED)
    before = session.scalar(
        select(EntryRow)
        .where(EntryRow.stream == row.stream, EntryRow.kind.in_(kinds), EntryRow.sequence < row.sequence)
        .order_by(EntryRow.sequence.desc())
        .limit(1)
    )
    if before is None:
        return f"approved: step {step + 1} begins"
    if before.kind == Kind.STEP_PASSED:
        return f"step {_body(before)['step'] + 1} passed"
    if before.kind == Kind.PROMOTION_REQUESTED:
        return f"asked to skip the rest: {_body(before)['reason']}"
    return f"step {step + 1} again: what answers has changed"


def _body(row: Logged) -> dict[str, Any]:
    return dict(evidence.claim_of(row.envelope)["body"])


def _release(row: Logged) -> UUID:
    return UUID(row.stream.removeprefix("release/"))
