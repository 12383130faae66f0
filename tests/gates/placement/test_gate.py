"""The gate `placement`: the plan on the runner's real memory, the number that decides, and what records say again."""

import json

import pytest

from gates import catalog
from gates.gate import GateContext
from gates.policy import plan_problems
from schemas.bundle import Bundle
from schemas.common import canonical_json
from schemas.policy import PlacementRule, Policy
from schemas.result import Verdict
from schemas.runner import Fingerprint
from tests.gates.placement.test_plan import CONFIG, LAYER, LAYER_ON_4, SIZES
from tests.support import chain
from tests.support.checkpoints import write_json, write_safetensors
from tests.support.factories import bundle_body, file_entry, policy_body
from tests.support.published import decoder

MIB = 2**20
RULE = PlacementRule(gate="placement", activation_bytes=MIB)
TOPOLOGY = {f"{kind}_parallel": 1 for kind in ("tensor", "pipeline", "expert", "data", "context")} | {"nodes": 1}
TOKEN_BYTES = 2 * 2 * 2 * 16 * 2  # keys and values, 2 layers, 2 heads of 16 in 16 bits
SEQUENCE = 512 * TOKEN_BYTES


def machine(memory=2**30, *cards, mig=None):
    told = {"sku": "NVIDIA H100", "mig": mig}
    accelerators = [
        {key: one for key, one in told.items() if one is not None} | {"memory_bytes": card} for card in cards
    ]
    return Fingerprint.model_validate(
        {
            "cpu": "x",
            "cpu_flags": "avx2",
            "cores": 2,
            "memory_bytes": memory,
            "accelerators": accelerators,
            "kernel": "6",
        }
    )


def on_cpu(root, **changes):
    return chain.describe(chain.write_bundle_directory(root), environment="sha256:" + "0" * 64, **changes)


def on_cards(root, *, hardware=None, topology=None, arguments=(), sequences=4, config=CONFIG):
    root.mkdir()
    write_json(root / "config.json", config)
    write_safetensors(root / "model.safetensors", list(decoder(**SIZES)))
    roles = {"config.json": "config", "model.safetensors": "weights"}
    body = bundle_body(
        files=[file_entry(path, (root / path).read_bytes(), role) for path, role in sorted(roles.items())],
        model={"format": "safetensors", "architecture": "LlamaForCausalLM"},
        engine={
            "name": "sglang",
            "version": "0.5.9",
            "image": "sglang@sha256:" + "1" * 64,
            "arguments": list(arguments),
        },
        topology=TOPOLOGY | (topology or {}),
        hardware={"accelerator": "nvidia-h100", "count": 1} | (hardware or {}),
        runtime={"context_tokens": 512, "max_sequences": sequences},
    )
    return Bundle.model_validate(body)


def run(root, bundle, fingerprint, rule=RULE):
    result, raw = catalog.run("placement", GateContext(bundle, root, rule, fingerprint=fingerprint))
    assert catalog.recompute(raw, None, None, bundle) == result
    return result, raw


def only(result):
    (one,) = result.findings
    return one


def number(result, name):
    return next(one for one in result.measurements if one.name == name)


def test_a_bundle_that_fits_the_machine_passes_with_its_numbers_and_is_recomputed(tmp_path):
    bundle = on_cpu(tmp_path / "chain")
    result, raw = run(tmp_path / "chain", bundle, machine(100 * MIB))
    assert (result.verdict, result.findings) == (Verdict.PASSED, [])
    stage = json.loads(raw)["records"]["stages"][0]
    room = 90 * MIB - MIB - stage["weights"]
    assert number(result, "cache_room").value == room
    assert number(result, "weights").value == stage["weights"] > 0
    assert (number(result, "sequences").value, number(result, "sequences").limit) == (
        room // stage["sequence_bytes"],
        4,
    )
    assert "It fits in tp=1" in result.summary


def test_a_bundle_that_is_larger_than_the_machine_fails_before_any_sequence(tmp_path):
    bundle = on_cpu(tmp_path / "chain")
    result, _ = run(tmp_path / "chain", bundle, machine(MIB))
    assert (result.verdict, only(result).code) == (Verdict.FAILED, "memory-short")
    assert only(result).found == str(MIB * 9 // 10)
    assert "smallest" not in only(result).advice


def test_weights_and_cache_are_held_against_one_card(tmp_path):
    root = tmp_path / "m"
    weights = 2 * 1024 * 256 + 2 * LAYER + 256  # 1,000 rows are padded to 1,024, in embedding and head
    bundle = on_cards(root, arguments=["--mem-fraction-static", "0.5"])
    enough = 2 * (weights + MIB + 4 * SEQUENCE)
    result, _ = run(root, bundle, machine(2**30, enough))
    assert (result.verdict, number(result, "sequences").value) == (Verdict.PASSED, 4)
    result, _ = run(root, bundle, machine(2**30, enough - 2))
    one = only(result)
    assert (result.verdict, one.code, one.found, one.expected) == (Verdict.FAILED, "sequences-short", "3", "4")
    assert one.advice.endswith("The smallest layout that fits is tp=2.")


def test_the_layout_decides_what_one_card_holds(tmp_path):
    root = tmp_path / "m"
    bundle = on_cards(root, hardware={"count": 4}, topology={"tensor_parallel": 4})
    result, _ = run(root, bundle, machine(2**30, *[64 * MIB] * 4))
    assert result.verdict is Verdict.PASSED
    assert number(result, "weights").value == 2 * 256 * 256 + 2 * LAYER_ON_4 + 256
    assert number(result, "sequence").value == SEQUENCE // 2  # two heads, copied over four cards


@pytest.mark.parametrize(
    ("changes", "cards", "mig", "code", "found", "expected"),
    [
        ({}, [], None, "devices-short", 0, 1),
        ({}, [64 * MIB], "1g.10gb", "devices-short", 0, 1),
        ({"hardware": {"mig": "1g.10gb"}}, [64 * MIB], None, "devices-short", 0, 1),
        ({"hardware": {"count": 2}}, [64 * MIB], None, "devices-short", 1, 2),
        ({"topology": {"tensor_parallel": 2}}, [64 * MIB], None, "devices-short", 1, 2),
        ({"topology": {"data_parallel": 3}}, [64 * MIB] * 2, None, "devices-short", 2, 3),
        ({"hardware": {"memory_bytes": 65 * MIB}}, [64 * MIB], None, "device-memory-short", 64 * MIB, 65 * MIB),
        ({"topology": {"tensor_parallel": 3}}, [64 * MIB] * 3, None, "layout-impossible", None, None),
        ({"topology": {"pipeline_parallel": 3}}, [64 * MIB] * 3, None, "layout-impossible", None, None),
        # the smallest of them counts
        ({"hardware": {"count": 2}}, [64 * MIB, MIB], None, "memory-short", MIB * 9 // 10, None),
    ],
)
def test_a_runner_that_has_not_what_the_bundle_takes_fails_it_with_both_numbers(
    tmp_path, changes, cards, mig, code, found, expected
):
    root = tmp_path / "m"
    result, _ = run(root, on_cards(root, **changes), machine(2**30, *cards, mig=mig))
    one = only(result)
    assert (result.verdict, one.code) == (Verdict.FAILED, code)
    assert one.found == (None if found is None else str(found))
    assert expected is None or one.expected == str(expected)


def test_what_is_stated_in_the_rule_is_taken_from_the_room(tmp_path):
    root = tmp_path / "m"
    bundle = on_cards(root)
    rule = PlacementRule.model_validate(
        {"gate": "placement", "activation_bytes": 3, "graph_bytes": 5, "headroom_bytes": 7, "utilization": "1"}
    )
    result, _ = run(root, bundle, machine(2**30, 64 * MIB), rule)
    weights = number(result, "weights").value
    assert number(result, "cache_room").value == 64 * MIB - weights - 15


def test_what_is_not_known_decides_nothing(tmp_path):
    root = tmp_path / "m"
    bundle = on_cards(root, arguments=["--kv-cache-dtype", "fp3"])
    result, _ = run(root, bundle, machine(2**30, 64 * MIB))
    assert (result.verdict, only(result).code) == (Verdict.INCONCLUSIVE, "placement-unknown")
    assert "fp3" in only(result).message


def test_without_hardware_nothing_is_judged(tmp_path):
    result, _ = run(tmp_path / "chain", on_cpu(tmp_path / "chain"), None)
    assert result.verdict is Verdict.ERRORED


@pytest.mark.parametrize(
    "change",
    [
        {"stages": []},
        {"stages": [{}]},
        {"stages": [{"weights": -1, "adapters": 0, "draft": 0, "sequence_bytes": 1}]},
        {"stages": [{"weights": "1", "adapters": 0, "draft": 0, "sequence_bytes": 1}]},
        {"topology": {"tensor": 1, "pipeline": 2, "expert": 1}},
        {"topology": {"tensor": 0, "pipeline": 1, "expert": 1}},
        {"topology": None},
        {"fingerprint": {}},
        {"unknown": 3},
    ],
)
def test_records_that_nobody_wrote_are_errored(tmp_path, change):
    bundle = on_cpu(tmp_path / "chain")
    _, raw = run(tmp_path / "chain", bundle, machine())
    body = json.loads(raw)
    body["records"] |= change
    assert catalog.recompute(canonical_json(body), None, None, bundle).verdict is Verdict.ERRORED


def test_a_rule_that_leaves_the_engine_nothing_is_told_when_the_policy_is_pushed():
    gates = [*policy_body()["gates"], {"gate": "placement", "activation_bytes": 1, "utilization": "0"}]
    policy = Policy.model_validate(policy_body(gates=gates))
    (problem,) = plan_problems(policy, {})
    assert problem.startswith(f"/gates/{len(gates) - 1}/utilization: ")
