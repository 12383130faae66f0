"""Speed at size: `python -m tests.bench.registry [--sizes 1000:10000,100000:1000000] [--requests 1600] …`.

A real PostgreSQL is filled twice, with so many bundles and entries of evidence, and at each size 8 clients ask the real
API as fast as it answers: one operation after the other, each by itself. Then the sweep of a control worker is timed.
Exit status 1 when an operation's p99 is 25 ms or more, when it is more than 1.5 times slower at the larger size, or
when a sweep takes 20 ms or more. Nothing else should run meanwhile; the load is printed beside the numbers.
"""

import argparse
import os
import sys

from tests.bench.registry.clients import Told
from tests.bench.registry.stage import Stage

LIMIT_MS, LIMIT_RATIO, SWEEP_MS = 25.0, 1.5, 20.0
CLIENTS = 8


def main(arguments: list[str]) -> int:
    """Run it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.registry", description="Speed of the registry.")
    parser.add_argument("--sizes", default="1000:10000,100000:1000000", help="BUNDLES:ENTRIES, comma-separated")
    parser.add_argument("--requests", type=int, default=1600, help="of each operation, at each size")
    parser.add_argument("--approvals", type=int, default=400, help="releases approved at each size")
    parser.add_argument("--only", default="", help="only operations whose name begins so")
    parser.add_argument("--verify", action="store_true", help="verify the whole log at each size, not a sample")
    chosen = parser.parse_args(arguments)
    sizes = [tuple(map(int, size.split(":"))) for size in chosen.sizes.split(",")]
    found: dict[str, list[Told]] = {}
    with Stage(approvals=chosen.approvals) as stage:
        for bundles, entries in sizes:
            stage.fill(bundles, entries)
            stage.check(is_whole=chosen.verify)
            with stage.api() as port:
                for asked in stage.operations(CLIENTS, chosen.requests):
                    if asked.name.startswith(chosen.only):
                        stage.warm(port, asked)
                        found.setdefault(asked.name, []).append(stage.measure(port, asked))
                        print(f"  {asked.name:<28} {_shown(found[asked.name][-1])}", flush=True)
            for name, told in stage.sweeps().items():
                found.setdefault(name, []).append(told)
                print(f"  {name:<28} {_shown(told)}", flush=True)
    return report(found, [f"{bundles:,} / {entries:,}" for bundles, entries in sizes])


def _shown(told: Told) -> str:
    spent = f"  CPU {told.service_ms:.2f} + {told.database_ms:.2f} ms" if told.service_ms else ""
    return f"p50 {told.p50:6.2f} ms  p99 {told.p99:6.2f} ms  most {told.most:6.2f} ms  {told.rate:5.0f}/s{spent}"


def report(found: dict[str, list[Told]], sizes: list[str]) -> int:
    """Print all numbers and what missed its limit. Returns the exit status."""
    load = ", ".join(f"{one:.2f}" for one in os.getloadavg())
    print(f"\n{CLIENTS} clients, {os.cpu_count()} CPUs, load {load}; bundles / entries: {'; '.join(sizes)}")
    missed = []
    for name, told in found.items():
        limit = SWEEP_MS if name.startswith("sweep") else LIMIT_MS
        ratio = told[-1].p50 / told[0].p50
        worst = max(told, key=lambda one: one.p99)
        if worst.p99 >= limit:
            missed.append(f"{name}: p99 is {worst.p99:.1f} ms, and has to be under {limit:.0f}")
        if len(told) > 1 and ratio > LIMIT_RATIO:
            missed.append(f"{name}: {ratio:.2f} times slower at the larger size; {LIMIT_RATIO} is the limit")
        print(f"{name:<28} " + "   ".join(_shown(one) for one in told) + f"   ratio {ratio:.2f}")
    print("\n".join(missed) or "every operation is within its limits")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
