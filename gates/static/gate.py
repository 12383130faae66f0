"""The static gate of a policy: the composition as it lies where the engine will read it, before anything is started.

Its records are what the checks found and the names of the checks that ran, so that the verdict can be computed again
from them; and since files are named by their digests, anybody can run the checks themselves again with
`sluicegate bundle validate`.
"""

import json
from typing import Any

from gates.errors import InstrumentError
from gates.gate import Gate, GateContext, Judged, JudgeInput, Records, clip, errored, finding
from gates.static.composition import of_bundle
from gates.static.examine import CHECKS, examine, verdict_of
from gates.static.flaw import Flaw, read_flaw
from schemas.common import canonical_json
from schemas.result import MAX_TOLD_BYTES, Finding, Measurement, Severity, Verdict

MAX_SAFE = 2**53
_TEXT = 2000


def measure(context: GateContext) -> Records:
    """Run every check over the bundle's files.

    Raises:
        InstrumentError: a file cannot be read.
    """
    try:
        found = examine(of_bundle(context.bundle, context.root), progress=context.progress)
    except OSError as error:
        raise InstrumentError(f"The files could not be read: {error.strerror or error}.") from None
    return {
        "checks": list(CHECKS),
        "flaws": [_storable(one.as_json()) for one in found.flaws],
        "inferred": _storable(found.inferred),
    }


def judge(given: JudgeInput) -> Judged:
    """Judge what the checks found: anything that blocks fails; errored unless every check ran."""
    missing = [name for name in CHECKS if name not in given.records["checks"]]
    if missing:
        return errored(f"The checks {', '.join(missing)} did not run; run the gate again.")
    flaws = tuple(read_flaw(one) for one in given.records["flaws"])
    verdict = verdict_of(flaws)
    findings = given.manner.bound([as_finding(one) for one in flaws])
    counts = {severity: sum(1 for one in flaws if one.severity is severity) for severity in Severity}
    measurements = [
        Measurement(name=f"findings_{severity}", unit="count", statistic="value", value=count, n=len(flaws), k=count)
        for severity, count in counts.items()
    ]
    if verdict is Verdict.FAILED:
        more = f" ({counts[Severity.BLOCK]} findings block.)" if counts[Severity.BLOCK] > 1 else ""
        return Judged(verdict, clip(flaws[0].message + more), measurements, findings)
    warned = f"; {counts[Severity.WARN]} findings warn" if counts[Severity.WARN] else ""
    return Judged(verdict, f"{len(CHECKS)} groups of checks found nothing that blocks{warned}.", measurements, findings)


def as_finding(one: Flaw) -> Finding:
    """Return a flaw as a finding of a result, with its values as `bundle validate` gives them."""
    told = finding(one.code, one.message, severity=one.severity, file=one.file, pointer=one.pointer, advice=one.advice)
    return told.model_copy(update={"found": _value(one.found), "expected": _value(one.expected)})


def _value(value: Any) -> Any:
    """Return a value as a finding holds it; the JSON of one that is too large, cut, as text."""
    if value is None or isinstance(value, str):
        return None if value is None else clip(value)
    storable = _storable(value)
    if len(canonical_json(storable)) <= MAX_TOLD_BYTES:
        return storable
    return clip(json.dumps(storable, ensure_ascii=False))


def _storable(value: Any) -> Any:
    """Return what canonical JSON holds: numbers that every reader knows, and texts of a bounded length."""
    if isinstance(value, dict):
        return {clip(str(key), _TEXT): _storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(item) for item in value]
    if isinstance(value, str):
        return clip(value, _TEXT) if value else value
    if type(value) is int and abs(value) >= MAX_SAFE:
        return str(value)
    return value


GATE = Gate(
    name="static",
    version=2,
    depends_on=(
        *("weights", "tokenizer", "template", "quantization", "adapters", "draft", "engine", "topology", "hardware"),
        *("runtime", "serving"),
    ),
    measure=measure,
    judge=judge,
)
