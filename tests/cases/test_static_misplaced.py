"""Neighbours of the incident cases: weights and adapters that lie where no engine, or the wrong one, looks for them."""

import pytest

from tests.support import chain
from tests.support.checkpoints import (
    HALF,
    SHARDS,
    T,
    adapt,
    alarms,
    codes,
    edit_json,
    micro,
    micro_sharded,
    micro_tensors,
    only,
    validate,
    write_safetensors,
)
from tests.support.headers import gguf, pair, text
from tests.support.layouts import write_layout

VLLM, SGLANG = {"name": "vllm", "version": "0.32.0"}, {"name": "sglang", "version": "0.5.15"}
LLAMACPP = {"name": "llamacpp", "version": "2026.10.11549"}


@pytest.mark.parametrize("path", ["fp16/model.safetensors", "onnx/model.onnx", "checkpoint-9/pytorch_model.bin"])
def test_c007_weights_in_a_folder_of_their_own_are_none(tmp_path, path):
    root = micro(tmp_path / "m")
    (root / path).parent.mkdir()
    (root / "model.safetensors").rename(root / path)
    flaw = only(validate(root, {"engine": VLLM}), "weights-absent")
    assert (flaw.severity, path in flaw.found) == ("block", True)
    (root / path).unlink()
    assert only(validate(root, {"engine": VLLM}), "weights-absent").severity == "info"


def test_c007_what_a_model_sees_with_is_no_model(tmp_path):
    (tmp_path / "mmproj-F16.gguf").write_bytes(gguf(pair(b"general.architecture", 8, text(b"clip"))))
    assert only(validate(tmp_path, {"engine": LLAMACPP}), "weights-absent").severity == "block"
    chain.write_chain(tmp_path / "chain-Q8_0.gguf")
    assert "weights-absent" not in codes(validate(tmp_path, {"engine": LLAMACPP}))


@pytest.mark.parametrize(
    ("make", "engine", "is_fault"),
    [
        (micro, VLLM, True),
        (micro, None, True),
        (micro_sharded, VLLM, False),
        (micro_sharded, {"name": "transformers", "version": "5.20.0"}, True),
    ],
)
def test_c010_an_adapter_among_the_base_s_own_files_is_taken_for_a_part_of_it(tmp_path, make, engine, is_fault):
    root = adapt(make(tmp_path / "m"))
    told = {"engine": engine} if engine else {}
    assert ("adapter-misplaced" in codes(validate(root, told), "block")) is is_fault
    (root / "adapters/mine").mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / name).rename(root / "adapters/mine" / name)
    assert "adapter-misplaced" not in codes(validate(root, told))


@pytest.mark.parametrize(("data", "is_told"), [(HALF * 8, True), (None, False)])
def test_c012_without_an_index_nothing_says_which_of_two_copies_counts(tmp_path, data, is_told):
    root = micro_sharded(tmp_path / "m")
    (root / "model.safetensors.index.json").unlink()
    again = next(one for one in micro_tensors() if one.name.endswith("0.input_layernorm.weight"))
    write_safetensors(root / SHARDS[1], [again._replace(data=data), *micro_tensors()[7:]])
    assert alarms(validate(root)) == ({"duplicate-weight-sets"} if is_told else set())


@pytest.mark.parametrize(("engine", "is_fault"), [(VLLM, True), (None, True), (SGLANG, False)])
def test_c079_a_matrix_under_the_name_of_an_adapter_in_training_blocks(tmp_path, engine, is_fault):
    root = micro(tmp_path / "m")
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    adapt(root / "adapt")
    told = {"adapters": {"a": "adapt"}} | ({"engine": engine} if engine else {})
    assert "lora-no-match" not in codes(validate(root, told))
    matrices = [T(f"{stem}{side}.default.weight", "BF16", (8, 8), HALF * 64) for side in "AB"]
    write_safetensors(root / "adapt" / "adapter_model.safetensors", matrices)
    assert ("lora-no-match" in codes(validate(root, told), "block")) is is_fault


def test_c086_an_adapter_without_a_tensor_is_incomplete(tmp_path):
    root = micro(tmp_path / "m")
    adapt(root / "adapt")
    write_safetensors(root / "adapt" / "adapter_model.safetensors", [])
    found = validate(root, {"adapters": {"a": "adapt"}})
    assert only(found, "adapter-incomplete").file == "adapt/adapter_model.safetensors"


@pytest.mark.parametrize(
    ("family", "version", "is_fault"),
    [("llama", "0.32.0", True), ("qwen3", "0.9.2", True), ("qwen3_moe", "0.32.0", False), ("gpt_oss", "0.32.0", False)],
)
def test_experts_are_spread_of_models_that_have_some(tmp_path, family, version, is_fault):
    root = write_layout(tmp_path / "m", family)
    if family != "gpt_oss":
        edit_json(root / "config.json", lambda told: told.pop("num_local_experts", None))
    engine = {"name": "vllm", "version": version, "arguments": ["--enable-expert-parallel"]}
    assert ("experts-ep" in codes(validate(root, {"engine": engine}), "block")) is is_fault


@pytest.mark.parametrize(
    ("asked", "name", "is_there"),
    [
        ("mistral", None, False),
        ("mistral", "consolidated.safetensors", True),
        ("sharded_state", None, False),
        ("sharded_state", "model-rank-0-part-0.safetensors", True),
        ("safetensors", None, True),
    ],
)
def test_c010_a_load_format_reads_files_of_its_own_names(tmp_path, asked, name, is_there):
    root = micro(tmp_path / "m")
    if name:
        (root / "model.safetensors").rename(root / name)
    found = validate(root, {"engine": VLLM | {"arguments": ["--load-format", asked]}})
    flaws = [one.pointer for one in found.flaws if one.code == "weights-absent"]
    assert flaws == ([] if is_there else ["--load-format"])


@pytest.mark.parametrize("asked", ["gguf", "bogus"])
def test_c010_a_load_format_that_the_engine_lacks_blocks(tmp_path, asked):
    found = validate(micro(tmp_path / "m"), {"engine": VLLM | {"arguments": ["--load-format", asked]}})
    assert only(found, "argument-value").severity == "block"


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "NOTICE"])
@pytest.mark.parametrize(("raw", "is_fault"), [(b"\x7fELF\x02\x01\x01" + b"\0" * 99, True), (b"# A model\n", False)])
def test_what_a_bundle_takes_for_people_is_no_program(tmp_path, name, raw, is_fault):
    root = micro(tmp_path / "m")
    (root / name).write_bytes(raw)
    assert alarms(validate(root, {"engine": VLLM})) == ({"file-foreign"} if is_fault else set())
