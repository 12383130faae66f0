"""Neighbours of the incident cases: the same faults in other files, other families' words, and GGUF headers."""

import gguf
import pytest

from tests.support import chain
from tests.support.checkpoints import T0, added_token, alarms, codes, micro, only, speak, tok, validate, write_json

VLLM = {"name": "vllm", "version": "0.32.0"}
LLAMACPP = {"name": "llamacpp", "version": "2026.10.11549"}
THINK = T0.replace("assistant\n", "assistant\n<think>\n")


def with_arguments(engine, *words):
    return {"engine": engine | {"arguments": list(words)}}


# --------------------------------------------------------------------------------------------- tokens of two files


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({"added_tokens_decoder": {"264": added_token(264, "<|a|>", special=True)}}, {"token": "<|a|>", "id": 264}),
        ({"added_tokens_decoder": {"9": added_token(9, "<|a|>", special=True)}}, {"token": "<|a|>", "id": 264}),
        ({"model_specific_special_tokens": {"boi_token": "<|a|>"}}, {"token": "<|a|>", "id": 264}),
    ],
)
def test_c040_tokens_that_only_the_tokenizer_s_configuration_has_would_be_appended(tmp_path, told, found):
    flaw = only(validate(speak(micro(tmp_path / "m"), config=told)), "special-token-unknown")
    assert (flaw.severity, flaw.expected) == ("block", {"rows": 264})
    assert flaw.found.items() >= found.items()


def test_c041_a_marker_that_counts_only_where_it_stands_alone_is_split(tmp_path):
    root, document = speak(micro(tmp_path / "m")), tok()
    for one in document["added_tokens"]:
        one["single_word"] = one["content"] == "<|im_start|>"
    write_json(root / "tokenizer.json", document)
    flaw = only(validate(root), "marker-split")
    assert (flaw.found["token"], flaw.found["pieces"], flaw.found["prompt_tokens"]) == ("<|im_start|>", 12, 45)
    assert flaw.severity == "block"


def test_c041_a_template_whose_end_is_no_token_at_all_never_stops(tmp_path):
    other = T0.replace("<|im_start|>", "<|start_header_id|>").replace("<|im_end|>", "<|eot_id|>")
    flaw = only(validate(speak(micro(tmp_path / "m"), template=other)), "turn-end-not-a-stop")
    assert (flaw.found["token"], flaw.found["id"], flaw.severity) == ("<|eot_id|>", None, "block")
    plain = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}</s>\n{% endfor %}<|assistant|>\n"
    assert alarms(validate(speak(micro(tmp_path / "n"), template=plain))) == set()


@pytest.mark.parametrize(("flag", "expected"), [(True, {"double-bos"}), (False, set())])
def test_c030_a_class_that_writes_bos_by_its_flag_counts(tmp_path, flag, expected):
    told = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": flag}
    assert alarms(validate(speak(micro(tmp_path / "m"), template="{{ bos_token }}" + T0, config=told))) == expected


# ------------------------------------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    "opening",
    [
        "◁think▷",
        "<|START_THINKING|>",
        "<|begin_of_thought|>",
        "<longcat_think>\n",
        "<Thought>\n",
        "<unused94>thought\n",
    ],
)
def test_c036_every_family_s_way_to_open_its_reasoning_counts(tmp_path, opening):
    template = T0.replace("assistant\n", "assistant\n" + opening)
    found = validate(speak(micro(tmp_path / "m"), template=template), {"engine": VLLM})
    assert only(found, "reasoning-parser-missing").severity == "block"


SWITCH = "{% if enable_thinking is not defined or enable_thinking %}" + THINK + "{% else %}" + T0 + "{% endif %}"
OFF = '{"enable_thinking": false}'


@pytest.mark.parametrize(
    ("engine", "words", "template", "pointer"),
    [
        ({"name": "trtllm", "version": "1.2.0"}, [], THINK, "--reasoning_parser"),
        ({"name": "trtllm", "version": "1.2.0"}, ["--reasoning_parser", "deepseek-r1"], THINK, None),
        ({"name": "vllm", "version": "0.7.3"}, ["--reasoning-parser", "qwen3"], THINK, "--enable-reasoning"),
        ({"name": "vllm", "version": "0.7.3"}, ["--reasoning-parser=qwen3", "--enable-reasoning"], THINK, None),
        (LLAMACPP, ["--reasoning-format", "none"], THINK, "--reasoning-format"),
        (VLLM, ["--default-chat-template-kwargs", OFF], SWITCH, None),
        (VLLM, ["--default-chat-template-kwargs.enable_thinking", "false"], SWITCH, None),
        (VLLM, [], SWITCH, "--reasoning-parser"),
    ],
)
def test_c036_each_engine_has_its_own_way_to_name_a_parser(tmp_path, engine, words, template, pointer):
    found = validate(speak(micro(tmp_path / "m"), template=template), with_arguments(engine, *words))
    blocked = [one for one in found.flaws if one.code == "reasoning-parser-missing"]
    assert [one.pointer for one in blocked] == ([] if pointer is None else [pointer])


@pytest.mark.parametrize(("name", "version"), [("vllm", "0.6.3"), ("tgi", "3.3.0"), ("sglang", "0.4.1")])
def test_c036_an_engine_without_any_parser_blocks(tmp_path, name, version):
    found = validate(speak(micro(tmp_path / "m"), template=THINK), {"engine": {"name": name, "version": version}})
    assert "has none" in only(found, "reasoning-parser-missing").message


# ----------------------------------------------------------------------------------------------------------- stops


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        (["--override-generation-config", '{"eos_token_id": 2}'], [4]),
        (["--override-generation-config", '{"eos_token_id": []}'], [4]),
        (["--override-generation-config.temperature", "0.2"], [4]),
        (["--override_generation_config.temperature=0.2"], [4]),
        (["--override-generation-config", "{}"], []),
        (["--override-generation-config.eos_token_id", "[2, 4]"], []),
    ],
)
def test_c047_an_override_loses_what_it_does_not_name(tmp_path, words, lost):
    root = speak(micro(tmp_path / "m"), template=None)
    write_json(root / "generation_config.json", {"eos_token_id": [2, 4]})
    found = validate(root, with_arguments(VLLM, *words))
    assert codes(found, "block") == ({"stop-set-overridden"} if lost else set())
    if lost:
        assert (only(found, "stop-set-overridden").found["effective"]) == [2]


# ---------------------------------------------------------------------------------------------------------- rotary

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
KINDS = {"full_attention": {"rope_type": "default", "rope_theta": 1_000_000}}
MROPE = {"type": "mrope", "mrope_section": [1, 1]}
LOCAL = {"sliding_attention": {"rope_type": "default", "rope_theta": 20_000}}


@pytest.mark.parametrize(
    ("changes", "version", "found"),
    [
        ({"rope_parameters": YARN | {"rope_theta": 10_000}}, "4.57.0", {"type": "default", "transformers": "4.57.0"}),
        ({"rope_parameters": YARN | {"rope_theta": 10_000}}, "5.1.0", None),
        ({"rope_parameters": YARN | {"rope_theta": 10_000}, "rope_scaling": YARN}, "4.57.0", None),
        ({"rope_theta": None, "rope_scaling": YARN | {"rope_theta": 5e5}}, "4.57.0", {"theta": 10_000}),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 1e6}, "model_type": "mixtral"}, "4.57.0", None),
        ({"rope_scaling": MROPE, "rope_parameters": MROPE | {"type": None, "rope_type": "default"}}, None, None),
        (
            {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 8.0}},
            None,
            {"rope_scaling.factor": 4.0, "rope_parameters.factor": 8.0},
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
            None,
            {"rope_scaling.rope_type": "yarn", "rope_parameters.rope_type": "default"},
        ),
        (
            {"rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "rope_parameters": KINDS | LOCAL},
            None,
            {"rope_local_base_freq": 10_000, "rope_parameters.sliding_attention.rope_theta": 20_000},
        ),
    ],
)
def test_c071_scaling_and_local_frequencies_have_two_places_too(tmp_path, changes, version, found):
    engine = VLLM | {"build": {"transformers": version} if version else {}}
    flaws = [
        one for one in validate(micro(tmp_path / "m", **changes), {"engine": engine}).flaws if one.code == "rope-format"
    ]
    assert len(flaws) == (found is not None)
    if found is not None:
        assert flaws[0].found.items() >= found.items()


# ------------------------------------------------------------------------------------------------------------ GGUF


def header_of(root, **changes):
    """Write CHAIN as a GGUF file whose header says other things of its tokens."""
    root.mkdir(parents=True, exist_ok=True)
    made = gguf.GGUFWriter.add_token_types

    def types(writer, kinds):
        return made(writer, [changes.get("kinds", {}).get(number, kind) for number, kind in enumerate(kinds)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_token_types", types)
        options = {key: value for key, value in changes.items() if key != "kinds"}
        chain.write_chain(root / "model.gguf", **options)
    return root


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ({}, {}),
        ({3: 1}, {"<|im_start|>": "block"}),
        ({4: 1}, {"<|im_end|>": "warn"}),
        ({3: 4, 4: 4}, {}),
        ({3: 6, 1: 1}, {"<s>": "block", "<|im_start|>": "block"}),
    ],
)
def test_c041_a_marker_of_a_gguf_file_that_is_a_plain_token_is_split(tmp_path, kinds, told):
    flaws = [one for one in validate(header_of(tmp_path / "m", kinds=kinds)).flaws if one.code == "marker-split"]
    assert {one.found["token"]: one.severity.value for one in flaws} == told
    assert {one.pointer for one in flaws} <= {"tokenizer.ggml.token_type"}


@pytest.mark.parametrize(
    ("features", "add_bos", "severity"),
    [
        (None, True, "info"),
        (["chat"], True, "info"),
        (["chat", "completions"], True, "info"),
        (["completions"], False, None),
    ],
)
def test_c030_a_bos_in_a_gguf_file_s_template_and_tokenizer_is_told(tmp_path, features, add_bos, severity):
    root = header_of(tmp_path / "m", template="{{ bos_token }}" + T0, add_bos=add_bos)
    found = validate(root, {"engine": LLAMACPP} | ({"serving": {"features": features}} if features else {}))
    assert [one.severity.value for one in found.flaws if one.code == "double-bos"] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("end", "expected"),
    [("<|im_end|>", set()), ("</s>", {"turn-end-not-a-stop"}), ("<spare>", {"turn-end-not-a-stop"})],
)
def test_c046_an_end_at_which_a_gguf_file_does_not_stop_blocks(tmp_path, end, expected):
    found = validate(header_of(tmp_path / "m", template=T0.replace("<|im_end|>", end)))
    assert codes(found, "block") == expected
    assert found.inferred["stops"]["tokenizer"] == [4]


def test_c076_a_draft_in_gguf_must_speak_the_target_s_tokens(tmp_path):
    root = header_of(tmp_path / "m")
    header_of(root / "draft")
    declared = {"engine": LLAMACPP, "draft": "draft"}
    assert alarms(validate(root, declared)) == set()
    header_of(root / "draft", extra_tokens=(chain.EXTRA_TOKENS[0], *chain.EXTRA_TOKENS[:0:-1]))
    flaw = only(validate(root, declared), "draft-vocab")
    assert (flaw.found["first_difference"], flaw.severity) == (262, "block")
