"""Verification of evidence from the database: chains, signatures, checkpoints and phases. Trusts no column."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Text, and_, cast, exists, func, literal, select, true
from sqlalchemy.orm import Session

from gates.evidence import Record, Verifier, claim_of
from registry import (
    alias_patterns,
    aliases,
    checkpoints,
    cursors,
    documents,
    evidence,
    keys,
    lifecycle,
    projects,
    quarantine,
)
from registry.agreement import Agreement
from registry.stock import Stock
from registry.tables import (
    AliasRow,
    CheckpointRow,
    DocumentRow,
    EntryRow,
    ProjectDocumentRow,
    ProjectLabelRow,
    ReleaseRow,
    TargetReferenceRow,
    TargetRow,
)
from registry.work import Work
from schemas.common import format_instant, sha256_digest, strict_json
from schemas.evidence import (
    AliasChanged,
    AliasPatternChanged,
    Created,
    Fault,
    Kind,
    ReferenceSet,
    Registered,
    Verification,
)
from schemas.problems import TransitionRefused

MAX_FAULTS = 1000
HELD = 500
"""Entries, and folded releases, that are held at a time."""


def verify(
    session: Session,
    project: UUID,
    *,
    signer: str | None = None,
    stream: str | None = None,
    must_have: str | None = None,
) -> Verification:
    """Recompute a project's evidence, or one stream of it.

    For each checkpoint, in order: its envelope is canonical and signed, it names the one before, and what it counts
    adds up. For each entry, in order:
      1. its position and its sequence follow the ones before, and `previous` is that entry's digest;
      2. its digest is that of its row;
      3. its envelope is canonical, closed, and signed by the key that the row names, valid at that time;
      4. its statement says the same stream, act, kind and actor as the row, with a body of that kind;
      5. it is the entry that the checkpoint over it sealed, and no sealed entry is missing.
    Then what is cached beside the log must be what the log says: a release's whole state and what it was created
    with; who holds which token and whether it counts; targets, the splits and the references in force on them; how
    bundles' sources were resolved, what they are made of, which are deleted or quarantined and what aliases name; and
    every release, target, token and document has its entry, and every document its bytes.

    What was cut off at the end of a stream after the last checkpoint shows only where something cached depends on it.

    `signer` is the id of the key that the service itself holds. It is trusted, and so is each key that a trusted one
    vouches for: whoever can write to the database can put a key of their own into it, and sign with that. Without it
    every key of the database is trusted.

    `must_have` is the digest of a checkpoint that somebody kept: it must still be there.

    Returns:
        What was read and everything that is wrong. Nothing read is not verified.
    """
    verifier = Verifier(project, keys.known(session))
    for checkpoint in checkpoints.every(session, project):
        _take_checkpoint(verifier, checkpoint)
    if stream is not None and stream != (own := projects.stream(project)):
        for record, _ in _records(session, project, own, kinds=(Kind.KEY_ROTATED, Kind.PROJECT_SET)):
            verifier.learn(record)
    folds: list[Fault] = []
    logs, agreement, stock, work = _Logs(session, project), Agreement(project), Stock(session, project), Work(project)
    order = _Order(cursors.ahead(session))
    for record, transaction in _records(session, project, stream):
        folds += order.take(record, transaction)
        claim = verifier.entry(record)
        agreement.take(record, claim)
        stock.take(record, claim)
        work.take(record, claim, verifier.about)
        folds += logs.take(record, claim, counts=agreement.counts(record))
    folds += logs.close(stream)
    if stream is None:
        _take_sequences(session, project, verifier)
        folds += agreement.close(session, logs.changes)
        folds += _document_faults(session, project, stock)
        folds += stock.close(verifier)
        folds += work.close(session)
        folds += _registration_faults(session, project)
        folds += _reference_faults(session, project)
        folds += _quarantine_faults(session, project)
        folds += _alias_faults(session, project)
        folds += _alias_pattern_faults(session, project)
    pinned = None if signer is None else {signer}
    faults = [*verifier.close(pinned, stream=stream, must_have=must_have), *folds]
    return Verification(
        entries=verifier.entries,
        streams=verifier.streams,
        checkpoints=verifier.checkpoints,
        sealed=verifier.sealed if stream is None else verifier.sealed_of(stream),
        erased=verifier.erased,
        verified=verifier.entries > 0 and not faults,
        faults=faults[:MAX_FAULTS],
    )


def _take_checkpoint(verifier: Verifier, row: CheckpointRow) -> None:
    sealed = verifier.seal(row.envelope, digest=row.digest, key_id=row.key_id)
    if sealed is None:
        return
    columns = {
        "number": (sealed.number, row.number),
        "sequence": (sealed.sequence, row.sequence),
        "made_at": (sealed.made_at, row.made_at),
        "made_by": (sealed.made_by, row.made_by),
        "entries": (sealed.entries, row.entries),
        "streams": (sealed.streams, row.streams),
        "previous": (sealed.previous, row.previous),
    }
    for field, (signed, stored) in columns.items():
        if signed != stored:
            verifier.fault(f"checkpoints/{row.project_id}", row.number, f"its {field} is not the one that was signed")


def _take_sequences(session: Session, project: UUID, verifier: Verifier) -> None:
    """Only the index and one column are read, in the order in which checkpoints count."""
    rows = session.execute(
        select(EntryRow.sequence, EntryRow.entry_digest)
        .where(EntryRow.project_id == project)
        .order_by(EntryRow.sequence)
        .execution_options(yield_per=5000)
    )
    for sequence, digest in rows:
        verifier.sequenced(sequence, digest)


class _Order:
    """Holds entries to the order in which readers of the whole log are told them; see `registry.cursors`."""

    def __init__(self, ahead: int) -> None:
        self._ahead, self._stream, self._last = ahead, "", 0

    def take(self, record: Record, transaction: int) -> Iterator[Fault]:
        if transaction >= self._ahead:
            yield Fault(stream=record.stream, position=record.position, problem="readers of the log are not told it")
        elif record.stream == self._stream and transaction < self._last:
            problem = "readers of the log are told it before the one before it"
            yield Fault(stream=record.stream, position=record.position, problem=problem)
        self._stream, self._last = record.stream, transaction


def _records(
    session: Session, project: UUID, stream: str | None, *, kinds: Sequence[Kind] = ()
) -> Iterator[tuple[Record, int]]:
    """Yield the entries of a project, each with its transaction, those of a stream together and in order.

    All of them, or those of one stream, or of some kinds of that.

    A few hundred are held at a time.
    """
    columns = [getattr(EntryRow, column) for column in _COLUMNS]
    query = select(*columns, EntryRow.transaction_id).where(EntryRow.project_id == project)
    if stream is not None:
        query = query.where(EntryRow.stream == stream)
    if kinds:
        query = query.where(EntryRow.kind.in_(kinds))
    query = query.order_by(EntryRow.stream, EntryRow.position)
    for row in session.execute(query.execution_options(yield_per=HELD)):
        yield Record(*row[:-1]), row[-1]


_COLUMNS = (
    "sequence",
    "id",
    "project_id",
    "stream",
    "position",
    "act",
    "kind",
    "actor",
    "recorded_at",
    "envelope",
    "previous",
    "entry_digest",
    "key_id",
)
"""In the order of `Record`'s fields."""


@dataclass(slots=True)
class _Log:
    """The log of one release, folded as far as it was read."""

    stream: str
    created: Created | None = None
    author: str = ""
    stated_at: str = ""
    state: lifecycle.State | None = None
    problem: str | None = None
    length: int = 0
    changes: int = 0
    """How often it changed what its target serves, or is about to, since that is counted."""

    def take(self, record: Record, claim: dict[str, Any] | None, *, counts: bool) -> None:
        self.length = record.position
        if self.problem is not None:
            return
        try:
            if claim is None:
                raise ValueError("an entry of it cannot be read")
            kind, before = Kind(record.kind), self.state
            if self.state is None:
                self.state = lifecycle.fold([(kind, claim["body"], record.recorded_at)])
                self.created, self.author = Created.model_validate(claim["body"]), record.actor
                self.stated_at = claim["stated_at"]
            else:
                self.state = lifecycle.advance(self.state, kind, claim["body"], record.recorded_at)
            if counts:
                is_moved = before is None or before.phase is not self.state.phase
                self.changes += is_moved + (kind in evidence.MOVES_TRAFFIC)
        except (ValueError, LookupError, TypeError, TransitionRefused) as error:
            self.problem = f"the log cannot be folded: {str(error).splitlines()[0]}"


class _Logs:
    """Compares releases with their logs, as the logs go by: a few hundred at a time."""

    def __init__(self, session: Session, project: UUID) -> None:
        self._session, self._project = session, project
        self._folded: list[_Log] = []
        self.changes: Counter[UUID] = Counter()
        """Target → how often its releases changed it."""

    def take(self, record: Record, claim: dict[str, Any] | None, *, counts: bool) -> Iterator[Fault]:
        """Take the next entry. Yields faults of logs before it."""
        if not record.stream.startswith("release/"):
            return
        if not self._folded or self._folded[-1].stream != record.stream:
            if len(self._folded) >= HELD:
                yield from self._compare()
            self._folded.append(_Log(record.stream))
        self._folded[-1].take(record, claim, counts=counts)

    def close(self, stream: str | None) -> Iterator[Fault]:
        """Yield the faults of the last logs, and releases that have none."""
        yield from self._compare()
        of = literal("release/") + cast(ReleaseRow.id, Text)
        has_log = exists().where(EntryRow.stream == of, EntryRow.project_id == self._project)
        query = select(of).where(ReleaseRow.project_id == self._project, ~has_log)
        if stream is not None:
            query = query.where(of == stream)
        for name in sorted(self._session.scalars(query)):
            yield Fault(stream=name, position=0, problem="the release has no log")

    def _compare(self) -> Iterator[Fault]:
        names = {log.stream: log for log in self._folded}
        self._folded = []
        query = (
            select(ReleaseRow, TargetRow.name)
            .join(TargetRow, TargetRow.id == ReleaseRow.target_id, isouter=True)
            .where(ReleaseRow.project_id == self._project, ReleaseRow.id.in_(filter(None, map(_release_of, names))))
        )
        rows = {evidence.release_stream(row.id): (row, target) for row, target in self._session.execute(query)}
        for name, log in names.items():
            yield from _release_faults(log, *rows.get(name, (None, None)))
        for name, (row, _) in rows.items():
            self.changes[row.target_id] += names[name].changes
            self._session.expunge(row)


def _release_of(stream: str) -> UUID | None:
    with suppress(ValueError):  # what has no release is a fault of its log
        return UUID(stream.removeprefix("release/"))
    return None


def _release_faults(log: _Log, release: ReleaseRow | None, target: str | None) -> Iterator[Fault]:
    name, folded, created = log.stream, log.state, log.created
    if release is None:
        yield Fault(stream=name, position=0, problem="its release is missing")
        return
    if log.problem is not None or folded is None or created is None:
        yield Fault(stream=name, position=0, problem=log.problem or "the log cannot be folded")
        return
    shown = {
        "phase": (folded.phase, release.phase),
        "phase_since": (folded.phase_since, release.phase_since),
        "is_paused": (folded.is_paused, release.is_paused),
        "held": (list(folded.held), release.held),
        "reason": (folded.reason, release.reason),
        "step": (folded.step, release.step),
        "step_since": (folded.step_since, release.step_since),
        "weight_bp": (folded.weight_bp, release.weight_bp),
        "entries": (log.length, release.entries),
    }
    for field, (computed, cached) in shown.items():
        if computed != cached:
            yield Fault(stream=name, position=0, problem=f"{field} is {cached!r}, but its log says {computed!r}")
    signed = {
        "target": (created.target, target),
        "bundle": (created.bundle, release.bundle),
        "policy": (created.policy, release.policy),
        "references": (created.references, release.references),
        "predecessor": (created.predecessor, release.predecessor_id),
        "created_by": (log.author, release.created_by),
        "created_at": (log.stated_at, format_instant(release.created_at)),
    }
    for field, (claimed, cached) in signed.items():
        if claimed != cached:
            yield Fault(stream=name, position=1, problem=f"{field} is not the one that was signed")


def _document_faults(session: Session, project: UUID, stock: Stock) -> Iterator[Fault]:
    found = _label_rows(session, project)
    derived = (DocumentRow.serving_digest, DocumentRow.components, DocumentRow.labels)
    stored = (DocumentRow.kind.label("stored_kind"), DocumentRow.schema_id, DocumentRow.body, *derived)
    rows = session.execute(
        select(
            ProjectDocumentRow.digest,
            ProjectDocumentRow.kind,
            ProjectDocumentRow.name,
            ProjectDocumentRow.id,
            ProjectDocumentRow.deleted_at,
            ProjectDocumentRow.locks,
            *stored,
            EntryRow.id.label("entry"),
        )
        .outerjoin(DocumentRow, DocumentRow.digest == ProjectDocumentRow.digest)
        .outerjoin(
            EntryRow,
            and_(
                EntryRow.stream == func.concat(f"documents/{project}/", ProjectDocumentRow.digest),
                EntryRow.position == 1,
            ),
        )
        .where(ProjectDocumentRow.project_id == project)
        .order_by(ProjectDocumentRow.digest)
        .execution_options(yield_per=100)
    )
    for row in rows:
        stream, kind = documents.stream(project, row.digest), row.kind
        if row.body is None:
            yield Fault(stream=stream, position=0, problem=f"the {kind} is missing")
        elif sha256_digest(row.body) != row.digest:
            yield Fault(stream=stream, position=0, problem=f"the {kind}'s bytes do not have its digest")
        elif f'"schema":"{row.schema_id}"'.encode() not in row.body or row.stored_kind != kind:
            yield Fault(stream=stream, position=0, problem="it is kept as another kind of document than it is")
        elif kind != "bundle" and any(one is not None for one in (row.serving_digest, row.components, row.labels)):
            yield Fault(stream=stream, position=0, problem="it is kept with what only bundles have")
        elif kind == "bundle":
            document = strict_json(row.body)
            said = document.get("labels")
            marked = found.pop(row.digest, None)
            if row.labels != said or marked != ((said, {row.id}) if said else None):
                yield Fault(stream=stream, position=0, problem=_LABELS)
            yield from stock.bundle(row.digest, document["files"], is_deleted=row.deleted_at is not None)
        elif kind == "reference" and (row.name, row.deleted_at, row.locks) != (
            strict_json(row.body).get("suite"), None, None,
        ):  # fmt: skip
            yield Fault(stream=stream, position=0, problem="it is kept otherwise than references are")
        # A reference has its entry where it is put in force: on a target.
        if row.entry is None and kind != "reference":
            yield Fault(stream=stream, position=0, problem=f"the {kind} has no entry")
    for digest in sorted(found):
        yield Fault(stream=documents.stream(project, digest), position=0, problem=_LABELS)
    yield from _lost_documents(session, project)


_LABELS = "it is found by other labels than the bundle has"


def _lost_documents(session: Session, project: UUID) -> Iterator[Fault]:
    """What was registered is the project's for ever, deleted or not."""
    is_mine = (ProjectDocumentRow.project_id == project, ProjectDocumentRow.digest == func.right(EntryRow.stream, 71))
    registered = (EntryRow.project_id == project, EntryRow.kind.in_(documents.REGISTERED), EntryRow.position == 1)
    lost = select(EntryRow.stream).where(*registered, ~exists().where(*is_mine)).order_by(EntryRow.stream)
    for stream in session.scalars(lost):
        yield Fault(stream=stream, position=0, problem="what was registered is missing")


_KEPT = ("kind", "name", "created_by", "created_at", "serving_digest", "components", "locks")
"""What is kept of a registration beside its entry, and can be altered there."""


def _registration_faults(session: Session, project: UUID) -> Iterator[Fault]:
    """A document is kept as its last registration says. One without an entry is told elsewhere."""
    of = EntryRow.stream == func.concat(f"documents/{project}/", ProjectDocumentRow.digest)
    told = select(EntryRow.kind, EntryRow.actor, EntryRow.position, EntryRow.envelope)
    last = told.where(of, EntryRow.kind.in_(documents.REGISTERED)).order_by(EntryRow.position.desc()).limit(1).lateral()
    gone = select(EntryRow.position.label("gone"), EntryRow.envelope.label("farewell"))
    gone_last = (
        gone.where(of, EntryRow.kind == Kind.BUNDLE_DELETED).order_by(EntryRow.position.desc()).limit(1).lateral()
    )
    kept = (ProjectDocumentRow.kind, ProjectDocumentRow.name, ProjectDocumentRow.created_by)
    more = (ProjectDocumentRow.created_at, DocumentRow.serving_digest, DocumentRow.components, ProjectDocumentRow.locks)
    rows = session.execute(
        select(ProjectDocumentRow.digest, ProjectDocumentRow.deleted_at, *gone_last.c, *last.c, *kept, *more)
        .join(DocumentRow, DocumentRow.digest == ProjectDocumentRow.digest)
        .join(last, true())
        .outerjoin(gone_last, true())
        .where(ProjectDocumentRow.project_id == project)
        .order_by(ProjectDocumentRow.digest)
        .execution_options(yield_per=100)
    )
    for digest, deleted_at, deleted, farewell, entered, actor, position, envelope, *is_kept in rows:
        stream = documents.stream(project, digest)
        with suppress(ValueError):  # an entry that cannot be read is a fault already
            claim = claim_of(envelope)
            said = Registered.model_validate(claim["body"]).model_dump(mode="json")
            meant = said | {"kind": documents.REGISTERED.get(entered), "created_by": actor}
            meant["created_at"] = claim["stated_at"]
            for name, value in zip(_KEPT, is_kept, strict=True):
                is_so = format_instant(value) if name == "created_at" else value
                if _stated(is_so) != _stated(meant[name]):
                    yield Fault(stream=stream, position=0, problem=_OTHERWISE.get(name, f"its {name} is not as signed"))
        with suppress(ValueError):  # as above
            said_at = claim_of(farewell)["stated_at"] if deleted is not None and deleted > position else None
            if said_at != (None if deleted_at is None else format_instant(deleted_at)):
                yield Fault(stream=stream, position=0, problem="it is not deleted as its log says")


_OTHERWISE = {"locks": "its sources were not resolved as its log says"}


def _stated(locks: Any) -> Any:
    """Return locks without what is null: a field that came later is not in those that were stored before."""
    if not isinstance(locks, list):
        return locks
    return [
        {name: value for name, value in one.items() if value is not None} if isinstance(one, dict) else one
        for one in locks
    ]


def _quarantine_faults(session: Session, project: UUID) -> Iterator[Fault]:
    """A bundle is quarantined since its stream says so."""
    logs: dict[str, list[EntryRow]] = {}
    entries = session.scalars(
        select(EntryRow)
        .where(EntryRow.project_id == project, EntryRow.kind.in_(quarantine.KINDS))
        .order_by(EntryRow.stream, EntryRow.position)
    )
    for row in entries:
        logs.setdefault(row.stream, []).append(row)
    said = {stream: log[0].recorded_at for stream, rows in logs.items() if (log := quarantine.in_force(rows))}
    cached = {
        documents.stream(project, row.digest): row.quarantined_at
        for row in session.execute(
            select(ProjectDocumentRow.digest, ProjectDocumentRow.quarantined_at).where(
                ProjectDocumentRow.project_id == project, ProjectDocumentRow.quarantined_at.is_not(None)
            )
        )
    }
    for stream in sorted(said.keys() | cached.keys()):
        if said.get(stream) != cached.get(stream):
            yield Fault(stream=stream, position=0, problem="it is not quarantined as its log says")


def _lost_references(session: Session, project: UUID, said: dict[UUID, dict[str, str]]) -> Iterator[Fault]:
    """What was put in force is the project's for ever, in force or not."""
    named = {reference for references in said.values() for reference in references.values()}
    of = (ProjectDocumentRow.project_id == project, ProjectDocumentRow.kind == "reference")
    for reference in sorted(named.difference(session.scalars(select(ProjectDocumentRow.digest).where(*of)))):
        problem = "the reference that was put in force is missing"
        yield Fault(stream=documents.stream(project, reference), position=0, problem=problem)


def _alias_faults(session: Session, project: UUID) -> Iterator[Fault]:
    """An alias is as the last entry of its stream says."""
    said: dict[str, tuple[object, ...]] = {}
    entries = session.scalars(
        select(EntryRow)
        .where(EntryRow.project_id == project, EntryRow.kind.in_(aliases.KINDS))
        .order_by(EntryRow.stream, EntryRow.position)
    )
    for row in entries:
        with suppress(ValueError):  # an entry that cannot be read is a fault already
            body = AliasChanged.model_validate(claim_of(row.envelope)["body"])
            said[row.stream] = (body.bundle, body.is_protected, body.generation, row.recorded_at, row.actor)
    cached: dict[str, tuple[object, ...]] = {
        aliases.stream(project, row.name): (
            row.bundle,
            row.is_protected,
            row.generation,
            row.changed_at,
            row.changed_by,
        )
        for row in session.scalars(select(AliasRow).where(AliasRow.project_id == project))
    }
    for stream in sorted(said.keys() | cached.keys()):
        if said.get(stream) != cached.get(stream):
            yield Fault(stream=stream, position=0, problem="the alias is not as its log says")


def _alias_pattern_faults(session: Session, project: UUID) -> Iterator[Fault]:
    """The patterns that protect aliases are as the last entry about each says."""
    of, said = alias_patterns.stream(project), dict[str, tuple[object, ...] | None]()
    for row in evidence.read(session, of):
        with suppress(ValueError):  # an entry that cannot be read is a fault already
            body = AliasPatternChanged.model_validate(claim_of(row.envelope)["body"])
            said[body.pattern] = (body.movers, row.position, row.recorded_at, row.actor) if body.movers else None
    cached: dict[str, tuple[object, ...]] = {
        row.pattern: (row.movers, row.generation, row.set_at, row.set_by)
        for row in alias_patterns.every(session, project)
    }
    for pattern in sorted(said.keys() | cached.keys()):
        if said.get(pattern) != cached.get(pattern):
            yield Fault(stream=of, position=0, problem=f"the pattern {pattern} is not as its log says")


def _label_rows(session: Session, project: UUID) -> dict[str, tuple[dict[str, str], set[UUID]]]:
    """Return digest → labels that bundles are found by, and in which places of lists."""
    found: dict[str, tuple[dict[str, str], set[UUID]]] = {}
    query = select(ProjectLabelRow.digest, ProjectLabelRow.name, ProjectLabelRow.value, ProjectLabelRow.id)
    for digest, name, value, identity in session.execute(query.where(ProjectLabelRow.project_id == project)):
        labels, places = found.setdefault(digest, ({}, set()))
        labels[name] = value
        places.add(identity)
    return found


def _reference_faults(session: Session, project: UUID) -> Iterator[Fault]:
    """A target's references in force are those that its stream set last."""
    said: dict[UUID, dict[str, str]] = {}
    entries = session.scalars(
        select(EntryRow)
        .where(EntryRow.project_id == project, EntryRow.kind == Kind.REFERENCE_SET)
        .order_by(EntryRow.stream, EntryRow.position)
    )
    for row in entries:
        with suppress(ValueError):  # an entry that cannot be read is a fault already
            body = ReferenceSet.model_validate(claim_of(row.envelope)["body"])
            said.setdefault(UUID(row.stream.removeprefix("target/")), {})[body.suite] = body.reference
    yield from _lost_references(session, project, said)
    cached: dict[UUID, dict[str, str]] = {}
    in_force = session.execute(
        select(TargetReferenceRow.target_id, TargetReferenceRow.suite, TargetReferenceRow.reference)
        .join(TargetRow, TargetRow.id == TargetReferenceRow.target_id)
        .where(TargetRow.project_id == project)
    )
    for target, suite, reference in in_force:
        cached.setdefault(target, {})[suite] = reference
    for target in sorted(said.keys() | cached.keys()):
        if said.get(target, {}) != cached.get(target, {}):
            yield Fault(
                stream=f"target/{target}", position=0, problem="its references are not those that its log set last"
            )
