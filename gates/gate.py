"""What a gate is: it measures slowly, then judges purely.

`measure` talks to the engine and returns raw records. `judge` turns records, rule, bundle, suite and reference
into a verdict and into nothing else, so that anybody can recompute the verdict later from the stored records.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates.endpoint import Endpoint
from gates.stage import Stage
from schemas.bundle import Bundle
from schemas.policy import CompatibilityRule, IntegrityRule, PlacementRule, StaticRule, SuiteRule
from schemas.reference import Reference
from schemas.result import Finding, Measurement, Severity, Verdict
from schemas.runner import EngineIdentity, Fingerprint
from schemas.suite import AnySuite

Records = dict[str, Any]
"""Raw records as JSON values. They come back from storage as untrusted input: `judge` checks what it reads."""

Rule = IntegrityRule | StaticRule | PlacementRule | CompatibilityRule | SuiteRule

MAX_FINDINGS = 500
MAX_TEXT = 4096


@dataclass(frozen=True, slots=True)
class GateContext:
    """What a gate may look at while it measures.

    `root` is the folder where the engine reads the bundle's files. `process_id` returns the pid of the live
    engine, or None when it is dead. `ready_ms` is the time from launch to ready. `progress` takes one line for
    people and may be called often. `before_boot` is the integrity pass that was taken before the engine started.
    `stage` is given to a gate that moves traffic: a private place where it may. `fingerprint` is the hardware.
    """

    bundle: Bundle
    root: Path
    rule: Rule
    suite: AnySuite | None = None
    reference: Reference | None = None
    endpoint: Endpoint | None = None
    engine: EngineIdentity | None = None
    process_id: Callable[[], int | None] = lambda: None
    ready_ms: int | None = None
    progress: Callable[[str], None] = lambda _: None
    before_boot: Records | None = None
    stage: Stage | None = None
    fingerprint: Fingerprint | None = None


def bounded(findings: Sequence[Finding]) -> list[Finding]:
    """Return at most MAX_FINDINGS of these, in their order; the first of each code and severity is among them.

    A warning that was cut off would wait for nobody's acceptance.
    """
    if len(findings) <= MAX_FINDINGS:
        return list(findings)
    first: dict[tuple[str, Severity], int] = {}
    for place, one in enumerate(findings):
        first.setdefault((one.code, one.severity), place)
    kept = set(list(first.values())[:MAX_FINDINGS])
    more = [place for place in range(len(findings)) if place not in kept][: MAX_FINDINGS - len(kept)]
    return [findings[place] for place in sorted(kept.union(more))]


def first_of(findings: Sequence[Finding]) -> list[Finding]:
    """Return at most MAX_FINDINGS of these, as versions before `bounded` did."""
    return list(findings[:MAX_FINDINGS])


@dataclass(frozen=True, slots=True)
class Manner:
    """How a version tells what it judged, where the verdict is the same."""

    bound: Callable[[Sequence[Finding]], list[Finding]] = bounded
    """Which findings a result has when there are more than it may have."""
    counts_none: bool = False
    """Whether golden also counts answers that part where the reference was undecided when there are none."""
    says_all: bool = False
    """Whether integrity says `All 1 files` of a bundle of one."""


NOW = Manner()
EARLIER = (
    Manner(says_all=True),
    Manner(counts_none=True, says_all=True),
    Manner(first_of, counts_none=True, says_all=True),
)
"""How earlier versions told it, the newest first: results of theirs are recomputed so."""


@dataclass(frozen=True, slots=True)
class JudgeInput:
    """All that a verdict may depend on."""

    rule: Rule
    records: Records
    bundle: Bundle
    suite: AnySuite | None = None
    reference: Reference | None = None
    manner: Manner = NOW


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict with one sentence that says why, and the numbers and findings it stands on.

    `against` is the accepted bundle that a drill took traffic back to.
    """

    verdict: Verdict
    summary: str
    measurements: Sequence[Measurement] = ()
    findings: Sequence[Finding] = ()
    against: str | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """One entry of the catalogue.

    `version` rises whenever the same records could get another verdict, or the same engine other records.
    `depends_on` names components of the bundle (`schemas.bundle.COMPONENTS`): a result stays valid for another
    bundle in which these are the same. `watches_process`: it blames the candidate itself when the engine dies or is
    restarted by what the gate does. `ends_engine`: it ends the engine on purpose, and says itself who answered.
    """

    name: str
    version: int
    depends_on: tuple[str, ...]
    measure: Callable[[GateContext], Records]
    judge: Callable[[JudgeInput], Judged]
    watches_process: bool = False
    ends_engine: bool = False


def finding(
    code: str,
    message: str,
    *,
    severity: Severity = Severity.BLOCK,
    file: str | None = None,
    pointer: str | None = None,
    found: object = None,
    expected: object = None,
    advice: str | None = None,
) -> Finding:
    """Make a finding, cutting texts that come from an engine or a file to what a finding may hold."""
    return Finding(
        code=code,
        severity=severity,
        message=clip(message),
        file=None if file is None else clip(file, 256),
        pointer=None if pointer is None else clip(pointer, 256),
        found=None if found is None else clip(str(found)),
        expected=None if expected is None else clip(str(expected)),
        advice=None if advice is None else clip(advice),
    )


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text of 1 to `limit` characters that UTF-8 can hold; what is cut off is marked with `…`."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8") or "(empty)"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def errored(summary: str, findings: Sequence[Finding] = (), measurements: Sequence[Measurement] = ()) -> Judged:
    """Return the verdict of a measurement that cannot be used, with a finding that says so when none is given."""
    findings = findings or [finding("instrument", summary)]
    return Judged(Verdict.ERRORED, clip(summary), measurements, findings)
