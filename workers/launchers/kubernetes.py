"""Runs engines as pods of a cluster: a Pod for a replica on one node, a LeaderWorkerSet for one that spans several.

What runs is asked for, not watched: a watch that broke in silence would go on saying that an engine is well.
"""

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from schemas.runner import LauncherName
from workers.engines.base import Command, Launch
from workers.launchers import kube_made, kube_state
from workers.launchers.base import Condition, Launched, LaunchFailed, Order, ProcessState
from workers.launchers.kube_client import ClusterBusy, ClusterRefused, ClusterUnreachable, KubeClient
from workers.launchers.kube_network import Policies, policy
from workers.launchers.kube_objects import (
    BASES,
    CONTAINER,
    GROUP,
    Pods,
    build,
    is_ours,
    label,
    owner_marks,
    path_of,
)
from workers.launchers.logs import tail
from workers.launchers.made import Made
from workers.launchers.process import refused_variables
from workers.launchers.unanswered import Known, Unanswered

POLL_SECONDS = 0.2
GONE_SECONDS = 60.0
"""How long the cluster may take to end what was killed."""
KILL_SECONDS = 1
"""Least that a pod gets to end in. With 0 the cluster forgets it at once and does not wait for its node, so that the
engine may run on, with the accelerators, beside the next one. Source: the Kubernetes documentation on force deletion.
"""
_MARGIN_SECONDS = 5
"""What a pod gets beyond the time in which its streams may end."""
_TRIES = 3
KEPT_LINES = 5000


@dataclass(frozen=True)
class _Handle:
    """One object as its handle names it: `pods/NAMESPACE/NAME/UID/SIZE`."""

    collection: str
    namespace: str
    name: str
    uid: str
    size: int

    def __str__(self) -> str:
        return f"{self.collection}/{self.namespace}/{self.name}/{self.uid}/{self.size}"

    @classmethod
    def read(cls, text: str | None) -> "_Handle | None":
        parts = (text or "").split("/")
        if len(parts) != 5 or parts[0] not in BASES or not all(parts) or not parts[4].isdigit():
            return None
        return cls(parts[0], parts[1], parts[2], parts[3], int(parts[4]))

    @property
    def path(self) -> str:
        return f"{path_of(self.namespace, self.collection)}/{self.name}"

    @property
    def pod_path(self) -> str:
        """The pod that answers: the only one, or the first of the group's."""
        own = self.name if self.collection == "pods" else f"{self.name}-0"
        return f"{path_of(self.namespace, 'pods')}/{own}"


def own_pod(client: KubeClient, pod: str) -> dict[str, Any]:
    """Return the pod that a runner is. Raises LaunchFailed when there is none of its name, or the cluster says not."""
    try:
        found = client.get(f"{path_of(client.namespace, 'pods')}/{pod}")
    except (ClusterRefused, ClusterUnreachable) as error:
        raise LaunchFailed(f"the cluster does not say who this runner is: {error}") from error
    if found is None:
        raise LaunchFailed(f"the cluster has no pod {pod} in {client.namespace}, which this runner is said to be")
    return found


def owner_of(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reference by which what is made for gates goes with the runner's own pod."""
    name, uid = (str(pod["metadata"][key]) for key in ("name", "uid"))
    return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid, "blockOwnerDeletion": False}


class KubernetesLauncher:
    """Starts, watches and stops replicas in one namespace. Safe to call from several threads for different ones."""

    name: LauncherName = "kubernetes"
    runs_images = True

    def __init__(self, client: KubeClient, pods: Pods) -> None:
        """Use a cluster, and make pods in this way."""
        self._client = client
        self.pods = pods
        self._members: dict[str, dict[str, str]] = {}
        self._ended: dict[str, ProcessState] = {}
        self._logs: dict[str, Path] = {}
        self._asked: dict[str, dict[str, Any]] = {}
        self._live: set[Path] = set()
        self._drains: dict[Path, float] = {}
        self._policies = Policies(client, pods)
        self._unanswered = Unanswered()
        self._known = Known()
        self._lock = threading.Lock()

    def place(self, order: Order, workdir: Path, *, drain_seconds: float, parent_pid: int | None) -> Launch:
        """Return where the engine will find itself: in a pod. One that need not end with this process is live."""
        del order
        with self._lock:
            (self._live.discard if parent_pid is not None else self._live.add)(workdir)
            self._drains[workdir] = drain_seconds
        return Launch(
            root=Path(self.pods.root),
            port_file=Path("/tmp/port.json"),  # noqa: S108 - inside
            host="0.0.0.0",  # noqa: S104 - inside
            port=self.pods.port,
            drain_seconds=drain_seconds,
        )

    def leave(self, workdir: Path) -> None:
        """Forget whether a replica outlives this process: its object says so since it was made."""
        with self._lock:
            self._live.discard(workdir)
            self._drains.pop(workdir, None)

    def start(self, command: Command, *, workdir: Path, log_path: Path, order: Order) -> Launched:
        """Create a replica's object and return at once. One that an earlier, unanswered try made is taken for it.

        Raises:
            LaunchFailed: the cluster refused it and said why, has another one under this job and token, or did not
                answer; or the bundle cannot be run in a pod.
        """
        if refused := refused_variables(command.variables):
            raise LaunchFailed(f"no engine is given the variables {', '.join(refused)}")
        with self._lock:
            is_live, drain_seconds = workdir in self._live, self._drains.pop(workdir, None)
        pods = self.pods
        if drain_seconds is not None:
            # Also when its node is emptied; and a group's pods get no other grace from the group.
            pods = replace(pods, grace_seconds=math.ceil(drain_seconds) + _MARGIN_SECONDS)
        collection, body = build(pods, command, order, workdir.name, is_live=is_live)
        name = body["metadata"]["name"]
        with self._known.ordering(name):
            try:
                self._close(body)
                made = self._create(collection, body)
            except (ClusterRefused, ClusterUnreachable) as error:
                raise LaunchFailed(f"the cluster did not take {collection} {name}: {error}") from error
            if self.pods.is_closed:
                self._policies.tie(name, {"apiVersion": body["apiVersion"], "kind": body["kind"], **made})
            launched = self._launched(collection, made)
            self._known.add(str(launched.handle), label(workdir.name))
        with self._lock:
            self._logs[str(launched.handle)] = log_path
            self._asked[str(launched.handle)] = body
        return launched

    def _close(self, body: dict[str, Any]) -> None:
        """Let nothing out of a replica before there is one. Raises LaunchFailed when it cannot be closed."""
        if not self.pods.is_closed:
            return
        name = body["metadata"]["name"]
        self._unanswered.settle(self._policies.path(name))
        try:
            self._policies.make(policy(self.pods, body))
        except (ClusterRefused, ClusterUnreachable) as error:
            if isinstance(error, ClusterUnreachable):
                self._unanswered.add(self._policies.path(name))
            raise LaunchFailed(
                f"the cluster did not take a network policy for {name}, so it would not be closed; where it has none, "
                f"set SLUICEGATE_RUNNER__KUBERNETES_NETWORK=open: {error}"
            ) from error

    def _create(self, collection: str, body: dict[str, Any]) -> dict[str, Any]:
        path = path_of(self._client.namespace, collection)
        own = f"{path}/{body['metadata']['name']}"
        self._unanswered.settle(own)
        lost: ClusterUnreachable | None = None
        last = ClusterUnreachable("it was not asked")
        try:
            for _ in range(_TRIES):
                try:
                    return self._client.create(path, body)
                except ClusterUnreachable as error:
                    last = error
                    if not isinstance(error, ClusterBusy):
                        lost = error
                    time.sleep(POLL_SECONDS)
                except ClusterRefused as refused:
                    # Ours only when we have just asked for it: else it runs for another boot of the same job.
                    if lost is None or refused.reason != "AlreadyExists":
                        raise
                    found = self._client.get(own)
                    if found is None or _is_ending(found) or _labels(found) != body["metadata"]["labels"]:
                        raise
                    return found
            raise last
        except (ClusterRefused, ClusterUnreachable):
            if lost is not None:
                # Whatever was said later, such as that nothing more is allowed: the order before may be the reason.
                self._unanswered.add(own)
            self._open(body["metadata"]["name"])
            raise

    def _open(self, name: str) -> None:
        """Remove what closed a replica that is not there; what cannot be removed now is when it is seen."""
        if not self.pods.is_closed:
            return
        try:
            self._policies.remove(name)
        except (ClusterRefused, ClusterUnreachable):
            self._unanswered.add(self._policies.path(name))

    def adopt(self, pid: int, start_time_ticks: str, boot: str, handle: str | None = None) -> Launched | None:
        """Return the identity of a replica created earlier, or None when it is not provably that object of ours.

        Raises ClusterUnreachable.
        """
        place = _Handle.read(handle)
        if place is None or pid != 0 or place.uid != start_time_ticks or boot != place.namespace:
            return None
        try:
            found = self._client.get(place.path)
        except ClusterRefused as refused:
            raise ClusterUnreachable(str(refused)) from refused
        if found is None or found["metadata"].get("uid") != place.uid or not self._is_ours(found):
            return None
        if found["metadata"].get("deletionTimestamp"):
            return None
        self._known.add(str(place), _folder(found))
        return Launched(pid=0, start_time=place.uid, boot_id=place.namespace, handle=handle)

    def listening(self, launched: Launched, _port_file: Path | None) -> Launched:
        """Return the identity with the pod's address once the engine's container has been started."""
        place = _Handle.read(launched.handle)
        if place is None or launched.port is not None:
            return launched
        try:
            pod = self._client.get(place.pod_path)
        except (ClusterRefused, ClusterUnreachable):
            return launched
        if pod is None or not self._is_ours(pod) or not kube_state.is_running(pod):
            return launched
        address = (pod.get("status") or {}).get("podIP")
        return (
            replace(launched, port=self.pods.port, host=address) if isinstance(address, str) and address else launched
        )

    def state(self, launched: Launched) -> ProcessState:
        """Tell whether a replica runs; unknown, with the reason, while the cluster does not say."""
        place = _Handle.read(launched.handle)
        if place is None:
            return ProcessState(Condition.UNKNOWN, reason="it is nothing of a cluster")
        with self._lock:
            ended = self._ended.get(str(place))
        return ended or self._look(place)

    def logs(self, launched: Launched | None, log_path: Path, lines: int) -> list[str]:
        """Return the last lines that the pod that answers wrote; of one that is gone, those that were kept."""
        place = None if launched is None else _Handle.read(launched.handle)
        if place is None:
            return tail(log_path, lines)
        try:
            return self._client.logs(place.pod_path, container=CONTAINER, lines=lines) or tail(log_path, lines)
        except ClusterUnreachable:
            return tail(log_path, lines)

    def made(self, launched: Launched, command: Command, workdir: Path, order: Order) -> Made | None:
        """Return what the cluster says that it runs, held against what it was asked for."""
        place = _Handle.read(launched.handle)
        if place is None:
            return None
        with self._lock:
            asked = self._asked.get(str(place))
        try:
            body = asked or build(self.pods, command, order, workdir.name, is_live=True)[1]
            found = self._client.get(place.path)
            pods = [] if found is None or place.collection == "pods" else self._members_of(place.namespace, found)
        except (ClusterRefused, ClusterUnreachable, LaunchFailed):
            return None
        if found is None or found["metadata"].get("uid") != place.uid:
            return None
        pairs, statuses = kube_made.pairs(body, found, pods)
        return kube_made.read(pairs, statuses, is_whole=asked is not None)

    def keep(self, launched: Launched, log_path: Path) -> None:
        """Bring what the pod that answers wrote so far into a file."""
        place = _Handle.read(launched.handle)
        try:
            if place is not None:
                self._write_logs(place, log_path)
        except ClusterUnreachable:
            return

    def stop(self, launched: Launched, *, grace_seconds: float) -> ProcessState:
        """Delete a replica if it is still that object, with so long to drain, and wait until it is gone."""
        place = _Handle.read(launched.handle)
        if place is None:
            return ProcessState(Condition.UNKNOWN, reason="it is nothing of a cluster")
        with self._lock:
            ended = self._ended.get(str(place))
        if ended is not None:
            return ended
        last = self._look(place)
        try:
            self._keep_logs(place)
            self._delete(place.path, place.uid, max(KILL_SECONDS, round(grace_seconds)))
            deadline = time.monotonic() + grace_seconds + GONE_SECONDS
            while not self._is_gone(place):
                if time.monotonic() >= deadline:
                    return ProcessState(Condition.UNKNOWN, reason="the cluster has not ended it yet")
                time.sleep(POLL_SECONDS)
        except (ClusterRefused, ClusterUnreachable) as error:
            return ProcessState(Condition.UNKNOWN, reason=str(error))
        self._open(place.name)
        state = last if last.condition is Condition.EXITED else ProcessState(Condition.EXITED)
        with self._lock:
            self._ended[str(place)] = state
            self._asked.pop(str(place), None)
        return state

    def kill(self, launched: Launched) -> ProcessState:
        """Delete a replica with the least grace by which its node still says that it has ended it."""
        return self.stop(launched, grace_seconds=0.0)

    def crash(self, launched: Launched) -> ProcessState:
        """Delete a replica like that: nothing in a pod can be killed from outside in another way."""
        return self.kill(launched)

    def strays(self, workdir: Path) -> list[Launched]:
        """Find the objects of a replica's folder, by the labels that only this runner gives them."""
        labels = {**owner_marks(self.pods), f"{GROUP}/folder": label(workdir.name)}
        return [self._launched(collection, one) for collection, one in self._found(labels)]

    def left(self, kept: Collection[str]) -> list[Launched]:
        """Find this runner's objects of other folders than these, by their labels. Raises ClusterUnreachable."""
        labels = {label(name) for name in kept}
        found = self._listed(owner_marks(self.pods))
        return [self._launched(collection, one) for collection, one in found if _folder(one) not in labels]

    def sweep(self, is_wanted: Callable[[str], bool]) -> list[str]:
        """Delete this runner's objects that are nobody's, with policies that close nothing, and return their names."""
        # Asked for before what they close: one that is made meanwhile is not among them.
        policies = self._named_policies()
        ended = []
        try:
            for collection, one in self._listed(owner_marks(self.pods)):
                name, place = one["metadata"]["name"], self._launched(collection, one)
                if is_ours(self.pods, one, is_certain=True) and self._known.is_nobody_s(
                    str(place.handle), name, _folder(one), is_wanted
                ):
                    path = f"{path_of(self._client.namespace, collection)}/{name}"
                    self._delete(path, one["metadata"]["uid"], KILL_SECONDS)
                    ended.append(name)
            for name in policies:
                if not self._known.is_ordered(name):
                    self._policies.remove(name)
        except (ClusterRefused, ClusterUnreachable):
            return ended
        return ended

    def _named_policies(self) -> list[str]:
        """Return the names of this runner's policies; none where the cluster does not say, or not to this runner."""
        try:
            return self._policies.names() if self.pods.is_closed else []
        except (ClusterRefused, ClusterUnreachable):
            return []

    def reap(self) -> None:
        """Delete what an unanswered order made after all; what ends in a pod, the cluster collects."""
        for path in self._unanswered.names():
            try:
                if path.startswith(self._policies.path()):
                    self._policies.remove(path.rpartition("/")[2])
                    self._unanswered.settle(path)
                    continue
                found = self._client.get(path)
                # Whoever orders the name anew settles it first, so one of his is not in there any more.
                if found is None or not self._is_ours(found) or path not in self._unanswered:
                    continue
                self._delete(path, found["metadata"]["uid"], KILL_SECONDS)
                self._unanswered.settle(path)
            except (ClusterRefused, ClusterUnreachable):
                continue

    # ------------------------------------------------------------------------------------------- plumbing

    def _found(self, labels: dict[str, str]) -> list[tuple[str, dict[str, Any]]]:
        """Return the objects that have these labels, each with its collection; none where the cluster does not say."""
        try:
            return self._listed(labels)
        except ClusterUnreachable:
            return []

    def _listed(self, labels: dict[str, str]) -> list[tuple[str, dict[str, Any]]]:
        """Return the same. Raises ClusterUnreachable."""
        found: list[tuple[str, dict[str, Any]]] = []
        for collection in BASES:
            try:
                items = self._client.listed(path_of(self._client.namespace, collection), labels)
            except ClusterRefused as refused:
                if collection != "pods":
                    continue  # a cluster without that kind of object, or one in which this runner may make none
                raise ClusterUnreachable(str(refused)) from refused
            # A group's pods have its labels, and end with it.
            found += [(collection, one) for one in items if not _is_member(one) and not _is_ending(one)]
        return [(collection, one) for collection, one in found if is_ours(self.pods, one)]

    def _look(self, place: _Handle) -> ProcessState:
        try:
            found = self._client.get(place.path)
            if found is None:
                return ProcessState(Condition.EXITED, reason="it was deleted")
            if found["metadata"].get("uid") != place.uid:
                return ProcessState(Condition.EXITED, reason="it was deleted, and another one has its name")
            return kube_state.read(found) if place.collection == "pods" else self._look_at_group(place, found)
        except (ClusterRefused, ClusterUnreachable) as error:
            return ProcessState(Condition.UNKNOWN, reason=str(error))

    def _members_of(self, namespace: str, found: dict[str, Any]) -> list[dict[str, Any]]:
        labels = {key: value for key, value in _labels(found).items() if key.startswith(GROUP)}
        return self._client.listed(path_of(namespace, "pods"), labels)

    def _look_at_group(self, place: _Handle, found: dict[str, Any]) -> ProcessState:
        pods = self._members_of(place.namespace, found)
        with self._lock:
            members = self._members.setdefault(str(place), {})
            return kube_state.read_group(pods, place.size, members)

    def _delete(self, path: str, uid: str, grace_seconds: int) -> None:
        """Delete an object of ours, and of a group each pod too, which would get its own grace from the group."""
        *_, namespace, collection, _ = path.split("/")
        found = self._client.get(path) if collection != "pods" else None
        is_it = found is not None and found["metadata"].get("uid") == uid
        members = self._members_of(namespace, found) if found is not None and is_it else []
        self._client.delete(path, uid=uid, grace_seconds=grace_seconds)
        # After the group, which would make them anew.
        for one in members:
            pod = f"{path_of(namespace, 'pods')}/{one['metadata']['name']}"
            self._client.delete(pod, uid=one["metadata"]["uid"], grace_seconds=grace_seconds)

    def _is_gone(self, place: _Handle) -> bool:
        found = self._client.get(place.path)
        return found is None or found["metadata"].get("uid") != place.uid

    def _keep_logs(self, place: _Handle) -> None:
        with self._lock:
            log_path = self._logs.pop(str(place), None)
        if log_path is not None and log_path.parent.is_dir():
            self._write_logs(place, log_path)

    def _write_logs(self, place: _Handle, log_path: Path) -> None:
        lines = self._client.logs(place.pod_path, container=CONTAINER, lines=KEPT_LINES)
        log_path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def _is_ours(self, found: dict[str, Any]) -> bool:
        return is_ours(self.pods, found)

    def _launched(self, collection: str, made: dict[str, Any]) -> Launched:
        metadata = made["metadata"]
        size = 1 if collection == "pods" else int(made["spec"]["leaderWorkerTemplate"]["size"])
        place = _Handle(collection, self._client.namespace, metadata["name"], metadata["uid"], size)
        return Launched(pid=0, start_time=place.uid, boot_id=place.namespace, handle=str(place))


def _labels(found: dict[str, Any]) -> dict[str, str]:
    return dict((found.get("metadata") or {}).get("labels") or {})


def _folder(found: dict[str, Any]) -> str:
    return _labels(found).get(f"{GROUP}/folder", "")


def _is_member(found: dict[str, Any]) -> bool:
    owners = (found.get("metadata") or {}).get("ownerReferences") or []
    return any(one.get("kind") in {"StatefulSet", "LeaderWorkerSet"} for one in owners if one.get("controller"))


def _is_ending(found: dict[str, Any]) -> bool:
    return bool(found["metadata"].get("deletionTimestamp"))
