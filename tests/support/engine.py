"""Boots CHAIN on the real engine, through the driver and the process launcher."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from schemas.bundle import Bundle
from tests.support import chain
from workers.engines.base import Launch
from workers.engines.llamacpp import LLAMACPP
from workers.launchers.process import Condition, Launched, ProcessLauncher, tail

UNIDENTIFIED = "sha256:" + "0" * 64
BOOT_SECONDS = 30.0


@dataclass(frozen=True)
class RunningEngine:
    """An engine that listens; stopped when the context ends."""

    base_url: str
    model: str
    bundle: Bundle
    root: Path
    log_path: Path
    launcher: ProcessLauncher
    launched: Launched

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self.launched.pid


def boot(bundle: Bundle, root: Path, workdir: Path, *, drain_seconds: float = 30.0) -> RunningEngine:
    """Start an engine on the files in `root` and return it when it listens. The caller stops it."""
    workdir.mkdir(parents=True, exist_ok=True)
    log_path = workdir / "engine.log"
    launch = Launch(root=root, port_file=workdir / "port.json", drain_seconds=drain_seconds, parent_pid=os.getpid())
    command, launcher = LLAMACPP.command(bundle, launch), ProcessLauncher()
    launched = launcher.start(command, workdir=workdir, log_path=log_path)
    deadline = time.monotonic() + BOOT_SECONDS
    while (launched := launcher.listening(launched, command.port_file)).port is None:
        state = launcher.state(launched)
        if state.condition is not Condition.RUNNING or time.monotonic() > deadline:
            launcher.kill(launched)
            raise RuntimeError(f"the engine {state}\n" + "\n".join(tail(log_path)))
        time.sleep(0.01)
    base_url = f"http://127.0.0.1:{launched.port}"
    return RunningEngine(base_url, bundle.serving.served_name, bundle, root, log_path, launcher, launched)


@contextmanager
def chain_engine(
    workdir: Path,
    *,
    extra: dict[int, int] | None = None,
    template: str = chain.TEMPLATE,
    headless: bool = False,
    context_tokens: int = 512,
    max_sequences: int = 4,
    arguments: list[str] | None = None,
    drain_seconds: float = 30.0,
) -> Iterator[RunningEngine]:
    """Write CHAIN below `workdir`, boot it, and stop it in the end.

    Args:
        workdir: empty directory for the model, the log and the port file.
        extra: transitions that replace those of the default chain.
        template: the bundle's chat template; SELECTING_TEMPLATE lets a request choose its chain.
        headless: leave the head out [C17].
        context_tokens: context that one request gets.
        max_sequences: slots.
        arguments: further launch arguments instead of one thread and no warm-up.
        drain_seconds: given to running requests when it is stopped.
    """
    root = workdir / "bundle"
    chain.write_bundle_directory(
        root,
        extra=extra,
        template=template,
        headless=headless,
        context_length=max(2048, context_tokens),
    )
    bundle = chain.describe(
        root,
        environment=UNIDENTIFIED,
        arguments=arguments,
        runtime={"context_tokens": context_tokens, "max_sequences": max_sequences},
    )
    engine = boot(bundle, root, workdir / "run", drain_seconds=drain_seconds)
    try:
        yield engine
    finally:
        engine.launcher.stop(engine.launched, grace_seconds=drain_seconds + 5)
