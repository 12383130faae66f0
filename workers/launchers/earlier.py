"""What a runner may have left under another launcher than it uses now: which those are lies in its data folder.

A container or a pod outlives its runner, and whatever the runner is set to afterwards. So the ways in which engines
were started here are kept until nothing runs that was started so; a process is always found, whatever is set.
"""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, TypeAdapter, ValidationError

from registry.settings import ANYBODY, RunnerSettings
from schemas.common import Closed, ShortText
from schemas.runner import LauncherName
from workers.launchers.base import Launcher, LaunchFailed, NotTold
from workers.launchers.choice import launcher_of
from workers.launchers.process import ProcessLauncher

FILE = "launchers.json"


class Way(Closed):
    """How a runner reaches the engines of one launcher."""

    launcher: LauncherName = Field(description="Kind of launcher.")
    container_program: ShortText | None = Field(None, description="Container engine.")
    kubernetes_url: ShortText | None = Field(None, description="Address of the cluster's API.")
    kubernetes_namespace: ShortText | None = Field(None, description="Namespace of its pods.")

    @classmethod
    def of(cls, settings: RunnerSettings, launcher: LauncherName | None = None) -> "Way":
        """Return the way that a runner is set to, or would be with another launcher."""
        name = launcher or settings.launcher
        if name == "container":
            return cls(launcher=name, container_program=settings.container_program)
        if name == "kubernetes":
            namespace = settings.kubernetes_namespace
            return cls(launcher=name, kubernetes_url=settings.kubernetes_url, kubernetes_namespace=namespace)
        return cls(launcher=name)

    def __str__(self) -> str:
        parts = [self.container_program, self.kubernetes_url, self.kubernetes_namespace]
        return f"{self.launcher} ({' '.join(part for part in parts if part)})"

    def set(self, settings: RunnerSettings) -> RunnerSettings:
        """Return a runner's settings, as they would be for this way."""
        told = {name: value for name, value in self.model_dump().items() if value is not None}
        # Nothing is made by it any more, which is all that it would take these for.
        unused = {
            "kubernetes_claim": settings.kubernetes_claim or "none",
            "kubernetes_callers": settings.kubernetes_callers or ANYBODY,
            "kubernetes_pod": None,
        }
        return settings.model_copy(update=told | unused)


_WAYS = TypeAdapter(list[Way])


class Unreachable(RuntimeError):
    """What was left under another launcher cannot be found: nothing may be started beside it."""


def kept(data_dir: Path) -> list[Way]:
    """Return the ways in which engines were started. Raises Unreachable when the file cannot be understood."""
    try:
        return _WAYS.validate_json((data_dir / FILE).read_bytes())
    except FileNotFoundError:
        return []
    except ValidationError as error:
        raise Unreachable(
            f"{data_dir / FILE} cannot be read, which says how engines were started here: {error}"
        ) from error


def keep(data_dir: Path, ways: Iterable[Way]) -> None:
    """Keep these ways; the file is whole or the old one."""
    wanted = [way for way in ways if way.launcher != "process"]
    if wanted == kept(data_dir):
        return
    told = [way.model_dump(exclude_none=True) for way in wanted]
    data_dir.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=data_dir, prefix=".launchers-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(told, file)
        file.flush()
        os.fsync(file.fileno())
    Path(name).replace(data_dir / FILE)


def _by_handle(handle: str) -> LauncherName:
    """Return which launcher gives such a handle, for what was left before ways were kept."""
    return "kubernetes" if "/" in handle else "container"


def others(settings: RunnerSettings, handles: Iterable[str]) -> dict[Way, Launcher]:
    """Return the launchers beside the one that is set under which something may still run, by the way to it.

    The way that is set now is kept before anything is started by it, and another one is forgotten once nothing runs by
    it.

    Args:
        settings: the runner's.
        handles: of the replicas that it has left.

    Raises:
        Unreachable: what was started in another way cannot be found; it says what to do.
    """
    data_dir, own = settings.data_dir, Way.of(settings)
    known = kept(data_dir)
    kinds = {way.launcher for way in [own, *known]}
    guessed = {_by_handle(handle) for handle in handles} - kinds
    before = [way for way in known if way != own] + [Way.of(settings, kind) for kind in sorted(guessed)]
    found = {way: _reached(way, settings) for way in before}
    used = {way: launcher for way, launcher in found.items() if launcher is not None}
    keep(data_dir, [own, *used])
    return used


def _reached(way: Way, settings: RunnerSettings) -> Launcher | None:
    """Return the launcher of a way, or None where nothing runs by it. Raises Unreachable."""
    try:
        launcher = launcher_of(way.set(settings))
        return launcher if launcher.left([]) else None
    except (LaunchFailed, NotTold, OSError) as error:
        raise Unreachable(
            f"engines of this runner may still run by {way}, with which they were started before: {error}. Let this "
            f"runner reach it, or set it back and drain it; if nothing of it runs any more, remove {way.launcher} from "
            f"{settings.data_dir / FILE}"
        ) from error


def all_of(own: Launcher, ways: Iterable[Launcher]) -> tuple[Launcher, ...]:
    """Return the launchers that know what a runner has: its own first, and processes always."""
    more = [] if isinstance(own, ProcessLauncher) else [ProcessLauncher()]
    return (own, *ways, *more)
