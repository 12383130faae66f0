"""What live traffic says about a canary step. Pure: records in, judgement out.

The gateway's access log is the only source: a stream cut by the engine counts as a success in every counter of
the gateway, and only its log line tells it from a client that went away.

What the log cannot show, and what is therefore not judged here: an error event inside a stream that ends well,
the text, token counts. Requests in flight are in no line yet; a candidate that hangs shows as clients leaving
before the first byte (counted as over the TTFT limit once they waited longer than it) or as no traffic.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Final, assert_never

from gates import stats
from gates.router import ARMS, CANDIDATE, WHOLE_BP, Split
from schemas.policy import ErrorRatioCondition, Step, StopCondition, TtftCondition
from schemas.result import Measurement

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
MIN_EVENTS: Final = 2
"""One bad request alone takes nothing back, unless the limit is zero."""

CLIENT_FLAGS: Final = frozenset({"DC", "DPE"})
"""Envoy's response flags for what the client did: disconnected, broke the protocol."""
REFUSAL_FLAGS: Final = frozenset({"NR", "IH", "RL", "UAEX"})
"""Flags of a request that the gateway itself refused with a 4xx."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One ended request as the gateway's access log tells it.

    Args:
        at: when its first byte arrived at the gateway.
        target: `name@environment`; None when no target matched.
        route: `split`, `pin`, `probe`, `idle` or `unknown`; None when the request was not even parsed.
        revision: of the split that took the request.
        method: HTTP method; None when the request was not even parsed.
        assigned: cluster that the split drew.
        served: `ip:port` of the engine that answered last.
        code: HTTP status sent to the client; 0 when the client left before one.
        flags: Envoy's response flags, such as UPE or DC.
        details: Envoy's reason in words.
        attempts: upstream attempts.
        ttft_ms: from the request's first byte to the answer's first body byte; None without a body byte.
        duration_ms: from the request's first byte to its end.
        is_event_stream: the answer's content type was `text/event-stream`.
    """

    at: datetime
    target: str | None
    route: str | None
    revision: int | None
    method: str | None
    assigned: str | None
    served: str | None
    code: int
    flags: frozenset[str]
    details: str
    attempts: int
    ttft_ms: float | None
    duration_ms: float
    is_event_stream: bool

    @property
    def ended_at(self) -> datetime:
        """When the request ended."""
        return self.at + timedelta(milliseconds=self.duration_ms)


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


class Fate(StrEnum):
    """How one request counts for the arm it was assigned to."""

    GOOD = "good"
    SERVER_ERROR = "server_error"
    CUT = "cut"
    OTHER_ARM = "other_arm"
    RETRIED = "retried"
    CLIENT_LEFT = "client_left"
    REFUSED = "refused"


ERRORS: Final = (Fate.SERVER_ERROR, Fate.CUT, Fate.OTHER_ARM, Fate.RETRIED)
_WORDS: Final = {
    Fate.SERVER_ERROR: "5xx",
    Fate.CUT: "cut by the engine",
    Fate.OTHER_ARM: "served by another arm",
    Fate.RETRIED: "needed a second attempt",
}


def fate(record: LogRecord, address: str) -> Fate:
    """Tell how a request counts against the arm it was assigned to.

    A 4xx answer counts neither way: it is the client's error, or a candidate that refuses what it should serve,
    and in both cases no proof of health.

    Args:
        record: the request.
        address: `ip:port` of the assigned arm's engine.

    Source: Envoy, response flags of the access log (UPE, UC, UF, UR, UT, UH, UO: upstream; DC, DPE: downstream).
    """
    upstream = record.flags - CLIENT_FLAGS - REFUSAL_FLAGS
    if record.code >= 500:
        return Fate.SERVER_ERROR
    if upstream:
        return Fate.CUT
    if record.served is not None and record.served != address:
        return Fate.OTHER_ARM
    if record.attempts > 1:
        return Fate.RETRIED
    if record.flags & CLIENT_FLAGS or record.code == 0:
        return Fate.CLIENT_LEFT
    if 400 <= record.code < 500:
        return Fate.REFUSED
    return Fate.GOOD


@dataclass(slots=True)
class ArmStats:
    """Requests of one arm.

    Args:
        fates: how many requests had each fate.
        ttft_ms: of streamed answers; infinite for failed requests.
        left_after_ms: how long clients waited who left before the first byte.
    """

    fates: Counter[Fate] = field(default_factory=Counter)
    ttft_ms: list[float] = field(default_factory=list)
    left_after_ms: list[float] = field(default_factory=list)

    @property
    def n(self) -> int:
        """Requests that say something about the arm: good and failed ones."""
        return self.fates[Fate.GOOD] + self.errors

    @property
    def errors(self) -> int:
        """Requests that count against the arm."""
        return sum(self.fates[each] for each in ERRORS)

    def add(self, record: LogRecord, address: str) -> None:
        """Count one request."""
        kind = fate(record, address)
        self.fates[kind] += 1
        if kind in ERRORS:
            self.ttft_ms.append(math.inf)
        elif record.ttft_ms is None and kind is Fate.CLIENT_LEFT:
            self.left_after_ms.append(record.duration_ms)
        elif record.ttft_ms is not None and record.is_event_stream and kind is not Fate.REFUSED:
            self.ttft_ms.append(record.ttft_ms)

    def over(self, max_ms: float) -> tuple[int, int]:
        """Return how many requests waited longer than a bound for their first token, and among how many.

        A client that left before the first byte is censored: it counts as over once it waited longer than the
        bound, and not at all before.
        """
        gave_up = sum(waited > max_ms for waited in self.left_after_ms)
        return sum(ttft > max_ms for ttft in self.ttft_ms) + gave_up, len(self.ttft_ms) + gave_up

    def percentile_ms(self, percentile: Decimal) -> float | None:
        """Return the nearest-rank percentile of TTFT in ms, infinite where failures reach it; None without data."""
        return stats.nearest_rank(self.ttft_ms, percentile) if self.ttft_ms else None


@dataclass(slots=True)
class Tally:
    """Everything that a step's log lines add up to. Fed in batches; each line costs the same however long the step.

    Errors and latencies of an arm count whatever the revision once the request ended after the step began: a
    stream that started before the last weight change and is cut now is cut by the same engine. The observed split
    counts requests of the step's own revision only.

    Args:
        split: the step's applied split.
        began_at: when it was applied.
    """

    split: Split
    began_at: datetime
    arms: dict[str, ArmStats] = field(default_factory=lambda: {name: ArmStats() for name in ARMS})
    assigned: Counter[str] = field(default_factory=Counter)
    garbled: int = 0
    lost: bool = False
    newest_at: datetime | None = None
    unanswered_at: datetime | None = None

    def expect(self, at: datetime) -> None:
        """Note that the gateway was probed, so that a line no older than this must come."""
        if self.unanswered_at is None:
            self.unanswered_at = at

    def add(self, records: Iterable[LogRecord], *, garbled: int = 0, lost: bool = False) -> None:
        """Count a batch.

        Args:
            records: of the whole gateway, in any order; other targets' lines only show that the log is alive.
            garbled: lines that could not be read.
            lost: True when lines are missing before this batch, after a truncation or an unknown rotation.
        """
        self.garbled += garbled
        self.lost = self.lost or lost
        for record in records:
            if self.newest_at is None or record.ended_at > self.newest_at:
                self.newest_at = record.ended_at
            if self.unanswered_at is not None and record.ended_at >= self.unanswered_at:
                self.unanswered_at = None
            if record.target == self.split.target and record.route in {"split", "pin"}:
                self._count(record)

    def _count(self, record: LogRecord) -> None:
        arm = self.split.assigned(record.assigned)
        if record.route == "split" and record.revision == self.split.revision:
            self.assigned[arm.name if arm else "unknown"] += 1
        if arm is not None and record.method == "POST" and record.ended_at >= self.began_at:
            self.arms[arm.name].add(record, arm.address)


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


def judge_step(
    tally: Tally,
    step: Step,
    *,
    conditions: Sequence[StopCondition],
    now: datetime,
    in_flight: int = 0,
) -> StepJudgement:
    """Tell what a canary step's records allow.

    A breach is reported before anything else, since taking traffic back is the safe side. Nothing passes on a log
    that is stale, has unreadable lines or lost some, on a split that is not the desired one, without stop
    conditions, or without requests.

    Args:
        tally: the step's records so far; its `began_at` starts the clock.
        step: hold, least requests and longest wait.
        conditions: stop conditions of the policy, on the candidate.
        now: the present.
        in_flight: the candidate's open requests, for the message only.

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
    if n < step.min_requests:
        refused = tally.arms[CANDIDATE].fates[Fate.REFUSED]
        open_points.insert(0, f"{n} of {step.min_requests} requests, {refused} refused, {in_flight} in flight")
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
        open_points.insert(0, f"no traffic: nothing reached the candidate in {elapsed:.0f} s")
    return StepJudgement(StepOutcome.INCONCLUSIVE, tuple(open_points), verdict.measurements)


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
        found.append(f"the access log lacks a probe of {silence:.0f} s ago")
    mismatch = _mismatch(tally, SPLIT_ALARM_ALPHA)
    if mismatch:
        found.append(mismatch)
    return tuple(found)


def _silence_seconds(tally: Tally, now: datetime) -> float:
    newest_at = tally.began_at if tally.newest_at is None else max(tally.newest_at, tally.began_at)
    return (now - newest_at).total_seconds()


def _mismatch(tally: Tally, alpha: float) -> str | None:
    """Tell how observed and desired weights disagree, or None.

    Source: exact binomial test, twice the smaller tail; each request is an independent draw.
    """
    n = tally.assigned.total()
    if n == 0:
        return None
    desired = tally.split.weight_bp(CANDIDATE) / WHOLE_BP
    k = tally.assigned[CANDIDATE]
    unknown = tally.assigned["unknown"]
    p_value = 2 * min(stats.at_most(k, n, desired), stats.at_least(k, n, desired))
    if not unknown and p_value >= alpha:
        return None
    strange = f", {unknown} to no arm of it" if unknown else ""
    return f"split mismatch: {k} of {n} requests went to the candidate where {desired:.2%} is desired{strange}"


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
                shares.append(_Share(f"ttft above {condition.max_ms} ms", k, n, limit))
            case _:
                assert_never(condition)
    return shares


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
            value = seen.percentile_ms(condition.percentile)
            found.append(
                Measurement(
                    name="ttft",
                    unit="ms",
                    statistic=stats.percentile_label(condition.percentile),
                    value=value if value is not None and math.isfinite(value) else None,
                    n=len(seen.ttft_ms),
                    infinite=sum(math.isinf(each) for each in seen.ttft_ms),
                    limit=float(condition.max_ms),
                )
            )
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
    for kind in (Fate.CLIENT_LEFT, Fate.REFUSED):
        n = seen.fates.total()
        found.append(
            Measurement(
                name=kind, unit="count", statistic="value", value=float(seen.fates[kind]), n=n, k=seen.fates[kind]
            )
        )
    return tuple(found)
