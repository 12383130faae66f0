"""Tokenizers that come without tokenizer.json: a byte-level vocabulary, or the model of SentencePiece.

They are put into the words of tokenizer.json, so that every check of tokens reads them. No text is counted in tokens,
since how a text is split is not in these files. Only classes are read of which all tokens are known: a tokenizer that
comes with code of its own may have others.

Source: `PreTrainedTokenizer.added_tokens_decoder` and the slow tokenizers of transformers 4.57 for what is never split
and which classes put BOS first; sentencepiece_model.proto of google/sentencepiece for the file.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gates.static.words import SPECIAL_KEYS, Tokenizer, special_texts

VOCABULARY: Final = "vocab.json"
PIECES: Final = "tokenizer.model"
MOST_BYTES: Final = 16 * 1024 * 1024
"""Largest file that is read; the largest published one has 5 MB."""
MOST_PIECES: Final = 600_000
_ANY: Final = frozenset({"", "PreTrainedTokenizer"})
_BYTE_LEVEL: Final = _ANY | {"Qwen2Tokenizer", "GPT2Tokenizer", "CodeGenTokenizer"}
_BOS_FIRST: Final = frozenset(
    {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "InternLM2Tokenizer", "InternLM3Tokenizer"}
)
_OF_PIECES: Final = _ANY | _BOS_FIRST
_NORMAL, _UNUSED, _BYTE = 1, 5, 6
_PLAIN: Final = frozenset({_NORMAL, _UNUSED, _BYTE})
_LENGTH, _FIXED32, _FIXED64, _VARINT = 2, 5, 1, 0


def tokenizer_of(
    vocabulary: Mapping[str, Any], pieces: Path | None, config: Mapping[str, Any], *beside: Mapping[str, Any]
) -> Tokenizer | None:
    """Return the tokenizer that files beside an absent tokenizer.json make; None where its tokens are not all known.

    Args:
        vocabulary: vocab.json; empty without it.
        pieces: tokenizer.model, where there is one.
        config: tokenizer_config.json.
        beside: special_tokens_map.json and added_tokens.json.

    Raises:
        OSError: tokenizer.model cannot be read.
    """
    named = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    special_map, added_file = beside
    if named in _ANY and "auto_map" in config:
        return None
    if vocabulary and named in _BYTE_LEVEL:
        ids = {text: number for text, number in vocabulary.items() if type(number) is int}
        whole: set[str] = set()
    elif pieces is not None and named in _OF_PIECES and (read := read_pieces(pieces)) is not None:
        ids = {text: number for number, (text, _) in enumerate(read)}
        whole = {text for text, kind in read if kind not in _PLAIN}
        config = {"add_bos_token": named in _BOS_FIRST, **config}
    else:
        return None
    added = list(_added(ids, whole, config, *beside))
    taken = {one["id"]: one["content"] for one in added}  # pieces that were kept free give their ids to tokens
    ids = {text: number for text, number in ids.items() if taken.get(number, text) == text}
    return Tokenizer({"model": {"type": "BPE", "vocab": ids}, "added_tokens": added}, config, special_map, added_file)


def _added(
    ids: Mapping[str, int], whole: set[str], config: Mapping[str, Any], *beside: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the tokens that are never split, as tokenizer.json has them; what another file numbers comes last."""
    special_map, added_file = beside
    named = {text for told in (config, special_map) for text in special_texts(told) if text in ids}
    found = {text: ids[text] for text in sorted(whole | named)}
    found |= {text: number for text, number in added_file.items() if type(number) is int}
    decoder = config.get("added_tokens_decoder")
    for number, one in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(one, dict) and isinstance(one.get("content"), str) and number.isascii() and number.isdigit():
            found[one["content"]] = int(number[:9])
    control = {text for told in (config, special_map) for text in special_texts({k: told.get(k) for k in SPECIAL_KEYS})}
    yield from ({"id": number, "content": text, "special": text in control} for text, number in found.items())


# ------------------------------------------------------------------------------------------------- SentencePiece


def read_pieces(path: Path) -> list[tuple[str, int]] | None:
    """Return the pieces of a SentencePiece model with the type of each; None for a file that is none, or is damaged.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if not raw or len(raw) > MOST_BYTES:
        return None
    found = list[tuple[str, int]]()
    try:
        for number, value in _fields(raw):
            if number == 1:
                if not isinstance(value, bytes) or len(found) == MOST_PIECES:
                    return None
                found.append(_piece(value))
    except (ValueError, IndexError):
        return None
    return found or None


def _piece(raw: bytes) -> tuple[str, int]:
    text, kind = None, _NORMAL
    for number, value in _fields(raw):
        if number == 1 and isinstance(value, bytes):
            text = value.decode()
        elif number == 3 and isinstance(value, int):
            kind = value
    if text is None:
        raise ValueError("a piece without its text")
    return text, kind


def _fields(raw: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the fields of a message of Protocol Buffers by their numbers."""
    place, end = 0, len(raw)
    while place < end:
        tag, place = _varint(raw, place)
        kind = tag & 7
        value: bytes | int
        if kind == _VARINT:
            value, place = _varint(raw, place)
        else:
            size = {_FIXED32: 4, _FIXED64: 8}.get(kind)
            if kind == _LENGTH:
                size, place = _varint(raw, place)
            if size is None or size > end - place:
                raise ValueError("a field of no known kind, or one that is cut")
            value, place = raw[place : place + size], place + size
        yield tag >> 3, value


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    number = raw[place]
    if number < 0x80:
        return number, place + 1
    value, shift = number & 0x7F, 7
    while shift < 64:
        place += 1
        number = raw[place]
        value |= (number & 0x7F) << shift
        if number < 0x80:
            return value, place + 1
        shift += 7
    raise ValueError("a number that is too long")
