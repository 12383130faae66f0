"""Neighbours of the incidents: faulty forms that were invented afterwards, each with a sound form beside it."""

import math

import pytest

from tests.support.checkpoints import (
    HALF,
    T,
    adapt,
    alarms,
    codes,
    micro,
    micro_tensors,
    only,
    speak,
    validate,
    write_json,
    write_safetensors,
)

VLLM = {"engine": {"name": "vllm", "version": "0.32.0"}}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [1.5, 8.0]}
ONE_FACTOR = {"type": "longrope", "short_factor": [1.0], "long_factor": [1.5]}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}, None),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "rope-scaling-invalid"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4, "high_freq_factor": 4}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope-scaling-invalid"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "rope-scaling-invalid"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "rope-scaling-invalid"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope-scaling-invalid"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope-scaling-invalid"),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, None),
        ({"rope_scaling": LLAMA3}, "rope-scaling-invalid"),
        ({"rope_scaling": {"rope_type": "yarm", "factor": 4.0}}, "rope-scaling-invalid"),
        ({"rope_scaling": {"rope_type": 7, "factor": 4.0}}, "rope-scaling-invalid"),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        ({"rope_scaling": {"factor": 2.0}}, None),
        ({"rope_scaling": None}, None),
        ({"rope_scaling": LONGROPE}, None),
        ({"rope_scaling": LONGROPE | {"type": "su"}}, None),
        ({"rope_scaling": LONGROPE | {"short_factor": [1.0]}}, "rope-scaling-invalid"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0, 2.0, 3.0]}}, "rope-scaling-invalid"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0, "2"]}}, "rope-scaling-invalid"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0, 0.0]}}, "rope-scaling-invalid"),
        ({"rope_scaling": LONGROPE | {"long_factor": 1.0}}, "rope-scaling-invalid"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0]}}, "rope-scaling-invalid"),
        ({"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5}, "rope-scaling-invalid"),
        ({"rope_scaling": ONE_FACTOR, "partial_rotary_factor": 0.5}, None),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, None),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "rope-scaling-invalid"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 0]}}, "rope-scaling-invalid"),
        ({"rope_scaling": {"type": "mrope"}}, "rope-scaling-invalid"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope-scaling-invalid"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding": None}}, None),
    ],
)
def test_a_rotary_scaling_that_gives_no_frequencies_blocks(tmp_path, changes, code):
    found = alarms(validate(speak(micro(tmp_path / "m", **changes)), VLLM))
    assert found == (set() if code is None else {code})


@pytest.mark.parametrize(("value", "is_sound"), [(-2, False), (-1, True), (0, True), (50, True), ("50", False)])
def test_candidates_kept_are_none_all_or_a_number(tmp_path, value, is_sound):
    root = speak(micro(tmp_path / "m"))
    write_json(root / "generation_config.json", {"eos_token_id": [2, 4], "top_k": value})
    assert alarms(validate(root, VLLM)) == (set() if is_sound else {"sampling-out-of-range"})


@pytest.mark.parametrize(
    ("asked", "is_sound"), [("awq", False), ("gptq_marlin", False), ("compressed-tensors", False), ("fp8", True)]
)
def test_a_method_that_reads_quantized_weights_needs_them(tmp_path, asked, is_sound):
    engine = VLLM["engine"] | {"arguments": ["--quantization", asked]}
    on = {"engine": engine, "hardware": {"accelerator": "nvidia-h100"}}
    assert alarms(validate(micro(tmp_path / "m"), on)) == (set() if is_sound else {"quant-argument-differs"})


# ----------------------------------------------------------------------------------------------------- adapters

Q, K, V, DOWN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
SIZES = {Q: (8, 8), K: (4, 8), V: (4, 8), DOWN: (8, 16)}
ADAPTERS = {"adapters": {"adpt": "adapt"}}


def deep(root, layers=4):
    """MICRO with more layers."""
    inner = [one for one in micro_tensors() if ".layers.0." in one.name]
    more = [one._replace(name=one.name.replace(".0.", f".{layer}.")) for layer in range(1, layers) for one in inner]
    return micro(root, tensors=micro_tensors() + more, num_hidden_layers=layers)


def matrices(module, layer=0, rank=8, sides="AB"):
    out, into = SIZES[module]
    shapes = {"A": (rank, into), "B": (out, rank)}
    stem = f"base_model.model.model.layers.{layer}.{module}"
    return [T(f"{stem}.lora_{s}.weight", "BF16", shapes[s], HALF * math.prod(shapes[s])) for s in sides]


def adapted(tmp_path, tensors, engine=None, layers=4, **changes):
    root = deep(tmp_path / "m", layers)
    adapt(root / "adapt", **changes)
    write_safetensors(root / "adapt" / "adapter_model.safetensors", tensors)
    return validate(root, ADAPTERS | ({"engine": engine} if engine else {}))


def every(*modules, layers=range(4), **options):
    return [one for module in modules for layer in layers for one in matrices(module, layer, **options)]


@pytest.mark.parametrize(
    ("tensors", "changes", "expected"),
    [
        (every(Q), {}, {}),
        (every(Q, V), {"target_modules": ["v_proj", "q_proj"]}, {}),
        (every(Q, V), {"target_modules": ["self_attn.v_proj", "self_attn.q_proj"]}, {}),
        (every(Q, V), {"target_modules": r".*self_attn\.[qv]_proj"}, {}),
        (every(Q, V), {"target_modules": "all-linear"}, {}),
        (every(Q), {"target_modules": ["q_proj", "c_attn"]}, {}),
        (every(Q), {"target_modules": ["q_proj", "v_proj"]}, {"lora-targets-differ": "block"}),
        (every(Q, V), {"target_modules": ["q_proj"]}, {"lora-targets-differ": "block"}),
        (every(Q, V)[:-2], {"target_modules": ["q_proj", "v_proj"]}, {"lora-targets-differ": "block"}),
        (every(Q, layers=(2, 3)), {}, {"lora-targets-differ": "warn"}),
        (every(Q, layers=(2, 3)), {"layers_to_transform": [2, 3]}, {}),
        (every(Q, layers=(3,)), {"layers_to_transform": 3}, {}),
        (every(Q, layers=(2,)), {"layers_to_transform": [2, 3]}, {"lora-targets-differ": "warn"}),
        (every(Q, layers=(2, 3)), {"exclude_modules": ["layers.0.self_attn.q_proj"]}, {}),
        (every(Q) + every(V, sides="A"), {"target_modules": ["q_proj", "v_proj"]}, {"adapter-incomplete": "block"}),
        (every(Q, rank=4), {}, {"lora-shape": "block"}),
        (every(Q, rank=4), {"r": 4}, {}),
        (every(Q) + every(V, rank=4), {"target_modules": ["q_proj", "v_proj"]}, {"lora-shape": "block"}),
        (every(Q) + every(V, rank=4), {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 4}}, {}),
        (every(Q), {"rank_pattern": {"q_proj": 4}}, {"lora-shape": "block"}),
        (every(Q, rank=4), {"rank_pattern": {"[q]_proj": 4}}, {}),
        (every(Q)[:-1] + matrices(Q, 3, rank=4, sides="B"), {"rank_pattern": {"[q]": 4}}, {"lora-shape": "block"}),
        (every(Q), {"lora_alpha": None}, {"adapter-incomplete": "block"}),
        (every(Q), {"lora_alpha": "16"}, {"adapter-incomplete": "block"}),
        (every(Q), {"target_modules": None}, {"adapter-incomplete": "block"}),
        (every(Q), {"target_modules": None, "target_parameters": ["mlp.experts.down_proj"]}, {}),
        (every(Q), {"modules_to_save": ["score"]}, {"adapter-incomplete": "block"}),
        ([*every(Q), T("base_model.model.score.weight", "BF16", (2, 8))], {"modules_to_save": ["score"]}, {}),
    ],
)
def test_an_adapter_holds_what_its_configuration_names(tmp_path, tensors, changes, expected):
    found = {
        one.code: one.severity.value for one in adapted(tmp_path, tensors, **changes).flaws if one.severity != "info"
    }
    assert found == expected


def test_what_is_missing_is_told_as_a_ratio(tmp_path):
    flaw = only(adapted(tmp_path, every(Q), target_modules=["q_proj", "v_proj"]), "lora-targets-differ")
    assert (flaw.found["held"], flaw.found["of"], flaw.found["missing"][0]) == (4, 8, "model.layers.0.self_attn.v_proj")


@pytest.mark.parametrize(
    ("changes", "version", "code"),
    [
        ({"alpha_pattern": {"q_proj": 64}}, "0.10.0", "lora-scaling"),
        ({"alpha_pattern": {"q_proj": 64}}, "0.32.0", None),
        ({"alpha_pattern": {"q_proj": 16}}, "0.10.0", None),
        ({"alpha_pattern": {"k_proj": 64}}, "0.10.0", None),
        ({"rank_pattern": {"q_proj": 8}, "r": 16}, "0.10.0", "lora-scaling"),
        ({"init_lora_weights": "pissa"}, "0.32.0", "lora-kind-unsupported"),
        ({"init_lora_weights": "gaussian"}, "0.32.0", None),
        ({"init_lora_weights": True}, "0.32.0", None),
        ({"layer_replication": [[0, 2], [1, 4]]}, "0.32.0", "lora-kind-unsupported"),
        ({"alora_invocation_tokens": [1, 2]}, "0.32.0", "lora-kind-unsupported"),
        ({"layer_replication": None, "use_qalora": False}, "0.32.0", None),
    ],
)
def test_an_engine_does_what_the_adapter_asks_for(tmp_path, changes, version, code):
    found = adapted(tmp_path, every(Q), {"name": "vllm", "version": version}, **changes)
    assert codes(found, "block") == (set() if code is None else {code})
    assert "lora-scaling" not in codes(adapted(tmp_path / "n", every(Q), {"name": "transformers"}, **changes))


def wrapped(root, prefix, module, **changes):
    micro(root, tensors=micro_tensors(prefix), **changes)
    adapt(root / "adapt", module=module)
    return codes(validate(root, ADAPTERS), "block")


@pytest.mark.parametrize(
    ("prefix", "module", "changes", "is_sound"),
    [
        ("language_model.model.", "model.language_model.layers.0.self_attn.q_proj", {}, True),
        ("model.language_model.", "language_model.model.layers.0.self_attn.q_proj", {}, True),
        ("model.", "model.language_model.layers.0.self_attn.q_proj", {"vision_config": {"depth": 2}}, True),
        ("model.", "model.language_model.layers.0.self_attn.q_proj", {}, False),
        ("language_model.model.", "model.layers.0.self_attn.q_proj", {}, False),
    ],
)
def test_two_ways_to_wrap_a_language_model_are_one(tmp_path, prefix, module, changes, is_sound):
    assert wrapped(tmp_path / "m", prefix, module, **changes) == (set() if is_sound else {"lora-no-match"})


def test_a_base_that_keeps_its_matrices_the_other_way_round_is_told_so(tmp_path):
    tensors = [T("transformer.h.0.attn.c_attn.weight", "BF16", (8, 24)), T("transformer.wte.weight", "BF16", (264, 8))]
    root = micro(tmp_path / "m", tensors=tensors, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    options = {"module": "transformer.h.0.attn.c_attn", "size": (24, 8), "target_modules": ["c_attn"]}
    adapt(root / "adapt", fan_in_fan_out=True, **options)
    assert "lora-shape" not in codes(validate(root, ADAPTERS))
    adapt(root / "adapt", fan_in_fan_out=False, **options)
    assert "lora-shape" in codes(validate(root, ADAPTERS), "block")


def test_a_packed_base_is_held_to_the_sizes_of_its_configuration(tmp_path):
    def packed(one):
        if "q_proj" not in one.name:
            return [one]
        stem = one.name.removesuffix(".weight")
        return [
            T(f"{stem}.qweight", "I32", (1, 8)),
            T(f"{stem}.scales", "F16", (1, 8)),
            T(f"{stem}.qzeros", "I32", (1, 1)),
        ]

    tensors = sorted((t for one in micro_tensors() for t in packed(one)), key=lambda one: one.dtype != "I32")
    for size, is_sound in (((8, 8), True), ((8, 16), False)):
        root = micro(tmp_path / str(size[1]), tensors=tensors)
        adapt(root / "adapt", size=size)
        assert ("lora-shape" not in codes(validate(root, ADAPTERS))) is is_sound


def test_matrices_of_fused_experts_match_the_experts(tmp_path):
    experts = [T("model.layers.0.mlp.experts.gate_up_proj_blocks", "U8", (4, 32, 1, 4))]
    root = micro(tmp_path / "m", tensors=[*micro_tensors(), *experts])
    stem = "base_model.model.model.layers.0.mlp.experts"
    told = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    more = [
        T(f"{stem}{inner}.lora_{side}.weight", "BF16", shape, HALF * math.prod(shape))
        for inner in ("", ".base_layer")
        for side, shape in (("A", (32, 8)), ("B", (8, 32)))
    ]
    adapt(root / "adapt", **told)
    write_safetensors(root / "adapt" / "adapter_model.safetensors", more)
    assert codes(validate(root, ADAPTERS), "block") == set()
