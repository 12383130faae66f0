"""Mistral's own tokenizer, tekken.json, in the words of tokenizer.json, so that every check of tokens reads it.

Special tokens have the first ids, and what else there is follows them. A vocabulary that somebody wrote in part is
judged as if it were whole. Which parts of a text are special is said by
the conversation and not by the text, so no text is counted in tokens.

Source: `Tekkenizer` of mistral_common 1.13.1.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

from gates.static.encoder import BYTE_ALPHABET
from gates.static.words import Tokenizer

FILE: Final = "tekken.json"
_MOST: Final = 2_000_000
_USUAL: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of a file that names none."""


def tokenizer_of(document: Mapping[str, Any], config: Mapping[str, Any]) -> Tokenizer | None:
    """Return the tokenizer that tekken.json makes; None for a file that its library does not load.

    Args:
        document: tekken.json.
        config: tokenizer_config.json.
    """
    told, vocab = document.get("config"), document.get("vocab")
    if not isinstance(told, dict) or not isinstance(vocab, list):
        return None
    size, count = told.get("default_vocab_size"), told.get("default_num_special_tokens")
    if type(size) is not int or type(count) is not int or not 0 <= count <= size <= _MOST:
        return None
    specials = _specials(document.get("special_tokens"), count)
    ids: dict[str, int] = {}
    for place, one in enumerate(vocab[: size - count]):
        text = _text(one)
        if text is None:
            return None
        ids.setdefault(text, count + place)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": number, "content": text, "special": True, **flags} for text, number in specials.items()]
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    model = {"type": "Tekken", "vocab": {text: number for text, number in ids.items() if text not in specials}}
    return Tokenizer({"model": model, "added_tokens": added, "post_processor": None}, {**named, **config}, {}, {})


def _specials(told: object, count: int) -> dict[str, int]:
    """Return the special tokens with their ids, and those that fill the places that no token has."""
    if not isinstance(told, list):
        told = [{"rank": rank, "token_str": text} for rank, text in enumerate(_USUAL)]
    found: dict[str, int] = {}
    for one in told:
        text, rank = (one.get("token_str"), one.get("rank")) if isinstance(one, dict) else (None, None)
        if isinstance(text, str) and isinstance(rank, int):
            found[text] = rank
    return found | {f"<SPECIAL_{rank}>": rank for rank in range(len(told), count)}


def _text(one: object) -> str | None:
    """Return a token's bytes as byte-level vocabularies write them."""
    raw = one.get("token_bytes") if isinstance(one, dict) else None
    try:
        return "".join(BYTE_ALPHABET[byte] for byte in base64.b64decode(raw, validate=True)) if raw else None
    except (binascii.Error, TypeError, ValueError):
        return None
