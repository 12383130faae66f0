"""How containers without a network are reached: each by a socket in its replica's folder and a process that passes on.

That process has a session of its own, so that what serves can be reached while its runner is replaced, and the next
runner takes it up with the engine.
"""

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from workers.launchers import passage, proc

NAME = "engine"
_FOLDER = "reach"
_TOLD = "passage.json"


def folder(workdir: Path) -> Path:
    """Return where the socket of a replica is."""
    return workdir / _FOLDER


class Passages:
    """The processes that pass on, one a container. Safe to call from several threads for different containers."""

    def __init__(self) -> None:
        self._started: dict[str, int] = {}
        self._lock = threading.Lock()

    def prepare(self, workdir: Path) -> None:
        """Make the folder for a container's socket: its user, whoever that is outside, writes there, nobody else."""
        workdir.mkdir(parents=True, exist_ok=True)
        workdir.chmod(0o700)
        folder(workdir).mkdir(exist_ok=True)
        folder(workdir).chmod(0o777)
        (folder(workdir) / NAME).unlink(missing_ok=True)

    def port(self, handle: str, workdir: Path, *, parent_pid: int | None) -> int | None:
        """Return the port that leads to a container; None while the process that passes on is not there yet.

        Args:
            handle: the container.
            workdir: its replica's folder.
            parent_pid: this process, where what passes on is to end with it.
        """
        if (folder(workdir) / NAME).is_socket():
            # It is there before the engine is, which could fill the disk that the folder is on.
            folder(workdir).chmod(0o711)
        if (port := _told(workdir)) is not None:
            return port
        with self._lock:
            if handle not in self._started or _has_ended(self._started[handle]):
                self._started[handle] = _start(workdir, parent_pid)
        return None

    def close(self, handle: str, workdir: Path | None) -> None:
        """End what passes on to a container, whoever started it. Repeating is harmless."""
        # It may end by itself in this moment, and its folder be removed.
        with suppress(ProcessLookupError, FileNotFoundError):
            if workdir is not None and _told(workdir) is not None:
                _kill(_read(workdir)["pid"], workdir)
        with self._lock:
            started = self._started.pop(handle, None)
        if started is not None and not _has_ended(started):
            os.kill(started, signal.SIGKILL)
            os.waitpid(started, 0)

    def reap(self) -> None:
        """Collect those that ended by themselves."""
        with self._lock:
            self._started = {handle: pid for handle, pid in self._started.items() if not _has_ended(pid)}


def _kill(pid: int, workdir: Path) -> None:
    """Kill what passes on for a replica, and nothing that has got its number meanwhile."""
    held = os.pidfd_open(pid)
    try:
        if _passes_on(pid, workdir):
            signal.pidfd_send_signal(held, signal.SIGKILL)
    finally:
        os.close(held)


def _passes_on(pid: int, workdir: Path) -> bool:
    return str(folder(workdir)) in proc.arguments(pid)


def _has_ended(pid: int) -> bool:
    """Tell whether a child has ended; it is collected then."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _start(workdir: Path, parent_pid: int | None) -> int:
    words = ["outside", str(folder(workdir)), NAME, str(workdir / _TOLD)]
    if parent_pid is not None:
        words.append(str(parent_pid))
    (workdir / _TOLD).unlink(missing_ok=True)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", passage.__file__, *words],
        # By its HOME it is found, and ended, by a runner that does not know of it.
        {"HOME": str(workdir), "LANG": "C.UTF-8"},
        file_actions=[(os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_RDWR, 0) for each in range(3)],
        setsid=True,
    )


def _read(workdir: Path) -> dict[str, int]:
    told: dict[str, int] = json.loads((workdir / _TOLD).read_text(encoding="ascii"))
    return told


def _told(workdir: Path) -> int | None:
    """Return the port that was told, where the very process that told it listens on it for this replica."""
    try:
        told = _read(workdir)
    except FileNotFoundError:
        return None
    is_ours = _passes_on(told["pid"], workdir) and proc.listens(told["port"], [told["pid"]])
    return told["port"] if is_ours else None
