"""Incident cases of draft models and adapters, in their named forms, with controls and neighbours."""

import pytest

from tests.support.checkpoints import (
    HALF,
    T0,
    T,
    adapt,
    alarms,
    codes,
    micro,
    micro_tensors,
    only,
    speak,
    tok,
    validate,
    write_json,
)


def rows(count):
    return [one._replace(shape=(count, 8)) if one.shape == (264, 8) else one for one in micro_tensors()]


def pair(tmp_path, target_rows=264, **draft):
    root = speak(micro(tmp_path / "m", vocab_size=target_rows, tensors=rows(target_rows)))
    count = 264 + len(draft.get("more", ()))
    speak(micro(root / "draft", vocab_size=count, tensors=rows(count)), **draft)
    return root


@pytest.mark.parametrize(("engine", "severity"), [("llamacpp", None), ("vllm", "warn"), ("external", "warn")])
def test_c076_padding_alone_is_no_other_vocabulary(tmp_path, engine, severity):
    found = validate(pair(tmp_path, 272), {"engine": {"name": engine, "version": "1.0"}, "draft": "draft"})
    seen = {one.severity.value for one in found.flaws if one.code == "draft-vocab"}
    assert seen == ({severity} if severity else set())


def test_c076_a_draft_of_the_same_vocabulary_is_sound(tmp_path):
    found = validate(
        pair(tmp_path), {"engine": {"name": "vllm"}, "draft": {"directory": "draft", "method": "draft_model"}}
    )
    assert alarms(found) == set()


def test_c076_swapped_tokens_are_found_at_the_first(tmp_path):
    flaw = only(validate(pair(tmp_path, swap=(5, 6)), {"draft": "draft"}), "draft-vocab")
    assert (flaw.found["first_difference"], flaw.severity) == (5, "block")


def test_c076_a_draft_with_more_real_tokens_blocks(tmp_path):
    more = [f"<more{number}>" for number in range(32)]
    flaw = only(validate(pair(tmp_path, more=more), {"draft": "draft"}), "draft-vocab")
    assert (flaw.found["draft"], flaw.expected["target"], flaw.found["count"]) == (296, 264, 32)


def test_c076_a_draft_elsewhere_is_looked_at_too(tmp_path):
    root = pair(tmp_path, swap=(5, 6))
    (root / "draft").rename(tmp_path / "other")
    assert "draft-vocab" in codes(validate(root, {"draft_model": str(tmp_path / "other")}), "block")


def test_c076_heads_that_read_the_target_s_own_states_have_no_vocabulary(tmp_path):
    asked = {"engine": {"name": "vllm"}, "draft": {"directory": "draft", "method": "eagle3"}}
    assert alarms(validate(pair(tmp_path, swap=(5, 6)), asked)) == set()


# ----------------------------------------------------------------------------------------------------- adapters


def with_adapter(tmp_path, prefix="model.", base=None, **options):
    root = micro(tmp_path / "m", tensors=micro_tensors(prefix) if base is None else base)
    adapt(root / "adapt", **options)
    return root


VLLM = {"name": "vllm", "version": "0.32.0"}
ADAPTERS = {"adapters": {"adpt": "adapt"}}


def test_an_adapter_that_fits_is_sound(tmp_path):
    assert alarms(validate(with_adapter(tmp_path), ADAPTERS | {"engine": VLLM})) == set()
    assert validate(with_adapter(tmp_path / "n"), {}).inferred["adapters"] == ["adapt"]


def test_c079_modules_under_another_prefix_match_nothing(tmp_path):
    found = validate(with_adapter(tmp_path, "model.language_model."), ADAPTERS)
    flaw = only(found, "lora-no-match")
    assert (flaw.found["matched"], flaw.found["of"]) == (0, 1)
    assert flaw.found["missing"] == ["model.layers.0.self_attn.q_proj"]
    assert flaw.expected["in_base"] == ["model.language_model.layers.0.self_attn.q_proj"]
    assert codes(found, "block") == {"lora-no-match"}


def test_c079_a_partial_match_is_a_ratio(tmp_path):
    stem = "base_model.model.model.layers.7.self_attn.q_proj"
    more = [
        T(f"{stem}.lora_A.weight", "BF16", (8, 8), HALF * 64),
        T(f"{stem}.lora_B.weight", "BF16", (8, 8), HALF * 64),
    ]
    flaw = only(validate(with_adapter(tmp_path, more=more), ADAPTERS), "lora-no-match")
    assert (flaw.found["matched"], flaw.found["of"]) == (1, 2)


def test_c079_an_adapter_of_the_wrapper_fits_the_wrapper(tmp_path):
    root = with_adapter(tmp_path, "model.language_model.", module="model.language_model.layers.0.self_attn.q_proj")
    assert alarms(validate(root, ADAPTERS)) == set()


FLAG = "--lora-target-modules"


@pytest.mark.parametrize(
    ("module", "words", "is_fault"),
    [
        ("mlp.down_proj", ["qkv_proj"], True),
        ("mlp.down_proj", ["down_proj"], False),
        ("self_attn.q_proj", ["qkv_proj"], False),
        ("self_attn.q_proj", ["v_proj"], False),
        ("self_attn.q_proj", ["o_proj", "down_proj"], True),
        ("self_attn.q_proj", ["o_proj", "q_proj"], False),
        ("mlp.gate_proj", ["gate_up_proj"], False),
        ("mlp.up_proj", ["qkv_proj,o_proj"], True),
        ("self_attn.q_proj", ["all"], False),
    ],
)
def test_c080_a_flag_that_keeps_every_module_out_blocks(tmp_path, module, words, is_fault):
    size = (8, 16) if "down" in module else (16, 8) if "mlp" in module else (8, 8)
    name = f"model.layers.0.{module}"
    root = with_adapter(tmp_path, module=name, size=size, target_modules=[name.rpartition(".")[2]])
    asked = ADAPTERS | {"engine": VLLM | {"arguments": ["--enable-lora", FLAG, *words]}}
    found = validate(root, asked)
    assert ("lora-no-match" in codes(found, "block")) is is_fault
    if is_fault:
        assert only(found, "lora-no-match").pointer == FLAG


def test_c080_the_configuration_alone_is_enough(tmp_path):
    root = with_adapter(tmp_path, target_modules=["down_proj"])
    (root / "adapt" / "adapter_model.safetensors").unlink()
    asked = ADAPTERS | {"engine": VLLM | {"arguments": [FLAG, "qkv_proj"]}}
    assert "lora-no-match" in codes(validate(root, asked), "block")


def test_c082_tokens_that_only_the_adapter_has_block(tmp_path):
    root = speak(with_adapter(tmp_path))
    write_json(root / "adapt" / "tokenizer.json", tok(more=["<cmd>"]))
    (root / "adapt" / "chat_template.jinja").write_text("<cmd>" + T0)
    flaw = only(validate(root, ADAPTERS), "lora-new-tokens")
    assert (flaw.found["ids"], flaw.expected) == ([264], {"rows": 264})
    assert flaw.found["in_template"] == ["<cmd>"]


def test_c082_a_copy_of_the_base_s_tokenizer_is_sound(tmp_path):
    root = speak(with_adapter(tmp_path))
    speak(root / "adapt")
    assert alarms(validate(root, ADAPTERS)) == set()


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.lm_head.weight",
    ],
)
def test_c082_rows_of_the_embedding_are_no_adapter(tmp_path, name):
    root = with_adapter(tmp_path, more=[T(name, "BF16", (1, 8), HALF * 8)])
    assert only(validate(root, ADAPTERS), "unsupported-lora-tensor").found == [name]


@pytest.mark.parametrize(
    ("engine", "is_fault"),
    [
        ({"name": "sglang", "version": "0.5.4"}, True),
        ({"name": "vllm", "version": "0.32.0"}, False),
        ({"name": "vllm", "version": "0.5.3"}, True),
        ({"name": "transformers", "version": "5.0"}, False),
        ({"name": "external", "rules": {"rslora": False}}, True),
        ({"name": "external", "rules": {"rslora": True}}, False),
    ],
)
def test_c084_a_scaling_that_the_engine_ignores_blocks(tmp_path, engine, is_fault):
    root = with_adapter(tmp_path, r=16, lora_alpha=16, use_rslora=True)
    found = validate(root, ADAPTERS | {"engine": engine})
    assert ("lora-scaling" in codes(found, "block")) is is_fault
    if is_fault:
        flaw = only(found, "lora-scaling")
        assert (flaw.expected["scale"], flaw.found) == (4.0, {"scale": 1.0, "factor": 4.0})


def test_c084_at_rank_one_both_scalings_are_the_same(tmp_path):
    root = with_adapter(tmp_path, r=1, lora_alpha=16, use_rslora=True)
    assert alarms(validate(root, ADAPTERS | {"engine": {"name": "sglang", "version": "0.5.4"}})) == set()


MAGNITUDE = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"


@pytest.mark.parametrize(
    ("engine", "is_fault"),
    [("vllm", True), ("sglang", True), ("llamacpp", True), ("transformers", False)],
)
@pytest.mark.parametrize("is_said", [True, False])
def test_c085_magnitudes_need_an_engine_that_reads_them(tmp_path, engine, is_fault, is_said):
    root = with_adapter(tmp_path, use_dora=is_said, more=[T(MAGNITUDE, "BF16", (8,), HALF * 8)])
    found = validate(root, ADAPTERS | {"engine": {"name": engine, "version": "1.0"}})
    assert ("lora-kind-unsupported" in codes(found, "block")) is is_fault
    if is_fault:
        assert only(found, "lora-kind-unsupported").found == {"use_dora": is_said, "tensors": [MAGNITUDE]}


def test_c086_a_strength_of_zero_changes_nothing(tmp_path):
    assert only(validate(with_adapter(tmp_path, lora_alpha=0), ADAPTERS), "adapter-no-effect").found["scale"] == 0.0


def test_c086_matrices_that_were_never_trained_change_nothing(tmp_path):
    flaw = only(validate(with_adapter(tmp_path, zero_b=True), ADAPTERS), "adapter-no-effect")
    assert flaw.found == {"zero": 1, "of": 1}


def test_c086_minus_zero_is_zero_and_one_trained_module_is_enough(tmp_path):
    stem = "base_model.model.model.layers.0.self_attn.k_proj"
    minus = [
        T(f"{stem}.lora_A.weight", "BF16", (8, 8), HALF * 64),
        T(f"{stem}.lora_B.weight", "BF16", (4, 8), b"\x00\x80" * 32),
    ]
    both = {"more": minus, "target_modules": ["k_proj", "q_proj"]}
    assert "adapter-no-effect" in codes(validate(with_adapter(tmp_path, zero_b=True, **both), ADAPTERS))
    assert alarms(validate(with_adapter(tmp_path / "n", **both), ADAPTERS)) == set()


@pytest.mark.parametrize(
    ("options", "engine", "code"),
    [
        ({"r": 32}, VLLM | {"arguments": ["--enable-lora"]}, "lora-rank-too-large"),
        ({"r": 64}, VLLM | {"arguments": ["--enable-lora", "--max-lora-rank", "32"]}, "lora-rank-too-large"),
        ({"size": (8, 16)}, VLLM, "lora-shape"),
        ({"size": (16, 8)}, VLLM, "lora-shape"),
        ({"bias": "all"}, VLLM, "lora-kind-unsupported"),
        ({"modules_to_save": ["lm_head"]}, VLLM, "lora-kind-unsupported"),
        ({"peft_type": "IA3"}, VLLM, "lora-kind-unsupported"),
    ],
)
def test_an_adapter_that_does_not_fit_blocks(tmp_path, options, engine, code):
    assert code in codes(validate(with_adapter(tmp_path, **options), ADAPTERS | {"engine": engine}), "block")


def test_a_rank_within_the_engine_s_limit_is_sound(tmp_path):
    engine = VLLM | {"arguments": ["--enable-lora", "--max-lora-rank", "64"]}
    assert alarms(validate(with_adapter(tmp_path, r=64), ADAPTERS | {"engine": engine})) == set()


def test_an_adapter_without_its_parts_is_incomplete(tmp_path):
    root = with_adapter(tmp_path)
    (root / "adapt" / "adapter_model.safetensors").unlink()
    assert "adapter-incomplete" in codes(validate(root, ADAPTERS), "block")


@pytest.mark.parametrize(("engine", "severity"), [(None, None), ({"name": "external", "version": "1"}, "warn")])
def test_what_an_engine_is_not_known_to_read_warns(tmp_path, engine, severity):
    for place, options in enumerate(({"r": 16, "use_rslora": True}, {"use_dora": True})):
        root = with_adapter(tmp_path / str(place), **options)
        found = validate(root, ADAPTERS | ({"engine": engine} if engine else {}))
        assert {one.severity.value for one in found.flaws} == ({severity} if severity else set())
