import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

from gates import catalog
from gates.pulse import Pulse
from schemas.policy import CompatibilityRule
from schemas.result import Verdict
from tests.support import stopping
from tests.support.served import served

ROOT = Path(__file__).parents[2]
PROGRAM = """
import time
from gates.pulse import Pulse
with Pulse() as pulse:
    print("ready", flush=True)
    ends = time.monotonic() + 3
    while time.monotonic() < ends:
        time.sleep(0.05)
print(pulse.longest_seconds, flush=True)
"""


def test_a_process_that_was_stopped_knows_for_how_long() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        stopping.stand_still(process.pid)
        time.sleep(1.5)
        stopping.go_on(process.pid)
        longest = float(process.stdout.readline())
    assert longest >= 1.4


def test_a_process_that_runs_sees_short_gaps() -> None:
    with Pulse() as pulse:
        time.sleep(0.5)
    assert 0 < pulse.longest_seconds < 5


def test_a_failure_seen_by_a_process_that_stood_still_is_errored_with_the_reason(tmp_path: Path) -> None:
    rule = CompatibilityRule(gate="compatibility", boot_seconds=Decimal(60), answer_seconds=Decimal(20))
    with served(tmp_path, rule, alias="another-name") as context:
        failed, _ = catalog.run("compatibility", context)
        doubted, raw = catalog.run("compatibility", context, still_seconds=0.0)
    assert failed.verdict is Verdict.FAILED
    assert doubted.verdict is Verdict.ERRORED
    assert "stood still" in doubted.summary
    assert catalog.recompute(raw, None, None, context.bundle) == doubted
