"""The policy: which gates with which limits, how traffic moves, when it is taken back, who approves."""

import itertools
from decimal import Decimal
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from schemas.common import (
    BasisPoints,
    Closed,
    Digest,
    Document,
    Integer,
    Name,
    Positive,
    Ratio,
    Seconds,
    Text,
)


class IntegrityRule(Closed):
    """Every byte is hashed again where the engine reads it, before boot and after the last gate."""

    gate: Literal["integrity"] = Field(description="Gate name.")


class StaticRule(Closed):
    """Files, template, tokenizer, layout and contract fit each other, as far as can be known before boot."""

    gate: Literal["static"] = Field(description="Gate name.")


class PlacementRule(Closed):
    """Weights, cache and what is stated fit the memory of the runner's devices, for every sequence that is promised."""

    gate: Literal["placement"] = Field(description="Gate name.")
    activation_bytes: Integer = Field(
        description="Stated for activations and execution buffers on each device, from a measured high-water mark."
    )
    graph_bytes: Integer = Field(0, description="Stated for captured graphs and workspaces on each device.")
    headroom_bytes: Integer = Field(0, description="Left free on each device.")
    utilization: Ratio | None = Field(
        None, description="Share of a device that the engine may use; otherwise its launch argument's, or 0.90."
    )


class CompatibilityRule(Closed):
    """The engine boots, names the model, generates, keeps the wire format and survives malformed requests."""

    gate: Literal["compatibility"] = Field(description="Gate name.")
    boot_seconds: Seconds = Field(description="Longest time to ready.")
    answer_seconds: Seconds = Field(description="Longest time for one malformed request to be answered.")


class GoldenRule(Closed):
    """Prompt token ids equal the reference; output tokens equal it or diverge where the reference was undecided."""

    gate: Literal["golden"] = Field(description="Gate name.")
    suite: Digest = Field(description="Golden suite.")
    margin_nat: Ratio = Field(
        description="Largest reference margin, in nats, at which a first divergence still counts as numerical noise."
    )
    min_prompts: Positive = Field(description="Prompts that must have been compared.")


class LoadRule(Closed):
    """Open-loop load from one stored arrival plan, latency from the scheduled instant, failures infinite."""

    gate: Literal["load"] = Field(description="Gate name.")
    suite: Digest = Field(description="Load suite.")
    percentile: Ratio = Field(description="Gated percentile of TTFT, TPOT and E2E, such as 0.9.")
    confidence: Ratio = Field(description="Confidence with which a pass holds, such as 0.99.")
    requests: Positive = Field(description="Requests measured; the suite must plan exactly these.")
    ttft_ms: Positive = Field(description="Bound on time to first token, ms from the scheduled instant.")
    tpot_ms: Positive = Field(description="Bound on time per output token, ms.")
    e2e_ms: Positive = Field(description="Bound on end-to-end latency, ms from the scheduled instant.")
    attainment_min: Ratio = Field(description="Least lower bound of the share of requests that meet every bound.")
    error_max: Ratio = Field(description="Largest upper bound of the error ratio.")
    send_lag_ms: Positive = Field(
        description="Largest p99 send lag of our own generator; beyond it the run is errored."
    )


class StructuredRule(Closed):
    """Answers under a JSON Schema are instances of it, as two validators say, and come without delay or padding."""

    gate: Literal["structured"] = Field(description="Gate name.")
    suite: Digest = Field(description="Structured suite.")
    validity_min: Ratio = Field(description="Least lower bound (95 %) of the share of finished answers that are valid.")
    truncation_max: Ratio = Field(description="Largest upper bound (95 %) of the share of answers cut by max_tokens.")
    whitespace_max: Ratio = Field(description="Largest share of white space outside strings in an item's output.")
    whitespace_run_bytes: Positive = Field(description="Longest run of white space in an answer, in bytes.")
    compile_cold_ms: Positive = Field(description="Bound on what a schema adds to TTFT at its first use, ms.")
    compile_warm_ms: Positive = Field(description="Bound on what it adds when it is used again, ms.")
    answer_seconds: Seconds = Field(description="Longest time for one answer.")


class RollbackRule(Closed):
    """Traffic is taken back from the candidate to the target's accepted bundle, for every cause, on a private gateway.

    It ends the candidate's engine, so it stands after every gate that needs one.
    """

    gate: Literal["rollback"] = Field(description="Gate name.")
    suite: Digest = Field(
        description="Load suite: its plan is sent once for each cause, and its prompts ask who answers afterwards."
    )
    recovery_seconds: Seconds = Field(
        Decimal(120), description="Longest time from a trigger to the first answer of what traffic goes back to."
    )
    cold_recovery_seconds: Seconds | None = Field(
        None,
        description="The same where the engine of what traffic goes back to has to boot first. Absent: 600 seconds.",
    )
    lost_max: Integer = Field(
        0, description="Requests that may be lost, all causes together. A count: a drill is too short to prove a share."
    )


SuiteRule = GoldenRule | LoadRule | StructuredRule | RollbackRule
"""Rules that name a suite."""
GateRule = Annotated[
    IntegrityRule | StaticRule | PlacementRule | CompatibilityRule | SuiteRule, Field(discriminator="gate")
]


class Approval(Closed):
    """Who must agree before traffic moves."""

    required: Annotated[int, Field(ge=0, le=10, strict=True)] = Field(
        description="Approvals by different managers. 0 is recorded as `approval_not_required`."
    )


class Step(Closed):
    """One rest of the canary."""

    weight_bp: Annotated[BasisPoints, Field(ge=1)] = Field(description="Candidate's share in basis points.")
    hold_seconds: Seconds = Field(description="Least time at this weight.")
    min_requests: Positive = Field(description="Candidate requests that must have ended before the step can pass.")
    max_seconds: Seconds = Field(description="Longest time to wait for a decision; then the release holds.")


class ErrorRatioCondition(Closed):
    """Take traffic back when the candidate's error ratio is above `max_ratio`."""

    metric: Literal["error_ratio"] = Field(description="Metric.")
    max_ratio: Ratio = Field(description="Largest share of requests that may count against the arm.")


class TtftCondition(Closed):
    """Take traffic back when the candidate's TTFT percentile is above `max_ms`."""

    metric: Literal["ttft"] = Field(description="Metric.")
    percentile: Ratio = Field(description="Percentile, such as 0.9.")
    max_ms: Positive = Field(description="Bound in ms, measured at the gateway.")


StopCondition = Annotated[ErrorRatioCondition | TtftCondition, Field(discriminator="metric")]


class Canary(Closed):
    """How traffic moves to the candidate, and what takes it back."""

    steps: Annotated[list[Step], Field(min_length=1, max_length=32)] = Field(description="Rising weights, last 10,000.")
    stop_conditions: Annotated[list[StopCondition], Field(min_length=1, max_length=16)] = Field(
        description="Armed from the first shift to the end of the soak, also while paused or waiting."
    )
    soak_seconds: Seconds = Field(
        description="How long conditions stay armed, and the old replica warm, after promotion."
    )
    dead_man_seconds: Seconds = Field(
        description="Silence of the controller after which traffic goes back by itself; longer than another controller "
        "needs to take over."
    )
    drain_seconds: Seconds = Field(description="Longest wait for open streams before a replica is stopped.")

    @model_validator(mode="after")
    def _rising(self) -> Self:
        weights = [step.weight_bp for step in self.steps]
        if any(later <= earlier for earlier, later in itertools.pairwise(weights)) or weights[-1] != 10_000:
            raise ValueError("steps must rise strictly and end at 10000")
        for step in self.steps:
            if step.max_seconds < step.hold_seconds:
                raise ValueError("max_seconds must not be below hold_seconds")
        metrics = [condition.metric for condition in self.stop_conditions]
        if "error_ratio" not in metrics:
            raise ValueError("stop_conditions must hold an error_ratio condition")
        return self


class Policy(Document):
    """The frozen rules under which a release runs. Named by `digest`."""

    SCHEMA_ID: ClassVar[str] = "sluicegate.dev/policy/v1"

    schema_id: Literal["sluicegate.dev/policy/v1"] = Field(alias="schema", description="Schema of this document.")
    name: Name = Field(description="Family that the policy belongs to.")
    description: Text = Field(description="What it is for, and how strict its samples are.")
    gates: Annotated[list[GateRule], Field(min_length=1, max_length=32)] = Field(description="In the order they run.")
    approval: Approval = Field(description="Approval rule.")
    canary: Canary = Field(description="Traffic plan and stop conditions.")
    evidence_seconds: Seconds = Field(description="How long a gate result supports a promotion.")

    @model_validator(mode="after")
    def _gates(self) -> Self:
        names = [rule.gate for rule in self.gates]
        if len(set(names)) != len(names):
            raise ValueError("gates: each gate may stand once")
        if lacking := [always for always in ("integrity", "compatibility") if always not in names]:
            raise ValueError(f"gates: {' and '.join(lacking)} may not be left out; every other gate may")
        if "rollback" in names and set(names[names.index("rollback") + 1 :]) - {"integrity"}:
            raise ValueError("gates: rollback ends the candidate's engine; only integrity may stand after it")
        return self
