"""The split over time: an SVG step line from a release's log, and a target's traffic as stacked bars. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from schemas.evidence import Entry, Kind, SplitEntry

WIDTH, HEIGHT = 860, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 14, 26
HALF_LABEL = 24
"""Room that half a label of the time axis takes."""
MOST_TICKS = 6
"""The time axis has fewer steps than this."""
MINUTE, HOUR, DAY = 60, 3600, 86400
STEPS = (
    *(0.2, 0.5, 1, 2, 5, 10, 20, 30),
    *(MINUTE * count for count in (1, 2, 5, 10, 20, 30)),
    *(HOUR * count for count in (1, 2, 4, 6, 12)),
    *(DAY * count for count in (1, 2, 7, 14, 28)),
)
"""Seconds between two labels of the time axis: the first that leaves few enough of them."""
LEAST_WIDTH = 1.5
"""Width of the shortest time that is drawn."""
UNITS = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"))
MARKS = {
    Kind.STEP_PASSED: ("good", "step passed"),
    Kind.STOP_CONDITION_FIRED: ("bad", "stop condition fired"),
    Kind.PROMOTED: ("good", "promoted"),
    Kind.HELD: ("warn", "held"),
    Kind.PAUSED: ("warn", "paused"),
}


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened, at a place on the chart."""

    x: float
    y: float
    tone: str
    title: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A label on the time axis."""

    x: float
    label: str
    anchor: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Coordinates of everything that the template draws."""

    width: int
    height: int
    left: int
    right: int
    line: str
    area: str
    marks: list[Mark]
    ticks: list[Tick]
    levels: list[tuple[float, str]]


def split_over_time(log: Sequence[Entry], *, now: datetime, is_over: bool) -> Chart | None:
    """Return the candidate's applied weight over time, or None before traffic has moved.

    Args:
        log: the release's entries, oldest first.
        now: right end of a line that still goes on.
        is_over: whether the release has ended; the line then ends with its last entry.
    """
    points = [(entry.recorded_at, weight) for entry in log if (weight := _weight(entry)) is not None]
    if not points:
        return None
    start = log[0].recorded_at
    end = log[-1].recorded_at if is_over else max(now, log[-1].recorded_at)
    span = max((end - start).total_seconds(), 1.0)

    def across(at: datetime) -> float:
        share = (at - start).total_seconds() / span
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def up(weight_bp: int) -> float:
        return round(TOP + (1 - weight_bp / 10_000) * (HEIGHT - TOP - BOTTOM), 1)

    path, level = [f"M{LEFT},{up(0)}"], 0
    for at, weight in points:
        path += [f"H{across(at)}", f"V{up(weight)}"]
        level = weight
    path.append(f"H{across(end)}")
    line = " ".join(path)
    return Chart(
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
        line=line,
        area=f"{line} V{up(0)} H{LEFT} Z" if level or len(points) > 1 else f"{line} V{up(0)} Z",
        marks=_marks(log, points, across, up),
        ticks=_ticks(start, span),
        levels=[(up(bp), f"{bp // 100} %") for bp in (0, 2500, 5000, 7500, 10_000)],
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """What one bundle had of the traffic for a time."""

    x: float
    y: float
    width: float
    height: float
    bundle: str


@dataclass(frozen=True, slots=True)
class Weights:
    """Coordinates of a target's traffic over time."""

    width: int
    height: int
    left: int
    right: int
    bars: list[Bar]
    ticks: list[Tick]
    levels: list[tuple[float, str]]


def weights_over_time(
    spans: Sequence[tuple[datetime, datetime | None, Sequence[SplitEntry]]], *, now: datetime
) -> Weights | None:
    """Return the share of each bundle over time, stacked, or None where nothing has served.

    Args:
        spans: since when, until when (None for still) and which split, the oldest first.
        now: right end of what is still in force.
    """
    if not any(arm.weight_bp for _, _, arms in spans for arm in arms):
        return None
    start = spans[0][0]
    seconds = max(((spans[-1][1] or now) - start).total_seconds(), 1.0)
    room, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    bars = []
    for since, until, arms in spans:
        x = LEFT + (since - start).total_seconds() / seconds * room
        wide = ((until or now) - since).total_seconds() / seconds * room
        foot = float(HEIGHT - BOTTOM)
        for arm in arms:
            height = arm.weight_bp / 10_000 * tall
            foot -= height
            if height:
                # A step of seconds is still seen beside days.
                bars.append(
                    Bar(round(x, 1), round(foot, 1), round(max(wide, LEAST_WIDTH), 1), round(height, 1), arm.bundle)
                )
    levels = [(round(TOP + (1 - bp / 10_000) * tall, 1), f"{bp // 100} %") for bp in (0, 2500, 5000, 7500, 10_000)]
    return Weights(WIDTH, HEIGHT, LEFT, WIDTH - RIGHT, bars, _ticks(start, seconds), levels)


def _weight(entry: Entry) -> int | None:
    match entry.kind:
        case Kind.TRAFFIC_SHIFTED:
            return int(entry.body["desired"][-1]["weight_bp"])
        case Kind.TRAFFIC_RESTORED | Kind.REPLACED:
            return 0
        case Kind.REINSTATED:
            return 10_000
        case _:
            return None


def _marks(
    log: Sequence[Entry],
    points: Sequence[tuple[datetime, int]],
    across: Callable[[datetime], float],
    up: Callable[[int], float],
) -> list[Mark]:
    marks = []
    for entry in log:
        if entry.kind not in MARKS:
            continue
        tone, title = MARKS[entry.kind]
        level = next((weight for at, weight in reversed(points) if at <= entry.recorded_at), 0)
        clock = entry.recorded_at.strftime("%H:%M:%S")
        marks.append(Mark(across(entry.recorded_at), up(level), tone, f"{clock} {title}"))
    return marks


def _ticks(start: datetime, span: float) -> list[Tick]:
    ticks = [Tick(LEFT, start.strftime("%H:%M:%S UTC"), "start")]
    step = next(
        (step for step in STEPS if span / step < MOST_TICKS), STEPS[-1] * math.ceil(span / STEPS[-1] / MOST_TICKS)
    )
    for number in range(1, math.floor(span / step) + 1):
        x = round(LEFT + number * step / span * (WIDTH - LEFT - RIGHT), 1)
        anchor = "end" if x > WIDTH - RIGHT - HALF_LABEL else "middle"
        ticks.append(Tick(x, _distance(number * step, step), anchor))
    return ticks


def _distance(seconds: float, step: float) -> str:
    """Return a time since the start, in the largest unit that each step is a whole number of."""
    size, unit = next(((size, unit) for size, unit in UNITS if step % size == 0), (1, "s"))
    return f"+{seconds / size:g} {unit}"
