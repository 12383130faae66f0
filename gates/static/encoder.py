"""Splits short texts into token ids as a tokenizer.json says, where that can be done without its library.

Only what is exact is done: a tokenizer with other steps, or a text that its pattern could read otherwise, gives None.
A pattern comes from outside and could run for ever, so only known ones are used.

Source: the file format of huggingface/tokenizers 0.23.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

MAX_TEXT = 4096
MAX_PIECE = 512
"""Longest piece that merges are looked for in, since their number grows with its square."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token that is never split."""

    text: str
    id: int
    is_special: bool
    strips_left: bool = False
    strips_right: bool = False
    stands_alone: bool = False
    """Whether it only counts where no letter, digit or underscore touches it (`single_word`)."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")


def _ascii(pattern: str) -> re.Pattern[str]:
    inside = re.sub(r"\[([^\]]*)\]", lambda m: m[0].replace(r"\p{L}", "a-zA-Z").replace(r"\p{N}", "0-9"), pattern)
    return re.compile(inside.replace(r"\p{L}", "[a-zA-Z]").replace(r"\p{N}", "[0-9]"))


_PATTERNS = {pattern: _ascii(pattern) for pattern in (_GPT2, _CL100K, _QWEN)}


def _alphabet() -> dict[int, str]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}


BYTE_ALPHABET = _alphabet()
"""How byte-level vocabularies write each byte. Source: GPT-2's encoder.py."""


class Encoder:
    """Splits texts. `ids` gives None for what it cannot do exactly."""

    def __init__(self, document: Mapping[str, Any], vocabulary: Mapping[str, int], added: Mapping[str, Token]) -> None:
        self.document, self.vocabulary, self.added = document, vocabulary, added
        model = document.get("model")
        self.model: Mapping[str, Any] = model if isinstance(model, dict) else {}

    @cached_property
    def merges(self) -> dict[tuple[str, str], int]:
        """Pair → its rank."""
        told = self.model.get("merges")
        ranks: dict[tuple[str, str], int] = {}
        for place, pair in enumerate(told if isinstance(told, list) else []):
            parts = pair.split(" ") if isinstance(pair, str) else pair
            if isinstance(parts, list) and len(parts) == 2 and all(isinstance(part, str) for part in parts):
                ranks.setdefault((parts[0], parts[1]), place)
        return ranks

    @cached_property
    def steps(self) -> list[re.Pattern[str] | None] | None:
        """The pre-tokenizer as patterns, None for one that does not split; None when it has other steps."""
        told = self.document.get("pre_tokenizer")
        if self.document.get("normalizer") not in (None, {"type": "NFC"}) or self.model.get("type", "BPE") != "BPE":
            return None
        if not isinstance(told, dict):
            return None
        steps = told.get("pretokenizers") if told.get("type") == "Sequence" else [told]
        found: list[re.Pattern[str] | None] = []
        has_bytes = False
        for step in steps if isinstance(steps, list) else []:
            kind = step.get("type") if isinstance(step, dict) else None
            if kind == "ByteLevel" and step.get("add_prefix_space") is not True:
                has_bytes = True
                found.append(_PATTERNS[_GPT2] if step.get("use_regex", True) else None)
            elif kind == "Split" and step.get("behavior") == "Isolated" and step.get("invert") is not True:
                pattern = step.get("pattern")
                known = _PATTERNS.get(str(pattern.get("Regex"))) if isinstance(pattern, dict) else None
                if known is None:
                    return None
                found.append(known)
            else:
                return None
        return found if has_bytes else None

    def ids(
        self, text: str, *, without: frozenset[str] = frozenset(), more: Mapping[str, int] | None = None
    ) -> list[int] | None:
        """Return a text's ids without what a post-processor adds, or None.

        Args:
            text: at most MAX_TEXT characters.
            without: added tokens to treat as if they were not there.
            more: further tokens that are never split.
        """
        if len(text) > MAX_TEXT:
            return None
        without |= {token.text for token in self.added.values() if token.stands_alone and touches(token.text, text)}
        whole = {token.text: token.id for token in self.added.values() if token.text not in without} | dict(more or {})
        strips = any(token.strips_left or token.strips_right for token in self.added.values())
        if strips and any(
            token.text in text for token in self.added.values() if token.strips_left or token.strips_right
        ):
            return None
        found: list[int] = []
        for piece, number in _cut(text, whole):
            if number is not None:
                found.append(number)
                continue
            inner = self._plain(piece)
            if inner is None:
                return None
            found += inner
        return found

    def _plain(self, text: str) -> list[int] | None:
        if self.steps is None:
            return None
        pieces = [text]
        for pattern in self.steps:
            if pattern is None:
                continue
            if not text.isascii():
                return None  # the patterns here know ASCII's letters and digits only
            pieces = [part for piece in pieces for part in pattern.findall(piece)]
        found: list[int] = []
        for piece in pieces:
            inner = self._merge("".join(BYTE_ALPHABET[byte] for byte in piece.encode()))
            if inner is None:
                return None
            found += inner
        return found

    def _merge(self, piece: str) -> list[int] | None:
        if self.model.get("ignore_merges") is True and piece in self.vocabulary:
            return [self.vocabulary[piece]]
        if len(piece) > MAX_PIECE:
            return None
        parts = list(piece)
        while len(parts) > 1:
            ranked = [(self.merges.get(pair), place) for place, pair in enumerate(pairwise(parts))]
            best = min(((rank, place) for rank, place in ranked if rank is not None), default=None)
            if best is None:
                break
            place = best[1]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        numbers = [self.vocabulary.get(part) for part in parts]
        return None if None in numbers else [number for number in numbers if number is not None]


def touches(token: str, text: str) -> bool:
    """Say whether a token has a letter, digit or underscore beside it somewhere in a text."""
    return re.search(rf"\w{re.escape(token)}|{re.escape(token)}\w", text) is not None


def _cut(text: str, whole: Mapping[str, int]) -> list[tuple[str, int | None]]:
    if not whole:
        return [(text, None)] if text else []
    pattern = re.compile("|".join(re.escape(one) for one in sorted(whole, key=len, reverse=True)))
    found: list[tuple[str, int | None]] = []
    place = 0
    for match in pattern.finditer(text):
        if match.start() > place:
            found.append((text[place : match.start()], None))
        found.append((match[0], whole[match[0]]))
        place = match.end()
    if place < len(text):
        found.append((text[place:], None))
    return found
