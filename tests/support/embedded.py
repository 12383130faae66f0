"""The embedded stack as a process of its own, as `sluicegate up` runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from gates.plain import NO_AUTHORITY
from workers.launchers.process import start_time

ROOT = Path(__file__).parents[2]


class Stack:
    """One stack on one data directory. Starting does not wait."""

    def __init__(
        self,
        data: Path,
        *arguments: str,
        module: Sequence[str] = ("workers.embedded",),
        settings: Mapping[str, str] | None = None,
        in_background: bool = False,
        stderr: int = subprocess.PIPE,
    ) -> None:
        """Start it. `settings` are more variables of its environment; `in_background` as a script does with `&`."""
        self.data = data
        command = [sys.executable, "-P", "-m", *module, "--data", str(data), "--json", *arguments]
        if in_background:
            command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(settings or {})},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            process_group=0,
        )
        self.facts: dict[str, Any] = {}

    def wait_ready(self) -> dict[str, Any]:
        """Return what it prints when it is ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert '"url"' in line, line + self.complaint()
        self.facts = json.loads(line)
        return self.facts

    def get(self, path: str) -> httpx.Response:
        """Ask the API, with the token."""
        headers = {"authorization": f"Bearer {self.facts['token']}"}
        return httpx.get(f"{self.facts['url']}{path}", headers=headers, trust_env=False, verify=NO_AUTHORITY)

    def running(self) -> dict[str, int]:
        """Return the process ids by part."""
        return {each["name"]: each["pid"] for each in json.loads((self.data / "processes.json").read_bytes())}

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop. Returns its exit status."""
        self.process.send_signal(number)
        self.complaint()
        return self.process.returncode

    def kill(self) -> None:
        """Kill the supervisor alone."""
        self.process.kill()
        self.complaint()

    def complaint(self) -> str:
        """Return what it said, once it has ended."""
        return "".join(filter(None, self.process.communicate(timeout=60)))


def until(claim: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Return when a claim has come true."""
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Tell whether a process runs."""
    return start_time(pid) is not None


def beneath(data: Path) -> list[str]:
    """Return the command lines of processes that work in a data directory or name it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                place = str((entry / "cwd").readlink())
            except OSError:
                continue
            if str(data) in line or place.startswith(str(data)):
                found.append(f"{entry.name} {line}")
    return found
