"""Neighbours of the incident cases of tokens: files that no library loads, ids that differ, and Mistral's tokenizer."""

import base64
import json

import pytest

from tests.support.checkpoints import (
    SPECIALS,
    T,
    adapt,
    added_token,
    alarms,
    byte_alphabet,
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
MISTRAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
TURNS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)


def spoken(root, change, **options):
    speak(micro(root), **options)
    edit_json(root / "tokenizer.json", change)
    return root


def model(**changes):
    return lambda told: told["model"].update(changes)


def word(text, number):
    return lambda told: told["model"]["vocab"].update({text: number})


def tekken(size=264, specials=MISTRAL, *, count=8, plain=256):
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(bytes([rank % 256] * (1 + rank // 256))).decode()}
        for rank in range(plain)
    ]
    config = {"pattern": ".", "default_vocab_size": size, "default_num_special_tokens": count, "version": "v7"}
    named = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(specials)]
    return {"config": config, "vocab": vocab, "special_tokens": named}


def mistral(root, document, **options):
    speak(micro(root, eos_token_id=2), names=MISTRAL, template=TURNS, **options)
    write_json(root / "tekken.json", document)
    return root


def alone(root, document):
    write_json(micro(root, eos_token_id=2) / "tekken.json", document)
    return root


# --------------------------------------------------------------------------------------------------- not loaded


@pytest.mark.parametrize(
    ("change", "pointer", "found"),
    [
        (model(merges=[["a", "qq"]]), "/model/merges/0", "qq"),
        (model(merges=["a b"]), "/model/merges/0", "ab"),
        (model(merges=["a b c"]), "/model/merges/0", "a b c"),
        (model(type="FooBPE"), "/model/type", "FooBPE"),
        (lambda told: told.pop("model"), "/model", "nothing"),
        (lambda told: told["model"].pop("vocab"), "/model/vocab", "NoneType"),
        (model(type="Unigram", unk_id=9, vocab=[["a", -1.0]]), "/model/unk_id", 9),
        (model(type="WordPiece", unk_token="[UNK]"), "/model/unk_token", "[UNK]"),
        (word("A", "70"), "/model/vocab/A", "70"),
        (word("zzz", -4), "/model/vocab/zzz", -4),
        (word("zzz", 263.0), "/model/vocab/zzz", 263.0),
        (
            lambda told: told["added_tokens"].append(added_token(5, "<x>", special=True) | {"id": "9"}),
            "/added_tokens/8",
            "9",
        ),
    ],
)
def test_c041_a_file_that_no_library_loads_blocks_with_its_place(tmp_path, change, pointer, found):
    flaw = only(validate(spoken(tmp_path / "m", change)), "tokenizer-unloadable")
    assert (flaw.severity, flaw.pointer, flaw.found) == ("block", pointer, found)


@pytest.mark.parametrize("merges", [["a b"], [["a", "b"]]])
def test_c041_merges_in_both_forms_whose_tokens_are_there_are_sound(tmp_path, merges):
    def change(told):
        told["added_tokens"].pop()
        del told["model"]["vocab"]["<spare>"]
        told["model"]["vocab"]["ab"] = 263
        told["model"]["merges"] = merges

    assert alarms(validate(spoken(tmp_path / "m", change))) == set()


def test_c041_pieces_with_an_id_for_what_is_unknown_are_sound(tmp_path):
    def change(told):
        told["model"] = {"type": "Unigram", "unk_id": 5, "vocab": [[text, -1.0] for text in told["model"]["vocab"]]}

    assert codes(validate(spoken(tmp_path / "m", change))) & {"tokenizer-unloadable"} == set()


def test_c041_a_vocabulary_without_its_merges_is_no_tokenizer(tmp_path):
    root = speak(micro(tmp_path / "m"))
    (root / "tokenizer.json").unlink()
    write_json(root / "vocab.json", {text: number for number, text in enumerate([*SPECIALS, *byte_alphabet()])})
    edit_json(root / "tokenizer_config.json", lambda told: told.update(tokenizer_class="GPT2Tokenizer"))
    declared = {"engine": VLLM, "features": ["chat"]}
    assert only(validate(root, declared), "tokenizer-missing").file == "merges.txt"
    (root / "merges.txt").write_text("#version: 0.2\n")
    assert "tokenizer-missing" not in alarms(validate(root, declared))


# ---------------------------------------------------------------------------------------------------- numbering


def renumber(numbers):
    def change(told):
        for one in told["added_tokens"]:
            one["id"] = numbers.get(one["content"], one["id"])

    return change


def test_c041_the_vocabulary_s_own_id_is_the_one_that_the_library_takes(tmp_path):
    found = validate(spoken(tmp_path / "m", renumber({"<|im_start|>": 4, "<|im_end|>": 3})))
    assert alarms(found) == {"token-ids-differ"}
    told = [one.found for one in found.flaws if one.code == "token-ids-differ"]
    assert {"token": "<|im_end|>", "says": 3, "id": 4} in told


def test_c041_an_id_that_another_token_has_is_given_anew(tmp_path):
    change = lambda told: told["added_tokens"].append(added_token(3, "<|other|>", special=True))  # noqa: E731
    found = validate(spoken(tmp_path / "m", change))
    assert only(found, "token-ids-differ").found == {"token": "<|other|>", "says": 3, "id": 264}
    assert only(found, "vocabulary-exceeds-embedding").found["tokens"] == {"<|other|>": 264}


def test_c041_two_tokens_of_one_id_block(tmp_path):
    flaw = only(validate(spoken(tmp_path / "m", word("zz", 70))), "token-ids-differ")
    assert flaw.found["id"] == 70
    assert flaw.found["tokens"][1] == "zz"


def test_c030_an_id_that_the_post_processor_writes_is_the_token_s(tmp_path):
    change = lambda told: told["post_processor"]["special_tokens"]["<s>"].update(ids=[7])  # noqa: E731
    root = spoken(tmp_path / "m", change, bos=True)
    flaw = only(validate(root), "token-ids-differ")
    assert (flaw.found, flaw.expected) == ({"token": "<s>", "ids": [7]}, {"ids": [1]})
    assert flaw.pointer == "/post_processor/special_tokens/<s>/ids"
    assert alarms(validate(speak(root, bos=True))) == set()


def test_c030_a_stop_behind_each_text_warns_where_texts_are_gone_on_with(tmp_path):
    def change(told):
        told["post_processor"]["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})

    root = spoken(tmp_path / "m", change, bos=True)
    for features, severity in ((["completions"], "warn"), (["chat"], "info"), (["chat", "completions"], "warn")):
        found = validate(root, {"engine": VLLM, "features": features})
        assert only(found, "stop-after-prompt").severity == severity
    assert "stop-after-prompt" not in codes(validate(root, {"engine": VLLM, "features": ["embeddings"]}))


def test_c030_a_stop_behind_each_text_is_what_an_encoder_has(tmp_path):
    def change(told):
        told["post_processor"]["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})

    root = spoken(tmp_path / "m", change, bos=True)
    assert "stop-after-prompt" in codes(validate(root))
    edit_json(root / "config.json", lambda told: told.update(is_encoder_decoder=True))
    assert "stop-after-prompt" not in codes(validate(root))


def test_c030_a_class_that_ends_texts_by_its_flag_counts(tmp_path):
    told = {"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True}
    root = speak(micro(tmp_path / "m"), config=told)
    assert only(validate(root), "stop-after-prompt").found == {"after": ["</s>"]}


@pytest.mark.parametrize(
    ("key", "number", "is_fault"),
    [
        ("image_token_id", 151655, True),
        ("image_token_index", 264, True),
        ("audio_token_id", 263, False),
        ("image_token_index", -200, False),
    ],
)
def test_c040_the_id_of_a_picture_s_token_is_one_of_the_rows(tmp_path, key, number, is_fault):
    found = validate(speak(micro(tmp_path / "m", **{key: number})))
    assert alarms(found) == ({"token-id-out-of-range"} if is_fault else set())


@pytest.mark.parametrize(
    ("ids", "found"), [([2, 4, 99999], 99999), ("</s>", "</s>"), ([[2, 4]], "[2, 4]"), ([2, 4], None), (None, None)]
)
def test_c047_ids_of_an_override_are_tokens_that_there_are(tmp_path, ids, found):
    words = ["--override-generation-config", json.dumps({"eos_token_id": ids})]
    told = validate(speak(micro(tmp_path / "m")), {"engine": VLLM | {"arguments": words}})
    flaws = [one for one in told.flaws if one.code == "token-id-out-of-range"]
    assert [(one.pointer, one.found) for one in flaws] == ([(words[0], found)] if found else [])


@pytest.mark.parametrize(("number", "is_fault"), [(70, True), (263, False), (4, False), (260, True)])
def test_c041_the_id_of_a_picture_is_no_piece_of_text(tmp_path, number, is_fault):
    found = validate(speak(micro(tmp_path / "m", image_token_id=number)))
    assert alarms(found) == ({"token-ids-differ"} if is_fault else set())
    if is_fault:
        assert only(found, "token-ids-differ").found["id"] == number


def test_c040_rows_beyond_the_vocabulary_are_ids_too(tmp_path):
    wider = [T(one.name, one.dtype, (272, 8)) if one.shape == (264, 8) else one for one in micro_tensors()]
    root = speak(micro(tmp_path / "m", tensors=wider, image_token_index=264))
    assert "token-id-out-of-range" not in alarms(validate(root))


@pytest.mark.parametrize(("name", "count", "is_fault"), [("tiktoken.model", 265, True), ("qwen.tiktoken", 264, False)])
def test_c040_files_of_ranks_are_held_to_the_rows(tmp_path, name, count, is_fault):
    root = micro(tmp_path / "m")
    lines = (base64.b64encode(bytes([n % 256] * (1 + n // 256))) + b" %d\n" % n for n in range(count))
    (root / name).write_bytes(b"".join(lines))
    found = validate(root, {"engine": VLLM, "features": ["completions"]})
    assert alarms(found) == ({"vocabulary-exceeds-embedding"} if is_fault else set())


# --------------------------------------------------------------------------------------------------- tekken.json


@pytest.mark.parametrize(
    ("document", "code"),
    [
        (tekken(272, plain=264), "vocabulary-exceeds-embedding"),
        (tekken(300), "vocabulary-exceeds-embedding"),
        (tekken(264, plain=4), None),
        (tekken(specials=("<s>", "<s>")), "tokenizer-unloadable"),
        (tekken(count=3), "tokenizer-unloadable"),
        ({"config": {}}, "tokenizer-unloadable"),
        (tekken(), None),
    ],
)
def test_c040_mistral_s_own_tokenizer_is_held_to_the_rows(tmp_path, document, code):
    declared = {"engine": VLLM | {"arguments": ["--tokenizer-mode", "mistral"]}, "features": ["chat"]}
    assert code in {*alarms(validate(alone(tmp_path / "m", document), declared)), None}
    assert (code is None) == (alarms(validate(tmp_path / "m", declared)) == set())


def test_c041_two_tokenizers_of_one_model_number_their_tokens_alike(tmp_path):
    document = tekken(260, specials=("<unk>", "<s>", "</s>", "[/INST]", "[INST]"))
    flaw = only(validate(mistral(tmp_path / "m", document)), "token-ids-differ")
    assert (flaw.file, flaw.found) == ("tekken.json", {"[/INST]": 3, "[INST]": 4})
    write_json(tmp_path / "m" / "tekken.json", tekken(260))
    assert alarms(validate(tmp_path / "m")) == set()


def test_c041_a_tokenizer_that_the_engine_is_told_to_use_is_there(tmp_path):
    root = speak(micro(tmp_path / "m"))
    declared = {"engine": VLLM | {"arguments": ["--tokenizer-mode", "mistral"]}}
    assert only(validate(root, declared), "tokenizer-missing").pointer == "--tokenizer-mode"
    write_json(root / "tekken.json", tekken(260, specials=SPECIALS))
    assert alarms(validate(root, declared)) == set()


@pytest.mark.parametrize(
    ("document", "found"),
    [
        (tekken(specials=(*MISTRAL, "[CMD]")), {"[CMD]"}),
        (tekken(specials=("<unk>", "<s>", "</s>", "[/INST]", "[INST]")), {3}),
        (tekken(), set()),
    ],
)
def test_c082_an_adapter_s_own_tokens_are_seen_in_mistral_s_tokenizer(tmp_path, document, found):
    root = alone(tmp_path / "m", tekken())
    write_json(adapt(root / "adapter") / "tekken.json", document)
    told = validate(root, {"engine": VLLM, "adapters": {"one": "adapter"}})
    assert alarms(told) == ({"lora-new-tokens"} if found else set())
    if found:
        said = only(told, "lora-new-tokens").found
        assert set(said.get("tokens", [said.get("first_difference")])) == found
        assert only(told, "lora-new-tokens").file == "adapter/tekken.json"
        assert json.dumps(said)


@pytest.mark.parametrize(("specials", "is_fault"), [(MISTRAL, False), (("<unk>", "<s>", "</s>", "[A]", "[B]"), True)])
def test_c076_a_draft_with_mistral_s_tokenizer_is_held_to_the_target_s_own(tmp_path, specials, is_fault):
    root = mistral(tmp_path / "m", tekken(260))
    alone(root / "draft", tekken(260, specials=specials))
    declared = {"engine": VLLM, "draft": {"directory": "draft", "method": "draft_model", "tokens": 3}}
    assert alarms(validate(root, declared)) == ({"draft-vocab"} if is_fault else set())
