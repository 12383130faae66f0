"""Each tensor that an architecture needs is missed when it is gone, and none is asked for that it lacks."""

import pytest

from gates.static.names import HEADS, embedding, in_layers
from gates.static.required import missing, needed
from gates.static.rules import table
from gates.static.shape import families, shape_of
from tests.support.checkpoints import WIDTHS, T, codes, micro_config, only, validate, write_json, write_safetensors
from tests.support.layouts import LAYOUTS, config_of, tensors_of, write_layout

CONSTANT = ("act_fn.beta", "act_fn.eps")
"""What a library writes and no checkpoint needs."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_library_writes_is_what_its_architecture_needs(name):
    tensors = tensors_of(name)
    wanted = list(needed(shape_of(config_of(name)), in_layers(tensors), embedding(tensors)))
    assert missing(wanted, tensors, {}) == []
    named = {one.name: one.shape for one in wanted if not one.begins}
    assert {one: shape for one, shape in named.items() if tensors[one] != shape} == {}
    last = f"{LAYOUTS[name]['prefix']}.{max(layer for kind in LAYOUTS[name]['kinds'] for layer in kind['layers'])}."
    for gone in tensors:
        if gone.endswith((*HEADS, *CONSTANT)) or not (gone.startswith(last) or gone in LAYOUTS[name]["tensors"]):
            continue
        parts = [one.name for one in wanted if one.begins and gone.startswith(one.name)]
        if parts and sum(one.startswith(parts[0]) and not one.endswith("bias") for one in tensors) > 1:
            continue  # stored in several parts, of which any shows that it is there
        left = {one: shape for one, shape in tensors.items() if one != gone}
        lost = [one.name for one in missing(wanted, left, {})]
        assert lost == [gone] or (len(lost) == 1 and gone.startswith(lost[0])), gone


def test_every_table_is_held_against_what_a_library_writes():
    known = {name for name, one in families()["families"].items() if one.get("tensors")}
    tables = {families()["families"][config_of(name)["model_type"]]["tensors"] for name in LAYOUTS}
    assert tables == {families()["families"][name]["tensors"] for name in known} == set(families()["tensors"])
    told = table("required")
    assert set(told["families"]) <= known
    assert {rule for rules in told["families"].values() for rule in rules} == set(told["rules"])


@pytest.mark.parametrize(
    ("name", "without", "count"),
    [
        ("qwen2", "_proj.bias", 9),
        ("qwen2", "k_proj.bias", 3),
        ("qwen2_moe", "v_proj.bias", 3),
        ("qwen2_moe", "shared_expert_gate.weight", 3),
        ("qwen3", "q_norm.weight", 3),
        ("qwen3_moe", "mlp.gate.weight", 3),
        ("gemma3_text", "k_norm.weight", 3),
        ("gemma2", "pre_feedforward_layernorm.weight", 3),
        ("mixtral", "block_sparse_moe.gate.weight", 3),
        ("mixtral", "experts.3.w2.weight", 3),
        ("deepseek_v2", "kv_b_proj.weight", 3),
        ("deepseek_v3", "kv_a_layernorm.weight", 3),
        ("deepseek_v3", "e_score_correction_bias", 2),
        ("deepseek_v3", "shared_experts.up_proj.weight", 2),
        ("gpt_oss", "self_attn.sinks", 3),
        ("gpt_oss", "mlp.router.bias", 3),
        ("gpt_oss", "mlp.experts.down_proj", 3),
        ("starcoder2", "c_fc.bias", 3),
        ("phi", "final_layernorm.bias", 1),
        ("llama-bias", "down_proj.bias", 3),
        ("cohere-qk", "q_norm.weight", 3),
        ("falcon", "query_key_value.weight", 3),
        ("falcon-new", "ln_mlp.bias", 3),
        ("stablelm-all", "v_proj.bias", 3),
        ("gpt2", "c_attn.bias", 3),
        ("gpt_neox", "final_layer_norm.bias", 1),
        ("granitemoe", "router.layer.weight", 3),
        ("phimoe-bias", "lm_head.bias", 1),
        ("glm4_moe-qk", "k_norm.weight", 3),
        ("llama4_text", "feed_forward.router.weight", 3),
        ("minimax_m2", "e_score_correction_bias", 3),
        ("deepseek_v32", "indexer.wk.weight", 3),
    ],
)
def test_a_kind_of_tensor_that_no_layer_has_blocks(tmp_path, name, without, count):
    found = validate(write_layout(tmp_path / "m", name, without=without))
    assert only(found, "tensor-missing").found["count"] == count
    assert found.verdict == "failed"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_as_its_library_writes_it_raises_nothing(tmp_path, name):
    assert codes(validate(write_layout(tmp_path / "m", name)), "block", "warn") == set()


def test_settings_that_ask_for_no_biases_need_none(tmp_path):
    root = write_layout(tmp_path / "m", "qwen2", without="_proj.bias", attention_bias=False)
    assert "tensor-missing" not in codes(validate(root))
    root = write_layout(tmp_path / "n", "deepseek_v3", without="e_score_correction_bias", topk_method="greedy")
    assert "tensor-missing" not in codes(validate(root))


# ------------------------------------------------------------------------------------------ families without a table


def strange(root, *, drop=(), wrap=None, **changes):
    """A model of six layers whose family nobody knows, without the tensors that are dropped by layer and ending."""
    inner = ("attn.qkv.weight", "attn.qkv.bias", "attn.out.weight", "ffn.a.weight", "ffn.b.weight", "norm.weight")
    names = [f"model.layers.{layer}.{one}" for layer in range(6) for one in inner]
    kept = [one for one in names if not any(one.startswith(f"model.layers.{n}.") and one.endswith(e) for n, e in drop)]
    tensors = [T("model.embed_tokens.weight", "BF16", (264, 8)), T("lm_head.weight", "BF16", (264, 8))]
    tensors += [one for name in kept for one in (wrap(name) if wrap else [T(name, "BF16", (8, 8))])]
    root.mkdir(parents=True)
    config = micro_config(model_type="strange", architectures=["StrangeForCausalLM"], num_hidden_layers=6)
    write_json(root / "config.json", config | changes)
    write_safetensors(root / "model.safetensors", sorted(tensors, key=lambda one: -WIDTHS[one.dtype]))
    return root


KINDS = ["full_attention", "sliding_attention"] * 3


@pytest.mark.parametrize(
    ("drop", "changes", "layers"),
    [
        ([], {}, []),
        ([(4, "qkv.bias")], {}, [4]),
        ([(2, "norm.weight"), (4, "norm.weight")], {}, [2, 4]),
        ([(2, "norm.weight"), (4, "qkv.bias")], {}, [2, 4]),
        ([(n, "qkv.bias") for n in (1, 3, 5)], {}, []),
        ([(n, "qkv.bias") for n in (1, 3, 5)], {"layer_types": KINDS}, []),
        ([(1, "qkv.bias")], {"layer_types": KINDS}, [1]),
        ([(4, "qkv.weight"), (4, "qkv.bias")], {"block_configs": [{}] * 6}, []),
    ],
)
def test_layers_of_an_unknown_family_are_held_against_each_other(tmp_path, drop, changes, layers):
    found = [one for one in validate(strange(tmp_path / "m", drop=drop, **changes)).flaws if one.severity == "block"]
    assert sorted(one.found["layer"] for one in found) == layers
    assert {one.code for one in found} <= {"tensor-missing"}


def test_a_layer_that_is_left_unquantized_lacks_nothing(tmp_path):
    def eight_bits(name):
        if not name.endswith("weight") or "norm" in name or ".layers.0." in name:
            return [T(name, "BF16", (8, 8))]
        return [T(name, "F8_E4M3", (8, 8)), T(name.replace("weight", "weight_scale"), "F32", (1,))]

    told = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0"]}
    root = strange(tmp_path / "m", wrap=eight_bits, quantization_config=told)
    assert "tensor-missing" not in codes(validate(root))
