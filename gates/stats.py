"""The statistics that gates stand on: exact binomial tests and intervals, percentiles with infinities, gap fit.

Everything here is a pure function of counts or samples, so that a verdict can be recomputed bit for bit. Counts
come in, never ratios: a ratio alone has lost the size of its sample. Percentiles come as `Decimal`, since
⌈0.9 · 10⌉ must be 9 on every machine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import numpy.typing as npt
import scipy  # its parts load when they are first asked, which most processes never do

from schemas.result import Verdict

FAIL_ALPHA = 0.05
"""Largest probability of calling a candidate bad that is exactly at its limit."""
BOUND_CONFIDENCE = 0.95
"""Confidence of the one-sided bounds of proportions."""


def at_most(k: int, n: int, ratio: float) -> float:
    """Return P(Bin(n, ratio) <= k).

    Raises:
        ValueError: n is not positive, k is outside 0..n, or the ratio is outside 0..1.
    """
    _check(k, n, ratio)
    return float(scipy.special.bdtr(k, n, ratio))


def at_least(k: int, n: int, ratio: float) -> float:
    """Return P(Bin(n, ratio) >= k).

    Raises:
        ValueError: as `at_most`.
    """
    _check(k, n, ratio)
    return float(scipy.special.bdtrc(k - 1, n, ratio))


def _check(k: int, n: int, ratio: float) -> None:
    if n < 1:
        raise ValueError("a proportion needs at least one observation")
    if not 0 <= k <= n:
        raise ValueError(f"{k} of {n} is no proportion")
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"{ratio} is no ratio")


def lower_bound(k: int, n: int, confidence: float = BOUND_CONFIDENCE) -> float:
    """Return the one-sided Clopper–Pearson lower bound of a proportion of k among n.

    Raises:
        ValueError: as `at_most`.

    Source: Clopper and Pearson (1934).
    """
    _check(k, n, confidence)
    return 0.0 if k == 0 else float(scipy.special.betaincinv(k, n - k + 1, 1.0 - confidence))


def upper_bound(k: int, n: int, confidence: float = BOUND_CONFIDENCE) -> float:
    """Return the one-sided Clopper–Pearson upper bound of a proportion of k among n.

    Raises:
        ValueError: as `at_most`.

    Source: Clopper and Pearson (1934).
    """
    _check(k, n, confidence)
    return 1.0 if k == n else float(scipy.special.betaincinv(k + 1, n - k, confidence))


def nearest_rank(values: Sequence[float], percentile: Decimal) -> float:
    """Return the nearest-rank percentile: the ⌈p·n⌉-th of the ascending values.

    Args:
        values: the whole sample, at least one; what never came is `math.inf`.
        percentile: above 0, at most 1.

    Raises:
        ValueError: no values, a NaN, or a percentile out of range.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    if any(math.isnan(value) for value in values):
        raise ValueError("a percentile has no place for NaN")
    if not 0 < percentile <= 1:
        raise ValueError(f"percentile {percentile} is not above 0 and at most 1")
    return sorted(values)[math.ceil(percentile * len(values)) - 1]


def percentile_label(percentile: Decimal) -> str:
    """Return the name of a percentile: p90, p99.9."""
    return f"p{(percentile * 100).normalize():f}"


@dataclass(frozen=True, slots=True)
class PercentileDecision:
    """What `over` misses among `n` say about a percentile that should lie within its bound.

    `pass_probability` is P(Bin(n, 1−p) <= over): how often so few misses come from a candidate that is just bad
    enough. `fail_probability` is P(Bin(n, 1−p) >= over): how often so many come from one that is just good enough.
    """

    verdict: Verdict
    over: int
    n: int
    pass_probability: float
    fail_probability: float


def decide_percentile(
    over: int, n: int, percentile: Decimal, confidence: Decimal, alpha: float = FAIL_ALPHA
) -> PercentileDecision:
    """Decide whether the percentile of a metric lies within its bound, from the number of samples beyond it.

    Args:
        over: samples beyond the bound; a failed request is beyond every bound.
        n: all samples.
        percentile: p, between 0 and 1; a share of 1−p may be beyond the bound.
        confidence: passed only if so few misses have a probability below 1 − confidence; above 0.5.
        alpha: failed only if so many misses have a probability below this; below 0.5.

    Returns:
        passed, failed or, when n is too small to tell, inconclusive.

    Raises:
        ValueError: n is not positive or a number is out of range.

    Source: MLPerf LoadGen, `early_stopping.cc` (tolerance 0).
    """
    if not 0 < percentile < 1:
        raise ValueError(f"percentile {percentile} is not between 0 and 1")
    if not Decimal("0.5") < confidence < 1 or not 0 < alpha < 0.5:
        # Within these ranges no sample can both pass and fail.
        raise ValueError("confidence must be between 0.5 and 1, alpha between 0 and 0.5")
    miss_ratio = float(1 - percentile)
    passing, failing = at_most(over, n, miss_ratio), at_least(over, n, miss_ratio)
    verdict = Verdict.INCONCLUSIVE
    if passing < float(1 - confidence):
        verdict = Verdict.PASSED
    elif failing < alpha:
        verdict = Verdict.FAILED
    return PercentileDecision(verdict, over, n, passing, failing)


def minimum_samples(percentile: Decimal, confidence: Decimal, misses: int = 0) -> int:
    """Return the least n with which `decide_percentile` can pass in spite of so many misses.

    Raises:
        ValueError: percentile or confidence is not between 0 and 1, or misses is negative.
    """
    if not 0 < percentile < 1 or not 0 < confidence < 1 or misses < 0:
        raise ValueError("percentile and confidence must be between 0 and 1, misses not negative")
    ratio, limit = float(1 - percentile), float(1 - confidence)
    low, high = misses, misses + 1  # `low` never passes, `high` is doubled until it does
    while at_most(misses, high, ratio) >= limit:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at_most(misses, middle, ratio) < limit else (middle, high)
    return high


def minimum_samples_for_bound(limit: Decimal) -> int:
    """Return the least n with which a faultless proportion's 95 % bound reaches `limit`.

    Args:
        limit: the least lower bound of a share of successes, between 0 and 1. For an upper bound of an error
            ratio pass 1 − ratio.

    Raises:
        ValueError: the limit is not between 0 and 1, so that no sample reaches it or every sample does.
    """
    if not 0 < limit < 1:
        raise ValueError(f"a bound of {limit} is not between 0 and 1")
    return math.ceil(math.log(1.0 - BOUND_CONFIDENCE) / math.log(float(limit)) - 1e-9)


def admissible_misses(n: int, percentile: Decimal, confidence: Decimal) -> int | None:
    """Return the most misses with which n samples still pass, or None when even 0 do not."""
    ratio, limit = float(1 - percentile), float(1 - confidence)
    found: int | None = None
    for misses in range(n):  # n misses of n never pass
        if at_most(misses, n, ratio) >= limit:
            break
        found = misses
    return found


def minimum_detectable(n: int, ratio: float, *, alpha: float = FAIL_ALPHA, power: float = 0.8) -> float | None:
    """Return the smallest true ratio above `ratio` that n observations expose with a probability of `power`.

    Exposed means that the exact one-sided test at `alpha` rejects `ratio`. None: not even a ratio of 1 is.

    Raises:
        ValueError: n is not positive, or a number is outside 0..1.
    """
    _check(0, n, ratio)
    if not 0 < alpha < 1 or not 0 < power < 1:
        raise ValueError("alpha and power must be between 0 and 1")
    if at_least(n, n, ratio) >= alpha:
        return None
    low, high = 0, n  # at_least falls as k rises
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at_least(middle, n, ratio) < alpha else (middle, high)
    return float(scipy.special.betaincinv(high, n - high + 1, power))


def student_above(t: float, degrees: int) -> float:
    """Return P(T >= t) of Student's distribution.

    Raises:
        ValueError: degrees of freedom are not positive, or t is NaN.
    """
    if degrees < 1 or math.isnan(t):
        raise ValueError("Student's distribution needs a number and at least one degree of freedom")
    return float(scipy.special.stdtr(degrees, -t))


def gamma_quantile(chance: float, shape: float) -> float:
    """Return the quantile of the gamma distribution with this shape and scale 1.

    Args:
        chance: from 0 to below 1.
        shape: above 0; 1 is the exponential distribution.

    Raises:
        ValueError: a number is out of range.
    """
    if not 0 <= chance < 1 or not shape > 0:
        raise ValueError("a quantile needs a chance from 0 to below 1 and a shape above 0")
    return float(scipy.special.gammaincinv(shape, chance))


def holm(p_values: Mapping[str, float], alpha: float = FAIL_ALPHA) -> frozenset[str]:
    """Return the names whose hypotheses fall, so that one falls wrongly with a probability of at most `alpha`.

    Source: Holm (1979).
    """
    fallen: set[str] = set()
    for place, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        if not p_values[name] < alpha / (len(p_values) - place):
            break
        fallen.add(name)
    return frozenset(fallen)


def gap_fit(gaps: Sequence[float], *, rate_per_second: float, shape: float, resolution_seconds: float = 1e-6) -> float:
    """Return the p-value with which gaps come from a gamma distribution with this mean rate and shape.

    Twice the exact one-sided Kolmogorov–Smirnov probability, which is the two-sided one wherever it is small
    enough to matter.

    Args:
        gaps: seconds between one arrival and the next, at least one.
        rate_per_second: mean arrivals a second, above 0.
        shape: of the gamma, above 0; 1 is Poisson.
        resolution_seconds: how far a gap may be off; a bursty process has gaps shorter than the clock's step.

    Raises:
        ValueError: no gaps, a NaN among them, or rate or shape not above 0.

    Source: Birnbaum and Tingey (1951).
    """
    if not gaps or any(math.isnan(gap) for gap in gaps):
        raise ValueError("a fit needs at least one gap, and no NaN")
    if rate_per_second <= 0 or shape <= 0:
        raise ValueError("rate and shape must be above 0")
    n = len(gaps)
    ordered = np.sort(np.asarray(gaps, dtype=np.float64))
    ranks = np.arange(1, n + 1, dtype=np.float64)
    above = _gamma_cdf(ordered + resolution_seconds, rate_per_second, shape)
    below = _gamma_cdf(ordered - resolution_seconds, rate_per_second, shape)
    distance = float(max(np.max(ranks / n - above), np.max(below - (ranks - 1) / n)))
    return min(1.0, 2.0 * float(scipy.special.smirnov(n, distance)))


def expected_distinct(n: int, *, rate_per_second: float, shape: float) -> float:
    """Return how many distinct whole microseconds n gaps of a gamma process are expected to have.

    Copies of one stream, such as two workers with one seed, have half of it; a fast or bursty process has ties of
    its own.

    Raises:
        ValueError: n, rate or shape is not above 0.
    """
    if n < 1 or rate_per_second <= 0 or shape <= 0:
        raise ValueError("n, rate and shape must be above 0")
    quantiles = scipy.special.gammaincinv(shape, np.linspace(0.0, 1.0 - 1e-9, 2_001)) / (rate_per_second * shape) * 1e6
    # Whole microseconds in groups of about the same chance: one by one where they are short, else by quantile.
    starts = np.unique(np.concatenate([np.arange(2_000.0), np.floor(quantiles)]))
    sizes = np.diff(starts)
    masses = np.diff(_gamma_cdf((starts - 0.5) / 1e6, rate_per_second, shape))
    chances = np.minimum(masses / sizes, 1.0 - 1e-12)
    return float(np.sum(-sizes * np.expm1(n * np.log1p(-chances))))


def _gamma_cdf(seconds: npt.NDArray[np.float64], rate_per_second: float, shape: float) -> npt.NDArray[np.float64]:
    return np.asarray(scipy.special.gammainc(shape, np.maximum(seconds, 0.0) * (rate_per_second * shape)))
