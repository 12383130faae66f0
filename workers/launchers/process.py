"""Runs engines as processes of this machine, and finds them again after the worker was lost.

Each engine has a process group and a session of its own, limits that it cannot lift, and an environment in which
nothing is that was not put there. What it starts is ended with it, wherever that went.
"""

import ctypes
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from schemas.failures import Cause
from schemas.runner import LauncherName
from workers.engines.base import Command, Launch
from workers.engines.table import DRIVERS
from workers.launchers import become, proc
from workers.launchers.base import OOM_PREFERENCE, Condition, Launched, LaunchFailed, Limits, Order, ProcessState
from workers.launchers.logs import KEEPING, LOG_CAP_BYTES, Keeper, Keeping, tail, trim
from workers.launchers.ports import Ports
from workers.launchers.proc import PROC, boot_id, start_time, strays

__all__ = [
    "LOG_CAP_BYTES",
    "PROC",
    "Condition",
    "LaunchFailed",
    "Launched",
    "Limits",
    "ProcessLauncher",
    "ProcessState",
    "become_subreaper",
    "boot_id",
    "start_time",
    "strays",
    "tail",
    "trim",
]

POLL_SECONDS = 0.02
GONE_SECONDS = 10.0
"""How long something that was killed may take to be gone: the kernel frees its memory first."""
_ROUNDS = 3
"""Times that a tree is looked at again, since what is killed may have forked meanwhile."""
PR_SET_CHILD_SUBREAPER = 36
# What every engine gets. Nothing of the worker's own environment goes in: tokens and keys live there.
_BASE_VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
# Whatever a driver lets through, these would run other code than the engine's, or send it elsewhere to look for it; the
# last ones would give a container accelerators that nobody reserved for it.
_NEVER = re.compile(
    r"^(LD_.*|PYTHON(PATH|HOME|STARTUP|USERBASE|BREAKPOINT)|BASH_ENV|ENV|GCONV_PATH|HOME|TMPDIR"
    r"|NVIDIA_(VISIBLE_DEVICES|MIG_.*|DRIVER_CAPABILITIES|IMEX_CHANNELS))$"
)
_TOLD_PORT = re.compile(r"^--port=(\d+)$")


def become_subreaper() -> None:
    """Let what an engine leaves behind become a child of this process, as under systemd or as a container's PID 1.

    Raises OSError when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def refused_variables(variables: Iterable[str]) -> list[str]:
    """Return the names of variables that no engine may be given, sorted."""
    return sorted(name for name in variables if _NEVER.match(name))


def told_port(argv: Iterable[str]) -> int | None:
    """Return the port that a command line tells an engine to take; None when it tells none, or any."""
    words = list(argv)
    for place, word in enumerate(words):
        text = words[place + 1] if word == "--port" and place + 1 < len(words) else ""
        if match := _TOLD_PORT.match(word):
            text = match[1]
        if text.isdigit() and int(text) > 0:
            return int(text)
    return None


class ProcessLauncher:
    """Starts, watches and stops processes. Safe to call from several threads for different processes."""

    name: LauncherName = "process"
    runs_images = False

    def __init__(self, limits: Limits | None = None, keeping: Keeping = KEEPING) -> None:
        """Give engines these limits and keep their logs so."""
        self._limits = limits or Limits()
        self._children: dict[tuple[int, str], subprocess.Popen[bytes]] = {}
        self._logs: dict[tuple[int, str], Path] = {}
        self._placed: dict[Path, int] = {}
        self._keeper = Keeper(keeping)
        self._ports = Ports()
        self._lock = threading.Lock()

    def place(self, order: Order, workdir: Path, *, drain_seconds: float, parent_pid: int | None) -> Launch:
        """Return where the engine will find itself: on this machine, where its files are, on loopback."""
        self.leave(workdir)
        port = self._ports.hold() if DRIVERS[order.bundle.engine.name].takes_port else 0
        with self._lock:
            self._placed[workdir] = port
        return Launch(
            root=order.files,
            port_file=workdir / "port.json",
            port=port,
            drain_seconds=drain_seconds,
            parent_pid=parent_pid,
        )

    def leave(self, workdir: Path) -> None:
        """Give back the port that is held for a replica."""
        with self._lock:
            port = self._placed.pop(workdir, 0)
        self._ports.release(port)

    def start(
        self, command: Command, *, workdir: Path, log_path: Path, order: Order | None = None, session: bool = True
    ) -> Launched:
        """Start a command and return once the program runs, or cannot.

        Args:
            command: what to run. Its variables and PATH, LANG, HOME and TMPDIR are its whole environment.
            workdir: its working directory, HOME and TMPDIR; made when missing.
            log_path: file that its output is appended to, and that is kept within bounds while it runs.
            order: the replica that it is, where it is one: its accelerators are the only ones that it sees.
            session: give it a session of its own, so that it outlives this process and its terminal; else only a
                process group of its own.

        Raises:
            LaunchFailed: the program is missing, the system refused to start it, or it was to get a variable that
                would make it another program.
        """
        if refused := refused_variables(command.variables):
            raise LaunchFailed(f"no engine is given the variables {', '.join(refused)}")
        places = {"HOME": str(workdir), "TMPDIR": str(workdir)}
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            if command.port_file is not None:
                command.port_file.unlink(missing_ok=True)
            if order is not None:
                places[proc.MARK] = proc.mark(workdir)
        except OSError as error:
            raise _not_started(command, error) from error
        variables = {**_BASE_VARIABLES, **command.variables, **_devices(order), **places}
        child = self._spawn(command.argv, variables, workdir, log_path, session=session)
        seen = proc.look(child.pid)
        if seen is None:
            raise LaunchFailed(f"cannot observe {command.argv[0]} after its start")
        launched = Launched(child.pid, seen.start_time, boot_id())
        with self._lock:
            self._children[launched.pid, launched.start_time] = child
            self._logs[launched.pid, launched.start_time] = log_path
        self._keeper.watch(log_path)
        return launched

    def _spawn(
        self, argv: tuple[str, ...], variables: Mapping[str, str], workdir: Path, log_path: Path, *, session: bool
    ) -> subprocess.Popen[bytes]:
        heard, told = os.pipe()
        orders = json.dumps({"limits": _limits(self._limits), "nice": self._limits.nice, "oom": OOM_PREFERENCE})
        try:
            with log_path.open("ab") as log:
                child = subprocess.Popen(
                    [sys.executable, "-I", "-S", become.__file__, orders, str(told), *argv],
                    cwd=workdir,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=session,
                    process_group=None if session else 0,
                    umask=0o077,
                    pass_fds=(told,),
                )
        except OSError as error:
            os.close(heard)
            raise _not_started(Command(argv), error) from error
        finally:
            os.close(told)
        with os.fdopen(heard, "rb") as pipe:
            # Ends when the program has taken over, since its end of the pipe closes by itself then.
            trouble = pipe.read(4096).decode("utf-8", errors="replace")
        if trouble:
            child.wait()
            raise LaunchFailed(f"cannot start {argv[0]}: {trouble}")
        return child

    def adopt(self, pid: int, start_time_ticks: str, boot: str, handle: str | None = None) -> Launched | None:
        """Return the identity of a process started earlier, or None when it is not provably still that process."""
        if handle is not None or boot != boot_id() or start_time(pid) != start_time_ticks:
            return None
        return Launched(pid, start_time_ticks, boot)

    def listening(self, launched: Launched, port_file: Path | None) -> Launched:
        """Return the identity with the port that this very engine has written or listens on, or without while none.

        An engine without a port file was told its port. Another process that took it first is not believed: the
        socket has to be one of the engine's own processes.
        """
        if launched.port is not None:
            return launched
        if port_file is None:
            port = told_port(proc.arguments(launched.pid))
            if port is None or not proc.listens(port, [launched.pid, *(seen.pid for seen in proc.tree(launched))]):
                return launched
            with self._lock:
                self._placed = {folder: held for folder, held in self._placed.items() if held != port}
            self._ports.release(port)
            return replace(launched, port=port)
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

    def logs(self, _launched: Launched | None, log_path: Path, lines: int) -> list[str]:
        """Return the last lines of its log."""
        return tail(log_path, lines)

    def made(self, _launched: Launched, _command: Command, _workdir: Path, _order: Order) -> None:
        """Return nothing: the kernel shows what the process runs."""

    def keep(self, _launched: Launched, _log_path: Path) -> None:
        """Do nothing: the engine writes to its file itself."""

    def strays(self, workdir: Path) -> list[Launched]:
        """Find what was started for a replica's folder and runs."""
        return strays(workdir)

    def left(self, _kept: Collection[str]) -> list[Launched]:
        """Return nothing: no process is started by an order that may be heard later, so each folder is there."""
        return []

    def sweep(self, _is_wanted: Callable[[str], bool]) -> list[str]:
        """Return nothing, for the same reason."""
        return []

    def wait(self, launched: Launched, timeout_seconds: float) -> ProcessState:
        """Wait until a process ends, at most so long, and tell its state."""
        deadline = time.monotonic() + timeout_seconds
        while (state := self.state(launched)).condition is Condition.RUNNING and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return state

    def stop(self, launched: Launched, *, grace_seconds: float, spares_other_sessions: bool = False) -> ProcessState:
        """End a process and everything that it started: SIGTERM, up to `grace_seconds` to drain, then SIGKILL.

        SIGTERM goes to the process alone, which drains and ends its own children; what is left of them is killed in
        any case, whatever group or session it is in. A runner is ended without what has a session of its own: its
        live engines serve on, and the next runner takes them up.
        """

        def tree() -> dict[int, proc.Seen]:
            return {seen.pid: seen for seen in proc.tree(launched, with_descendants=not spares_other_sessions)}

        started = tree()
        if self.state(launched).condition is Condition.RUNNING:
            self._signal(launched, signal.SIGTERM)
            if self.wait(launched, grace_seconds).condition is Condition.RUNNING:
                started |= tree()
                self._signal(launched, signal.SIGKILL)
        self._kill_tree(launched, started, tree)
        state = self.wait(launched, GONE_SECONDS)
        self._forget(launched)
        return state

    def kill(self, launched: Launched) -> ProcessState:
        """End a process and everything that it started at once."""
        return self.stop(launched, grace_seconds=0.0)

    def crash(self, launched: Launched) -> ProcessState:
        """Kill a process without asking it first, and return when it is gone."""
        self._signal(launched, signal.SIGKILL)
        return self.wait(launched, GONE_SECONDS)

    def reap(self) -> None:
        """Collect what engines left to this process when they ended: as a subreaper it is nobody else's to collect.

        Leaders of sessions are left alone, since whoever started one in this process waits for it by himself.
        """
        own = os.getsid(0)
        for seen in proc.processes():
            if seen.is_dead and seen.parent == os.getpid() and seen.session not in {own, seen.pid}:
                _collect(seen)

    def _forget(self, launched: Launched) -> None:
        """Look after an ended process no more; its exit status stays known."""
        with self._lock:
            log_path = self._logs.pop((launched.pid, launched.start_time), None)
        if log_path is not None:
            self._keeper.leave(log_path)

    def _signal(self, launched: Launched, number: signal.Signals) -> None:
        if launched.pid <= 0 or launched.boot_id != boot_id():
            return
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

    def _kill_tree(
        self, launched: Launched, started: dict[int, proc.Seen], tree: Callable[[], dict[int, proc.Seen]]
    ) -> None:
        """Kill what an engine was seen to have started, and what is in its group or session now."""
        for _ in range(_ROUNDS):
            found = {**started, **tree()}
            running = [seen for seen in found.values() if start_time(seen.pid) == seen.start_time]
            for seen in running:
                self._signal(Launched(seen.pid, seen.start_time, launched.boot_id), signal.SIGKILL)
            if not running:
                break
        for seen in started.values():
            now = proc.look(seen.pid)
            if now is not None and now.start_time == seen.start_time and now.parent == os.getpid():
                _collect(now)


def _not_started(command: Command, error: OSError) -> LaunchFailed:
    is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
    return LaunchFailed(f"cannot start {command.argv[0]}: {error}", str(Cause.DISK_FULL) if is_full else None)


def _collect(seen: proc.Seen) -> None:
    """Take the exit status of a child that nobody waits for."""
    try:
        os.waitpid(seen.pid, os.WNOHANG)
    except ChildProcessError:
        return


def _devices(order: Order | None) -> dict[str, str]:
    """Return the variables by which an engine sees the accelerators reserved for it, and no others."""
    if order is None:
        return {}
    if order.devices:
        return {"CUDA_VISIBLE_DEVICES": ",".join(order.devices)}
    return {"CUDA_VISIBLE_DEVICES": ""} if order.bundle.hardware.count == 0 else {}


def _limits(limits: Limits) -> dict[str, int]:
    named = {"DATA": limits.memory_bytes, "NOFILE": limits.files, "NPROC": limits.processes}
    return {name: most for name, most in named.items() if most is not None}
