"""Verification of evidence from the database: chains, signatures, statements, and phases. Trusts no column."""

from collections.abc import Iterator
from itertools import groupby
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry import evidence, keys, lifecycle
from registry.tables import EntryRow, ReleaseRow, SigningKeyRow
from schemas.common import canonical_json, strict_json
from schemas.evidence import GENESIS, Envelope, Fault, Kind, Verification
from schemas.problems import TransitionRefused

MAX_FAULTS = 1000


def verify(session: Session, project: UUID, *, stream: str | None = None) -> Verification:
    """Recompute a project's evidence, or one stream of it.

    For each entry, in order:
      1. its position follows the one before, and `previous` is that entry's digest;
      2. its digest is that of its row;
      3. its envelope is canonical, closed, and signed by the key that the row names, valid at that time;
      4. its statement says the same stream, act, kind and actor as the row.
    Then, for a release: the fold of its log is the phase, pause and hold that the release shows; and every
    release has a log.

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
    return Verification(
        entries=entries, streams=streams, verified=entries > 0 and not faults, faults=faults[:MAX_FAULTS]
    )


def _stream_faults(log: list[EntryRow], known: dict[str, SigningKeyRow]) -> Iterator[Fault]:
    previous, position = GENESIS, 0
    for row in log:
        position += 1
        for problem in _entry_problems(row, position, previous, known.get(row.key_id)):
            yield Fault(stream=row.stream, position=row.position, problem=problem)
        previous, position = row.entry_digest, row.position


def _entry_problems(row: EntryRow, position: int, previous: str, key: SigningKeyRow | None) -> Iterator[str]:
    if row.position != position:
        yield f"position {position} is missing"
    if row.previous != previous:
        yield "its link does not name the entry before it"
    computed = evidence.link(row.act, row.envelope, row.kind, row.position, row.previous, row.recorded_at, row.stream)
    if computed != row.entry_digest:
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


def _release_faults(name: str, log: list[EntryRow], release: ReleaseRow | None) -> Iterator[Fault]:
    if release is None:
        yield Fault(stream=name, position=0, problem="its release is missing")
        return
    try:
        folded = lifecycle.fold(evidence.bodies(log))
    except (ValueError, KeyError, TransitionRefused) as error:
        yield Fault(stream=name, position=0, problem=f"the log cannot be folded: {str(error).splitlines()[0]}")
        return
    shown = {
        "phase": (folded.phase, release.phase),
        "phase_since": (folded.phase_since, release.phase_since),
        "is_paused": (folded.is_paused, release.is_paused),
        "held": (list(folded.held), release.held),
        "reason": (folded.reason, release.reason),
        "step": (folded.step, release.step),
        "weight_bp": (folded.weight_bp, release.weight_bp),
    }
    for field, (computed, cached) in shown.items():
        if computed != cached:
            yield Fault(stream=name, position=0, problem=f"{field} is {cached!r}, but its log says {computed!r}")
    first = evidence.claim_of(log[0].envelope)["body"]
    for field in ("bundle", "policy"):
        if Kind(log[0].kind) is Kind.CREATED and first[field] != getattr(release, field):
            yield Fault(stream=name, position=0, problem=f"{field} is not the one that was signed")
