import math
import random
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as oracle

from gates import stats
from schemas.result import Verdict

D = Decimal
ROOT = Path(__file__).parents[2]

# gates.md 2.6, and LoadGen's own table: least n by confidence, misses and percentile.
FLOORS = [
    ("0.99", 0, {"0.9": 44, "0.95": 90, "0.97": 152, "0.99": 459, "0.999": 4603}),
    ("0.99", 1, {"0.9": 64, "0.95": 130, "0.97": 219, "0.99": 662, "0.999": 6636}),
    ("0.99", 2, {"0.99": 838}),
    ("0.99", 5, {"0.99": 1307}),
    ("0.99", 10, {"0.99": 2010}),
    ("0.99", 50, {"0.99": 6898}),
    ("0.95", 0, {"0.9": 29, "0.95": 59, "0.99": 299, "0.999": 2995}),
    ("0.95", 1, {"0.9": 46, "0.95": 93, "0.99": 473, "0.999": 4742}),
]
CASES = [(confidence, misses, p, n) for confidence, misses, row in FLOORS for p, n in row.items()]


@pytest.mark.parametrize(("confidence", "misses", "percentile", "n"), CASES)
def test_least_sample_sizes_are_those_of_loadgen(confidence, misses, percentile, n):
    assert stats.minimum_samples(D(percentile), D(confidence), misses) == n


@pytest.mark.parametrize(("confidence", "misses", "percentile", "n"), CASES)
def test_one_sample_less_than_the_least_is_inconclusive(confidence, misses, percentile, n):
    p, c = D(percentile), D(confidence)
    assert stats.decide_percentile(misses, n, p, c).verdict is Verdict.PASSED
    assert stats.decide_percentile(misses, n - 1, p, c).verdict is Verdict.INCONCLUSIVE
    assert stats.admissible_misses(n, p, c) == misses
    assert stats.admissible_misses(n - 1, p, c) == (misses - 1 if misses else None)


@given(st.integers(1, 400), st.data())
@settings(deadline=None)
def test_a_sample_passes_fails_or_cannot_tell_as_the_binomial_says(n, data):
    over = data.draw(st.integers(0, n))
    percentile = data.draw(st.sampled_from([D("0.5"), D("0.9"), D("0.95"), D("0.99")]))
    found = stats.decide_percentile(over, n, percentile, D("0.99"))
    miss = float(1 - percentile)
    assert found.pass_probability == pytest.approx(oracle.binom.cdf(over, n, miss), rel=1e-9, abs=1e-15)
    assert found.fail_probability == pytest.approx(oracle.binom.sf(over - 1, n, miss), rel=1e-9, abs=1e-15)
    expected = {
        (True, False): Verdict.PASSED,
        (False, True): Verdict.FAILED,
        (False, False): Verdict.INCONCLUSIVE,
    }
    assert found.verdict is expected[found.pass_probability < float(1 - D("0.99")), found.fail_probability < 0.05]


@given(st.integers(1, 300), st.data())
@settings(deadline=None)
def test_one_miss_more_never_improves_a_verdict(n, data):
    over = data.draw(st.integers(0, n - 1))
    percentile = data.draw(st.decimals("0.5", "0.999", places=3))
    better = [Verdict.PASSED, Verdict.INCONCLUSIVE, Verdict.FAILED]
    before, after = (stats.decide_percentile(k, n, percentile, D("0.95")).verdict for k in (over, over + 1))
    assert better.index(after) >= better.index(before)


def test_a_percentile_of_next_to_nothing_admits_almost_every_miss():
    assert stats.admissible_misses(1, D("0.01"), D("0.95")) == 0
    assert stats.admissible_misses(2, D("0.01"), D("0.95")) == 1
    assert stats.admissible_misses(1, D("0.01"), D("0.999")) is None


def test_all_misses_fail_and_no_sample_is_refused():
    assert stats.decide_percentile(10, 10, D("0.9"), D("0.99")).verdict is Verdict.FAILED
    with pytest.raises(ValueError, match="at least one observation"):
        stats.decide_percentile(0, 0, D("0.9"), D("0.99"))


@pytest.mark.parametrize(
    ("over", "n", "percentile", "confidence", "alpha"),
    [
        (-1, 10, "0.9", "0.99", 0.05),
        (11, 10, "0.9", "0.99", 0.05),
        (0, 10, "0", "0.99", 0.05),
        (0, 10, "1", "0.99", 0.05),
        (0, 10, "0.9", "0.5", 0.05),
        (0, 10, "0.9", "1", 0.05),
        (0, 10, "0.9", "0.99", 0.5),
        (0, 10, "0.9", "0.99", 0.0),
    ],
)
def test_numbers_that_would_make_a_vacuous_decision_are_refused(over, n, percentile, confidence, alpha):
    with pytest.raises(ValueError, match=r"proportion|percentile|confidence"):
        stats.decide_percentile(over, n, D(percentile), D(confidence), alpha)


def out_of_range():
    for bad in ("-0.1", "0", "1", "1.1"):
        yield "percentile", lambda bad=bad: stats.decide_percentile(0, 10, D(bad), D("0.95"))
        yield "percentile", lambda bad=bad: stats.minimum_samples(D(bad), D("0.95"))
        yield "percentile", lambda bad=bad: stats.minimum_samples(D("0.9"), D(bad))
        yield "bound", lambda bad=bad: stats.minimum_samples_for_bound(D(bad))
        yield "alpha", lambda bad=bad: stats.minimum_detectable(64, 0.1, alpha=float(bad))
        yield "alpha", lambda bad=bad: stats.minimum_detectable(64, 0.1, power=float(bad))
    for bad in ("-0.1", "0.4", "0.5", "1", "1.1"):
        yield "confidence", lambda bad=bad: stats.decide_percentile(0, 10, D("0.9"), D(bad))
    for bad in (-0.1, 0.0, 0.5, 0.6):
        yield "alpha", lambda bad=bad: stats.decide_percentile(0, 10, D("0.9"), D("0.95"), bad)
    for bad in ("-0.1", "0", "1.1"):
        yield "percentile", lambda bad=bad: stats.nearest_rank([1.0, 2.0], D(bad))
    for bad in (-0.5, 1.5):
        yield "ratio", lambda bad=bad: stats.at_most(0, 10, bad)
        yield "ratio", lambda bad=bad: stats.at_least(0, 10, bad)
        yield "ratio", lambda bad=bad: stats.minimum_detectable(10, bad)
        yield "quantile", lambda bad=bad: stats.gamma_quantile(bad, 1.0)
    for bad in (-1, 0):
        yield "observation", lambda bad=bad: stats.minimum_detectable(bad, 0.1)
        yield "above 0", lambda bad=bad: stats.gap_fit([1.0], rate_per_second=bad, shape=1.0)
        yield "above 0", lambda bad=bad: stats.gap_fit([1.0], rate_per_second=1.0, shape=bad)
        yield "above 0", lambda bad=bad: stats.expected_distinct(bad, rate_per_second=1.0, shape=1.0)
        yield "above 0", lambda bad=bad: stats.expected_distinct(1, rate_per_second=bad, shape=1.0)
        yield "above 0", lambda bad=bad: stats.expected_distinct(1, rate_per_second=1.0, shape=bad)
    yield "misses", lambda: stats.minimum_samples(D("0.9"), D("0.95"), -1)
    for gaps in ([], [math.nan], [1.0, math.nan]):
        yield "one gap, and no NaN", lambda gaps=gaps: stats.gap_fit(gaps, rate_per_second=1.0, shape=1.0)


@pytest.mark.parametrize(("about", "call"), list(out_of_range()))
def test_a_number_out_of_its_range_is_refused(about, call):
    with pytest.raises(ValueError, match=about):
        call()


def test_what_is_just_as_rare_as_the_limit_decides_nothing():
    # Coins: probabilities that are exact in binary.
    assert stats.decide_percentile(0, 2, D("0.5"), D("0.75")).verdict is Verdict.INCONCLUSIVE
    assert stats.decide_percentile(0, 3, D("0.5"), D("0.75")).verdict is Verdict.PASSED
    assert stats.decide_percentile(2, 2, D("0.5"), D("0.75"), 0.25).verdict is Verdict.INCONCLUSIVE
    assert stats.decide_percentile(3, 3, D("0.5"), D("0.75"), 0.25).verdict is Verdict.FAILED
    assert stats.minimum_samples(D("0.5"), D("0.75")) == 3
    assert stats.minimum_samples(D("0.5"), D("0.875")) == 4
    assert (stats.admissible_misses(2, D("0.5"), D("0.75")), stats.admissible_misses(3, D("0.5"), D("0.75"))) == (
        None,
        0,
    )
    assert stats.minimum_detectable(2, 0.5, alpha=0.25) is None
    assert stats.minimum_detectable(2, 0.5, alpha=0.75) == pytest.approx(math.sqrt(0.8))
    assert stats.holm({"a": 0.05}) == frozenset()
    assert stats.holm({"a": 0.05, "b": 0.025}) == frozenset()


def test_the_ends_of_the_binomial_distribution_are_certain():
    for ratio in (0.0, 0.3, 1.0):
        assert (stats.at_least(0, 7, ratio), stats.at_most(7, 7, ratio)) == (1.0, 1.0)
    assert (stats.at_least(1, 7, 0.0), stats.at_most(6, 7, 1.0)) == (0.0, 0.0)
    assert (stats.lower_bound(0, 7), stats.upper_bound(7, 7)) == (0.0, 1.0)


# One-sided 95 % bounds: 0 of 350 gives .0085 (gates.md A.6); 0 of 299 is the least for .01; textbook values
# of the two-sided 95 % interval are one-sided 97.5 % bounds: 5 of 10 is .187–.813, 1 of 20 is .0013–.2487.
@pytest.mark.parametrize(
    ("k", "n", "confidence", "low", "high"),
    [
        (0, 350, 0.95, 0.0, 0.00852),
        (0, 299, 0.95, 0.0, 0.009969),
        (5, 10, 0.975, 0.18709, 0.81291),
        (1, 20, 0.975, 0.001265, 0.248733),
        (10, 10, 0.975, 0.69150, 1.0),
        (64, 64, 0.95, 0.954270, 1.0),
    ],
)
def test_bounds_are_those_of_clopper_and_pearson(k, n, confidence, low, high):
    assert stats.lower_bound(k, n, confidence) == pytest.approx(low, rel=1e-3)
    assert stats.upper_bound(k, n, confidence) == pytest.approx(high, rel=1e-3)


@given(st.integers(1, 500), st.data())
@settings(deadline=None)
def test_bounds_agree_with_an_independent_implementation(n, data):
    k = data.draw(st.integers(0, n))
    interval = oracle.binomtest(k, n).proportion_ci(confidence_level=0.9, method="exact")
    assert stats.lower_bound(k, n) == pytest.approx(interval.low, abs=1e-9)
    assert stats.upper_bound(k, n) == pytest.approx(interval.high, abs=1e-9)


def test_the_upper_bound_covers_the_truth_as_often_as_it_says():
    for ratio in (0.01, 0.1, 0.5):
        covered = sum(oracle.binom.pmf(k, 100, ratio) for k in range(101) if stats.upper_bound(k, 100) >= ratio)
        assert covered >= 0.95


@pytest.mark.parametrize(("limit", "n"), [("0.99", 299), ("0.95", 59), ("0.9", 29), ("0.98", 149), ("0.97", 99)])
def test_a_faultless_bound_has_a_least_sample_size(limit, n):
    assert stats.minimum_samples_for_bound(D(limit)) == n
    assert stats.lower_bound(n, n) >= float(D(limit)) > stats.lower_bound(n - 1, n - 1)
    assert stats.upper_bound(0, n) <= float(1 - D(limit)) + 1e-12


def test_one_good_sample_proves_a_bound_of_a_twentieth():
    # The logarithms' quotient is 1 up to rounding, and must not become 2.
    assert stats.minimum_samples_for_bound(D("0.05")) == 1
    assert stats.lower_bound(1, 1) == pytest.approx(0.05)


@pytest.mark.parametrize("limit", ["0", "1"])
def test_a_bound_that_every_or_no_sample_reaches_is_refused(limit):
    with pytest.raises(ValueError, match="between 0 and 1"):
        stats.minimum_samples_for_bound(D(limit))


def test_the_nearest_rank_is_a_sample_and_the_decimal_is_exact():
    assert stats.nearest_rank([*range(1, 11)], D("0.9")) == 9
    assert stats.nearest_rank([*range(1, 101)], D("0.07")) == 7  # 0.07 * 100 is 7.000000000000001 in floats
    assert stats.nearest_rank([3.0, 1.0, 2.0], D("0.5")) == 2.0
    assert stats.nearest_rank([5.0], D("0.001")) == 5.0
    assert stats.nearest_rank([1.0, 2.0], D(1)) == 2.0


@pytest.mark.parametrize(("percentile", "label"), [("0.9", "p90"), ("0.90", "p90"), ("0.999", "p99.9"), ("0.5", "p50")])
def test_a_percentile_is_called_as_people_call_it(percentile, label):
    assert stats.percentile_label(D(percentile)) == label


def test_failures_stay_in_a_percentile_as_infinity():
    values = [1.0] * 98 + [math.inf] * 2
    assert stats.nearest_rank(values, D("0.98")) == 1.0
    assert stats.nearest_rank(values, D("0.99")) == math.inf


@pytest.mark.parametrize(
    ("values", "percentile"), [([], "0.5"), ([1.0], "0"), ([1.0], "1.1"), ([1.0, math.nan], "0.5")]
)
def test_a_percentile_of_nothing_is_refused(values, percentile):
    with pytest.raises(ValueError, match="percentile"):
        stats.nearest_rank(values, D(percentile))


@given(st.integers(2, 2000), st.floats(0.005, 0.3))
@settings(deadline=None)
def test_the_minimum_detectable_ratio_is_found_with_the_power_it_states(n, ratio):
    found = stats.minimum_detectable(n, ratio)
    tails = oracle.binom.sf(np.arange(n + 1) - 1, n, ratio)
    critical = next((k for k, tail in enumerate(tails) if tail < 0.05), None)
    if critical is None:
        assert found is None
    else:
        assert found is not None
        assert found > ratio
        assert oracle.binom.sf(critical - 1, n, found) == pytest.approx(0.8, abs=1e-6)


def test_a_larger_sample_detects_a_smaller_effect():
    effects = [stats.minimum_detectable(n, 0.1) for n in (64, 256, 1024)]
    assert effects == sorted(effects, reverse=True)
    assert effects[0] == pytest.approx(0.22395, abs=1e-5)
    assert stats.minimum_detectable(1, 0.1) is None


@given(st.floats(-50, 50), st.integers(1, 60))
@settings(deadline=None)
def test_students_tail_agrees_with_an_independent_implementation(t, degrees):
    assert stats.student_above(t, degrees) == pytest.approx(oracle.t.sf(t, degrees), rel=1e-9, abs=1e-300)


def test_students_tail_at_its_ends_and_outside():
    assert stats.student_above(math.inf, 1) == 0.0
    assert stats.student_above(-math.inf, 10) == 1.0
    for t, degrees in ((1.0, 0), (math.nan, 10)):
        with pytest.raises(ValueError, match="Student"):
            stats.student_above(t, degrees)


@given(st.floats(0, 1, exclude_max=True), st.floats(0.05, 1000))
@settings(deadline=None)
def test_gamma_quantiles_agree_with_an_independent_implementation(chance, shape):
    assert stats.gamma_quantile(chance, shape) == pytest.approx(oracle.gamma.ppf(chance, shape), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(("chance", "shape"), [(-0.1, 1.0), (1.0, 1.0), (0.5, 0.0), (0.5, -1.0)])
def test_a_quantile_that_is_none_is_refused(chance, shape):
    with pytest.raises(ValueError, match="quantile"):
        stats.gamma_quantile(chance, shape)


def test_holm_stops_at_the_first_hypothesis_that_stands():
    assert stats.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {"a"}
    assert stats.holm({"a": 0.01, "b": 0.02, "c": 0.03}) == {"a", "b", "c"}
    assert stats.holm({"a": 0.02, "b": 0.02, "c": 0.02}) == frozenset()
    assert stats.holm({}) == frozenset()
    # The smallest first, whatever its name is.
    assert stats.holm({"a": 0.04, "b": 0.001}) == {"a", "b"}


def gamma_gaps(n, rate, shape, seed):
    source = random.Random(seed)
    return [source.gammavariate(shape, 1 / (rate * shape)) for _ in range(n)]


@pytest.mark.parametrize("shape", [0.5, 1.0, 4.0])
def test_gaps_fit_the_process_they_come_from_and_no_other(shape):
    gaps = gamma_gaps(400, 20, shape, seed=7)
    assert stats.gap_fit(gaps, rate_per_second=20, shape=shape) > 0.001
    assert stats.gap_fit(gaps, rate_per_second=40, shape=shape) < 0.001
    assert stats.gap_fit(gaps, rate_per_second=20, shape=shape * 4) < 0.001


def test_the_fit_agrees_with_the_exact_test_where_it_decides():
    gaps = gamma_gaps(100, 10, 1.0, seed=3)
    for rate in (13, 14, 15, 16):
        exact = oracle.kstest(gaps, "expon", args=(0, 1 / rate), method="exact").pvalue
        if exact < 0.05:
            assert stats.gap_fit(gaps, rate_per_second=rate, shape=1.0) == pytest.approx(exact, rel=0.02)


def test_a_true_process_is_rarely_rejected():
    rejected = sum(
        stats.gap_fit(gamma_gaps(64, 20, 1.0, seed), rate_per_second=20, shape=1.0) < 0.05 for seed in range(400)
    )
    assert rejected / 400 < 0.08


@pytest.mark.parametrize(
    ("rate", "n", "shape"), [(10, 1000, 1.0), (1000, 5000, 1.0), (20, 2000, 0.25), (10, 50_000, 1.0), (1, 5000, 400.0)]
)
def test_copied_gaps_have_half_the_distinct_values_that_are_expected(rate, n, shape):
    gaps = [round(gap * 1e6) for gap in gamma_gaps(n, rate, shape, seed=5)]
    expected = stats.expected_distinct(n, rate_per_second=rate, shape=shape)
    assert len(set(gaps)) == pytest.approx(expected, rel=0.03)
    assert len(set(gaps[: n // 2] * 2)) < 0.95 * expected


def test_one_gap_at_one_request_a_second_can_be_fitted():
    assert stats.gap_fit([1.0], rate_per_second=1.0, shape=1.0) == pytest.approx(2 / math.e, rel=1e-5)


def test_gaps_that_lie_evenly_over_the_distribution_fit_it_with_certainty():
    gaps = [-math.log1p(-(rank + 0.5) / 64) for rank in range(64)]
    assert stats.gap_fit(gaps, rate_per_second=1.0, shape=1.0) == 1.0


def test_gaps_below_the_step_of_the_clock_still_fit():
    gaps = [round(gap * 1e6) / 1e6 for gap in gamma_gaps(2000, 20, 0.25, seed=1)]
    assert gaps.count(0.0) > 50
    assert stats.gap_fit(gaps, rate_per_second=20, shape=0.25) > 0.1
    assert stats.gap_fit(gaps, rate_per_second=20, shape=0.25, resolution_seconds=0) < 0.01


# Up to 2 ms each microsecond is counted by itself, above in groups.
@pytest.mark.parametrize(
    ("n", "rate", "shape", "within"),
    [
        (1, 1_000_000, 1.0, 1e-8),
        (3, 1_000_000, 1.0, 1e-8),
        (100, 100_000, 1.0, 1e-8),
        (400, 20_000, 4.0, 1e-8),
        (50, 3_000, 0.5, 1e-4),
    ],
)
def test_expected_distinct_values_are_those_of_the_process_rounded_to_microseconds(n, rate, shape, within):
    scale = 1e6 / (rate * shape)
    edges = np.arange(0, 200_000) + 0.5
    chances = np.diff(oracle.gamma.cdf(np.concatenate([[0.0], edges]), shape, scale=scale))
    exact = float(np.sum(-np.expm1(n * np.log1p(-chances))))
    assert stats.expected_distinct(n, rate_per_second=rate, shape=shape) == pytest.approx(exact, rel=within)


def test_gaps_that_all_round_to_nothing_have_one_distinct_value():
    assert stats.expected_distinct(10, rate_per_second=1e12, shape=1.0) == pytest.approx(1.0)


def test_slow_gaps_need_no_ties():
    assert stats.expected_distinct(10, rate_per_second=0.01, shape=1.0) == pytest.approx(10.0, abs=1e-3)


def test_a_process_that_computes_nothing_does_not_load_what_computes() -> None:
    """The service and every runner import this module when they start, and its functions take a third of a second."""
    code = "import sys, gates.stats\nprint('scipy.special' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
