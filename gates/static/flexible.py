"""Checks launch arguments against what an engine's own parser takes, before anything is booted.

Every form that the parser takes is taken here: a value behind `=` or as the next word, the beginning of a name that
only one argument has where the parser completes it, and of vLLM underscores for dashes, `--name.key value` for a key
of JSON, `-O3`, and sizes as 32k. Where a parser keeps the last of two values, two that differ are told.

Source: that of each data file; vllm/utils/argparse_utils.py of 0.32.0, Python's argparse, click 8 and clap 4.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gates.static.flaw import Flaw, flaw
from gates.static.rules import is_within, table
from gates.static.spellings import TABLES, spellings
from gates.static.typed import fits, in_words, short
from schemas.faults import near
from schemas.result import Severity

__all__ = ["TABLES", "check_words"]

_NEGATIVE: Final = re.compile(r"-\d+|-\d*\.\d+")
_YES_OR_NO: Final = frozenset({"true", "false", "yes", "no", "on", "off", "0", "1"})
_OF_KEYS: Final = frozenset({"object", "json", "object-or-text", "text"})
"""Types that `--name.key` can lead to: the parser gives them the keys as JSON."""
_MOST: Final = {"one": 1, "optional": 1, "each": 1}
"""Values behind a name; where it is not here, any number of them."""


def check_words(engine: str, words: Sequence[str], version: str | None) -> Iterator[Flaw]:
    """Check a command line; a version that the list says nothing of has no flaws.

    Args:
        engine: one of TABLES.
        words: of the command line, without the program.
        version: of the engine.
    """
    severity = _severity(engine, version)
    if severity is not None:
        yield from _Line(engine, words, version, severity).check()


def check_value(engine: str, name: str, value: str, version: str | None, pointer: str) -> Iterator[Flaw]:
    """Check what a section of the document makes the value of an argument.

    Args:
        engine: one of TABLES.
        name: of the argument, in the engine's table.
        value: its value.
        version: of the engine.
        pointer: where the document says it.
    """
    severity, argument = _severity(engine, version), spellings(engine, version).arguments.get(name)
    if severity is None or argument is None or fits(value, argument):
        return
    said = near(value, argument.get("choices") or []) or f"it may be {in_words(argument)}."
    message = f"{engine} is given {short(value)} as {name}; {said}"
    yield flaw("argument-value", message, severity=severity, pointer=pointer, found=value, expected=in_words(argument))


def _severity(engine: str, version: str | None) -> Severity | None:
    """Return how sure a mistake is; None where nothing is known of a version."""
    known = table(engine)
    if is_within(version, known["versions"]):
        return Severity.BLOCK
    return Severity.WARN if is_within(version, known["near_versions"]) else None


class _Line:
    """A command line as it is read, from its first word to its last."""

    def __init__(self, engine: str, words: Sequence[str], version: str | None, severity: Severity) -> None:
        self._words, self._severity, self._place = words, severity, 0
        self._engine, self._version, self._names = engine, version, spellings(engine, version)
        self._forms = self._names.forms
        self._given = {self._names.plain(word.partition("=")[0]) for word in words}
        self._seen: dict[str, tuple[str, ...]] = {}
        self._strays = 0

    def check(self) -> Iterator[Flaw]:
        while self._place < len(self._words):
            place, word = self._place, self._words[self._place]
            self._place += 1
            if word == "--":
                for stray in range(self._place, len(self._words)):
                    yield from self._stray(stray)
                return
            if _is_option(word):
                yield from self._option(place, word)
            else:
                yield from self._stray(place)

    def _option(self, place: int, word: str) -> Iterator[Flaw]:
        if self._forms.get("levels") and word.startswith("-O"):
            self._place += int(word == "-O" and self._next() in {"0", "1", "2", "3"})
            return
        name = word.partition("=")[0]
        base, dot, _ = name.partition(".") if self._forms.get("keys") else (name, "", "")
        meant = self._names.meant(self._names.plain(base))
        if len(meant) == 1:
            yield from self._deprecated(place, meant[0])
            if dot:
                yield from self._keys(place, meant[0])
                return
            yield from self._values(place, meant[0])
            yield from self._twice(place, meant[0])
            return
        unknown = self._names.unknown(base, meant)
        instead = unknown.expected or f"an argument that this version of {self._names.display} has"
        yield self._flaw(
            place, unknown.message, unknown.expected, f"Write {instead}.", code="argument-unknown", found=word
        )
        if "=" not in word and self._plain_next() is not None:
            self._place += 1  # taken for its value

    def _stray(self, place: int) -> Iterator[Flaw]:
        """Tell of a word that belongs to no argument, where there are more of them than the parser takes."""
        taken = self._forms.get("words")
        self._strays += 1
        if taken is None or self._strays <= taken:
            return
        word = self._words[place]
        message = f"{self._engine} takes no word without an argument's name here, and is given {short(word)}."
        yield self._flaw(place, message, None, "Leave it out, or write the name of its argument.", found=word)

    def _next(self) -> str | None:
        """Return the next word, unless there is none or the parser reads it as another argument."""
        word = self._plain_next()
        if word is None and self._forms.get("takes_dashes") and self._place < len(self._words):
            return self._words[self._place]
        return word

    def _plain_next(self) -> str | None:
        word = self._words[self._place] if self._place < len(self._words) else None
        return None if word is None or _is_option(word) else word

    def _deprecated(self, place: int, name: str) -> Iterator[Flaw]:
        told: Mapping[str, Any] | None = self._names.arguments[name].get("deprecated")
        if told is None or not is_within(self._version, told["versions"]):
            return
        instead = told.get("instead")
        yield flaw(
            "argument-unknown",
            f"{self._engine} still takes {name}, and calls it outdated{f'; write {instead}' if instead else ''}.",
            severity=Severity.WARN,
            pointer=f"/engine/arguments/{place}",
            found=self._words[place],
            expected=instead,
            advice=f"Write {instead}." if instead else "Leave it out.",
        )

    def _twice(self, place: int, name: str) -> Iterator[Flaw]:
        """Tell of an argument that is there again: some parsers refuse it, others silently keep the last."""
        argument = self._names.arguments[name]
        if argument["takes"] == "each":
            return
        spelled, equals, value = self._words[place].partition("=")
        positive = (name, *argument.get("also", ()))
        negates = not any(one.startswith(self._names.plain(spelled)) for one in positive)
        told = (
            str(negates and argument["takes"] == "switch"),
            *([value] if equals else []),
            *self._words[place + 1 : self._place],
        )
        before = self._seen.get(name)
        self._seen[name] = told
        refused = bool(self._forms.get("refuses_twice"))
        if before is None or (before == told and not refused):
            return
        counts = f"{self._engine} refuses that" if refused else "the last one counts"
        yield self._flaw(
            place,
            f"{name} is there again, and {counts}.",
            "one of them, once",
            severity=self._severity if refused else Severity.WARN,
            found=self._words[place],
        )

    def _keys(self, place: int, name: str) -> Iterator[Flaw]:
        argument, word = self._names.arguments[name], self._words[place]
        if argument.get("type", "none") not in _OF_KEYS:
            yield self._flaw(place, f"{name} has no keys.", in_words(argument))
        if "=" in word:
            return
        if self._place == len(self._words):
            yield self._flaw(place, f"{short(word)} needs a value.", "a value")
        self._place += 1

    def _values(self, place: int, name: str) -> Iterator[Flaw]:
        argument, (spelled, equals, value) = self._names.arguments[name], self._words[place].partition("=")
        if argument["takes"] in {"none", "switch"}:
            told = value if equals else self._plain_next()
            if equals or (told or "").lower() in _YES_OR_NO:
                otherwise = f"--no-{name[2:]}" if argument["takes"] == "switch" else "nothing"
                advice = f"Write {name} for yes, or {otherwise} for no."
                yield self._flaw(place, f"{name} takes no value, and is given {short(told or '')}.", None, advice)
                self._place += 0 if equals else 1
            return
        names = self._names.names
        attached = spelled[2:] if not spelled.startswith("--") and spelled not in names else ""
        if equals or (attached and spelled[:2] in names):
            yield from self._value(place, name, value if equals else attached)
            return
        most = _MOST.get(argument["takes"], len(self._words))
        taken = 0
        while taken < most and (word := self._next()) is not None:
            yield from self._value(self._place, name, word)
            self._place, taken = self._place + 1, taken + 1
        if not taken and argument["takes"] not in {"optional", "any"}:
            yield self._flaw(place, f"{name} needs a value.", in_words(argument))

    def _value(self, place: int, name: str, value: str) -> Iterator[Flaw]:
        argument = self._names.arguments[name]
        if argument.get("unless") in self._given or fits(value, argument):
            return
        question = near(value, argument.get("choices") or [])
        said = question or f"it may be {in_words(argument)}."
        yield self._flaw(place, f"{name} is {short(value)}; {said}", in_words(argument), found=value)

    def _flaw(
        self,
        place: int,
        message: str,
        expected: str | None,
        advice: str | None = None,
        *,
        code: str = "argument-value",
        severity: Severity | None = None,
        found: str | None = None,
    ) -> Flaw:
        return flaw(
            code,
            message,
            severity=severity or self._severity,
            pointer=f"/engine/arguments/{place}",
            found=found,
            expected=expected,
            advice=advice,
        )


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NEGATIVE.fullmatch(word) and " " not in word.partition("=")[0]
