"""The values of launch arguments: whether a word is one of its argument's, and what would be, in words.

Source: Python's int, float and json, click's and clap's own types, and those that engines write for their parsers:
vllm/utils/argparse_utils.py of 0.32.0 and sglang/srt/utils/common.py of 0.5.23.
"""

import json
import operator
import re
from collections.abc import Mapping
from typing import Any, Final

LONGEST: Final = 80
"""Characters of a word that are repeated."""

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_BARE_SIZE: Final = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
_SUFFIXED: Final = re.compile(r"\d+(?:\.\d+)?[kMGT]|\d+[KMGT]i")
_WHOLE: Final = {"boolean": re.compile(r"true|false"), "url": re.compile(r"https?://[!-~]{1,2000}")}
_QUOTED: Final = re.compile(r'("(?:[^"\\]|\\.)*")')
_WITHIN: Final = {"least": operator.ge, "above": operator.gt, "most": operator.le, "below": operator.lt}
_KINDS: Final = {
    "integer": "a whole number",
    "whole": "a whole number",
    "wholes": "whole numbers with commas between them",
    "number": "a number",
    "boolean": "true or false",
    "url": "a URL such as https://models.example/v1",
    "size": "a whole number, or one with k, M, G or T",
    "size-or-auto": "auto or a whole number, or one with k, M, G or T",
    "suffixed": "a whole number, or one with k, M, G, T, Ki, Mi, Gi or Ti",
    "json": "JSON",
    "object": "a JSON object",
    "object-or-text": "a JSON object or text",
}


def fits(text: str, argument: Mapping[str, Any]) -> bool:
    """Say whether a word is a value of an argument.

    Args:
        text: the word.
        argument: of a table: its type, choices and bounds.
    """
    if argument.get("may_be_none") and text in {"", "None"}:
        return True
    try:
        value = _read(text, argument["type"])
    except (ValueError, AttributeError, OverflowError, RecursionError):
        return False
    choices = argument.get("choices")
    if choices is not None:
        return str(value) in choices
    bounds = {bound: argument[bound] for bound in _WITHIN if bound in argument}
    return all(isinstance(value, int | float) and _WITHIN[bound](value, limit) for bound, limit in bounds.items())


def in_words(argument: Mapping[str, Any]) -> str:
    """Return what an argument's value may be."""
    if argument.get("choices"):
        return f"one of {', '.join(argument['choices'])}"
    words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
    bounds = [f"{said} {argument[bound]:g}" for bound, said in words.items() if bound in argument]
    return ", ".join([_KINDS.get(argument.get("type", ""), "text"), *bounds])


def short(word: str) -> str:
    """Return a word as far as it is repeated."""
    return word if len(word) <= LONGEST else f"{word[:LONGEST]}…"


def _read(text: str, kind: str) -> object:
    """Return a value as its type; nothing for one whose inside is not looked at."""
    match kind:
        case "integer":
            return int(text)
        case "number":
            return float(text)
        case "whole":
            return _whole(text)
        case "size" | "size-or-auto":
            return -1 if kind == "size-or-auto" and text.strip().lower() == "auto" else _size(text.strip())
        case "folded":
            return text.lower().replace("-", "_")
        case "lowered":
            return text.lower()
        case "wholes" | "boolean" | "url" | "suffixed" | "json" | "object" | "object-or-text":
            _look_at(text, kind)
            return None
        case _:
            return text


def _look_at(text: str, kind: str) -> None:
    """Read a value that is held to no bounds. Raises ValueError or what its reader raises."""
    match kind:
        case "wholes":
            for one in text.split(","):
                _whole(one)
        case "boolean" | "url":
            if _WHOLE[kind].fullmatch(text) is None:
                raise ValueError(text)
        case "suffixed":
            if _SUFFIXED.fullmatch(text.strip()) is None:
                int(text)
        case "json":
            json.loads(text)
        case "object":
            dict(json.loads(_spelled_out(text)).items())
        case "object-or-text":
            if re.match(r"(?s)^\s*{.*}\s*$", text):
                json.loads(text)


def _whole(text: str) -> int:
    """Return a number as Rust reads one without sign. Raises ValueError."""
    if re.fullmatch(r"\+?[0-9]+", text) is None:
        raise ValueError(text)
    return int(text)


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if found is None:
        return int(text)
    number, unit = found.groups()
    power = "kmgt".index(unit.lower()) + 1
    # A large letter is a power of 1024, of whole numbers only.
    return int(float(number) * 1000**power) if unit.islower() else int(number) * 1024**power


def _spelled_out(text: str) -> str:
    """Return JSON with its sizes outside quotes, such as 80m, as numbers."""
    parts = _QUOTED.split(text)
    parts[::2] = [_BARE_SIZE.sub(lambda found: str(_size(found.group())), part) for part in parts[::2]]
    return "".join(parts)
