"""What a sequence takes, by architecture: published sizes, and values that were computed by hand."""

from fractions import Fraction

import pytest

from gates.placement import PlacementUnknown
from gates.placement.cache import Kept
from gates.placement.dtypes import numbers_of
from gates.placement.layers import Reading, cache_of
from gates.static.declared import read_declared
from gates.static.shape import shape_of
from tests.support.families import CONFIGS

BF16 = {"torch_dtype": "bfloat16"}
FALCON_7B = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32}
FALCON_7B |= {"num_kv_heads": 71, "multi_query": True, "new_decoder_architecture": False}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {
    "model_type": "mamba",
    "hidden_size": 2560,
    "intermediate_size": 5120,
    "num_hidden_layers": 64,
    "state_size": 16,
    "conv_kernel": 4,
}
MAMBA2 = {
    "model_type": "mamba2",
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
    "conv_kernel": 4,
    "expand": 2,
}
JAMBA = {
    "model_type": "jamba",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}
LLAMA4 = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
    },
}
LFM2 = {
    "model_type": "lfm2",
    "hidden_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "layer_types": ["conv", "conv", "full_attention"],
}
GEMMA3N = {
    "model_type": "gemma3n_text",
    "hidden_size": 2048,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "sliding_window": 512,
    "num_kv_shared_layers": 10,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
}
FALCON_H1 = {
    "model_type": "falcon_h1",
    "hidden_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}
MINIMAX = {
    "model_type": "minimax",
    "hidden_size": 6144,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attn_type_list": [0, 1],
}
DEEPSEEK = CONFIGS["deepseek-v3"] | {"num_hidden_layers": 61, "quantization_config": None}
SPARSE = DEEPSEEK | {"index_head_dim": 128, "layer_types": ["indexed_attention"] * 61}
SEARCHED = {
    "model_type": "nemotron-nas",
    "hidden_size": 8192,
    "num_hidden_layers": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "block_configs": [
        {"attention": {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False}},
        {"attention": {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}},
        {"attention": {"n_heads_in_group": 16, "no_op": False, "replace_with_linear": False}},
    ],
}
EXAONE = {
    "model_type": "exaone4",
    "num_hidden_layers": 8,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
}
BAMBA = {
    "model_type": "bamba",
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 24,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}
KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [number for number in range(1, 27) if number % 4],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}
HUNYUAN = {
    "model_type": "hunyuan",
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "use_cla": True,
    "cla_share_factor": 2,
}
DBRX = {"model_type": "dbrx", "d_model": 6144, "n_layers": 40, "n_heads": 48, "attn_config": {"kv_n_heads": 8}}
MPT = {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32}
MPT |= {"attn_config": {"attn_type": "multiquery_attention"}}
MISTRAL_1 = CONFIGS["mistral-7b-instruct-v0.3"] | {"sliding_window": 4096}


MIMO = {
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 48,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "hybrid_layer_pattern": ([0] + [1] * 5) * 8,
}
STEP = {
    "model_type": "step3p5",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "sliding_window": 512,
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 9,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}


def cache(config, *words, engine="vllm", reading=None, said=None):
    declared = read_declared({"engine": {"name": engine, "arguments": list(words)}})
    shape = shape_of(config if "torch_dtype" in config else config | BF16)
    return cache_of(shape, numbers_of(shape, declared, engine, said=said), reading)


# (configuration, bytes of a further token, tokens, bytes of a sequence, layers by kind)
ARCHITECTURES = {
    # 32 layers × 2 × 8 heads × 128 × 2 bytes
    "gqa": (CONFIGS["llama-3.1-8b-instruct"], 131_072, 8000, 131_072 * 8000, {"full": 32}),
    # 32 × 2 × 1 × 64 × 2
    "mqa": (FALCON_7B, 8_192, 8000, 8_192 * 8000, {"full": 32}),
    # 40 × 2 × 8 × 128 × 2, with the heads inside an object of attention
    "gqa-inside": (DBRX, 163_840, 8000, 163_840 * 8000, {"full": 40}),
    # 32 × 2 × 1 × 128 × 2
    "mqa-inside": (MPT, 16_384, 8000, 16_384 * 8000, {"full": 32}),
    # 32 × 2 × 32 × 96 × 2; each layer keeps 2,047 tokens in 128 blocks of 16
    "mha-window": (CONFIGS["phi-3-mini-4k-instruct"], 393_216, 8000, 393_216 * 2048, {"window": 32}),
    # 32 × 4,096 bytes × 4,096 tokens
    "window": (MISTRAL_1, 131_072, 8000, 131_072 * 4096, {"window": 32}),
    # the window is there, and off
    "window-off": (CONFIGS["qwen2.5-7b-instruct"], 57_344, 8000, 57_344 * 8000, {"full": 28}),
    # 61 × (512 + 64) × 2
    "mla": (DEEPSEEK, 70_272, 8000, 70_272 * 8000, {"latent": 61}),
    # 61 × (576 × 2 + 128 + 4)
    "mla-sparse": (DEEPSEEK | {"index_head_dim": 128}, 78_324, 8000, 78_324 * 8000, {"latent": 61}),
    # 8,192 a layer: 21 × 8,000 + 21 × 4,096
    "gemma2": (CONFIGS["gemma-2-9b-it"], 344_064, 8000, 2_080_899_072, {"full": 21, "window": 21}),
    # 1,024 a layer: 4 × 8,000 + 22 × 512
    "gemma3": (CONFIGS["gemma-3-1b-it"], 26_624, 8000, 44_302_336, {"full": 4, "window": 22}),
    # 2,048 a layer: 12 × 8,000 + 12 × 128
    "gpt-oss": (CONFIGS["gpt-oss-20b"], 49_152, 8000, 199_753_728, {"full": 12, "window": 12}),
    # 4,096 a layer: 8 × 8,000 + 24 × 4,096
    "cohere2": (CONFIGS["command-r7b"], 131_072, 8000, 664_797_184, {"full": 8, "window": 24}),
    # 4,096 a layer: 12 × 100,000 + 36 × 8,192
    "llama4": (LLAMA4, 196_608, 100_000, 6_123_159_552, {"full": 12, "window": 36}),
    # 12 × 2,048 a token; 36 × (32 × 128 × 128 × 4 + (4,096 + 4,096) × 3 × 2)
    "qwen3-next": (QWEN3_NEXT, 24_576, 8000, 273_874_944, {"full": 12, "state": 36}),
    # 64 × 5,120 × (16 × 4 + 3 × 2), however long the sequence is
    "mamba": (MAMBA, 0, 8000, 22_937_600, {"state": 64}),
    # 64 × (128 × 64 × (128 × 4 + 3 × 2) + 8 × 2 × 128 × 3 × 2)
    "mamba2": (MAMBA2, 0, 8000, 272_367_616, {"state": 64}),
    # 4 × 4,096 a token; 28 × 8,192 × (16 × 4 + 3 × 2)
    "jamba": (JAMBA, 16_384, 8000, 147_128_320, {"full": 4, "state": 28}),
    # 4 × 4,096 a token; 24 × 4,255,744
    "nemotron-h": (NEMOTRON_H, 16_384, 8000, 233_209_856, {"full": 4, "none": 24, "state": 24}),
    # 2 × 2,048 × 2 × 2 of convolutions; 2 × 8 × 64 × 2 a token
    "lfm2": (LFM2, 2_048, 8000, 16_384 + 2_048 * 8000, {"full": 1, "state": 2}),
    # 2,048 a layer: 4 × 8,000 + 16 × 512; the last ten layers read what others keep
    "gemma3n": (GEMMA3N, 40_960, 8000, 82_313_216, {"full": 4, "none": 10, "window": 16}),
    # 2 × 2 × 64 × 2 a token; 24 × 64 × (128 × 4 + 6) + 2 × 128 × 6
    "falcon-h1": (FALCON_H1, 512, 8000, 4_096_000 + 795_648 + 1_536, {"full": 1, "state": 1}),
    # 64 × 128 × 128 × 4; 2 × 8 × 128 × 2 a token
    "minimax": (MINIMAX, 4_096, 8000, 4_194_304 + 4_096 * 8000, {"full": 1, "state": 1}),
    # the same as mla-sparse, said layer by layer
    "mla-indexed": (SPARSE, 78_324, 8000, 78_324 * 8000, {"latent": 61}),
    # (64 / 8 + 64 / 16) × 128 × 2 × 2; the second layer does not attend
    "searched": (SEARCHED, 6_144, 8000, 6_144 * 8000, {"full": 2, "none": 1}),
    # 4,096 a layer: 2 × 8,000 + 6 × 4,096
    "exaone4": (EXAONE, 32_768, 8000, 4_096 * (2 * 8000 + 6 * 4096), {"full": 2, "window": 6}),
    # 7 × 576 × 2 a token; 20 × 32 × (128 × 128 × 4 + 3 × 128 × 3 × 2)
    "kimi-linear": (KIMI_LINEAR, 8_064, 8000, 8_064 * 8000 + 43_417_600, {"latent": 7, "state": 20}),
    # 2 × 4,096: a layer that reads what the one before made has a place of its own for it
    "hunyuan": (HUNYUAN, 8_192, 8000, 8_192 * 8000, {"full": 2}),
    # 8 full layers of 4 × (192 + 128) × 2, and 40 windows of 128 with 8 heads
    "mimo-v2-flash": (MIMO, 225_280, 8000, 20_480 * 8000 + 204_800 * 128, {"full": 8, "window": 40}),
    # 9 full layers of 2 × 8 × 128 × 2, and 27 windows of 512: eight groups of heads, whatever the heads are
    "step-3.5": (STEP, 147_456, 8000, 36_864 * 8000 + 110_592 * 512, {"full": 9, "window": 27}),
    # 18 full layers of 2 × 8 × 64 × 2, and 18 windows of 128
    "gpt-oss-120b": (GPT_OSS, 73_728, 131_072, 36_864 * 131_072 + 36_864 * 128, {"full": 18, "window": 18}),
    # as falcon-h1, in two layers: a recurrent one is called linear_attention by newer libraries
    "bamba": (BAMBA, 512, 8000, 4_096_000 + 795_648 + 1_536, {"full": 1, "state": 1}),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_sequence_takes_what_was_computed_by_hand(name):
    config, token, tokens, sequence, kinds = ARCHITECTURES[name]
    found = cache(config)
    assert found.token_bytes() == token
    assert found.sequence_bytes(tokens) == sequence
    assert found.kinds() == kinds


def test_a_constant_state_does_not_grow_with_the_sequence():
    found = cache(MAMBA)
    assert found.sequence_bytes(1) == found.sequence_bytes(1_000_000)


def test_a_sequence_takes_whole_blocks():
    found = cache(CONFIGS["llama-3.1-8b-instruct"])
    assert found.sequence_bytes(8001) == 131_072 * 8016
    assert found.sequence_bytes(8001, block=1) == 131_072 * 8001


@pytest.mark.parametrize(("tensor", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (32, 1)])
def test_key_value_heads_are_divided_until_there_is_one_each_and_then_copied(tensor, heads):
    found = cache(CONFIGS["llama-3.1-8b-instruct"])
    assert found.token_bytes(tensor=tensor) == 32 * heads * 2 * 128 * 2


def test_latents_are_whole_on_every_device():
    found = cache(DEEPSEEK)
    assert found.token_bytes(tensor=8) == found.token_bytes() == 70_272


def test_layers_of_a_stage_are_counted_alone():
    found = cache(CONFIGS["gemma-3-1b-it"])
    assert found.sequence_bytes(8000, layers=range(5)) == 5 * 1024 * 512
    assert found.sequence_bytes(8000, layers=range(5, 6)) == 1024 * 8000


@pytest.mark.parametrize(
    ("config", "full"),
    [
        (QWEN3_NEXT, [3, 7, 11]),
        (JAMBA, [4, 12, 20]),
        (CONFIGS["gemma-2-9b-it"], [1, 3, 5]),
        (CONFIGS["gemma-3-1b-it"], [5, 11, 17]),
        (CONFIGS["command-r7b"], [3, 7, 11]),
        (LLAMA4, [3, 7, 11]),
        (LLAMA4 | {"text_config": LLAMA4["text_config"] | {"no_rope_layers": ([0, 1, 1, 1] * 12)}}, [0, 4, 8]),
    ],
)
def test_the_layers_that_attend_to_everything_are_the_family_s(config, full):
    found = cache(config)
    assert [layer for layer, kept in enumerate(found.layers) if kept[0].kind == "full"][:3] == full


def test_windows_begin_at_the_layer_that_is_told():
    config = CONFIGS["qwen2.5-7b-instruct"] | {"use_sliding_window": True, "max_window_layers": 27}
    assert cache(config).kinds() == {"full": 27, "window": 1}
    assert cache(config | {"sliding_window": 64}).layers[27][0].window == 64


def test_an_engine_that_frees_no_window_keeps_everything():
    found = cache(CONFIGS["gemma-2-9b-it"], reading=Reading(frees_windows=False))
    assert found.sequence_bytes(8000) == 344_064 * 8000
    assert any("frees nothing" in one for one in found.assumed)


def test_an_engine_that_expands_latents_keeps_keys_and_values_of_every_head():
    found = cache(DEEPSEEK, reading=Reading(keeps_latents=False))
    assert found.token_bytes() == 61 * 128 * (192 + 128) * 2
    padded = cache(DEEPSEEK, reading=Reading(keeps_latents=False, pads_values=True))
    assert padded.token_bytes() == 61 * 128 * (192 + 192) * 2


def test_layers_that_share_keys_and_values_are_said_to_be_counted_each():
    assert any("share keys and values" in one for one in cache(HUNYUAN).assumed)
    assert not cache(HUNYUAN | {"use_cla": False}).assumed


def test_a_family_whose_windows_are_not_known_is_counted_in_full_and_says_so():
    config = CONFIGS["llama-3.1-8b-instruct"] | {"model_type": "strange", "sliding_window": 64}
    found = cache(config)
    assert found.sequence_bytes(8000) == 131_072 * 8000
    assert "strange" in found.assumed[0]


# ------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("engine", "words", "token"),
    [
        ("vllm", ("--kv-cache-dtype", "fp8"), 65_536),
        ("vllm", ("--kv-cache-dtype=fp8_e5m2",), 65_536),
        ("vllm", ("--kv-cache-dtype", "auto"), 131_072),
        ("vllm", ("--dtype", "float32"), 262_144),
        ("llamacpp", (), 131_072),
        ("llamacpp", ("--cache-type-k", "q8_0", "--cache-type-v", "q8_0"), 69_632),
        ("llamacpp", ("-ctk", "q8_0"), 34_816 + 65_536),
        ("llamacpp", ("-ctk", "q4_0", "-ctv", "q4_0"), 36_864),
    ],
)
def test_the_cache_has_the_numbers_that_the_launch_arguments_say(engine, words, token):
    assert cache(CONFIGS["llama-3.1-8b-instruct"], *words, engine=engine).token_bytes() == token


def test_a_bundle_says_the_numbers_where_no_argument_does():
    llama = CONFIGS["llama-3.1-8b-instruct"]
    assert cache(llama, said="fp8").token_bytes() == 65_536
    assert cache(llama, "--kv-cache-dtype", "bfloat16", said="fp8").token_bytes() == 131_072


def test_eight_bit_sparse_latents_keep_scales_and_a_16_bit_rotary_part():
    found = cache(DEEPSEEK | {"index_head_dim": 128}, "--kv-cache-dtype", "fp8")
    assert found.token_bytes() == 61 * (512 + 16 + 128 + 132)


def test_recurrent_state_has_a_type_of_its_own():
    assert cache(MAMBA, "--mamba-ssm-cache-dtype", "float16").sequence_bytes(1) == 64 * 5120 * (16 * 2 + 3 * 2)


def test_a_model_stored_in_32_bits_is_served_in_16_by_vllm_only():
    config = CONFIGS["llama-3.1-8b-instruct"] | {"torch_dtype": "float32"}
    assert cache(config).token_bytes() == 131_072
    assert cache(config, engine="transformers").token_bytes() == 262_144
    assert cache(config, engine="llamacpp").token_bytes() == 131_072


# ------------------------------------------------------------------------------------------------------ unknown


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"num_hidden_layers": None}, "/num_hidden_layers"),
        ({"num_attention_heads": None, "num_key_value_heads": None, "head_dim": None}, "/head_dim"),
        ({"layer_types": ["full_attention"] * 31}, "/layer_types"),
        ({"layer_types": ["full_attention"] * 31 + ["rwkv"]}, "/layer_types/31"),
        ({"layer_types": ["linear_attention"] * 32}, "/linear_num_key_heads"),
        ({"layer_types": ["mamba"] * 32}, "/mamba_d_state"),
        ({"hybrid_override_pattern": "M*"}, "/hybrid_override_pattern"),
        ({"hybrid_override_pattern": "?" * 32}, "/hybrid_override_pattern"),
        ({"kv_lora_rank": 512}, "/qk_rope_head_dim"),
        ({"is_encoder_decoder": True}, "/cross_attention_layers"),
        ({"num_key_value_heads": [8] * 31}, "/num_key_value_heads/31"),
        ({"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}}, "/linear_attn_config"),
        ({"linear_attn_config": {"kda_layers": [1] * 32, "full_attn_layers": [*range(1, 33)]}}, "/linear_attn_config"),
        ({"linear_attn_config": {"kda_layers": [*range(1, 33)]}}, "/linear_attn_config/num_heads"),
    ],
)
def test_what_decides_and_is_not_known_is_refused_with_its_place(change, pointer):
    with pytest.raises(PlacementUnknown) as refused:
        cache(CONFIGS["llama-3.1-8b-instruct"] | change)
    assert refused.value.pointer == pointer


@pytest.mark.parametrize("words", [("--kv-cache-dtype", "fp3"), ("--dtype", "odd"), ("--cache-type-k", "q9_9")])
def test_a_type_of_numbers_that_is_not_known_is_refused(words):
    with pytest.raises(PlacementUnknown, match="no known type"):
        cache(CONFIGS["llama-3.1-8b-instruct"], *words)


def test_a_model_that_names_no_type_of_numbers_is_refused():
    shape = shape_of({key: value for key, value in CONFIGS["llama-3.1-8b-instruct"].items() if key != "torch_dtype"})
    with pytest.raises(PlacementUnknown, match="--dtype"):
        numbers_of(shape, read_declared({}), "vllm")
    assert numbers_of(shape, read_declared({}), "vllm", stored="BF16").key == 2


def test_heads_that_differ_from_layer_to_layer_are_counted_each():
    config = CONFIGS["llama-3.1-8b-instruct"] | {"num_key_value_heads": [4] * 31 + [0]}
    found = cache(config)
    assert found.token_bytes() == 31 * 4 * 2 * 128 * 2
    assert found.kinds() == {"full": 31, "none": 1}


def test_fractions_of_bytes_are_kept_until_the_end():
    assert Kept("full", 3, Fraction(1, 3)).bytes_of(16, 2, 16) == Fraction(32, 3)
