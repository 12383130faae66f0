"""Forms in which sound models are published: none raises a finding that blocks, each beside one that must."""

import json
import os
import struct
from pathlib import Path

import pytest

from gates.files import listing
from gates.files.contents import Reader, select
from gates.files.refusal import FileRefused
from gates.static.composition import of_directory
from gates.static.declared import read_declared
from gates.static.examine import examine
from schemas.bundle import Role
from tests.support.checkpoints import (
    T0,
    T,
    adapt,
    alarms,
    codes,
    edit_json,
    micro,
    micro_sharded,
    micro_tensors,
    only,
    speak,
    validate,
    write_json,
    write_safetensors,
)
from tests.support.headers import gguf, info, pair, text, texts

VLLM = {"name": "vllm", "version": "0.32.0"}


# --------------------------------------------------------------------------------------------- templates and stops


def closing(root, ending, **generation):
    """MICRO whose template closes the answer with some tokens of its own before it closes the turn."""
    template = T0.replace("{{ message['content'] }}", "{{ message['content'] }}" + ending)
    speak(micro(root), template=template)
    write_json(root / "generation_config.json", {"eos_token_id": [2, 4]} | generation)
    return root


def test_an_answer_may_be_closed_before_its_turn_is(tmp_path):
    assert alarms(validate(closing(tmp_path / "m", "<spare>\n"))) == set()
    root = closing(tmp_path / "n", "<spare>", eos_token_id=2)
    edit_json(root / "config.json", lambda told: told.update(eos_token_id=2))
    assert only(validate(root), "turn-end-not-a-stop").found["token"] == "<|im_end|>"


def test_a_base_model_with_the_template_of_its_family_warns_and_blocks_where_it_is_to_chat(tmp_path):
    root = closing(tmp_path / "m", "", eos_token_id=2, do_sample=False, max_new_tokens=2048)
    edit_json(root / "config.json", lambda told: told.update(eos_token_id=2))
    assert alarms(validate(root)) == {"turn-end-not-a-stop"}
    assert validate(root).verdict == "passed"
    assert validate(root, {"engine": VLLM, "features": ["chat"]}).verdict == "failed"


@pytest.mark.parametrize(
    ("features", "is_rendered"),
    [(["completions"], False), (["completions", "streaming"], False), (["embeddings"], False), (["streaming"], True)],
)
def test_a_template_counts_where_something_renders_it(tmp_path, features, is_rendered):
    root = speak(micro(tmp_path / "m"), template="{{ strftime_now('%d') }}{{ nothing.at.all }}")
    assert ("template-fails" in codes(validate(root, {"features": features}), "block")) is is_rendered


@pytest.mark.parametrize(
    ("config", "generation", "severity"),
    [([2], [4], "warn"), ([2, 4], [4], "warn"), ([2, 4, 3], [4], "block"), ([2, 4], [3], "block")],
)
def test_an_engine_that_knows_the_end_of_a_turn_may_lack_that_of_a_text(tmp_path, config, generation, severity):
    root = speak(
        micro(tmp_path / "m", eos_token_id=config), config={"eos_token": "<|im_end|>"} if 4 in generation else {}
    )
    write_json(root / "generation_config.json", {"eos_token_id": generation})
    assert only(validate(root, {"engine": VLLM}), "eos-sources-disagree").severity == severity


@pytest.mark.parametrize(
    ("eos", "told", "codes_found"),
    [(2, None, set()), ([2, 4], None, set()), (2, "</s>", set()), ([2, 4], "</s>", {"eos-sources-disagree"})],
)
def test_the_stop_of_a_tokenizer_that_is_not_here_is_not_known(tmp_path, eos, told, codes_found):
    root = micro(tmp_path / "m", eos_token_id=eos)
    if told is not None:
        write_json(root / "tokenizer_config.json", {"eos_token": told})
    assert codes(validate(root, {"engine": {"name": "tgi", "version": "3.3.6"}}), "block") == codes_found


@pytest.mark.parametrize(
    ("end", "severity"), [("</s>", "warn"), ("[EOS]", "warn"), ("<EOS_TOKEN>", "warn"), ("<|call|>", "block")]
)
def test_each_family_s_end_of_a_text_may_be_none_of_the_stops_of_a_chat(tmp_path, end, severity):
    names = ("<pad>", "<s>", end, "<|im_start|>", "<|im_end|>")
    root = speak(micro(tmp_path / "m", eos_token_id=4), names=names)
    write_json(root / "generation_config.json", {"eos_token_id": 4})
    told = {"engine": {"name": "transformers", "version": "5.19.0"}}
    assert only(validate(root, told), "eos-sources-disagree").severity == severity


def test_a_model_that_answers_with_vectors_ends_at_no_token(tmp_path):
    root = speak(micro(tmp_path / "m", eos_token_id=2), config={"eos_token": "<|im_end|>"})
    write_json(root / "generation_config.json", {"eos_token_id": 2})
    told = {"engine": {"name": "transformers", "version": "5.19.0"}}
    assert codes(validate(root, told), "block") == {"eos-sources-disagree"}
    assert alarms(validate(root, told | {"serving": {"features": ["embeddings"]}})) == set()


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", ["--runner", "pooling"]),
        ("vllm", ["--runner=pooling", "--convert", "embed"]),
        ("sglang", ["--is-embedding"]),
    ],
)
def test_a_launch_that_pools_ends_at_no_token_either(tmp_path, engine, words):
    root = speak(micro(tmp_path / "m", eos_token_id=2), config={"eos_token": "<|im_end|>"}, bos=True)
    write_json(root / "generation_config.json", {"eos_token_id": 4, "max_new_tokens": 9})
    edit_json(root / "tokenizer.json", _close)
    told = {"engine": {"name": engine, "version": {"vllm": "0.32.0", "sglang": "0.5.4"}[engine], "arguments": []}}
    assert {"eos-sources-disagree", "stop-after-prompt"} <= alarms(validate(root, told))
    told["engine"]["arguments"] = words
    assert alarms(validate(root, told)) == set()


def _close(told):
    """Let the tokenizer put the stop behind each text."""
    step = {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}
    told["post_processor"]["single"] = [{"Sequence": {"id": "A", "type_id": 0}}, step]
    told["post_processor"]["special_tokens"] = {
        "<|im_end|>": {"id": "<|im_end|>", "ids": [4], "tokens": ["<|im_end|>"]}
    }


@pytest.mark.parametrize(("text", "is_split"), [("<br>", False), ("<|im_mid|>", True), ("[INST]", True)])
def test_a_tag_that_the_vocabulary_happens_to_have_is_no_marker(tmp_path, text, is_split):
    root = speak(micro(tmp_path / "m"), template=T0.replace("\n", text))

    def change(told):
        told["model"]["vocab"][text] = told["model"]["vocab"].pop("<spare>")
        told["added_tokens"] = [one for one in told["added_tokens"] if one["content"] != "<spare>"]
        told["pre_tokenizer"] = {"type": "Metaspace"}  # of which no tokens are counted here

    edit_json(root / "tokenizer.json", change)
    assert ("marker-split" in codes(validate(root), "block")) is is_split


# ------------------------------------------------------------------------------------------------ files and names


@pytest.mark.parametrize("then", [Path.unlink, lambda path: (path.unlink(), os.mkfifo(path))])
def test_a_file_that_goes_once_it_was_listed_is_a_finding(tmp_path, monkeypatch, then):
    root = speak(micro(tmp_path / "m"))
    (root / "notes.txt").write_text("notes")
    whole = listing.list_directory

    def listed(*named, **how):
        found = whole(*named, **how)
        then(root / "notes.txt")
        return found

    monkeypatch.setattr(listing, "list_directory", listed)
    flaw = only(validate(root), "source-unstable")
    assert (flaw.severity, flaw.file) == ("block", "notes.txt")


def test_papers_and_pictures_may_have_names_that_no_bundle_holds(tmp_path):
    root = micro(tmp_path / "m")
    for name in ("LICENSE AGREEMENT.pdf", "figure (1).png", "模型许可.md"):
        (root / name).write_bytes(b"x")
    found = validate(root)
    assert found.flaws == ()
    assert found.inferred["left_out"] == ["LICENSE AGREEMENT.pdf", "figure (1).png", "模型许可.md"]
    taken = select(["model.safetensors", "config.json", "模型许可.md"], Reader("vllm"))
    assert sorted(taken.kept) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["model (1).safetensors", "config .json", "run me.sh", "a b.zip", "weights (2).bin"])
def test_what_could_be_read_has_a_name_that_every_system_reads_alike(tmp_path, name):
    root = micro(tmp_path / "m")
    (root / name).write_bytes(b"x")
    assert only(validate(root), "name-refused").file == name


def test_pickles_in_folders_that_no_engine_reads_are_nothing_to_speak_of(tmp_path):
    root = micro(tmp_path / "m")
    for name in ("original/consolidated.00.pth", "metal/model.bin", "onnx/model.onnx"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"\x80\x02")
    assert validate(root).flaws == ()


def test_of_two_indexes_the_one_that_engines_read_counts(tmp_path):
    root = micro_sharded(tmp_path / "m")
    write_safetensors(root / "consolidated-00001-of-00001.safetensors", [T("tok_embeddings.weight", "BF16", (264, 8))])
    names = {"tok_embeddings.weight": "consolidated-00001-of-00001.safetensors"}
    write_json(root / "consolidated.safetensors.index.json", {"metadata": {}, "weight_map": names})
    found = validate(root)
    assert alarms(found) == {"duplicate-weight-sets"}
    assert found.inferred["weights"]["tensors"] == 12


def test_another_precision_of_the_weights_is_not_what_counts(tmp_path):
    root = micro(tmp_path / "m")
    write_safetensors(root / "model.fp32.safetensors", [one._replace(dtype="F32") for one in micro_tensors()])
    found = validate(root)
    assert alarms(found) == {"duplicate-weight-sets"}
    assert found.inferred["weights"]["files"] == ["model.safetensors"]
    assert found.inferred["weights"]["effective_bytes"] == 9648


@pytest.mark.parametrize(
    ("value", "is_sound"),
    [
        ("[0.0, Infinity]", True),
        ("[\n  0.0,\n  Infinity\n]", True),
        ("[0.0, NaN]", False),
        ("[Infinity, Infinity]", False),
        ("Infinity", False),
    ],
)
def test_the_one_number_without_a_limit_that_is_published_is_read(tmp_path, value, is_sound):
    root = micro(tmp_path / "m")
    plain = (root / "config.json").read_text()
    (root / "config.json").write_text(plain[:-1] + f', "time_step_limit": {value}}}')
    assert ("config-unparseable" in codes(validate(root))) is not is_sound
    (root / "config.json").write_text(plain[:-1] + f', "rope_theta2": {value}}}')
    assert "config-unparseable" in codes(validate(root))


# --------------------------------------------------------------------------------------------------------- GGUF

TOKENS = texts(b"tokenizer.ggml.tokens", [f"t{number}".encode() for number in range(4)])


def tiny_gguf(path, *pairs, name=b"llama", blocks=1):
    """A GGUF file of one block, whose tensors are single precision."""
    shapes = [(b"token_embd.weight", (32, 4)), (b"output_norm.weight", (32,))]
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    shapes += [(f"blk.{number}.{one}.weight".encode(), (32,)) for number in range(blocks) for one in parts]
    listed, start = [], 0
    for tensor, shape in shapes:
        listed.append(info(tensor, shape, start))
        start += 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
    head = pair(b"general.architecture", 8, text(name))
    sizes = {b".block_count": blocks, b".context_length": 64, b".embedding_length": 32}
    told = [pair(name + key, 4, struct.pack("<I", value)) for key, value in sizes.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf(head, *told, TOKENS, *pairs, tensors=tuple(listed), data=b"\0" * start))
    return path


CHAT = pair(b"tokenizer.chat_template", 8, text(b"{% for m in messages %}{{ m.content }}{% endfor %}"))


def test_each_quantization_of_a_repository_is_a_model_of_its_own(tmp_path):
    root = tmp_path / "m"
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-mmproj-f16.gguf", "m.imatrix.gguf"):
        tiny_gguf(root / name, CHAT)
    found = validate(root)
    assert codes(found) == {"weights-several"}
    assert (found.verdict, found.inferred["weights"]["files"]) == ("passed", ["m-Q4_K_M.gguf"])
    chosen = examine(of_directory(root, read_declared({}), weights="q8_0"))
    assert (chosen.flaws, chosen.inferred["weights"]["files"]) == ((), ["m-Q8_0.gguf"])
    with pytest.raises(FileRefused, match="q2_k"):
        of_directory(root, read_declared({}), weights="q2_k")


def test_shards_may_lie_in_a_folder_of_their_quantization(tmp_path):
    split = [pair(key, 2, struct.pack("<H", value)) for key, value in ((b"split.no", 0), (b"split.count", 1))] + [
        pair(b"split.tensors.count", 5, struct.pack("<i", 11))
    ]
    tiny_gguf(tmp_path / "m" / "UD-Q4_K_XL" / "m-00001-of-00001.gguf", CHAT, *split)
    (tmp_path / "m" / "README.md").write_text("# A model\n")
    found = validate(tmp_path / "m")
    assert found.flaws == ()
    assert found.inferred["architecture"] == "llama"


def test_one_file_is_a_source_and_a_shard_brings_its_fellows(tmp_path):
    path = tiny_gguf(tmp_path / "m" / "m.gguf", CHAT)
    tiny_gguf(tmp_path / "m" / "other.gguf", CHAT)
    found = examine(of_directory(path, read_declared({})))
    assert (found.flaws, found.inferred["weights"]["files"]) == ((), ["m.gguf"])
    shard = tiny_gguf(tmp_path / "n" / "m-00001-of-00002.gguf", CHAT)
    assert "shard-missing" in codes(examine(of_directory(shard, read_declared({}))), "block")


def test_of_two_formats_the_engine_s_is_checked_and_the_other_left_out_unopened(tmp_path):
    root = speak(micro(tmp_path / "m"))
    (root / "m.gguf").write_bytes(b"GGUF broken")
    found = validate(root, {"engine": VLLM})
    assert (alarms(found), found.inferred["format"]) == (set(), "safetensors")
    assert found.inferred["left_out"] == ["m.gguf"]
    root = speak(micro(tmp_path / "n"), template=None)
    tiny_gguf(root / "m.gguf", CHAT)
    found = validate(root, {"engine": "llamacpp"})
    assert (alarms(found), found.inferred["format"]) == (set(), "gguf")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tgi", "trtllm", "transformers"])
def test_weights_in_a_format_that_the_engine_is_not_given_block(tmp_path, engine):
    tiny_gguf(tmp_path / "m" / "m.gguf", CHAT)
    write_json(tmp_path / "m" / "config.json", {"model_type": "llama"})
    assert "format-unsupported" in codes(validate(tmp_path / "m", {"engine": engine}), "block")


def test_number_formats_and_the_method_are_told(tmp_path):
    tiny_gguf(tmp_path / "m" / "m.gguf", CHAT, pair(b"general.file_type", 4, struct.pack("<I", 15)))
    told = validate(tmp_path / "m").inferred
    assert told["quantization"] == {"method": "q4_k_m", "bits": 4, "group_size": None}
    assert told["from"]["/quantization"]["pointer"] == "general.file_type"
    assert list(told["weights"]["dtypes"]) == ["F32"]
    told = validate(partly(tmp_path / "n", GPTQ | {"dynamic": {"-:.*q_proj": {}}})).inferred
    assert list(told["weights"]["dtypes"]) == ["BF16", "I32", "F16"]


def test_nobody_chats_with_a_model_whose_output_is_pooled(tmp_path):
    pooled = pair(b"qwen3.pooling_type", 4, struct.pack("<I", 3))
    tiny_gguf(tmp_path / "m" / "m.gguf", pooled, name=b"own")
    assert alarms(validate(tmp_path / "m")) == set()
    tiny_gguf(tmp_path / "n" / "m.gguf", name=b"own")
    assert alarms(validate(tmp_path / "n")) == {"template-missing"}


@pytest.mark.parametrize(
    "name", ["mmproj-F16.gguf", "mmproj-model-f16.gguf", "llava-mmproj-Q4_0.gguf", "m.mmproj.gguf", "MMPROJ-BF16.gguf"]
)
def test_a_projector_is_one_wherever_its_name_says_so(name):
    kept = select([name, "model.gguf"], Reader("llamacpp")).kept
    assert kept == {name: Role.PROCESSOR, "model.gguf": Role.WEIGHTS}


# ------------------------------------------------------------------------------------------------------- drafts


def head_tensors():
    """An EAGLE-3 head: one layer of its own, a small vocabulary, and the target's embedding."""
    stem = "midlayer.self_attn."
    told = [(f"{stem}{one}_proj.weight", (8, 16)) for one in "qkv"] + [(f"{stem}o_proj.weight", (8, 8))]
    told += [("midlayer.mlp.gate_proj.weight", (16, 8)), ("fc.weight", (8, 24)), ("norm.weight", (8,))]
    plain = [T(name, "BF16", shape) for name, shape in [*told, ("lm_head.weight", (32, 8))]]
    return [T("d2t", "I64", (32,)), *plain, T("t2d", "I8", (264,))]


@pytest.mark.parametrize(
    ("architecture", "draft"),
    [
        ("LlamaForCausalLMEagle3", {"directory": "draft"}),
        ("LlamaForCausalLM", {"directory": "draft", "method": "eagle3"}),
    ],
)
def test_a_head_that_drafts_has_no_embedding_and_a_vocabulary_of_its_own(tmp_path, architecture, draft):
    root = speak(micro(tmp_path / "m"))
    micro(root / "draft", tensors=head_tensors(), architectures=[architecture], draft_vocab_size=32)
    assert alarms(validate(root, {"engine": VLLM, "draft": draft})) == set()
    edit_json(root / "draft" / "config.json", lambda told: told.update(architectures=["LlamaForCausalLM"]))
    plain = validate(root, {"engine": VLLM, "draft": {"directory": "draft", "method": "draft_model"}})
    assert "tensor-missing" in codes(plain, "block")


def test_a_head_that_drafts_is_sound_alone(tmp_path):
    root = micro(tmp_path / "m", tensors=head_tensors(), architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=32)
    assert alarms(validate(root)) == set()


SPECULATOR = {
    "architectures": ["DraftModel"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 32,
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "owner/model"}},
}


def test_a_head_that_names_its_target_is_a_draft_and_needs_no_code(tmp_path):
    root = speak(micro(tmp_path / "m"))
    micro(root / "draft", tensors=head_tensors(), **SPECULATOR)
    draft = {"engine": VLLM, "draft": {"directory": "draft", "method": "eagle3"}}
    assert alarms(validate(root, draft)) == set()
    edit_json(root / "draft" / "config.json", lambda told: told["auto_map"].update(AutoConfig="eagle3.Config"))
    assert codes(validate(root, draft), "block") == {"remote-code"}


@pytest.mark.parametrize("verifier", [{"name_or_path": "owner/model"}, {"name_or_path": "/models/other"}, {}, None])
def test_a_model_whose_configuration_names_another_to_load_in_its_place_blocks(tmp_path, verifier):
    named = {"verifier": verifier, "algorithm": "eagle3"}
    root = speak(micro(tmp_path / "m", speculators_config=named))
    flaw = only(validate(root, {"engine": VLLM}), "launch-refused")
    assert (flaw.severity, flaw.file, flaw.pointer) == ("block", "config.json", "/speculators_config/verifier")
    assert flaw.found == str((verifier or {}).get("name_or_path"))


# ----------------------------------------------------------------------------------------------------- adapters


def test_an_adapter_beside_the_model_in_one_folder_is_held_against_it(tmp_path):
    root = adapt(speak(micro_sharded(tmp_path / "m")))  # whose index says which files are the model's
    assert alarms(validate(root, {"engine": VLLM})) == set()
    adapt(root, module="model.layers.7.self_attn.q_proj")
    assert alarms(validate(root, {"engine": VLLM})) == {"lora-no-match"}


def test_an_adapter_without_its_base_is_told_what_it_lacks(tmp_path):
    found = validate(adapt(tmp_path / "m"))
    assert codes(found) == {"config-missing"}
    assert "adapters in the file of -f" in only(found, "config-missing").advice


def test_whole_matrices_beside_an_adapter_are_for_an_engine_that_swaps_them(tmp_path):
    head = T("base_model.model.lm_head.weight", "BF16", (264, 8), b"\x00\x3f" * 264 * 8)
    root = speak(micro(tmp_path / "m"))
    adapt(root / "adapt", more=[head], modules_to_save=["lm_head"])
    assert alarms(validate(root, {"engine": {"name": "transformers", "version": "5.19.0"}})) == set()
    assert "unsupported-lora-tensor" in codes(validate(root, {"engine": VLLM}), "block")


# --------------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize(
    ("outer", "inner", "is_sound"),
    [
        (True, None, True),
        (None, True, True),
        (True, False, True),
        (False, None, False),
        (False, False, False),
    ],
)
def test_the_outer_configuration_may_tie_what_the_inner_one_does_not(tmp_path, outer, inner, is_sound):
    root = micro(tmp_path / "m", tensors=micro_tensors()[:-1])
    text = {key: value for key, value in json.loads((root / "config.json").read_text()).items() if "tie" not in key}
    told = {"model_type": "internvl", "architectures": ["InternVLForConditionalGeneration"], "text_config": text}
    told |= {} if outer is None else {"tie_word_embeddings": outer}
    text |= {} if inner is None else {"tie_word_embeddings": inner}
    write_json(root / "config.json", told)
    assert alarms(validate(root)) == (set() if is_sound else {"head-missing"})


def test_a_head_of_a_family_that_is_not_known_may_have_any_name(tmp_path):
    tensors = [one._replace(name="own.decoder.weight") if "lm_head" in one.name else one for one in micro_tensors()]
    assert alarms(validate(micro(tmp_path / "m", tensors=tensors, model_type="own"))) == set()
    found = validate(micro(tmp_path / "n", tensors=tensors[:-1], model_type="own"))
    assert alarms(found) == {"head-missing"}


# ------------------------------------------------------------------------------------------------- quantization


def partly_tensors(without="q_proj"):
    """MICRO's tensors with packed linear layers, but those of one name."""
    found = []
    for one in micro_tensors():
        if "_proj" in one.name and without not in one.name:
            stem, (out, into) = one.name.removesuffix(".weight"), one.shape
            found.append(T(f"{stem}.qweight", "I32", (max(1, into // 8), out)))
            found.append(T(f"{stem}.qzeros", "I32", (1, max(1, out // 8))))
            found.append(T(f"{stem}.scales", "F16", (max(1, into // 8), out)))
        else:
            found.append(one)
    return sorted(found, key=lambda one: one.dtype != "I32")


def partly(root, told, *, without="q_proj"):
    """MICRO whose linear layers are packed, but those of one name."""
    return micro(root, tensors=partly_tensors(without), quantization_config=told)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 8, "packing_format": "auto_round:auto_gptq"}
INSIDE = [["self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj", "mlp.gate_proj"], ["mlp.up_proj"]]


@pytest.mark.parametrize(
    ("told", "is_sound"),
    [
        (GPTQ, False),
        (GPTQ | {"modules_in_block_to_quantize": [*INSIDE, ["mlp.down_proj"]]}, True),
        (GPTQ | {"modules_in_block_to_quantize": [*INSIDE, ["self_attn.q_proj", "mlp.down_proj"]]}, False),
        (ROUND, False),
        (ROUND | {"extra_config": {"model.layers.0.self_attn.q_proj": {"bits": 16}}}, True),
        (ROUND | {"extra_config": {r".*self_attn\.q_proj.*": {"bits": 16, "data_type": "fp"}}}, True),
        (ROUND | {"extra_config": {"model.layers.0.self_attn.q_proj": {"bits": 8}}}, False),
    ],
)
def test_modules_that_were_left_as_they_were_are_known_by_each_tool_s_words(tmp_path, told, is_sound):
    assert alarms(validate(partly(tmp_path / "m", told))) == (set() if is_sound else {"quant-config-mismatch"})


@pytest.mark.parametrize("group", [8, 4])
def test_the_columns_of_a_module_are_held_to_its_own_groups(tmp_path, group):
    root = partly(tmp_path / "m", GPTQ | {"dynamic": {"+:.*down_proj": {"group_size": group}}}, without="none")
    order = struct.pack("<16i", *(column // group for column in range(16)))
    tensors = [one for one in partly_tensors("none") if "down_proj.scales" not in one.name]
    stem = "model.layers.0.mlp.down_proj."
    more = [T(f"{stem}g_idx", "I32", (16,), order), T(f"{stem}scales", "F16", (16 // group, 8))]
    write_safetensors(root / "model.safetensors", sorted([*more, *tensors], key=lambda one: one.dtype != "I32"))
    assert alarms(validate(root)) == set()
    more[0] = more[0]._replace(data=b"\0" * 64)
    write_safetensors(root / "model.safetensors", sorted([*more, *tensors], key=lambda one: one.dtype != "I32"))
    assert alarms(validate(root)) == {"g-idx-invalid"}


@pytest.mark.parametrize("carrier", ["q_weight", "W_q", "B"])
def test_packed_weights_are_known_by_each_tool_s_names(tmp_path, carrier):
    tensors = [
        T(one.name.removesuffix("weight") + carrier, "I32", (4,)) if "_proj" in one.name else one
        for one in micro_tensors()
    ]
    told = {"quant_method": "gptq" if carrier == "B" else "exl2", "bits": 4, "group_size": -1}
    root = micro(tmp_path / "m", tensors=sorted(tensors, key=lambda one: one.dtype != "I32"), quantization_config=told)
    assert alarms(validate(root)) == set()


def scaled_but(root, told, *, without="q_proj"):
    """MICRO whose linear layers are 8-bit floats with a scale, but those of one name."""
    found = []
    for one in micro_tensors():
        if "_proj" in one.name and without not in one.name:
            found.append(one._replace(dtype="F8_E4M3"))
            found.append(T(one.name + "_scale", "F32", (1,)))
        else:
            found.append(one)
    widths = {"F32": 0, "BF16": 1, "F8_E4M3": 2}
    return micro(root, tensors=sorted(found, key=lambda one: widths[one.dtype]), quantization_config=told)


def group(*targets):
    return {"targets": list(targets), "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
NAMES = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.mark.parametrize(
    ("told", "is_sound"),
    [
        (COMPRESSED | {"config_groups": {"group_0": group("Linear")}}, False),
        (COMPRESSED | {"config_groups": {"group_0": group("Linear")}, "ignore": ["re:.*q_proj"]}, True),
        (COMPRESSED | {"config_groups": {"group_0": group("re:.*mlp.*", "re:.*[kvo]_proj")}}, True),
        (COMPRESSED | {"config_groups": {"group_0": group("re:.*mlp.*", "re:.*[qkvo]_proj")}}, False),
        (MIXED | {"quantized_layers": {f"model.layers.0.{one}": {"quant_algo": "FP8"} for one in NAMES}}, True),
        (MIXED | {"quantized_layers": {f"model.layers.0.{one}": {} for one in (*NAMES, "self_attn.q_proj")}}, False),
    ],
)
def test_schemes_that_name_their_modules_are_for_no_others(tmp_path, told, is_sound):
    root = scaled_but(tmp_path / "m", told)
    assert alarms(validate(root)) == (set() if is_sound else {"quant-config-mismatch"})


def test_a_scaled_context_of_a_model_that_also_sees_is_as_long_as_the_engine_takes_it(tmp_path):
    scaling = {"type": "yarn", "mrope_section": [1, 1], "factor": 4.0, "original_max_position_embeddings": 64}
    root = micro(tmp_path / "m", rope_scaling=scaling)
    asked = {"engine": VLLM | {"arguments": ["--max-model-len", "256"]}}
    assert alarms(validate(root, asked)) == set()
    assert alarms(validate(root, {"engine": VLLM | {"arguments": ["--max-model-len", "257"]}})) == {"context-too-long"}


def test_what_was_found_is_plain_json(tmp_path):
    tiny_gguf(tmp_path / "m" / "a.gguf")
    tiny_gguf(tmp_path / "m" / "b.gguf")
    found = validate(tmp_path / "m")
    assert json.loads(json.dumps([one.as_json() for one in found.flaws] + [found.inferred]))
