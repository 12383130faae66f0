"""Whether a load run can be believed: the generator kept its schedule, the engine counted right, no cache helped.

An instrument that is not well makes the verdict `errored`, whatever the numbers say: a late generator would be
blamed on the engine, a wrong token count would be read as speed, and a cache would be measured instead of a model.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from gates import arrivals, crowding, stats
from gates.load_records import Run, Sample
from schemas.policy import LoadRule
from schemas.result import Measurement
from schemas.suite import LoadSuite

HEALTH_PERCENTILE: Final = Decimal("0.99")
MAX_CPU_RATIO: Final = 0.7
"""Of one core that the generator may use; beyond it, its own queue shows in the latencies."""
SPAN_TOLERANCE_RATIO: Final = 0.01
"""By which the realised schedule may be longer or shorter than the planned one."""
TIMER_SECONDS: Final = 0.002
"""Step and jitter of the event loop's timer, by which a gap may be off without harm."""
MAX_CACHED_RATIO: Final = 0.02
"""Of prompt tokens that may come from a cache, since no request asks for one."""

_ADVICE: Final = (
    "Give the runner a free core, or its generator the right to SCHED_RR (CAP_SYS_NICE), or lower the rate."
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One reason not to believe the run: a stable code, a sentence, and what to do."""

    code: str
    message: str
    advice: str


def lags_ms(samples: Sequence[Sample]) -> list[float]:
    """Return by how many ms each request that was sent was late."""
    return [sample.lag_us / 1000 for sample in samples if sample.lag_us is not None]


def realised_gaps(samples: Sequence[Sample]) -> list[float]:
    """Return the seconds between one sending and the next, the first from the start of the window."""
    sent = sorted(sample.sent_us for sample in samples if sample.sent_us is not None)
    return [(after - before) / 1e6 for before, after in itertools.pairwise([0, *sent])]


def cached_ratio(samples: Sequence[Sample]) -> tuple[int, int] | None:
    """Return how many prompt tokens came from a cache, of how many; None when the engine does not say."""
    known = [
        (sample.cached_tokens, sample.prompt_tokens)
        for sample in samples
        if sample.cached_tokens is not None and sample.prompt_tokens is not None
    ]
    return (sum(cached for cached, _ in known), sum(prompt for _, prompt in known)) if known else None


def faults(run: Run, rule: LoadRule, suite: LoadSuite) -> list[Fault]:
    """Return why the run cannot be believed, most telling first, or nothing."""
    return [
        *_schedule_faults(run, rule, suite),
        *_generator_faults(run, rule),
        *_usage_faults(run.samples, suite),
        *_cache_faults(run.samples, suite),
    ]


def crowded(run: Run) -> Fault | None:
    """Return why a slow candidate is not to blame: other processes had the processors. None when they had not."""
    message = crowding.crowded(run.harness.machine)
    return None if message is None else Fault(crowding.CODE, message, crowding.ADVICE)


def _schedule_faults(run: Run, rule: LoadRule, suite: LoadSuite) -> list[Fault]:
    found = [
        Fault("plan-not-its-process", f"{fault[0].upper()}{fault[1:]}.", "Draw the suite's plan again.")
        for fault in arrivals.plan_faults(suite)
    ]
    lags = lags_ms(run.samples)
    if not lags:
        return [*found, Fault("nothing-sent", "No request was sent.", "Look at the runner, then run the gate again.")]
    lag = stats.nearest_rank(lags, HEALTH_PERCENTILE)
    if lag > rule.send_lag_ms:
        found.append(
            Fault("send-lag", f"Our generator sent p99 {lag:.1f} ms late; {rule.send_lag_ms} ms are allowed.", _ADVICE)
        )
    if run.harness.in_flight_max >= run.harness.cap:
        return found  # what was dropped has no gap, and counts as failed
    gaps = realised_gaps(run.samples)
    planned, realised = suite.plan[-1].at_us / 1e6, sum(gaps)
    if abs(realised - planned) > max(SPAN_TOLERANCE_RATIO * planned, rule.send_lag_ms / 1000):
        found.append(
            Fault("rate-not-reached", f"The plan takes {planned:.3f} s; the requests took {realised:.3f} s.", _ADVICE)
        )
    fit = arrivals.gap_faults(
        gaps, suite.process, resolution_seconds=TIMER_SECONDS, tolerance_seconds=rule.send_lag_ms / 1000
    )
    found += [Fault("gaps-not-as-declared", f"The realised schedule {fault}.", _ADVICE) for fault in fit]
    return found


def _generator_faults(run: Run, rule: LoadRule) -> list[Fault]:
    found = []
    harness = run.harness
    if not harness.loop_lag_us or harness.wall_us == 0:
        return [Fault("no-self-measurement", "The generator did not measure itself.", "Run the gate again.")]
    lag = stats.nearest_rank([lag / 1000 for lag in harness.loop_lag_us], HEALTH_PERCENTILE)
    if lag > rule.send_lag_ms:
        found.append(
            Fault("loop-lag", f"Our event loop woke p99 {lag:.1f} ms late; {rule.send_lag_ms} ms are allowed.", _ADVICE)
        )
    share = harness.cpu_us / harness.wall_us
    if share > MAX_CPU_RATIO:
        found.append(
            Fault("generator-busy", f"Our generator used {share:.2f} of a core; {MAX_CPU_RATIO} is allowed.", _ADVICE)
        )
    return found


def _usage_faults(samples: Sequence[Sample], suite: LoadSuite) -> list[Fault]:
    limits = {prompt.id: prompt.max_tokens for prompt in suite.prompts}
    missing = too_few = too_many = 0
    for sample in samples:
        if sample.is_failed:
            continue
        if sample.completion_tokens is None:
            missing += 1
        elif sample.completion_tokens < max(1, sample.events):
            too_few += 1
        elif sample.completion_tokens > limits[sample.prompt]:
            too_many += 1
    n = len(samples)
    advice = "Correct the engine's usage field; without it no time per token is known."
    found = []
    if missing:
        found.append(Fault("usage-missing", f"{missing} of {n} answers came without a token count.", advice))
    if too_few:
        found.append(Fault("usage-wrong", f"{too_few} of {n} answers count fewer tokens than they sent.", advice))
    if too_many:
        found.append(Fault("usage-wrong", f"{too_many} of {n} answers count more tokens than were allowed.", advice))
    return found


def _cache_faults(samples: Sequence[Sample], suite: LoadSuite) -> list[Fault]:
    known = cached_ratio(samples)
    if known is None or known[0] <= MAX_CACHED_RATIO * known[1]:
        return []
    advice = "Give the suite a salt." if suite.salt is None else "The salt does not reach the prompt's first token."
    message = f"{known[0]} of {known[1]} prompt tokens came from a cache; {MAX_CACHED_RATIO:.0%} is allowed."
    return [Fault("prompts-cached", message, advice)]


def measurements(run: Run, rule: LoadRule, suite: LoadSuite) -> list[Measurement]:
    """Return the generator's own health as numbers, whatever they are."""
    lags, loops = lags_ms(run.samples), [lag / 1000 for lag in run.harness.loop_lag_us]
    wall = run.harness.wall_us
    cpu = run.harness.cpu_us / wall if wall else None
    return [
        *_lag_measurements("send_lag", lags, float(rule.send_lag_ms)),
        *_lag_measurements("loop_lag", loops, float(rule.send_lag_ms)),
        Measurement(name="generator_cpu", unit="ratio", statistic="mean", value=cpu, n=1, limit=MAX_CPU_RATIO),
        Measurement(
            name="generator_precedence", unit="flag", statistic="value", value=float(run.harness.has_precedence), n=1
        ),
        Measurement(
            name="in_flight",
            unit="count",
            statistic="max",
            value=float(run.harness.in_flight_max),
            n=len(run.samples),
            limit=float(run.harness.cap),
        ),
        *_gap_measurements(realised_gaps(run.samples), suite),
        _cache_measurement(run.samples),
        *_machine_measurements(run),
    ]


def _machine_measurements(run: Run) -> list[Measurement]:
    if run.harness.machine is None:
        return []
    share = run.harness.machine.foreign_ratio
    return [
        Measurement(
            name="foreign_cpu", unit="ratio", statistic="mean", value=share, n=1, limit=crowding.MAX_FOREIGN_RATIO
        )
    ]


def _lag_measurements(name: str, values: Sequence[float], limit: float) -> list[Measurement]:
    return [
        Measurement(
            name=name,
            unit="ms",
            statistic=statistic,
            value=stats.nearest_rank(values, Decimal(percentile)) if values else None,
            n=len(values),
            limit=limit if statistic == "p99" else None,
        )
        for statistic, percentile in (("p50", "0.5"), ("p99", "0.99"), ("max", "1"))
    ]


def _gap_measurements(gaps: list[float], suite: LoadSuite) -> list[Measurement]:
    n, distinct = len(gaps), len({round(gap * 1e6) for gap in gaps})
    share = distinct / n if n else None
    found = [Measurement(name="distinct_gap_ratio", unit="ratio", statistic="value", value=share, n=n, k=distinct)]
    if suite.process.distribution == "gamma" and gaps:
        fit = stats.gap_fit(gaps, **arrivals.gamma_of(suite.process), resolution_seconds=TIMER_SECONDS)
        limit = arrivals.LEAST_GAP_FIT
        found.append(
            Measurement(name="gap_fit", unit="p_value", statistic="kolmogorov_smirnov", value=fit, n=n, limit=limit)
        )
    return found


def _cache_measurement(samples: Sequence[Sample]) -> Measurement:
    known = cached_ratio(samples)
    return Measurement(
        name="cached_prompt_tokens",
        unit="ratio",
        statistic="value",
        value=known[0] / known[1] if known and known[1] else None,
        n=known[1] if known else 0,
        k=known[0] if known else None,
        limit=MAX_CACHED_RATIO,
    )
