"""What verdicts add up to, and whether a policy could decide anything at all. Pure, and closed on failure.

`decide` folds verdicts into one decision. `plan_problems` is asked before anything runs: it refuses a policy whose
samples are too small to prove what its limits say, since such a policy would hold every release for ever, and one
whose limits allow everything, since such a policy proves nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import assert_never

from gates import stats
from gates.arrivals import plan_faults
from gates.canary import least_requests, limit_ratio
from gates.contracts import suite_faults
from gates.rollback_judgement import DRILL_REQUESTS, LEAST_PLAN_US, causes
from schemas.policy import (
    CompatibilityRule,
    GoldenRule,
    IntegrityRule,
    LoadRule,
    PlacementRule,
    Policy,
    RollbackRule,
    StaticRule,
    StructuredRule,
    TtftCondition,
)
from schemas.result import Verdict
from schemas.suite import AnySuite, GoldenSuite, LoadSuite, StructuredSuite

LEAST_PERCENTILE = Decimal("0.5")
"""A gated percentile below the median would let most requests miss the bound."""
SEND_LAG_SHARE = 10
"""The generator's allowed lag may be one so-manieth of the bound on TTFT, or `SEND_LAG_FLOOR_MS`."""
SEND_LAG_FLOOR_MS = 5
LEAST_REPEATS = 2
"""A reference that was recorded once does not know its own noise, and the golden gate is errored on it for ever."""
LOST_SHARE = 100
"""A rollback may be allowed to lose one so-manieth of a drill's requests at most."""


class Outcome(StrEnum):
    """What the verdicts of all required gates add up to."""

    PASSED = "passed"
    FAILED = "failed"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Decision:
    """An outcome and, unless it is passed, the reasons for it."""

    outcome: Outcome
    reasons: tuple[str, ...]


def decide(
    required: Sequence[str], verdicts: Mapping[str, Verdict], *, expired: Mapping[str, str] = MappingProxyType({})
) -> Decision:
    """Fold the latest verdict of each required gate into one decision.

    Any failure fails; else anything missing, errored, inconclusive or aborted is undecided; only all-passed
    passes. A policy that requires nothing is a failure, not a pass. Verdicts of gates that are not required count
    for nothing.

    Args:
        required: gate names in the order of the policy.
        verdicts: latest verdict by gate name, of this bundle under this policy; the caller leaves out what has
            expired or was revoked.
        expired: gates whose latest verdict was left out, with why, such as `ran too long ago`; they are told apart
            from those that never ran.
    """
    if not required:
        return Decision(Outcome.FAILED, ("the policy requires no gate",))
    failed: list[str] = []
    unsettled: list[str] = []
    for gate in required:
        match verdicts.get(gate):
            case Verdict.PASSED:
                pass
            case Verdict.FAILED:
                failed.append(f"{gate} failed")
            case None:
                unsettled.append(f"{gate} {expired.get(gate, 'has not run')}")
            case verdict:
                unsettled.append(f"{gate} {verdict}")
    if failed:
        return Decision(Outcome.FAILED, tuple(failed))
    if unsettled:
        return Decision(Outcome.UNDECIDED, tuple(unsettled))
    return Decision(Outcome.PASSED, ())


def plan_problems(policy: Policy, suites: Mapping[str, AnySuite]) -> list[str]:
    """Return what makes a policy unable to decide, one sentence each, or nothing.

    Args:
        policy: as posted.
        suites: the registered suites by digest; at least those that the policy names.

    Returns:
        Sentences that start with a JSON Pointer into the policy and a colon, such as
        `/gates/3/requests: 40 requests cannot pass …`.
    """
    found: list[str] = []
    for place, rule in enumerate(policy.gates):
        match rule:
            case IntegrityRule() | StaticRule() | CompatibilityRule():
                continue
            case PlacementRule():
                problems = _placement_problems(rule)
            case GoldenRule():
                problems = _golden_problems(rule, suites.get(rule.suite))
            case LoadRule():
                problems = _load_problems(rule, suites.get(rule.suite))
            case StructuredRule():
                problems = _structured_problems(rule, suites.get(rule.suite))
            case RollbackRule():
                problems = _rollback_problems(rule, suites.get(rule.suite))
            case _:
                assert_never(rule)
        found += [f"/gates/{place}/{field}: {problem}" for field, problem in problems]
    found += [f"/canary/{field}: {problem}" for field, problem in _canary_problems(policy)]
    return found


Problems = Iterator[tuple[str, str]]


def _placement_problems(rule: PlacementRule) -> Problems:
    if rule.utilization is not None and rule.utilization <= 0:
        yield "utilization", "an engine that may use nothing holds nothing"


def _golden_problems(rule: GoldenRule, suite: AnySuite | None) -> Problems:
    if suite is None:
        yield "suite", f"no suite {rule.suite} is registered; push it first"
    elif not isinstance(suite, GoldenSuite):
        yield "suite", f"{rule.suite} is no golden suite"
    elif rule.min_prompts > len(suite.prompts):
        yield "min_prompts", f"{rule.min_prompts} prompts are required, and the suite has {len(suite.prompts)}"
    elif suite.repeats < LEAST_REPEATS:
        what = "its reference is recorded once only, so that its own noise is unknown"
        yield "suite", f"{what} and no margin can be told from it: repeats must be at least {LEAST_REPEATS}"


def _load_problems(rule: LoadRule, suite: AnySuite | None) -> Problems:
    yield from _load_limit_problems(rule)
    if suite is None:
        yield "suite", f"no suite {rule.suite} is registered; push it first"
        return
    if not isinstance(suite, LoadSuite):
        yield "suite", f"{rule.suite} is no load suite"
        return
    if rule.requests != len(suite.plan):
        yield "requests", f"{rule.requests} requests are required, and the suite plans {len(suite.plan)}"
    if suite.request_seconds * 1000 < rule.e2e_ms:
        yield "e2e_ms", f"the suite gives up after {suite.request_seconds} s, before the bound of {rule.e2e_ms} ms"
    short = sorted(prompt.id for prompt in suite.prompts if prompt.max_tokens < 2)
    if short:
        yield "suite", f"{', '.join(short[:5])}: an answer of one token has no time per output token; allow two"
    for fault in plan_faults(suite):
        yield "suite", fault


def _load_limit_problems(rule: LoadRule) -> Problems:
    if not LEAST_PERCENTILE <= rule.percentile < 1:
        yield "percentile", f"{rule.percentile} is not from {LEAST_PERCENTILE} to below 1"
    elif not Decimal("0.5") < rule.confidence < 1:
        yield "confidence", f"{rule.confidence} is not between 0.5 and 1"
    else:
        floor = stats.minimum_samples(rule.percentile, rule.confidence)
        if rule.requests < floor:
            what = f"{stats.percentile_label(rule.percentile)} with confidence {rule.confidence}"
            yield "requests", f"{rule.requests} requests cannot pass {what}, even if all are good: at least {floor}"
    for field, success in (("attainment_min", rule.attainment_min), ("error_max", 1 - rule.error_max)):
        value = getattr(rule, field)
        if success >= 1:
            yield field, f"{value} cannot be proved by any number of requests"
        elif success <= 0:
            yield field, f"{value} allows everything"
        elif rule.requests < (floor := stats.minimum_samples_for_bound(success)):
            what = f"{rule.requests} requests cannot prove {field} {value}, even if all are good"
            yield "requests", f"{what}: at least {floor}"
    if rule.ttft_ms > rule.e2e_ms:
        yield "ttft_ms", f"{rule.ttft_ms} ms to the first token is more than {rule.e2e_ms} ms to the last"
    most = max(SEND_LAG_FLOOR_MS, rule.ttft_ms // SEND_LAG_SHARE)
    if rule.send_lag_ms > most:
        yield "send_lag_ms", f"{rule.send_lag_ms} ms would hide in a bound of {rule.ttft_ms} ms: at most {most}"


def _structured_problems(rule: StructuredRule, suite: AnySuite | None) -> Problems:
    if rule.answer_seconds <= 0:
        yield "answer_seconds", "no answer can come in no time"
    if rule.whitespace_max >= 1:
        yield "whitespace_max", f"{rule.whitespace_max} allows everything"
    if suite is None:
        yield "suite", f"no suite {rule.suite} is registered; push it first"
        return
    if not isinstance(suite, StructuredSuite):
        yield "suite", f"{rule.suite} is no structured suite"
        return
    answers = len(suite.items) * suite.repeats
    for field, success in (("validity_min", rule.validity_min), ("truncation_max", 1 - rule.truncation_max)):
        value = getattr(rule, field)
        if success >= 1:
            yield field, f"{value} cannot be proved by any number of answers"
        elif success <= 0:
            yield field, f"{value} allows everything"
        elif answers < (floor := stats.minimum_samples_for_bound(success)):
            what = f"{answers} answers ({len(suite.items)} items, {suite.repeats} times) cannot prove {value}"
            yield field, f"{what}, even if all are good: at least {floor}"
    for _, fault in suite_faults(suite):
        yield "suite", fault


def _rollback_problems(rule: RollbackRule, suite: AnySuite | None) -> Problems:
    if rule.recovery_seconds <= 0:
        yield "recovery_seconds", "no answer can come in no time"
    if rule.cold_recovery_seconds is not None and rule.cold_recovery_seconds <= 0:
        yield "cold_recovery_seconds", "no engine can boot in no time"
    if suite is None:
        yield "suite", f"no suite {rule.suite} is registered; push it first"
        return
    if not isinstance(suite, LoadSuite):
        yield "suite", f"{rule.suite} is no load suite"
        return
    n = len(suite.plan)
    if not DRILL_REQUESTS[0] <= n <= DRILL_REQUESTS[1]:
        least, most = DRILL_REQUESTS
        yield "suite", f"it plans {n} requests, which are sent once for each cause: from {least} to {most} are needed"
    elif suite.plan[-1].at_us - suite.plan[0].at_us < LEAST_PLAN_US:
        yield "suite", f"its plan is over within {LEAST_PLAN_US / 1e6:g} s, before traffic can be seen to go back"
    elif rule.lost_max > (most := (sent := len(causes(has_accepted=False)) * n) // LOST_SHARE):
        what = f"{rule.lost_max} lost requests are more than one of {LOST_SHARE} of the {sent} sent"
        yield "lost_max", f"{what}: at most {most}"


def _canary_problems(policy: Policy) -> Problems:
    conditions = policy.canary.stop_conditions
    for place, condition in enumerate(conditions):
        field = "percentile" if isinstance(condition, TtftCondition) else "max_ratio"
        limit = limit_ratio(condition)
        if limit <= 0:
            yield f"stop_conditions/{place}/{field}", "a limit of nothing cannot be proved by any number of requests"
        elif limit >= 1:
            yield f"stop_conditions/{place}/{field}", "a limit that allows everything stops nothing"
    floor = least_requests(conditions)
    if floor is None:
        return
    for place, step in enumerate(policy.canary.steps):
        if step.min_requests < floor:
            what = f"{step.min_requests} requests cannot prove the stop conditions, even if all are good"
            yield f"steps/{place}/min_requests", f"{what}: at least {floor}"


def minimum_detectable(rule: LoadRule) -> float | None:
    """Return the smallest true share of requests beyond a bound that a load rule exposes four times in five.

    None: its sample exposes nothing, not even a candidate that always misses. Printed with every result, so that
    a loose policy is seen to be loose.
    """
    return stats.minimum_detectable(rule.requests, float(1 - rule.percentile))
