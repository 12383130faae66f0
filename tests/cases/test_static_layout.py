"""Incident cases of quantization, topology and context, in their named forms, with controls and neighbours."""

import struct

import pytest

from tests.support.checkpoints import (
    T,
    adapt,
    alarms,
    codes,
    micro,
    micro_config,
    micro_tensors,
    only,
    speak,
    validate,
    write_json,
    write_safetensors,
)


def config_only(root, **changes):
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / "config.json", micro_config(**changes))
    return root


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
WIDE = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "vocab_size": 32000,
}


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize(
    ("intermediate", "degree", "is_cut"),
    [(11008, 1, False), (11008, 2, False), (11008, 4, True), (13696, 1, False), (13696, 2, True), (13696, 4, True)],
)
def test_c052_groups_that_tensor_parallelism_cuts_block(tmp_path, intermediate, degree, is_cut, method):
    quantization = AWQ | {"quant_method": method}
    root = config_only(tmp_path / "m", **WIDE, intermediate_size=intermediate, quantization_config=quantization)
    found = validate(root, {"topology": {"tensor_parallel": degree}})
    assert ("quant-group-tp" in codes(found, "block")) is is_cut
    if is_cut:
        flaw = only(found, "quant-group-tp")
        assert flaw.found["per_device"] == intermediate // degree
        assert flaw.expected["group_size"] == 128
        assert degree not in flaw.expected["tp"]
    else:
        assert found.verdict == "passed"


def test_c052_the_degree_of_the_launch_arguments_counts(tmp_path):
    root = config_only(tmp_path / "m", **WIDE, intermediate_size=11008, quantization_config=AWQ)
    asked = {"engine": {"name": "vllm", "version": "0.32.0", "arguments": ["--tensor-parallel-size=4"]}}
    assert only(validate(root, asked), "quant-group-tp").found["groups"] == 21.5


def test_c052_compressed_tensors_and_experts_are_held_to_it_too(tmp_path):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    told = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    mixtral = WIDE | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
    root = config_only(tmp_path / "m", **mixtral, intermediate_size=14336, quantization_config=told)
    assert "quant-group-tp" not in codes(validate(root, {"topology": {"tp": 8}}))
    assert only(validate(root, {"topology": {"tp": 32}}), "quant-group-tp").found["groups"] == 3.5
    qwen = WIDE | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "moe_intermediate_size": 768,
    }
    root = config_only(tmp_path / "q", **qwen, intermediate_size=6144, quantization_config=told)
    assert only(validate(root, {"topology": {"tp": 4}}), "quant-group-tp").found["moe_intermediate_size"] == 768
    spread = {"topology": {"tp": 4}, "engine": {"name": "vllm", "arguments": ["--enable-expert-parallel"]}}
    assert "quant-group-tp" not in codes(validate(root, spread))


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("intermediate", "degree", "remainder"),
    [(18432, 8, None), (18432, 16, None), (18432, 32, 64), (1536, 8, 64), (1536, 4, None)],
)
def test_c054_blocks_that_tensor_parallelism_cuts_block(tmp_path, intermediate, degree, remainder):
    root = config_only(tmp_path / "m", **WIDE, intermediate_size=intermediate, quantization_config=FP8)
    found = validate(root, {"engine": {"name": "vllm", "version": "0.32.0"}, "topology": {"tp": degree}})
    assert ("fp8-block-tp" in codes(found, "block")) is (remainder is not None)
    if remainder is not None:
        assert only(found, "fp8-block-tp").found["remainder"] == remainder


def test_c054_an_engine_that_pads_blocks_lifts_it(tmp_path):
    root = config_only(tmp_path / "m", **WIDE, intermediate_size=18432, quantization_config=FP8)
    engine = {"name": "vllm", "version": "0.32.0", "build": {"fp8_sub_blocks": True}}
    assert "fp8-block-tp" not in codes(validate(root, {"engine": engine, "topology": {"tp": 32}}))


def test_c054_deepseek_s_latent_attention_and_experts_are_counted(tmp_path):
    deepseek = {
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
        "head_dim": None,
        "vocab_size": 129280,
        "quantization_config": FP8,
    }
    root = config_only(tmp_path / "m", **deepseek)
    engine = {"name": "sglang", "version": "0.5.4"}
    for degree in (8, 16):
        assert alarms(validate(root, {"engine": engine, "topology": {"tp": degree}})) == set()
    found = validate(root, {"engine": engine, "topology": {"tp": 32}})
    assert {key for one in found.flaws if one.code == "fp8-block-tp" for key in one.found} >= {"intermediate_size"}


# -------------------------------------------------------------------------------------------------- the tensors

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True}


def test_c057_plain_tensors_under_a_declared_method_are_counted(tmp_path):
    found = validate(micro(tmp_path / "m", quantization_config=GPTQ))
    flaw = only(found, "quant-config-mismatch")
    assert (flaw.found["carried"], flaw.found["of"], flaw.found["method"]) == (0, 7, "gptq")
    assert "0 of 7 linear layers carry qweight" in flaw.message


@pytest.mark.parametrize(
    "told",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 8},
        {"quant_method": "fp8"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
        },
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ],
)
def test_c057_every_method_is_held_to_its_own_tensors(tmp_path, told):
    assert (
        only(validate(micro(tmp_path / "m", quantization_config=told)), "quant-config-mismatch").found["carried"] == 0
    )


def packed(*, group=8, bits=4, drop=()):
    """MICRO with its seven linear layers packed."""
    tensors = []
    for one in micro_tensors():
        if "_proj" not in one.name or one.name in drop:
            tensors.append(one)
            continue
        stem, (rows, columns) = one.name.removesuffix(".weight"), one.shape
        groups = columns // group
        order = b"".join(struct.pack("<i", place // group) for place in range(columns))
        tensors += [
            T(f"{stem}.qweight", "I32", (columns * bits // 32, rows)),
            T(f"{stem}.qzeros", "I32", (groups, max(1, rows * bits // 32))),
            T(f"{stem}.scales", "F16", (groups, rows)),
            T(f"{stem}.g_idx", "I32", (columns,), order),
        ]
    return sorted(tensors, key=lambda one: one.dtype == "F16")


def test_c057_packed_tensors_without_a_declared_method_block(tmp_path):
    flaw = only(validate(micro(tmp_path / "m", tensors=packed())), "quant-config-mismatch")
    assert (flaw.found["packed"], flaw.found["method"]) == (7, None)


def test_c057_packed_tensors_under_their_method_are_sound(tmp_path):
    assert alarms(validate(micro(tmp_path / "m", tensors=packed(), quantization_config=GPTQ))) == set()
    root = micro(tmp_path / "n", tensors=packed())
    write_json(root / "quantize_config.json", {key: GPTQ[key] for key in ("bits", "group_size", "desc_act")})
    assert alarms(validate(root)) == set()


def test_c057_one_layer_that_was_left_out_must_be_listed(tmp_path):
    drop = ("model.layers.0.mlp.down_proj.weight",)
    told = GPTQ | {"modules_to_not_convert": ["mlp.down_proj"]}
    assert alarms(validate(micro(tmp_path / "m", tensors=packed(drop=drop), quantization_config=told))) == set()
    found = validate(micro(tmp_path / "n", tensors=packed(drop=drop), quantization_config=GPTQ))
    assert (only(found, "quant-config-mismatch").found["carried"], found.verdict) == (6, "failed")


def module(root, order, *, desc_act=False, columns=256, group=128):
    """One GPTQ module of 256 × 8 in a file of its own, as the case has it."""
    root.mkdir(parents=True)
    told = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": desc_act}
    write_json(root / "config.json", {"quantization_config": told})
    stem, groups = "model.layers.0.mlp.down_proj", columns // group
    tensors = [
        T(f"{stem}.qweight", "I32", (columns // 8, 8)),
        T(f"{stem}.qzeros", "I32", (groups, 1)),
        T(f"{stem}.scales", "F16", (groups, 8)),
    ]
    if order is not None:
        tensors.insert(0, T(f"{stem}.g_idx", "I32", (columns,), b"".join(struct.pack("<i", one) for one in order)))
    write_safetensors(root / "model.safetensors", tensors)
    return root


def test_c059_an_order_of_zeros_uses_one_group_of_two(tmp_path):
    flaw = only(validate(module(tmp_path / "m", [0] * 256)), "g-idx-invalid")
    assert (flaw.found["groups"], flaw.expected["groups"]) == ([0], [0, 1])


@pytest.mark.parametrize(
    ("order", "desc_act", "expected"),
    [
        ([place // 128 for place in range(256)], False, set()),
        ([place % 2 for place in range(256)], True, set()),
        ([place % 2 for place in range(256)], False, {"g-idx-invalid"}),
        ([0] * 200 + [1] * 56, True, {"g-idx-invalid"}),
        ([0] * 128 + [2] * 128, False, {"g-idx-invalid"}),
        ([0] * 128 + [-1] * 128, True, {"g-idx-invalid"}),
        (None, True, {"g-idx-missing"}),
        (None, False, set()),
    ],
)
def test_c059_an_order_must_fit_its_groups(tmp_path, order, desc_act, expected):
    found = validate(module(tmp_path / "m", order, desc_act=desc_act))
    assert {code for code in codes(found) if code.startswith("g-idx")} == expected


@pytest.mark.parametrize(("bits", "is_fault"), [(2, False), (3, True), (4, False), (5, True), (8, False)])
def test_c060_bits_that_fill_no_word_block(tmp_path, bits, is_fault):
    root = config_only(tmp_path / "m", quantization_config=GPTQ | {"bits": bits, "group_size": 128})
    found = validate(root)
    assert ("quant-bits-unsupported" in codes(found, "block")) is is_fault
    if bits == 3:
        assert only(found, "quant-bits-unsupported").found == {"bits": 3, "pack_factor": 10.67}


def test_c060_what_an_engine_unpacks_is_its_own_table(tmp_path):
    root = config_only(tmp_path / "m", quantization_config=GPTQ | {"bits": 3, "group_size": 128})
    assert "quant-bits-unsupported" not in codes(validate(root, {"engine": {"name": "transformers", "version": "5.0"}}))
    assert "quant-bits-unsupported" in codes(validate(root, {"engine": {"name": "vllm", "version": "0.7.3"}}))
    two = config_only(tmp_path / "n", quantization_config=GPTQ | {"bits": 2, "group_size": 128})
    assert "quant-bits-unsupported" in codes(validate(two, {"engine": {"name": "trtllm", "version": "1.1"}}))


@pytest.mark.parametrize(
    ("version", "is_fault"), [("0.17.0", True), ("0.16.3", True), ("0.17.1", False), ("0.18.0", False)]
)
@pytest.mark.parametrize("place", ["group", "top"])
def test_c061_a_library_in_the_image_decides(tmp_path, version, is_fault, place):
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "actorder": "static"}
    told = {"quant_method": "compressed-tensors"}
    told |= {"config_groups": {"group_0": {"weights": weights}}} if place == "group" else {"weights": weights}
    root = config_only(tmp_path / "m", quantization_config=told)
    engine = {"name": "vllm", "version": "0.32.0", "build": {"compressed-tensors": version}}
    found = validate(root, {"engine": engine})
    assert ("quant-lib-rejects" in codes(found, "block")) is is_fault
    if is_fault:
        assert only(found, "quant-lib-rejects").found["version"] == version


def test_c061_a_library_that_is_not_known_or_a_field_that_is_not_there_is_no_fault(tmp_path):
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    told = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    root = config_only(tmp_path / "m", quantization_config=told)
    assert alarms(validate(root, {"engine": {"name": "vllm", "build": {"compressed-tensors": "0.17.0"}}})) == set()
    weights["actorder"] = "static"
    root = config_only(tmp_path / "n", quantization_config=told)
    assert alarms(validate(root, {"engine": {"name": "vllm"}})) == set()


@pytest.mark.parametrize(
    ("engine", "accelerator", "severity"),
    [
        ("sglang", "sm_86", "block"),
        ("vllm", "sm_86", "warn"),
        ("vllm", "nvidia-a10g", "warn"),
        ("sglang", "NVIDIA A100-SXM4-80GB", "block"),
        ("vllm", "sm_75", "block"),
        ("vllm", "Tesla T4", "block"),
        ("vllm", "sm_89", None),
        ("sglang", "sm_89", None),
        ("vllm", "sm_90", None),
        ("sglang", "H100", None),
        ("vllm", "nvidia-l4", None),
        ("vllm", "cpu", None),
    ],
)
@pytest.mark.parametrize("key", ["accelerator", "gpu_arch"])
def test_c062_eight_bit_floats_need_gpus_that_have_them(tmp_path, engine, accelerator, severity, key):
    root = config_only(tmp_path / "m", quantization_config={"quant_method": "fp8"})
    found = validate(root, {"engine": {"name": engine}, "hardware": {key: accelerator}})
    assert {one.severity.value for one in found.flaws if one.code == "arch-unsupported"} == (
        {severity} if severity else set()
    )


@pytest.mark.parametrize(
    "told",
    [
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "fbgemm_fp8"},
    ],
)
def test_c062_every_way_to_say_it_counts(tmp_path, told):
    root = config_only(tmp_path / "m", quantization_config=told)
    asked = {"engine": {"name": "sglang"}, "hardware": {"accelerator": "sm_86"}}
    assert "arch-unsupported" in codes(validate(root, asked), "block")
    other = config_only(tmp_path / "n", quantization_config=AWQ)
    assert "arch-unsupported" not in codes(validate(other, asked))


# ----------------------------------------------------------------------------------------------------- topology


@pytest.mark.parametrize(
    ("engine", "keys", "degree", "expected"),
    [
        ({"name": "vllm"}, 2, 4, "kv-replicated"),
        ({"name": "external", "rules": {"kv_replication": False}}, 2, 4, "kv-heads-lt-tp"),
        ({"name": "external", "kv_replication": False}, 2, 4, "kv-heads-lt-tp"),
        ({"name": "tgi"}, 2, 4, "kv-heads-lt-tp"),
        ({"name": "vllm"}, 3, 4, "kv-heads-lt-tp"),
        ({"name": "external", "build": {"kv_replication": "false"}}, 3, 4, "kv-heads-lt-tp"),
        ({"name": "vllm"}, 8, 4, None),
        ({"name": "tgi"}, 4, 4, None),
        ({"name": "vllm"}, 6, 4, "kv-heads-lt-tp"),
        ({"name": "vllm"}, 1, 8, "kv-replicated"),
    ],
)
def test_c066_fewer_key_value_heads_than_devices(tmp_path, engine, keys, degree, expected):
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": keys, "intermediate_size": 8192}
    root = config_only(tmp_path / "m", **sizes, head_dim=128)
    found = validate(root, {"engine": engine, "topology": {"tp": degree}})
    kinds = {one.code: one for one in found.flaws if one.code.startswith("kv-")}
    assert set(kinds) == ({expected} if expected else set())
    if expected == "kv-replicated":
        assert f"not reduced below tp {keys}" in kinds[expected].message
        assert alarms(found) == set()


@pytest.mark.parametrize(
    ("topology", "changes", "code"),
    [
        ({"tp": 3}, {}, "heads-tp"),
        ({"tp": 64}, {}, "heads-tp"),
        ({"pp": 5}, {"num_hidden_layers": 4}, "layers-pp"),
        ({"ep": 3}, {"model_type": "mixtral", "num_local_experts": 8}, "experts-ep"),
        ({"ep": 2}, {}, "experts-ep"),
        ({"tp": 16}, {"intermediate_size": 11000}, "intermediate-tp"),
    ],
)
def test_what_cannot_be_divided_blocks(tmp_path, topology, changes, code):
    root = config_only(tmp_path / "m", **(WIDE | {"intermediate_size": 11008} | changes))
    assert code in codes(validate(root, {"topology": topology}), "block")


@pytest.mark.parametrize(
    ("engine", "words", "degree", "is_fault"),
    [
        ("vllm", [], 4, False),
        ("vllm", ["--enable-eplb"], 4, True),
        ("vllm", ["--enable-eplb", "--eplb-config", '{"num_redundant_experts": 2}'], 4, False),
        ("vllm", [], 8, True),
        ("sglang", [], 4, True),
        ("sglang", ["--ep-num-redundant-experts", "2"], 4, False),
    ],
)
def test_experts_divide_where_the_engine_spreads_no_remainder(tmp_path, engine, words, degree, is_fault):
    sizes = WIDE | {"intermediate_size": 11008, "model_type": "mixtral", "num_local_experts": 6}
    version = {"vllm": "0.32.0", "sglang": "0.5.15"}[engine]
    told = {"engine": {"name": engine, "version": version, "arguments": words}, "topology": {"ep": degree}}
    root = config_only(tmp_path / "m", **sizes)
    assert ("experts-ep" in codes(validate(root, told), "block")) is is_fault
    if engine == "vllm":
        told = {"engine": told["engine"] | {"arguments": [*words, "--enable-expert-parallel", "-tp", str(degree)]}}
        assert ("experts-ep" in codes(validate(root, told), "block")) is is_fault


def test_a_layout_that_contradicts_itself_or_the_hardware_blocks(tmp_path):
    root = config_only(tmp_path / "m", **WIDE)
    asked = {"engine": {"name": "vllm", "arguments": ["-tp", "2"]}, "topology": {"tp": 4}, "hardware": {"count": 2}}
    assert codes(validate(root, asked), "block") == {"topology-arguments-differ", "devices-short"}


# ------------------------------------------------------------------------------------------------------ context


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [1.5, 8.0]}


@pytest.mark.parametrize("variables", [{}, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}])
def test_c069_more_context_than_positions_blocks_whatever_the_switch(tmp_path, variables):
    root = micro(tmp_path / "m")
    engine = {"name": "vllm", "version": "0.32.0", "arguments": ["--max-model-len", "512"], "variables": variables}
    assert only(validate(root, {"engine": engine}), "context-too-long").found == {"requested": 512, "derived": 128}


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        (128, {}),
        (512, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        (512, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}),
        (512, {"max_position_embeddings": 512, "rope_scaling": LLAMA3}),
        (512, {"max_position_embeddings": 512, "rope_scaling": LONGROPE}),
    ],
)
def test_c069_what_the_positions_and_their_scaling_allow_is_sound(tmp_path, asked, changes):
    engine = {"name": "vllm", "arguments": ["--max-model-len", str(asked)]}
    assert alarms(validate(micro(tmp_path / "m", **changes), {"engine": engine})) == set()


@pytest.mark.parametrize("changes", [{"rope_scaling": LLAMA3}])
def test_c069_a_scaling_that_is_in_the_positions_already_adds_none(tmp_path, changes):
    engine = {"name": "vllm", "arguments": ["--max-model-len", "512"]}
    assert "context-too-long" in codes(validate(micro(tmp_path / "m", **changes), {"engine": engine}), "block")


def test_c069_a_scaling_in_the_launch_arguments_counts(tmp_path):
    override = '{"rope_scaling":{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":128}}'
    engine = {"name": "vllm", "arguments": ["--max-model-len", "512", "--hf-overrides", override]}
    assert alarms(validate(micro(tmp_path / "m"), {"engine": engine})) == set()


MISTRAL = ["--config-format", "mistral", "--max-model-len", "131072"]


def test_c070_the_configuration_in_force_decides_the_length(tmp_path):
    root = micro(tmp_path / "m", max_position_embeddings=131072)
    write_json(root / "params.json", {"dim": 8, "n_layers": 1, "n_heads": 2})
    found = validate(root, {"engine": {"name": "vllm", "arguments": MISTRAL}})
    flaw = only(found, "config-sources-disagree")
    assert (flaw.found["effective"], flaw.found["requested"], flaw.found["source"]) == (128000, 131072, "params.json")
    assert codes(found, "block") == {"config-sources-disagree"}


@pytest.mark.parametrize(
    ("words", "params"),
    [
        (MISTRAL[2:], {}),
        (MISTRAL, {"max_position_embeddings": 131072}),
        (MISTRAL, {"max_seq_len": 131072}),
        (["--config-format", "mistral", "--max-model-len", "128000"], {}),
    ],
)
def test_c070_without_the_flag_or_with_a_length_it_is_sound(tmp_path, words, params):
    root = micro(tmp_path / "m", max_position_embeddings=131072)
    write_json(root / "params.json", {"dim": 8, **params})
    assert alarms(validate(root, {"engine": {"name": "vllm", "arguments": words}})) == set()


OLD = {"rope_theta": 1_000_000}
NEW = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000}}
BOTH = {"rope_theta": 10_000, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000}}


@pytest.mark.parametrize(
    ("changes", "version", "is_fault"),
    [
        (OLD, "4.57.0", False),
        (OLD, "5.19.0", False),
        (NEW, "4.57.0", True),
        (NEW, "5.0.0", False),
        (NEW, None, False),
        (BOTH, "4.57.0", True),
        (BOTH, "5.19.0", True),
        (BOTH, None, True),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000}}, "4.57.0", False),
    ],
)
def test_c071_rotary_settings_must_stand_where_the_library_looks(tmp_path, changes, version, is_fault):
    engine = {"name": "vllm", "version": "0.32.0", "build": {"transformers": version} if version else {}}
    found = validate(micro(tmp_path / "m", **changes), {"engine": engine})
    assert ("rope-format" in codes(found, "block")) is is_fault
    if changes is NEW and is_fault:
        flaw = only(found, "rope-format")
        assert (flaw.found["theta"], flaw.expected["theta"]) == (10_000, 1_000_000)


def test_c071_both_ways_of_saying_it_mean_the_same(tmp_path):
    told = [validate(micro(tmp_path / str(n), **changes)).inferred["rope"] for n, changes in enumerate((OLD, NEW))]
    assert told[0] == told[1] == {"theta": 1_000_000, "type": "default", "factor": None}


def test_c071_layers_of_several_kinds_have_settings_of_several_kinds(tmp_path):
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000},
    }
    root = micro(tmp_path / "m", rope_theta=None, rope_parameters=kinds)
    engine = {"name": "vllm", "build": {"transformers": "4.57.1"}}
    assert only(validate(root, {"engine": engine}), "rope-format").expected == {"theta": 1_000_000}


@pytest.mark.parametrize(
    ("words", "promised", "is_fault"),
    [
        (["-c", "4096", "-np", "4"], 4096, True),
        (["--ctx-size", "16384", "--parallel", "4"], 4096, False),
        (["--ctx-size", "4096", "--parallel", "4", "--kv-unified"], 4096, False),
        (["-c", "4096", "-np", "4"], 1024, False),
    ],
)
def test_c074_slots_share_the_context(tmp_path, words, promised, is_fault):
    asked = {
        "engine": {"name": "llamacpp", "version": "2026.10.11549", "arguments": words},
        "runtime": {"context_tokens": promised},
    }
    root = config_only(tmp_path / "m", max_position_embeddings=4096)
    flaws = [one for one in validate(root, asked).flaws if one.code == "context-per-slot"]
    assert bool(flaws) is is_fault
    if is_fault:
        assert flaws[0].found["per_slot"] == 1024
        assert "--ctx-size 16384" in flaws[0].advice


@pytest.mark.parametrize(
    ("words", "runtime", "severity"),
    [
        (["--ctx-size", "16384"], {}, "warn"),
        (["--ctx-size", "16384", "--parallel", "2"], {}, "block"),
        (["-c", "16384", "--parallel", "4"], {}, None),
        (["-c", "16384"], {"max_sequences": 4}, None),
        (["-c", "16384", "-np", "1"], {"context_tokens": 4096}, None),
    ],
)
def test_c069_a_slot_gets_no_more_context_than_the_model_has_positions(tmp_path, words, runtime, severity):
    asked = {"engine": {"name": "llamacpp", "version": "2026.10.11549", "arguments": words}, "runtime": runtime}
    found = validate(config_only(tmp_path / "m", max_position_embeddings=4096), asked)
    told = [(one.severity, one.pointer) for one in found.flaws if one.code == "context-too-long"]
    assert told == ([] if severity is None else [(severity, "--ctx-size")])


@pytest.mark.parametrize(
    ("grace", "pre_stop", "words", "is_fault"),
    [
        (30, 15, ["--shutdown-timeout", "45"], True),
        (75, 15, ["--shutdown-timeout", "45"], False),
        (75, 15, [], True),
    ],
)
def test_c126_a_replica_must_live_until_its_streams_end(tmp_path, grace, pre_stop, words, is_fault):
    drain = {"termination_grace_seconds": grace, "pre_stop_seconds": pre_stop}
    found = validate(micro(tmp_path / "m"), {"engine": {"name": "vllm", "arguments": words}, "drain": drain})
    assert ("drain-too-short" in codes(found, "block")) is is_fault


def test_c097_a_name_in_the_arguments_must_be_the_name_that_callers_use(tmp_path):
    root = speak(micro(tmp_path / "m"))
    engine = {"name": "vllm", "arguments": ["--served-model-name", "llama", "llama-70b"]}
    assert alarms(validate(root, {"engine": engine, "serving": {"served_name": "llama-70b"}})) == set()
    found = validate(root, {"engine": engine, "serving": {"served_name": "other"}})
    assert only(found, "served-name-differs").found == ["llama", "llama-70b"]
    adapt(root / "other")
    told = {"engine": engine, "serving": {"served_name": "llama-70b"}, "adapters": {"llama": "other"}}
    assert only(validate(root, told), "served-name-differs").found == ["llama"]
