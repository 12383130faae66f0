"""What a driver is: it turns a bundle and its files into a command line, and refuses what it cannot.

A driver is data plus a few functions. How to speak to an engine that runs is `gates.dialects`.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gates.environment import Environment, NotInstalled
from schemas.bundle import Bundle
from workers.engines import guarded


@dataclass(frozen=True)
class Command:
    """What a launcher starts: arguments, declared environment, and the file in which the engine tells its port.

    An engine that takes a port instead of telling one has no `port_file`; the launcher then knows the port.
    """

    argv: tuple[str, ...]
    port_file: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """Where one replica runs: what the runner decides, never the bundle.

    `root` holds the bundle's files at their paths. `port` 0 lets the system choose. `drain_seconds` is what
    running requests get after SIGTERM. `parent_pid` is given for engines that must end with their worker.
    """

    root: Path
    port_file: Path
    host: str = "127.0.0.1"
    port: int = 0
    drain_seconds: float = 30.0
    parent_pid: int | None = None


@dataclass(frozen=True)
class Driver:
    """One engine.

    `command` builds the command line of a bundle that `check_bundle` has no problem with. `check_arguments` and
    `check_bundle` return problems, one sentence each, without starting anything. `identity` names what is
    installed here. `failure_patterns` tells, by a regular expression on the log, why a start failed, as one of
    `schemas.failures.Cause`. `takes_port` says that it has to be told a port by `--port`, instead of writing the one
    that it got into the port file. `progress_patterns` find in the log how far it has loaded: the group `percent`, or
    `done` and `total`. `rank_pattern` is found in the titles of its child processes without which it cannot serve;
    None when it has none. `compile_pattern` finds in the log how long it compiled, with the group `seconds`.
    `admits` is there for an engine that runs elsewhere, and returns what this runner's operator does not allow of a
    bundle.
    """

    name: str
    command: Callable[[Bundle, Launch], Command]
    check_arguments: Callable[[list[str]], list[str]]
    check_bundle: Callable[[Bundle], list[str]]
    identity: Callable[[], Environment]
    failure_patterns: tuple[tuple[str, str], ...]
    takes_port: bool = False
    progress_patterns: tuple[str, ...] = ()
    rank_pattern: str | None = None
    compile_pattern: str | None = None
    admits: Callable[[Bundle], list[str]] | None = None


def interpreter(bundle: Bundle) -> str:
    """Return the Python that starts an engine: the image's own, or this one, in whose environment it is installed."""
    return "python3" if bundle.engine.image is not None else sys.executable


def guard(launch: Launch) -> list[str]:
    """Return the words before a process's own that end its group when the worker dies; none where it may outlive it."""
    if launch.parent_pid is None:
        return []
    return [sys.executable, "-I", "-S", str(Path(guarded.__file__).resolve()), str(launch.parent_pid)]


def from_images_alone(name: str) -> Callable[[], Environment]:
    """Return the identity of an engine of which there is no environment: asked for it, it raises NotInstalled."""

    def refuse() -> Environment:
        raise NotInstalled(f"{name} is started from images only")

    return refuse
