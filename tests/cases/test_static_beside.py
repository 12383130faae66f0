"""Neighbours of the incident cases of adapters, sampling, context, heads and GGUF headers, with sound forms beside."""

import gguf
import numpy as np
import pytest

from tests.support import chain
from tests.support.checkpoints import (
    HALF,
    T0,
    T,
    adapt,
    added_token,
    alarms,
    codes,
    micro,
    micro_config,
    micro_tensors,
    only,
    speak,
    tok,
    validate,
    write_json,
    write_safetensors,
)

VLLM, LLAMACPP = {"name": "vllm", "version": "0.32.0"}, {"name": "llamacpp", "version": "2026.10.11549"}
ADAPTERS = {"adapters": {"adpt": "adapt"}}
Q = "base_model.model.model.layers.0.self_attn.q_proj"
O = Q.replace("q_proj", "o_proj")  # noqa: E741 - as the layer is called


def matrix(name, *, zero=False, shape=(8, 8), kind="BF16"):
    return T(
        name, kind, shape, None if zero else b"\x00\x00\x00\x3f" * 64 if kind == "F32" else HALF * (shape[0] * shape[1])
    )


def pair(module, *zero):
    return [matrix(f"{module}.lora_{side}.weight", zero=side in zero) for side in "AB"]


def adapted(root, tensors=None, *, base=None, **changes):
    micro(root) if base is None else base(root)
    adapt(root / "adapt", **changes)
    if tensors is not None:
        write_safetensors(root / "adapt" / "adapter_model.safetensors", tensors)
    return root


# -------------------------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize(
    "tensors",
    [
        [matrix(f"{Q}.lora_down.weight"), matrix(f"{Q}.lora_up.weight")],
        [matrix(f"{Q}.hada_w1_a")],
        [matrix(f"{Q}.weight")],
        [T(f"{Q}.vera_lambda_b", "BF16", (8,), HALF * 8)],
    ],
)
def test_c079_an_adapter_without_one_matrix_by_its_names_matches_nothing(tmp_path, tensors):
    flaw = only(validate(adapted(tmp_path / "m", tensors), ADAPTERS), "lora-no-match")
    assert (flaw.found["matched"], flaw.found["of"], flaw.severity) == (0, len(tensors), "block")


@pytest.mark.parametrize("end", ["lora_E", "lora_B.bias", "weight_m_wdecomp.weight"])
def test_c085_tensors_of_another_kind_of_adapter_are_named(tmp_path, end):
    root = adapted(tmp_path / "m", [*pair(Q), T(f"{Q}.{end}", "BF16", (8, 1), HALF * 8)])
    assert only(validate(root, ADAPTERS | {"engine": VLLM}), "lora-kind-unsupported").found["tensors"] == [f"{Q}.{end}"]
    assert alarms(validate(root, ADAPTERS | {"engine": {"name": "transformers"}})) == set()


def embedded(*zero):
    sizes = {"A": (8, 264), "B": (8, 8)}
    stem = "base_model.model.model.embed_tokens.lora_embedding_"
    return [matrix(f"{stem}{side}", zero=side in zero, shape=sizes[side]) for side in "AB"]


@pytest.mark.parametrize(
    ("tensors", "changes", "is_fault"),
    [
        (pair(Q, "A"), {}, True),
        (pair(Q, "A") + pair(O, "B"), {"target_modules": ["q_proj", "o_proj"]}, True),
        (pair(Q, "A") + pair(O), {"target_modules": ["q_proj", "o_proj"]}, False),
        (embedded("A"), {"target_modules": ["embed_tokens"]}, True),
        (embedded(), {"target_modules": ["embed_tokens"]}, False),
        (pair(Q), {"alpha_pattern": {"q_proj": 0}}, True),
        ([matrix(f"{Q}.lora_A.weight", kind="F32"), matrix(f"{Q}.lora_B.weight", kind="F32", zero=True)], {}, True),
    ],
)
def test_c086_a_product_is_zero_when_either_side_is(tmp_path, tensors, changes, is_fault):
    found = validate(adapted(tmp_path / "m", tensors, **changes), ADAPTERS)
    assert ("adapter-no-effect" in codes(found, "block")) is is_fault


@pytest.mark.parametrize(
    ("file", "told", "ids"),
    [
        ("added_tokens.json", {"<cmd>": 264}, [264]),
        ("tokenizer_config.json", {"added_tokens_decoder": {"264": added_token(264, "<cmd>", special=True)}}, [264]),
        ("special_tokens_map.json", {"additional_special_tokens": ["<cmd>", "<s>"]}, [264]),
        ("special_tokens_map.json", {"bos_token": "<s>", "pad_token": "[PAD]"}, None),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}, None),
    ],
)
def test_c082_new_tokens_stand_in_other_files_too(tmp_path, file, told, ids):
    root = adapted(tmp_path / "m", base=lambda root: speak(micro(root)))
    write_json(root / "adapt" / file, told)
    found = validate(root, ADAPTERS)
    if ids is None:
        assert alarms(found) == set()
    else:
        assert (only(found, "lora-new-tokens").found["ids"], only(found, "lora-new-tokens").file) == (
            ids,
            f"adapt/{file}",
        )


def test_c082_an_adapter_that_numbers_the_tokens_otherwise_blocks(tmp_path):
    root = adapted(tmp_path / "m", base=lambda root: speak(micro(root)))
    write_json(root / "adapt" / "tokenizer.json", tok(swap=(3, 4)))
    assert only(validate(root, ADAPTERS), "lora-new-tokens").found["first_difference"] == 3


def test_c082_an_embedding_that_was_trained_whole_is_no_adapter(tmp_path):
    name = "base_model.model.model.embed_tokens.modules_to_save.default.weight"
    root = adapted(tmp_path / "m", [*pair(Q), matrix(name)], modules_to_save=["embed_tokens"])
    assert only(validate(root, ADAPTERS), "unsupported-lora-tensor").found == [name]


# ------------------------------------------------------------------------------------------ sampling, dates, context

SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize(
    ("engine", "words", "told", "found"),
    [
        ({"name": "transformers", "version": "5.0"}, [], SAMPLING, {"temperature": 0.0, "top_k": "off", "top_p": 1.0}),
        ({"name": "transformers", "version": "5.0"}, [], SAMPLING | {"do_sample": True}, None),
        ({"name": "vllm", "version": "0.7.3"}, ["--generation-config", "auto"], SAMPLING, None),
        ({"name": "vllm", "version": "0.7.3"}, [], {"min_p": 0.1}, {"min_p": 0.0}),
        ({"name": "tgi", "version": "3.3"}, [], {"repetition_penalty": 1.05}, {"repetition_penalty": 1.0}),
    ],
)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_c049_what_an_engine_makes_of_the_defaults_is_known_by_version_and_place(
    tmp_path, engine, words, told, found, file
):
    root = micro(tmp_path / "m", **(told if file == "config.json" else {}))
    if file != "config.json":
        write_json(root / file, told | {"eos_token_id": [2, 4]})
    flaws = [
        one
        for one in validate(root, {"engine": engine | {"arguments": words}}).flaws
        if one.code == "engine-sampling-diff"
    ]
    assert [(one.found, one.file) for one in flaws] == ([] if found is None else [(found, file)])


def test_c049_a_default_of_a_gguf_header_that_is_no_possible_value_blocks(tmp_path):
    chain.write_chain(tmp_path / "model.gguf", metadata={"general.sampling.top_p": 1.5})
    flaw = only(validate(tmp_path), "sampling-out-of-range")
    assert (flaw.file, flaw.pointer) == ("model.gguf", "general.sampling.top_p")


@pytest.mark.parametrize(
    ("header", "words", "found"),
    [
        ({}, [], {"temperature": 0.8, "top_k": 40, "top_p": 0.95}),
        ({"general.sampling.temp": 0.6, "general.sampling.top_k": 20}, [], {"top_p": 0.95}),
        ({"general.sampling.temp": 0.6}, ["--top-k", "20", "--top-p", "1.0"], None),
    ],
)
def test_c049_a_generation_config_beside_a_gguf_is_held_to_what_llamacpp_does(tmp_path, header, words, found):
    chain.write_chain(tmp_path / "model.gguf", metadata=header)
    write_json(tmp_path / "generation_config.json", {"temperature": 0.6, "top_k": 20, "top_p": 1.0})
    examined = validate(tmp_path, {"engine": {"name": "llamacpp", "arguments": words}})
    flaws = [one for one in examined.flaws if one.code == "engine-sampling-diff"]
    assert [one.found for one in flaws] == ([] if found is None else [found])
    assert {one.file for one in flaws} <= {"generation_config.json"}


def test_c048_the_sampling_of_a_gguf_is_that_of_its_header_over_llamacpps_own(tmp_path):
    chain.write_chain(tmp_path / "model.gguf", metadata={"general.sampling.temp": 0.5})
    told = validate(tmp_path, {"engine": {"name": "llamacpp", "arguments": ["--min-p", "0.1"]}}).inferred
    assert told["sampling"] == {
        "temperature": 0.5,
        "top_p": 0.95,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
    }
    origins = {name: told["from"][f"/sampling/{name}"]["by"] for name in told["sampling"]}
    assert (origins["temperature"], origins["top_p"], origins["min_p"]) == ("file", "default", "argument")


@pytest.mark.parametrize("condition", ["tools", "messages[0]['role'] == 'system'"])
def test_c034_a_date_that_only_some_conversations_get_is_found(tmp_path, condition):
    template = "{% if " + condition + " %}{{ strftime_now('%Y') }}{{ tools | tojson }}{% endif %}" + T0
    assert alarms(validate(speak(micro(tmp_path / "m"), template=template))) == {"template-clock"}


INNER = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}


@pytest.mark.parametrize(
    ("words", "promised", "changes", "found"),
    [
        (["--max-model-len", "64"], 128, {}, {"requested": 128, "derived": 64}),
        (["--max-model-len", "128"], 64, {}, None),
        (
            ["--max-model-len", "128", "--disable-sliding-window"],
            None,
            {"sliding_window": 32},
            {"requested": 128, "derived": 32},
        ),
        (["--max-model-len", "128"], None, {"sliding_window": 32}, None),
        (["--max-model-len", "512", "--hf-overrides.max_position_embeddings", "512"], None, {}, None),
        (
            ["--max-model-len", "512", "--hf-overrides", '{"text_config":{"max_position_embeddings":512}}'],
            None,
            INNER,
            None,
        ),
        (["--max-model-len", "512"], None, INNER, {"requested": 512, "derived": 128}),
    ],
)
def test_c069_what_is_promised_asked_for_and_there_is_held_against_each_other(
    tmp_path, words, promised, changes, found
):
    root = tmp_path / "m"
    root.mkdir()
    told = micro_config(
        model_type="mistral", architectures=["MistralForCausalLM"], **({} if changes is INNER else changes)
    )
    write_json(root / "config.json", changes | {"text_config": told} if changes is INNER else told)
    declared = {"engine": VLLM | {"arguments": words}} | ({"runtime": {"context_tokens": promised}} if promised else {})
    assert [one.found for one in validate(root, declared).flaws if one.code == "context-too-long"] == (
        [] if found is None else [found]
    )


@pytest.mark.parametrize(
    ("words", "variables", "each"),
    [
        (["-c", "2048"], {}, 2048),
        ([], {"LLAMA_ARG_CTX_SIZE": "4096", "LLAMA_ARG_N_PARALLEL": "4"}, 1024),
        ([], {"LLAMA_ARG_CTX_SIZE": "4096", "LLAMA_ARG_N_PARALLEL": "4", "LLAMA_ARG_KV_UNIFIED": "1"}, None),
        (["-c", "2048", "-np", "2", "--kv-unified"], {}, 2048),
        (["-c", "0"], {}, None),
    ],
)
def test_c074_slots_and_their_context_are_set_in_several_ways(tmp_path, words, variables, each):
    root = tmp_path / "m"
    root.mkdir()
    write_json(root / "config.json", micro_config(max_position_embeddings=4096))
    engine = LLAMACPP | {"arguments": words, "variables": variables}
    found = validate(root, {"engine": engine, "runtime": {"context_tokens": 4096}})
    flaws = [one.found["per_slot"] for one in found.flaws if one.code == "context-per-slot"]
    assert flaws == ([] if each is None else [each])


# ----------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("tied", "data", "expected"), [(True, HALF, {"head-untied"}), (True, None, set()), (False, HALF, set())]
)
def test_c015_a_head_of_its_own_under_a_tie_is_told(tmp_path, tied, data, expected):
    tensors = [
        one._replace(data=data * 264 * 8) if data and one.name.startswith("lm_head") else one for one in micro_tensors()
    ]
    assert alarms(validate(micro(tmp_path / "m", tensors=tensors, tie_word_embeddings=tied))) == expected


def changed(path, monkeypatch, **headers):
    """Write CHAIN as a GGUF file in which some calls of its writer get other values."""
    for name, value in headers.items():
        made = getattr(gguf.GGUFWriter, name)
        monkeypatch.setattr(gguf.GGUFWriter, name, lambda self, told, made=made, value=value: made(self, value(told)))
    path.parent.mkdir(parents=True, exist_ok=True)
    chain.write_chain(path)
    return path.parent


@pytest.mark.parametrize(
    ("call", "change", "code", "found"),
    [
        ("add_embedding_length", lambda _: 256, "shape-mismatch", [264, 320]),
        ("add_feed_forward_length", lambda _: 64, "shape-mismatch", [32, 320]),
        ("add_head_count_kv", lambda _: 5, "shape-mismatch", [64, 320]),
        ("add_token_list", lambda told: told[:-4], "embedding-rows", [264, 320]),
        ("add_token_types", lambda told: told[:-1], "header-invalid", 263),
    ],
)
def test_c013_sizes_of_a_gguf_header_are_those_of_its_tensors(tmp_path, monkeypatch, call, change, code, found):
    flaws = [
        one
        for one in validate(changed(tmp_path / "m" / "model.gguf", monkeypatch, **{call: change})).flaws
        if one.code == code
    ]
    assert flaws
    first = flaws[0].found
    assert (first["shape"] if isinstance(first, dict) else first) == found
    assert flaws[0].severity == "block"
    assert len(flaws) == 1  # one size is wrong, wherever it counts


@pytest.mark.parametrize(
    ("call", "value", "key"),
    [
        ("add_block_count", 2**32 - 1, "llama.block_count"),
        ("add_context_length", 0, "llama.context_length"),
        ("add_rope_freq_base", float("nan"), "llama.rope.freq_base"),
        ("add_layer_norm_rms_eps", -1e-6, "llama.attention.layer_norm_rms_epsilon"),
    ],
)
def test_c013_a_gguf_header_says_sizes_that_a_model_can_have(tmp_path, monkeypatch, call, value, key):
    found = validate(changed(tmp_path / "m" / "model.gguf", monkeypatch, **{call: lambda _: value}))
    assert [one.pointer for one in found.flaws if one.code == "header-invalid"] == [key]


def test_c007_a_part_of_a_gguf_model_under_another_name_is_not_the_whole(tmp_path, monkeypatch):
    made = gguf.GGUFWriter.add_name

    def split(writer, name):
        made(writer, name)
        for key, value in {"split.no": 0, "split.count": 3, "split.tensors.count": 40}.items():
            writer.add_uint16(key, value)

    monkeypatch.setattr(gguf.GGUFWriter, "add_name", split)
    chain.write_chain(tmp_path / "model.gguf")
    flaw = only(validate(tmp_path), "shard-missing")
    assert (flaw.found, flaw.expected) == ([0], 3)


def blocks(path, *, lost=(), architecture="own", odd=()):
    """A GGUF file of six blocks of an architecture that nobody knows, but for some tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(6)
    names = [f"blk.{number}.{one}" for number in range(6) for one in ("norm", "mix", "up", "down")]
    for name in ["token_embd", *(name for name in names if name not in lost), *odd]:
        writer.add_tensor(f"{name}.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.parent


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({}, []),
        ({"lost": ("blk.3.mix",)}, [3]),
        ({"lost": ("blk.1.up", "blk.4.norm")}, [1, 4]),
        ({"lost": ("blk.1.up", "blk.3.up", "blk.5.up")}, []),
        ({"odd": ("blk.5.nextn.head",)}, []),
        ({"lost": ("blk.3.mix",), "architecture": "deci"}, []),
    ],
)
def test_c013_blocks_of_an_unknown_architecture_are_held_against_each_other(tmp_path, options, layers):
    found = validate(blocks(tmp_path / "m" / "model.gguf", **options))
    assert [one.found["layer"] for one in found.flaws if one.code == "tensor-missing"] == layers


def test_c021_a_projector_that_was_cut_is_told(tmp_path):
    for name in ("model.gguf", "mmproj-model.gguf"):
        chain.write_chain(tmp_path / name)
    assert codes(validate(tmp_path), "block") == set()
    path = tmp_path / "mmproj-model.gguf"
    path.write_bytes(path.read_bytes()[:-5000])
    assert only(validate(tmp_path), "header-invalid").file == "mmproj-model.gguf"


@pytest.mark.parametrize(
    ("value", "is_fault"), [(-5, True), ("2", True), (2.5, True), ([2, "4"], True), (-1, False), (True, True)]
)
def test_c046_an_id_that_is_no_number_of_a_token_blocks(tmp_path, value, is_fault):
    found = validate(micro(tmp_path / "m", eos_token_id=value))
    assert ("token-id-out-of-range" in codes(found, "block")) is is_fault


@pytest.mark.parametrize(("groups", "tensor", "is_fault"), [(8, 16, True), (8, 8, False), (1, 16, False)])
def test_c066_groups_of_state_space_layers_have_two_names(tmp_path, groups, tensor, is_fault):
    root = tmp_path / "m"
    root.mkdir()
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    told = micro_config(**sizes, model_type="nemotron_h", mamba_num_heads=128, n_groups=groups)
    write_json(root / "config.json", told)
    assert ("heads-tp" in codes(validate(root, {"engine": VLLM, "topology": {"tp": tensor}}), "block")) is is_fault


@pytest.mark.parametrize(
    ("changes", "code", "pointer"),
    [
        ({"rope_theta": 0}, "rope-scaling-invalid", "/rope_theta"),
        ({"rope_theta": "1e6"}, "rope-scaling-invalid", "/rope_theta"),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": -1}},
            "rope-scaling-invalid",
            "/rope_parameters/rope_theta",
        ),
        ({"partial_rotary_factor": 1.5}, "rope-scaling-invalid", "/partial_rotary_factor"),
        ({"max_position_embeddings": 0}, "size-absurd", "/max_position_embeddings"),
        ({"partial_rotary_factor": 0.5, "rope_theta": 5e5}, None, None),
    ],
)
def test_c071_numbers_of_which_no_frequencies_come_block(tmp_path, changes, code, pointer):
    found = [one for one in validate(micro(tmp_path / "m", **changes)).flaws if one.severity == "block"]
    assert [(one.code, one.pointer) for one in found] == ([] if code is None else [(code, pointer)])


@pytest.mark.parametrize(
    ("told", "words", "pointer"),
    [
        ({"max_new_tokens": 0}, [], "/max_new_tokens"),
        ({"presence_penalty": 5}, [], "/presence_penalty"),
        ({"top_k": 20.5}, [], "/top_k"),
        ({"top_k": 20.0, "max_new_tokens": 2048}, [], None),
        (
            {},
            ["--override-generation-config", '{"temperature":-1,"eos_token_id":[2,4]}'],
            "--override-generation-config",
        ),
    ],
)
def test_c049_further_defaults_and_those_of_the_launch_are_possible_values(tmp_path, told, words, pointer):
    root = micro(tmp_path / "m")
    write_json(root / "generation_config.json", told | {"eos_token_id": [2, 4]})
    found = validate(root, {"engine": VLLM | {"arguments": words}})
    flaws = [one.pointer for one in found.flaws if one.code == "sampling-out-of-range"]
    assert flaws == ([] if pointer is None else [pointer])


def test_c076_a_draft_without_weights_is_incomplete(tmp_path):
    root = speak(micro(tmp_path / "m"))
    speak(micro(root / "draft"), template=None)
    assert alarms(validate(root, {"draft": "draft"})) == set()
    (root / "draft" / "model.safetensors").unlink()
    assert "draft-incomplete" in codes(validate(root, {"draft": "draft"}), "block")


def test_c085_an_adapter_in_a_format_that_llama_cpp_does_not_read_blocks(tmp_path):
    root = adapted(tmp_path / "m")
    found = validate(root, ADAPTERS | {"engine": LLAMACPP})
    assert "adapt/adapter_model.safetensors" in {one.file for one in found.flaws if one.code == "format-unsupported"}
