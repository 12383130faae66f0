"""What documents ask for, in words: limits and stop conditions of a policy, and what a suite is made of. Pure."""

from decimal import Decimal
from typing import Any

from schemas.policy import GateRule, StopCondition, TtftCondition
from schemas.short import many, span
from schemas.suite import AnySuite, LoadSuite, StructuredSuite

_ACRONYMS = {"ttft", "tpot", "e2e"}


def limits(rule: GateRule) -> list[tuple[str, str]]:
    """Return the limits of a gate as name and value; a name that ends in its unit has the unit in the value."""
    told = rule.model_dump(mode="json", exclude={"gate"}, exclude_none=True)
    return [_limit(name, value) for name, value in told.items()]


def _limit(name: str, value: Any) -> tuple[str, str]:
    words = " ".join(word.upper() if word in _ACRONYMS else word for word in name.split("_"))
    if name.endswith("_seconds"):
        return words.removesuffix(" seconds"), span(Decimal(str(value)))
    for unit in ("ms", "nat", "bytes"):
        if name.endswith(f"_{unit}"):
            return words.removesuffix(f" {unit}"), f"{value} {unit}"
    return words, str(value)


def condition(of: StopCondition) -> str:
    """Return a stop condition in words."""
    if isinstance(of, TtftCondition):
        return f"TTFT p{float(of.percentile) * 100:g} above {of.max_ms} ms"
    return f"error ratio above {of.max_ratio}"


def suite_kind(suite: AnySuite) -> str:
    """Return the kind of a suite, in one word: golden, load or structured."""
    return suite.schema_id.split("/")[2]


def suite_facts(suite: AnySuite) -> list[tuple[str, str]]:
    """Return what a suite is made of, as name and value."""
    if isinstance(suite, StructuredSuite):
        return [("items", str(len(suite.items))), ("repeats", str(suite.repeats))]
    prompts = [("prompts", str(len(suite.prompts)))]
    if not isinstance(suite, LoadSuite):
        return [*prompts, ("alternatives", str(suite.top_k)), ("repeats", str(suite.repeats))]
    process = suite.process
    shape = f", shape {process.shape}" if process.shape is not None else ""
    seed = f", seed {process.seed}" if process.seed is not None else ""
    return [
        *prompts,
        ("arrivals", f"{process.distribution}, {process.rate_per_second} a second{shape}{seed}"),
        ("warm-up", many(len(suite.warmup), "request")),
        ("measured", f"{many(len(suite.plan), 'request')} in {suite.plan[-1].at_us / 1e6:.1f} s"),
        ("time-out", span(suite.request_seconds)),
    ]
