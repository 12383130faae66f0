"""Verification of evidence from the database: chains, signatures, statements, and phases. Trusts no column."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from registry import evidence, keys, lifecycle
from registry.tables import (
    DocumentRow,
    EntryRow,
    ProjectDocumentRow,
    ReleaseRow,
    SigningKeyRow,
    TargetReferenceRow,
    TargetRow,
)
from schemas.common import canonical_json, sha256_digest, strict_json
from schemas.evidence import BODIES, GENESIS, Created, Envelope, Fault, Kind, ReferenceSet, Verification
from schemas.problems import TransitionRefused

MAX_FAULTS = 1000


def verify(session: Session, project: UUID, *, stream: str | None = None) -> Verification:
    """Recompute a project's evidence, or one stream of it.

    For each entry, in order:
      1. its position and its sequence follow the ones before, and `previous` is that entry's digest;
      2. its digest is that of its row;
      3. its envelope is canonical, closed, and signed by the key that the row names, valid at that time;
      4. its statement says the same stream, act, kind and actor as the row, with a body of that kind.
    Then what is cached beside the log must be what the log says: a release's whole state and what it was created
    with; a target's references; and every release and document has its entry, and every document its bytes.

    What was cut off at the end of a stream shows only where something cached depends on it.

    Returns:
        What was read and everything that is wrong. Nothing read is not verified.
    """
    known = {row.key_id: row for row in keys.history(session)}
    query = select(EntryRow).where(EntryRow.project_id == project)
    if stream is not None:
        query = query.where(EntryRow.stream == stream)
    rows = session.scalars(query.order_by(EntryRow.stream, EntryRow.position).execution_options(yield_per=500))
    releases = {
        evidence.release_stream(row.id): row
        for row in session.scalars(select(ReleaseRow).where(ReleaseRow.project_id == project))
    }
    entries = streams = 0
    faults: list[Fault] = []
    for name, group in groupby(rows, key=lambda row: row.stream):
        streams += 1
        log = list(group)
        entries += len(log)
        faults += _stream_faults(log, known)
        if name.startswith("release/"):
            faults += _release_faults(name, log, releases.pop(name, None))
    missing = releases if stream is None else {k: v for k, v in releases.items() if k == stream}
    faults += [Fault(stream=name, position=0, problem="the release has no log") for name in sorted(missing)]
    if stream is None:
        faults += _document_faults(session, project)
        faults += _reference_faults(session, project)
    return Verification(
        entries=entries, streams=streams, verified=entries > 0 and not faults, faults=faults[:MAX_FAULTS]
    )


def _stream_faults(log: list[EntryRow], known: dict[str, SigningKeyRow]) -> Iterator[Fault]:
    previous, position, sequence = GENESIS, 0, 0
    for row in log:
        position += 1
        if row.sequence <= sequence:
            yield Fault(stream=row.stream, position=row.position, problem="its sequence is not above the one before")
        for problem in _entry_problems(row, position, previous, known.get(row.key_id)):
            yield Fault(stream=row.stream, position=row.position, problem=problem)
        previous, position, sequence = row.entry_digest, row.position, row.sequence


def _entry_problems(row: EntryRow, position: int, previous: str, key: SigningKeyRow | None) -> Iterator[str]:
    if row.position != position:
        yield f"position {position} is missing"
    if row.previous != previous:
        yield "its link does not name the entry before it"
    if evidence.link(row) != row.entry_digest:
        yield "its digest is not that of its row: a column or the envelope was altered"
    try:
        parsed = strict_json(row.envelope)
        envelope = Envelope.model_validate(parsed)
        if canonical_json(parsed) != row.envelope:
            yield "its envelope is not canonical"
        claim = evidence.claim_of(row.envelope)
    except ValueError as error:
        yield f"its envelope cannot be read: {str(error).splitlines()[0]}"
        return
    if key is None or envelope.signatures[0].keyid != row.key_id:
        yield "it was signed by a key that is not known"
        return
    if problem := keys.verify(envelope, key.public_key_pem):
        yield problem
    if row.recorded_at < key.valid_from or (key.valid_until is not None and row.recorded_at > key.valid_until):
        yield "it was signed outside its key's validity"
    for field in ("stream", "act", "kind", "actor"):
        if claim[field] != getattr(row, field):
            yield f"its {field} is not the one that was signed"
    try:
        BODIES[Kind(row.kind)].model_validate(claim["body"])
    except ValueError as error:
        yield f"its body is not that of its kind: {str(error).splitlines()[0]}"


def _release_faults(name: str, log: list[EntryRow], release: ReleaseRow | None) -> Iterator[Fault]:
    if release is None:
        yield Fault(stream=name, position=0, problem="its release is missing")
        return
    try:
        folded = lifecycle.fold(evidence.bodies(log))
        created = Created.model_validate(evidence.claim_of(log[0].envelope)["body"])
    except (ValueError, LookupError, TypeError, TransitionRefused) as error:
        yield Fault(stream=name, position=0, problem=f"the log cannot be folded: {str(error).splitlines()[0]}")
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
    }
    for field, (computed, cached) in shown.items():
        if computed != cached:
            yield Fault(stream=name, position=0, problem=f"{field} is {cached!r}, but its log says {computed!r}")
    signed = {
        "bundle": (created.bundle, release.bundle),
        "policy": (created.policy, release.policy),
        "references": (created.references, release.references),
        "predecessor": (created.predecessor, release.predecessor_id),
        "created_by": (log[0].actor, release.created_by),
    }
    for field, (claimed, cached) in signed.items():
        if claimed != cached:
            yield Fault(stream=name, position=1, problem=f"{field} is not the one that was signed")


def _document_faults(session: Session, project: UUID) -> Iterator[Fault]:
    rows = session.execute(
        select(ProjectDocumentRow.digest, ProjectDocumentRow.kind, DocumentRow.body, EntryRow.id)
        .join(DocumentRow, DocumentRow.digest == ProjectDocumentRow.digest)
        .outerjoin(EntryRow, EntryRow.stream == func.concat(f"documents/{project}/", ProjectDocumentRow.digest))
        .where(ProjectDocumentRow.project_id == project)
        .order_by(ProjectDocumentRow.digest)
        .execution_options(yield_per=100)
    )
    for digest, kind, body, entry in rows:
        stream = f"documents/{project}/{digest}"
        if sha256_digest(body) != digest:
            yield Fault(stream=stream, position=0, problem=f"the {kind}'s bytes do not have its digest")
        # A reference has its entry where it is put in force: on a target.
        if entry is None and kind != "reference":
            yield Fault(stream=stream, position=0, problem=f"the {kind} has no entry")


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
            body = ReferenceSet.model_validate(evidence.claim_of(row.envelope)["body"])
            said.setdefault(UUID(row.stream.removeprefix("target/")), {})[body.suite] = body.reference
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
