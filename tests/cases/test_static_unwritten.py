"""Neighbours of the incident cases of weights: what was never written, what nobody counts, and what is no number."""

import re

import pytest

from tests.support.checkpoints import (
    WIDTHS,
    T,
    alarms,
    micro,
    micro_config,
    micro_tensors,
    only,
    validate,
    write_json,
    write_safetensors,
)
from tests.support.layouts import config_of, tensors_of, write_layout
from tests.support.published import decoder

WIDE = {"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
WIDE |= {"vocab_size": 128256}


@pytest.mark.parametrize(
    ("lost", "is_told"),
    [
        ("lm_head", True),
        ("model.embed_tokens", True),
        (r"model.layers.[345].*_proj", True),
        # what nearly all of is zeros is a sketch, such as a layout without its values
        (r"model.layers.*_proj", False),
        (r"model.layers.[01234].*|lm_head|model.embed_tokens", False),
        ("model.norm", False),
    ],
)
def test_c019_what_was_never_written_stands_out_among_what_was(tmp_path, lost, is_told):
    layers = [
        one._replace(name=one.name.replace("layers.0", f"layers.{layer}"))
        for one in micro_tensors()
        for layer in (range(6) if "layers.0" in one.name else [0])
    ]
    tensors = [
        one if re.match(lost, one.name) else one._replace(data=bytes(range(16)) * (one.size // 16)) for one in layers
    ]
    found = validate(micro(tmp_path / "m", tensors=tensors, num_hidden_layers=6))
    assert alarms(found) == ({"constant-weight"} if is_told else set())
    names = {one.name for one in tensors if re.match(lost, one.name)}
    assert {name for one in found.flaws if one.code == "constant-weight" for name in one.found["tensors"]} <= names


def test_c019_a_stretch_of_a_large_file_is_found_wherever_it_begins(tmp_path):
    root = tmp_path / "m"
    root.mkdir()
    write_json(root / "config.json", micro_config(num_hidden_layers=2, hidden_size=4096, **WIDE))
    tensors = list(decoder(layers=2, hidden=4096, heads=32, keys=8, inner=14336, rows=128256))
    path = write_safetensors(root / "model.safetensors", tensors, sparse=True)
    assert alarms(validate(root)) == set()
    with path.open("r+b") as file:
        file.seek(350_000_000)
        file.write(b"\xc0\x7f" * 5_000_000)
    flaw = only(validate(root), "non-finite-weight")
    assert (flaw.found["kind"], flaw.found["looked_at"] < path.stat().st_size // 8) == ("nan", True)


@pytest.mark.parametrize(
    ("dtype", "is_fault"), [("I8", True), ("U8", True), ("BOOL", True), ("I64", True), ("F64", False)]
)
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_c057_whole_numbers_are_no_weights_without_a_method(tmp_path, name, dtype, is_fault):
    tensors = [one._replace(dtype=dtype) if one.name == name else one for one in micro_tensors()]
    tensors.sort(key=lambda one: -WIDTHS[one.dtype])
    flaws = [one for one in validate(micro(tmp_path / "m", tensors=tensors)).flaws if one.severity == "block"]
    assert [(one.code, one.found["tensors"]) for one in flaws] == (
        [("quant-config-mismatch", [name])] if is_fault else []
    )


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", "deepseek_v3", "gemma3_text", "gpt_oss", "phi3", "falcon", "glm4_moe"]
)
def test_c007_whole_layers_that_nobody_counts_block(tmp_path, family):
    config = config_of(family)
    count = config["num_hidden_layers"] - 1
    fewer = {"num_hidden_layers": count} | (
        {"layer_types": config["layer_types"][:-1]} if config.get("layer_types") else {}
    )
    flaw = only(validate(write_layout(tmp_path / "m", family, **fewer)), "layers-beyond")
    assert (flaw.found["layers"], flaw.found["beyond"], flaw.severity) == (count, [count], "block")


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("said", [{"num_nextn_predict_layers": 1}, {"num_nextn_predict_layers": 0}])
def test_c007_a_layer_that_predicts_a_further_token_is_none_of_them(tmp_path, family, said):
    root, count = write_layout(tmp_path / "m", family, **said), config_of(family)["num_hidden_layers"]
    shapes = tensors_of(family)
    last = {name: shape for name, shape in shapes.items() if f"layers.{count - 1}." in name}
    further = {name.replace(f".{count - 1}.", f".{count}.", 1): shape for name, shape in last.items()}
    hidden = config_of(family)["hidden_size"]
    further |= {
        f"model.layers.{count}.eh_proj.weight": (hidden, 2 * hidden),
        f"model.layers.{count}.enorm.weight": (hidden,),
    }
    write_safetensors(
        root / "model.safetensors", [T(name, "BF16", shape) for name, shape in (shapes | further).items()]
    )
    assert alarms(validate(root)) == set()


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", "8"), ("intermediate_size", 16.0), ("num_hidden_layers", True), ("vocab_size", 264.5)],
)
def test_a_size_that_is_no_whole_number_blocks(tmp_path, key, value):
    flaw = only(validate(micro(tmp_path / "m", **{key: value})), "size-absurd")
    assert (flaw.pointer, flaw.found, flaw.expected) == (f"/{key}", value, {"type": "int"})


def test_weight_files_without_a_tensor_are_no_weights(tmp_path):
    assert only(validate(micro(tmp_path / "m", tensors=[])), "weights-absent").severity == "block"
