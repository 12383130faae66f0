"""What a launcher is: it starts an engine somewhere, tells how it is, and ends it with everything that it started.

Three of them keep to one protocol: processes of this machine, containers of this machine, pods of a cluster. Nothing
is ended that is not provably ours, and nothing is believed of an engine that another one may have said.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from schemas.bundle import Bundle
from schemas.runner import LauncherName
from workers.engines.base import Command, Launch
from workers.launchers.made import Made

USER = "engine"
"""What engines of images are told that their user is called: its number has no name in most images."""
CACHES = {"XDG_CACHE_HOME": "/tmp/.cache", "HF_HOME": "/tmp/.cache/huggingface"}  # noqa: S108 - inside
"""Where engines of images keep what they make, and look for models: an image may name a folder that it cannot write,
or one with models of its own, which would be taken for what the bundle lacks."""
OOM_PREFERENCE = 500
"""When memory runs out, the kernel ends an engine rather than the runner that would tell of it."""
NO_ACCELERATOR = "void"
"""What NVIDIA's runtime for containers reads as none at all, neither devices nor the driver's libraries."""


class LaunchFailed(RuntimeError):
    """The engine could not be started at all: no such program or image, or the system refused.

    `cause` is the class of failure (`schemas.failures.Cause`) where it is a special one.
    """

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class NotTold(RuntimeError):
    """Who runs engines did not answer as it should: what runs there is not known here."""


class Condition(StrEnum):
    """What is known of a launched engine."""

    RUNNING = "running"
    EXITED = "exited"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class ProcessState:
    """Whether an engine runs. `code` is its exit status, −n for signal n, None when nobody could see it.

    `reason` says what the system that runs it knows beyond that, such as who killed it, or what it waits for; `cause`
    is that as a cause of failure (`schemas.failures.Cause`), where it is one.
    """

    condition: Condition
    code: int | None = None
    reason: str | None = None
    cause: str | None = None

    def __str__(self) -> str:
        """Say it as a person would."""
        told = f" ({self.reason})" if self.reason else ""
        if self.condition is not Condition.EXITED or self.code is None:
            return f"{self.condition}{told}"
        if self.code < 0:
            return f"ended by signal {-self.code}{told}"
        return f"exited with status {self.code}{told}"


@dataclass(frozen=True)
class Launched:
    """Identity of a started engine, and the port it listens on once that is known.

    For a process and a container `pid` and `start_time` are those of the process on this machine; a pod has none: its
    `pid` is 0. `handle` is the name under which a container engine or a cluster knows it, and nothing else ever will:
    a container's id, or a pod's place and uid. `host` is where it is reached, this machine when absent.
    """

    pid: int
    start_time: str
    boot_id: str
    port: int | None = None
    handle: str | None = None
    host: str | None = None

    def __str__(self) -> str:
        """Name it to a person."""
        return f"process {self.pid}" if self.handle is None else f"{self.handle[:120]}"


@dataclass(frozen=True)
class Order:
    """One replica as it is ordered: of which bundle, from which files, for which job.

    `files` is the folder of the staged files on this machine. `job` and `fencing_token` mark what is started, so that
    it is provably this job's; `devices` are the accelerators reserved for it, as the driver names them.
    `planned_bytes` of the machine's memory are what a plan says that it takes, 0 where there is none.
    """

    bundle: Bundle
    files: Path
    job: str = ""
    fencing_token: int = 0
    devices: tuple[str, ...] = ()
    planned_bytes: int = 0


@dataclass(frozen=True)
class Limits:
    """What one engine may take of the machine that it shares; None leaves what the system sets.

    `memory_bytes` is main memory, of which a process's own data and heap are counted, not the files that it maps;
    `files` are open at once; `processes` and threads are counted for the whole account, and not at all for root.
    """

    memory_bytes: int | None = None
    files: int | None = 65_536
    processes: int | None = None
    nice: int = 0


class Launcher(Protocol):
    """Runs engines in one kind of place. Every method may be called from several threads for different engines."""

    @property
    def name(self) -> LauncherName:
        """The launcher's name in the settings."""

    @property
    def runs_images(self) -> bool:
        """Whether it runs engines from images, else from environments installed on this machine."""

    def place(self, order: Order, workdir: Path, *, drain_seconds: float, parent_pid: int | None) -> Launch:
        """Return where the engine will find itself: what its driver makes a command line for.

        Args:
            order: the replica.
            workdir: a folder of this machine for this replica alone.
            drain_seconds: given to running requests after it was asked to end.
            parent_pid: a process that it should not outlive, where the launcher can see to that.
        """

    def leave(self, workdir: Path) -> None:
        """Give back what `place` set aside for a replica that is not started, or not any more."""

    def start(self, command: Command, *, workdir: Path, log_path: Path, order: Order) -> Launched:
        """Start an engine and return at once. Raises LaunchFailed."""

    def adopt(self, pid: int, start_time_ticks: str, boot: str, handle: str | None = None) -> Launched | None:
        """Return the identity of an engine started earlier; None when it is not provably still that one.

        Raises NotTold where nobody says whether it is.
        """

    def listening(self, launched: Launched, port_file: Path | None) -> Launched:
        """Return the identity with the port on which this very engine listens, or without while it does not."""

    def state(self, launched: Launched) -> ProcessState:
        """Tell whether it runs now. It is asked of one that answers no more, so what was seen before will not do."""

    def logs(self, launched: Launched | None, log_path: Path, lines: int) -> list[str]:
        """Return the last lines that the engine wrote, without control characters; also after its end."""

    def made(self, launched: Launched, command: Command, workdir: Path, order: Order) -> Made | None:
        """Return what the system that runs an engine says that it runs, held against what it was asked for.

        None where the engine is a process of this machine, which says so itself, or where nobody tells now.
        """

    def keep(self, launched: Launched, log_path: Path) -> None:
        """Bring what the engine wrote so far into its file, where it does not write there itself."""

    def stop(self, launched: Launched, *, grace_seconds: float) -> ProcessState:
        """Ask it to end, and end it with all that it started after `grace_seconds`. Repeating is harmless."""

    def kill(self, launched: Launched) -> ProcessState:
        """End it with all that it started at once."""

    def crash(self, launched: Launched) -> ProcessState:
        """Kill it without asking it first, and return when it is gone."""

    def reap(self) -> None:
        """Collect what ended meanwhile, and end what an unanswered order made; asked every few seconds."""

    def strays(self, workdir: Path) -> list[Launched]:
        """Find what runs for a replica's folder and is nobody's any more: all of it provably ours."""

    def left(self, kept: Collection[str]) -> list[Launched]:
        """Find what runs for this runner in a folder of none of these names, whether or not that is still there.

        Raises NotTold where nobody says what runs.
        """

    def sweep(self, is_wanted: Callable[[str], bool]) -> list[str]:
        """End what runs for this runner and is nobody's, and return its names; asked again and again.

        An order may be carried out long after whoever gave it was lost, and no start of a runner is late enough to see
        that. What runs in the folder of a job that is held is nobody's once another one is known of there.

        Args:
            is_wanted: tells whether the job of a folder of this name is held; asked at the last moment.
        """
