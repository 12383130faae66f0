"""What a fast tokenizer knows: its tokens and ids, which of them are never split, and what it puts before a text."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from gates.static.encoder import Encoder, Token

_INDEX = re.compile(r"[0-9]{1,9}")
SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
# Classes that write BOS by add_bos_token, whatever the post-processor is. Source: update_post_processor, transformers.
_BY_FLAG = frozenset(
    f"{name}Tokenizer{fast}" for name in ("Llama", "CodeLlama", "Gemma", "Cohere") for fast in ("", "Fast")
)


class Tokenizer:
    """tokenizer.json with the files beside it."""

    def __init__(
        self,
        document: Mapping[str, Any],
        config: Mapping[str, Any],
        special_map: Mapping[str, Any],
        added_file: Mapping[str, Any],
        *,
        numbers_itself: bool = False,
    ) -> None:
        """Take what the files say.

        Args:
            document: tokenizer.json, or what stands for it.
            config: tokenizer_config.json.
            special_map: special_tokens_map.json.
            added_file: added_tokens.json.
            numbers_itself: whether the library that loads it gives added tokens their ids, whatever the file says.
        """
        self._numbers_itself = numbers_itself
        self.document, self.config, self.special_map, self.added_file = document, config, special_map, added_file
        model = document.get("model")
        self.model: Mapping[str, Any] = model if isinstance(model, dict) else {}

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Tokens of the model itself, without the added ones."""
        told = self.model.get("vocab")
        if isinstance(told, dict):
            return {text: number for text, number in told.items() if type(number) is int}
        if isinstance(told, list):  # Unigram: [token, score] by id
            return {
                one[0]: place
                for place, one in enumerate(told)
                if isinstance(one, list) and one and isinstance(one[0], str)
            }
        return {}

    @cached_property
    def added(self) -> dict[str, Token]:
        """Tokens that tokenizer.json never splits."""
        told = self.document.get("added_tokens")
        tokens = [_token(one) for one in told if isinstance(one, dict)] if isinstance(told, list) else []
        found: dict[str, Token] = {}
        for token in tokens:
            if token is not None:
                found.setdefault(token.text, token)
        return self._numbered(found) if self._numbers_itself else found

    def _numbered(self, told: Mapping[str, Token]) -> dict[str, Token]:
        """Return added tokens with the ids that the library gives them.

        It takes the vocabulary's own id first. An id that no other token has is left as it is said, although the
        library would give the next free one: a vocabulary that somebody wrote in part is judged as if it were whole.

        Source: `AddedVocabulary.add_tokens` of tokenizers 0.23.
        """
        taken = {number: text for text, number in self.vocabulary.items()}
        found: dict[str, Token] = {}
        free = max(taken, default=-1) + 1
        for text, token in told.items():
            number = self.vocabulary.get(text, token.id)
            if text not in self.vocabulary and taken.get(number, text) != text:
                number = max(free, len(self.vocabulary))
            taken[number] = text
            free = max(free, number + 1)
            found[text] = replace(token, id=number)
        return found

    @cached_property
    def twins(self) -> list[tuple[int, str, str]]:
        """Ids that two tokens of the vocabulary have, with both."""
        seen: dict[int, str] = {}
        return [
            (number, first, text)
            for text, number in self.vocabulary.items()
            if (first := seen.setdefault(number, text)) != text
        ]

    @cached_property
    def renumbered(self) -> dict[str, int]:
        """Added tokens of tokenizer.json that get another id than it says: text → what it says."""
        told = self.document.get("added_tokens")
        tokens = [_token(one) for one in told if isinstance(one, dict)] if isinstance(told, list) else []
        return {one.text: one.id for one in tokens if one is not None and one.id != self.added[one.text].id}

    @cached_property
    def restored(self) -> dict[str, str]:
        """Tokens that only other files name; transformers adds them when it loads: text → file that names it."""
        found: dict[str, str] = {}
        decoder = self.config.get("added_tokens_decoder")
        for one in decoder.values() if isinstance(decoder, dict) else ():
            if isinstance(one, dict) and isinstance(one.get("content"), str):
                found.setdefault(one["content"], "tokenizer_config.json")
        for file, told in (("special_tokens_map.json", self.special_map), ("tokenizer_config.json", self.config)):
            for text in special_texts(told):
                found.setdefault(text, file)
        for text in self.added_file:
            found.setdefault(text, "added_tokens.json")
        return {text: file for text, file in found.items() if text not in self.added}

    @cached_property
    def ids(self) -> dict[str, int]:
        """Every token of tokenizer.json → its id."""
        return self.vocabulary | {text: token.id for text, token in self.added.items()}

    @cached_property
    def texts(self) -> dict[int, str]:
        """Id → token."""
        return {number: text for text, number in self.ids.items()}

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.ids.values(), default=-1) + 1

    def id_of(self, text: object) -> int | None:
        """Return a token's id, also of one that only tokenizer_config.json's decoder knows."""
        if isinstance(text, dict):
            text = text.get("content")
        if not isinstance(text, str):
            return None
        if text in self.ids:
            return self.ids[text]
        return decoded(self.config, text)

    @cached_property
    def only_decoded(self) -> dict[str, int]:
        """Tokens that tokenizer_config.json's decoder has and tokenizer.json lacks: text → the id that it says."""
        decoder = self.config.get("added_tokens_decoder")
        return {
            one["content"]: int(number)
            for number, one in (decoder.items() if isinstance(decoder, dict) else ())
            if isinstance(one, dict)
            and isinstance(one.get("content"), str)
            and one["content"] not in self.ids
            and _INDEX.fullmatch(number)
        }

    def named(self, key: str) -> str | None:
        """Return the text of a special token that tokenizer_config.json or special_tokens_map.json names."""
        for told in (self.config, self.special_map):
            value = told.get(key)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str) and value:
                return value
        return None

    @cached_property
    def prefix(self) -> list[int]:
        """Ids that encoding a text with special tokens puts before it."""
        told = _prefix(self.document.get("post_processor"))
        found = [self.id_of(text) for text in told]
        by_flag = str(self.config.get("tokenizer_class")) in _BY_FLAG or "post_processor" not in self.document
        if not told and self.config.get("add_bos_token") is True and by_flag:
            found = [self.id_of(self.named("bos_token"))]
        return [one for one in found if one is not None]

    @cached_property
    def suffix(self) -> list[str]:
        """Tokens that encoding a text with special tokens puts after it."""
        told = _suffix(self.document.get("post_processor"))
        eos = self.named("eos_token")
        by_flag = str(self.config.get("tokenizer_class")) in _BY_FLAG or "post_processor" not in self.document
        if not told and self.config.get("add_eos_token") is True and by_flag and eos is not None:
            return [eos]
        return told

    @cached_property
    def encoder(self) -> Encoder:
        """Splits short texts as this tokenizer does."""
        return Encoder(self.document, self.vocabulary, self.added)


def decoded(config: Mapping[str, Any], text: str) -> int | None:
    """Return the id that tokenizer_config.json's decoder gives a token, or None."""
    decoder = config.get("added_tokens_decoder")
    for number, one in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(one, dict) and one.get("content") == text and _INDEX.fullmatch(number):
            return int(number)
    return None


def special_texts(told: Mapping[str, Any]) -> list[str]:
    """Return the special tokens that tokenizer_config.json or special_tokens_map.json names, in order."""
    found = [told.get(key) for key in SPECIAL_KEYS]
    for key in _LISTS:
        value = told.get(key)
        found += value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
    texts = [one.get("content") if isinstance(one, dict) else one for one in found]
    return list(dict.fromkeys(text for text in texts if isinstance(text, str) and text))


def _token(told: Mapping[str, Any]) -> Token | None:
    text, number = told.get("content"), told.get("id")
    if not isinstance(text, str) or not text or type(number) is not int:
        return None
    flags = (told.get(name) is True for name in ("special", "lstrip", "rstrip", "single_word"))
    return Token(text, number, *flags)


def _suffix(processor: object) -> list[str]:
    """Return the special tokens that a post-processor puts after a text."""
    if not isinstance(processor, dict):
        return []
    if str(processor.get("type")) == "Sequence":
        steps = processor.get("processors")
        return [text for one in (steps if isinstance(steps, list) else []) for text in _suffix(one)]
    single = processor.get("single") if str(processor.get("type")) == "TemplateProcessing" else None
    pieces = single if isinstance(single, list) else []
    found: list[str] = []
    for piece in reversed(pieces):
        special = piece.get("SpecialToken") if isinstance(piece, dict) else None
        if not isinstance(special, dict):
            break
        if isinstance(special.get("id"), str):
            found.insert(0, special["id"])
    return found if len(found) < len(pieces) else []


def _prefix(processor: object) -> list[str]:
    if not isinstance(processor, dict):
        return []
    kind = str(processor.get("type"))
    if kind == "Sequence":
        steps = processor.get("processors")
        return [text for one in (steps if isinstance(steps, list) else []) for text in _prefix(one)]
    if kind in {"RobertaProcessing", "BertProcessing"}:
        cls = processor.get("cls")
        return [cls[0]] if isinstance(cls, list) and cls and isinstance(cls[0], str) else []
    if kind != "TemplateProcessing":
        return []
    found: list[str] = []
    single = processor.get("single")
    for piece in single if isinstance(single, list) else []:
        special = piece.get("SpecialToken") if isinstance(piece, dict) else None
        if not isinstance(special, dict):
            break  # from here on it is the text itself
        if isinstance(special.get("id"), str):
            found.append(special["id"])
    return found


def first_difference(one: Mapping[int, str], other: Mapping[int, str]) -> int | None:
    """Return the smallest id that two vocabularies give another token; None when they agree where both have one."""
    return min((number for number, text in one.items() if number in other and other[number] != text), default=None)
