"""What the machine's processors did while something was measured on it, and for whom.

A candidate whose requests waited because other processes had the processors is not slow, and only the machine can tell.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import psutil


@dataclass(frozen=True, slots=True)
class Processors:
    """Seconds of processor time since some instant, and the clock.

    `busy_seconds` is that of the whole machine, with what a hypervisor took away; `engine_seconds` that of the engines
    and everything they started, None when one could not be seen; `own_seconds` that of the processes that measure.
    """

    monotonic: float
    busy_seconds: float
    engine_seconds: float | None
    own_seconds: float

    @classmethod
    def look(cls, *, engines: Collection[int | None], own: Collection[int]) -> Self:
        """Read the processors' clocks.

        Args:
            engines: process ids of what is measured; None for one that is not there.
            own: process ids of those who measure, without what they started.
        """
        return cls(time.monotonic(), _busy(), _trees(engines), sum(_alone(pid) for pid in own))

    def since(self, before: "Processors") -> dict[str, int | None]:
        """Return what happened in between, as a record: cores, and microseconds of wall and processor time."""
        engine = None
        if self.engine_seconds is not None and before.engine_seconds is not None:
            engine = _us(self.engine_seconds - before.engine_seconds)
        return {
            "cores": psutil.cpu_count() or 1,
            "wall_us": _us(self.monotonic - before.monotonic),
            "busy_us": _us(self.busy_seconds - before.busy_seconds),
            "engine_us": engine,
            "own_us": _us(self.own_seconds - before.own_seconds),
        }


def together(parts: Sequence[Mapping[str, int | None]]) -> dict[str, int | None]:
    """Return the record of a measurement from those of its parts, of which none was looked at twice."""
    found: dict[str, int | None] = {"cores": parts[0]["cores"]}
    for key in ("wall_us", "busy_us", "engine_us", "own_us"):
        values = [part[key] for part in parts]
        found[key] = sum(value for value in values if value is not None) if None not in values else None
    return found


def _busy() -> float:
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


def _trees(pids: Collection[int | None]) -> float | None:
    times = [_tree(pid) for pid in pids]
    return sum(each for each in times if each is not None) if times and None not in times else None


def _tree(pid: int | None) -> float | None:
    """Return the processor time of a process and of everything it started, ended or not."""
    if pid is None:
        return None
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
        return sum(sum(each.cpu_times()[:4]) for each in processes if each.is_running())
    except psutil.Error:
        return None


def _alone(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
