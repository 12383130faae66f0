"""Checks vLLM's launch arguments against what its parser takes, before anything is booted.

Every form that the parser takes is taken here: a value behind `=` or as the next word, underscores for dashes, the
beginning of a name that only one argument has, `--name.key value` for a key of JSON, `-O3`, sizes as 32k.

Source: that of `gates/static/vllm.json`; vllm/utils/argparse_utils.py of 0.32.0 and Python's argparse.
"""

import json
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from gates.static.flaw import Flaw, flaw
from gates.static.rules import is_within, table
from schemas.faults import near
from schemas.result import Severity

NAME: Final = "vllm"

_NEGATIVE: Final = re.compile(r"-\d+|-\d*\.\d+")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_BARE_SIZE: Final = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
_QUOTED: Final = re.compile(r'("(?:[^"\\]|\\.)*")')
_YES_OR_NO: Final = frozenset({"true", "false", "yes", "no", "on", "off", "0", "1"})
_WITHIN: Final = {"least": operator.ge, "above": operator.gt, "most": operator.le, "below": operator.lt}
_OF_KEYS: Final = frozenset({"object", "json", "object-or-text", "text"})
"""Types that `--name.key` can lead to: the parser gives them the keys as JSON."""


def check_words(words: Sequence[str], version: str | None) -> Iterator[Flaw]:
    """Check a command line; a version that the list says nothing of has no flaws.

    Args:
        words: of the command line, without the program.
        version: of vLLM.
    """
    known = table(NAME)
    if is_within(version, known["versions"]):
        yield from _Line(words, Severity.BLOCK).check()
    elif is_within(version, known["near_versions"]):
        yield from _Line(words, Severity.WARN).check()


class _Line:
    """A command line as it is read, from its first word to its last."""

    def __init__(self, words: Sequence[str], severity: Severity) -> None:
        self._words, self._severity, self._place = words, severity, 0
        self._arguments: Mapping[str, Mapping[str, Any]] = table(NAME)["arguments"]
        self._given = {_plain(word.partition("=")[0]) for word in words}

    def check(self) -> Iterator[Flaw]:
        while self._place < len(self._words) and (word := self._words[self._place]) != "--":
            place, name = self._place, word.partition("=")[0]
            self._place += 1
            if not _is_option(word) or re.match(r"-O.", word):
                continue
            if word == "-O" and self._next() in {"0", "1", "2", "3"}:
                self._place += 1
                continue
            base, dot, _ = name.partition(".")
            meant = _meant(_plain(base))
            if len(meant) == 1:
                yield from self._keys(place, meant[0]) if dot else self._values(place, meant[0])
                continue
            yield self._unknown(place, base, meant)
            if "=" not in word and self._next() is not None:
                self._place += 1  # taken for its value

    def _next(self) -> str | None:
        """Return the next word, unless there is none or it is another argument."""
        word = self._words[self._place] if self._place < len(self._words) else None
        return None if word is None or _is_option(word) else word

    def _keys(self, place: int, name: str) -> Iterator[Flaw]:
        argument, word = self._arguments[name], self._words[place]
        if argument.get("type", "none") not in _OF_KEYS:
            yield self._flaw(place, f"{name} has no keys.", _range(argument))
        if "=" in word:
            return
        if self._place == len(self._words):
            yield self._flaw(place, f"{_short(word)} needs a value.", "a value")
        self._place += 1

    def _values(self, place: int, name: str) -> Iterator[Flaw]:
        argument, (spelled, equals, value) = self._arguments[name], self._words[place].partition("=")
        if argument["takes"] in {"none", "switch"}:
            told = value if equals else self._next()
            if equals or (told or "").lower() in _YES_OR_NO:
                otherwise = f"--no-{name[2:]}" if argument["takes"] == "switch" else "nothing"
                advice = f"Write {name} for yes, or {otherwise} for no."
                yield self._flaw(place, f"{name} takes no value, and is given {_short(told or '')}.", None, advice)
                self._place += 0 if equals else 1
            return
        attached = spelled[2:] if not spelled.startswith("--") and spelled not in _options() else ""
        if equals or (attached and spelled[:2] in _options()):
            yield from self._value(place, name, value if equals else attached)
            return
        most = len(self._words) if argument["takes"] == "many" else 1
        taken = 0
        while taken < most and (word := self._next()) is not None:
            yield from self._value(self._place, name, word)
            self._place, taken = self._place + 1, taken + 1
        if not taken and argument["takes"] != "optional":
            yield self._flaw(place, f"{name} needs a value.", _range(argument))

    def _value(self, place: int, name: str, value: str) -> Iterator[Flaw]:
        argument = self._arguments[name]
        if argument.get("unless") in self._given or _fits(value, argument):
            return
        question = near(value, argument.get("choices", []))
        said = question or f"it may be {_range(argument)}."
        yield self._flaw(place, f"{name} is {_short(value)}; {said}", _range(argument), found=value)

    def _unknown(self, place: int, name: str, meant: Sequence[str]) -> Flaw:
        if meant:
            message = f"{_short(name)} begins several arguments of vllm: {', '.join(meant[:5])}."
            expected = None
        else:
            short = "-" + name.lstrip("-")
            names = [short] if short in _options() else [one for one in _options() if one.startswith("--")]
            question = near("--" + _plain(name).lstrip("-"), names)
            expected = question.removeprefix("did you mean ").removesuffix("?") or None
            message = f"vllm has no argument {_short(name)}" + (f"; {question}" if question else ".")
        return flaw(
            "argument-unknown",
            message,
            severity=self._severity,
            pointer=f"/engine/arguments/{place}",
            found=self._words[place],
            expected=expected,
            advice="Write an argument that this version of vLLM has.",
        )

    def _flaw(
        self, place: int, message: str, expected: str | None, advice: str | None = None, *, found: str | None = None
    ) -> Flaw:
        return flaw(
            "argument-value",
            message,
            severity=self._severity,
            pointer=f"/engine/arguments/{place}",
            found=found,
            expected=expected,
            advice=advice,
        )


@cache
def _options() -> Mapping[str, str]:
    """Return each spelling, with the name of its argument."""
    spellings = {}
    for name, argument in table(NAME)["arguments"].items():
        spellings[name] = name
        spellings |= dict.fromkeys(argument.get("also", ()), name)
        if argument["takes"] == "switch":
            spellings[f"--no-{name[2:]}"] = name
    return spellings


def _meant(word: str) -> list[str]:
    """Return the arguments that a word is the name, or the beginning of the name, of."""
    options = _options()
    if word in options:
        return [options[word]]
    found = {options[one] for one in options if one.startswith(word)}
    if not word.startswith("--") and word[:2] in options:
        found.add(options[word[:2]])
    return sorted(found)


def _plain(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NEGATIVE.fullmatch(word) and " " not in word.partition("=")[0]


def _fits(text: str, argument: Mapping[str, Any]) -> bool:
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


def _read(text: str, kind: str) -> object:
    """Return a value as its type; nothing for one whose inside is not looked at."""
    match kind:
        case "integer":
            return int(text)
        case "number":
            return float(text)
        case "size" | "size-or-auto":
            return -1 if kind == "size-or-auto" and text.strip().lower() == "auto" else _size(text.strip())
        case "json":
            json.loads(text)
        case "object":
            dict(json.loads(_spelled_out(text)).items())
        case "object-or-text":
            if re.match(r"(?s)^\s*{.*}\s*$", text):
                json.loads(text)
        case "folded":
            return text.lower().replace("-", "_")
        case "lowered":
            return text.lower()
        case _:
            return text
    return None


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


def _range(argument: Mapping[str, Any]) -> str:
    if "choices" in argument:
        return f"one of {', '.join(argument['choices'])}"
    kinds = {
        "integer": "a whole number",
        "number": "a number",
        "size": "a whole number, or one with k, M, G or T",
        "size-or-auto": "auto or a whole number, or one with k, M, G or T",
        "json": "JSON",
        "object": "a JSON object",
        "object-or-text": "a JSON object or text",
    }
    words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
    bounds = [f"{said} {argument[bound]:g}" for bound, said in words.items() if bound in argument]
    return ", ".join([kinds.get(argument.get("type", ""), "text"), *bounds])


def _short(word: str) -> str:
    return word if len(word) <= 80 else f"{word[:80]}…"
