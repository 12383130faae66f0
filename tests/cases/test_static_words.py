"""Incident cases of tokenizer, template, stops and sampling, in their named forms, with controls and neighbours."""

import pytest

from tests.support import chain
from tests.support.checkpoints import (
    T0,
    TOOL_CALL,
    added_token,
    alarms,
    codes,
    edit_json,
    micro,
    micro_tensors,
    only,
    speak,
    tok,
    validate,
    write_json,
)

VLLM = {"name": "vllm", "version": "0.32.0"}
LLAMACPP = {"name": "llamacpp", "version": "2026.10.11549"}
BOS = "{{ bos_token }}" + T0
CHATML = ("<pad>", "<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")


def test_c030_a_bos_in_template_and_tokenizer_warns_with_both_counts(tmp_path):
    flaw = only(validate(speak(micro(tmp_path / "m"), template=BOS, bos=True)), "double-bos")
    assert flaw.severity == "warn"
    assert flaw.expected == {"tokens": 24, "start": [1, 3, 122]}
    assert flaw.found == {"tokens": 25, "start": [1, 1, 3]}


@pytest.mark.parametrize(("template", "bos"), [(T0, True), (BOS, False), (T0, False)])
def test_c030_one_bos_or_none_is_no_fault(tmp_path, template, bos):
    assert alarms(validate(speak(micro(tmp_path / "m"), template=template, bos=bos))) == set()


def test_c030_a_bos_written_as_its_text_counts_too(tmp_path):
    names = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
    root = speak(micro(tmp_path / "m"), template="<bos>" + T0, bos=True, names=names)
    assert only(validate(root, {"engine": VLLM}), "double-bos").severity == "warn"


def test_c030_an_engine_that_never_adds_it_to_a_chat_is_only_told(tmp_path):
    root = speak(micro(tmp_path / "m"), template=BOS, bos=True)
    found = validate(root, {"engine": VLLM, "serving": {"features": ["chat", "streaming"]}})
    assert only(found, "double-bos").severity == "info"
    both = validate(root, {"engine": VLLM, "serving": {"features": ["chat", "completions"]}})
    assert only(both, "double-bos").severity == "warn"


def _tools(line):
    return (
        "{% if tools %}{% for t in tools %}{{ t['function']['name'] }}"
        "{% for n, p in t['function']['parameters']['properties'].items() %}"
        + line
        + "{% endfor %}{% endfor %}{% endif %}"
        + T0
    )


@pytest.mark.parametrize(
    ("line", "reason", "word"),
    [
        ("{{ p['type'] + ';' }}", "template-undefined", "no attribute 'type'"),
        ("{{ p['type']|upper }}", None, "prints nothing in place of type"),
        ("{{ p.type }}", None, "prints nothing in place of type"),
    ],
)
def test_c033_a_template_that_reads_the_type_of_a_reference_breaks(tmp_path, line, reason, word):
    flaw = next(
        one
        for one in validate(speak(micro(tmp_path / "m"), template=_tools(line))).flaws
        if one.found["parameter"] == "$ref"
    )
    assert (flaw.code, flaw.severity) == ("template-tool-schema", "block")
    assert flaw.found["reason"] == reason
    assert word in flaw.message


@pytest.mark.parametrize(
    "line",
    [
        "{{ n }}: {{ p | tojson }}",
        "{{ n }}{% if p.type is defined %}{{ p.type }}{% endif %}",
        "{{ p.type | default('any') }}",
    ],
)
def test_c033_a_template_that_prints_schemas_whole_or_asks_first_is_sound(tmp_path, line):
    root = speak(micro(tmp_path / "m"), template=_tools(line))
    assert alarms(validate(root, {"serving": {"features": ["chat", "tools"]}})) == set()


def test_c034_a_date_in_the_template_warns(tmp_path):
    template = "Today: {{ strftime_now('%d %b %Y') }}\n" + T0
    found = validate(speak(micro(tmp_path / "m"), template=template))
    flaw = only(found, "template-clock")
    assert flaw.severity == "warn"
    assert flaw.found["character"] == 7
    assert found.verdict == "passed"


def test_c034_a_date_that_somebody_supplies_is_none(tmp_path):
    template = (
        "{% if not date is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}Today: {{ date }}\n" + T0
    )
    root = speak(micro(tmp_path / "m"), template=template)
    assert alarms(validate(root, {"template": {"arguments": {"date": "26 Jul 2024"}}})) == set()
    assert alarms(validate(root)) == {"template-clock"}


THINK = T0.replace("assistant\n", "assistant\n<think>\n")


@pytest.mark.parametrize(
    ("engine", "opening"),
    [
        *((VLLM, opening) for opening in ("<think>\n", "<think>", "<thinking>\n", "<think>\nOkay, ", "[THINK]")),
        ({"name": "sglang", "version": "0.5.4"}, "<think>\n"),
    ],
)
def test_c036_an_open_think_without_a_parser_blocks(tmp_path, engine, opening):
    template = T0.replace("assistant\n", "assistant\n" + opening)
    found = validate(speak(micro(tmp_path / "m"), template=template), {"engine": engine})
    assert only(found, "reasoning-parser-missing").severity == "block"


@pytest.mark.parametrize(
    "told",
    [
        {"engine": VLLM | {"arguments": ["--reasoning-parser", "deepseek_r1"]}},
        {"engine": VLLM | {"arguments": ["--reasoning-parser=qwen3"]}},
        {"engine": VLLM, "template": {"reasoning_parser": "qwen3"}},
        {"engine": {"name": "llamacpp", "version": "2026.10.11549"}},
        {},
    ],
)
def test_c036_a_parser_or_an_engine_that_needs_none_is_sound(tmp_path, told):
    found = validate(speak(micro(tmp_path / "m"), template=THINK), told)
    assert "reasoning-parser-missing" not in alarms(found)


def test_c036_words_about_thinking_open_nothing(tmp_path):
    template = "<|im_start|>system\nReason inside <think>.<|im_end|>\n" + T0
    assert alarms(validate(speak(micro(tmp_path / "m"), template=template), {"engine": VLLM})) == set()


def test_a_template_that_the_launch_arguments_name_is_the_one_that_counts(tmp_path):
    root = speak(micro(tmp_path / "m"))
    (root / "other.jinja").write_text(THINK)
    engine = VLLM | {"arguments": ["--chat-template", "/models/m/other.jinja"]}
    assert only(validate(root, {"engine": engine}), "reasoning-parser-missing").file == "other.jinja"
    engine = VLLM | {"arguments": ["--chat-template", "/elsewhere/x.jinja"]}
    assert alarms(validate(root, {"engine": engine, "serving": {"features": ["chat"]}})) == set()


def test_c036_a_think_that_is_closed_at_once_is_sound(tmp_path):
    template = T0.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n")
    assert alarms(validate(speak(micro(tmp_path / "m"), template=template), {"engine": VLLM})) == set()


def test_c040_a_special_token_that_the_tokenizer_lacks_would_be_appended(tmp_path):
    root = speak(micro(tmp_path / "m"))
    write_json(root / "special_tokens_map.json", {"additional_special_tokens": ["<|plugin|>"]})
    found = validate(root)
    flaw = only(found, "special-token-unknown")
    assert flaw.found == {"token": "<|plugin|>", "id": 264}
    assert (flaw.expected, flaw.severity) == ({"rows": 264}, "block")


def test_c040_several_unknown_tokens_get_ids_one_after_another(tmp_path):
    root = speak(
        micro(tmp_path / "m"), config={"additional_special_tokens": ["<|a|>", {"content": "<|b|>"}, "<|im_end|>"]}
    )
    found = [one.found for one in validate(root).flaws if one.code == "special-token-unknown"]
    assert found == [{"token": "<|a|>", "id": 264}, {"token": "<|b|>", "id": 265}]


def test_c040_rows_that_are_padding_take_it_with_a_warning(tmp_path):
    root = speak(
        micro(tmp_path / "m", vocab_size=320, tensors=_rows(320)), config={"additional_special_tokens": ["<|a|>"]}
    )
    assert only(validate(root), "special-token-unknown").severity == "warn"


def _rows(count):
    return [one._replace(shape=(count, 8)) if one.shape == (264, 8) else one for one in micro_tensors()]


def test_c040_more_rows_than_tokens_are_usual_and_fewer_are_not(tmp_path):
    assert validate(speak(micro(tmp_path / "a", vocab_size=320, tensors=_rows(320)))).flaws == ()
    flaw = only(
        validate(speak(micro(tmp_path / "b", vocab_size=256, tensors=_rows(256)))), "vocabulary-exceeds-embedding"
    )
    assert flaw.found["count"] == 8
    assert flaw.expected == {"rows": 256}


def test_c041_a_marker_that_lost_its_flag_is_counted_in_pieces(tmp_path):
    root = speak(micro(tmp_path / "m"), without_added=["<|im_end|>"])
    found = validate(root)
    flaw = only(found, "marker-split")
    assert (flaw.found["token"], flaw.found["id"], flaw.found["is_stop"]) == ("<|im_end|>", 4, True)
    assert (flaw.found["pieces"], flaw.found["prompt_tokens"]) == (10, 32)
    assert flaw.expected == {"pieces": 1, "prompt_tokens": 23}
    assert codes(found, "block") == {"marker-split"}


@pytest.mark.parametrize("lost", ["<|im_start|>", "</s>"])
def test_c041_other_markers_are_found_too(tmp_path, lost):
    root = speak(micro(tmp_path / "m"), without_added=[lost], config={"eos_token": "<|im_end|>", "bos_token": None})
    assert lost in {one.found["token"] for one in validate(root).flaws if one.code == "marker-split"}


def test_c041_a_token_that_merges_reach_is_whole_without_a_flag(tmp_path):
    root = speak(micro(tmp_path / "m"), without_added=["<|im_end|>"])

    def merge(told):
        text = "<|im_end|>"
        told["model"]["merges"] = [f"{text[:end]} {text[end]}" for end in range(1, len(text))]
        told["model"]["vocab"] |= {text[:end]: 300 + end for end in range(2, len(text))}

    edit_json(root / "tokenizer.json", merge)
    assert "marker-split" not in codes(validate(root))


def test_c041_a_flag_that_only_the_configuration_has_warns(tmp_path):
    decoder = {"4": added_token(4, "<|im_end|>", special=True)}
    root = speak(micro(tmp_path / "m"), without_added=["<|im_end|>"], config={"added_tokens_decoder": decoder})
    assert only(validate(root), "marker-split").severity == "warn"


# --------------------------------------------------------------------------------------------------------- stops


def _generation(root, **told):
    write_json(root / "generation_config.json", told)
    return root


def test_c046_stop_ids_of_three_files_are_shown_beside_each_other(tmp_path):
    root = _generation(speak(micro(tmp_path / "m")))
    flaw = only(validate(root), "eos-sources-disagree")
    assert (flaw.severity, flaw.file, flaw.pointer) == ("warn", "config.json", "/eos_token_id")
    assert (flaw.found["config"], flaw.found["generation_config"], flaw.found["tokenizer"]) == ([2, 4], [], [2])


@pytest.mark.parametrize(
    ("engine", "effective", "severity"),
    [
        ({"name": "vllm", "version": "0.32.0"}, [2], "block"),
        ({"name": "vllm", "version": "0.4.0"}, [2], "block"),
        ({"name": "sglang", "version": "0.5.4"}, [2, 4], "warn"),
        ({"name": "transformers", "version": "4.57.0"}, [], "block"),
    ],
)
def test_c046_an_engine_whose_own_set_lacks_one_blocks(tmp_path, engine, effective, severity):
    flaw = only(validate(_generation(speak(micro(tmp_path / "m"))), {"engine": engine}), "eos-sources-disagree")
    assert (flaw.found["effective"], flaw.severity) == (effective, severity)


@pytest.mark.parametrize(
    ("engine", "severity"),
    [({}, "warn"), ({"engine": VLLM}, "warn"), ({"engine": {"name": "transformers", "version": "4.57.0"}}, "block")],
)
def test_c046_a_generation_config_that_shares_no_stop_with_the_others_is_told(tmp_path, engine, severity):
    root = _generation(speak(micro(tmp_path / "m", eos_token_id=4), config={"eos_token": "<|im_end|>"}), eos_token_id=3)
    flaw = only(validate(root, engine), "eos-sources-disagree")
    assert (flaw.severity, flaw.file, flaw.pointer) == (severity, "generation_config.json", "/eos_token_id")


@pytest.mark.parametrize("generation", [None, {"eos_token_id": [2, 4]}, {"eos_token_id": [4, 2, 3]}])
def test_c046_files_that_add_up_are_no_fault(tmp_path, generation):
    root = speak(micro(tmp_path / "m"))
    if generation is not None:
        _generation(root, **generation)
    assert alarms(validate(root, {"engine": VLLM})) == set()


def test_c046_the_tokenizer_s_own_beside_the_others_is_no_fault(tmp_path):
    root = _generation(speak(micro(tmp_path / "m", eos_token_id=4), names=CHATML), eos_token_id=[4, 2])
    assert alarms(validate(root, {"engine": VLLM})) == set()
    root = _generation(speak(micro(tmp_path / "n", eos_token_id=4), names=CHATML), eos_token_id=4)
    assert alarms(validate(root, {"engine": VLLM})) == set()


def test_a_turn_s_end_at_which_nothing_stops_blocks(tmp_path):
    root = _generation(speak(micro(tmp_path / "m", eos_token_id=2)), eos_token_id=2)
    flaw = only(validate(root), "turn-end-not-a-stop")
    assert flaw.found["token"] == "<|im_end|>"
    assert flaw.pointer is None  # a template has no keys
    assert flaw.expected == {"stops": [2, 4]}


OVERRIDE = ["--override-generation-config", '{"temperature":0.2}']


def test_c047_an_override_takes_the_stop_ids_away(tmp_path):
    root = _generation(speak(micro(tmp_path / "m")), eos_token_id=[2, 4])
    found = validate(root, {"engine": VLLM | {"arguments": OVERRIDE}})
    flaw = only(found, "stop-set-overridden")
    assert (flaw.found["effective"], flaw.expected) == ([2], {"stops": [2, 4]})
    assert codes(found, "block") == {"stop-set-overridden"}


@pytest.mark.parametrize(
    ("words", "eos"),
    [
        ([], [2, 4]),
        (["--override-generation-config", '{"temperature":0.2,"eos_token_id":[2,4]}'], [2, 4]),
        (["--max-model-len", "64"], [2, 4]),
    ],
)
def test_c047_without_an_override_or_with_the_ids_in_it_nothing_is_lost(tmp_path, words, eos):
    root = _generation(speak(micro(tmp_path / "m")), eos_token_id=eos)
    assert alarms(validate(root, {"engine": VLLM | {"arguments": words}})) == set()


def test_c047_an_override_loses_nothing_where_the_tokenizer_has_the_only_stop(tmp_path):
    root = _generation(speak(micro(tmp_path / "m", eos_token_id=4), config={"eos_token": "<|im_end|>"}), eos_token_id=4)
    assert "stop-set-overridden" not in codes(validate(root, {"engine": VLLM | {"arguments": OVERRIDE}}))


# ------------------------------------------------------------------------------------------------------ sampling

SAMPLING = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [2, 4]}


@pytest.mark.parametrize(
    ("engine", "applies"),
    [
        ({"name": "vllm", "version": "0.32.0"}, True),
        ({"name": "sglang", "version": "0.5.4"}, True),
        ({"name": "transformers", "version": "5.0.0", "rules": {"sampling_defaults": "all"}}, True),
        ({"name": "trtllm", "version": "1.2.0"}, False),
        ({"name": "vllm", "version": "0.7.3"}, False),
        ({"name": "tgi", "version": "3.3.0"}, False),
        ({"name": "vllm", "version": "0.32.0", "arguments": ["--generation-config", "vllm"]}, False),
    ],
)
def test_c049_an_engine_that_ignores_the_defaults_warns_with_both(tmp_path, engine, applies):
    root = _generation(speak(micro(tmp_path / "m")), **SAMPLING)
    found = validate(root, {"engine": engine})
    assert ("engine-sampling-diff" in alarms(found)) is not applies
    if not applies:
        flaw = only(found, "engine-sampling-diff")
        assert flaw.expected == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
        assert flaw.found == {"temperature": 1.0, "top_k": "off", "top_p": 1.0}


def test_c049_an_engine_with_defaults_of_its_own_is_held_to_those(tmp_path):
    root = _generation(speak(micro(tmp_path / "m")), **SAMPLING)
    flaw = only(validate(root, {"engine": LLAMACPP}), "engine-sampling-diff")
    assert (flaw.found, flaw.expected) == ({"temperature": 0.8, "top_k": 40}, {"temperature": 0.6, "top_k": 20})


def test_c049_defaults_that_change_nothing_are_no_difference(tmp_path):
    neutral = {"temperature": 1.0, "top_p": 1, "top_k": 0, "repetition_penalty": 1.0, "eos_token_id": [2, 4]}
    root = _generation(speak(micro(tmp_path / "m")), **neutral)
    assert alarms(validate(root, {"engine": {"name": "trtllm", "version": "1.2.0"}})) == set()


def test_c048_the_effective_defaults_are_inferred_for_each_engine(tmp_path):
    root = _generation(speak(micro(tmp_path / "m")), repetition_penalty=1.05, eos_token_id=[2, 4])
    assert validate(root, {"engine": VLLM}).inferred["sampling"]["repetition_penalty"] == 1.05
    told = validate(root, {"engine": {"name": "trtllm", "version": "1.2.0"}})
    assert told.inferred["sampling"]["repetition_penalty"] == 1.0


@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("top_p", 1.5), ("top_p", 0), ("min_p", "x")])
def test_a_default_that_is_no_possible_value_blocks(tmp_path, name, value):
    root = _generation(speak(micro(tmp_path / "m")), **{name: value}, eos_token_id=[2, 4])
    assert "sampling-out-of-range" in codes(validate(root), "block")


# ------------------------------------------------------------------------------------------- template and features


def test_a_chat_without_a_template_blocks_where_chat_is_declared(tmp_path):
    root = speak(micro(tmp_path / "m"), template=None)
    assert "template-missing" in codes(validate(root, {"engine": VLLM, "serving": {"features": ["chat"]}}), "block")
    assert alarms(validate(root, {"engine": VLLM, "serving": {"features": ["completions"]}})) == set()


@pytest.mark.parametrize("engine", [VLLM, LLAMACPP], ids=lambda one: one["name"])
def test_a_gguf_file_without_a_template_blocks_where_chat_is_declared(tmp_path, engine):
    chain.write_chain(tmp_path / "model.gguf", template=None)
    flaw = only(validate(tmp_path, {"engine": engine, "serving": {"features": ["chat"]}}), "template-missing")
    assert flaw.severity == "block"
    assert ("would serve it with ChatML" in flaw.message) == (engine is LLAMACPP)
    quiet = validate(tmp_path, {"engine": engine, "serving": {"features": ["completions"]}})
    assert "template-missing" not in codes(quiet)
    (tmp_path / "chat_template.jinja").write_text(T0)
    assert "template-missing" not in codes(validate(tmp_path, {"engine": engine, "serving": {"features": ["chat"]}}))


def test_a_gguf_file_without_a_template_blocks_where_nobody_said_what_is_served(tmp_path):
    chain.write_chain(tmp_path / "model.gguf", template=None)
    for declared in ({}, {"engine": LLAMACPP}):
        assert "template-missing" in codes(validate(tmp_path, declared), "block")
    (tmp_path / "model.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:-64])
    assert codes(validate(tmp_path, {"engine": LLAMACPP})) == {"header-invalid"}  # what it holds is not known
    chain.write_chain(tmp_path / "model.gguf")
    assert "template-missing" not in codes(validate(tmp_path))


def test_a_system_role_that_the_template_refuses_or_drops_blocks(tmp_path):
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + T0
    drops = T0.replace("{% for message in messages %}", "{% for message in messages if message.role != 'system' %}")
    asked = {"serving": {"features": ["chat", "system_role"]}}
    for place, template in enumerate((refuses, drops)):
        root = speak(micro(tmp_path / str(place)), template=template)
        assert "system-role-unsupported" in codes(validate(root, asked), "block")
        assert alarms(validate(root)) == set()


def test_a_template_that_never_opens_the_assistant_s_turn_warns(tmp_path):
    root = speak(micro(tmp_path / "m"), template=T0.split("{% if add_generation_prompt")[0])
    assert "generation-prompt-missing" in alarms(validate(root))


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ raise_exception('no') }}",
        "{{ messages[9].content }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_that_cannot_render_blocks(tmp_path, template):
    assert "template-fails" in codes(validate(speak(micro(tmp_path / "m"), template=template)), "block")


def test_two_templates_that_differ_warn(tmp_path):
    root = speak(micro(tmp_path / "m"), config={"chat_template": T0 + " "})
    assert alarms(validate(root)) == set()
    root = speak(micro(tmp_path / "n"), config={"chat_template": T0 + "x"})
    assert alarms(validate(root)) == {"template-sources-disagree"}


@pytest.mark.parametrize(
    ("engine", "is_missing"),
    [
        (VLLM, True),
        (VLLM | {"arguments": ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]}, False),
        (VLLM | {"arguments": ["--tool-call-parser", "hermes"]}, True),
        ({"name": "sglang", "version": "0.5.4", "arguments": ["--tool-call-parser", "qwen25"]}, False),
    ],
)
def test_c112_tools_need_their_flags(tmp_path, engine, is_missing):
    root = speak(micro(tmp_path / "m"), template=_tools("{{ n }}{{ t['function']['name'] }}"))
    found = validate(root, {"engine": engine, "serving": {"features": ["chat", "tools"]}})
    assert ("tool-parser-missing" in codes(found, "block")) is is_missing


def test_c112_llama_cpp_takes_its_parser_from_the_template(tmp_path):
    root = speak(micro(tmp_path / "m"))
    asked = {"engine": {"name": "llama.cpp", "version": "2026.10"}, "serving": {"features": ["chat", "tools"]}}
    assert "tool-parser-missing" in codes(validate(root, asked), "block")
    assert TOOL_CALL in tok()["model"]["vocab"]


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_an_id_that_there_is_not_blocks(tmp_path, key):
    assert "token-id-out-of-range" in codes(validate(micro(tmp_path / "m", **{key: 264})), "block")
    assert alarms(validate(micro(tmp_path / "n", **{key: -1}))) == set()
