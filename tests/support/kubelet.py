"""A node of the scripted cluster: what a pod's container is to run really runs, as a process of this machine.

It finds there what it would find in its pod: the volumes that are mounted, its variables, an address of its own. What
becomes of it is written into the pod's status as a kubelet does.
"""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from tests.support.scripted_kube import ScriptedKube

_VARIABLE = re.compile(r"\$(?:(\$)|\(([^)]*)\))")
_SINCE = "2026-11-30T04:00:00Z"
_ADDRESSES = (f"127.{80 + number // 250}.1.{1 + number % 250}" for number in count())


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return what Kubernetes makes of a text in a command or a variable.

    Source: the Kubernetes API reference for v1 Container, `command` and `env`.
    """
    return _VARIABLE.sub(lambda found: "$" if found[1] else variables.get(found[2], found[0]), text)


class Kubelet:
    """Runs the pods of one cluster.

    Args:
        kube: the cluster.
        folder: what pods have to themselves is kept here.
        claims: volume claim → folder of this machine.
        images: image → what words of a command line are on this machine.
    """

    def __init__(
        self, kube: ScriptedKube, folder: Path, *, claims: Mapping[str, Path], images: Mapping[str, Mapping[str, str]]
    ) -> None:
        self._kube, self._folder, self._claims, self._images = kube, folder, claims, dict(images)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._fates: dict[str, str] = {}
        self._threads: list[threading.Thread] = []
        kube.node = self

    def take(self, name: str) -> None:
        """Start a pod."""
        pod = self._kube.objects["pods", name]
        (container,) = pod["spec"]["containers"]
        words = self._images.get(container["image"])
        if words is None:
            message = f'failed to pull and unpack image "{container["image"]}": not found'
            waiting = {"reason": "ErrImagePull", "message": message}
            status = {"name": container["name"], "state": {"waiting": waiting}, "ready": False, "restartCount": 0}
            self._kube.become(name, phase="Pending", containerStatuses=[status])
            return
        own, address = self._folder / name, next(_ADDRESSES)
        (own / "tmp").mkdir(parents=True)
        outside = self._mounts(pod["spec"], container, own / "tmp")
        env: dict[str, str] = {}
        for one in container["env"]:
            env[one["name"]] = expanded(one["value"], env)

        def seen_outside(word: str) -> str:
            for inside, place in sorted(outside.items(), reverse=True):
                if word == inside or word.startswith(f"{inside}/"):
                    return place + word[len(inside) :]
            return address if word == "0.0.0.0" else words.get(word, word)

        with (own / "log").open("ab") as log:
            child = subprocess.Popen(
                [seen_outside(expanded(word, env)) for word in container["command"]],
                env={key: seen_outside(value) for key, value in env.items()} | {"PATH": os.environ["PATH"]},
                cwd=own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running[name] = child
        self._told(name, address, {"running": {"startedAt": _SINCE}})
        self._begin(lambda: self._wait(name, address, child))

    def _mounts(self, spec: dict[str, Any], container: dict[str, Any], tmp: Path) -> dict[str, str]:
        volumes = {one["name"]: one for one in spec["volumes"]}
        found = {}
        for mount in container["volumeMounts"]:
            claim = volumes[mount["name"]].get("persistentVolumeClaim")
            if claim is not None:
                found[mount["mountPath"]] = str(self._claims[claim["claimName"]] / mount["subPath"])
            elif mount["name"] == "tmp":
                found[mount["mountPath"]] = str(tmp)
        return found

    def _told(self, name: str, address: str, state: dict[str, Any]) -> None:
        code = state.get("terminated", {}).get("exitCode")
        phase = "Running" if code is None else "Failed" if code else "Succeeded"
        (container,) = self._kube.objects["pods", name]["spec"]["containers"]
        status = {"name": container["name"], "state": state, "ready": code is None, "restartCount": 0}
        self._kube.become(name, phase=phase, podIP=address, startTime=_SINCE, containerStatuses=[status])

    def _wait(self, name: str, address: str, child: "subprocess.Popen[bytes]") -> None:
        code = child.wait()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        fate = self._fates.get(name)
        if ("pods", name) not in self._kube.objects:
            return
        if fate == "evicted":
            message = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 60Mi."
            self._kube.become(name, phase="Failed", reason="Evicted", message=message)
            return
        reason = "OOMKilled" if fate == "out_of_memory" else "Error" if code else "Completed"
        ended = {"exitCode": code if code >= 0 else 128 - code, "reason": reason, "startedAt": _SINCE}
        self._told(name, address, {"terminated": ended})

    def forget(self, image: str) -> None:
        """Let an image be nowhere."""
        del self._images[image]

    def meet(self, name: str, fate: str) -> None:
        """End what runs in a pod at once: `killed`, `out_of_memory` or `evicted`; return when its status says so."""
        self._fates[name] = fate
        self._running[name].kill()
        while self._kube.objects["pods", name]["status"]["phase"] == "Running":
            time.sleep(0.01)

    def release(self, name: str, grace_seconds: int) -> None:
        """End a pod and then remove it. Returns at once."""
        self._begin(lambda: self._release(name, grace_seconds))

    def _release(self, name: str, grace_seconds: int) -> None:
        child = self._running.get(name)
        if child is not None:
            child.terminate() if grace_seconds else child.kill()
            try:
                child.wait(grace_seconds or None)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._kube.remove(name)

    def log(self, name: str) -> str:
        """Return what a pod wrote."""
        path = self._folder / name / "log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _begin(self, what: Any) -> None:
        self._threads.append(threading.Thread(target=what, daemon=True))
        self._threads[-1].start()

    def end(self) -> None:
        """End whatever still runs."""
        for child in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        for thread in self._threads:
            thread.join()
