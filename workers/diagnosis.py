"""What the end of an engine, its log and the kernel's own counters say: why it failed, and how far it had loaded."""

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from schemas.failures import Cause
from workers.launchers.base import ProcessState
from workers.launchers.proc import PROC

CGROUPS = Path("/sys/fs/cgroup")
_PAGE_BYTES = 4096
_BY_SIGNAL = {
    signal.SIGILL: Cause.MISSING_KERNEL,  # an instruction that this processor does not have
    **dict.fromkeys((signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV), Cause.CRASHED),
    **dict.fromkeys((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP), Cause.KILLED),
}
_COMMON = (
    (r"No space left on device|ENOSPC", Cause.DISK_FULL),
    (r"[Aa]ddress already in use|EADDRINUSE", Cause.PORT_IN_USE),
    (r"std::bad_alloc|MemoryError|Cannot allocate memory|out of memory|OutOfMemoryError", Cause.OUT_OF_MEMORY),
    (
        r"no kernel image is available|Illegal instruction|invalid device function|undefined symbol",
        Cause.MISSING_KERNEL,
    ),
    (r"size mismatch for|[Ss]hape mismatch|shapes cannot be multiplied|has wrong shape", Cause.SHAPE_MISMATCH),
    (r"unrecognized arguments|invalid choice: ", Cause.BAD_ARGUMENT),
)
"""What engines of any kind write; a driver's own patterns come first."""


def classify(
    state: ProcessState, log: Sequence[str], patterns: Sequence[tuple[str, str]], *, was_short_of_memory: bool
) -> Cause:
    """Return why an engine ended that nobody had asked to.

    What runs it may know. A kill from outside is told by its signal alone, since what the log says was written before;
    an engine's own end is told by its log first, in the order of `patterns`.

    Args:
        state: how the process ended.
        log: its last lines.
        patterns: regular expression and class, of the engine's driver.
        was_short_of_memory: the kernel has killed a process of its control group since it started.
    """
    if state.cause in set(Cause):
        return Cause(state.cause)
    number = _signal(state.code)
    if number == signal.SIGKILL:
        return Cause.OUT_OF_MEMORY if was_short_of_memory else Cause.KILLED
    text = "\n".join(log)
    for pattern, cause in (*patterns, *_COMMON):
        if re.search(pattern, text):
            return Cause(cause)
    return Cause.EXITED if number is None else _BY_SIGNAL.get(number, Cause.CRASHED)


def _signal(code: int | None) -> signal.Signals | None:
    """Return the signal that ended a process, also where a shell or a container tells it as 128 and more."""
    number = 0 if code is None else -code if code < 0 else code - 128
    return signal.Signals(number) if number in set(signal.Signals) else None


def memory_kills(pid: int, *, proc: Path = PROC, groups: Path = CGROUPS) -> int | None:
    """Return how often the kernel has killed for lack of memory in a process's control group; None when unknown.

    Args:
        pid: of a running process.
        proc: where the kernel tells of processes.
        groups: where it tells of control groups.

    Source: Linux, admin-guide/cgroup-v2 (`memory.events`) and cgroup-v1/memory (`memory.oom_control`).
    """
    try:
        lines = (proc / str(pid) / "cgroup").read_text("ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            file = groups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            file = groups / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        try:
            found = re.search(r"^oom_kill (\d+)$", file.read_text("ascii"), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def is_full(folder: Path) -> bool:
    """Tell whether the disk of a folder has no room for as much as a page of a log."""
    try:
        disk = os.statvfs(folder)
    except FileNotFoundError:
        return False
    return disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < _PAGE_BYTES


class LoadProgress:
    """Reads how far an engine has loaded out of its log, as it grows.

    A pattern names the group `percent`, or `done` and `total`.
    """

    def __init__(self, log_path: Path, patterns: Sequence[str]) -> None:
        """Read a log that may not be there yet, from its present end."""
        self._path = log_path
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._offset = log_path.stat().st_size if log_path.exists() else 0
        self._told: int | None = None

    def percent(self) -> int | None:
        """Return the percentage that the log tells now, when it is another one than last time; else None."""
        if not self._patterns:
            return None
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read(1 << 20)
        except FileNotFoundError:
            return None
        # A progress bar ends its states with a carriage return. What has no end yet is read again.
        whole = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._offset += whole
        found = [
            (match.start(), match)
            for pattern in self._patterns
            for match in pattern.finditer(text[:whole].decode("utf-8", errors="replace"))
        ]
        if not found:
            return None
        groups = max(found, key=lambda one: one[0])[1].groupdict()
        percent = _percent(groups)
        if percent == self._told:
            return None
        self._told = percent
        return percent


def compile_ms(log_path: Path, pattern: str | None) -> int | None:
    """Return how long the engine compiled, as the last line of its log says that tells it; None when none does.

    `pattern` has the group `seconds`.
    """
    if pattern is None:
        return None
    try:
        text = log_path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    found = [match["seconds"] for match in re.finditer(pattern, text)]
    return round(float(found[-1]) * 1000) if found else None


def _percent(groups: dict[str, str | None]) -> int:
    if groups.get("percent") is not None:
        return min(100, int(float(groups["percent"] or 0)))
    done, total = int(groups["done"] or 0), int(groups["total"] or 0)
    return min(100, 100 * done // total) if total else 0
