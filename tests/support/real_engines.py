"""Boots CHAIN and BIAS on every engine that runs here for real, through its driver, the launcher and a replica."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gates.dialects.table import dialect_of
from gates.endpoint import Endpoint
from schemas.bundle import Bundle
from tests.support import chain
from tests.support.chain_folder import describe_folder, write_bias_folder, write_chain_folder
from workers.engines.table import DRIVERS
from workers.launchers.base import Order
from workers.launchers.process import ProcessLauncher
from workers.serving import Ready, Replica

CONTEXT_TOKENS = 4096
SLOTS = 4
BOOT_SECONDS = 240.0
DRAIN_SECONDS = 20.0
FEATURES = ["chat", "completions", "json_schema", "logprobs", "streaming"]
_RUNTIME = {"context_tokens": CONTEXT_TOKENS, "max_sequences": SLOTS}
_SERVING = {"served_name": "chain", "features": FEATURES, "usage": "all_tokens", "cancellation": "on_disconnect"}


ENGINES = ("llamacpp", pytest.param("vllm", marks=pytest.mark.vllm))


@dataclass(frozen=True)
class Booted:
    """An engine that is ready."""

    name: str
    bundle: Bundle
    root: Path
    replica: Replica
    ready: Ready

    def endpoint(self) -> Endpoint:
        """Return a way to speak to it, for one event loop."""
        return Endpoint(self.replica.base_url, self.bundle.serving.served_name, dialect_of(self.bundle.engine))


def chain_bundle(engine: str, root: Path) -> Bundle:
    """Write CHAIN for an engine, with the endless ring after "E" and a template that lets a request choose it."""
    extra, template = chain.endless(), chain.SELECTING_TEMPLATE
    environment = DRIVERS[engine].identity().digest
    if engine == "llamacpp":
        chain.write_bundle_directory(root, extra=extra, template=template, context_length=CONTEXT_TOKENS)
        return chain.describe(root, environment=environment, runtime=_RUNTIME, serving=_SERVING)
    write_chain_folder(root, extra=extra, template=template, context_length=CONTEXT_TOKENS)
    return describe_folder(root, environment=environment, runtime=_RUNTIME, serving=_SERVING)


def bias_bundle(
    engine: str, root: Path, ranking: Mapping[int, float], sampling: Mapping[str, str] | None = None
) -> Bundle:
    """Write BIAS for an engine; `sampling` is what applies where a request names nothing."""
    environment = DRIVERS[engine].identity().digest
    runtime: dict[str, object] = {"context_tokens": 2048, "max_sequences": SLOTS}
    if sampling is not None:
        runtime["sampling"] = dict(sampling)
    if engine == "llamacpp":
        root.mkdir(parents=True)
        chain.write_bias(root / "model.gguf", ranking)
        return chain.describe(root, environment=environment, runtime=runtime, serving=_SERVING)
    write_bias_folder(root, ranking)
    return describe_folder(root, environment=environment, runtime=runtime, serving=_SERVING)


@contextmanager
def booted(bundle: Bundle, root: Path, workdir: Path, *, drain_seconds: float = DRAIN_SECONDS) -> Iterator[Booted]:
    """Yield an engine when it has answered, and end it afterwards if it still runs."""
    launcher = ProcessLauncher()
    order = Order(bundle, root)
    launch = launcher.place(order, workdir, drain_seconds=drain_seconds, parent_pid=os.getpid())
    replica = Replica(bundle, launch, workdir=workdir, launcher=launcher)
    try:
        replica.start()
        ready = replica.wait_ready(BOOT_SECONDS)
        yield Booted(bundle.engine.name, bundle, root, replica, ready)
    finally:
        replica.stop(grace_seconds=DRAIN_SECONDS)
