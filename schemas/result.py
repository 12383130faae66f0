"""What a gate says: verdict, measurements, findings."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue

from schemas.common import Closed, Digest, Integer, Name, ShortText, Text, canonical_json


class Verdict(StrEnum):
    """Outcome of a gate. Only `passed` passes."""

    PASSED = "passed"
    FAILED = "failed"
    """The candidate is bad."""
    ERRORED = "errored"
    """It could not be found out: the instrument failed."""
    INCONCLUSIVE = "inconclusive"
    """The data cannot decide."""
    ABORTED = "aborted"
    """Stopped before it ended."""


class Severity(StrEnum):
    """How much a finding weighs."""

    BLOCK = "block"
    WARN = "warn"
    INFO = "info"


class Measurement(Closed):
    """A number, its unit, its statistic and the sample it stands on."""

    name: ShortText = Field(description="Metric, such as ttft.")
    unit: ShortText = Field(description="ms, ratio, count, bytes, tokens_per_second …")
    statistic: ShortText = Field(description="value, mean, max, p90, upper_bound_95 …")
    value: float | None = Field(
        None, description="The value; absent when it is infinite or undefined.", allow_inf_nan=False
    )
    n: Integer = Field(description="Sample size.")
    k: Integer | None = Field(None, description="Events among n, for a proportion.")
    infinite: Integer | None = Field(None, description="How many of n are infinite, such as failed requests.")
    low: float | None = Field(None, description="Lower end of the interval.", allow_inf_nan=False)
    high: float | None = Field(None, description="Upper end of the interval.", allow_inf_nan=False)
    limit: float | None = Field(None, description="The limit it was held against.", allow_inf_nan=False)


MAX_TEXT = 4096
MAX_TOLD_BYTES = 16_384
"""Of a value in a finding, as canonical JSON."""


def _told(value: JsonValue) -> JsonValue:
    if isinstance(value, str) and not 1 <= len(value) <= MAX_TEXT:
        raise ValueError(f"a text has 1 to {MAX_TEXT} characters")
    if len(canonical_json(value)) > MAX_TOLD_BYTES:
        raise ValueError(f"must be at most {MAX_TOLD_BYTES} bytes of JSON")
    return value


Told = Annotated[JsonValue, AfterValidator(_told)]


class Finding(Closed):
    """One thing that was found, where, and what to do about it."""

    code: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=80)] = Field(
        description="Stable reason code."
    )
    severity: Severity = Field(description="block, warn or info.")
    message: Text = Field(description="One sentence.")
    file: ShortText | None = Field(None, description="File it concerns.")
    pointer: ShortText | None = Field(None, description="JSON Pointer or item id.")
    found: Told | None = Field(None, description="What was found: a text, or the JSON value itself.")
    expected: Told | None = Field(None, description="What was expected, likewise.")
    advice: Text | None = Field(None, description="What to do.")


class GateResult(Closed):
    """Result of one gate on one bundle: the body that becomes evidence."""

    gate: Name = Field(description="Gate name.")
    definition: Digest = Field(description="Digest of the gate's code version and the policy's rule for it.")
    verdict: Verdict = Field(description="passed, failed, errored, inconclusive or aborted.")
    summary: Text = Field(description="One sentence that says why.")
    measurements: Annotated[list[Measurement], Field(max_length=500)] = Field(description="What was measured.")
    findings: Annotated[list[Finding], Field(max_length=500)] = Field(description="What was found.")
    records: Digest | None = Field(None, description="Blob of raw records from which the verdict can be recomputed.")
    against: Digest | None = Field(
        None, description="Accepted bundle that a drill took traffic back to; absent where there was none."
    )
    duration_ms: Integer = Field(description="How long the gate took, in ms.")
    source: Literal["run", "reused"] = Field(description="Measured now, or reused evidence.")
