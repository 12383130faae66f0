"""What a bundle needs against what a machine has: every row of hardware, engine and layout, each on its own."""

from typing import Any

import pytest

from gates.fitting import Needs, Offer, has_memory, obstacles, positions
from schemas.bundle import Bundle
from schemas.runner import Fingerprint
from tests.support import factories

H100 = {"sku": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_520_809_984}
MIG = {"sku": "NVIDIA H100 80GB HBM3", "memory_bytes": 10 * 2**30, "mig": "1g.10gb"}
IMAGE = "registry.example/vllm@sha256:" + "a" * 64
ENVIRONMENT = "sha256:" + "b" * 64


def needs(hardware: dict[str, Any] | None = None, **changes: Any) -> Needs:
    """Return the needs of a bundle, on one H100 unless said otherwise."""
    body = factories.bundle_body(hardware={"accelerator": "nvidia-h100", "count": 1} | (hardware or {}))
    parallel = {f"{kind}_parallel": 1 for kind in ("tensor", "pipeline", "expert", "data", "context")}
    body["topology"] = {**parallel, "nodes": 1} | changes.pop("topology", {})
    body["engine"] |= {"environment": ENVIRONMENT}
    return Needs.of(Bundle.model_validate(body | changes))


def machine(*cards: dict[str, Any], **changes: Any) -> Fingerprint:
    """Return the fingerprint of a machine with these accelerators."""
    body = {
        "cpu": "x", "cpu_flags": "avx2", "cores": 64, "memory_bytes": 2**40, "accelerators": list(cards), "kernel": "6",
        "driver": "550.54.15", "cuda": "12.4", "links": "nvlink",
    }  # fmt: skip
    return Fingerprint.model_validate(body | changes)


def offer(*cards: dict[str, Any], **changes: Any) -> Offer:
    """Return what a machine with these accelerators has, llama.cpp of the bundle's environment among it."""
    said = {name: changes.pop(name) for name in ("engines", "environments", "launcher") if name in changes}
    return Offer(machine(*cards, **changes), **({"engines": ["llamacpp"]} | said))


@pytest.mark.parametrize("name", ["nvidia-h100", "H100", "NVIDIA H100 80GB HBM3", "h100 80gb", "sm_90", "9.0"])
def test_a_model_is_known_by_its_words_or_its_architecture(name: str) -> None:
    assert obstacles(needs({"accelerator": name}), offer(H100)) == []


@pytest.mark.parametrize(
    ("name", "sku"),
    [("nvidia-l4", "NVIDIA L40S"), ("a100", "NVIDIA A10"), ("sm_80", H100["sku"]), ("nvidia", "NVIDIA")],
)
def test_a_model_is_not_taken_for_another_with_a_like_name(name: str, sku: str) -> None:
    assert obstacles(needs({"accelerator": name}), offer(H100 | {"sku": sku})) != []


@pytest.mark.parametrize(
    ("hardware", "cards", "changes", "said"),
    [
        ({"count": 4}, [H100], {}, "it has 1 × NVIDIA H100 80GB HBM3 of 85.5 GB"),
        ({}, [], {}, "it has no accelerator, only a processor with 1,099.5 GB of memory"),
        ({"memory_bytes": 90_000_000_000}, [H100], {}, "it has 1 × NVIDIA H100 80GB HBM3 of 85.5 GB"),
        ({"mig": "1g.10gb"}, [H100], {}, "it has 1 × NVIDIA H100 80GB HBM3 of 85.5 GB"),
        ({}, [MIG], {}, "it has 1 × NVIDIA H100 80GB HBM3 as 1g.10gb of 10.7 GB"),
        ({"driver": ">=560"}, [H100], {}, "its driver is 550.54.15, and the bundle asks for >=560"),
        ({"driver": ">=560"}, [H100], {"driver": None}, "it does not say its driver, and the bundle asks for >=560"),
        ({"cuda": ">=12.8"}, [H100], {}, "its CUDA is 12.4, and the bundle asks for >=12.8"),
        ({"cuda": "new"}, [H100], {}, "the bundle's constraint on the CUDA, 'new', cannot be read: write it as >=12.4"),
        (
            {"count": 2, "interconnect": "NVLink"},
            [H100, H100],
            {"links": "pcie, NUMA 0 and 1"},
            "its accelerators are linked by pcie, NUMA 0 and 1, not NVLink",
        ),
    ],
)
def test_each_row_of_the_hardware_that_is_not_there_is_told_with_what_is(
    hardware: dict[str, Any], cards: list[dict[str, Any]], changes: dict[str, Any], said: str
) -> None:
    assert obstacles(needs(hardware), offer(*cards, **changes)) == [said]


@pytest.mark.parametrize(
    ("hardware", "cards"),
    [
        ({"driver": ">=550,<600", "cuda": ">=12.4"}, [H100]),
        ({"mig": "1g.10gb", "memory_bytes": 10_000_000_000}, [H100, MIG]),
        ({"count": 2, "interconnect": "nvlink"}, [H100, H100]),
        ({"count": 1, "interconnect": "nvswitch"}, [H100]),
        ({"accelerator": "cpu", "count": 0}, []),
    ],
)
def test_what_is_all_there_has_no_obstacle(hardware: dict[str, Any], cards: list[dict[str, Any]]) -> None:
    assert obstacles(needs(hardware), offer(*cards)) == []


def test_a_layout_may_take_more_devices_than_the_hardware_row_counts() -> None:
    wide = needs(topology={"tensor_parallel": 2, "pipeline_parallel": 2})
    assert (wide.count, len(obstacles(wide, offer(H100, H100)))) == (4, 1)
    assert obstacles(wide, offer(*[H100] * 4)) == []
    assert needs(topology={"tensor_parallel": 2, "expert_parallel": 8, "data_parallel": 4}).count == 8


def test_weights_that_no_setting_makes_fit_are_an_obstacle() -> None:
    body = factories.bundle_body(hardware={"accelerator": "cpu", "count": 0})
    body["files"][0]["size"] = 30_000_000_000
    large = Needs.of(Bundle.model_validate(body))
    small = offer(memory_bytes=32 * 10**9)
    assert obstacles(large, small) == ["it has 32.0 GB of memory, and the weights alone take 30.0 GB"]
    assert obstacles(large, offer(memory_bytes=64 * 10**9)) == []
    assert not has_memory(large, machine(memory_bytes=64 * 10**9), 30_000_000_000)
    on_card = large.model_copy(update={"accelerator": "h100", "count": 1, "held_bytes": 90_000_000_000})
    assert obstacles(on_card, offer(H100)) == ["its accelerators have 85.5 GB each, and 1 of them hold 90.0 GB"]


@pytest.mark.parametrize(
    ("engine", "has", "said"),
    [
        ({"name": "vllm"}, {}, "it has llamacpp, and not vllm"),
        ({"name": "vllm"}, {"engines": []}, "it has no engine, and not vllm"),
        (
            {},
            {"environments": {"llamacpp": "sha256:1"}},
            f"its llamacpp is sha256:1, and the bundle names test in {ENVIRONMENT}",
        ),
        (
            {},
            {"launcher": "container"},
            f"it starts engines from images, and the bundle names the environment {ENVIRONMENT}",
        ),
        ({"image": IMAGE}, {}, f"it starts engines as processes, and the bundle names the image {IMAGE}"),
        ({"name": "external"}, {}, "it speaks to no endpoint outside"),
    ],
)
def test_an_engine_that_the_machine_cannot_start_is_told(
    engine: dict[str, Any], has: dict[str, Any], said: str
) -> None:
    base = {"name": "llamacpp", "version": "test", "arguments": []}
    named = {} if "image" in engine or engine.get("name") == "external" else {"environment": ENVIRONMENT}
    assert obstacles(needs(engine=base | named | engine), offer(H100, **has)) == [said]


def test_an_image_needs_no_engine_on_the_machine_and_several_machines_need_a_cluster() -> None:
    engine = {"name": "vllm", "version": "0.11.0", "arguments": [], "image": IMAGE}
    assert obstacles(needs(engine=engine), offer(H100, launcher="container", engines=[])) == []
    spread = needs(engine=engine, topology={"nodes": 2})
    assert obstacles(spread, offer(H100, launcher="container")) == ["it is one machine, and a replica spans 2"]
    assert obstacles(spread, offer(H100, launcher="kubernetes")) == []


def test_free_accelerators_of_one_numa_node_are_taken_before_those_of_two() -> None:
    cards = [H100 | {"numa": node} for node in (0, 1, 1, 0)]
    two = needs({"count": 2})
    assert positions(two, machine(*cards)) == [0, 3]
    assert positions(two, machine(*cards), {0}) == [1, 2]
    assert positions(two, machine(*cards), {0, 1}) == [2, 3]
    assert positions(two, machine(*cards), {0, 1, 2}) is None
    assert positions(needs({"accelerator": "cpu", "count": 0}), machine()) == []


def test_needs_are_said_as_people_say_them() -> None:
    said = str(needs({"count": 4, "memory_bytes": 80_000_000_000, "driver": ">=550", "interconnect": "nvlink"}))
    assert said == (f"4 × nvidia-h100 of 80.0 GB, driver >=550, links by nvlink, llamacpp test in {ENVIRONMENT}")


# ------------------------------------------------------------------------------------------------- two at once


def drill(accepted: Needs, **hardware: Any) -> Needs:
    """Return what a candidate takes while a drill runs an accepted bundle beside it."""
    return needs(hardware).model_copy(update={"beside": accepted})


def test_a_drill_takes_accelerators_for_both_bundles_and_never_the_same() -> None:
    both = drill(needs({"count": 1}), count=2)
    assert positions(both, machine(H100, H100, H100)) == [0, 1, 2]
    assert positions(both, machine(H100, H100, H100, H100), taken={1}) == [0, 2, 3]
    assert positions(both, machine(H100, H100, H100), taken={1}) is None
    assert str(both).count("nvidia-h100") == 2


@pytest.mark.parametrize(
    ("accepted", "cards", "said"),
    [
        (needs(), [H100], "a drill takes what both bundles do at once"),
        (
            needs({"accelerator": "nvidia-l4"}),
            [H100, H100],
            "for the accepted bundle beside it: it has 2 × NVIDIA H100",
        ),
    ],
)
def test_a_machine_that_never_holds_both_bundles_says_so(accepted: Needs, cards: list[Any], said: str) -> None:
    (found,) = obstacles(drill(accepted), offer(*cards))
    assert said in found


@pytest.mark.parametrize("first", ["candidate", "accepted"])
def test_who_fits_fewer_accelerators_of_a_drill_chooses_first(first: str) -> None:
    large = H100 | {"memory_bytes": 96_000_000_000}
    demanding = {"memory_bytes": 90_000_000_000}
    candidate, accepted = (needs(demanding), needs()) if first == "candidate" else (needs(), needs(demanding))
    both = candidate.model_copy(update={"beside": accepted})
    for cards in ([large, H100], [H100, large]):
        place = cards.index(large)
        assert positions(both, machine(*cards)) == ([place, 1 - place] if first == "candidate" else [1 - place, place])
        assert obstacles(both, offer(*cards)) == []
    assert positions(both, machine(H100, H100)) is None
    assert positions(both, machine(large)) is None
    assert positions(both, machine(large, H100), {1}) is None


def test_on_a_processor_the_weights_of_both_bundles_have_to_fit() -> None:
    one = needs({"accelerator": "cpu", "count": 0}).model_copy(update={"held_bytes": 6 * 10**9})
    both = one.model_copy(update={"beside": one})
    assert both.machine_bytes == 12 * 10**9
    assert obstacles(both, offer(memory_bytes=14 * 10**9)) == []
    (found,) = obstacles(both, offer(memory_bytes=12 * 10**9))
    assert found == "it has 12.0 GB of memory, and both bundles at once take 12.0 GB"
    assert obstacles(one, offer(memory_bytes=12 * 10**9)) == []


def test_the_accepted_bundle_may_have_an_engine_that_is_not_here() -> None:
    accepted = needs().model_copy(update={"environment": "sha256:" + "c" * 64})
    assert obstacles(drill(accepted), offer(H100, H100, environments={"llamacpp": ENVIRONMENT})) == []
