"""What the machine's processors did while something was measured on it, and for whom.

A candidate whose requests waited because other processes had the processors is not slow, and only the machine can tell.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

import psutil


@dataclass(frozen=True, slots=True)
class Processors:
    """Seconds of processor time since some instant, and the clock.

    `busy_seconds` is that of the whole machine, with what a hypervisor took away; `engine_seconds` that of the engine
    and everything it started, None when it could not be seen; `own_seconds` that of the processes that measure.
    """

    monotonic: float
    busy_seconds: float
    engine_seconds: float | None
    own_seconds: float

    @classmethod
    def look(cls, *, engine: int | None, own: Collection[int]) -> Self:
        """Read the processors' clocks.

        Args:
            engine: process id of the engine.
            own: process ids of those who measure, without what they started.
        """
        return cls(time.monotonic(), _busy(), _tree(engine), sum(_alone(pid) for pid in own))

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


def _busy() -> float:
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


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
