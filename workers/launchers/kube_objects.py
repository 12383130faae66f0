"""The objects that a cluster is given, as data: a Pod for a replica on one node, a LeaderWorkerSet for one on several.

Sources: the Kubernetes API reference for v1 Pod; labels of NVIDIA's GPU feature discovery (`nvidia.com/gpu.product`,
dashes for spaces, `nvidia.com/gpu.memory` in MiB), its device plugin's resources; leaderworkerset.x-k8s.io/v1.
"""

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

from gates.dialects.table import dialect_of
from gates.fitting import SHARE_OF_MEMORY, Needs, products
from schemas.bundle import Bundle
from schemas.runner import Fingerprint
from workers.engines.base import Command
from workers.engines.nodes import spanning
from workers.launchers import base
from workers.launchers.base import NO_ACCELERATOR, LaunchFailed, Limits, Order

ROOT = "/bundle"
PORT = 8000
CONTAINER = "engine"
GROUP = "sluicegate.dev"
USER = 65534
"""Nobody: the staged files are readable for all, and nothing else is there to be read."""
STARTUP_SECONDS = 3600
"""Weights are read and kernels compiled before anything answers; the runner's own deadline is what decides."""
GRACE_SECONDS = 60
"""What a pod gets to end in of which nobody said how long its streams may take."""
MEBIBYTE = 2**20
GIBIBYTE = 2**30
SHARED_BYTES = 2 * GIBIBYTE
"""Of shared memory for each accelerator's rank, which a pod's memory is charged with."""
RANK_BYTES = 4 * GIBIBYTE
"""Of a node's memory for each rank beside that: interpreter, driver's context and pinned buffers. It is an estimate,
which the setting of an engine's memory replaces."""
_MOST_FOLDER = 36
_PRODUCT = "nvidia.com/gpu.product"
_LABEL = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True)
class Pods:
    """How this runner's pods are made.

    `mark` lies in the data folder and is known to nobody else. `claim` is the PersistentVolumeClaim that holds the
    runner's data folder, readable from every node. `owner` is the object with which everything goes that is made for
    gates; `pull_secret` and `account` are names in the namespace. `port` is the one that engines listen on, each at an
    address of its own, and `root` is where they find the bundle's files. `is_closed` says that a NetworkPolicy lets
    nothing out. `resolvers` are addresses that answer DNS beside the cluster's own pods, for replicas whose pods look
    each other up; `callers` may reach the engines, each pods as NAMESPACE/LABEL=VALUE or a network, and without any
    nobody may, unless `is_for_anybody`. `hardware` is that of one node, as the runner says that it has it.
    `grace_seconds` is what a pod gets to end in when somebody else ends it, such as whoever empties its node.
    """

    runner: str
    data: str
    claim: str
    mark: str = ""
    limits: Limits = field(default_factory=Limits)
    owner: dict[str, Any] | None = None
    pull_secret: str | None = None
    account: str | None = None
    port: int = PORT
    root: str = ROOT
    is_closed: bool = True
    resolvers: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()
    is_for_anybody: bool = False
    grace_seconds: int = GRACE_SECONDS
    hardware: Fingerprint | None = None


BASES = {"pods": "/api/v1", "leaderworkersets": "/apis/leaderworkerset.x-k8s.io/v1"}
"""Collection of what runs a replica → where the API has it."""


def path_of(namespace: str, collection: str) -> str:
    """Return the path of a collection in a namespace."""
    return f"{BASES[collection]}/namespaces/{namespace}/{collection}"


def label(text: str) -> str:
    """Return a text as a label's value: at most 63 characters of few kinds; what is changed gets a digest."""
    plain = _LABEL.sub("-", text)
    if plain == text and len(text) <= 63 and text[:1].isalnum() and text[-1:].isalnum():
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{plain.strip('-_.')[:48]}-{digest}".lstrip("-")


def name(order: Order, folder: str) -> str:
    """Return the object's name, which one job has under one token only: a second one of it is refused.

    A group's pods have a label out of the name of their set, its number and a digest: of 63 characters at most.
    """
    plain = label(folder).lower().replace("_", "-").replace(".", "-")
    if len(plain) > _MOST_FOLDER:
        plain = f"{plain[: _MOST_FOLDER - 9]}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"
    return f"sg-{plain}-{order.fencing_token}"


def marks(pods: Pods, order: Order, folder: str) -> dict[str, str]:
    """Return the labels by which an object is provably ours, and whose it is."""
    return {
        "app.kubernetes.io/managed-by": "sluicegate",
        **owner_marks(pods),
        **({f"{GROUP}/mark": pods.mark} if pods.mark else {}),
        f"{GROUP}/folder": label(folder),
        f"{GROUP}/job": label(order.job or "none"),
        f"{GROUP}/token": str(order.fencing_token),
    }


def owner_marks(pods: Pods) -> dict[str, str]:
    """Return the labels that everything of this runner has, and of no other one."""
    return {f"{GROUP}/runner": label(pods.runner), f"{GROUP}/data": label(pods.data)}


def is_ours(pods: Pods, found: dict[str, Any], *, is_certain: bool = False) -> bool:
    """Tell whether an object is this runner's; one made before there were marks is not certain to be."""
    labels = (found.get("metadata") or {}).get("labels") or {}
    marked = labels.get(f"{GROUP}/mark", "")
    return owner_marks(pods).items() <= labels.items() and (marked == pods.mark or not (marked or is_certain))


def build(pods: Pods, command: Command, order: Order, folder: str, *, is_live: bool) -> tuple[str, dict[str, Any]]:
    """Return the collection, such as `pods`, and the object to create in it for one replica.

    Args:
        pods: how this runner makes them.
        command: what the driver wants run inside.
        order: the replica; its bundle names an image by digest.
        folder: the name of the replica's folder, which only marks it.
        is_live: it outlives its runner; else it goes with the runner's own pod.

    Raises:
        LaunchFailed: the bundle names no image, or asks for what no cluster can be asked for.
    """
    nodes = order.bundle.topology.nodes
    metadata: dict[str, Any] = {
        "name": name(order, folder),
        "labels": marks(pods, order, folder),
        "annotations": {f"{GROUP}/bundle": order.bundle.digest, f"{GROUP}/files": str(order.files)},
    }
    if pods.owner is not None and not is_live:
        metadata["ownerReferences"] = [pods.owner]
    if nodes == 1:
        spec = {**_pod_spec(pods, _words(command), command, order), "restartPolicy": "Never"}
        return "pods", {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    return "leaderworkersets", _group(pods, command, order, metadata)


def _group(pods: Pods, command: Command, order: Order, metadata: dict[str, Any]) -> dict[str, Any]:
    nodes, engine = order.bundle.topology.nodes, order.bundle.engine.name
    row = spanning(engine)
    if row is None:
        raise LaunchFailed(f"{engine} is not spread over {nodes} nodes by this launcher")
    words = _words(command)
    try:
        leader, worker = row.first(words, nodes), row.other(words, nodes)
    except ValueError as error:
        raise LaunchFailed(f"{engine} is not started so that it spans {nodes} nodes: {error}") from error
    template = {"metadata": {"labels": metadata["labels"]}}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": nodes,
                # What restarts is another replica: this one is taken out when it is seen, and ended.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {**template, "spec": _pod_spec(pods, leader, command, order)},
                "workerTemplate": {**template, "spec": _pod_spec(pods, worker, command, order, leads=False)},
            },
        },
    }


def literal(text: str) -> str:
    """Return a text that Kubernetes reads as this very text: `$(NAME)` is a variable's value to it, and `$$` a dollar.

    Source: the Kubernetes API reference for v1 Container, `command` and `env`.
    """
    return text.replace("$", "$$")


def _words(command: Command) -> list[str]:
    return [literal(word) for word in command.argv]


def _pod_spec(pods: Pods, argv: list[str], command: Command, order: Order, *, leads: bool = True) -> dict[str, Any]:
    needs = Needs.of(order.bundle)
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": pods.grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(pods, argv, command, order, leads=leads)],
        "volumes": [
            {"name": "bundle", "persistentVolumeClaim": {"claimName": pods.claim, "readOnly": True}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{_shared_bytes(needs) // GIBIBYTE}Gi"}},
        ],
        **_where(pods, needs),
    }
    if pods.pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": pods.pull_secret}]
    if pods.account is not None:
        spec["serviceAccountName"] = pods.account
    return spec


def _container(pods: Pods, argv: list[str], command: Command, order: Order, *, leads: bool) -> dict[str, Any]:
    image = order.bundle.engine.image
    if image is None:
        raise LaunchFailed("the bundle names an environment of a machine, and a cluster runs images")
    own = {"HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "USER": base.USER}  # noqa: S108 - a volume of its own
    variables = {**command.variables, **base.CACHES, **own}
    if Needs.of(order.bundle).count == 0:
        # Where NVIDIA's runtime is a node's default, an image that asks for all accelerators would get them.
        variables["NVIDIA_VISIBLE_DEVICES"] = NO_ACCELERATOR
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": argv,
        "env": [{"name": key, "value": literal(value)} for key, value in sorted(variables.items())],
        "resources": _resources(pods, order),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            {"name": "bundle", "mountPath": pods.root, "subPath": _below(pods, order), "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - as above
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - where ranks exchange tensors
        ],
    }
    if leads:
        container |= {"ports": [{"containerPort": pods.port, "name": "http"}], **_probes(order.bundle)}
    return container


def _probes(bundle: Bundle) -> dict[str, Any]:
    """Return probes that ask the health route only: a generation in a probe that often would be load, or an outage."""
    asked = {"httpGet": {"path": dialect_of(bundle.engine).health_path, "port": "http"}, "timeoutSeconds": 5}
    return {
        "startupProbe": {**asked, "periodSeconds": 10, "failureThreshold": STARTUP_SECONDS // 10},
        "readinessProbe": {**asked, "periodSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {**asked, "periodSeconds": 10, "failureThreshold": 6},
    }


def _resources(pods: Pods, order: Order) -> dict[str, dict[str, str]]:
    needs, limits = Needs.of(order.bundle), {}
    if needs.count > 0:
        kind = f"nvidia.com/mig-{needs.mig}" if needs.mig is not None else "nvidia.com/gpu"
        limits[kind] = str(_devices(needs))
    # A pod that asks for no memory is the first that a node without any ends, and one that is given more than there is
    # goes to a node that has not got it.
    asked = _memory_bytes(pods, needs, order.planned_bytes)
    if pods.limits.memory_bytes is not None:
        limits["memory"] = str(pods.limits.memory_bytes)
        asked = pods.limits.memory_bytes if needs.count > 0 else min(pods.limits.memory_bytes, asked)
    return {**({"limits": limits} if limits else {}), "requests": {"memory": str(asked)}}


def _devices(needs: Needs) -> int:
    """Return how many accelerators one pod takes: each node has an equal share of the replica's."""
    return -(-needs.count // needs.nodes)


def _shared_bytes(needs: Needs) -> int:
    return max(GIBIBYTE, SHARED_BYTES * needs.count)


def _memory_bytes(pods: Pods, needs: Needs, planned_bytes: int) -> int:
    """Return the bytes of a node's memory that one pod asks for.

    On a processor the weights lie there, and by a plan the cache beside them. With accelerators they come through it,
    and some engines leave a part there; no more than the accelerators' share of a node is asked for, so that all of
    them can be in use at once.
    """
    if needs.count == 0:
        return max(needs.memory_bytes or 0, needs.machine_bytes, planned_bytes)
    devices = _devices(needs)
    found = -(-needs.held_bytes // needs.nodes) + devices * (SHARED_BYTES + RANK_BYTES)
    if pods.hardware is None or not pods.hardware.accelerators:
        return found
    share = min(1.0, devices / len(pods.hardware.accelerators))
    return min(found, int(pods.hardware.memory_bytes * SHARE_OF_MEMORY * share))


def _where(pods: Pods, needs: Needs) -> dict[str, Any]:
    """Return which nodes may be taken: those whose product fits the bundle's hardware row, by the runner's own word.

    A row may say part of a name, or an architecture, which no node has as its label.
    """
    if needs.count == 0:
        return {}
    names = [] if pods.hardware is None else products(needs, pods.hardware)
    labels = [one.strip().replace(" ", "-") for one in names or [needs.accelerator]]
    asked: list[dict[str, Any]] = []
    found: dict[str, Any] = {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]}
    if len(labels) == 1:
        found["nodeSelector"] = {_PRODUCT: labels[0]}
    else:
        asked.append({"key": _PRODUCT, "operator": "In", "values": labels})
    if needs.memory_bytes is not None:
        # "Gt" is all that there is for numbers, and the label counts whole MiB.
        least = str(-(-needs.memory_bytes // MEBIBYTE) - 1)
        asked.append({"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": [least]})
    if asked:
        terms = [{"matchExpressions": asked}]
        found["affinity"] = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        }
    return found


def _below(pods: Pods, order: Order) -> str:
    """Return where the files are on the volume. Raises LaunchFailed when they are not on it."""
    try:
        return order.files.relative_to(pods.data).as_posix()
    except ValueError:
        raise LaunchFailed(
            f"{order.files} is not in the data folder {pods.data}, which is what pods can read"
        ) from None
