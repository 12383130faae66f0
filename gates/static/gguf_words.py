"""What the tokenizer inside a GGUF file knows, in the words of tokenizer.json, and at what llama.cpp stops.

Source: gguf.md of ggml for the keys, and llama-vocab.cpp of llama.cpp for what they mean when they are left out.
"""

from collections.abc import Mapping
from typing import Any, Final

from gates.files.header import Array, Header
from gates.static.words import Tokenizer

TOKENS: Final = "tokenizer.ggml.tokens"
TYPES: Final = "tokenizer.ggml.token_type"
KEPT: Final = (TOKENS, TYPES)
"""Arrays that have to be kept when the header is read."""
MOST_TOKENS: Final = 600_000
"""More tokens than any model has are not read, so that a header from outside cannot fill the memory."""
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_WHOLE: Final = frozenset({_UNKNOWN, _CONTROL, _USER_DEFINED})
"""Types of tokens that are never split."""
_NAMES: Final = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_STOPS: Final = ("eos", "eot", "eom")
_BOS_BY_DEFAULT: Final = frozenset({"llama", "bert"})
_BOS_BY_PATTERN: Final = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "tekken", "chameleon"})

ENDINGS: Final = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>"),
        *("<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<｜end▁of▁sentence｜>"),
        *("<end_of_utterance>",),
    }
)
"""Tokens that llama.cpp takes for an end by their text, and then never splits, whatever their type."""


def tokenizer_of(header: Header) -> Tokenizer | None:
    """Return the tokenizer of a header that was read with KEPT; None when it has no tokens.

    Only what is certain is in it: without merges and patterns no text is counted in tokens.
    """
    told = header.metadata
    texts, types = _items(told.get(TOKENS)), _items(told.get(TYPES))
    if not texts:
        return None
    added = [
        {"id": number, "content": text, "special": kind == _CONTROL}
        for number, (text, kind) in enumerate(zip(texts, types, strict=False))
        if kind in _WHOLE
    ]
    config = {
        name: texts[number]
        for key, name in _NAMES.items()
        if (number := _id(told, key)) is not None and number < len(texts)
    }
    document: dict[str, Any] = {
        "added_tokens": added,
        "model": {"vocab": {text: number for number, text in enumerate(texts)}},
        "post_processor": None,
    }
    if adds_bos(told) and "bos_token" in config:
        step = {"SpecialToken": {"id": config["bos_token"]}}
        document["post_processor"] = {"type": "TemplateProcessing", "single": [step, {"Sequence": {"id": "A"}}]}
    return Tokenizer(document, config, {}, {})


def adds_bos(told: Mapping[str, Any]) -> bool:
    """Say whether llama.cpp puts the first token before each text."""
    said = told.get("tokenizer.ggml.add_bos_token")
    if isinstance(said, bool):
        return said
    return told.get("tokenizer.ggml.model") in _BOS_BY_DEFAULT or told.get("tokenizer.ggml.pre") in _BOS_BY_PATTERN


def stops_of(told: Mapping[str, Any]) -> list[int]:
    """Return the ids at which the header says that an answer ends."""
    return sorted({number for key in _STOPS if (number := _id(told, key)) is not None})


def _id(told: Mapping[str, Any], name: str) -> int | None:
    value = told.get(f"tokenizer.ggml.{name}_token_id")
    return value if type(value) is int and value >= 0 else None


def _items(value: object) -> list[Any]:
    return list(value.items) if isinstance(value, Array) and value.items is not None else []
