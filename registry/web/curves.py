"""What a load run measured, drawn: the share of requests that were answered within a time, one curve a metric. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gates.load_records import Run, Sample
from schemas.policy import LoadRule

WIDTH, HEIGHT = 430, 200
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 16, 26
ROUND = (1, 2, 2.5, 5, 10)
MOST_TICKS = 5
MARGIN = 1.08
"""How much further than what is drawn the axis goes."""
MOST_BOUND = 3.0
"""A bound that lies further out than so many times the slowest answer is named, and not drawn."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric: its curve, that of what it is compared with, and its bound, as coordinates."""

    name: str
    line: str
    before: str | None
    bound_x: float | None
    share_y: float
    share: str
    ticks: list[tuple[float, str]]
    levels: list[tuple[float, str]]
    reading: str


def curves(run: Run, rule: LoadRule, before: Run | None) -> list[Curve]:
    """Return the curves of a run's time to first token, time per output token and end-to-end latency.

    Args:
        run: as `gates.load_records` read it.
        rule: whose bounds are drawn.
        before: the run of what was live before, from the same plan; None without one.
    """
    metrics = (
        ("TTFT", [one.ttft_ms for one in run.samples], rule.ttft_ms, _of(before, "ttft_ms")),
        ("TPOT", [one.tpot_ms for one in run.samples], rule.tpot_ms, _of(before, "tpot_ms")),
        ("E2E", [one.e2e_ms for one in run.samples], rule.e2e_ms, _of(before, "e2e_ms")),
    )
    return [_curve(name, values, bound, rule, other) for name, values, bound, other in metrics]


def _of(run: Run | None, name: str) -> list[float] | None:
    return None if run is None else [_value(one, name) for one in run.samples]


def _value(sample: Sample, name: str) -> float:
    return float(getattr(sample, name))


def _curve(name: str, values: list[float], bound: int, rule: LoadRule, before: list[float] | None) -> Curve:
    slowest = max((one for one in (*values, *(before or ())) if math.isfinite(one)), default=0.0)
    is_near = bound <= slowest * MOST_BOUND or slowest == 0
    end = max(slowest, bound if is_near else 0.0, 1.0) * MARGIN
    step = _step(end)

    def across(ms: float) -> float:
        return round(LEFT + ms / end * (WIDTH - LEFT - RIGHT), 1)

    def up(share: float) -> float:
        return round(TOP + (1 - share) * (HEIGHT - TOP - BOTTOM), 1)

    def line(found: Sequence[float]) -> str:
        path = [f"M{across(0)},{up(0)}"]
        for place, ms in enumerate(sorted(one for one in found if math.isfinite(one)), start=1):
            path.append(f"H{across(ms)}V{up(place / len(found))}")
        return "".join([*path, f"H{across(end)}"])

    percentile = float(rule.percentile)
    return Curve(
        name=name,
        line=line(values),
        before=None if before is None else line(before),
        bound_x=across(bound) if is_near else None,
        share_y=up(percentile),
        share=f"{percentile * 100:g} %",
        ticks=[(across(place * step), _time(place * step)) for place in range(math.floor(end / step) + 1)],
        levels=[(up(share), f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)],
        reading=_reading(name, values, bound, percentile, before),
    )


def _reading(name: str, values: list[float], bound: int, percentile: float, before: list[float] | None) -> str:
    half, judged = (_within(values, share) for share in (0.5, percentile))
    said = f"{name}: half {half}, {percentile * 100:g} % {judged}"
    if before is not None:
        said += f" (before: {_at(before, 0.5) or 'never'} and {_at(before, percentile) or 'never'})"
    return f"{said}; bound {_time(bound)}"


def _within(values: list[float], share: float) -> str:
    found = _at(values, share)
    return f"within {found}" if found else "never: too many failed"


def _at(values: list[float], share: float) -> str | None:
    """Return the time within which a share of requests was answered, None for never. Source: nearest rank."""
    found = sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.inf
    return _time(found) if math.isfinite(found) else None


def _time(ms: float) -> str:
    if ms >= 1000:
        return f"{ms / 1000:.3g} s"
    return f"{ms:.0f} ms" if ms >= 10 or ms == round(ms) else f"{ms:.1f} ms"


def _step(end: float) -> float:
    """Return the smallest round step that leaves few enough labels."""
    power = math.pow(10, math.floor(math.log10(end / MOST_TICKS)))
    return next(power * one for one in ROUND if end / (power * one) <= MOST_TICKS)
