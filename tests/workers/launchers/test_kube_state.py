"""What the status of a pod says of the engine in it, as the API reference has it."""

from datetime import UTC, datetime, timedelta

import pytest

from workers.launchers.base import Condition
from workers.launchers.kube_state import UNSCHEDULABLE_SECONDS, is_running, read

NOW = datetime(2026, 11, 30, 4, 0, tzinfo=UTC)


def waiting(reason, message):
    return {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": reason, "message": message}}}]}


def ended(**facts):
    return {"phase": "Failed", "containerStatuses": [{"state": {"terminated": facts}}]}


def beside(state):
    return {"name": "proxy", "state": state}


def unscheduled(reason="Unschedulable"):
    message = "0/5 nodes are available: 5 Insufficient nvidia.com/gpu."
    return {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}],
    }


@pytest.mark.parametrize(
    ("status", "words", "cause"),
    [
        ({"phase": "Pending"}, "running (its pod is pending)", None),
        ({"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}, "running", None),
        (waiting("ContainerCreating", ""), "running (its pod is pending)", None),
        *(
            (waiting(reason, "manifest unknown"), f"exited ({reason}: manifest unknown)", "image_unavailable")
            for reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
        ),
        (
            waiting("CreateContainerConfigError", 'secret "x" not found'),
            'exited (CreateContainerConfigError: secret "x" not found)',
            "not_started",
        ),
        (
            ended(reason="OOMKilled", exitCode=137),
            "ended by signal 9 (out of its memory limit)",
            "out_of_memory",
        ),
        (ended(reason="Error", exitCode=1, message="no kernel"), "exited with status 1 (no kernel)", None),
        (ended(reason="StartError", exitCode=128, message="no such file"), None, "not_started"),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
            "exited (Evicted: The node was low on resource: memory.)",
            "evicted",
        ),
        (
            {
                **ended(reason="Error", exitCode=143),
                "conditions": [
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "PreemptionByScheduler",
                        "message": "default-scheduler: preempting to accommodate a higher priority pod",
                    }
                ],
            },
            "exited (PreemptionByScheduler: default-scheduler: preempting to accommodate a higher priority pod)",
            "evicted",
        ),
        *(
            ({"phase": "Failed", "reason": reason, "message": "no"}, f"exited ({reason}: no)", "unschedulable")
            for reason in ("OutOfnvidia.com/gpu", "OutOfmemory", "UnexpectedAdmissionError", "TopologyAffinityError")
        ),
        # What a mesh put beside the engine ends nothing, but may keep all of it from starting.
        ({"phase": "Running", "containerStatuses": [beside({"terminated": {"exitCode": 0}})]}, "running", None),
        (
            {"phase": "Pending", "initContainerStatuses": [beside({"waiting": {"reason": "ErrImagePull"}})]},
            "exited (ErrImagePull: without a word)",
            "image_unavailable",
        ),
        ({"phase": "Succeeded"}, "exited", None),
        ({"phase": "Unknown"}, "unknown (the phase of its pod is Unknown)", None),
        ({}, "unknown (the phase of its pod is not told)", None),
    ],
)
def test_the_status_of_a_pod_is_read_and_its_end_has_a_cause(status, words, cause):
    state = read({"metadata": {"creationTimestamp": NOW.isoformat()}, "status": status}, NOW)
    assert words is None or str(state) == words
    assert state.cause == cause


def test_an_engine_runs_when_its_own_container_does_whatever_stands_beside_it():
    running = {"state": {"running": {}}}
    for name, is_so in (("engine", True), ("proxy", False)):
        status = {"containerStatuses": [{"name": name, **running}, {"name": "third", "state": {"waiting": {}}}]}
        assert is_running({"status": status}) is is_so


def test_a_pod_that_no_node_takes_is_waited_for_as_long_as_a_new_node_needs_and_then_named():
    pod = {"metadata": {"creationTimestamp": "2026-11-30T04:00:00Z"}, "status": unscheduled()}
    early, late = (read(pod, NOW + timedelta(seconds=UNSCHEDULABLE_SECONDS + more)) for more in (-1, 0))
    assert early.condition is Condition.RUNNING
    assert late.condition is Condition.EXITED
    assert early.reason == late.reason == "Unschedulable: 0/5 nodes are available: 5 Insufficient nvidia.com/gpu."
    assert (early.cause, late.cause) == (None, "unschedulable")
    gated = {**pod, "status": unscheduled("SchedulingGated")}
    assert read(gated, NOW + timedelta(days=1)).condition is Condition.RUNNING
