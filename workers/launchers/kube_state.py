"""What a pod's status says about the engine in it, and which of it is the end.

Of other containers, such as one that a mesh puts into each pod, only what keeps the pod from starting counts: one that
ends has ended nothing of the engine.

Source: the Kubernetes API reference for PodStatus, ContainerStateWaiting and the reasons that the kubelet writes, also
where it does not admit what was scheduled (`pkg/kubelet/lifecycle/predicate.go`).
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from workers.launchers.base import Condition, ProcessState
from workers.launchers.kube_objects import CONTAINER

UNSCHEDULABLE_SECONDS = 300.0
"""How long a pod may wait for a node: an autoscaler needs minutes for a new one."""
_IMAGE = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable",
     "ImageInspectError", "SignatureValidationFailed"}
)  # fmt: skip
_NOT_STARTED = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError", "CrashLoopBackOff"}
)
_EVICTED = frozenset({"Evicted", "Preempting", "NodeAffinity", "NodeShutdown", "Terminated", "Shutdown"})
_NOT_ADMITTED = frozenset({"UnexpectedAdmissionError", "TopologyAffinityError", "InvalidNodeInfo"})
"""What a node says that was given a pod and has not got what it takes, beside "OutOf" and the name of a resource."""
_SIGNALLED = 128


def read(pod: Mapping[str, Any], now: datetime | None = None) -> ProcessState:
    """Tell whether the engine of a pod runs, or what ended it or will keep it from ever running."""
    status = pod.get("status") or {}
    phase, reason, message = status.get("phase"), status.get("reason"), status.get("message")
    if reason in _EVICTED or (phase == "Failed" and _disrupted(status)):
        told = _disrupted(status) or f"{reason}: {message}"
        return ProcessState(Condition.EXITED, None, told[:500], "evicted")
    if phase == "Failed" and (reason in _NOT_ADMITTED or str(reason).startswith("OutOf")):
        return ProcessState(Condition.EXITED, None, f"{reason}: {message}"[:500], "unschedulable")
    for container in _engine(status):
        ended = (container.get("state") or {}).get("terminated") or (container.get("lastState") or {}).get("terminated")
        if ended:
            return _terminated(ended)
    for container in (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _IMAGE:
            return ProcessState(Condition.EXITED, None, _told(waiting), "image_unavailable")
        if waiting.get("reason") in _NOT_STARTED:
            return ProcessState(Condition.EXITED, None, _told(waiting), "not_started")
    if phase == "Pending":
        return _pending(pod, status, now or datetime.now(UTC))
    if phase == "Running":
        return ProcessState(Condition.RUNNING)
    if phase in {"Failed", "Succeeded"}:
        return ProcessState(Condition.EXITED, None, f"{reason}: {message}"[:500] if reason else None)
    return ProcessState(Condition.UNKNOWN, reason=f"the phase of its pod is {phase or 'not told'}")


def read_group(pods: list[dict[str, Any]], size: int, seen: dict[str, str]) -> ProcessState:
    """Tell the same of a replica that spans several pods: one of them lost is the whole replica lost.

    Args:
        pods: its pods now.
        size: how many it takes.
        seen: pod name → uid of those that were seen so far; those of this look are added.
    """
    now = {pod["metadata"]["name"]: pod for pod in pods}
    for pod_name, uid in seen.items():
        if pod_name not in now or now[pod_name]["metadata"]["uid"] != uid:
            return ProcessState(Condition.EXITED, None, f"its pod {pod_name} is gone", "rank_lost")
    seen.update({pod_name: pod["metadata"]["uid"] for pod_name, pod in now.items()})
    states = {pod_name: read(pod) for pod_name, pod in sorted(now.items())}
    for pod_name, state in states.items():
        if state.condition is not Condition.RUNNING:
            cause = state.cause or ("rank_lost" if state.condition is Condition.EXITED else None)
            return ProcessState(state.condition, state.code, f"its pod {pod_name}: {state.reason or state}", cause)
    waits = next((f"its pod {pod_name}: {state.reason}" for pod_name, state in states.items() if state.reason), None)
    if len(now) < size:
        waits = f"{len(now)} of {size} pods are there"
    return ProcessState(Condition.RUNNING, reason=waits)


def is_running(pod: Mapping[str, Any]) -> bool:
    """Tell whether the engine's container has been started."""
    return any("running" in (one.get("state") or {}) for one in _engine(pod.get("status") or {}))


def _engine(status: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (one for one in status.get("containerStatuses") or [] if one.get("name", CONTAINER) == CONTAINER)


def _terminated(ended: Mapping[str, Any]) -> ProcessState:
    told = ended.get("exitCode")
    code = told if isinstance(told, int) and not isinstance(told, bool) else None
    if code is not None and _SIGNALLED < code < _SIGNALLED + 65:
        code = _SIGNALLED - code
    if ended.get("reason") == "OOMKilled":
        return ProcessState(Condition.EXITED, code, "out of its memory limit", "out_of_memory")
    if ended.get("reason") in _NOT_STARTED or ended.get("reason") == "ContainerCannotRun":
        return ProcessState(Condition.EXITED, code, _told(ended), "not_started")
    return ProcessState(Condition.EXITED, code, str(ended.get("message") or "")[:500] or None)


def _disrupted(status: Mapping[str, Any]) -> str | None:
    """Return why the cluster took the pod away, where it was the cluster that did."""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return _told(condition)
    return None


def _pending(pod: Mapping[str, Any], status: Mapping[str, Any], now: datetime) -> ProcessState:
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            waited = (now - _created(pod, now)).total_seconds()
            if condition.get("reason") != "Unschedulable" or waited < UNSCHEDULABLE_SECONDS:
                return ProcessState(Condition.RUNNING, reason=_told(condition))
            return ProcessState(Condition.EXITED, None, _told(condition), "unschedulable")
    return ProcessState(Condition.RUNNING, reason="its pod is pending")


def _created(pod: Mapping[str, Any], now: datetime) -> datetime:
    try:
        return datetime.fromisoformat(str((pod.get("metadata") or {}).get("creationTimestamp")))
    except ValueError:
        return now


def _told(thing: Mapping[str, Any]) -> str:
    return f"{thing.get('reason') or 'no reason'}: {thing.get('message') or 'without a word'}"[:500]
