"""What a cluster is given: which nodes a replica may have, and that each field is as the API publishes it."""

from dataclasses import replace

import pytest

from schemas.bundle import Bundle
from schemas.runner import Fingerprint
from tests.support.factories import bundle_body
from tests.support.kube_fields import faults
from workers.engines.base import Command
from workers.launchers.base import Limits, Order
from workers.launchers.kube_objects import Pods, build

IMAGE = "registry.example/engines/llamacpp@sha256:" + "a" * 64
JOB = "0197a1b2-0000-7000-8000-000000000001"
COMMAND = Command(("python3", "-m", "engine"))
TOPOLOGY = {f"{kind}_parallel": 1 for kind in ("tensor", "pipeline", "expert", "data", "context")}


def bundle(**changes):
    engine = {"name": "llamacpp", "version": "test", "image": IMAGE, "arguments": []}
    return Bundle.model_validate(bundle_body(engine=engine, topology={**TOPOLOGY, "nodes": 1}, **changes))


@pytest.fixture
def pods(tmp_path):
    return Pods(runner="r1", data=str(tmp_path), claim="engines")


@pytest.fixture
def order(tmp_path):
    return Order(bundle(), tmp_path / "staged", job=JOB, fencing_token=7)


def node(*skus):
    cards = [{"sku": sku, "memory_bytes": 150_000_000_000} for sku in skus]
    told = {"cpu": "x", "cpu_flags": "avx2", "cores": 1, "memory_bytes": 2**40, "kernel": "6", "accelerators": cards}
    return Fingerprint.model_validate(told)


@pytest.mark.parametrize("asked", ["nvidia-h100", "NVIDIA H100 80GB HBM3", "sm_90"])
def test_a_node_is_chosen_by_the_name_that_its_accelerators_have_and_not_by_a_part_of_it(pods, order, asked):
    made = replace(order, bundle=bundle(hardware={"accelerator": asked, "count": 2}))
    here = replace(pods, hardware=node(*["NVIDIA H100 80GB HBM3"] * 8, "NVIDIA A100-SXM4-40GB"))
    spec = build(here, COMMAND, made, JOB, is_live=False)[1]["spec"]
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


def test_of_several_products_that_fit_any_will_do(pods, order):
    made = replace(order, bundle=bundle(hardware={"accelerator": "sm_90", "count": 1, "memory_bytes": 2**36}))
    here = replace(pods, hardware=node("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    spec = build(here, COMMAND, made, JOB, is_live=False)[1]["spec"]
    assert "nodeSelector" not in spec
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    products = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H200"]}
    assert term["matchExpressions"][0] == products
    assert term["matchExpressions"][1]["key"] == "nvidia.com/gpu.memory"


def test_a_layout_that_takes_more_accelerators_than_its_row_counts_gets_as_many_as_are_reserved_for_it(pods, order):
    body = bundle_body(
        engine={"name": "llamacpp", "version": "test", "image": IMAGE, "arguments": []},
        topology={**TOPOLOGY, "tensor_parallel": 4, "nodes": 1},
        hardware={"accelerator": "NVIDIA H200", "count": 1},
    )
    made = replace(order, bundle=Bundle.model_validate(body))
    (container,) = build(pods, COMMAND, made, JOB, is_live=False)[1]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}


def resources(pods, order, *, nodes=1, size, **changes):
    weights = {"path": "model.gguf", "size": size, "sha256": "sha256:" + "1" * 64, "role": "weights"}
    body = bundle_body(
        engine={"name": "sglang", "version": "test", "image": IMAGE, "arguments": []},
        topology={**TOPOLOGY, "pipeline_parallel": nodes, "nodes": nodes},
        files=[weights],
        **changes,
    )
    made = build(pods, COMMAND, replace(order, bundle=Bundle.model_validate(body)), JOB, is_live=False)[1]["spec"]
    if nodes == 1:
        return made["containers"][0]["resources"]
    leader, worker = (made["leaderWorkerTemplate"][f"{kind}Template"]["spec"] for kind in ("leader", "worker"))
    assert leader["containers"][0]["resources"] == worker["containers"][0]["resources"]
    return leader["containers"][0]["resources"]


GPUS = {"accelerator": "NVIDIA H200", "count": 2, "memory_bytes": 2**36}


def test_a_pod_with_accelerators_asks_for_the_memory_that_the_weights_come_through_and_each_rank_takes(pods, order):
    assert resources(pods, order, size=10**11, hardware=GPUS) == {
        "limits": {"nvidia.com/gpu": "2"},
        "requests": {"memory": str(10**11 + 2 * 6 * 2**30)},
    }


def test_a_pod_without_accelerators_asks_for_what_its_plan_adds_up_to(pods, order):
    cpu = {"accelerator": "cpu", "count": 0}
    for row, planned, asked in ((cpu, 2**31, 2**31), (cpu, 0, 2**30), (cpu | {"memory_bytes": 2**32}, 2**31, 2**32)):
        made = resources(pods, replace(order, planned_bytes=planned), size=2**30, hardware=row)
        assert made == {"requests": {"memory": str(asked)}}


def test_each_pod_of_a_group_asks_for_its_own_part_of_the_memory(pods, order):
    assert resources(pods, order, nodes=2, size=10**11 + 1, hardware=GPUS) == {
        "limits": {"nvidia.com/gpu": "1"},
        "requests": {"memory": str(5 * 10**10 + 1 + 6 * 2**30)},
    }


def test_no_more_of_a_node_s_memory_is_asked_for_than_the_share_of_the_accelerators(pods, order):
    here = replace(pods, hardware=node(*["NVIDIA H200"] * 8))
    asked = {"memory": str(int(2**40 * 0.9 * 2 / 8))}
    assert resources(here, order, size=10**12, hardware=GPUS)["requests"] == asked
    assert resources(here, order, size=10**9, hardware=GPUS)["requests"] == {"memory": str(10**9 + 12 * 2**30)}


def test_what_a_setting_gives_an_engine_is_what_a_pod_with_accelerators_asks_for_and_may_take(pods, order):
    here = replace(pods, limits=Limits(memory_bytes=2**37), hardware=node("NVIDIA H200", "NVIDIA H200"))
    assert resources(here, order, size=10**12, hardware=GPUS) == {
        "limits": {"nvidia.com/gpu": "2", "memory": str(2**37)},
        "requests": {"memory": str(2**37)},
    }


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("spec.enableServiceLink", False, 'unknown field "spec.enableServiceLink"'),
        ("spec.containers.0.livenessProbe.failureTreshold", 1, 'unknown field "spec.containers[0].livenessProbe.f'),
        ("spec.terminationGracePeriodSeconds", "60", "spec.terminationGracePeriodSeconds is no integer"),
        ("spec.securityContext.runAsNonRoot", "true", "spec.securityContext.runAsNonRoot is no boolean"),
        ("spec.containers.0.command", "python3", "spec.containers[0].command is no list"),
        ("spec.containers.0.imagePullPolicy", "Missing", 'spec.containers[0].imagePullPolicy is "Missing", none of'),
        ("spec.volumes.0.persistentVolumeClaim", {}, "spec.volumes[0].persistentVolumeClaim.claimName is missing"),
        ("metadata.labels", {"token": 7}, "metadata.labels.token is no string"),
    ],
)
def test_a_field_that_is_not_as_it_is_published_is_refused_by_the_server_of_these_tests(
    pods, order, path, value, fault
):
    made = build(pods, COMMAND, order, JOB, is_live=False)[1]
    assert faults(made, "Pod") == []
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = made
    for part in way:
        place = place[part]
    place[last] = value
    (found,) = faults(made, "Pod")
    assert found.startswith(fault)
