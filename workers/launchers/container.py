"""Runs engines as containers of this machine, by podman or docker and an image named by digest."""

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from schemas.runner import LauncherName
from workers.engines.base import Command, Launch
from workers.launchers import container_command, container_made, passages
from workers.launchers.base import Condition, Launched, LaunchFailed, NotTold, Order, ProcessState
from workers.launchers.container_command import ALONE, HOME, LABEL, PORT, Containers
from workers.launchers.logs import LOG_CAP_BYTES, cleaned, tail
from workers.launchers.made import Made
from workers.launchers.passages import Passages
from workers.launchers.proc import boot_id
from workers.launchers.process import refused_variables
from workers.launchers.unanswered import Known, Unanswered

COMMAND_SECONDS = 60.0
"""Longest wait for an answer of the container engine, beyond what the command itself waits for."""
PULL_SECONDS = 3600.0
KEPT_LINES = 10_000
_ABSENT = re.compile(r"no such (container|object)", re.IGNORECASE)
_UNREACHABLE = re.compile(
    r"cannot connect to|failed to connect|is the docker daemon running|connection refused", re.IGNORECASE
)
_LOST = re.compile(
    r"error during connect|connection reset|broken pipe|unexpected EOF|deadline exceeded|i/o timeout", re.IGNORECASE
)
"""What is said of an order that may have been carried out."""
_STARTED = frozenset({"running", "paused", "restarting", "stopping"})
_SIGNALLED = 128


class EngineUnreachable(NotTold):
    """The container engine did not answer as it should: what it knows of containers is not known here."""


class ContainerLauncher:
    """Starts, watches and stops containers. Safe to call from several threads for different containers."""

    name: LauncherName = "container"
    runs_images = True

    def __init__(self, program: str, containers: Containers) -> None:
        """Use a container engine's program, podman or docker, and make containers in this way."""
        self._program = program
        self._unanswered = Unanswered()
        self._known = Known()
        self._passages = Passages()
        self._tied: set[Path] = set()
        self._containers = containers
        self._ended: dict[str, ProcessState] = {}
        self._logs: dict[str, Path] = {}
        self._variables: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()

    def place(self, order: Order, workdir: Path, *, drain_seconds: float, parent_pid: int | None) -> Launch:
        """Return where the engine will find itself: inside, where no process of this machine can be seen."""
        del order
        with self._lock:
            (self._tied.discard if parent_pid is None else self._tied.add)(workdir)
        return Launch(
            root=self._containers.root,
            port_file=Path(HOME) / "port.json",
            host="127.0.0.1" if self._is_alone else "0.0.0.0",  # noqa: S104 - inside, where only what is published is reached
            port=PORT,
            drain_seconds=drain_seconds,
        )

    def leave(self, workdir: Path) -> None:
        """Forget whether what leads to a replica ends with this process: it knows by itself since it was started."""
        with self._lock:
            self._tied.discard(workdir)

    @property
    def _is_alone(self) -> bool:
        return self._containers.network == ALONE

    def start(self, command: Command, *, workdir: Path, log_path: Path, order: Order) -> Launched:
        """Start a container and return at once; its image is pulled before, by digest, where it is missing.

        Raises:
            LaunchFailed: the bundle names no image, the image cannot be had, a container of this job and token is
                there already, or the container engine is not there or refused.
        """
        image = order.bundle.engine.image
        if image is None:
            raise LaunchFailed("the bundle names an environment of a machine, and containers run images")
        if (nodes := order.bundle.topology.nodes) != 1:
            raise LaunchFailed(f"a container is on one machine, and this replica spans {nodes}")
        if refused := refused_variables(command.variables):
            raise LaunchFailed(f"no engine is given the variables {', '.join(refused)}")
        try:
            self._have(image)
        except EngineUnreachable as error:
            raise LaunchFailed(str(error)) from error
        name = container_command.name(order, workdir)
        self._unanswered.settle(name)
        with self._known.ordering(name):
            try:
                found = self._run(image, command, order, workdir)
            except EngineUnreachable as error:
                self._unanswered.add(name)
                raise LaunchFailed(str(error)) from error
            self._known.add(found["Id"], workdir.name)
        launched = _launched(found)
        with self._lock:
            self._logs[found["Id"]] = log_path
            self._variables[found["Id"]] = container_command.variables(self._containers, command, order)
        return launched

    def adopt(self, pid: int, start_time_ticks: str, boot: str, handle: str | None = None) -> Launched | None:
        """Return the identity of a container started earlier, or None when it is not provably that start of ours.

        Raises EngineUnreachable.
        """
        if handle is None or boot != boot_id():
            return None
        found = self._inspect(handle)
        if found is None or not self._is_ours(found) or not found["State"].get("Running"):
            return None
        launched = _launched(found)
        if (launched.pid, launched.start_time) != (pid, start_time_ticks):
            return None
        self._known.add(handle, Path(_label(found, "folder")).name)
        return launched

    def listening(self, launched: Launched, _port_file: Path | None) -> Launched:
        """Return the identity with the port of this machine that leads to the container, once there is one."""
        if launched.port is not None or launched.handle is None:
            return launched
        try:
            found = self._inspect(launched.handle)
        except EngineUnreachable:
            return launched
        # As it was made, which may have been by a runner that was set otherwise.
        published = ((found or {}).get("NetworkSettings") or {}).get("Ports") or {}
        for binding in published.get(f"{PORT}/tcp") or []:
            if binding.get("HostIp") == "127.0.0.1" and str(binding.get("HostPort", "")).isdigit():
                return replace(launched, port=int(binding["HostPort"]), host="127.0.0.1")
        return self._through_passage(launched, found)

    def _through_passage(self, launched: Launched, found: dict[str, Any] | None) -> Launched:
        if launched.handle is None or found is None or not found["State"].get("Running"):
            return launched
        workdir = Path(_label(found, "folder"))
        if not passages.folder(workdir).is_dir():
            return launched
        with self._lock:
            parent_pid = os.getpid() if workdir in self._tied else None
        port = self._passages.port(launched.handle, workdir, parent_pid=parent_pid)
        return launched if port is None else replace(launched, port=port, host="127.0.0.1")

    def state(self, launched: Launched) -> ProcessState:
        """Tell whether a container runs; unknown, with the reason, while the container engine does not say."""
        handle = launched.handle
        if handle is None:
            return ProcessState(Condition.UNKNOWN, reason="it is no container")
        with self._lock:
            ended = self._ended.get(handle)
        return ended or self._look(handle)

    def logs(self, launched: Launched | None, log_path: Path, lines: int) -> list[str]:
        """Return the last lines that a container wrote; of one that was removed, those that were kept."""
        if launched is not None and launched.handle is not None:
            try:
                done = self._ask(["logs", f"--tail={lines}", launched.handle], merged=True)
            except EngineUnreachable:
                return tail(log_path, lines)
            if done.returncode == 0:
                return cleaned(done.stdout, lines)
        return tail(log_path, lines)

    def made(self, launched: Launched, command: Command, _workdir: Path, order: Order) -> Made | None:
        """Return what the container engine says that it runs, held against what it was asked for."""
        try:
            found = None if launched.handle is None else self._inspect(launched.handle)
        except EngineUnreachable:
            return None
        if found is None:
            return None
        # As it was made, which may have been by a runner that was set otherwise.
        is_alone = (found.get("HostConfig") or {}).get("NetworkMode") == ALONE
        with self._lock:
            variables = self._variables.get(found["Id"])
        return container_made.read(
            found,
            source=f"{Path(self._program).name} container inspect",
            words=container_command.within(command, is_alone=is_alone),
            image=order.bundle.engine.image or "none",
            variables=variables,
        )

    def keep(self, launched: Launched, log_path: Path) -> None:
        """Bring what a container wrote so far into a file."""
        try:
            if launched.handle is not None:
                self._write_logs(launched.handle, log_path)
        except EngineUnreachable:
            return

    def stop(self, launched: Launched, *, grace_seconds: float) -> ProcessState:
        """Ask a container to end, kill it after `grace_seconds`, keep what it wrote, and remove it."""
        handle = launched.handle
        if handle is None:
            return ProcessState(Condition.UNKNOWN, reason="it is no container")
        with self._lock:
            ended = self._ended.get(handle)
        if ended is not None:
            return ended
        try:
            # Whole seconds is all that it takes; 0 kills at once.
            self._ask(["stop", "-t", str(round(grace_seconds)), handle], seconds=grace_seconds + COMMAND_SECONDS)
            found = self._inspect(handle)
            state = _state_of(found)
            self._passages.close(handle, None if found is None else Path(_label(found, "folder")))
            self._keep_logs(handle)
            removed = self._ask(["rm", "--force", "--volumes", handle])
        except EngineUnreachable as error:
            return ProcessState(Condition.UNKNOWN, reason=str(error))
        if removed.returncode != 0 and not _ABSENT.search(removed.stderr):
            return ProcessState(Condition.UNKNOWN, reason=f"it could not be removed: {_said(removed)}")
        if state.condition is not Condition.EXITED:
            state = ProcessState(Condition.EXITED)
        with self._lock:
            self._ended[handle] = state
            self._variables.pop(handle, None)
        return state

    def kill(self, launched: Launched) -> ProcessState:
        """End a container at once, and remove it."""
        return self.stop(launched, grace_seconds=0.0)

    def crash(self, launched: Launched) -> ProcessState:
        """Kill a container without asking it first, and return when it is gone."""
        if launched.handle is None:
            return ProcessState(Condition.UNKNOWN, reason="it is no container")
        try:
            self._ask(["kill", "--signal=KILL", launched.handle])
        except EngineUnreachable as error:
            return ProcessState(Condition.UNKNOWN, reason=str(error))
        deadline = time.monotonic() + COMMAND_SECONDS
        while (state := self._look(launched.handle)).condition is Condition.RUNNING and time.monotonic() < deadline:
            time.sleep(0.05)
        return state

    def strays(self, workdir: Path) -> list[Launched]:
        """Find the containers of a replica's folder, by the labels that only this runner gives them."""
        return [_launched(one) for one in self._found(workdir)]

    def left(self, kept: Collection[str]) -> list[Launched]:
        """Find this runner's containers of other folders than these, by their labels. Raises EngineUnreachable."""
        found = [self._inspect(handle) for handle in self._listed()]
        ours = [one for one in found if one is not None and self._is_ours(one)]
        return [_launched(one) for one in ours if Path(_label(one, "folder")).name not in kept]

    def sweep(self, is_wanted: Callable[[str], bool]) -> list[str]:
        """Remove this runner's containers that are nobody's, and return their names."""
        ended = []
        try:
            for handle in self._listed():
                folder = self._known.folder(handle)
                if folder is not None and is_wanted(folder):
                    continue
                found = self._inspect(handle)
                if found is None or not self._is_ours(found, is_certain=True):
                    continue
                name, folder = str(found.get("Name") or "").lstrip("/"), Path(_label(found, "folder")).name
                if self._known.is_nobody_s(handle, name, folder, is_wanted):
                    self._ask(["rm", "--force", "--volumes", handle])
                    ended.append(name)
        except EngineUnreachable:
            return ended
        return ended

    def reap(self) -> None:
        """Remove what an unanswered order made after all; what ends in a container, its engine collects."""
        self._passages.reap()
        for name in self._unanswered.names():
            try:
                found = self._inspect(name)
                # Whoever orders the name anew settles it first, so one of his is not in there any more.
                if found is None or not self._is_ours(found) or name not in self._unanswered:
                    continue
                if self._ask(["rm", "--force", "--volumes", found["Id"]]).returncode == 0:
                    self._unanswered.settle(name)
            except EngineUnreachable:
                continue

    # ------------------------------------------------------------------------------------------- plumbing

    def _run(self, image: str, command: Command, order: Order, workdir: Path) -> dict[str, Any]:
        """Start a container and return it. Raises LaunchFailed, or EngineUnreachable when it may be there even so."""
        if self._is_alone:
            self._passages.prepare(workdir)
        done = self._ask(container_command.run(self._containers, command, order, workdir))
        if done.returncode != 0:
            if done.returncode < 0 or _LOST.search(done.stderr):
                raise EngineUnreachable(f"{self._program} run: {_said(done)}")
            self._remove_half_made(order, workdir)
            raise LaunchFailed(f"{self._program} did not start {image}: {_said(done)}{self._advice(done)}")
        handle = done.stdout.strip().splitlines()[-1:]
        found = self._inspect(handle[0]) if handle else None
        if found is None:
            raise EngineUnreachable(f"{self._program} told no container that it started from {image}")
        return found

    def _found(self, workdir: Path) -> list[dict[str, Any]]:
        """Return this runner's containers of one folder; none when the container engine does not say."""
        try:
            found = [self._inspect(handle) for handle in self._listed(workdir)]
        except EngineUnreachable:
            return []
        return [one for one in found if one is not None and self._is_ours(one)]

    def _listed(self, workdir: Path | None = None) -> list[str]:
        """Return the ids of this runner's containers, of one folder or all. Raises EngineUnreachable."""
        done = self._ask(container_command.ours(self._containers, workdir))
        if done.returncode != 0:
            raise EngineUnreachable(f"{self._program} ps: {_said(done)}")
        return done.stdout.split()

    def _have(self, image: str) -> None:
        """See that an image is on this machine. Raises LaunchFailed when it cannot be had."""
        if self._ask(["image", "inspect", "--format={{.Id}}", image]).returncode == 0:
            return
        if not self._containers.pulls:
            raise LaunchFailed(f"{image} is not on this machine, and this runner pulls none", "image_unavailable")
        done = self._ask(["pull", "--quiet", image], seconds=PULL_SECONDS)
        if done.returncode != 0:
            raise LaunchFailed(f"{image} could not be pulled: {_said(done)}", "image_unavailable")

    def _advice(self, done: subprocess.CompletedProcess[str]) -> str:
        """Return what can be done where an image lacks what it takes to be reached without a network."""
        if not self._is_alone or not re.search(r'"?python3"?:? .*not found', done.stderr):
            return ""
        return (
            "; without a network an engine is reached by the image's python3: have one in it, or name a network in "
            "SLUICEGATE_RUNNER__CONTAINER_NETWORK"
        )

    def _remove_half_made(self, order: Order, workdir: Path) -> None:
        """Remove what was created and did not start: it holds the name. One that runs under the name is left alone."""
        found = self._inspect(container_command.name(order, workdir))
        if found is not None and self._is_ours(found) and found["State"].get("Status") in {"created", "configured"}:
            self._ask(["rm", "--force", "--volumes", found["Id"]])

    def _is_ours(self, found: dict[str, Any], *, is_certain: bool = False) -> bool:
        """Tell whether a container is this runner's; one made before there were marks is not certain to be."""
        expected = {"runner": self._containers.runner, "data": str(self._containers.folder)}
        marks = {self._containers.mark} if is_certain else {self._containers.mark, ""}
        return _label(found, "mark") in marks and all(_label(found, key) == value for key, value in expected.items())

    def _look(self, handle: str) -> ProcessState:
        try:
            found = self._inspect(handle)
        except EngineUnreachable as error:
            return ProcessState(Condition.UNKNOWN, reason=str(error))
        return _state_of(found)

    def _keep_logs(self, handle: str) -> None:
        with self._lock:
            log_path = self._logs.pop(handle, None)
        if log_path is not None and log_path.parent.is_dir():
            self._write_logs(handle, log_path)

    def _write_logs(self, handle: str, log_path: Path) -> None:
        done = self._ask(["logs", f"--tail={KEPT_LINES}", handle], merged=True)
        if done.returncode == 0:
            log_path.write_text(done.stdout[-LOG_CAP_BYTES:], encoding="utf-8")

    def _inspect(self, handle: str) -> dict[str, Any] | None:
        """Return what the container engine knows of a container, or None when it has none of that name."""
        done = self._ask(["container", "inspect", handle])
        if done.returncode != 0:
            if _ABSENT.search(done.stderr):
                return None
            raise EngineUnreachable(f"{self._program} container inspect: {_said(done)}")
        try:
            (found,) = json.loads(done.stdout)
            if not isinstance(found["State"], dict) or not isinstance(found["Id"], str):
                raise TypeError("State and Id are missing")
        except (ValueError, KeyError, TypeError) as error:
            raise EngineUnreachable(f"{self._program} container inspect said what is no container: {error}") from error
        return dict(found)

    def _ask(
        self, words: Sequence[str], *, seconds: float = COMMAND_SECONDS, merged: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run the program. Raises EngineUnreachable when it is not there, silent, or has no container engine."""
        try:
            done = subprocess.run(
                [self._program, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if merged else subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except OSError as error:
            raise EngineUnreachable(f"{self._program} cannot be run: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise EngineUnreachable(f"{self._program} {words[0]} did not end in {seconds:g} s") from error
        if done.returncode != 0 and _UNREACHABLE.search(done.stderr or done.stdout):
            raise EngineUnreachable(f"{self._program} {words[0]}: {_said(done)}")
        return done


def read_state(state: dict[str, Any]) -> ProcessState:
    """Read the `State` of `container inspect`, as podman and docker write it.

    A status above 128 is that of a process ended by a signal. What is neither running nor ended is unknown.
    """
    status, reason = str(state.get("Status", "")).lower(), str(state.get("Error") or "") or None
    if status in _STARTED or state.get("Running") is True:
        return ProcessState(Condition.RUNNING, reason="paused" if status == "paused" else None)
    if status not in {"exited", "stopped", "dead"}:
        return ProcessState(Condition.UNKNOWN, reason=reason or f"its status is {status or 'not told'}")
    told = state.get("ExitCode")
    code = told if isinstance(told, int) and not isinstance(told, bool) else None
    if code is not None and _SIGNALLED < code < _SIGNALLED + 65:
        code = _SIGNALLED - code
    if state.get("OOMKilled") is True:
        return ProcessState(Condition.EXITED, code, "out of its memory limit", "out_of_memory")
    return ProcessState(Condition.EXITED, code, reason)


def _state_of(found: dict[str, Any] | None) -> ProcessState:
    return ProcessState(Condition.EXITED, reason="it was removed") if found is None else read_state(found["State"])


def _label(found: dict[str, Any], name: str) -> str:
    told = (found.get("Config") or {}).get("Labels") or {}
    return str(told.get(f"{LABEL}.{name}") or "")


def _launched(found: dict[str, Any]) -> Launched:
    state = found["State"]
    pid = state.get("Pid")
    return Launched(
        pid=pid if isinstance(pid, int) and pid > 0 else 0,
        start_time=str(state.get("StartedAt") or "never"),
        boot_id=boot_id(),
        handle=found["Id"],
    )


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = cleaned(done.stderr or done.stdout, 3)
    return " ".join(lines) or f"status {done.returncode}, without a word"
