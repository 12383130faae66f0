"""The names of an engine's launch arguments in a version, and what somebody meant who wrote another one.

Source: the `source` of each engine's data file, and of equivalents.json.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from gates.static.rules import is_within, table
from gates.static.typed import short
from schemas.faults import near

TABLES: Final = ("vllm", "sglang", "tgi", "transformers", "trtllm", "external")
"""Engines whose parser's arguments are listed whole, each in a data file of its name."""
_OTHERS: Final = (*TABLES, "llamacpp")


@dataclass(frozen=True)
class Unknown:
    """Why a name is none of the engine's, as a sentence, and what to write in its place where that can be told."""

    message: str
    expected: str | None = None


class Spellings:
    """What a parser takes in a version; without one, what it took in any."""

    def __init__(self, engine: str, version: str | None) -> None:
        self.engine, self.version = engine, version
        known = table(engine)
        self.forms: Mapping[str, Any] = known["parser"]
        self.display: str = known["name"]
        self.arguments: dict[str, Mapping[str, Any]] = {
            name: _in_version(argument, version)
            for name, argument in known["arguments"].items()
            if _is_there(argument.get("versions"), version)
        }
        self.names: dict[str, str] = {}
        """Each spelling, with the name of its argument."""
        inverses = _is_there(self.forms["inverses"], version) if "inverses" in self.forms else False
        for name in self.arguments:
            self.names |= dict.fromkeys(_spelled(name, known["arguments"][name], version), name)
            if inverses and known["arguments"][name]["takes"] == "switch" and (inverse := _inverse(name)):
                self.names[inverse] = name

    def plain(self, name: str) -> str:
        """Return a name as the parser compares it."""
        return name.replace("_", "-") if self.forms.get("underscores") and name.startswith("--") else name

    def meant(self, word: str) -> list[str]:
        """Return the arguments that a word is the name, or the beginning of the name, of."""
        if word in self.names:
            return [self.names[word]]
        found: set[str] = set()
        if self.forms.get("abbreviates"):
            found = {self.names[one] for one in self.names if one.startswith(word)}
        if not word.startswith("--") and word[:2] in self.names:
            found.add(self.names[word[:2]])
        return sorted(found)

    def unknown(self, word: str, meant: list[str]) -> Unknown:
        """Say what is wrong with a name that is not one argument's."""
        what = self.engine if self.version is None else f"{self.engine} {self.version}"
        if (earlier := self._in_others(word)) is not None:
            versions, instead = earlier
            more = f"; write {instead}" if instead else ""
            return Unknown(f"{what} has no argument {short(word)}: the versions {versions} have it{more}.", instead)
        if meant:
            return Unknown(f"{short(word)} begins several arguments of {self.engine}: {', '.join(meant[:5])}.")
        if (shorter := "-" + word.lstrip("-")) in self.names:
            return Unknown(f"{self.engine} has no argument {short(word)}; did you mean {shorter}?", shorter)
        other, same = elsewhere(self.engine, word)
        if same in self.names:
            return Unknown(f"{self.engine} has no argument {short(word)}, which is {other}'s; write {same}.", same)
        long = [one for one in self.names if one.startswith("--")]
        question = near("--" + self.plain(word).lstrip("-"), long)
        if question:
            expected = question.removeprefix("did you mean ").removesuffix("?")
            return Unknown(f"{self.engine} has no argument {short(word)}; {question}", expected)
        theirs = f", which {other} has" if other else ""
        return Unknown(f"{self.engine} has no argument {short(word)}{theirs}.")

    def _in_others(self, word: str) -> tuple[str, str | None] | None:
        """Return the versions that have an argument, with what took its place, where this one has it not."""
        for name, argument in table(self.engine)["arguments"].items():
            for spelling, versions in _ranges(name, argument):
                if spelling == self.plain(word) and versions:
                    instead = argument.get("deprecated", {}).get("instead", "")
                    return versions, instead if re.split("[= ]", instead)[0] in self.names else None
        return None


@lru_cache(maxsize=64)
def spellings(engine: str, version: str | None) -> Spellings:
    """Return what an engine's parser takes. Raises KeyError for an engine without a table."""
    return Spellings(engine, version)


def spelled_out(engine: str | None, version: str | None, words: Sequence[str]) -> tuple[str, ...]:
    """Return a command line in which the beginnings of names that the engine's parser takes are the names."""
    if engine not in TABLES:
        return tuple(words)
    known = spellings(engine, version)
    found = []
    for word in words:
        base = re.split(r"[=.]", word, maxsplit=1)[0]
        plain = known.plain(base)
        meant = known.meant(plain) if word.startswith("--") and plain not in known.names else []
        whole = sorted((one for one in known.names if one.startswith(plain)), key=lambda one: one not in meant)
        found.append(whole[0] + word[len(base) :] if len(meant) == 1 else word)
    return tuple(found)


def _in_version(argument: Mapping[str, Any], version: str | None) -> Mapping[str, Any]:
    variants = argument.get("variants", ())
    if version is None:
        # Which of its types holds cannot be told.
        return {**argument, "type": "text"} if variants else argument
    for one in variants:
        if is_within(version, one["versions"]):
            argument = {**argument, **one}
    apart: Mapping[str, str] = argument.get("choices_in", {})
    if apart and argument["choices"] is not None:
        choices = [one for one in argument["choices"] if is_within(version, apart.get(one, ""))]
        argument = {**argument, "choices": choices}
    return argument


def _is_there(versions: str | None, version: str | None) -> bool:
    return version is None or not versions or is_within(version, versions)


def _ranges(name: str, argument: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each spelling of an argument, with the versions that have it."""
    apart: Mapping[str, str] = argument.get("also_in", {})
    for one in (name, *argument.get("also", ())):
        versions = apart.get(one, argument.get("versions", ""))
        yield one, versions
        if argument["takes"] == "switch":
            yield f"--no-{one[2:]}", versions


def _inverse(name: str) -> str | None:
    for prefix, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return None


def _spelled(name: str, argument: Mapping[str, Any], version: str | None) -> list[str]:
    return [one for one, versions in _ranges(name, argument) if _is_there(versions, version)]


@lru_cache(maxsize=8)
def _all_of(engine: str) -> Mapping[str, str]:
    """Return every spelling of an engine in any version, without regard to dashes, with its argument's name."""
    known = table(engine)
    if engine in TABLES:
        pairs = [(one, name) for name, argument in known["arguments"].items() for one, _ in _ranges(name, argument)]
    else:
        pairs = [(one, one) for key in ("arguments", "managed", "other_options") for one in known[key]]
        pairs += list(known["shorter"].items())
    return {_folded(spelling): name for spelling, name in pairs}


def elsewhere(engine: str, word: str) -> tuple[str | None, str | None]:
    """Return another engine that has an argument, and what `engine` calls the same; None for what cannot be told."""
    others = [one for one in _OTHERS if one != engine and _folded(word) in _all_of(one)]
    for other in others:
        name = _all_of(other)[_folded(word)]
        for row in table("equivalents")["rows"]:
            if row.get(other) == name and engine in row:
                return other, str(row[engine])
    return (others[0] if others else None), None


def _folded(word: str) -> str:
    return word.replace("_", "-")
