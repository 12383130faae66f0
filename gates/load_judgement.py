"""Turns a load run into a verdict. Pure: the same records, rule and suite give the same result, bit for bit.

Each gated metric (TTFT, TPOT, E2E) becomes a count: how many of the n planned requests went over its bound, where a
failed one went over every bound. The exact binomial distribution then says what that count proves:

- passed: for each metric so few misses would be rarer than 1 − confidence, were the percentile at its bound; the
  lower bound of attainment and the upper bound of the error ratio hold; requests in flight did not grow.
- failed: for one of them so many misses would be rarer than 5 % (Holm over all of them), were the candidate just
  good enough; or requests in flight grew beyond doubt; or the engine died.
- inconclusive: neither. The summary says what would decide.
- errored: the run cannot be believed, see `gates.load_health`; so too when it would have failed by being slow alone
  on a machine that other processes kept busy. A pass in spite of them is a pass.

Source: MLPerf LoadGen, `early_stopping.cc`; Holm (1979); Clopper and Pearson (1934).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

import numpy as np

from gates import load_health, stats
from gates.errors import InstrumentError
from gates.gate import Judged, JudgeInput, errored, finding
from gates.load_records import Run, Sample, read_run
from gates.stats import PercentileDecision
from schemas.policy import LoadRule
from schemas.result import Finding, Measurement, Severity, Verdict
from schemas.suite import LoadSuite

MEDIAN: Final = Decimal("0.5")
BLOCKS: Final = 12
SAMPLES_PER_BLOCK: Final = 50
OVERLOAD_GROWTH: Final = 1.5
OVERLOAD_RISE: Final = 2.0
OVERLOAD_ALPHA: Final = 0.001
"""Of the slope of in-flight requests, for a failure; a tenfold of it is enough to withhold a pass.

In-flight requests are correlated, so the nominal level is not the true one. Simulated over queues with 1, 4 and 16
servers and Poisson arrivals: at 70 % of capacity a false failure in at most 2.7 % of runs of 64 requests and 0.7 % of
200; at 120 % of capacity found in 30–58 % of runs of 64, 84 % of 200, all of 1000; at 200 % in 93–99 % of runs of 64.
"""


@dataclass(frozen=True, slots=True)
class Metric:
    """One gated latency: its values, its bound and what they prove."""

    name: str
    values: tuple[float, ...]
    bound_ms: int
    decision: PercentileDecision
    percentile_ms: float


@dataclass(frozen=True, slots=True)
class Share:
    """A gated share of requests: k of n, with the probability of so bad a share from a candidate at the limit."""

    name: str
    k: int
    n: int
    limit: float
    bound: float
    is_proved: bool
    fail_probability: float


@dataclass(frozen=True, slots=True)
class Growth:
    """How requests in flight developed over the measured window."""

    first: float
    last: float
    p_value: float
    peak: int

    @property
    def has_grown(self) -> bool:
        """Whether the last third is above the first by more than chance lets a steady queue vary."""
        return self.last > OVERLOAD_GROWTH * self.first and self.last - self.first >= OVERLOAD_RISE

    @property
    def is_overload(self) -> bool:
        """Whether requests came faster than they were served, beyond doubt."""
        return self.has_grown and self.p_value < OVERLOAD_ALPHA

    @property
    def is_doubtful(self) -> bool:
        """Whether that cannot be excluded."""
        return self.has_grown and self.p_value < 10 * OVERLOAD_ALPHA


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything that the verdict stands on."""

    rule: LoadRule
    suite: LoadSuite
    run: Run
    metrics: tuple[Metric, ...]
    attainment: Share
    errors: Share
    growth: Growth

    @property
    def n(self) -> int:
        """Requests measured."""
        return len(self.run.samples)


def judge(given: JudgeInput) -> Judged:
    """Judge a load run from its records, see the module. Errored when they are missing, torn or not to be believed."""
    rule, suite = given.rule, given.suite
    if not isinstance(rule, LoadRule) or not isinstance(suite, LoadSuite):
        return errored("A load rule and a load suite are needed to judge a load run.")
    try:
        run = read_run(given.records, suite, requests=rule.requests)
    except InstrumentError as error:
        return errored(str(error))
    reading = read(run, rule, suite)
    measured = [*_measurements(reading), *load_health.measurements(run, rule, suite)]
    before, after = run.engine_pids
    faults = load_health.faults(run, rule, suite)
    if before is not None and after is not None and before != after:
        faults.insert(
            0,
            load_health.Fault(
                "engine-replaced", "Another engine process runs than at the start.", "Run the gate again."
            ),
        )
    if faults:
        found = [finding(fault.code, fault.message, advice=fault.advice) for fault in faults]
        return errored(" ".join(fault.message for fault in faults), [*found, *_error_findings(reading)], measured)
    failures = _failures(reading)
    crowded = load_health.crowded(run)
    if failures and crowded is not None and not _is_broken(reading, failures):
        slow = [finding(each.code, each.message, severity=Severity.INFO, found=each.found) for each in failures]
        first = finding(crowded.code, crowded.message, advice=crowded.advice)
        summary = f"{crowded.message} ({'; '.join(each.message for each in failures)})"
        return errored(summary, [first, *slow, *_error_findings(reading)], measured)
    if failures:
        summary = "; ".join(each.message for each in failures)
        return Judged(Verdict.FAILED, summary, measured, [*failures, *_error_findings(reading)])
    doubts = _doubts(reading)
    if doubts:
        least = stats.minimum_samples(
            rule.percentile, rule.confidence, max(each.decision.over for each in reading.metrics)
        )
        advice = f"Run the gate again; a plan of {least} requests could pass with as many misses."
        found = [finding("too-few-samples", doubt, advice=advice) for doubt in doubts]
        summary = f"{reading.n} requests cannot decide: {'; '.join(doubts)}"
        return Judged(Verdict.INCONCLUSIVE, summary, measured, [*found, *_error_findings(reading)])
    return Judged(Verdict.PASSED, _passed(reading), measured, _error_findings(reading))


def read(run: Run, rule: LoadRule, suite: LoadSuite) -> Reading:
    """Count a run against its rule."""
    samples, n = run.samples, len(run.samples)
    bounds = (("ttft", rule.ttft_ms), ("tpot", rule.tpot_ms), ("e2e", rule.e2e_ms))
    metrics = []
    for name, bound_ms in bounds:
        values = tuple(getattr(sample, f"{name}_ms") for sample in samples)
        over = sum(value > bound_ms for value in values)
        decision = stats.decide_percentile(over, n, rule.percentile, rule.confidence)
        metrics.append(Metric(name, values, bound_ms, decision, stats.nearest_rank(values, rule.percentile)))
    met = sum(
        all(value <= metric.bound_ms for value, metric in zip(row, metrics, strict=True))
        for row in zip(*(metric.values for metric in metrics), strict=True)
    )
    failed = sum(sample.is_failed for sample in samples)
    attainment_min, error_max = float(rule.attainment_min), float(rule.error_max)
    low, high = stats.lower_bound(met, n), stats.upper_bound(failed, n)
    return Reading(
        rule,
        suite,
        run,
        tuple(metrics),
        Share("attainment", met, n, attainment_min, low, low >= attainment_min, stats.at_most(met, n, attainment_min)),
        Share("error_ratio", failed, n, error_max, high, high <= error_max, stats.at_least(failed, n, error_max)),
        growth([*run.warmup, *samples], window_us=suite.plan[-1].at_us),
    )


def growth(samples: Sequence[Sample], *, window_us: int) -> Growth:
    """Tell how requests in flight developed from 0 to `window_us`.

    A request is in flight from its planned instant to its end. The slope is that of a straight line through the
    means of twelve equal parts of the window, with a one-sided t-test.
    """
    begun = np.sort(np.array([sample.at_us for sample in samples if sample.outcome != "dropped"], dtype=np.int64))
    ended = np.sort(np.array([sample.done_us for sample in samples if sample.outcome != "dropped"], dtype=np.int64))
    count = BLOCKS * SAMPLES_PER_BLOCK
    instants = (np.arange(count, dtype=np.float64) + 0.5) * (window_us / count)
    in_flight = (
        np.searchsorted(begun, instants, side="right") - np.searchsorted(ended, instants, side="right")
    ).astype(np.float64)
    means = in_flight.reshape(BLOCKS, SAMPLES_PER_BLOCK).mean(axis=1)
    places = np.arange(BLOCKS, dtype=np.float64) - (BLOCKS - 1) / 2
    spread = float(np.sum(places**2))
    slope = float(np.sum(places * means)) / spread
    residuals = means - means.mean() - slope * places
    error = math.sqrt(float(np.sum(residuals**2)) / (BLOCKS - 2) / spread)
    steepness = slope / error if error else math.copysign(math.inf, slope or -1.0)
    third = count // 3
    return Growth(
        first=float(np.median(in_flight[:third])),
        last=float(np.median(in_flight[-third:])),
        p_value=stats.student_above(steepness, BLOCKS - 2),
        peak=int(in_flight.max()),
    )


def _failures(reading: Reading) -> list[Finding]:
    rule = reading.rule
    shares = (reading.attainment, reading.errors)
    p_values = {metric.name: metric.decision.fail_probability for metric in reading.metrics}
    p_values |= {share.name: share.fail_probability for share in shares}
    fallen = stats.holm(p_values)
    found = []
    label = stats.percentile_label(rule.percentile)
    for metric in reading.metrics:
        if metric.name in fallen:
            over, worst = metric.decision.over, _worst(reading, metric)
            found.append(
                finding(
                    f"{metric.name}-over-bound",
                    f"{label} {metric.name.upper()} is {_ms(metric.percentile_ms)} where {metric.bound_ms} ms are"
                    f" allowed ({over} of {reading.n} requests over)",
                    pointer=worst.prompt,
                    found=_ms(metric.percentile_ms),
                    expected=f"{metric.bound_ms} ms",
                )
            )
    if reading.attainment.name in fallen:
        share = reading.attainment
        found.append(
            finding(
                "attainment-too-low",
                f"{share.k} of {share.n} requests met every bound where a share of {share.limit:g} must",
                found=f"{share.k / share.n:.4f}",
                expected=f"{share.limit:g}",
            )
        )
    if reading.errors.name in fallen:
        share = reading.errors
        found.append(
            finding(
                "too-many-errors",
                f"{share.k} of {share.n} requests failed where a share of {share.limit:g} may",
                found=f"{share.k / share.n:.4f}",
                expected=f"{share.limit:g}",
            )
        )
    if reading.growth.is_overload:
        found.append(finding("overload", f"{_growth(reading)}: requests come faster than they are served"))
    before, after = reading.run.engine_pids
    if before is not None and after is None:
        found.append(finding("engine-died", "the engine did not live to the end of the load"))
    return found


def _is_broken(reading: Reading, failures: Sequence[Finding]) -> bool:
    """Tell whether the candidate failed by more than being slow, so that no other work on the machine excuses it."""
    if any(each.code == "engine-died" for each in failures):
        return True
    broken = sum(sample.is_failed and sample.outcome != "timeout" for sample in reading.run.samples)
    return stats.at_least(broken, reading.n, float(reading.rule.error_max)) < stats.FAIL_ALPHA


def _doubts(reading: Reading) -> list[str]:
    rule = reading.rule
    allowed = stats.admissible_misses(reading.n, rule.percentile, rule.confidence)
    doubts = []
    for metric in reading.metrics:
        if metric.decision.verdict is not Verdict.PASSED:
            most = "no number allows a pass" if allowed is None else f"{allowed} may be for a pass"
            doubts.append(
                f"{metric.name.upper()} is over {metric.bound_ms} ms in {metric.decision.over} of {reading.n}, {most}"
            )
    if not reading.attainment.is_proved:
        share = reading.attainment
        doubts.append(f"attainment is proved to be {share.bound:.4f}, {share.limit:g} is needed")
    if not reading.errors.is_proved:
        share = reading.errors
        doubts.append(f"an error ratio of {share.bound:.4f} cannot be excluded, {share.limit:g} is allowed")
    if reading.growth.is_doubtful:
        doubts.append(_growth(reading))
    return doubts


def _growth(reading: Reading) -> str:
    return (
        f"requests in flight grew from {reading.growth.first:g} to {reading.growth.last:g} (medians of the first and"
        f" last third, p = {reading.growth.p_value:.1e})"
    )


def _passed(reading: Reading) -> str:
    label = stats.percentile_label(reading.rule.percentile)
    values = ", ".join(
        f"{metric.name.upper()} {_ms(metric.percentile_ms)} of {metric.bound_ms}" for metric in reading.metrics
    )
    return f"{label} of {reading.n} requests: {values}; {reading.errors.k} failed. {_power(reading)}"


def _power(reading: Reading) -> str:
    ratio = float(1 - reading.rule.percentile)
    effect = stats.minimum_detectable(reading.n, ratio)
    if effect is None:
        return f"So few requests could not have shown any share over a bound to be above {ratio:g}."
    return f"A share of {effect:.3f} over a bound, where {ratio:g} may be, would have been found in four runs of five."


def _worst(reading: Reading, metric: Metric) -> Sample:
    place = max(range(reading.n), key=lambda index: metric.values[index])
    return reading.run.samples[place]


def _ms(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.1f} ms"


def _error_findings(reading: Reading) -> list[Finding]:
    """One finding a kind of failure, with an example; informative, since the counts are judged elsewhere."""
    kinds = Counter(sample.outcome for sample in reading.run.samples if sample.is_failed)
    found = []
    for kind, count in sorted(kinds.items()):
        first = next(sample for sample in reading.run.samples if sample.outcome == kind)
        found.append(
            finding(
                f"request-{kind.replace('_', '-')}",
                f"{count} of {reading.n} requests ended as {kind}",
                severity=Severity.INFO,
                pointer=first.prompt,
                found=first.detail,
            )
        )
    if reading.errors.k < reading.n and load_health.cached_ratio(reading.run.samples) is None:
        message = "The engine does not say how many prompt tokens came from a cache"
        found.append(finding("cache-unknown", message, severity=Severity.INFO))
    return found


def _measurements(reading: Reading) -> list[Measurement]:
    rule, run, n = reading.rule, reading.run, reading.n
    label = stats.percentile_label(rule.percentile)
    found = []
    for metric in reading.metrics:
        infinite = sum(math.isinf(value) for value in metric.values)
        for statistic, value, limit in (
            ("p50", stats.nearest_rank(metric.values, MEDIAN), None),
            (label, metric.percentile_ms, float(metric.bound_ms)),
        ):
            found.append(
                Measurement(
                    name=metric.name,
                    unit="ms",
                    statistic=statistic,
                    value=None if math.isinf(value) else value,
                    n=n,
                    infinite=infinite,
                    limit=limit,
                )
            )
        found.append(_proportion(f"{metric.name}_over_bound", metric.decision.over, n, float(1 - rule.percentile)))
    found += [_proportion(share.name, share.k, n, share.limit) for share in (reading.attainment, reading.errors)]
    window_seconds = reading.suite.plan[-1].at_us / 1e6
    # Of answers that ended in the window: what a queue still held at its end was not yet served.
    ended = (
        sample for sample in run.samples if not sample.is_failed and sample.done_us <= reading.suite.plan[-1].at_us
    )
    tokens = sum(sample.completion_tokens or 0 for sample in ended)
    effect = stats.minimum_detectable(n, float(1 - rule.percentile))
    allowed = stats.admissible_misses(n, rule.percentile, rule.confidence)
    numbers = (
        ("requests", "count", "value", float(n)),
        ("requests_at_least", "count", "value", float(stats.minimum_samples(rule.percentile, rule.confidence))),
        ("misses_allowed", "count", "value", None if allowed is None else float(allowed)),
        ("minimum_detectable_miss_ratio", "ratio", "power_80", effect),
        ("rate", "requests_per_second", "mean", n / window_seconds if window_seconds else None),
        ("goodput", "requests_per_second", "mean", reading.attainment.k / window_seconds if window_seconds else None),
        ("output_tokens", "tokens_per_second", "mean", tokens / window_seconds if window_seconds else None),
        ("in_flight_first_third", "count", "p50", reading.growth.first),
        ("in_flight_last_third", "count", "p50", reading.growth.last),
        ("in_flight_slope", "p_value", "t_test", reading.growth.p_value),
    )
    found += [
        Measurement(name=name, unit=unit, statistic=statistic, value=value, n=n)
        for name, unit, statistic, value in numbers
    ]
    return found


def _proportion(name: str, k: int, n: int, limit: float) -> Measurement:
    return Measurement(
        name=name,
        unit="ratio",
        statistic="value",
        value=k / n,
        n=n,
        k=k,
        low=stats.lower_bound(k, n),
        high=stats.upper_bound(k, n),
        limit=limit,
    )
