"""What an engine answers in a version, from `releases.json` beside this file: capabilities, metrics, health.

A version that lies in no range has no capability and no metric: what is not known is not asked for.

Source: the `source` of each rule.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from gates.dialects.base import Capability, Dialect, MetricNames
from gates.static.rules import is_within


@dataclass(frozen=True)
class Health:
    """The route that says whether an engine lives, and what its 200 means."""

    path: str
    meaning: str


@cache
def _engines() -> dict[str, Any]:
    text = resources.files("gates.dialects").joinpath("releases.json").read_text("utf-8")
    engines: dict[str, Any] = json.loads(text)["engines"]
    return engines


def recorded() -> dict[str, Any]:
    """Return the whole table: engine → supported, health, capabilities, metrics and pages."""
    return _engines()


def health(engine: str) -> Health:
    """Return an engine's health route. Raises KeyError for an engine without a row."""
    row = _engines()[engine]["health"]
    return Health(row["path"], row["meaning"])


def supported(engine: str) -> str:
    """Return the versions of an engine that its driver starts. Raises KeyError for an engine without a row."""
    versions: str = _engines()[engine]["supported"]["versions"]
    return versions


def capabilities(engine: str, version: str) -> frozenset[Capability]:
    """Return what can be asked of an engine in a version. Raises KeyError for an engine without a row."""
    if not is_within(version, supported(engine)):
        return frozenset()
    rules = _engines()[engine]["capabilities"]
    return frozenset(
        Capability(name) for name, told in rules.items() if any(is_within(version, rule["versions"]) for rule in told)
    )


def metric_names(engine: str, version: str) -> MetricNames:
    """Return the names of an engine's metrics in a version. Raises KeyError for an engine without a row."""
    for rule in _engines()[engine]["metrics"]:
        if is_within(version, supported(engine)) and is_within(version, rule["versions"]):
            return MetricNames(**rule["value"])
    return MetricNames()


def in_version(dialect: Dialect, version: str) -> Dialect:
    """Return a dialect as an engine of this version speaks it; one without a row speaks the same in all of them."""
    if dialect.name not in _engines():
        return dialect
    return replace(
        dialect,
        capabilities=capabilities(dialect.name, version),
        metrics=metric_names(dialect.name, version),
    )
