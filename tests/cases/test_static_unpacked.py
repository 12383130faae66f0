"""Neighbours of the incident cases of quantization: what stands beside packed weights, and what nothing could read."""

import struct

import pytest

from tests.support.checkpoints import WIDTHS, T, alarms, micro_config, only, validate, write_json, write_safetensors
from tests.support.layouts import tensors_of, write_layout
from tests.support.published import decoder, gptq, nf4, nvfp4, packed_tensors, scaled

SIZES = {"layers": 2, "hidden": 256, "heads": 4, "keys": 2, "inner": 512, "rows": 512, "head": 64}
TOLD = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
TOLD |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "eos_token_id": 2}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
OPT4, OPT8 = ({"quant_method": "modelopt", "quant_algo": kind, "ignore": ["lm_head"]} for kind in ("NVFP4", "FP8"))
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
W8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
A8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
N4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
DOWN = "model.layers.1.mlp.down_proj"
CODE = "quant-config-mismatch"
VLLM = {"name": "vllm", "version": "0.32.0"}


def groups(form, weights, inputs=None, **more):
    one = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    told = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return told | {"config_groups": {"group_0": one}} | more


def eight(name, out, into):
    yield T(f"{name}.weight_scale", "F32", (1,), struct.pack("<f", 0.5))
    yield T(f"{name}.input_scale", "F32", (1,), struct.pack("<f", 0.5))
    yield T(f"{name}.weight", "F8_E4M3", (out, into))


def four(name, out, into):
    for end in ("weight_global_scale", "input_global_scale"):
        yield T(f"{name}.{end}", "F32", (1,))
    yield T(f"{name}.weight_packed", "U8", (out, into // 2))
    yield T(f"{name}.weight_scale", "F8_E4M3", (out, into // 16))


def awq(*told):
    return gptq(128, has_order=False, is_awq=True)(*told)


def made(root, wrap, told, *, without=None, reshaped=None):
    """A small Llama whose linear layers are stored as `wrap` says, without some tensors or with one reshaped."""
    root.mkdir()
    write_json(root / "config.json", micro_config(**TOLD, quantization_config=told))
    tensors = [one for one in decoder(**SIZES, wrap=wrap) if without is None or not one.name.endswith(without)]
    name, shape = reshaped or ("", ())
    tensors = [one._replace(shape=shape, data=None) if one.name == name else one for one in tensors]
    write_safetensors(root / "model.safetensors", sorted(tensors, key=lambda one: -WIDTHS[one.dtype]))
    return root


def own_static(name, out, into):
    """As transformers writes 8-bit floats with a scale for their inputs."""
    for end in ("weight_scale_inv", "activation_scale"):
        yield T(f"{name}.{end}", "F32", (), struct.pack("<f", 0.5))
    yield T(f"{name}.weight", "F8_E4M3", (out, into))


def in_four(name, out, into):
    """As ModelOpt writes blocks, whose scales have four sizes."""
    yield T(f"{name}.weight_scale", "F32", (-(-out // 128), 1, -(-into // 128), 1))
    yield T(f"{name}.weight", "F8_E4M3", (out, into))


def halved(name, out, into):
    """As Marlin wants weights of which half are zeros."""
    yield T(f"{name}.weight_packed", "I32", (into // 32, out * 2))
    yield T(f"{name}.meta", "I32", (into // 32, out))
    yield T(f"{name}.scale_packed", "F16", (into // 128, out))
    yield T(f"{name}.weight_scale", "F16", (into // 128, out))


SOUND = {
    "fp8-own-static": (own_static, STATIC),
    "modelopt-blocks": (in_four, OPT8 | {"quant_algo": "FP8_PB_WO"}),
    "halved": (halved, groups("marlin-24", W4)),
    "gptq": (gptq(128), GPTQ),
    "awq": (awq, AWQ),
    "fp8": (scaled("weight_scale_inv", blocks=128), FP8),
    "fp8-static": (eight, STATIC),
    "modelopt-4": (nvfp4, OPT4),
    "modelopt-8": (eight, OPT8),
    "packed": (packed_tensors, groups("pack-quantized", W4)),
    "floats": (eight, groups("float-quantized", W8, A8)),
    "four": (four, groups("nvfp4-pack-quantized", N4, N4 | {"dynamic": "local"})),
    "nf4": (nf4, BITS),
}


@pytest.mark.parametrize("name", SOUND)
def test_c057_what_a_method_writes_is_whole(tmp_path, name):
    assert alarms(validate(made(tmp_path / "m", *SOUND[name]))) == set()


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("gptq", "qzeros"),
        ("awq", "qzeros"),
        ("fp8-static", "input_scale"),
        ("modelopt-4", "weight_scale_2"),
        ("modelopt-8", "weight_scale"),
        ("modelopt-8", "input_scale"),
        ("floats", "input_scale"),
        ("four", "weight_global_scale"),
        ("four", "input_global_scale"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4"),
    ],
)
def test_c057_one_module_without_what_unpacks_it_is_named(tmp_path, name, suffix):
    flaw = only(validate(made(tmp_path / "m", *SOUND[name], without=f"{DOWN}.{suffix}")), CODE)
    assert (flaw.found["lacks"], flaw.found["modules"], flaw.severity) == (suffix, [DOWN], "block")


def test_c057_zero_points_that_are_said_are_there(tmp_path):
    flaw = only(
        validate(made(tmp_path / "m", packed_tensors, groups("pack-quantized", W4 | {"symmetric": False}))), CODE
    )
    assert (flaw.found["lacks"], flaw.found["count"]) == ("weight_zero_point", 14)
    told = GPTQ | {"sym": False}
    flaw = only(validate(made(tmp_path / "n", gptq(128), told, without=".qzeros")), CODE)
    assert (flaw.found["lacks"], flaw.found["count"]) == ("qzeros", 14)


@pytest.mark.parametrize(
    ("name", "told", "shapes"),
    [
        ("packed", groups("pack-quantized", W4 | {"group_size": 64}), ([256, 4], [256, 8])),
        ("packed", groups("pack-quantized", W4 | {"num_bits": 8}), ([256, 4], [256, 2])),
        ("packed", groups("pack-quantized", W4 | {"strategy": "channel"}), ([256, 4], [256, 1])),
        ("four", groups("nvfp4-pack-quantized", N4 | {"group_size": 32}), ([256, 32], [256, 16])),
        ("fp8", FP8 | {"weight_block_size": [64, 128]}, ([2, 4], [4, 4])),
        ("modelopt-4", OPT4 | {"group_size": 32}, ([256, 32], [256, 16])),
    ],
)
def test_c057_scales_are_as_many_as_the_declaration_makes(tmp_path, name, told, shapes):
    flaw = only(validate(made(tmp_path / "m", SOUND[name][0], told)), CODE)
    assert (flaw.found["module"], flaw.found["count"]) == ("model.layers.0.mlp.down_proj", 14)
    assert (flaw.found["shape"], flaw.expected["shape"]) == shapes


def test_c057_the_scales_of_one_module_are_told_with_its_name(tmp_path):
    name = f"{DOWN}.weight_scale_inv"
    flaw = only(validate(made(tmp_path / "m", *SOUND["fp8"], reshaped=(name, (3, 4)))), CODE)
    assert (flaw.found["tensor"], flaw.found["shape"], flaw.expected["shape"]) == (name, [3, 4], [2, 4])


@pytest.mark.parametrize(
    "told",
    [
        groups("pack-quantized", W4, ignore=["lm_head", DOWN]),
        groups(
            "pack-quantized", W4, config_groups={"g": {"targets": ["re:.*(attn|gate_proj|up_proj).*"], "weights": W4}}
        ),
    ],
)
def test_c057_a_module_that_is_left_out_is_not_packed(tmp_path, told):
    flaw = only(validate(made(tmp_path / "m", packed_tensors, told)), CODE)
    assert DOWN in flaw.found["modules"]


def blocks(root, change):
    """A layout of gpt-oss whose experts are in blocks; `change` gives another type, shape or None for a name."""
    write_layout(root, "gpt_oss", quantization_config={"quant_method": "mxfp4"})
    found = []
    for name, shape in tensors_of("gpt_oss").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found.append(T(name, "BF16", shape))
            continue
        for end, size in (("_blocks", (*shape[:2], 1, 16)), ("_scales", (*shape[:2], 1))):
            kept = change(name + end, size)
            found += [T(name + end, "U8", kept)] if kept else []
    write_safetensors(root / "model.safetensors", sorted(found, key=lambda one: -WIDTHS[one.dtype]))
    return validate(root)


@pytest.mark.parametrize(
    ("end", "change", "key", "value"),
    [
        ("scales", lambda _: None, "lacks", "scales"),
        ("scales", lambda size: (*size[:2], 2), "tensor", "model.layers.1.mlp.experts.down_proj_scales"),
        ("blocks", lambda size: (*size[:3], 8), "tensor", "model.layers.1.mlp.experts.down_proj_blocks"),
    ],
)
def test_c057_blocks_of_experts_have_a_scale_each(tmp_path, end, change, key, value):
    name = f"model.layers.1.mlp.experts.down_proj_{end}"
    flaw = only(blocks(tmp_path / "m", lambda one, size: change(size) if one == name else size), CODE)
    assert (flaw.found[key], flaw.severity) == (value, "block")
    assert alarms(blocks(tmp_path / "n", lambda _, size: size)) == set()


@pytest.mark.parametrize(
    ("told", "pointer"),
    [
        (GPTQ | {"bits": "four"}, "/bits"),
        (GPTQ | {"group_size": 0}, "/group_size"),
        (FP8 | {"weight_block_size": [128]}, "/weight_block_size"),
        (FP8 | {"activation_scheme": "sometimes"}, "/activation_scheme"),
        (groups("marlin-99", W4), "/format"),
        (groups("pack-quantized", W4, config_groups={}), "/config_groups"),
        ([GPTQ], ""),
        ("gptq", ""),
    ],
)
def test_c057_a_declaration_that_nothing_reads_blocks(tmp_path, told, pointer):
    root = tmp_path / "m"
    root.mkdir()
    write_json(root / "config.json", micro_config(**TOLD, quantization_config=told))
    flaw = only(validate(root, {"engine": VLLM}), CODE)
    assert (flaw.pointer, flaw.severity) == (f"/quantization_config{pointer}", "block")


@pytest.mark.parametrize(
    ("told", "version", "words", "stored", "taken"),
    [
        (GPTQ, "0.32.0", ["--dtype", "float32"], "float16", ["float16", "bfloat16"]),
        (FP8, "0.32.0", ["--dtype", "float"], "bfloat16", ["float16", "bfloat16"]),
        ({"quant_method": "mxfp4"}, "0.32.0", ["--dtype", "half"], "bfloat16", ["bfloat16"]),
        ({"quant_method": "mxfp4"}, "0.10.1", [], "float16", ["bfloat16"]),
        (AWQ, "0.10.1", ["--quantization", "awq"], "bfloat16", ["float16"]),
        (AWQ, "0.10.1", ["--quantization", "awq", "--dtype", "half"], "bfloat16", None),
        (AWQ, "0.10.1", [], "bfloat16", None),
        (AWQ, "0.32.0", ["--quantization", "awq"], "bfloat16", None),
        (GPTQ, "0.32.0", [], "float32", None),
        (groups("pack-quantized", W4), "0.32.0", ["--dtype", "float32"], "bfloat16", None),
    ],
)
def test_c057_a_method_has_kernels_for_some_types_of_numbers(tmp_path, told, version, words, stored, taken):
    root = tmp_path / "m"
    root.mkdir()
    write_json(root / "config.json", micro_config(**TOLD, quantization_config=told, torch_dtype=stored))
    found = validate(root, {"engine": {"name": "vllm", "version": version, "arguments": words}})
    flaws = [one for one in found.flaws if one.code == "quant-method-unsupported"]
    assert [one.expected["dtype"] for one in flaws] == ([] if taken is None else [taken])
