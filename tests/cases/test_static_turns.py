"""Neighbours of the incident cases of templates, stops, parsers and drafts: several turns, calls, heads that draft."""

import pytest

from tests.support.checkpoints import (
    SPECIALS,
    T0,
    WIDTHS,
    T,
    alarms,
    codes,
    edit_json,
    micro,
    micro_tensors,
    only,
    speak,
    validate,
    write_json,
)

VLLM = {"name": "vllm", "version": "0.32.0"}
CHAT = {"engine": VLLM, "features": ["chat", "streaming"]}
OPENING = T0[T0.index("{% if add_generation") :]
TURN = "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
HERMES = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
LISTED = "{{ tools | tojson if tools else '' }}"
CALLS = "{% for c in message.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}</tool_call>{% endfor %}"
CALLED = T0.replace("{{ message['content'] }}", "{{ message['content'] }}" + CALLS)
PLAIN, HARMONY = ("<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"), ("<|call|>", "<|end|>", "<|return|>")


def tooled(*arguments):
    words = list(arguments) or HERMES
    return {"engine": VLLM | {"arguments": words}, "features": ["chat", "streaming", "tools"]}


def spoken(root, template, names=SPECIALS, **changes):
    return speak(micro(root, **changes), template=template, names=names)


# -------------------------------------------------------------------------------------------------- several turns


@pytest.mark.parametrize(
    ("template", "code", "word"),
    [
        (
            "{% if messages|length > 2 %}{{ raise_exception('one') }}{% endif %}" + T0,
            "template-fails",
            "after an answer",
        ),
        ("<|im_start|>user\n{{ messages[-1].content }}<|im_end|>\n" + OPENING, "template-drops-message", "before"),
        (
            "{% for message in messages[:2] %}" + TURN + OPENING,
            "template-drops-message",
            "what the user says after an answer",
        ),
        (T0.replace("message['content']", "message['content'] | e"), "template-drops-message", "changes"),
        (
            T0.replace("message['content']", "message['content'] | replace('\"', '')"),
            "template-drops-message",
            "changes",
        ),
    ],
)
def test_c033_a_template_that_loses_a_turn_of_a_conversation_blocks(tmp_path, template, code, word):
    found = validate(spoken(tmp_path / "m", template), CHAT)
    assert code in codes(found, "block")
    assert any(word in one.message for one in found.flaws if one.code == code)


@pytest.mark.parametrize("role", ["user", "model"])
def test_c033_the_turn_that_is_opened_is_the_one_in_which_answers_stood(tmp_path, role):
    flaw = only(
        validate(spoken(tmp_path / "m", T0.replace("assistant\n", f"{role}\n")), CHAT), "generation-prompt-missing"
    )
    assert (flaw.severity, flaw.found) == ("warn", f"<|im_start|>{role}\n")


@pytest.mark.parametrize(
    "template",
    [
        T0.replace("assistant\n", "assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"),
        T0.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n"),
        T0.replace("{{ message['content'] }}", "{{ message['content'] | trim }}"),
        "{% for message in messages %}"
        + TURN.replace("message['role']", "'model' if message.role == 'assistant' else message.role")
        + OPENING.replace("assistant", "model"),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant<|x|>{{ m.content }}<|im_end|>\n"
            "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
        ),
        (
            "{% for m in messages %}<|im_start|><|a|>{% if m.role == 'assistant' %}<|answer|>{% endif %}{{ m.content }}"
            "<|im_end|>{% endfor %}<|im_start|><|a|>"
        ),
    ],
)
def test_c033_what_families_write_beside_an_opening_is_sound(tmp_path, template):
    assert alarms(validate(spoken(tmp_path / "m", template), CHAT)) == set()


@pytest.mark.parametrize(
    ("template", "is_fault"),
    [
        ("{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}" + LISTED + T0, True),
        (LISTED + "{% for message in messages if message.role != 'tool' %}" + TURN + OPENING, True),
        (LISTED + T0, False),
        (LISTED + CALLED, False),
    ],
)
def test_c033_what_a_tool_answers_is_written_where_tools_are_declared(tmp_path, template, is_fault):
    root = spoken(tmp_path / "m", template)
    assert alarms(validate(root, tooled())) == ({"template-tools-missing"} if is_fault else set())
    assert alarms(validate(root, CHAT)) == set()


def test_c033_a_template_without_tools_is_told_once(tmp_path):
    root = spoken(tmp_path / "m", "{% for message in messages if message.role != 'tool' %}" + TURN + OPENING)
    assert "does not write them" in only(validate(root, tooled()), "template-tools-missing").message


def test_c033_a_byte_order_mark_is_written_before_each_prompt(tmp_path):
    root = spoken(tmp_path / "m", "\ufeff" + T0)
    flaw = next(one for one in validate(root, CHAT).flaws if one.code == "config-unparseable")
    assert "byte order mark" in flaw.message


# ---------------------------------------------------------------------------------------------------------- stops


def test_c046_a_template_whose_end_no_file_names_blocks_without_any_stop(tmp_path):
    root = speak(micro(tmp_path / "m", eos_token_id=None), config={"eos_token": None})
    flaw = only(validate(root, CHAT), "turn-end-not-a-stop")
    assert (flaw.severity, flaw.found["token"], flaw.found["stops"]) == ("block", "<|im_end|>", [])


def test_c046_a_call_of_a_tool_ends_at_a_stop_of_its_own(tmp_path):
    template = LISTED + (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{% for c in m.tool_calls or [] %}"
        "{{ c.function | tojson }}<|call|>{% else %}{{ m.content }}"
        "{{ '<|return|>' if m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    root = spoken(tmp_path / "m", template, (*HARMONY, "<|start|>", "<|message|>"), eos_token_id=2, pad_token_id=None)
    declared = tooled("--enable-auto-tool-choice", "--tool-call-parser", "openai")
    flaw = only(validate(root, declared), "turn-end-not-a-stop")
    assert (flaw.found["token"], flaw.found["id"], flaw.expected) == ("<|call|>", 0, {"stops": [0, 2]})
    assert "turn-end-not-a-stop" not in codes(validate(root, CHAT))
    edit_json(root / "config.json", lambda told: told.update(eos_token_id=[0, 2]))
    write_json(root / "generation_config.json", {"eos_token_id": [0, 2]})
    assert "turn-end-not-a-stop" not in codes(validate(root, declared))


GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def test_c046_where_the_next_turn_ends_an_answer_its_beginning_is_a_stop(tmp_path):
    root = spoken(tmp_path / "m", GLM, PLAIN, eos_token_id=2)
    flaw = only(validate(root, CHAT), "turn-end-not-a-stop")
    assert (flaw.severity, flaw.found["token"], flaw.found["id"]) == ("warn", "<|user|>", 3)
    edit_json(root / "config.json", lambda told: told.update(eos_token_id=[2, 3]))
    assert alarms(validate(root, CHAT)) == set()


def test_c046_names_of_roles_in_plain_text_end_nothing(tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + OPENING.replace(
        "<|im_start|>", ""
    )
    assert alarms(validate(spoken(tmp_path / "m", template, eos_token_id=2), CHAT)) == set()


@pytest.mark.parametrize(
    ("engine", "told", "is_fault"),
    [
        (VLLM, {"max_new_tokens": 16}, True),
        (VLLM, {"max_new_tokens": 128}, False),
        (VLLM | {"arguments": ["--generation-config", "vllm"]}, {"max_new_tokens": 16}, False),
        (VLLM | {"version": "0.7.3"}, {"max_new_tokens": 16}, False),
        ({"name": "sglang", "version": "0.5.15"}, {"max_new_tokens": 16}, False),
    ],
)
def test_c048_a_number_of_tokens_at_which_answers_end_is_told(tmp_path, engine, told, is_fault):
    root = speak(micro(tmp_path / "m", eos_token_id=2), template=None)
    write_json(root / "generation_config.json", {"eos_token_id": 2, **told})
    found = validate(root, {"engine": engine, "features": ["completions"]})
    assert ("answers-limited" in alarms(found)) is is_fault


# --------------------------------------------------------------------------------------------------------- parsers


@pytest.mark.parametrize(
    ("opening", "parser", "is_fault"),
    [
        ("<think>\n", "seed_oss", True),
        ("<think>\n", "mistral", True),
        ("<seed:think>", "deepseek_r1", True),
        ("<think>\n", "deepseek_r1", False),
        ("<think>\n", "qwen3", False),
        ("<think>\n", "step3", False),
    ],
)
def test_c036_a_parser_of_another_family_closes_nothing(tmp_path, opening, parser, is_fault):
    root = spoken(tmp_path / "m", T0.replace("assistant\n", "assistant\n" + opening))
    found = validate(root, CHAT | {"engine": VLLM | {"arguments": ["--reasoning-parser", parser]}})
    assert alarms(found) == ({"parser-differs"} if is_fault else set())
    if is_fault:
        assert only(found, "parser-differs").severity == "block"


@pytest.mark.parametrize(
    ("parser", "is_fault"), [("kimi", True), ("mistral", True), ("qwen3", False), ("step3", False)]
)
def test_c036_a_parser_of_another_family_closes_nothing_in_sglang_either(tmp_path, parser, is_fault):
    root = spoken(tmp_path / "m", T0.replace("assistant\n", "assistant\n<think>\n"))
    engine = {"name": "sglang", "version": "0.5.15", "arguments": ["--reasoning-parser", parser]}
    assert alarms(validate(root, CHAT | {"engine": engine})) == ({"parser-differs"} if is_fault else set())


@pytest.mark.parametrize(("parser", "is_fault"), [("qwen3_coder", True), ("kimi_k2", True), ("qwen25", False)])
def test_c112_a_parser_of_another_family_finds_no_calls_in_sglang_either(tmp_path, parser, is_fault):
    engine = {"name": "sglang", "version": "0.5.15", "arguments": ["--tool-call-parser", parser]}
    found = validate(spoken(tmp_path / "m", LISTED + CALLED), tooled() | {"engine": engine})
    assert alarms(found) == ({"parser-differs"} if is_fault else set())


def test_c036_reasoning_that_is_declared_needs_a_parser(tmp_path):
    declared = {"engine": VLLM, "features": ["chat", "reasoning", "streaming"]}
    root = speak(micro(tmp_path / "m"))
    assert only(validate(root, declared), "reasoning-parser-missing").expected == {"argument": "--reasoning-parser"}
    declared["engine"] = VLLM | {"arguments": ["--reasoning-parser", "qwen3"]}
    assert alarms(validate(root, declared)) == set()
    declared["engine"] = {"name": "llamacpp", "version": "2026.10.11549"}
    assert "reasoning-parser-missing" not in alarms(validate(root, declared))


@pytest.mark.parametrize(
    ("parser", "more", "code"),
    [
        ("hermes", (), None),
        ("qwen3_json", (), None),
        ("qwen3_coder", (), "parser-differs"),
        ("kimi_k2", (), "parser-differs"),
        ("mistral", ("[TOOL_CALLS]",), "parser-differs"),
        ("llama3_json", (), None),
    ],
)
def test_c112_a_parser_of_another_family_finds_no_calls(tmp_path, parser, more, code):
    wider = [T(one.name, one.dtype, (272, 8)) if one.shape == (264, 8) else one for one in micro_tensors()]
    root = speak(micro(tmp_path / "m", tensors=wider, vocab_size=272), template=LISTED + CALLED, more=more)
    found = validate(root, tooled("--enable-auto-tool-choice", "--tool-call-parser", parser))
    assert alarms(found) == ({code} if code else set())


@pytest.mark.parametrize("parser", ["mistral", "deepseek_v3", "jamba"])
def test_c112_a_parser_that_looks_for_tokens_needs_them(tmp_path, parser):
    root = spoken(tmp_path / "m", LISTED + T0)
    found = validate(root, tooled("--enable-auto-tool-choice", "--tool-call-parser", parser))
    assert only(found, "parser-tokens-missing").severity == "block"
    # Of a vocabulary that is there in part nobody can say what it lacks.
    wider = [T(one.name, one.dtype, (640, 8)) if one.shape == (264, 8) else one for one in micro_tensors()]
    micro(root, tensors=wider, vocab_size=640)
    assert "parser-tokens-missing" not in codes(
        validate(root, tooled("--enable-auto-tool-choice", "--tool-call-parser", parser))
    )


# ---------------------------------------------------------------------------------------------- drafts, rotary, lines


def eagle3(root, *, hidden=8, joined=24, rows=100, places=100, **changes):
    tensors = [T("fc.weight", "BF16", (hidden, joined)), T("lm_head.weight", "BF16", (rows, hidden))]
    tensors += [T("norm.weight", "BF16", (hidden,)), *([T("d2t", "I64", (places,))] if places else [])]
    told = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 100, "hidden_size": hidden}
    return micro(root, tensors=sorted(tensors, key=lambda one: -WIDTHS[one.dtype]), **(told | changes))


@pytest.mark.parametrize(
    ("changes", "code", "pointer"),
    [
        ({"hidden": 16}, "draft-shape", "/hidden_size"),
        ({"target_hidden_size": 16}, "draft-shape", "/target_hidden_size"),
        ({"joined": 20}, "draft-shape", "fc.weight"),
        ({"rows": 90}, "draft-vocab", "lm_head.weight"),
        ({"places": 90}, "draft-vocab", "d2t"),
        ({"places": 0}, "draft-vocab", "d2t"),
        ({"vocab_size": 300}, "draft-vocab", "/vocab_size"),
        ({}, None, None),
        ({"hidden": 16, "target_hidden_size": 8}, None, None),
        ({"draft_vocab_size": 264, "rows": 264, "places": 0}, None, None),
    ],
)
def test_c076_a_head_has_the_target_s_sizes_and_leads_to_its_tokens(tmp_path, changes, code, pointer):
    root = micro(tmp_path / "m")
    eagle3(root / "draft", **changes)
    found = validate(root, {"engine": VLLM, "draft": {"directory": "draft", "method": "eagle3", "tokens": 3}})
    assert alarms(found) == ({code} if code else set())
    if code:
        assert only(found, code).pointer == pointer


@pytest.mark.parametrize(
    ("told", "tensors", "is_fault"),
    [
        ({}, [], True),
        ({"num_nextn_predict_layers": 0}, [], True),
        ({"num_nextn_predict_layers": 1}, [], False),
        ({}, [T("mtp.fc.weight", "BF16", (8, 16))], False),
    ],
)
def test_c076_a_target_that_drafts_by_its_own_layers_has_some(tmp_path, told, tensors, is_fault):
    root = micro(tmp_path / "m", tensors=[*micro_tensors(), *tensors], **told)
    words = ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}']
    assert ("draft-incomplete" in alarms(validate(root, {"engine": VLLM | {"arguments": words}}))) is is_fault


@pytest.mark.parametrize(
    ("older", "newer", "is_fault"),
    [
        ("linear", "yarn", True),
        ("default", "llama3", True),
        ("su", "longrope", False),
        ("mrope", "default", False),
        ("yarn", "yarn", False),
    ],
)
def test_c071_two_names_of_one_scaling_say_the_same(tmp_path, older, newer, is_fault):
    scaling = {"type": older, "rope_type": newer, "factor": 4.0, "original_max_position_embeddings": 64}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if newer == "llama3" else {}
    scaling |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]} if newer == "longrope" else {}
    found = validate(micro(tmp_path / "m", rope_scaling=scaling))
    assert alarms(found) == ({"rope-scaling-invalid"} if is_fault else set())


@pytest.mark.parametrize(
    ("engine", "words", "is_fault"),
    [
        (VLLM, "--max-num-batched-tokens 64 --max-num-seqs 128", True),
        (VLLM, "--max-num-batched-tokens 128 --max-num-seqs 128", False),
        (VLLM, "--max-num-batched-tokens 64 --no-enable-chunked-prefill", True),
        (VLLM, "--max-num-batched-tokens 64 --no-enable-chunked-prefill --max-model-len 64", False),
        (VLLM, '--speculative-config {"method":"ngram"}', True),
        (VLLM, '--speculative-config {"method":"ngram","num_speculative_tokens":0}', True),
        (VLLM, '--speculative-config {"method":"ngram","num_speculative_tokens":3}', False),
        (VLLM, '--speculative-config {"method":"suffix"}', False),
        (VLLM, '--speculative-config {"num_speculative_tokens":2,"prompt_lookup_min":5,"prompt_lookup_max":3}', True),
        ({"name": "tgi", "version": "3.3.6"}, "--max-input-tokens 100 --max-total-tokens 100", True),
        ({"name": "tgi", "version": "3.3.6"}, "--max-input-tokens 99 --max-total-tokens 100", False),
    ],
)
def test_c069_arguments_that_an_engine_refuses_together_block(tmp_path, engine, words, is_fault):
    found = validate(micro(tmp_path / "m", eos_token_id=None), {"engine": engine | {"arguments": words.split(" ")}})
    assert alarms(found) == ({"argument-value"} if is_fault else set())


@pytest.mark.parametrize(("version", "borrows"), [("0.8.5", False), ("0.9.1", True), ("0.32.0", True)])
def test_c070_a_length_of_the_other_file_blocks_and_is_told_as_the_version_takes_it(tmp_path, version, borrows):
    root = micro(tmp_path / "m", max_position_embeddings=131072)
    write_json(root / "params.json", {"dim": 8})
    words = ["--config-format", "mistral", "--max-model-len", "131072"]
    found = validate(root, {"engine": {"name": "vllm", "version": version, "arguments": words}})
    flaw = only(found, "config-sources-disagree")
    assert (flaw.severity, flaw.found["effective"], flaw.found["requested"]) == ("block", 128000, 131072)
    assert ("which vllm takes where it can read it" in flaw.message) is borrows
    write_json(root / "params.json", {"dim": 8, "max_position_embeddings": 131072})
    found = validate(root, {"engine": {"name": "vllm", "version": version, "arguments": words}})
    assert "config-sources-disagree" not in alarms(found)
