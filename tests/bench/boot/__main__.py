"""What we add to a boot: `python -m tests.bench.boot [--boots 20] [--idle 1000] [--ended 10000] [--sweeps 200]`.

A real API on a real PostgreSQL, a runner as a process of its own, and llama.cpp with a tiny model, so that hashing its
files takes nothing and what is left is ours. Everything is read from evidence and the kernel's start time of the
engine (which has steps of 10 ms): from a job's claim until its engine's process begins, for gates and for live
replicas, each with files that were staged before and with files that were not; and from the engine's being ready until
its first gate asks, which is told a little late, since that gate's record is written between. One run of all gates that
share an engine has to boot once. Then the sweep of a control worker is timed, with many releases that wait or are live
and many more that have ended.

Exit status 1 when a limit is missed. Nothing else should run meanwhile; the load is printed beside the numbers.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.bench import machine
from tests.bench.boot.boots import Took, timed
from tests.bench.boot.idle import filled
from tests.bench.registry.clients import Told, rank
from tests.bench.registry.stage import Stage

LAUNCH_MS, GATE_MS, SWEEP_MS = 300.0, 200.0, 20.0


def main(arguments: list[str]) -> int:
    """Run it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.boot", description="What we add to a boot.")
    parser.add_argument("--boots", type=int, default=20, help="of each kind, 2 or more")
    parser.add_argument(
        "--idle", type=int, default=1000, help="releases that wait for people, and as many live replicas"
    )
    parser.add_argument("--ended", type=int, default=10_000, help="releases that have ended, with their jobs")
    parser.add_argument("--sweeps", type=int, default=200, help="of each kind")
    chosen = parser.parse_args(arguments)
    missed = []
    with (
        tempfile.TemporaryDirectory(prefix="sluicegate-boot-") as name,
        Stage(entries=100 * chosen.ended, approvals=chosen.idle, sweeps=chosen.sweeps) as stage,
    ):
        print(filled(stage, chosen.idle, chosen.ended), flush=True)
        for what, told in stage.sweeps().items():
            print(f"{what:<44} {_sweep(told)}", flush=True)
            # One that seals what was recorded comes every few minutes, and grows with that.
            is_over = what == "sweep" and told.p99 >= SWEEP_MS
            missed += [f"{what}: p99 is {told.p99:.1f} ms, over {SWEEP_MS:.0f}"] if is_over else []
        took, gates, boots = timed(stage.service, Path(name), chosen.boots)
    for one in took:
        missed += _judged(one, GATE_MS if one.is_gate else LAUNCH_MS)
    print(f"{gates} gates of one run: {boots} {'boot' if boots == 1 else 'boots'}")
    missed += [f"{gates} gates of one run took {boots} boots"] if boots != 1 else []
    print(f"load {', '.join(f'{one:.2f}' for one in os.getloadavg())}, {os.cpu_count()} CPUs")
    print(machine.told())
    print("\n".join(missed) or "all is within its limits")
    return int(bool(missed))


def _sweep(told: Told) -> str:
    return f"p50 {told.p50:6.1f} ms  p99 {told.p99:6.1f} ms  most {told.most:6.1f} ms  of {told.count}"


def _judged(took: Took, limit: float) -> list[str]:
    """Print how long something took. Returns what missed its limit: the 90th percentile decides."""
    found = sorted(took.ms)
    p50, p90 = rank(found, 0.5), rank(found, 0.9)
    print(
        f"{took.name:<44} p50 {p50:6.1f} ms  p90 {p90:6.1f} ms  most {found[-1]:6.1f} ms  of {len(found)}", flush=True
    )
    return [f"{took.name}: p90 is {p90:.0f} ms, over {limit:.0f}"] if p90 >= limit else []


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
