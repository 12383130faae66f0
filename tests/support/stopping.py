"""Processes that stand still: their kernel takes what is sent to them, and they answer nobody."""

import contextlib
import os
import signal
import time
from pathlib import Path

WAIT_SECONDS = 30.0
_STOPPED = "tT"


def stand_still(pid: int) -> None:
    """Stop a process and return when each of its threads stands.

    The signal is there at once, and is taken by one thread when that is next given a processor: on a busy machine the
    others go on meanwhile, and answer.
    """
    os.kill(pid, signal.SIGSTOP)
    ends = time.monotonic() + WAIT_SECONDS
    while any(state not in _STOPPED for state in _states(pid)):
        assert time.monotonic() < ends, f"process {pid} does not stand still"
        time.sleep(0.005)


def go_on(pid: int) -> None:
    """Let a process go on that stands still."""
    os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> list[str]:
    """Return what the kernel says that each thread does (proc(5), the third field of `stat`)."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found.append(thread.joinpath("stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0])
    return found
