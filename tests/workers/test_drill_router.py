"""The private router of a drill does not outlive its runner, whatever the runner died of."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.runners import is_running, until

RUNNER = """
import sys, time
from pathlib import Path
from gates.dialects.llamacpp import LLAMACPP
from gates.endpoint import Endpoint
from gates.stage import Side
from workers import drill

candidate = Side("sha256:" + "b" * 64, Endpoint("http://127.0.0.1:9", "chain", LLAMACPP), "127.0.0.1:9", lambda: None)
with drill.stage(Path(sys.argv[1]), candidate=candidate, accepted=None, engines=None) as made:
    print(*made.process_ids(), flush=True)
    time.sleep(600)
"""


def test_the_router_of_a_drill_ends_with_a_runner_that_was_killed(tmp_path):
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(tmp_path / "gateway")],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        router = int(runner.stdout.readline())
        assert is_running(router)
        assert "envoy" in Path(f"/proc/{router}/cmdline").read_text()
    finally:
        os.kill(runner.pid, signal.SIGKILL)
        runner.wait()
        runner.stdout.close()
    until(lambda: not is_running(router), what="the end of the router")
