"""What an engine does in a version, from the data files beside this one, and what it runs on.

Source: the `source` of each rule in engines.json, hardware.json, libraries.json and implemented.json.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from gates.static.declared import Declared


@cache
def table(name: str) -> dict[str, Any]:
    """Return a data file of this package."""
    text = resources.files("gates.static").joinpath(f"{name}.json").read_text("utf-8")
    value: dict[str, Any] = json.loads(text)
    return value


class Rules:
    """The rules of the declared engine in its version. What a bundle says in `engine.build` comes first."""

    def __init__(self, declared: Declared, engine: str | None) -> None:
        self.declared, self.engine = declared, engine
        self._own: Mapping[str, Any] = table("engines")["engines"].get(engine or "", {})

    def get(self, name: str) -> Any:
        """Return a rule's value; without one for this engine the default, and None when there is none either."""
        told = self.declared.libraries.get(name)
        if told is not None:
            return _value(told)
        for rule in self._own.get(name, ()):
            if is_within(self.declared.version, rule["versions"]):
                return rule["value"]
        return table("engines")["default"].get(name)

    def knows(self, name: str) -> bool:
        """Say whether there is a rule for this engine and version."""
        return name in self.declared.libraries or any(
            is_within(self.declared.version, rule["versions"]) for rule in self._own.get(name, ())
        )

    def library(self, name: str) -> str | None:
        """Return the version of a library that the engine runs with, or None."""
        told = self.declared.libraries
        image = table("engines")["images"].get((self.declared.image or "").rpartition("@")[2], {})
        for key in (name, name.replace("-", "_")):
            if key in told:
                return told[key]
            if key in image:
                return str(image[key])
        if name == "transformers" and self.engine == "transformers":
            return self.declared.version
        return None


@cache
def names_told() -> frozenset[str]:
    """Return the names of rules and of libraries that a declaration may say beside an engine's version."""
    engines = table("engines")
    known = {name for rules in engines["engines"].values() for name in rules} | set(engines["default"])
    libraries = {"transformers", *(rule["library"] for rule in table("libraries")["rules"])}
    return frozenset(known | libraries | {name.replace("-", "_") for name in libraries})


def implemented(engine: str | None, version: str | None) -> frozenset[str]:
    """Return the model types that an engine implements itself although their publishers ship code.

    Args:
        engine: its name; None asks for those of any engine in any version.
        version: of it; None means the newest.
    """
    return frozenset(
        name
        for one in table("implemented")["implemented"]
        if engine is None or (one["engine"] == engine and is_within(version, one["versions"]))
        for name in one["model_types"]
    )


def is_within(version: str | None, specifier: str) -> bool:
    """Say whether a version lies in a range. A version that is none lies only in the range of all."""
    if not specifier:
        return True
    try:
        return Version(version or "").release != () and SpecifierSet(specifier, prereleases=True).contains(
            Version(version or "")
        )
    except (InvalidVersion, InvalidSpecifier):
        return _open_ended(version, specifier)


def _open_ended(version: str | None, specifier: str) -> bool:
    # Without a version the newest is meant: what still holds there is what counts.
    return version is None and specifier.startswith(">=") and "," not in specifier


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def capability(accelerator: str | None) -> int | None:
    """Return a GPU's compute capability as a number such as 86, from `sm_86`, `8.6` or a SKU; None when unknown."""
    if accelerator is None:
        return None
    text = accelerator.lower().strip()
    match = re.fullmatch(r"(?:sm|compute|cuda)[-_ ]?([0-9]{2,3})[a-z]?", text)
    if match is not None:
        return int(match[1])
    match = re.fullmatch(r"([0-9]{1,2})\.([0-9])", text)
    if match is not None:
        return int(match[1] + match[2])
    words = "-" + re.sub(r"[^a-z0-9]+", "-", text) + "-"
    found = [name for name in table("hardware")["capability"] if f"-{name}-" in words]
    return table("hardware")["capability"][max(found, key=len)] if found else None


def lacks(accelerator: str | None, what: str) -> bool:
    """Say whether an accelerator is one of those that are listed as lacking a number format."""
    words = "-" + re.sub(r"[^a-z0-9]+", "-", (accelerator or "").lower()) + "-"
    return any(f"-{name}-" in words for name in table("hardware")["without"].get(what, ()))
