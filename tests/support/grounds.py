"""Where engines of images run in tests: a container engine or a cluster whose answers are scripted and engines real."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from schemas.bundle import Bundle
from tests.support import chain
from tests.support.container_program import free_port
from tests.support.kubelet import Kubelet
from tests.support.scripted_containers import ScriptedContainers
from tests.support.scripted_kube import TOKEN, ScriptedKube
from workers.engines import llamacpp_server
from workers.launchers.base import Launched, Launcher
from workers.launchers.container import ContainerLauncher
from workers.launchers.container_command import Containers
from workers.launchers.kube_client import Cluster, KubeClient
from workers.launchers.kube_objects import Pods
from workers.launchers.kubernetes import KubernetesLauncher

IMAGE = "registry.example/engines/llamacpp@sha256:" + "a" * 64
STAGED = "staged/chain"
"""Where the bundle of a test is in the data folder; inside, it is at the same path, which an engine tells."""
# In the image, this distribution is installed; here it is where this file is.
_MODULE = (
    f"import runpy, sys; sys.path.insert(0, {str(Path(llamacpp_server.__file__).parents[2])!r});"
    f"runpy.run_module({llamacpp_server.__name__!r}, run_name='__main__', alter_sys=True)"
)
WORDS = {"python3": sys.executable, "-m": "-c", llamacpp_server.__name__: _MODULE}


class Ground(Protocol):
    """One kind of place, and what befalls engines there."""

    def launcher(self) -> Launcher:
        """Return a launcher, as each runner has its own."""

    def meet(self, launched: Launched, fate: str) -> None:
        """End an engine from outside: `killed`, `out_of_memory`, or `evicted`."""

    def lose_image(self) -> None:
        """Let the image be nowhere."""

    def lose_answer(self) -> None:
        """Let the next order be carried out, and its answer be lost."""

    def write(self, text: str) -> None:
        """Let engines of any image be started, and write this instead of running."""

    def left(self) -> list[str]:
        """Return the names of what is there."""

    def end(self) -> None:
        """End everything."""


@dataclass
class ContainerGround:
    """Containers of podman or docker."""

    engine: ScriptedContainers
    containers: Containers

    def launcher(self) -> Launcher:
        """Return a launcher, as each runner has its own."""
        return ContainerLauncher(str(self.engine.path), self.containers)

    def meet(self, launched: Launched, fate: str) -> None:
        """End an engine from outside."""
        if fate == "out_of_memory":
            self.engine.set(out_of_memory=[launched.handle])
        self.engine.kill(launched.handle or "")

    def lose_image(self) -> None:
        """Let the image be nowhere."""
        said = f"initializing source docker://{IMAGE}: reading manifest: manifest unknown"
        self.engine.set(images=[], pull_error=f"Error: {said}")

    def lose_answer(self) -> None:
        """Let the next order be carried out, and its answer be lost."""
        self.engine.set(dies="run")

    def write(self, text: str) -> None:
        """Let engines of any image be started, and write this instead of running."""
        self.engine.set(images=[], programs={}, log=text)

    def left(self) -> list[str]:
        """Return the names of what is there."""
        return [one["Name"] for one in self.engine.world()["containers"].values()]

    def end(self) -> None:
        """End everything."""
        self.engine.end()


@dataclass
class KubeGround:
    """Pods of a cluster."""

    kube: ScriptedKube
    node: Kubelet
    client: KubeClient
    pods: Pods

    def launcher(self) -> Launcher:
        """Return a launcher, as each runner has its own."""
        return KubernetesLauncher(self.client, self.pods)

    def meet(self, launched: Launched, fate: str) -> None:
        """End an engine from outside."""
        self.node.meet((launched.handle or "").split("/")[2], fate)

    def lose_image(self) -> None:
        """Let the image be nowhere."""
        self.node.forget(IMAGE)

    def lose_answer(self) -> None:
        """Let the next order be carried out, and its answer be lost, however often it is repeated."""
        self.kube.answers_lost = 3

    def write(self, text: str) -> None:
        """Let engines of any image be started, and write this instead of running."""
        self.kube.node, self.kube.log = None, text

    def left(self) -> list[str]:
        """Return the names of what is there."""
        return [name for _, name in self.kube.objects]

    def end(self) -> None:
        """End everything."""
        self.node.end()


def container_ground(folder: Path, data: Path, program: str, **changes: Any) -> ContainerGround:
    """Return containers whose runner has this data folder."""
    folder.mkdir(parents=True)
    engine = ScriptedContainers(folder, program)
    engine.set(images=[IMAGE], programs={IMAGE: WORDS})
    made = Containers(runner="r1", folder=data, user="1000:1000", root=data / STAGED, **changes)
    return ContainerGround(engine, made)


def kube_ground(kube: ScriptedKube, folder: Path, data: Path) -> KubeGround:
    """Return pods whose runner has this data folder as a volume."""
    node = Kubelet(kube, folder, claims={"engines": data}, images={IMAGE: WORDS})
    (data / "token").write_text(TOKEN, encoding="ascii")
    client = KubeClient(Cluster(kube.url, "engines", data / "token"))
    pods = Pods(runner="r1", data=str(data), claim="engines", port=free_port(), root=str(data / STAGED))
    return KubeGround(kube, node, client, pods)


def chain_in_image(root: Path, **faults: Any) -> Bundle:
    """Write CHAIN into a folder, and return its bundle that names an image."""
    extra, template = chain.endless(), chain.SELECTING_TEMPLATE
    chain.write_bundle_directory(root, extra=extra, template=template, **faults)
    plain = chain.describe(root, environment="sha256:" + "0" * 64)
    engine = plain.engine.model_dump(mode="json", exclude_none=True, exclude={"environment"})
    return chain.describe(root, environment="", engine={**engine, "image": IMAGE})
