"""Neighbours of the incident cases of layouts over devices: other ways to say the same, and sound ones beside them."""

import pytest

from tests.support.checkpoints import (
    alarms,
    codes,
    micro,
    micro_config,
    micro_tensors,
    only,
    validate,
    write_json,
    write_safetensors,
)

WIDE = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "vocab_size": 32000,
    "intermediate_size": 14336,
}
VLLM, SGLANG = {"name": "vllm", "version": "0.32.0"}, {"name": "sglang", "version": "0.5.4"}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
W8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(*groups, **more):
    told = {f"group_{n}": {"targets": targets, "weights": weights} for n, (targets, weights) in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": told, **more}


def config_only(root, **changes):
    root.mkdir(parents=True)
    write_json(root / "config.json", micro_config(**(WIDE | changes)))
    return root


def blocked(root, code, *, degree, engine=VLLM, **declared):
    found = validate(root, {"engine": engine, "topology": {"tp": degree}} | declared)
    return code in codes(found, "block")


SHARED = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 4,
    "intermediate_size": 10240,
}


@pytest.mark.parametrize(
    ("changes", "told", "is_cut"),
    [
        ({"intermediate_size": 11008}, compressed((["re:.*self_attn.*"], W8), (["re:.*mlp.*"], W4)), True),
        ({"intermediate_size": 11008}, compressed((["re:.*self_attn.*"], W4), (["re:.*mlp.*"], W8)), False),
        ({"intermediate_size": 11008}, compressed((["re:.*mlp.*"], W8), (["Linear"], W4)), False),
        ({"intermediate_size": 11008}, compressed((["Linear"], W4), ignore=["re:.*mlp.*"]), False),
        ({"intermediate_size": 11008}, GPTQ, False),
        ({"intermediate_size": 11008}, GPTQ | {"dynamic": {"+:.*down_proj": {"group_size": 128}}}, True),
        ({"intermediate_size": 11008}, AWQ | {"dynamic": {"+:.*down_proj": {"group_size": 32}}}, False),
        ({"intermediate_size": 11008}, AWQ | {"modules_to_not_convert": ["model.layers.0.mlp.down_proj"]}, False),
        ({"intermediate_size": 11008}, AWQ | {"modules_to_not_convert": ["model.layers.1.mlp.down_proj"]}, True),
        ({"head_dim": 80}, compressed((["Linear"], W4)), False),
        ({"head_dim": 72}, compressed((["Linear"], W4)), True),
        ({"head_dim": 72}, compressed((["Linear"], W4), ignore=["re:.*self_attn.*"]), False),
    ],
)
def test_c052_the_group_of_each_module_counts(tmp_path, changes, told, is_cut):
    assert (
        blocked(config_only(tmp_path / "m", **changes, quantization_config=told), "quant-group-tp", degree=4) is is_cut
    )


def test_c052_shared_experts_are_divided_although_experts_are_spread(tmp_path):
    root = config_only(tmp_path / "m", **SHARED, quantization_config=AWQ)
    spread = VLLM | {"arguments": ["--enable-expert-parallel"]}
    flaw = only(validate(root, {"engine": spread, "topology": {"tp": 4}}), "quant-group-tp")
    assert (flaw.found["shared_experts_width"], flaw.found["groups"]) == (2816, 5.5)
    assert not blocked(root, "quant-group-tp", degree=2, engine=spread)


@pytest.mark.parametrize(
    ("told", "is_cut"),
    [
        (FP8, True),
        (compressed((["Linear"], BLOCK | {"block_structure": "128x128"})), True),
        (compressed((["re:.*q_proj"], W8), (["Linear"], BLOCK)), True),
        (compressed((["re:.*self_attn.*"], BLOCK), (["Linear"], W8)), False),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, False),
        (FP8 | {"modules_to_not_convert": ["mlp.down_proj"]}, False),
    ],
)
def test_c054_the_blocks_of_each_module_count(tmp_path, told, is_cut):
    root = config_only(tmp_path / "m", intermediate_size=18432, quantization_config=told)
    assert blocked(root, "fp8-block-tp", degree=32) is is_cut


@pytest.mark.parametrize(
    ("engine", "keys", "degree", "is_cut"),
    [
        (SGLANG, 8, 8, True),
        (SGLANG, 8, 4, False),
        (SGLANG, 4, 8, True),
        ({"name": "vllm", "version": "0.11.0"}, 8, 8, True),
        (VLLM, 8, 8, False),
        (SGLANG, 1, 1, True),
        (SGLANG, 2, 1, False),
        ({"name": "vllm", "version": "0.11.0"}, 1, 1, True),
        (VLLM, 1, 1, False),
    ],
)
def test_c054_a_share_of_the_keys_is_whole_blocks_where_an_engine_merges_no_others(
    tmp_path, engine, keys, degree, is_cut
):
    sizes = {"num_attention_heads": 64, "num_key_value_heads": keys, "head_dim": 64}
    root = config_only(tmp_path / "m", **sizes, quantization_config=FP8)
    assert blocked(root, "fp8-block-tp", degree=degree, engine=engine) is is_cut


def test_c054_only_degrees_that_fit_every_rule_are_offered(tmp_path):
    sizes = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 256 * 3}
    root = config_only(tmp_path / "m", **sizes, quantization_config=FP8)
    found = validate(root, {"engine": SGLANG, "topology": {"tp": 8}})
    told = [one for one in found.flaws if one.code == "fp8-block-tp"]
    assert {tuple(one.expected["tp"]) for one in told} == {(1, 2)}  # of the keys alone it would be 4 too
    assert {"key_width": 512, "tp": 8, "per_device": 64, "remainder": 64} in [one.found for one in told]
    root = config_only(tmp_path / "n", **sizes | {"num_key_value_heads": 1}, quantization_config=FP8)
    flaw = only(validate(root, {"engine": SGLANG}), "fp8-block-tp")
    assert flaw.expected["tp"] == []
    assert flaw.advice.startswith("No degree fits")


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize(
    ("order", "version", "strategies"),
    [
        ("static", "0.15.0", {"channel", "tensor"}),
        ("static", "0.17.0", {"channel"}),
        ("WEIGHT", "0.17.0", {"channel"}),
        ("dynamic", "0.17.0", {"channel", "tensor"}),
        ("group", "0.17.0", {"channel", "tensor"}),
        (True, "0.17.0", {"channel", "tensor"}),
        (None, "0.15.0", set()),
        (False, "0.15.0", set()),
        ("static", "0.17.1", set()),
    ],
)
def test_c061_each_order_has_its_versions_and_any_group_counts(tmp_path, order, version, strategies, strategy):
    weights = {"num_bits": 8, "type": "int", "strategy": strategy, "actorder": order}
    told = compressed((["re:.*self_attn.*"], W4 | {"actorder": "group"}), (["Linear"], weights))
    root = config_only(tmp_path / "m", quantization_config=told)
    engine = VLLM | {"build": {"compressed_tensors": version}}
    assert blocked(root, "quant-lib-rejects", degree=1, engine=engine) is (strategy in strategies)


@pytest.mark.parametrize(
    ("changes", "engine", "expected"),
    [
        ({"num_global_key_value_heads": 4}, VLLM, "kv-replicated"),
        ({"num_global_key_value_heads": 4}, {"name": "tgi"}, "kv-heads-lt-tp"),
        ({"num_global_key_value_heads": 8}, {"name": "tgi"}, None),
        ({"swa_num_key_value_heads": 3}, VLLM, "kv-heads-lt-tp"),
        ({"num_key_value_heads_per_layer": [8, 3]}, VLLM, "kv-heads-lt-tp"),
        ({"num_key_value_heads": [8, 12]}, VLLM, "kv-heads-lt-tp"),
        ({"num_key_value_heads": [8, 8]}, VLLM, None),
        ({"linear_num_key_heads": 12}, VLLM, "heads-tp"),
        ({"linear_num_key_heads": 16, "linear_num_value_heads": 32}, VLLM, None),
        ({"mamba_n_heads": 100, "mamba_n_groups": 1}, VLLM, "heads-tp"),
        ({"mamba_n_heads": 128, "mamba_n_groups": 3}, VLLM, "heads-tp"),
        ({"mamba_n_heads": 128, "mamba_n_groups": 1}, VLLM, None),
    ],
)
def test_c066_heads_of_every_kind_of_layer_are_divided_or_copied(tmp_path, changes, engine, expected):
    root = config_only(tmp_path / "m", **changes)
    found = validate(root, {"engine": engine, "topology": {"tp": 8}})
    assert {code for code in codes(found) if code.startswith(("kv-", "heads-"))} == ({expected} if expected else set())


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
WORDS = ["--tp", "16", "--ep", "16", "--dp"]


@pytest.mark.parametrize(
    ("words", "devices", "expected"),
    [
        ([*WORDS, "16", "--enable-dp-attention"], 16, set()),
        ([*WORDS, "4", "--enable-dp-attention"], 16, set()),
        ([*WORDS, "2", "--enable-dp-attention"], 16, {"kv-replicated"}),
        ([*WORDS, "2"], 16, {"kv-replicated", "devices-short"}),
        ([*WORDS, "1"], 8, {"kv-replicated", "devices-short"}),
    ],
)
def test_c066_attention_that_groups_of_devices_do_for_themselves_is_divided_less(tmp_path, words, devices, expected):
    root = config_only(tmp_path / "m", **EXPERTS)
    found = validate(root, {"engine": SGLANG | {"arguments": words}, "hardware": {"count": devices}})
    assert codes(found) - {"weights-absent"} == expected


@pytest.mark.parametrize(
    ("version", "words", "length", "consolidated", "is_fault"),
    [
        ("0.32.0", [], 32768, True, True),
        ("0.32.0", ["--config-format", "auto"], 32768, True, True),
        ("0.32.0", ["--config-format", "hf"], 32768, True, False),
        ("0.11.0", [], 32768, True, False),
        ("0.32.0", [], 32768, False, False),
        ("0.32.0", [], 131072, True, False),
        ("0.32.0", [], None, True, False),
        ("0.32.0", ["--config_format=mistral"], 32768, False, True),
        ("0.32.0", ["--config-format", "mistral"], 131072, False, False),
    ],
)
def test_c070_the_file_that_an_engine_takes_by_itself_decides_too(
    tmp_path, version, words, length, consolidated, is_fault
):
    root = micro(tmp_path / "m", max_position_embeddings=131072)
    write_json(root / "params.json", {"dim": 8} | ({"max_position_embeddings": length} if length else {}))
    if consolidated:
        write_safetensors(root / "consolidated.safetensors", micro_tensors())
    engine = {"name": "vllm", "version": version, "arguments": [*words, "--max-model-len", "131072"]}
    found = validate(root, {"engine": engine})
    assert ("config-sources-disagree" in codes(found, "block")) is is_fault
    assert alarms(found) <= {"config-sources-disagree", "duplicate-weight-sets", "engine-version-untried"}
    if is_fault:
        assert only(found, "config-sources-disagree").found["effective"] == 32768


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "quantization_config": FP8,
}
SPREAD = ["--tp-size", "32", "--dp-size", "32", "--enable-dp-attention"]


@pytest.mark.parametrize(
    ("words", "cut"),
    [
        ([*SPREAD, "--moe-a2a-backend", "deepep", "--moe-dense-tp-size", "1"], set()),
        ([*SPREAD, "--moe-a2a-backend", "deepep"], {"intermediate_size"}),
        ([*SPREAD, "--moe-dense-tp-size", "1", "--ep-size", "32"], {"shared_experts_width"}),
        ([*SPREAD, "--moe-dense-tp-size", "1"], {"moe_intermediate_size", "shared_experts_width"}),
    ],
)
def test_c054_layers_that_no_device_shares_are_cut_by_nothing(tmp_path, words, cut):
    found = validate(config_only(tmp_path / "m", **DEEPSEEK), {"engine": SGLANG | {"arguments": words}})
    told = {key for one in found.flaws if one.code == "fp8-block-tp" for key in one.found}
    assert told - {"tp", "per_device", "remainder"} == cut


BLOCKS = compressed((["Linear"], BLOCK))


@pytest.mark.parametrize(
    ("inner", "degree", "engine", "words", "told", "remainder"),
    [
        (768, 8, ("vllm", "0.31.0"), [], FP8, 96),
        (768, 8, ("sglang", "0.5.23"), [], FP8, 96),
        (768, 8, ("vllm", "0.32.0"), [], FP8, None),  # its scales are repeated for blocks of 32
        (768, 8, ("vllm", "0.32.0"), [], BLOCKS, 96),  # and those of compressed-tensors are not
        (768, 2, ("vllm", "0.31.0"), [], FP8, None),
        (704, 1, ("vllm", "0.31.0"), [], FP8, 64),  # gate and up are merged on one device too
        (704, 1, ("vllm", "0.32.0"), [], FP8, None),
        (720, 1, ("vllm", "0.32.0"), [], FP8, 80),
        (704, 4, ("vllm", "0.31.0"), ["--enable-expert-parallel"], FP8, 64),  # experts are whole, and cut all the same
        (768, 4, ("vllm", "0.31.0"), ["--enable-expert-parallel"], FP8, None),
    ],
)
def test_c054_the_blocks_of_experts_are_whole_on_each_device(tmp_path, inner, degree, engine, words, told, remainder):
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128}
    root = config_only(tmp_path / "m", **experts, moe_intermediate_size=inner, quantization_config=told)
    name, version = engine
    found = validate(
        root, {"engine": {"name": name, "version": version, "arguments": words}, "topology": {"tp": degree}}
    )
    flaws = [one for one in found.flaws if one.code == "fp8-block-tp" and "moe_intermediate_size" in one.found]
    assert [one.found["remainder"] for one in flaws] == ([] if remainder is None else [remainder])
