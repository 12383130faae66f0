"""What the system that runs an engine says that it runs, held against what it was asked for.

A container engine's settings, an admission webhook, a namespace's defaults and people change what was ordered, and say
nothing. So what is there is read back and compared, and each difference told as one of the engine itself.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gates.booted.expected import Wanted
from gates.booted.told import Said, shown

ASKED = "what its launcher made of the bundle"
AS_ASKED = "as it was asked for"
_KEYS = ("mountPath", "name", "key")
"""What the members of a list are known by, in this order: the same place may be in another one of the list."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that was asked for and is otherwise: where, and both values as text."""

    place: str
    asked: str
    told: str


@dataclass(frozen=True, slots=True)
class Made:
    """What was asked for and what is there, by item of `gates.booted.comparison`. `words` is the command line."""

    words: tuple[str, ...]
    asked: Mapping[str, Wanted]
    told: Mapping[str, Said]


@dataclass(slots=True)
class Findings:
    """Collects what was compared. `source` names who says what is there."""

    source: str
    found: dict[str, list[Difference]] = field(default_factory=dict)

    def add(self, item: str, differences: Iterator[Difference] | Sequence[Difference]) -> None:
        """Add what differs of an item; it was compared also when nothing does."""
        self.found.setdefault(item, []).extend(differences)

    def beyond(self, item: str, names: Sequence[str]) -> None:
        """Add what is there beside what was asked for, by its names."""
        self.add(item, [Difference("", "none", ", ".join(sorted(names)))] if names else [])

    def made(self, words: Sequence[str], asked: Sequence[str]) -> Made:
        """Return the whole, with the command line that is there and the one that was asked for."""
        wanted = {"arguments": Wanted("\n".join(asked), ASKED, "words")}
        told = {"arguments": Said("\n".join(words), self.source)}
        for item, differences in self.found.items():
            wanted[item] = Wanted(_text([(one.place, one.asked) for one in differences]), ASKED)
            told[item] = Said(_text([(one.place, one.told) for one in differences]), self.source)
        return Made(tuple(words), wanted, told)


def _text(parts: Sequence[tuple[str, str]]) -> str:
    return shown("; ".join(f"{place} {value}".strip() for place, value in parts) or AS_ASKED)


def differences(asked: object, told: object, place: str = "") -> Iterator[Difference]:
    """Yield what was asked for and is not so. What is there beside it, such as a default, is passed over."""
    if isinstance(asked, Mapping) and isinstance(told, Mapping):
        for key, value in asked.items():
            yield from differences(value, told.get(key), f"{place}.{key}" if place else str(key))
    elif isinstance(asked, list) and isinstance(told, list) and (by := _key(asked)) is not None:
        there = {one[by]: one for one in told if isinstance(one, Mapping) and by in one}
        for one in asked:
            yield from differences(one, there.get(one[by]), f"{place}[{one[by]}]")
    elif asked != told:
        yield Difference(place, as_text(asked), as_text(told))


def _key(members: list[Any]) -> str | None:
    return next(
        (by for by in _KEYS if members and all(isinstance(one, Mapping) and by in one for one in members)), None
    )


def as_text(value: object) -> str:
    """Return a value as a finding shows it."""
    return "absent" if value is None else value if isinstance(value, str) else json.dumps(value, sort_keys=True)
