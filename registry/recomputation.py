"""Recomputing a gate's verdict from what is stored: its records, and the documents that they name.

The entry is checked first as `verification` does, then the records' bytes, then what they were measured with, and in
the end the whole result, field by field.
"""

from typing import Any
from uuid import UUID

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from gates import catalog
from gates.gate import EARLIER
from registry import documents, erasure, evidence, verification
from registry.logged import Logged
from registry.service import Service
from registry.tables import EntryRow
from schemas.common import format_instant, sha256_digest, strict_json
from schemas.evidence import Agreement, Envelope, Kind, Recomputation, Statement
from schemas.problems import InvalidDocument, NotFound
from schemas.result import GateResult


def recompute(session: Session, service: Service, project: UUID, entry_digest: str) -> Recomputation:
    """Compare a recorded result with what its own records give now.

    Returns:
        `same` only when the entry is as it was signed, its records are the bytes it names, and they give the same
        result bit for bit; `different` when any of that is not so; `erased` when evidence says that the records were
        erased on purpose; `impossible` when records or documents are not
        at hand, or were made by another version of the gate.

    Raises:
        NotFound: the project has no such entry.
        InvalidDocument: the entry is no gate's result.
    """
    row = session.scalar(select(EntryRow).where(EntryRow.project_id == project, EntryRow.entry_digest == entry_digest))
    if row is None:
        raise NotFound(f"there is no entry {entry_digest}", digest=entry_digest)
    if row.kind != Kind.GATE_RECORDED:
        raise InvalidDocument(
            f"the entry is {row.kind}; only {Kind.GATE_RECORDED} can be recomputed",
            errors=[{"pointer": "/entry_digest", "detail": f"must name an entry of kind {Kind.GATE_RECORDED}"}],
        )
    found = verification.verify(session, project, signer=service.signer.key_id, stream=row.stream)
    faults = [fault.problem for fault in found.faults if fault.position == row.position]
    try:
        recorded = GateResult.model_validate(evidence.claim_of(row.envelope)["body"])
    except (ValueError, LookupError) as error:
        problem = f"the entry cannot be read: {str(error).splitlines()[0]}"
        return _told(row, None, None, Agreement.DIFFERENT, [problem, *faults])
    if (gone := _erased(session, service, project, recorded)) is not None:
        return _told(row, recorded, None, Agreement.DIFFERENT if faults else Agreement.ERASED, [*faults, gone])
    now, lacking, wrong = _again(session, service, project, row, recorded)
    faults += wrong
    if now is not None:
        faults += _differences(recorded, now)
    outcome = Agreement.DIFFERENT if faults else Agreement.IMPOSSIBLE if now is None else Agreement.SAME
    return _told(row, recorded, now, outcome, faults + lacking)


def _erased(session: Session, service: Service, project: UUID, recorded: GateResult) -> str | None:
    """Return who erased a result's records, when and why; None when they are there, or are gone without that."""
    if recorded.records is None or service.blobs.exists(recorded.records):
        return None
    entry = erasure.erased(session, project, recorded.records)
    if entry is None:
        return None
    reason = evidence.claim_of(entry.envelope)["body"]["reason"]
    return f"its records were erased by {entry.actor} at {format_instant(entry.recorded_at)}: {reason}"


def _again(
    session: Session, service: Service, project: UUID, row: Logged, recorded: GateResult
) -> tuple[GateResult | None, list[str], list[str]]:
    """Return the result computed now, what is lacking for it, and what is wrong with what is there."""
    if recorded.records is None:
        return None, ["the result names no records"], []
    try:
        with service.blobs.open(recorded.records) as file:
            raw = file.read(catalog.MAX_RECORD_BYTES + 1)
    except (NotFound, ValueError):
        return None, [f"the records {recorded.records} are not in the store"], []
    if (digest := sha256_digest(raw)) != recorded.records:
        return None, [], [f"the records {recorded.records} are other bytes now: {digest}"]
    try:
        body = strict_json(raw, limit=catalog.MAX_RECORD_BYTES)
        named = {name: body[name] for name in ("bundle", "suite", "reference")}
        wrong = _mismatches(session, project, row, body)
    except (ValueError, LookupError, TypeError) as error:
        return None, [], [f"the records cannot be read: {str(error).splitlines()[0]}"]
    try:
        suite = documents.load_suite(session, project, named["suite"]) if named["suite"] else None
        reference = documents.load_reference(session, project, named["reference"]) if named["reference"] else None
        bundle = documents.load_bundle(session, project, named["bundle"], or_deleted=True)
        now = catalog.recompute(raw, suite, reference, bundle)
        if _differences(recorded, now):
            # What it is held to is what its own version would have told.
            older = (catalog.recompute(raw, suite, reference, bundle, manner) for manner in EARLIER)
            now = next((one for one in older if not _differences(recorded, one)), now)
        return now, [], wrong
    except NotFound as problem:
        return None, [problem.detail], wrong
    except (ValidationError, ValueError, TypeError) as error:
        return None, [str(error).splitlines()[0]], wrong


def _mismatches(session: Session, project: UUID, row: Logged, body: dict[str, Any]) -> list[str]:
    """Return how the records were measured with something else than the entry is about."""
    envelope = Envelope.model_validate(strict_json(row.envelope))
    statement = Statement.model_validate(strict_json(envelope.payload_bytes()))
    about = {subject.name: f"sha256:{subject.digest['sha256']}" for subject in statement.subject}
    wrong = []
    if about.get("bundle") != body["bundle"]:
        wrong.append(f"the records are of the bundle {body['bundle']}, the entry is about {about.get('bundle')}")
    if policy := about.get("policy"):
        rules = [rule.model_dump(mode="json", exclude_none=True) for rule in _rules(session, project, policy)]
        if body["rule"] not in rules:
            wrong.append("the records were judged by a rule that is none of the policy")
    return wrong


def _rules(session: Session, project: UUID, policy: str) -> list[Any]:
    try:
        return list(documents.load_policy(session, project, policy).gates)
    except NotFound:
        return []


def _differences(recorded: GateResult, now: GateResult) -> list[str]:
    before, after = (one.model_dump(mode="json", exclude_none=True) for one in (recorded, now))
    names = [name for name in GateResult.model_fields if name != "source" and before.get(name) != after.get(name)]
    short = {"gate", "verdict", "definition", "records", "duration_ms"}
    return [
        f"its {name} is {before.get(name)!r}, but its records say {after.get(name)!r}"
        if name in short
        else f"its {name} are not what its records say"
        for name in names
    ]


def _told(
    row: Logged, recorded: GateResult | None, now: GateResult | None, outcome: Agreement, faults: list[str]
) -> Recomputation:
    return Recomputation(
        entry_digest=row.entry_digest,
        stream=row.stream,
        position=row.position,
        gate=None if recorded is None else recorded.gate,
        recorded=None if recorded is None else recorded.verdict,
        recomputed=None if now is None else now.verdict,
        outcome=outcome,
        faults=faults,
    )
