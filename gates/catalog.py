"""The catalogue of gates, and the one way from a measurement to a result with its records."""

import time
from typing import Any

from pydantic import TypeAdapter

from gates import compatibility, consistency, golden, identity, integrity, load, rollback, structured
from gates.errors import InstrumentError
from gates.gate import NOW, Gate, GateContext, Judged, JudgeInput, Manner, Records, Rule, clip, errored
from gates.placement import gate as placement
from gates.pulse import STILL_SECONDS, Pulse
from gates.static import gate as static
from schemas.bundle import Bundle
from schemas.common import canonical_json, sha256_digest, strict_json
from schemas.policy import GateRule
from schemas.reference import Reference
from schemas.result import GateResult, Verdict
from schemas.suite import AnySuite

GATES = (
    integrity.GATE,
    static.GATE,
    placement.GATE,
    compatibility.GATE,
    golden.GATE,
    structured.GATE,
    load.GATE,
    rollback.GATE,
)
CATALOG: dict[str, Gate] = {gate.name: gate for gate in GATES}
"""Every gate that a policy may name."""

MAX_RECORD_BYTES = 512 * 1024 * 1024

_RULE: TypeAdapter[Rule] = TypeAdapter(GateRule)
_KEYS = {"gate", "version", "rule", "suite", "reference", "bundle", "duration_ms", "records"}
_MORE_KEYS = {"identity"}
"""Of gates that ask an engine."""


def run(gate_name: str, context: GateContext, *, still_seconds: float = STILL_SECONDS) -> tuple[GateResult, bytes]:
    """Measure and judge one gate.

    Args:
        gate_name: key of CATALOG.
        context: what to measure.
        still_seconds: how long this process may stand still before it blames no engine for an answer that was late.

    Returns:
        The result and its raw records as canonical JSON, whose digest the result names. A measurement that fails
        (InstrumentError) gives the verdict `errored`, never an exception.
    """
    started = time.monotonic()
    gate = CATALOG[gate_name]
    before = None if gate.ends_engine else identity.look(context)
    with Pulse() as pulse:
        try:
            records = gate.measure(context)
        except InstrumentError as error:
            records = {"instrument": str(error)}
    duration_ms = _since(started)
    seen = None if before is None else {"before": before, "after": identity.look(context)}
    result, raw = conclude(gate_name, context, records, duration_ms=duration_ms, seen=seen)
    if result.verdict is Verdict.FAILED and context.endpoint is not None and pulse.longest_seconds > still_seconds:
        reason = (
            f"This process stood still for {pulse.longest_seconds:.1f} s while it asked the engine ({result.summary})"
        )
        return conclude(gate_name, context, {"instrument": reason}, duration_ms=duration_ms, seen=seen)
    return result, raw


def conclude(
    gate_name: str, context: GateContext, records: Records, *, duration_ms: int, seen: Records | None = None
) -> tuple[GateResult, bytes]:
    """Judge records that were measured elsewhere, such as an integrity pass that already shows a wrong byte.

    Args:
        gate_name: key of CATALOG.
        context: only its documents are read.
        records: what the gate's `measure` would have returned, or `{"instrument": reason}`.
        duration_ms: how long the measurement took.
        seen: the engine's identity before and after, when one was asked.
    """
    body = {
        "gate": gate_name,
        "version": CATALOG[gate_name].version,
        "rule": context.rule.model_dump(mode="json", exclude_none=True),
        "suite": None if context.suite is None else context.suite.digest,
        "reference": None if context.reference is None else context.reference.digest,
        "bundle": context.bundle.digest,
        "duration_ms": duration_ms,
        "records": records,
    }
    if seen is not None:
        body["identity"] = seen
    try:
        raw = canonical_json(body)
    except ValueError as error:
        # An engine's answer can hold what JSON allows and canonical JSON does not, such as half a character.
        raw = canonical_json(body | {"records": {"instrument": f"The records cannot be stored: {error}."}})
    # Judged from the bytes that are stored, so that a later recomputation reads the very same values.
    return recompute(raw, context.suite, context.reference, context.bundle), raw


def recompute(
    record_bytes: bytes,
    suite: AnySuite | None,
    reference: Reference | None,
    bundle: Bundle,
    manner: Manner = NOW,
) -> GateResult:
    """Return the result that these records give, bit for bit the one that was recorded.

    `manner` is how it is told: `EARLIER` are those of versions before.

    Raises:
        ValueError: the bytes are no record of a gate, are of another version of it, or name another bundle, suite
            or reference than those given.
    """
    body = strict_json(record_bytes, limit=MAX_RECORD_BYTES)
    gate = CATALOG.get(body["gate"]) if isinstance(body, dict) and "gate" in body else None
    if gate is None or body.keys() - _MORE_KEYS != _KEYS:
        raise ValueError("these bytes are no record of a gate that this version knows")
    if body["version"] != gate.version:
        raise ValueError(f"recorded by version {body['version']} of {gate.name}; this is version {gate.version}")
    documents = {"bundle": bundle, "suite": suite, "reference": reference}
    for name, document in documents.items():
        if body[name] != (None if document is None else document.digest):
            raise ValueError(f"these records were measured with another {name}: {body[name]}")
    rule = _RULE.validate_python(body["rule"])
    records = body["records"] if isinstance(body["records"], dict) else {"instrument": "The records are no object."}
    judged = _judge(gate, JudgeInput(rule, records, bundle, suite, reference, manner), body.get("identity"))
    return GateResult(
        gate=gate.name,
        definition=definition(gate.name, rule),
        verdict=judged.verdict,
        summary=clip(judged.summary),
        measurements=list(judged.measurements),
        findings=list(judged.findings),
        records=sha256_digest(record_bytes),
        against=judged.against,
        duration_ms=body["duration_ms"],
        source="run",
    )


def definition(gate_name: str, rule: Rule) -> str:
    """Return the digest of a gate's definition: its name, the version of its code, and the rule."""
    version = CATALOG[gate_name].version
    body = {"gate": gate_name, "version": version, "rule": rule.model_dump(mode="json", exclude_none=True)}
    return sha256_digest(canonical_json(body))


def _judge(gate: Gate, given: JudgeInput, seen: Any) -> Judged:
    if "instrument" in given.records:
        return errored(str(given.records["instrument"]) or "The measurement failed without a reason.")
    try:
        judged = consistency.held_to_itself(gate.judge(given))
        if seen is None or (gate.watches_process and judged.verdict is Verdict.FAILED):
            return judged
        return identity.held_to(judged, seen)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # Records come from storage: what is missing or of another type must never be read as good.
        return errored(f"The records cannot be read ({type(error).__name__}: {error}); run the gate again.")


def _since(started: float) -> int:
    return max(0, round((time.monotonic() - started) * 1000))
