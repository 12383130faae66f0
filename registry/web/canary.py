"""What a canary was judged by, drawn: each step with its interval, the stable side and the limit. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.evidence import Entry, Kind
from schemas.result import Measurement

WIDTH, HEIGHT = 430, 200
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 16, 26
TITLES = {
    "error_ratio": "Share of failed requests",
    "ttft_over_limit": "Share over the bound on TTFT",
    "ttft": "TTFT",
}
"""Measurement → what it is, in the order in which they are drawn."""
HEADROOM = 1.1


@dataclass(frozen=True, slots=True)
class Look:
    """One judgement: candidate, its interval where it has one, and the stable side where it had requests."""

    x: float
    y: float | None
    low: float | None
    high: float | None
    beside: float | None
    label: str
    tone: str
    said: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One measurement over the steps, as coordinates."""

    title: str
    looks: list[Look]
    limit: float
    levels: list[tuple[float, str]]


def panels(log: Sequence[Entry]) -> list[Panel]:
    """Return what each step of a canary was judged by, a panel a measurement; none before the first judgement."""
    judged = [one for one in log if one.kind in (Kind.STEP_PASSED, Kind.STOP_CONDITION_FIRED)]
    found = []
    for name in TITLES:
        rows = [(one, seen) for one in judged if (seen := _named(one.body, name)) is not None]
        if rows:
            found.append(_panel(name, rows))
    return found


def _named(body: Mapping[str, Any], name: str) -> Measurement | None:
    """Return the first measurement of a name; a further condition of the same kind is told by the entry."""
    return next((Measurement.model_validate(one) for one in body["measurements"] if one["name"] == name), None)


def _panel(name: str, rows: Sequence[tuple[Entry, Measurement]]) -> Panel:
    beside = [_named(entry.body, f"baseline_{name}") for entry, _ in rows]
    values = [one.value for one in (*(seen for _, seen in rows), *beside) if one is not None and one.value is not None]
    limit = max(seen.limit or 0.0 for _, seen in rows)
    highs = [seen.high for _, seen in rows if seen.high is not None]
    end = max([*values, *highs, limit, 1e-9]) * HEADROOM
    step = (WIDTH - LEFT - RIGHT) / len(rows)

    def up(value: float) -> float:
        return round(TOP + (1 - value / end) * (HEIGHT - TOP - BOTTOM), 1)

    def maybe(value: float | None) -> float | None:
        return None if value is None else up(value)

    looks = [
        Look(
            x=round(LEFT + (place + 0.5) * step, 1),
            y=maybe(seen.value),
            low=maybe(seen.low),
            high=maybe(seen.high),
            beside=None if other is None else maybe(other.value),
            label=f"step {entry.body['step'] + 1}",
            tone="good" if entry.kind is Kind.STEP_PASSED else "bad",
            said=_said(entry, seen, other),
        )
        for place, ((entry, seen), other) in enumerate(zip(rows, beside, strict=True))
    ]
    unit = rows[0][1].unit
    levels = [(up(end / HEADROOM * part), _amount(end / HEADROOM * part, unit)) for part in (0, 0.5, 1)]
    statistic = rows[0][1].statistic
    title = TITLES[name] if statistic == "value" else f"{TITLES[name]} {statistic}"
    return Panel(title, looks, up(limit), levels)


def _said(entry: Entry, seen: Measurement, other: Measurement | None) -> str:
    said = f"step {entry.body['step'] + 1}: candidate {_amount(seen.value, seen.unit)} of {seen.n}"
    if seen.high is not None:
        said += f", at most {_amount(seen.high, seen.unit)}"
    if other is not None:
        said += f"; stable {_amount(other.value, other.unit)} of {other.n}"
    return f"{said}; limit {_amount(seen.limit, seen.unit)}"


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "—"
    if unit == "ratio":
        return f"{value * 100:.3g} %"
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"
