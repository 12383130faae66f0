"""Which launch arguments and variables a bundle may give an engine: a table an engine in `data/`, with its source.

An argument in no table is refused, never passed on: what it does is not known. Each has its type and range, so that a
mistake is found before anything boots. What is the runner's or the document's to say is refused with the reason.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from gates.files.launch import REFUSED, VARIABLES
from gates.static.rules import is_within
from schemas.faults import near

_FOLDER = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Argument:
    """What one argument, or one key of a JSON argument, takes.

    `type` is flag (no value), switch (no value; `--no-NAME` is its opposite), integer, number, choice, text, boolean
    (of JSON), integers (a list of JSON) or object (JSON with these `keys` and no others). `least` and `most` bound
    numbers; `pattern` is what a text matches whole. `versions` of the engine, of those in its table, know it.
    """

    type: str
    least: float = 0
    most: float = 2**31 - 1
    choices: tuple[str, ...] = ()
    pattern: str = r"[\w.,:+-]{1,256}"
    keys: Mapping[str, "Argument"] = field(default_factory=dict)
    versions: str = ""

    @property
    def has_value(self) -> bool:
        """Whether a word follows it."""
        return self.type not in {"flag", "switch"}

    def problem(self, text: str) -> str | None:
        """Say what is wrong with a value, as the end of a sentence; None when nothing is."""
        match self.type:
            case "integer" | "number":
                return self._number(text)
            case "choice":
                return None if text in self.choices else f"must be one of {', '.join(self.choices)}, not {text}"
            case "text":
                return None if re.fullmatch(self.pattern, text) else f"cannot be {text[:80]!r}"
            case _:
                return self._json(text)

    def _number(self, text: str) -> str | None:
        try:
            value = int(text) if self.type == "integer" else float(text)
        except ValueError:
            return f"must be a{'n integer' if self.type == 'integer' else ' number'}, not {text[:80]!r}"
        if not self.least <= value <= self.most:
            return f"must be {self.least:g} to {self.most:g}, not {text}"
        return None

    def _json(self, text: str) -> str | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return f"must be JSON, not {text[:80]!r}"
        return self._of(value)

    def _of(self, value: Any) -> str | None:
        """Say what is wrong with a value of JSON."""
        match self.type:
            case "boolean":
                return None if type(value) is bool else f"must be true or false, not {json.dumps(value)[:80]}"
            case "integers":
                is_list = isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
                return None if is_list else f"must be a list of integers, not {json.dumps(value)[:80]}"
            case "object":
                return self._object(value)
            case "integer" | "number" if type(value) not in {int, float}:
                return f"must be a number, not {json.dumps(value)[:80]}"
            case "choice" | "text" if not isinstance(value, str):
                return f"must be text, not {json.dumps(value)[:80]}"
            case _:
                return self.problem(str(value))

    def _object(self, value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"must be a JSON object, not {json.dumps(value)[:80]}"
        for key, item in value.items():
            if key not in self.keys:
                return f"may not have the key {key}; it may have {', '.join(self.keys)}"
            if problem := self.keys[key]._of(item):  # noqa: SLF001 - of the same class
                return f"has {key}, which {problem}"
        return None


@dataclass(frozen=True)
class Given:
    """One argument as a bundle gives it; `value` None for a flag or switch."""

    name: str
    value: str | None


@dataclass(frozen=True)
class Told:
    """One argument that an engine is told; `value` None for a flag.

    `section` is the part of the document that says so, which a bundle's arguments may not contradict. None is what
    the driver chooses where they say nothing.
    """

    name: str
    value: str | None
    section: str | None = None


@dataclass(frozen=True)
class Table:
    """Arguments and variables of one engine. `refused` maps those that are not the bundle's to say to the reason."""

    engine: str
    versions: SpecifierSet
    arguments: Mapping[str, Argument]
    refused: Mapping[str, str]
    variables: Mapping[str, Argument]
    refused_variables: Mapping[str, str]

    @classmethod
    def load(cls, engine: str) -> "Table":
        """Read the engine's table."""
        body = tomllib.loads((_FOLDER / f"{engine}.toml").read_text(encoding="utf-8"))
        # What is refused for some values alone, and is in the table, has its values there.
        leads_out = {name: why for name, (_, why) in REFUSED.get(engine, {}).items() if name not in body["arguments"]}
        return cls(
            engine=engine,
            versions=SpecifierSet(body["versions"]),
            arguments=_arguments(body["arguments"]),
            refused=leads_out | body["refused"],
            variables=_arguments(body["variables"]),
            refused_variables=dict(VARIABLES.get(engine, {})) | body["refused-variables"],
        )

    def check_version(self, version: str) -> list[str]:
        """Return a problem when nothing is known of a version."""
        try:
            is_known = self.versions.contains(Version(version), prereleases=True)
        except InvalidVersion:
            is_known = False
        return [] if is_known else [f"{self.engine} {version} is not known here, only {self.versions}"]

    def check(self, words: Sequence[str], version: str | None = None) -> list[str]:
        """Return what is wrong with arguments, one sentence each; without a version, that of any."""
        problems, seen = [], set()
        for item in self._split(words):
            if isinstance(item, str):
                problems.append(item)
                continue
            base = self._base(item.name)
            if base in seen:
                problems.append(f"{item.name} is given twice")
            seen.add(base)
            known = self.arguments[base].versions
            if version is not None and not is_within(version, known):
                problems.append(f"{item.name} is known to {self.engine} {known}, not to {version}")
            wrong = None if item.value is None else self.arguments[base].problem(item.value)
            if wrong:
                problems.append(f"{item.name} {wrong}")
        return problems

    def given(self, words: Sequence[str]) -> dict[str, Given]:
        """Return arguments that `check` has no problem with, by name; a switch by its positive name."""
        items = (item for item in self._split(words) if isinstance(item, Given))
        return {self._base(item.name): item for item in items}

    def contradictions(self, words: Sequence[str], told: Sequence[Told]) -> list[str]:
        """Return what arguments say otherwise than the document's sections, one sentence each."""
        given, problems = self.given(words), []
        for one in told:
            found = given.get(self._base(one.name))
            if one.section is None or found is None or (found.name == one.name and _equal(found.value, one.value)):
                continue
            said = found.name if found.value is None else f"{found.name} {found.value}"
            wanted = one.name if one.value is None else one.value
            problems.append(f"{said} contradicts {one.section}, which asks for {wanted}")
        return problems

    def complete(self, words: Sequence[str], told: Sequence[Told]) -> list[str]:
        """Return the arguments with what else the engine is told."""
        given, completed = self.given(words), list(words)
        for one in told:
            if self._base(one.name) not in given:
                completed += [one.name] if one.value is None else [one.name, one.value]
        return completed

    def check_variables(self, variables: Mapping[str, str]) -> list[str]:
        """Return what is wrong with environment variables, one sentence each."""
        problems = []
        for name, value in variables.items():
            known = self.variables.get(name)
            if known is None:
                reason = self.refused_variables.get(name, "is not one that an engine may be given")
                problems.append(f"variable {name} {reason}")
            elif wrong := known.problem(value):
                problems.append(f"variable {name} {wrong}")
        return problems

    def _base(self, name: str) -> str:
        positive = "--" + name.removeprefix("--no-")
        if name in self.arguments or not name.startswith("--no-") or positive not in self.arguments:
            return name
        return positive if self.arguments[positive].type == "switch" else name

    def _split(self, words: Sequence[str]) -> Iterator[Given | str]:
        """Yield what is given, or a problem where a word cannot be read."""
        rest = list(words)
        while rest:
            word = rest.pop(0)
            name, equals, value = word.partition("=")
            known = self._known(name)
            if known is None:
                yield self._unknown(name)
                while rest and not rest[0].startswith("-"):
                    rest.pop(0)  # what it may have meant as its value says nothing by itself
            elif not known.has_value:
                yield f"{name} takes no value" if equals else Given(name, None)
            elif equals:
                yield Given(name, value)
            elif rest and not rest[0].startswith("--"):
                yield Given(name, rest.pop(0))
            else:
                yield f"{name} needs a value"

    def _known(self, name: str) -> Argument | None:
        if name in self.arguments:
            return self.arguments[name]
        positive = self.arguments.get("--" + name.removeprefix("--no-")) if name.startswith("--no-") else None
        return positive if positive is not None and positive.type == "switch" else None

    def _unknown(self, name: str) -> str:
        if not name.startswith("-"):
            return f"{name[:80]!r} follows no argument that takes it"
        reason = self.refused.get(name) or self.refused.get("--" + name.removeprefix("--no-"))
        if reason is not None:
            return f"{name} {reason}"
        spelled = name.replace("_", "-")
        if spelled != name and spelled in self.arguments:
            return f"unknown argument {name}; write {spelled}"
        meant = near(spelled, list(self.arguments)) or f"a bundle may give {self.engine} those in workers/engines/data"
        return f"unknown argument {name[:80]}; {meant}"


def _arguments(body: Mapping[str, Any]) -> dict[str, Argument]:
    return {name: _argument(entry) for name, entry in body.items()}


def _argument(entry: Mapping[str, Any]) -> Argument:
    keys = _arguments(entry.get("keys", {}))
    return Argument(**{**entry, "choices": tuple(entry.get("choices", ())), "keys": keys})


def _equal(left: str | None, right: str | None) -> bool:
    if left is None or right is None or left == right:
        return left == right
    try:
        return bool(json.loads(left) == json.loads(right))
    except (ValueError, RecursionError):
        return False
