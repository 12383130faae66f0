"""Whether a tokenizer's library loads its file at all: it refuses what does not add up, and the engine does not boot.

Source: tokenizers 0.23.3, seen to refuse each of these files; `Tekkenizer` of mistral_common 1.13.1 for tekken.json.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from schemas.short import many

_MODELS: Final = ("BPE", "Unigram", "WordLevel", "WordPiece")
_MOST_ID: Final = 2**32 - 1


class Reason(NamedTuple):
    """Why a file is not loaded: where, as a sentence's end, with what is there and what would do."""

    pointer: str
    said: str
    found: object
    expected: object


def reasons(document: Mapping[str, Any]) -> Iterator[Reason]:
    """Yield why tokenizer.json is not loaded, the first of each kind."""
    model = document.get("model")
    if not isinstance(model, dict):
        yield Reason("/model", "has no model", model, "an object")
        return
    kind = model.get("type", "BPE")
    if kind not in _MODELS:
        yield Reason("/model/type", f"has a model of the type {kind!r}", kind, list(_MODELS))
        return
    told = model.get("vocab")
    if kind == "Unigram":
        yield from _unigram(model, told)
        return
    if not isinstance(told, dict):
        yield Reason("/model/vocab", "has no vocabulary", type(told).__name__, "an object from tokens to ids")
        return
    odd = next((text for text, number in told.items() if type(number) is not int or not 0 <= number <= _MOST_ID), None)
    if odd is not None:
        yield Reason(
            f"/model/vocab/{odd}", f"gives {odd!r} the id {told[odd]!r}", told[odd], "a whole number from 0 on"
        )
    elif kind == "BPE":
        yield from _merges(model, told)
    unknown = model.get("unk_token")
    if kind == "WordPiece" and isinstance(unknown, str) and unknown not in told:
        yield Reason("/model/unk_token", f"names {unknown!r} for what is unknown, and has no such token", unknown, None)
    yield from _added(document)


def _unigram(model: Mapping[str, Any], told: object) -> Iterator[Reason]:
    if not isinstance(told, list):
        yield Reason("/model/vocab", "has no list of pieces", type(told).__name__, "a list of pieces and their scores")
        return
    unknown = model.get("unk_id")
    if type(unknown) is int and not 0 <= unknown < len(told):
        said = f"has unk_id {unknown}, and {many(len(told), 'piece')}"
        yield Reason("/model/unk_id", said, unknown, {"below": len(told)})


def _merges(model: Mapping[str, Any], told: Mapping[str, int]) -> Iterator[Reason]:
    merges = model.get("merges")
    prefix = model.get("continuing_subword_prefix")
    start = len(prefix) if isinstance(prefix, str) else 0
    for place, pair in enumerate(merges if isinstance(merges, list) else []):
        parts = pair.split(" ") if isinstance(pair, str) else pair
        where = f"/model/merges/{place}"
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(one, str) for one in parts):
            yield Reason(where, f"has a merge that is no pair: {pair!r}", pair, "two tokens")
            return
        lacking = next((one for one in (*parts, parts[0] + parts[1][start:]) if one not in told), None)
        if lacking is not None:
            said = f"merges {parts[0]!r} and {parts[1]!r}, and {lacking!r} is not in the vocabulary"
            yield Reason(where, said, lacking, "a token of the vocabulary")
            return


def _added(document: Mapping[str, Any]) -> Iterator[Reason]:
    told = document.get("added_tokens")
    for place, one in enumerate(told if isinstance(told, list) else []):
        number = one.get("id") if isinstance(one, dict) else None
        if type(number) is not int or not 0 <= number <= _MOST_ID:
            said = f"has an added token with the id {number!r}"
            yield Reason(f"/added_tokens/{place}", said, number, "a whole number from 0 on")
            return


# ------------------------------------------------------------------------------------------------------ tekken.json


def of_tekken(document: Mapping[str, Any]) -> Iterator[Reason]:
    """Yield why tekken.json is not loaded, the first reason that there is."""
    config, vocab, specials = document.get("config"), document.get("vocab"), document.get("special_tokens")
    if not isinstance(config, dict) or not isinstance(vocab, list):
        lacks = "vocab" if isinstance(config, dict) else "config"
        yield Reason(f"/{lacks}", f"has no {lacks}", None, "config, vocab and special_tokens")
        return
    size, count = config.get("default_vocab_size"), config.get("default_num_special_tokens")
    if type(size) is not int or type(count) is not int:
        said = "does not say default_vocab_size and default_num_special_tokens"
        yield Reason(
            "/config", said, {"default_vocab_size": size, "default_num_special_tokens": count}, "whole numbers"
        )
        return
    if isinstance(specials, list):
        texts = [one.get("token_str") for one in specials if isinstance(one, dict)]
        if len(texts) > count:
            said = f"has {len(texts)} special tokens, and says {count}"
            yield Reason("/config/default_num_special_tokens", said, count, {"at_least": len(texts)})
        if twice := next((text for text in texts if texts.count(text) > 1), None):
            yield Reason("/special_tokens", f"has the special token {twice!r} twice", twice, "each once")
    inner = max(0, size - count)
    odd = next((at for at, one in enumerate(vocab[:inner]) if not isinstance(one, dict) or one.get("rank") != at), None)
    if odd is not None:
        rank = vocab[odd].get("rank") if isinstance(vocab[odd], dict) else None
        yield Reason(f"/vocab/{odd}/rank", f"gives token {odd} of its vocabulary the rank {rank!r}", rank, odd)
