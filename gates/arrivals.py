"""Draws the arrival plan of a load suite, once, and tells whether a stored plan is what it says it is.

A plan is drawn by the inverse of the distribution from `random.Random(seed).random()`, the one stream that Python
promises to keep, and then stored: the gate replays the stored plan and never draws.
"""

import itertools
import random
from decimal import Decimal

from gates import stats
from schemas.suite import Arrival, ArrivalProcess, LoadSpec, LoadSuite

LEAST_GAP_FIT = 0.001
"""Gaps that come so rarely from the declared distribution do not come from it."""
LEAST_DISTINCT_RATIO = 0.95
"""Of the distinct gaps that the declared distribution would have; copied streams have half."""
RATE_TOLERANCE_RATIO = 0.01
"""A constant plan keeps its rate within this."""


def make_suite(spec: LoadSpec) -> LoadSuite:
    """Draw the plan of a load suite. The same spec gives the same suite.

    Each prompt is sent equally often, to within one, in a drawn order.

    Raises:
        ValueError: rate, shape or request_seconds is out of range, prompt ids repeat, or the seed draws one of the
            rare plans that do not look like their process.
    """
    process = ArrivalProcess(
        distribution=spec.distribution,
        rate_per_second=spec.rate_per_second,
        shape=spec.shape,
        seed=spec.seed,
    )
    source = random.Random(spec.seed)
    prompts = [prompt.id for prompt in spec.prompts]
    warmup = draw(source, process, spec.warmup_requests, prompts)
    plan = draw(source, process, spec.requests, prompts)
    suite = LoadSuite(
        schema_id="sluicegate.dev/suite/load/v1",
        name=spec.name,
        description=spec.description,
        prompts=spec.prompts,
        process=process,
        warmup=warmup,
        plan=plan,
        request_seconds=spec.request_seconds,
        salt=spec.salt,
    )
    if faults := plan_faults(suite):
        raise ValueError(f"seed {spec.seed} draws an unlikely plan ({'; '.join(faults)}); take another seed")
    return suite


def draw(source: random.Random, process: ArrivalProcess, n: int, prompts: list[str]) -> list[Arrival]:
    """Draw n arrivals whose gaps follow the process, the last at exactly n / rate.

    The draw is scaled to that end, so that every seed offers the same mean rate.

    Raises:
        ValueError: the shape is outside 0.05 to 1000.
    """
    gaps = [1.0] * n
    if process.distribution == "gamma":
        shape = float(process.shape or 0)
        if not 0.05 <= shape <= 1000:
            raise ValueError("shape must be from 0.05 to 1000")
        gaps = [stats.gamma_quantile(source.random(), shape) for _ in range(n)]
    instants = list(itertools.accumulate(gaps))
    microseconds = n / float(process.rate_per_second) * 1e6
    order = _shuffled(source, [prompts[place % len(prompts)] for place in range(n)])
    return [
        Arrival(at_us=round(instant / instants[-1] * microseconds), prompt=prompt)
        for instant, prompt in zip(instants, order, strict=True)
    ]


def _shuffled(source: random.Random, items: list[str]) -> list[str]:
    for last in range(len(items) - 1, 0, -1):
        place = int(source.random() * (last + 1))
        items[last], items[place] = items[place], items[last]
    return items


def plan_gaps(suite: LoadSuite) -> list[int]:
    """Return the gaps of the measured plan in microseconds, the first from the end of the warm-up."""
    instants = [0, *(arrival.at_us for arrival in suite.plan)]
    return [after - before for before, after in itertools.pairwise(instants)]


def plan_faults(suite: LoadSuite) -> list[str]:
    """Return why the stored plan is not the process that the suite declares, one sentence each, or nothing.

    A wrong rate, bursts, or a stream copied by workers with one seed would otherwise be a load that nobody asked
    for, under a name that says otherwise.
    """
    gaps = plan_gaps(suite)
    faults = [f"the plan {fault}" for fault in gap_faults([gap / 1e6 for gap in gaps], suite.process)]
    if suite.process.distribution == "gamma":
        expected = stats.expected_distinct(len(gaps), **gamma_of(suite.process))
        if len(set(gaps)) < LEAST_DISTINCT_RATIO * expected:
            faults.append(f"the plan has {len(set(gaps))} distinct gaps where {expected:.0f} are expected")
    return faults


def gap_faults(
    gaps: list[float],
    process: ArrivalProcess,
    *,
    resolution_seconds: float = 0.000_001,
    tolerance_seconds: float = 0.000_002,
) -> list[str]:
    """Return how gaps in seconds disagree with a process, as the ends of sentences, or nothing.

    Args:
        gaps: at least one.
        process: what they should follow.
        resolution_seconds: how far any gap of a gamma process may be off.
        tolerance_seconds: how far one gap of a constant process may be off, for 99 in 100 of them.
    """
    if process.distribution == "gamma":
        p_value = stats.gap_fit(gaps, **gamma_of(process), resolution_seconds=resolution_seconds)
        if p_value > LEAST_GAP_FIT:
            return []
        declared = f"a gamma of shape {process.shape} at {process.rate_per_second} requests a second"
        return [f"does not follow {declared} (p = {p_value:.1e})"]
    gap = 1.0 / float(process.rate_per_second)
    # Wider than the tolerance by what the rate may be off.
    off = sum(abs(each - gap) > tolerance_seconds + gap * RATE_TOLERANCE_RATIO for each in gaps)
    if off <= len(gaps) * Decimal("0.01"):
        return []
    return [f"has {off} of {len(gaps)} gaps that are not {gap * 1000:.3f} ms"]


def gamma_of(process: ArrivalProcess) -> dict[str, float]:
    """Return rate and shape of a gamma process as the statistics take them."""
    return {"rate_per_second": float(process.rate_per_second), "shape": float(process.shape or 0)}
