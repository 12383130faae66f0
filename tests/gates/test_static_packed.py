"""Packed weights under every family's names: they are declared, every layer has them, and each has its scales."""

import re

import pytest

from tests.support.checkpoints import WIDTHS, T, alarms, only, validate, write_safetensors
from tests.support.layouts import tensors_of, write_layout

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
PACKED = re.compile(r"\.(layers|h)\.\d+\.(?!.*(norm|ln_|gate\.weight|router|shared_expert_gate)).*\.weight")
FAMILIES = [
    "llama",
    "qwen2",
    "gemma3_text",
    "mixtral",
    "qwen2_moe",
    "deepseek_v2-lite",
    "phi",
    "phi3",
    "starcoder2",
    "falcon",
    "falcon-new",
    "stablelm",
    "gpt2",
    "gpt_neox",
]


def gptq(module, out, into):
    yield T(f"{module}.qweight", "I32", (into // 8, out))
    yield T(f"{module}.qzeros", "I32", (into // 8, out // 8))
    yield T(f"{module}.scales", "F16", (into // 8, out))


def nvfp4(module, out, into):
    yield T(f"{module}.weight", "U8", (out, into // 2))
    yield T(f"{module}.weight_scale", "F8_E4M3", (out, into // 16))
    yield T(f"{module}.weight_scale_2", "F32", (1,))


def packed(root, name, pack=gptq, *, drop=".no", **changes):
    """A layout whose linear layers are packed, but the last one that matches `drop`."""
    write_layout(root, name, **changes)
    found, plain = [], [one for one in tensors_of(name) if PACKED.search(one)]
    left = next((one for one in reversed(plain) if drop in one), None)
    for one, shape in tensors_of(name).items():
        is_packed = one in plain and one != left
        found += pack(one.removesuffix(".weight"), *shape) if is_packed else [T(one, "BF16", shape)]
    write_safetensors(root / "model.safetensors", sorted(found, key=lambda one: -WIDTHS[one.dtype]))
    return root


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_layers_are_known_by_every_family_s_names(tmp_path, name):
    assert alarms(validate(packed(tmp_path / "a", name, quantization_config=GPTQ))) == set()
    assert only(validate(packed(tmp_path / "b", name)), "quant-config-mismatch").found["method"] is None
    plain = only(validate(write_layout(tmp_path / "c", name, quantization_config=GPTQ)), "quant-config-mismatch")
    assert (plain.found["carried"], plain.severity) == (0, "block")
    left = only(validate(packed(tmp_path / "d", name, drop="", quantization_config=GPTQ)), "quant-config-mismatch")
    assert left.found["carried"] == left.found["of"] - 1


@pytest.mark.parametrize("name", ["llama", "falcon", "gpt_neox", "qwen3_moe"])
def test_numbers_of_four_bits_need_a_method(tmp_path, name):
    assert alarms(validate(packed(tmp_path / "a", name, nvfp4, quantization_config=NVFP4))) == set()
    assert "quant-config-mismatch" in alarms(validate(packed(tmp_path / "b", name, nvfp4)))


def test_blocks_of_experts_need_a_method(tmp_path):
    root = write_layout(tmp_path / "m", "gpt_oss")
    blocks = []
    for one, shape in tensors_of("gpt_oss").items():
        if one.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks += [T(f"{one}_blocks", "U8", (*shape[:2], 1, 16)), T(f"{one}_scales", "U8", (*shape[:2], 1))]
        else:
            blocks.append(T(one, "BF16", shape))
    write_safetensors(root / "model.safetensors", sorted(blocks, key=lambda one: -WIDTHS[one.dtype]))
    assert only(validate(root), "quant-config-mismatch").found["packed"] == 6
    write_layout(tmp_path / "n", "gpt_oss", quantization_config={"quant_method": "mxfp4"})
    (root / "config.json").write_bytes((tmp_path / "n" / "config.json").read_bytes())
    assert alarms(validate(root)) == set()


def test_packed_weights_need_their_scales(tmp_path):
    def unscaled(module, out, into):
        return (one for one in gptq(module, out, into) if "k_proj" not in module or not one.name.endswith("scales"))

    flaw = only(validate(packed(tmp_path / "m", "llama", unscaled, quantization_config=GPTQ)), "quant-config-mismatch")
    assert (flaw.found["unscaled"], flaw.found["modules"][0]) == (3, "model.layers.0.self_attn.k_proj")
