"""Whether the numbers of a result can all be true at once. Pure.

Each number of an impossible report looks plausible by itself, so nobody notices. What contradicts itself decides
nothing: our own gates then say inconclusive, and the service takes no pass with such numbers from anybody.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gates.gate import MAX_FINDINGS, Judged, clip, finding
from schemas.result import Measurement, Verdict

CODE: Final = "report-inconsistent"
TOLERANCE: Final = 1e-9
_PERCENTILE = re.compile(r"p(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two numbers that cannot both be true: their places in the list, and a sentence that names both."""

    places: tuple[int, int]
    message: str


def contradictions(measured: Sequence[Measurement]) -> list[Contradiction]:
    """Return what contradicts what in the measurements of one result, or nothing."""
    found = [one for place, each in enumerate(measured) for one in _within(place, each)]
    groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for place, each in enumerate(measured):
        groups[each.name, each.unit].append(place)
    for places in groups.values():
        found += _ordered(measured, places)
        found += _of_one_sample(measured, places)
    return [*found, *_of_load(measured)]


def held_to_itself(judged: Judged) -> Judged:
    """Return a judgement, or an inconclusive one when its own numbers contradict each other."""
    found = contradictions(judged.measurements)
    if judged.verdict is not Verdict.PASSED or not found:
        return judged
    findings = [finding(CODE, one.message, advice="Run the gate again.") for one in found]
    summary = clip(f"The numbers contradict each other: {'; '.join(one.message for one in found)}")
    return replace(
        judged, verdict=Verdict.INCONCLUSIVE, summary=summary, findings=[*findings, *judged.findings][:MAX_FINDINGS]
    )


def _within(place: int, one: Measurement) -> Iterator[Contradiction]:
    name = f"{one.name} {one.statistic}"
    for field in ("k", "infinite"):
        part = getattr(one, field)
        if part is not None and part > one.n:
            yield Contradiction((place, place), f"{name}: {field} {part} is more than n {one.n}")
    is_share = one.unit == "ratio" and one.statistic == "value" and one.n > 0
    if is_share and one.k is not None and one.value is not None and abs(one.value - one.k / one.n) > TOLERANCE:
        yield Contradiction((place, place), f"{name}: value {one.value:g} is not k {one.k} of n {one.n}")
    if one.value is not None:
        if one.low is not None and one.low > one.value + TOLERANCE:
            yield Contradiction((place, place), f"{name}: low {one.low:g} is above value {one.value:g}")
        if one.high is not None and one.high < one.value - TOLERANCE:
            yield Contradiction((place, place), f"{name}: high {one.high:g} is below value {one.value:g}")


def _rank(statistic: str) -> float | None:
    """Return where a statistic stands among those of one sample, from its least to its greatest value."""
    if statistic in {"min", "max"}:
        return {"min": 0.0, "max": 100.0}[statistic]
    match = _PERCENTILE.fullmatch(statistic)
    return float(match[1]) if match else None


def _size(one: Measurement) -> float | None:
    return math.inf if one.value is None and one.infinite else one.value


def _ordered(measured: Sequence[Measurement], places: Sequence[int]) -> Iterator[Contradiction]:
    ranked = sorted(
        (rank, place)
        for place in places
        if (rank := _rank(measured[place].statistic)) is not None and _size(measured[place]) is not None
    )
    for (_, first), (_, second) in itertools.pairwise(ranked):
        yield from _not_above(measured, first, second)
    ends = {measured[place].statistic: place for place in places}
    if "mean" in ends and _size(measured[ends["mean"]]) is not None:
        for low, high in (("min", "mean"), ("mean", "max"), ("mean", "peak")):
            if low in ends and high in ends:
                yield from _not_above(measured, ends[low], ends[high])


def _not_above(measured: Sequence[Measurement], low: int, high: int) -> Iterator[Contradiction]:
    less, more = _size(measured[low]), _size(measured[high])
    if less is not None and more is not None and less > more + TOLERANCE:
        yield Contradiction(
            (low, high),
            f"{measured[low].name}: {measured[low].statistic} {less:g} is above {measured[high].statistic} {more:g}",
        )


def _of_one_sample(measured: Sequence[Measurement], places: Sequence[int]) -> Iterator[Contradiction]:
    ranked = [place for place in places if _rank(measured[place].statistic) is not None]
    for first, second in itertools.pairwise(ranked):
        if measured[first].n != measured[second].n:
            one, other = measured[first], measured[second]
            message = f"{one.name}: {one.statistic} is of {one.n}, {other.statistic} of {other.n}"
            yield Contradiction((first, second), message)


def _of_load(measured: Sequence[Measurement]) -> Iterator[Contradiction]:
    """What the numbers of a load run owe each other."""
    places = {(one.name, one.statistic): place for place, one in enumerate(measured)}
    met, failed = places.get(("attainment", "value")), places.get(("error_ratio", "value"))
    if met is not None and failed is not None:
        good, bad = measured[met], measured[failed]
        if good.n != bad.n:
            yield Contradiction((met, failed), f"attainment is of {good.n} requests, error_ratio of {bad.n}")
        elif (good.k or 0) + (bad.k or 0) > good.n:
            message = f"attainment {good.k} and error_ratio {bad.k} are more than the {good.n} requests"
            yield Contradiction((met, failed), message)
    rate, goodput = places.get(("rate", "mean")), places.get(("goodput", "mean"))
    requests, tokens = places.get(("requests", "value")), places.get(("output_tokens", "mean"))
    if rate is not None and goodput is not None:
        good_rate, whole_rate = measured[goodput].value, measured[rate].value
        if good_rate is not None and whole_rate is not None and good_rate > whole_rate + TOLERANCE:
            yield Contradiction((goodput, rate), f"goodput {good_rate:g} is above rate {whole_rate:g}")
    if requests is not None and (measured[requests].value or 0) > 0:
        for other in (rate, tokens):
            if other is not None and measured[other].value is None:
                message = f"requests {measured[requests].value:g} took no time: {measured[other].name} has no value"
                yield Contradiction((requests, other), message)
