"""Speed of bytes: `python -m tests.bench.ingest [--bytes 4000000000] [--files 16] [--rounds 9] [--folder DIR]`.

In one run and from the same files: hashing (a directory as `bundle create` reads it) against `openssl dgst -sha256` in
two processes; ingest (into a store: hash, copy, fsync) against the slower of hashing and `cp` with fsync in two. Then
an unchanged registration of 1,000 files, and the static gate on 1,000 tensors in 30 shards. Each runs in a process of
its own, whose memory counts. Exit status 1 when a limit is missed. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench import machine
from tests.bench.ingest.sections import SECTIONS, shards, write_files, write_layout, write_many

HASH_RATIO, INGEST_RATIO = 0.95, 0.9
ORDER = ("openssl", "hash", "cp", "ingest")
AGAIN_SECONDS, STATIC_SECONDS, MEMORY_BYTES = 1.0, 2.0, 300_000_000


def section(name: str, *arguments: object) -> dict[str, float]:
    """Run a section in a process of its own. Returns its seconds and the most memory that it had."""
    command = [sys.executable, "-m", "tests.bench.ingest", "--section", name, *map(str, arguments)]
    told: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return told


def two_at_once(script: str, folder: Path) -> float:
    """Run a line of shell over every second file, in two processes. Returns the seconds until both have ended."""
    files = shards(folder)
    started = time.perf_counter()
    running = [subprocess.Popen(["sh", "-ec", script, "sh", *files[place::2]]) for place in (0, 1)]
    statuses = [one.wait() for one in running]
    if any(statuses):
        raise RuntimeError(f"failed: {script}")
    return time.perf_counter() - started


def measured(folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Time all four, one after the other, in each round."""
    found: dict[str, list[dict[str, float]]] = {}
    source, target = folder / "source", folder / "target"
    copying = f'for one; do cp -- "$one" "{target}/${{one##*/}}"; sync "{target}/${{one##*/}}"; done'
    for number in range(1, rounds + 1):
        # In turn from either end: what one leaves the disk to do, such as discarding blocks, falls on the next.
        for name in ORDER[:: 1 if number % 2 else -1]:
            target.mkdir()
            if name == "openssl":
                told = {"seconds": two_at_once('exec openssl dgst -sha256 "$@" > /dev/null', source)}
            elif name == "cp":
                told = {"seconds": two_at_once(copying, source)}
            else:
                told = section(name, source, target)
            found.setdefault(name, []).append(told)
            shutil.rmtree(target)
            os.sync()
        print(f"round {number}: " + "  ".join(f"{name} {told[-1]['seconds']:.2f} s" for name, told in found.items()))
    return found


def report(found: dict[str, list[dict[str, float]]], size: int) -> list[str]:
    """Print rates and ratios. Returns what misses its limit."""
    rate = {name: size / min(one["seconds"] for one in told) for name, told in found.items()}
    for name, value in rate.items():
        print(f"{name:<8} {value / 1e9:6.2f} GB/s, best of {len(found[name])}")
    hashing, ingest = rate["hash"] / rate["openssl"], rate["ingest"] / min(rate["hash"], rate["cp"])
    print(f"hashing is {hashing:.2f} of openssl's rate, ingest {ingest:.2f} of the slower of hashing and cp with fsync")
    missed = [f"hashing is {hashing:.2f} of openssl's rate, under {HASH_RATIO}"] if hashing < HASH_RATIO else []
    return missed + ([f"ingest has a ratio of {ingest:.2f}, under {INGEST_RATIO}"] if ingest < INGEST_RATIO else [])


def main(arguments: list[str]) -> int:
    """Run it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ingest", description="Speed of bytes.")
    parser.add_argument("--bytes", type=int, default=4_000_000_000, help="in all files")
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="on the file system to be measured; otherwise that of TMPDIR")
    parser.add_argument("--section", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.section:
        print(json.dumps(SECTIONS[chosen.section[0]](*map(Path, chosen.section[1:]))))
        return 0
    with tempfile.TemporaryDirectory(prefix="sluicegate-ingest-", dir=chosen.folder) as name:
        folder = Path(name)
        free = shutil.disk_usage(folder).free
        if free < 3 * chosen.bytes:
            print(f"{folder} has {free / 1e9:.1f} GB free, and this takes {3 * chosen.bytes / 1e9:.1f}")
            return 2
        write_files(folder / "source", chosen.files, chosen.bytes)
        found = measured(folder, chosen.rounds)
        missed = report(found, chosen.bytes)
        write_many(folder / "many", 1000)
        write_layout(folder / "layout")
        for what, told, limit in (
            ("unchanged registration of 1,000 files", section("again", folder / "many", folder), AGAIN_SECONDS),
            ("static gate on 1,000 tensors", section("static", folder / "layout"), STATIC_SECONDS),
        ):
            print(f"{what}: {told['seconds']:.2f} s")
            missed += [f"{what} took {told['seconds']:.2f} s, over {limit:.0f}"] if told["seconds"] >= limit else []
            found[what] = [told]
        most = max(one.get("memory", 0.0) for told in found.values() for one in told)
        print(f"memory: at most {most / 1e6:.0f} MB; load {', '.join(f'{one:.2f}' for one in os.getloadavg())}")
        print(machine.told(folder))
        missed += [f"memory was {most / 1e6:.0f} MB"] if most >= MEMORY_BYTES else []
    print("\n".join(missed) or "all is within its limits")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
