"""Reads the raw records of a load run: one sample a request, checked against the plan. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gates.crowding import Machine, read_machine
from gates.errors import InstrumentError
from schemas.suite import Arrival, LoadSuite

COLUMNS = (
    "number",
    "prompt",
    "at_us",
    "sent_us",
    "headers_us",
    "event_us",
    "token_us",
    "last_us",
    "finish_us",
    "done_us",
    "status",
    "outcome",
    "detail",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "events",
    "output",
)
"""What a row holds, in this order; `gates.load_client.Shot` says what each is."""

_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens", "events")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of the run.

    All latencies count from the planned instant, so that a request that had to wait for its turn has waited. A
    failed request never ended: its latencies are infinite. The last token is the event with the finish reason,
    which stands for the end-of-turn token that carries no text; in an answer of three tokens the difference is half.
    """

    prompt: str
    at_us: int
    sent_us: int | None
    token_us: int | None
    finish_us: int | None
    done_us: int
    outcome: str
    detail: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    events: int

    @property
    def is_failed(self) -> bool:
        """Whether no user got a whole answer from it."""
        return self.outcome != "ok"

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from the planned instant to the first output."""
        return math.inf if self.is_failed or self.token_us is None else (self.token_us - self.at_us) / 1000

    @property
    def e2e_ms(self) -> float:
        """Milliseconds from the planned instant to the last token."""
        return math.inf if self.is_failed or self.finish_us is None else (self.finish_us - self.at_us) / 1000

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per token after the first.

        An answer of one token has none: 0 when the model chose to stop there, infinite when it was cut.
        """
        if self.is_failed or self.token_us is None or self.finish_us is None or self.completion_tokens is None:
            return math.inf
        if self.completion_tokens <= 1:
            return 0.0 if self.finish_reason == "stop" else math.inf
        return (self.finish_us - self.token_us) / 1000 / (self.completion_tokens - 1)

    @property
    def lag_us(self) -> int | None:
        """Microseconds by which our generator sent it late."""
        return None if self.sent_us is None else self.sent_us - self.at_us


@dataclass(frozen=True, slots=True)
class Harness:
    """What the generator says about itself."""

    loop_lag_us: tuple[int, ...]
    cpu_us: int
    wall_us: int
    in_flight_max: int
    cap: int
    has_precedence: bool
    machine: Machine | None = None
    """None in records of versions that did not look, and where the engine's processor time could not be seen."""


@dataclass(frozen=True, slots=True)
class Run:
    """All of a run: the warm-up before instant 0, the measured requests after it, and the generator."""

    warmup: tuple[Sample, ...]
    samples: tuple[Sample, ...]
    harness: Harness
    engine_pids: tuple[int | None, int | None]


def read_run(records: dict[str, Any], suite: LoadSuite, *, requests: int) -> Run:
    """Read records and check that they are of this plan, whole and possible.

    Args:
        records: as `gates.load` stored them.
        suite: whose plan was run.
        requests: how many the rule wants.

    Raises:
        InstrumentError: a request or a warm-up request is missing, was never sent nor dropped, is not the planned
            one, or has instants that cannot be.
        LookupError, TypeError, ValueError: the records are no records of a load.
    """
    if not requests == len(suite.plan) == len(records["requests"]):
        raise InstrumentError(
            f"{len(records['requests'])} requests were recorded, {len(suite.plan)} planned and {requests} are"
            " required; run the gate again with a policy that fits its suite."
        )
    if len(records["warmup"]) != len(suite.warmup):
        raise InstrumentError(f"{len(records['warmup'])} of {len(suite.warmup)} warm-up requests were recorded.")
    if tuple(records["columns"]) != COLUMNS:
        raise InstrumentError("The records have other columns than this version writes; run the gate again.")
    start_us = suite.warmup[-1].at_us
    timeout_us = int(suite.request_seconds * 1_000_000)
    harness = records["harness"]
    before, after = (None if pid is None else _count(pid) for pid in records["engine_pids"])
    return Run(
        _samples(records["warmup"], suite.warmup, start_us=start_us, timeout_us=timeout_us),
        _samples(records["requests"], suite.plan, start_us=0, timeout_us=timeout_us),
        Harness(
            loop_lag_us=tuple(_count(lag) for lag in harness["loop_lag_us"]),
            cpu_us=_count(harness["cpu_us"]),
            wall_us=_count(harness["wall_us"]),
            in_flight_max=_count(harness["in_flight_max"]),
            cap=_count(harness["cap"]),
            has_precedence=harness["has_precedence"] is True,
            machine=read_machine(harness.get("machine")),
        ),
        (before, after),
    )


def _samples(
    rows: Sequence[Sequence[Any]], plan: Sequence[Arrival], *, start_us: int, timeout_us: int
) -> tuple[Sample, ...]:
    return tuple(
        _sample(dict(zip(COLUMNS, row, strict=True)), arrival.at_us - start_us, arrival.prompt, timeout_us=timeout_us)
        for row, arrival in zip(rows, plan, strict=True)
    )


def _sample(row: dict[str, Any], at_us: int, prompt: str, *, timeout_us: int) -> Sample:
    name = f"Request {row['number']}"
    if row["at_us"] != at_us or row["prompt"] != prompt:
        raise InstrumentError(f"{name} is not the planned one; run the gate again.")
    if not isinstance(row["outcome"], str) or row["done_us"] is None:
        raise InstrumentError(f"{name} has no end on record; run the gate again.")
    instants = {key: _instant(row[key]) for key in ("sent_us", "token_us", "finish_us", "done_us")}
    order = [at_us, *(instant for instant in instants.values() if instant is not None)]
    if order != sorted(order):
        raise InstrumentError(f"{name} has instants in an impossible order: {order}.")
    if instants["sent_us"] is None and row["outcome"] != "dropped":
        raise InstrumentError(f"{name} was neither sent nor dropped; run the gate again.")
    if row["outcome"] == "ok" and (instants["token_us"] is None or instants["finish_us"] is None):
        raise InstrumentError(f"{name} ended well without a token or a finish; run the gate again.")
    outcome = row["outcome"]
    if outcome == "ok" and instants["finish_us"] is not None and instants["finish_us"] - at_us > timeout_us:
        outcome = "timeout"  # the transport's clock started when it was sent, the user's when it was planned
    return Sample(
        prompt=prompt,
        at_us=at_us,
        sent_us=instants["sent_us"],
        token_us=instants["token_us"],
        finish_us=instants["finish_us"],
        done_us=_count(row["done_us"], least=-(2**53)),
        outcome=outcome,
        detail=None if row["detail"] is None else str(row["detail"]),
        finish_reason=None if row["finish_reason"] is None else str(row["finish_reason"]),
        **{key: None if row[key] is None else _count(row[key]) for key in _COUNTS[:3]},
        events=_count(row["events"]),
    )


def _instant(value: object) -> int | None:
    return None if value is None else _count(value, least=-(2**53))


def _count(value: object, *, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is no count or instant")
    return value
