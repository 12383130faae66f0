"""Evidence: the only writer of entries and of a release's phase.

A statement is signed outside any lock (`state`), then appended under the stream's lock (`append`), which gives it
its place and its link to the entry before. For a release, `record` does both and moves the cached fold with it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import ColumnElement, Select, Text, cast, event, func, literal, or_, select, tuple_
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.orm.attributes import set_committed_value
from uuid6 import uuid7

from gates import evidence as proof
from registry import appending, cursors, db, keys, lifecycle
from registry.cursors import Cursor
from registry.logged import Logged, Written
from registry.tables import EntryRow, ReleaseRow, TargetRow
from schemas.common import Closed, canonical_json, format_instant, sha256_digest, strict_json
from schemas.evidence import (
    BODIES,
    GENESIS,
    PREDICATE_BASE,
    STATEMENT_TYPE,
    TEST_RESULT,
    Entry,
    Envelope,
    Kind,
    Statement,
)
from schemas.problems import NotFound
from schemas.release import Phase
from schemas.result import GateResult, Verdict

KEPT_CLAIMS, FEW = 2048, 500
claim_of = lru_cache(maxsize=KEPT_CLAIMS)(proof.claim_of)
"""Envelopes never change, and an act or an answer reads those of a log more than once. What it returns is shared."""

_HELD = "held_releases"
_LOGS = "logs_of_held_releases"
_PLACES = "places_of_the_transaction"
_LATEST = "latest_instant_recorded"
"""Key → the transaction's number, the instant of its entries, and until when the key signs."""

MOVES_TRAFFIC = (Kind.TRAFFIC_SHIFTED, Kind.TRAFFIC_RESTORED)
"""Kinds whose body is the split from then on."""


class Signs(Protocol):
    """Puts an envelope around a statement."""

    def sign(self, payload: bytes) -> Envelope:
        """Return the envelope."""


@dataclass(frozen=True, slots=True)
class Signed:
    """A signed statement that waits for its place in a stream."""

    stream: str
    act: str
    kind: Kind
    actor: str
    body: dict[str, Any]
    envelope: bytes
    key_id: str


def release_stream(release: UUID) -> str:
    """Return the stream of a release."""
    return f"release/{release}"


def state(
    signer: Signs,
    stream: str,
    act: str,
    actor: str,
    kind: Kind,
    body: Closed,
    *,
    subjects: Mapping[str, str],
    now: datetime,
) -> Signed:
    """Sign what happened.

    Args:
        signer: key, or what was signed ahead.
        stream: where the entry will go.
        act: name of the act in the stream; a repetition is recognised by it.
        actor: who did it.
        kind: what it is.
        body: of the kind's model in `schemas.evidence.BODIES`.
        subjects: name → digest (`sha256:…`) of what the statement is about; at least one.
        now: when it is stated.

    Raises:
        TypeError: the body is not of the kind's model.
    """
    if type(body) is not BODIES[kind]:
        raise TypeError(f"a body of {kind} is a {BODIES[kind].__name__}, not a {type(body).__name__}")
    dumped = body.model_dump(mode="json", by_alias=True, exclude_none=True)
    claim = {"stream": stream, "act": act, "kind": str(kind), "actor": actor, "stated_at": format_instant(now)}
    predicate_type, predicate = _predicate(kind, body, {**claim, "body": dumped})
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [
            {"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}}
            for name, digest in sorted(subjects.items())
        ],
        "predicateType": predicate_type,
        "predicate": predicate,
    }
    Statement.model_validate(statement)
    envelope = signer.sign(canonical_json(statement))
    raw = canonical_json(envelope.model_dump(mode="json", by_alias=True))
    return Signed(stream, act, kind, actor, dumped, raw, envelope.signatures[0].keyid)


def _predicate(kind: Kind, body: Closed, claim: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A decided gate result is an in-toto test result; its vocabulary has no word for undecided ones."""
    if isinstance(body, GateResult) and body.verdict in {Verdict.PASSED, Verdict.FAILED}:
        passed = body.verdict is Verdict.PASSED
        return TEST_RESULT, {
            "result": "PASSED" if passed else "FAILED",
            "configuration": [{"name": "gate", "digest": {"sha256": body.definition.removeprefix("sha256:")}}],
            "passedTests": [body.gate] if passed else [],
            "warnedTests": [],
            "failedTests": [] if passed else [body.gate],
            "sluicegate": claim,
        }
    return f"{PREDICATE_BASE}{kind}/v1", claim


def as_record(row: Logged) -> proof.Record:
    """Return a row as the verifier takes it."""
    return proof.Record(
        sequence=row.sequence,
        id=row.id,
        project=row.project_id,
        stream=row.stream,
        position=row.position,
        act=row.act,
        kind=row.kind,
        actor=row.actor,
        recorded_at=row.recorded_at,
        envelope=row.envelope,
        previous=row.previous,
        entry_digest=row.entry_digest,
        key_id=row.key_id,
    )


def link(row: Logged) -> str:
    """Return the digest that a row's entry must have."""
    return as_record(row).link()


def find(session: Session, stream: str, act: str) -> Logged | None:
    """Return the entry of an act, if it is in the log."""
    return session.scalar(select(EntryRow).where(EntryRow.stream == stream, EntryRow.act == act))


def latest(session: Session, stream: str) -> Logged | None:
    """Return the last entry of a stream."""
    return session.scalar(select(EntryRow).where(EntryRow.stream == stream).order_by(EntryRow.position.desc()).limit(1))


def next_position(session: Session, stream: str) -> int:
    """Return the place that the next entry of a stream would get: for naming an act that may happen again."""
    last = latest(session, stream)
    return last.position + 1 if last else 1


def by_id(session: Session, entry: UUID) -> Logged | None:
    """Return an entry by its identity, of whichever project."""
    return session.scalar(select(EntryRow).where(EntryRow.id == entry))


def by_digest(session: Session, project: UUID, digest: str) -> Logged | None:
    """Return a project's entry by its digest."""
    return session.scalar(select(EntryRow).where(EntryRow.entry_digest == digest, EntryRow.project_id == project))


def open_stream(session: Session, project: UUID, signed: Signed) -> Logged:
    """Append the first entry of a stream that nobody else can write to yet: what it is about is not committed.

    Raises:
        Unavailable: as `append`.
    """
    own, at, key, ends_at = _here(session, signed.key_id)
    place = _Place(None, None, None, int(own), at, key is not None, ends_at)
    return _write(session, project, signed, place)


def note_here(session: Session, key_id: str, here: Sequence[Any]) -> None:
    """Say what `registry.appending.HERE` would answer for a key: another statement of the transaction has told it."""
    session.info.setdefault(_PLACES, {})[key_id] = here


def _here(session: Session, key_id: str) -> Sequence[Any]:
    """Return the transaction's number, the instant of its entries, and whether and until when a key signs."""
    here: dict[str, Sequence[Any]] = session.info.setdefault(_PLACES, {})
    if key_id not in here:
        here[key_id] = db.ask_one(session, appending.HERE, {"key": key_id})
    return here[key_id]


def append(session: Session, project: UUID, signed: Signed) -> tuple[Logged, bool]:
    """Append a signed statement to its stream.

    Returns:
        The entry, and whether this call wrote it: an act already in the stream changes nothing.

    Raises:
        Unavailable: the key that signed was retired meanwhile; what is signed anew is taken.
    """
    place = _end_of(session, signed)
    if place.known is not None:
        return session.get_one(EntryRow, place.known), False
    return _write(session, project, signed, place), True


@dataclass(frozen=True, slots=True)
class _Place:
    """The end of a stream that is held, and what an entry needs that is put there."""

    known: int | None
    """Sequence of the entry that the act has already."""
    position: int | None
    digest: str | None
    transaction: int
    at: datetime
    is_known_key: bool
    key_ends_at: datetime | None


def _known_end(session: Session, signed: Signed) -> _Place | None:
    """Return the end of the log of a release that is held and has been read; None where that is not so.

    Nobody else can append to it. It is recorded when the transaction last recorded something: never before that.
    """
    log: list[Logged] | None = session.info.get(_LOGS, {}).get(signed.stream)
    if not log:
        return None
    own, at, key, ends_at = _here(session, signed.key_id)
    known = next((row.sequence for row in log if row.act == signed.act), None)
    floor, at = max(int(own), log[-1].transaction_id), max(at, session.info.get(_LATEST, at))
    return _Place(known, log[-1].position, log[-1].entry_digest, floor, at, key is not None, ends_at)


def _end_of(session: Session, signed: Signed) -> _Place:
    """Hold the stream of a statement for the rest of the transaction, and return its end."""
    own = int(db.ask_one(session, appending.HOLD, {"stream": signed.stream})[1])
    asked = {"stream": signed.stream, "act": signed.act, "key": signed.key_id}
    known, position, digest, floor, at, key, ends_at = db.ask_one(session, appending.END, asked)
    return _Place(known, position, digest, max(own, int(floor or 0)), at, key is not None, ends_at)


def _write(session: Session, project: UUID, signed: Signed, place: _Place) -> Logged:
    row = _entry(project, signed, place)
    _put(session, row, appending.INSERT, {})
    return row


def _entry(project: UUID, signed: Signed, place: _Place) -> Written:
    """Return the entry of a statement in its place. Raises Unavailable."""
    keys.require_in_force(signed.key_id, place.at, is_known=place.is_known_key, ends_at=place.key_ends_at)
    row = Written(
        id=uuid7(),
        project_id=project,
        stream=signed.stream,
        position=(place.position or 0) + 1,
        act=signed.act,
        kind=signed.kind,
        actor=signed.actor,
        recorded_at=place.at,
        envelope=signed.envelope,
        previous=place.digest or GENESIS,
        key_id=signed.key_id,
        # Not below the one of the entry before it.
        transaction_id=place.transaction,
    )
    row.entry_digest = link(row)
    return row


def _put(session: Session, row: Written, statement: db.Sql, beside: Mapping[str, Any]) -> None:
    """Write an entry by a statement that gives back its sequence, with what is written `beside` it."""
    written = {name: getattr(row, name) for name in appending.WRITTEN}
    # What the entry is about is written before it: asking does that.
    (row.sequence,) = db.ask_one(session, statement, {**written, **beside})
    session.info[_LATEST] = row.recorded_at
    if known := session.info.get(_LOGS, {}).get(row.stream):
        known.append(row)


def hold(session: Session, release_id: UUID) -> ReleaseRow:
    """Return a release, locked for the rest of the transaction. Raises NotFound."""
    held: dict[UUID, ReleaseRow] = session.info.setdefault(_HELD, {})
    if release_id not in held:
        release = session.get(ReleaseRow, release_id, with_for_update={"key_share": True}, populate_existing=True)
        if release is None:
            raise NotFound(f"there is no release {release_id}")
        held[release_id] = release
    return held[release_id]


def note_held(session: Session, release: ReleaseRow) -> None:
    """Say that this transaction has locked a release, as `hold` does, and read it as it was then."""
    session.info.setdefault(_HELD, {})[release.id] = release


@event.listens_for(Session, "after_transaction_end")
def _let_go(session: Session, transaction: SessionTransaction) -> None:
    if db.is_over(transaction):
        for known in (_HELD, _LOGS, _PLACES, _LATEST):
            session.info.pop(known, None)


def record(session: Session, signed: Signed) -> tuple[ReleaseRow, bool]:
    """Append to a release's log and move the release as the entry says.

    Returns:
        The release, locked for the rest of the transaction, and whether this call wrote the entry.

    Raises:
        NotFound: there is no such release.
        TransitionRefused: the entry has no place in the release's phase.
    """
    release_id = UUID(signed.stream.removeprefix("release/"))
    release = hold(session, release_id)
    place = _known_end(session, signed) or _end_of(session, signed)
    if place.known is not None:
        return release, False
    # Judged before it is written, so that a refused entry leaves nothing behind.
    before = cached(release)
    lifecycle.step(before.phase, signed.kind)
    entry = _entry(release.project_id, signed, place)
    after = lifecycle.advance(before, signed.kind, signed.body, entry.recorded_at)
    is_moved = after.phase is not before.phase
    told = {f"new_{name}": getattr(after, name) for name in appending.FOLDED}
    beside = {"release": release.id, "target": release.target_id, "is_moved": is_moved, **told}
    _put(session, entry, appending.RECORD, {**beside, "new_held": json.dumps(after.held)})
    beside_it = (("entries", entry.position), ("due_at", entry.recorded_at), ("progress", None))
    for name, value in (*_columns(after).items(), *beside_it):
        set_committed_value(release, name, value)
    if is_moved:
        _forget_generation(session, release)
    return release, True


def _touch(session: Session, release: ReleaseRow) -> None:
    """What a target serves, or is about to, is told by the phases of its releases: it has changed."""
    db.ask(session, appending.CHANGED, {"target": release.target_id})
    _forget_generation(session, release)


def _forget_generation(session: Session, release: ReleaseRow) -> None:
    known = session.identity_map.get(session.identity_key(TargetRow, release.target_id))
    if known is not None:
        session.expire(known, ["generation"])


def begin(session: Session, release: ReleaseRow, signed: Signed) -> None:
    """Write a new release together with its first entry, `created`."""
    _cache(release, lifecycle.begin(release.created_at))
    release.due_at, release.entries = release.created_at, 1
    session.add(release)
    session.flush()
    entry, _ = append(session, release.project_id, signed)
    _cache(release, lifecycle.begin(entry.recorded_at))
    _touch(session, release)
    session.flush()


def cached(release: ReleaseRow) -> lifecycle.State:
    """Return the fold of a release's log as it is kept beside it."""
    return lifecycle.State(
        phase=Phase(release.phase),
        phase_since=release.phase_since,
        is_paused=release.is_paused,
        held=tuple(release.held),
        reason=release.reason,
        step=release.step,
        step_since=release.step_since,
        weight_bp=release.weight_bp,
    )


def _cache(release: ReleaseRow, folded: lifecycle.State) -> None:
    for name, value in _columns(folded).items():
        setattr(release, name, value)


def _columns(folded: lifecycle.State) -> dict[str, Any]:
    """Return what is kept of a fold beside the log."""
    return {**{name: getattr(folded, name) for name in appending.FOLDED}, "held": list(folded.held)}


def read(session: Session, stream: str, *, after: int = 0, limit: int | None = None) -> list[Logged]:
    """Return a stream's entries after a position, oldest first."""
    if after == 0 and limit is None and _is_held(session, stream):
        known = _known_log(session, stream)
        if not known:
            known.extend(db.ask(session, appending.LOG, {"stream": stream, "after": 0, "limit": None}))
        return list(known)
    return db.ask(session, appending.LOG, {"stream": stream, "after": after, "limit": limit})


def _is_held(session: Session, stream: str) -> bool:
    """Tell whether a stream is the log of a release that this transaction holds: nobody else appends to it."""
    kind, _, name = stream.partition("/")
    held: dict[UUID, ReleaseRow] = session.info.get(_HELD, {})
    return kind == "release" and any(str(one) == name for one in held)


def _known_log(session: Session, stream: str) -> list[Logged]:
    """Return what is known of the log of a release that is held; it is read once, and grows by what is appended."""
    logs: dict[str, list[Logged]] = session.info.setdefault(_LOGS, {})
    return logs.setdefault(stream, [])


@dataclass(frozen=True, slots=True)
class Selection:
    """Which entries of a project: all that match everything named."""

    stream: str | None = None
    target: UUID | None = None
    """The target's own stream and those of its releases."""
    kinds: tuple[str, ...] = ()
    """Of any of these kinds; of all when empty."""
    actor: str | None = None


def browse(
    session: Session,
    project: UUID,
    selection: Selection,
    *,
    after: Cursor,
    before: int,
    limit: int,
    is_newest_first: bool = False,
    down_to: Cursor = cursors.START,
) -> list[Logged]:
    """Return entries of a project in the order of cursors; none that is committed later comes before them.

    Args:
        session: of the caller.
        project: whose entries.
        selection: which of them.
        after: the last one seen.
        before: what `cursors.horizon` gave, in a statement before this one.
        limit: most entries.
        is_newest_first: whether to go backwards from `after`, which is not included.
        down_to: the lowest one that is looked at; all are when absent.
    """
    order = (EntryRow.transaction_id, EntryRow.sequence)
    place, seen = tuple_(*order), tuple_(cursors.number(after.transaction), after.sequence)
    query = select(EntryRow).where(
        EntryRow.project_id == project,
        place < seen if is_newest_first else place > seen,
        EntryRow.transaction_id < cursors.number(before),
        place >= tuple_(cursors.number(down_to.transaction), down_to.sequence),
    )
    if selection.stream is not None:
        query = query.where(EntryRow.stream == selection.stream)
    if selection.target is not None:
        query = query.where(_is_of(session, selection.target))
    if selection.kinds:
        query = query.where(EntryRow.kind.in_(selection.kinds))
    if selection.actor is not None:
        query = query.where(EntryRow.actor == selection.actor)
    ordered = query.order_by(*(one.desc() for one in order) if is_newest_first else order)
    return list(session.scalars(ordered.limit(limit)))


def _is_of(session: Session, target: UUID) -> ColumnElement[bool]:
    """Return the condition on an entry of a target: of few releases their names, by which the planner counts."""
    some = session.scalars(select(ReleaseRow.id).where(ReleaseRow.target_id == target).limit(FEW + 1)).all()
    if len(some) <= FEW:
        return EntryRow.stream.in_([f"target/{target}", *map(release_stream, some)])
    of = select(literal("release/") + cast(ReleaseRow.id, Text)).where(ReleaseRow.target_id == target)
    return or_(EntryRow.stream == f"target/{target}", EntryRow.stream.in_(of))


def browse_stream(
    session: Session,
    project: UUID,
    stream: str,
    *,
    kinds: Sequence[Kind] = (),
    after: int,
    limit: int,
    is_newest_first: bool = False,
) -> list[Logged]:
    """Return a stream's entries after a sequence, oldest first: its lock makes sequence and commit agree.

    `kinds`: of any of these only; with `is_newest_first`, those before that sequence, the newest first.
    """
    query = select(EntryRow).where(EntryRow.project_id == project, EntryRow.stream == stream)
    if kinds:
        query = query.where(EntryRow.kind.in_([str(one) for one in kinds]))
    if is_newest_first:
        query = query.where(EntryRow.sequence < after).order_by(EntryRow.sequence.desc())
    else:
        query = query.where(EntryRow.sequence > after).order_by(EntryRow.sequence)
    return list(session.scalars(query.limit(limit)))


def traffic(session: Session, target: UUID, *, upto: int | None, limit: int) -> list[Logged]:
    """Return the changes of a target's split, newest first, from a sequence on backwards."""
    return of_target(session, target, MOVES_TRAFFIC, upto=upto, limit=limit)


def of_target(
    session: Session,
    target: UUID,
    kinds: Sequence[Kind],
    *,
    upto: int | None = None,
    by: datetime | None = None,
    limit: int,
) -> list[Logged]:
    """Return entries of a target's releases, newest first.

    Args:
        session: of the caller.
        target: whose releases.
        kinds: which entries.
        upto: only from this sequence on backwards.
        by: only what was recorded by then.
        limit: most entries.
    """
    query = _of_target(target, kinds)
    if upto is not None:
        query = query.where(EntryRow.sequence <= upto)
    if by is not None:
        query = query.where(EntryRow.recorded_at <= by)
    return list(session.scalars(query.order_by(EntryRow.sequence.desc()).limit(limit)))


def of_target_since(
    session: Session, target: UUID, kinds: Sequence[Kind], since: datetime, *, limit: int
) -> list[Logged]:
    """Return entries of a target's releases that were recorded after an instant, oldest first."""
    query = _of_target(target, kinds).where(EntryRow.recorded_at > since)
    return list(session.scalars(query.order_by(EntryRow.sequence).limit(limit)))


def _of_target(target: UUID, kinds: Sequence[Kind]) -> Select[EntryRow]:
    of = select(literal("release/") + cast(ReleaseRow.id, Text)).where(ReleaseRow.target_id == target)
    return select(EntryRow).where(EntryRow.stream.in_(of), EntryRow.kind.in_(kinds))


def cursor_of(row: Logged) -> Cursor:
    """Return the cursor of a reader whose last entry is this one."""
    return Cursor(row.transaction_id, row.sequence)


def wire(row: Logged, *, with_envelope: bool = False) -> Entry:
    """Return an entry as the service gives it out."""
    return Entry(
        sequence=row.sequence,
        id=row.id,
        project=row.project_id,
        stream=row.stream,
        position=row.position,
        act=row.act,
        kind=Kind(row.kind),
        actor=row.actor,
        recorded_at=row.recorded_at,
        body=claim_of(row.envelope)["body"],
        previous=row.previous,
        entry_digest=row.entry_digest,
        key_id=row.key_id,
        envelope=Envelope.model_validate(strict_json(row.envelope)) if with_envelope else None,
    )


def bodies(rows: Sequence[Logged]) -> list[tuple[Kind, dict[str, Any], datetime]]:
    """Return (kind, body, recorded_at) of entries, as `lifecycle.fold` takes them."""
    return [(Kind(row.kind), claim_of(row.envelope)["body"], row.recorded_at) for row in rows]


def count(session: Session, project: UUID) -> int:
    """Return how many entries a project has."""
    return session.scalar(select(func.count()).select_from(EntryRow).where(EntryRow.project_id == project)) or 0


def name_digest(name: str) -> str:
    """Return the digest by which a statement names something that has no bytes of its own."""
    return sha256_digest(name.encode())
