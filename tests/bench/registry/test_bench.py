"""The bench itself, at a size that tells nothing of speed: it fills, asks, checks every answer and reports."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
OPERATIONS = (
    "get",
    "list: first page",
    "list: middle page",
    "list: last page",
    "search: name",
    "search: label",
    "search: two labels",
    "create",
    "get a release with its log",
    "approve",
    "sweep",
    "sweep: with a checkpoint",
)


def test_the_bench_fills_asks_and_reports() -> None:
    chosen = (
        "--sizes",
        "60:200",
        "--clients",
        "2",
        "--requests",
        "6",
        "--approvals",
        "18",
        "--rate",
        "400",
        "--sweeps",
        "2",
        "--in-memory",
    )
    ran = subprocess.run(
        [sys.executable, "-m", "tests.bench.registry", *chosen], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode in {0, 1}, ran.stderr
    report = ran.stdout.split("by clients that never pause:\n")[1].splitlines()
    assert tuple(line[:28].strip() for line in report[: len(OPERATIONS)]) == OPERATIONS
    # Either way the last lines say what missed its limit, or that nothing did.
    assert len(report) > len(OPERATIONS)
    assert ran.stderr == ""
