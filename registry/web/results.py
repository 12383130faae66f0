"""One gate's result as a page: what was measured against which limit, what was found, and a load run drawn."""

from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Path
from fastapi.responses import Response
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from gates.errors import InstrumentError
from gates.load_records import Run, read_run
from registry import db, documents, erasure, evidence, jobs, releases
from registry.api.deps import ServiceDep, SessionDep
from registry.logged import Logged
from registry.service import Service
from registry.tables import EntryRow, JobRow, RecordRow, ReleaseRow
from registry.web.curves import Curve, curves
from registry.web.rendering import PageRoute, render
from registry.web.visitors import VisitorDep
from schemas.common import format_instant, strict_json
from schemas.evidence import Kind
from schemas.policy import GateRule, LoadRule, SuiteRule
from schemas.problems import DigestMismatch, NotFound, Problem
from schemas.result import GateResult, Measurement, Severity
from schemas.short import many
from schemas.stories import TONES
from schemas.suite import LoadSuite

MOST_DRAWN_BYTES = 8 * 1024 * 1024
"""Largest records that are read for a page."""

router = APIRouter(include_in_schema=False, route_class=PageRoute)
_RULE: TypeAdapter[GateRule] = TypeAdapter(GateRule)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The curves of a load run, and why there are none."""

    curves: list[Curve]
    has_before: bool = False
    why_not: str | None = None


@router.get("/results/{entry}")
def result_page(
    entry: Annotated[str, Path(pattern=r"^sha256:[0-9a-f]{64}$")],
    actor: VisitorDep,
    session: SessionDep,
    service: ServiceDep,
) -> Response:
    """Show what a gate measured on a bundle, by the digest of its entry."""
    row = _entry(session, actor.project_id, entry)
    claim = evidence.claim_of(row.envelope)
    result = GateResult.model_validate(claim["body"])
    release = UUID(row.stream.removeprefix("release/")) if row.stream.startswith("release/") else None
    run = UUID(row.stream.removeprefix("run/")) if row.stream.startswith("run/") else None
    measured = _measured(session, actor.project_id, row.stream)
    policy = None if measured is None else measured.policy
    suite = next((one.suite for one in _rules(session, policy) if one.gate == result.gate), None)
    return render(
        "result.html",
        actor=actor,
        section="releases",
        result=result,
        entry=evidence.wire(row),
        release=release,
        run=run,
        policy=policy,
        suite=suite,
        reference=measured.references.get(suite) if measured is not None and suite is not None else None,
        names=documents.names(session, actor.project_id, [one for one in (policy, suite) if one]),
        revoked=_revoked(session, row),
        erased=_erased(session, actor.project_id, result),
        sample=_sample,
        numbers=[(one, _number(one.value, one.unit), _number(one.limit, one.unit)) for one in result.measurements],
        interval=_interval,
        drawn=_drawn(session, service, actor.project_id, result, release) if result.gate == "load" else None,
        tones=TONES,
        now=db.now(session),
    )


def _entry(session: Session, project: UUID, digest: str) -> Logged:
    row = session.scalar(select(EntryRow).where(EntryRow.project_id == project, EntryRow.entry_digest == digest))
    if row is None or row.kind != Kind.GATE_RECORDED:
        raise NotFound(f"there is no gate result {digest}")
    return row


def _revoked(session: Session, row: Logged) -> str | None:
    """Return who said that a result counts no more, when and why; None where nobody did."""
    for entry in evidence.read(session, row.stream):
        if entry.kind == Kind.EVIDENCE_REVOKED:
            body = evidence.claim_of(entry.envelope)["body"]
            if body["entry"] == row.entry_digest:
                return f"{entry.actor} said so at {format_instant(entry.recorded_at)}: {body['reason']}"
    return None


def _erased(session: Session, project: UUID, result: GateResult) -> str | None:
    """Return who erased a result's records, when and why; None where they are kept."""
    record = None if result.records is None else session.get(RecordRow, (project, result.records))
    if record is None or record.erased_at is None:
        return None
    entry = erasure.erased(session, project, record.digest)
    if entry is None:
        return "its records are not kept any more"
    reason = evidence.claim_of(entry.envelope)["body"]["reason"]
    return f"its records were erased by {entry.actor} at {format_instant(entry.recorded_at)}: {reason}"


def _measured(session: Session, project: UUID, stream: str) -> ReleaseRow | JobRow | None:
    """Return the release or run in whose log a result stands."""
    kind, _, identity = stream.partition("/")
    if kind == "release":
        return releases.get(session, project, UUID(identity))
    return jobs.get(session, project, UUID(identity)) if kind == "run" else None


def _rules(session: Session, policy: str | None) -> list[SuiteRule]:
    gates = [] if policy is None else documents.bound_policy(session, policy).gates
    return [rule for rule in gates if isinstance(rule, SuiteRule)]


def _drawn(session: Session, service: Service, project: UUID, result: GateResult, release: UUID | None) -> _Drawn:
    try:
        run, rule = _run(session, service, project, result)
    except (Problem, InstrumentError, ValidationError, LookupError, TypeError, ValueError) as error:
        return _Drawn([], why_not=str(error).splitlines()[0] if str(error) else "its records cannot be read")
    before = None if release is None else _before(session, service, project, rule, release)
    return _Drawn(curves(run, rule, before), has_before=before is not None)


def _run(session: Session, service: Service, project: UUID, result: GateResult) -> tuple[Run, LoadRule]:
    """Return a load run from its records. Raises NotFound, InstrumentError and what bad bytes raise."""
    if result.records is None:
        raise NotFound("the result names no records")
    with service.blobs.open(result.records, is_verified=True) as file:
        raw = file.read(MOST_DRAWN_BYTES + 1)
    if len(raw) > MOST_DRAWN_BYTES:
        raise NotFound("its records are too large to be drawn")
    body = strict_json(raw, limit=MOST_DRAWN_BYTES)
    rule, suite = _RULE.validate_python(body["rule"]), documents.load_suite(session, project, body["suite"])
    if not isinstance(rule, LoadRule) or not isinstance(suite, LoadSuite):
        raise NotFound("its records are no load run's")
    return read_run(body["records"], suite, requests=rule.requests), rule


def _before(session: Session, service: Service, project: UUID, rule: LoadRule, release: UUID) -> Run | None:
    """Return the run of the release that was live before, from the same suite; None where there is none to be had."""
    predecessor = releases.get(session, project, release).predecessor_id
    if predecessor is None:
        return None
    gates = releases.detail(session, releases.get(session, project, predecessor)).gates
    entry = next((one.entry for one in gates if one.gate == "load"), None)
    if entry is None:
        return None
    try:
        row = _entry(session, project, entry)
        result = GateResult.model_validate(evidence.claim_of(row.envelope)["body"])
        run, other = _run(session, service, project, result)
    except (NotFound, DigestMismatch, InstrumentError, ValidationError, LookupError, TypeError, ValueError):
        return None
    return run if other.suite == rule.suite else None


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "—"
    if unit == "ratio":
        return f"{value:.2%}"
    if unit == "bytes":
        return f"{value:,.0f}"
    shown = f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"
    return f"{shown} {unit}" if unit in ("ms", "s") else shown


SAMPLES = {
    "output_tokens_equal": "prompt",
    "cached_prompt_tokens": "prompt",
    **dict.fromkeys((f"findings_{severity}" for severity in Severity), "finding"),
}
"""Count → what its sample is of, where its name does not say."""


def _sample(one: Measurement) -> str:
    sample = many(one.n, SAMPLES[one.name]) if one.name in SAMPLES else str(one.n)
    if one.k is None:
        return f"in {sample}" if one.name in SAMPLES else sample
    # The value of a count says already how many of them it is.
    return f"of {sample}" if one.unit == "count" and one.value == one.k else f"{one.k} of {sample}"


def _interval(one: Measurement) -> str:
    if one.low is None or one.high is None:
        return "—"
    return f"{_number(one.low, one.unit)} to {_number(one.high, one.unit)}"
