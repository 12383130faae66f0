"""Tokenizers without tokenizer.json: their tokens are known too, and what is no such file is no tokenizer."""

import random
import struct

import pytest

from gates.static import word_files
from tests.support.checkpoints import (
    PLAIN,
    SPECIALS,
    T0,
    adapt,
    added_token,
    alarms,
    byte_alphabet,
    codes,
    edit_json,
    micro,
    only,
    speak,
    validate,
    write_json,
)

VLLM = {"engine": {"name": "vllm", "version": "0.32.0"}}
TOKENS = (*SPECIALS, *byte_alphabet(), *PLAIN)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6


def number(value):
    found = b""
    while value >= 0x80:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


def field(tag, raw):
    return number(tag << 3 | 2) + number(len(raw)) + raw


def piece(text, kind=_NORMAL, score=-1.0):
    told = b"" if kind == _NORMAL else number(3 << 3) + number(kind)
    return field(1, field(1, text.encode()) + number(2 << 3 | 5) + struct.pack("<f", score) + told)


def pieces(*texts, whole=SPECIALS, further=b""):
    """The file of SentencePiece with these pieces, and other fields behind them."""
    return b"".join(piece(text, _CONTROL if text in whole else _NORMAL) for text in texts) + further


def of_pieces(root, *texts, names=SPECIALS, template=None, **config):
    """MICRO with a tokenizer.model alone."""
    micro(root)
    (root / "tokenizer.model").write_bytes(pieces(*(texts or TOKENS), whole=names))
    told = {"tokenizer_class": "LlamaTokenizer", "bos_token": names[1], "eos_token": names[2], "add_bos_token": False}
    decoder = {str(n): added_token(n, text, special=True) for n, text in enumerate(names)}
    write_json(
        root / "tokenizer_config.json", told | {"added_tokens_decoder": decoder, "chat_template": template} | config
    )
    return root


def of_bytes(root, *, more=(), without=(), template=None, **config):
    """MICRO with a byte-level vocabulary alone."""
    micro(root)
    write_json(root / "vocab.json", {text: place for place, text in enumerate(TOKENS)})
    (root / "merges.txt").write_text("#version: 0.2\n")
    texts = [*TOKENS[:5], *TOKENS[261:], *more]
    decoder = {str(n if n < 5 else n + 256): added_token(0, text, special=True) for n, text in enumerate(texts)}
    decoder = {key: one for key, one in decoder.items() if one["content"] not in without}
    told = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "</s>",
        "added_tokens_decoder": decoder,
        "chat_template": template,
    }
    write_json(root / "tokenizer_config.json", told | config)
    return root


@pytest.mark.parametrize("make", [of_pieces, of_bytes])
def test_a_sound_tokenizer_of_older_files_raises_nothing_and_is_told(tmp_path, make):
    found = validate(make(tmp_path / "m"), VLLM)
    assert alarms(found) == set()
    assert found.inferred["tokenizer"]["size"] == 264
    assert found.inferred["stops"]["tokenizer"] == [2]
    file = "tokenizer.model" if make is of_pieces else "vocab.json"
    assert found.inferred["from"]["/tokenizer"]["file"] == file


@pytest.mark.parametrize(
    ("config", "is_told"),
    [
        ({"add_bos_token": True}, True),
        ({"add_bos_token": None}, False),
        ({"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}, True),
        ({"tokenizer_class": "OwnTokenizer", "add_bos_token": True}, False),
    ],
)
def test_c030_a_class_of_pieces_that_puts_bos_first_counts(tmp_path, config, is_told):
    root = of_pieces(tmp_path / "m", template="{{ bos_token }}" + T0, **config)
    assert alarms(validate(root)) == ({"double-bos"} if is_told else set())


def test_c041_a_piece_that_was_kept_free_gives_its_id_to_a_token(tmp_path):
    texts = [*TOKENS[:4], "[UNUSED_TOKEN_1]", *TOKENS[5:]]
    root = of_pieces(tmp_path / "m", *texts, tokenizer_class="InternLM2Tokenizer")
    found = validate(root, VLLM)
    assert alarms(found) == set()
    assert found.inferred["tokenizer"]["size"] == 264


def test_c030_the_class_puts_bos_first_where_nobody_says_it(tmp_path):
    root = of_pieces(tmp_path / "m", template="{{ bos_token }}" + T0)
    edit_json(root / "tokenizer_config.json", lambda told: told.pop("add_bos_token"))
    assert alarms(validate(root)) == {"double-bos"}


@pytest.mark.parametrize(
    ("root", "code"),
    [
        (lambda path: of_pieces(path, *TOKENS, "▁more"), "vocabulary-exceeds-embedding"),
        (lambda path: of_pieces(path, additional_special_tokens=["<|plugin|>"]), "special-token-unknown"),
        (lambda path: of_bytes(path, more=["<|plugin|>"]), "vocabulary-exceeds-embedding"),
        (lambda path: of_bytes(path, additional_special_tokens=["<|plugin|>"]), "special-token-unknown"),
        (lambda path: of_bytes(path, additional_special_tokens=["<spare>"]), None),
    ],
)
def test_c040_tokens_beyond_the_embedding_are_found_in_older_files(tmp_path, root, code):
    assert alarms(validate(root(tmp_path / "m"), VLLM)) == ({code} if code else set())


def test_c041_a_marker_of_a_vocabulary_that_no_file_keeps_whole_is_split(tmp_path):
    flaw = only(validate(of_bytes(tmp_path / "m", without=["<|im_end|>"], template=T0)), "marker-split")
    assert (flaw.found["token"], flaw.file, flaw.pointer) == ("<|im_end|>", "vocab.json", None)


def swapped(first, second):
    texts = list(TOKENS)
    texts[first], texts[second] = texts[second], texts[first]
    return texts


@pytest.mark.parametrize(("texts", "place"), [(TOKENS, None), (swapped(100, 101), 100)])
def test_c076_a_draft_of_older_files_speaks_the_target_s_tokens_or_not(tmp_path, texts, place):
    for make in (of_pieces, speak):
        root = tmp_path / make.__name__
        of_pieces(root) if make is of_pieces else speak(micro(root), template=None)
        of_pieces(root / "draft", *texts)
        flaws = [one for one in validate(root, VLLM | {"draft": "draft"}).flaws if one.code == "draft-vocab"]
        assert [(one.found["first_difference"], one.file) for one in flaws] == (
            [] if place is None else [(place, "draft/tokenizer.model")]
        )


def test_c082_new_tokens_of_an_adapter_s_older_files_are_found(tmp_path):
    root = speak(micro(tmp_path / "m"), template=None)
    adapt(root / "adapt")
    for more in ([], ["<cmd>"]):
        write_json(root / "adapt" / "vocab.json", {text: place for place, text in enumerate([*TOKENS, *more])})
        found = validate(root, VLLM | {"adapters": {"adpt": "adapt"}})
        assert codes(found, "block") == ({"lora-new-tokens"} if more else set())


# ------------------------------------------------------------------------------------------------- SentencePiece

SOUND = pieces("<unk>", "a", "▁b", further=field(2, b"\x08\x01") + number(5 << 3) + number(300))


def test_pieces_are_read_with_their_types_whatever_else_the_file_holds(tmp_path):
    path = tmp_path / "tokenizer.model"
    kinds = [("<unk>", _UNKNOWN), ("<s>", _CONTROL), ("[INST]", _USER_DEFINED), ("<0x0A>", _BYTE), ("▁the", _NORMAL)]
    path.write_bytes(field(2, b"x" * 200) + b"".join(piece(*one) for one in kinds) + number(9 << 3 | 1) + b"\0" * 8)
    assert word_files.read_pieces(path) == kinds


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0",
        SOUND[:-1],
        SOUND[:7],
        b"IQ== 0\nIg== 1\n",
        b"version https://git-lfs.github.com/spec/v1\n",
        number(1 << 3) + number(3),
        field(1, b""),
        field(1, field(1, b"\xff\xfe")),
        b"\xff" * 12,
        number(1 << 3 | 2) + number(2**40),
        number(1 << 3 | 3),
        field(2, b"only a trainer"),
    ],
)
def test_what_is_no_model_of_pieces_is_none(tmp_path, raw):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(raw)
    assert word_files.read_pieces(path) is None


def test_bytes_that_chance_changed_are_read_or_are_none(tmp_path):
    path, chance, raw = tmp_path / "tokenizer.model", random.Random(5), pieces(*TOKENS)
    for _ in range(120):
        changed = bytearray(raw)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        path.write_bytes(changed[: chance.randrange(len(changed))] if chance.random() < 0.3 else changed)
        read = word_files.read_pieces(path)
        assert read is None or all(isinstance(text, str) and kind >= 0 for text, kind in read)


def test_a_file_larger_than_any_model_has_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(SOUND)
    assert [text for text, _ in word_files.read_pieces(path)] == ["<unk>", "a", "▁b"]
    monkeypatch.setattr(word_files, "MOST_PIECES", 2)
    assert word_files.read_pieces(path) is None
    monkeypatch.setattr(word_files, "MOST_BYTES", len(SOUND) - 1)
    assert word_files.read_pieces(path) is None
