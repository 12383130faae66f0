"""Speed at size: `python -m tests.bench.registry [--sizes 1000:10000,100000:1000000] [--requests 1600] …`.

A real PostgreSQL is filled twice, with so many bundles and entries of evidence, and at each size 8 clients ask the real
API, one operation after the other, each by itself, in two ways. First as fast as they are answered: that tells how many
answers a second there can be, and how long 8 callers who never pause wait for theirs. Then at `--rate` requests a
second of all clients together, at instants planned before; an answer's time counts from the instant when its request
was due. Last the sweep of a control worker is timed.

Exit status 1 when at that rate an operation's p99 is 25 ms or more, when its median is more than 1.5 times slower at
the larger size, or when a sweep takes 20 ms or more. What clients who never pause wait is told and not judged: eight of
them wait for eight times the processor time of an answer, divided by the processors, which they share with the service
and its database. Nothing else should run meanwhile; the load is printed beside the numbers.

Where the limit is missed, fewer requests a second are tried, and the report says at how many of them it was kept. That
mends nothing: the limit holds for `--rate`.
"""

import argparse
import os
import sys
from dataclasses import dataclass, replace

from tests.bench import machine
from tests.bench.registry.clients import Asked, Told
from tests.bench.registry.stage import Stage

LIMIT_MS, LIMIT_RATIO, SWEEP_MS = 25.0, 1.5, 20.0
LOWER = (0.75, 0.5, 0.25)
"""Shares of the rate that are tried where the limit is missed at all of it."""
CLIENTS = 8
RATE = 100.0
"""Requests a second of one operation, of all clients together."""


@dataclass(frozen=True)
class Measured:
    """One operation at one size."""

    told: Told
    """What is judged."""
    flat_out: Told | None = None
    """And where clients never paused."""
    kept: float | None = None
    """Requests a second at which the limit was kept, where it was not at the rate asked for; 0 for none tried."""


def main(arguments: list[str]) -> int:
    """Run it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.registry", description="Speed of the registry.")
    parser.add_argument("--sizes", default="1000:10000,100000:1000000", help="BUNDLES:ENTRIES, comma-separated")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="that ask at once")
    parser.add_argument("--requests", type=int, default=1600, help="of each operation and each way, at each size")
    parser.add_argument("--approvals", type=int, default=1200, help="releases approved at each size, a third each way")
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second where they are planned")
    parser.add_argument("--sweeps", type=int, default=200, help="of each kind, at each size")
    parser.add_argument("--only", default="", help="only operations whose name begins so")
    parser.add_argument("--in-memory", action="store_true", help="a database that no commit puts on the disk: to try")
    parser.add_argument("--verify", action="store_true", help="verify the whole log at each size, not a sample")
    chosen = parser.parse_args(arguments)
    sizes = [tuple(map(int, size.split(":"))) for size in chosen.sizes.split(",")]
    found: dict[str, list[Measured]] = {}
    most = max(entries for _, entries in sizes)
    with Stage(
        entries=most, approvals=chosen.approvals, sweeps=chosen.sweeps, is_durable=not chosen.in_memory
    ) as stage:
        for bundles, entries in sizes:
            stage.fill(bundles, entries)
            stage.check(is_whole=chosen.verify)
            with stage.api() as port:
                for asked in stage.operations(chosen.clients, 3 * chosen.requests):
                    if asked.name.startswith(chosen.only):
                        found.setdefault(asked.name, []).append(_measured(stage, port, asked, chosen.rate))
            for name, told in stage.sweeps().items():
                found.setdefault(name, []).append(Measured(told))
                print(f"  {name:<28} {_shown(told)}", flush=True)
    shown = "; ".join(f"{bundles:,} / {entries:,}" for bundles, entries in sizes)
    load = ", ".join(f"{one:.2f}" for one in os.getloadavg())
    print(f"\n{chosen.clients} clients, {os.cpu_count()} CPUs, load {load}; bundles / entries: {shown}")
    print(machine.told())
    print(f"at {chosen.rate:g} requests a second, and (flat out) by clients that never pause:")
    return report(found)


def _measured(stage: Stage, port: int, asked: Asked, rate: float) -> Measured:
    """Ask for the first third flat out, for the second as planned, and for the last where that was too slow."""
    third = len(asked.requests[0]) // 3
    stage.warm(port, asked)
    flat_out = stage.measure(port, replace(asked, requests=[part[:third] for part in asked.requests]))
    print(f"  {asked.name:<28} {_shown(flat_out)}", flush=True)
    told = stage.measure(port, replace(asked, requests=[part[third : 2 * third] for part in asked.requests]), rate)
    print(f"  {f'at {rate:g} a second':>28} {_shown(told)}", flush=True)
    if told.p99 < LIMIT_MS:
        return Measured(told, flat_out)
    return Measured(told, flat_out, _kept(stage, port, asked, rate, 2 * third))


def _kept(stage: Stage, port: int, asked: Asked, rate: float, first: int) -> float:
    """Return at how many requests a second the limit is kept, of those tried with what is left to be asked."""
    size = (len(asked.requests[0]) - first) // len(LOWER)
    for place, share in enumerate(LOWER) if size else ():
        left = slice(first + place * size, first + (place + 1) * size)
        told = stage.measure(port, replace(asked, requests=[part[left] for part in asked.requests]), share * rate)
        print(f"  {f'at {share * rate:g} a second':>28} {_shown(told)}", flush=True)
        if told.p99 < LIMIT_MS:
            return share * rate
    return 0.0


def _shown(told: Told) -> str:
    spent = f"  CPU {told.service_ms:.2f} + {told.database_ms:.2f} ms" if told.service_ms else ""
    return f"p50 {told.p50:6.2f} ms  p99 {told.p99:6.2f} ms  most {told.most:6.2f} ms  {told.rate:5.0f}/s{spent}"


def report(found: dict[str, list[Measured]]) -> int:
    """Print all numbers and what missed its limit. Returns the exit status."""
    missed = []
    for name, measured in found.items():
        told = [one.told for one in measured]
        limit = SWEEP_MS if name.startswith("sweep") else LIMIT_MS
        worst = max(told, key=lambda one: one.p99)
        if worst.p99 >= limit:
            missed.append(f"{name}: p99 is {worst.p99:.1f} ms, and has to be under {limit:.0f}")
        ratio = told[-1].p50 / told[0].p50
        if len(told) > 1 and ratio > LIMIT_RATIO:
            missed.append(f"{name}: {ratio:.2f} times slower at the larger size; {LIMIT_RATIO} is the limit")
        shown = "   ".join(_shown(one) for one in told)
        fastest = "".join(f"   ({one.flat_out.rate:.0f}/s flat out)" for one in measured if one.flat_out)
        kept = "".join(f"   kept at {one.kept:g}/s" for one in measured if one.kept)
        print(f"{name:<28} {shown}   ratio {ratio:.2f}{fastest}{kept}")
    print("\n".join(missed) or "every operation is within its limits")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
