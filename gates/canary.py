"""What live traffic says about a canary step. Pure: records in, judgement out.

The gateway's access log is what requests are judged by: a stream cut by the engine counts as a success in every
counter of the gateway, and only its log line tells it from a client that went away. Requests in flight are in no
line yet, so the gateway's count of open requests is looked at beside it: a slow candidate is not one that got no
share, and an end that nobody counts them at is no proof.

What the log cannot show, and what is therefore not judged here: an error event inside a stream that ends well,
the text, token counts, and the streams that end with the gateway itself, after which a step begins anew. A candidate
that hangs shows as clients leaving before the first byte (counted as over the TTFT limit once they waited longer
than it) or as requests that stay open.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Final, assert_never

from gates import stats
from gates.router import CANDIDATE, STABLE, WHOLE_BP
from gates.tally import ERRORS, ArmStats, Fate, Tally
from schemas.policy import ErrorRatioCondition, Step, StopCondition, TtftCondition
from schemas.result import Measurement
from schemas.short import span

STOP_ALPHA: Final = 0.01
"""A stop condition fires when a candidate exactly at its limit would show so many events this rarely.

The test is looked at after every batch of records. Simulated over 3,000 requests a step, a candidate exactly at
its limit is therefore taken back in about one step of ten, one at half its limit in 0.2–1.2 % of steps, and one at
twice its limit always, three times sooner than by a test that pays for every look. Taking back too readily costs
a repeat; the reverse costs users.
"""
SPLIT_ALPHA: Final = 0.001
"""Observed and desired weights disagree when a fair draw is this far off so rarely; asked once, before a pass."""
SPLIT_ALARM_ALPHA: Final = 1e-6
"""The same at every look while the step is still waiting."""
STALE_SECONDS: Final = 10.0
"""The controller probes through the gateway at every look. A log that lacks a probe for so long is broken, and
nothing passes on a log whose newest line is older."""
SILENT: Final = "the gateway has not answered for"
UNLOGGED: Final = "the access log lacks a probe of"
MIN_EVENTS: Final = 2
"""One bad request alone takes nothing back, unless the limit is zero."""

_WORDS: Final = {
    Fate.SERVER_ERROR: "5xx",
    Fate.CUT: "cut by the engine",
    Fate.OTHER_ARM: "served by another arm",
    Fate.RETRIED: "needed a second attempt",
}


class StepOutcome(StrEnum):
    """What the records of a step allow to be said."""

    PASSED = "passed"
    FAILED = "failed"
    """A stop condition is breached: take traffic back."""
    WAITING = "waiting"
    """Not yet decidable; look again."""
    INCONCLUSIVE = "inconclusive"
    """Still undecided at the step's end: hold and ask a person."""
    ERRORED = "errored"
    """The instrument or the split is not what it should be: hold and say why."""


@dataclass(frozen=True, slots=True)
class StepJudgement:
    """Outcome of a look at a step, why, and the numbers it stands on."""

    outcome: StepOutcome
    reasons: tuple[str, ...]
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True, slots=True)
class _Share:
    """One stop condition reduced to a share of requests: k of n against a limit."""

    name: str
    k: int
    n: int
    limit: float
    detail: str = ""

    @property
    def lower(self) -> float:
        return stats.lower_bound(self.k, self.n) if self.n else 0.0

    @property
    def upper(self) -> float:
        return stats.upper_bound(self.k, self.n) if self.n else 1.0

    def is_breached(self, unread: int) -> bool:
        """Unread lines are taken as good requests, so that they never help to condemn."""
        if self.limit <= 0:
            return self.k > 0
        if self.k < MIN_EVENTS:
            return False
        return stats.at_least(self.k, self.n + unread, self.limit) < STOP_ALPHA

    @property
    def is_proved(self) -> bool:
        return self.n > 0 and self.upper <= self.limit

    def __str__(self) -> str:
        return f"{self.name}: {self.k} of {self.n} over, limit {self.limit:g}{self.detail}"


def limit_ratio(condition: StopCondition) -> float:
    """Return the largest share of requests that a stop condition allows: its ratio, or 1 − its percentile."""
    return float(_limit(condition))


def _limit(condition: StopCondition) -> Decimal:
    match condition:
        case ErrorRatioCondition():
            return condition.max_ratio
        case TtftCondition():
            return 1 - condition.percentile
        case _:
            assert_never(condition)


def least_requests(conditions: Sequence[StopCondition]) -> int | None:
    """Return the fewest requests, all good, with which every condition could pass; None when none could.

    A step that asks for fewer can still only pass at this many. A condition that allows nothing at all can never
    be proved.
    """
    limits = [_limit(condition) for condition in conditions]
    if not limits or min(limits) <= 0:
        return None
    return max(1 if limit >= 1 else stats.minimum_samples_for_bound(1 - limit) for limit in limits)


def is_silence(reasons: Sequence[str]) -> bool:
    """Tell whether reasons of an errored look say that the gateway did not answer, and nothing else.

    A probe that is not in its log may have been the last thing before it fell silent.
    """
    return any(each.startswith(SILENT) for each in reasons) and all(
        each.startswith((SILENT, UNLOGGED)) for each in reasons
    )


def judge_step(
    tally: Tally,
    step: Step,
    *,
    conditions: Sequence[StopCondition],
    now: datetime,
) -> StepJudgement:
    """Tell what a canary step's records allow.

    A breach is reported before anything else, since taking traffic back is the safe side. Nothing passes on a log
    that is stale, has unreadable lines or lost some, on a split that is not the desired one, on a gateway that does
    not say what is open, without stop conditions, or without requests.

    Args:
        tally: the step's records so far; its `began_at` starts the clock.
        step: hold, least requests and longest wait.
        conditions: stop conditions of the policy, on the candidate.
        now: the present.

    Returns:
        failed when a condition is breached (one-sided exact binomial, `STOP_ALPHA`); errored when the instrument
        or the split is wrong; passed when every upper bound lies within its limit with enough requests and the
        hold is over; inconclusive after the longest wait; else waiting.
    """
    verdict = judge_stop(tally, conditions=conditions, now=now)
    if verdict.outcome is not StepOutcome.WAITING:
        return verdict
    shares = _shares(tally, conditions)
    elapsed = (now - tally.began_at).total_seconds()
    open_points = [str(share) for share in shares if not share.is_proved]
    n = tally.arms[CANDIDATE].n
    in_flight = tally.open(CANDIDATE)
    if n < step.min_requests:
        refused = tally.arms[CANDIDATE].fates[Fate.REFUSED]
        shown = "an unknown number" if in_flight is None else in_flight
        open_points.insert(0, f"{n} of {step.min_requests} requests, {refused} refused, {shown} in flight")
    if in_flight is None:
        open_points.append("the gateway has not said how many requests are open")
    silence = _silence_seconds(tally, now)
    if silence > STALE_SECONDS:
        open_points.append(f"the access log has been silent for {silence:.0f} s")
    if not open_points and elapsed >= float(step.hold_seconds):
        mismatch = _mismatch(tally, SPLIT_ALPHA)
        if mismatch:
            return StepJudgement(StepOutcome.ERRORED, (mismatch,), verdict.measurements)
        held = f"{n} requests in {elapsed:.1f} s, every stop condition within its limit"
        return StepJudgement(StepOutcome.PASSED, (held,), verdict.measurements)
    if elapsed < float(step.hold_seconds):
        open_points.append(f"held {elapsed:.1f} of {step.hold_seconds} s")
    if elapsed < float(step.max_seconds):
        return StepJudgement(StepOutcome.WAITING, tuple(open_points), verdict.measurements)
    if n == 0:
        none = "no request of the candidate has ended" if in_flight else "no traffic: nothing reached the candidate"
        open_points.insert(0, f"{none} in {elapsed:.0f} s")
    return StepJudgement(StepOutcome.INCONCLUSIVE, tuple(open_points), verdict.measurements)


def progress(judgement: StepJudgement, steps: Sequence[Step], place: int, seconds: float) -> str:
    """Return how far a step that waits is, in one line: what is still open, for how long it has gone on, and its limit.

    Args:
        judgement: of the last look.
        steps: of the policy.
        place: of the step among them, from 0.
        seconds: since it began.
    """
    waits = "; ".join(judgement.reasons)
    begun, limit = span(round(seconds)), span(steps[place].max_seconds)
    return f"step {place + 1} of {len(steps)}: {waits}; begun {begun} ago, limit {limit}"


def judge_stop(tally: Tally, *, conditions: Sequence[StopCondition], now: datetime) -> StepJudgement:
    """Tell whether traffic must be taken back now: for pauses, waits and the soak, where nothing can pass.

    Args:
        tally: records since the present split was applied.
        conditions: stop conditions of the policy, on the candidate.
        now: the present.

    Returns:
        failed, errored or waiting; see `judge_step`.
    """
    shares = _shares(tally, conditions)
    measured = _measurements(tally, conditions, shares)
    breached = tuple(f"{share}" for share in shares if share.is_breached(tally.garbled))
    if breached:
        return StepJudgement(StepOutcome.FAILED, breached, measured)
    faults = _faults(tally, conditions, now)
    if faults:
        return StepJudgement(StepOutcome.ERRORED, faults, measured)
    return StepJudgement(StepOutcome.WAITING, ("no stop condition is breached",), measured)


def _faults(tally: Tally, conditions: Sequence[StopCondition], now: datetime) -> tuple[str, ...]:
    found = []
    if not conditions:
        found.append("the policy has no stop condition")
    if tally.split.arm(CANDIDATE) is None:
        found.append("the split has no candidate")
    if tally.garbled:
        found.append(f"{tally.garbled} lines of the access log could not be read")
    if tally.lost:
        found.append("lines of the access log are missing")
    if tally.unanswered_at is not None and (silence := (now - tally.unanswered_at).total_seconds()) > STALE_SECONDS:
        found.append(f"{UNLOGGED} {silence:.0f} s ago")
    if tally.unseen_since is not None and (blind := (now - tally.unseen_since).total_seconds()) > STALE_SECONDS:
        found.append(f"{SILENT} {blind:.0f} s: {tally.unseen_why}")
    mismatch = _mismatch(tally, SPLIT_ALARM_ALPHA)
    if mismatch:
        found.append(mismatch)
    return tuple(found)


def _silence_seconds(tally: Tally, now: datetime) -> float:
    newest_at = tally.began_at if tally.newest_at is None else max(tally.newest_at, tally.began_at)
    return (now - newest_at).total_seconds()


def _mismatch(tally: Tally, alpha: float) -> str | None:
    """Tell how observed and desired weights disagree, or None.

    A request that is open, or whose line is not written yet, was drawn too, under this split or one before it, or it
    was pinned: which of them, nobody tells. So those of the arm that seems short count as far as they bring the share
    to the desired one, and no further. Without them a slow arm would seem to get less than it does.

    Source: exact binomial test, twice the smaller tail; each request is an independent draw.
    """
    if not tally.seen_open:
        return None
    ended = tally.assigned.total()
    unknown = tally.assigned["unknown"]
    desired = tally.split.weight_bp(CANDIDATE) / WHOLE_BP
    k, n = _drawn(tally, ended, desired)
    if not unknown and (n == 0 or 2 * min(stats.at_most(k, n, desired), stats.at_least(k, n, desired)) >= alpha):
        return None
    strange = f", {unknown} to no arm of it" if unknown else ""
    still = f" ({waiting} of its requests are open)" if (waiting := tally.open(CANDIDATE)) else ""
    seen = f"{tally.assigned[CANDIDATE]} of {ended}"
    return f"split mismatch: {seen} requests went to the candidate{still} where {desired:.2%} is desired{strange}"


def _drawn(tally: Tally, ended: int, desired: float) -> tuple[int, int]:
    """Return k of n draws, with unwritten requests of the arm that seems short counted up to the desired share."""
    k = tally.assigned[CANDIDATE]
    if k < desired * ended:
        waiting = tally.unwritten(CANDIDATE)
        more = waiting if desired >= 1 else min(waiting, math.ceil((desired * ended - k) / (1 - desired)))
        return k + more, ended + more
    if desired <= 0:
        return k, ended
    return k, ended + min(tally.unwritten(STABLE), math.ceil(k / desired - ended))


def _shares(tally: Tally, conditions: Sequence[StopCondition]) -> list[_Share]:
    seen = tally.arms[CANDIDATE]
    shares = []
    for condition in conditions:
        limit = limit_ratio(condition)
        match condition:
            case ErrorRatioCondition():
                kinds = [f"{seen.fates[each]} {_WORDS[each]}" for each in ERRORS if seen.fates[each]]
                detail = f" ({', '.join(kinds)})" if kinds else ""
                shares.append(_Share("error_ratio", seen.errors, seen.n, limit, detail))
            case TtftCondition():
                k, n = seen.over(condition.max_ms)
                # Of an answer that comes in one piece nobody knows when its first token was there.
                detail = "" if n else " (only answers that are streamed have a time to first token)"
                shares.append(_Share(f"ttft above {condition.max_ms} ms", k, n, limit, detail))
            case _:
                assert_never(condition)
    return shares


def _ttft(name: str, seen: ArmStats, condition: TtftCondition) -> Measurement:
    value = seen.percentile_ms(condition.percentile)
    return Measurement(
        name=name,
        unit="ms",
        statistic=stats.percentile_label(condition.percentile),
        value=value if value is not None and math.isfinite(value) else None,
        n=len(seen.ttft_ms),
        infinite=sum(math.isinf(each) for each in seen.ttft_ms),
        limit=float(condition.max_ms),
    )


def _baseline(tally: Tally, conditions: Sequence[StopCondition]) -> Iterator[Measurement]:
    """Yield what the stable side showed meanwhile, where it had requests: to look at, since nothing is judged by it."""
    beside = tally.arms[STABLE]
    if not beside.n:
        return
    for condition in conditions:
        if isinstance(condition, TtftCondition):
            if beside.ttft_ms:
                yield _ttft("baseline_ttft", beside, condition)
        else:
            k, n = beside.errors, beside.n
            yield Measurement(name="baseline_error_ratio", unit="ratio", statistic="value", value=k / n, n=n, k=k)


def _measurements(
    tally: Tally, conditions: Sequence[StopCondition], shares: Sequence[_Share]
) -> tuple[Measurement, ...]:
    seen = tally.arms[CANDIDATE]
    found = []
    for condition, share in zip(conditions, shares, strict=True):
        ratio = share.k / share.n if share.n else None
        is_error = isinstance(condition, ErrorRatioCondition)
        found.append(
            Measurement(
                name="error_ratio" if is_error else "ttft_over_limit",
                unit="ratio",
                statistic="value",
                value=ratio,
                n=share.n,
                k=share.k,
                low=share.lower,
                high=share.upper,
                limit=share.limit,
            )
        )
        if isinstance(condition, TtftCondition):
            found.append(_ttft("ttft", seen, condition))
    found += _baseline(tally, conditions)
    split_n = tally.assigned.total()
    desired = tally.split.weight_bp(CANDIDATE) / WHOLE_BP
    share_seen = tally.assigned[CANDIDATE] / split_n if split_n else None
    found.append(
        Measurement(
            name="observed_weight",
            unit="ratio",
            statistic="value",
            value=share_seen,
            n=split_n,
            k=tally.assigned[CANDIDATE],
            limit=desired,
        )
    )
    if (waiting := tally.open(CANDIDATE)) is not None:
        found.append(Measurement(name="open_requests", unit="count", statistic="value", value=float(waiting), n=1))
    for kind in (Fate.CLIENT_LEFT, Fate.REFUSED):
        n = seen.fates.total()
        found.append(
            Measurement(
                name=kind, unit="count", statistic="value", value=float(seen.fates[kind]), n=n, k=seen.fates[kind]
            )
        )
    return tuple(found)
