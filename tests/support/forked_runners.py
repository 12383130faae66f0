"""Runners as processes of their own that start in a moment, so that one can be killed many times.

`python -m tests.support.forked_runners` reads a runner's settings as a line of JSON, forks a process that is that
runner, and writes its pid. Each is killed by whoever asked for it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from registry.client import Client
from registry.settings import RunnerSettings
from tests.support.programs import ROOT
from tests.support.runners import Bench
from workers.agent import Agent
from workers.launchers.process import become_subreaper


class Runners:
    """The process that forks them, from outside."""

    def __init__(self, bench: Bench, log: Path) -> None:
        """Start it; what the runners say is appended to a file."""
        self.pids: dict[str, int] = {}
        self._bench = bench
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.support.forked_runners"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
            cwd=log.parent,
            text=True,
        )

    def start(self, name: str) -> int:
        """Start a runner that takes one job at a time, and return its pid."""
        settings = self._bench.settings(name, slots=1)
        told = settings.model_dump(mode="json") | {
            key: getattr(settings, key).get_secret_value() for key in ("token", "broker_url")
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        self.pids[name] = int(self._process.stdout.readline())
        return self.pids[name]

    def kill(self, name: str) -> None:
        """Kill a runner as an outage would."""
        os.kill(self.pids.pop(name), signal.SIGKILL)

    def end(self) -> None:
        """Kill all of them."""
        for name in list(self.pids):
            self.kill(name)
        self._process.kill()
        self._process.communicate()
        self._log.close()


@contextlib.contextmanager
def forked_runners(bench: Bench, log: Path) -> Iterator[Runners]:
    """Be able to start and kill runners while the context lasts."""
    made = Runners(bench, log)
    try:
        yield made
    finally:
        made.end()


def _main() -> None:
    for line in sys.stdin:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if pid := os.fork():
            print(pid, flush=True)
            continue
        os.setsid()
        os.dup2(2, 1)  # what it says is not for whoever reads pids
        settings = RunnerSettings.model_validate(json.loads(line))
        become_subreaper()
        agent = Agent(settings, Client(settings.api_url, settings.token.get_secret_value(), timeout_seconds=10))
        agent.start()
        while True:
            signal.pause()


if __name__ == "__main__":
    _main()
