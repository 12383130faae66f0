"""Runs engines as processes of this machine, and finds them again after the worker was lost.

A process is known by pid, start time and boot id together: a pid alone may be given to another process. The
start time is in clock ticks since boot, as the kernel counts it, so that no clock change can alter it.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from workers.engines.base import Command

PROC = Path("/proc")
POLL_SECONDS = 0.02
LOG_CAP_BYTES = 16 * 1024 * 1024
TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
_LINE_CHARACTERS = 2000
# What every engine gets. Nothing of the worker's own environment goes in: tokens and keys live there.
_BASE_VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


class LaunchFailed(RuntimeError):
    """The process could not be started at all: no such program, or the system refused."""


class Condition(StrEnum):
    """What is known of a launched process."""

    RUNNING = "running"
    EXITED = "exited"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class ProcessState:
    """Whether a process runs. `code` is its exit status, −n for signal n, None when nobody could see it."""

    condition: Condition
    code: int | None = None

    def __str__(self) -> str:
        """Say it as a person would."""
        if self.condition is not Condition.EXITED or self.code is None:
            return str(self.condition)
        if self.code < 0:
            return f"ended by signal {-self.code}"
        return f"exited with status {self.code}"


@dataclass(frozen=True)
class Launched:
    """Identity of a started process, and the port it listens on once that is known."""

    pid: int
    start_time: str
    boot_id: str
    port: int | None = None


def boot_id() -> str:
    """Return the identity of this boot of the machine."""
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on, or None when there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot; None when it does not run."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else fields[19]


def _processes() -> Iterator[int]:
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def strays(workdir: Path) -> list[Launched]:
    """Find running processes of an engine by its folder: what a lost worker left there, or what left its group.

    A process is known by its working directory, or by the HOME that it was started with: one that has a session of its
    own and went elsewhere still has that.
    """
    place = workdir.resolve()
    marks = {f"HOME={folder}".encode() for folder in (place, workdir.absolute())}
    found = []
    for pid in _processes():
        folder = PROC / str(pid)
        try:
            is_ours = (folder / "cwd").readlink() == place or not marks.isdisjoint(
                (folder / "environ").read_bytes().split(b"\0")
            )
        except OSError:
            continue
        started = start_time(pid)
        if is_ours and started is not None and pid != os.getpid():
            found.append(Launched(pid, started, boot_id()))
    return found


def tail(log_path: Path, lines: int = TAIL_LINES) -> list[str]:
    """Return the last lines of a log, without control characters, each at most 2000 characters long."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    clean = ("".join(c for c in line if c.isprintable() or c == "\t") for line in text.splitlines())
    return [line[:_LINE_CHARACTERS] for line in clean if line.strip()][-lines:]


def trim(log_path: Path, cap_bytes: int = LOG_CAP_BYTES) -> None:
    """Keep a log below its cap: move the newer half to `NAME.1` and empty the file, which is open for append.

    The engine writes to the file itself, since a pipe would break when the worker is lost. Lines written between
    the copy and the emptying are lost; nothing decides by them.
    """
    try:
        size = log_path.stat().st_size
    except FileNotFoundError:
        return
    if size <= cap_bytes:
        return
    with log_path.open("r+b") as file:
        file.seek(size - cap_bytes // 2)
        log_path.with_name(log_path.name + ".1").write_bytes(file.read(cap_bytes // 2))
        file.truncate(0)


class ProcessLauncher:
    """Starts, watches and stops processes. Safe to call from several threads for different processes."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, str], subprocess.Popen[bytes]] = {}

    def start(self, command: Command, *, workdir: Path, log_path: Path, session: bool = True) -> Launched:
        """Start a command and return at once.

        Args:
            command: what to run. Its variables and PATH, LANG, HOME and TMPDIR are its whole environment.
            workdir: its working directory, HOME and TMPDIR; made when missing.
            log_path: file that its output is appended to.
            session: give it a session of its own, so that it outlives this process and its terminal; else only a
                process group of its own.

        Raises:
            LaunchFailed: the program is missing, or the system refused to start it.
        """
        workdir.mkdir(parents=True, exist_ok=True)
        if command.port_file is not None:
            command.port_file.unlink(missing_ok=True)
        places = {"HOME": str(workdir), "TMPDIR": str(workdir)}
        try:
            with log_path.open("ab") as log:
                child = subprocess.Popen(
                    command.argv,
                    cwd=workdir,
                    env={**_BASE_VARIABLES, **places, **command.variables},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=session,
                    process_group=None if session else 0,
                    umask=0o077,
                )
        except OSError as error:
            raise LaunchFailed(f"cannot start {command.argv[0]}: {error}") from error
        started = _stat(child.pid)
        if started is None:
            raise LaunchFailed(f"cannot observe {command.argv[0]} after its start")
        launched = Launched(child.pid, started[19], boot_id())
        self._children[launched.pid, launched.start_time] = child
        return launched

    def adopt(self, pid: int, start_time_ticks: str, boot: str) -> Launched | None:
        """Return the identity of a process started earlier, or None when it is not provably still that process."""
        if boot != boot_id() or start_time(pid) != start_time_ticks:
            return None
        return Launched(pid, start_time_ticks, boot)

    def listening(self, launched: Launched, port_file: Path | None) -> Launched:
        """Return the identity with the port that this very process has written, or without while there is none."""
        if port_file is None or launched.port is not None:
            return launched
        try:
            told = json.loads(port_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return launched
        return replace(launched, port=told["port"]) if told["pid"] == launched.pid else launched

    def state(self, launched: Launched) -> ProcessState:
        """Tell whether a process runs. Of one that was adopted, the exit status cannot be seen."""
        child = self._children.get((launched.pid, launched.start_time))
        if child is not None:
            code = child.poll()
            return ProcessState(Condition.RUNNING) if code is None else ProcessState(Condition.EXITED, code)
        if launched.boot_id != boot_id():
            return ProcessState(Condition.UNKNOWN)
        running = start_time(launched.pid) == launched.start_time
        return ProcessState(Condition.RUNNING if running else Condition.EXITED)

    def wait(self, launched: Launched, timeout_seconds: float) -> ProcessState:
        """Wait until a process ends, at most so long, and tell its state."""
        deadline = time.monotonic() + timeout_seconds
        while (state := self.state(launched)).condition is Condition.RUNNING and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return state

    def stop(self, launched: Launched, *, grace_seconds: float) -> ProcessState:
        """End a process and everything in its group: SIGTERM, up to `grace_seconds` to drain, then SIGKILL.

        SIGTERM goes to the process alone, which drains and ends its own children; the group is killed in any case.
        """
        if self.state(launched).condition is Condition.RUNNING:
            self._signal(launched, signal.SIGTERM)
            if self.wait(launched, grace_seconds).condition is Condition.RUNNING:
                self._signal(launched, signal.SIGKILL)
        self._kill_group(launched)
        return self.wait(launched, 10.0)

    def kill(self, launched: Launched) -> ProcessState:
        """End a process and everything in its group at once."""
        return self.stop(launched, grace_seconds=0.0)

    def crash(self, launched: Launched) -> ProcessState:
        """Kill a process without asking it first, and return when it is gone."""
        self._signal(launched, signal.SIGKILL)
        return self.wait(launched, 10.0)

    def _signal(self, launched: Launched, number: signal.Signals) -> None:
        try:
            handle = os.pidfd_open(launched.pid)
        except ProcessLookupError:
            return
        try:
            # Checked while the handle is open: the pid cannot be given away between check and signal.
            if start_time(launched.pid) == launched.start_time:
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return
        finally:
            os.close(handle)

    def _kill_group(self, launched: Launched) -> None:
        for pid in _processes():
            fields = _stat(pid)
            # Fields from the state on: 2 is the process group, 19 the start time. A member is never older.
            if fields and fields[2] == str(launched.pid) and int(fields[19]) >= int(launched.start_time):
                self._signal(Launched(pid, fields[19], launched.boot_id), signal.SIGKILL)
