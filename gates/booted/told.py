"""Reads what an engine says of itself out of its own pages, by a table for each kind of engine.

Source: the `source` of each kind in reports.json.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from schemas.common import sha256_digest

MAX_VALUE = 1000
"""Characters of a value that are kept; a longer one is known by its digest alone."""
_LARGEST, _MOST_DIGITS = 10**18, 18
"""Numbers from which on, and digits beyond which, something is no count or setting of an engine."""
_LABELS = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"n": "\n", '"': '"', "\\": "\\"}
_TRUTH = {True: "true", False: "false", "True": "true", "False": "false", "true": "true", "false": "false"}
_OPPOSITE = {"true": "false", "false": "true"}


@dataclass(frozen=True, slots=True)
class Report:
    """Where one kind of engine says one thing, as a row of reports.json has it; see the comment there."""

    item: str
    page: str
    form: str
    at: tuple[str, ...] = ()
    label: tuple[str, ...] = ()
    times: tuple[str, ...] = ()
    argument: str | None = None
    step: int = 1
    unless: str | None = None

    @property
    def source(self) -> str:
        """Name the place to a person."""
        where = " ".join(self.label) or ".".join(self.at)
        return f"GET {self.page} {where}".rstrip() + (f" times {'.'.join(self.times)}" if self.times else "")


@dataclass(frozen=True, slots=True)
class Said:
    """One thing that was seen of an engine: its value as text, and where."""

    value: str
    source: str


@cache
def table(engine: str) -> Mapping[str, Any]:
    """Return what is known of one kind of engine; nothing of one that is not in the table."""
    text = resources.files("gates.booted").joinpath("reports.json").read_text("utf-8")
    kind: Mapping[str, Any] = json.loads(text).get(engine, {})
    return kind


@cache
def reports(engine: str) -> tuple[Report, ...]:
    """Return where one kind of engine says what it serves."""
    rows: list[dict[str, Any]] = table(engine).get("rows", [])
    lists = ("at", "label", "times")
    return tuple(Report(**(row | {name: tuple(row.get(name, ())) for name in lists})) for row in rows)


def pages(engine: str) -> list[str]:
    """Return the paths that have to be fetched of one kind of engine, sorted."""
    return sorted({row.page for row in reports(engine)})


def older(engine: str) -> Mapping[str, str]:
    """Return what pages were called in versions that do not know them: path → path."""
    named: Mapping[str, str] = table(engine).get("older", {})
    return named


def read(engine: str, fetched: Mapping[str, bytes], arguments: Sequence[str] = ()) -> dict[str, Said]:
    """Return what an engine says, by item. What it does not say, or not in the form that it should have, is absent.

    Of several rows for one item the first that says something counts.

    Args:
        engine: its kind.
        fetched: path → page, of those that it answered with 200.
        arguments: its launch arguments, since some change what a number means.
    """
    parsed: dict[str, Any] = {}
    found = {}
    for row in reports(engine):
        if row.item in found or row.page not in fetched or row.unless in arguments:
            continue
        if row.label:
            value = _labelled(fetched[row.page], row.label)
        else:
            if row.page not in parsed:
                parsed[row.page] = _json(fetched[row.page])
            value = _multiplied(parsed[row.page], row)
        text = _text(value, row.form)
        if text is not None:
            found[row.item] = Said(text, row.source)
    return found


_ABSENT = object()


def _json(page: bytes) -> Any:
    try:
        return json.loads(page)
    except (ValueError, RecursionError):
        return _ABSENT


def _multiplied(body: Any, row: Report) -> Any:
    value = _at(body, row.at)
    if not row.times:
        return value
    factor = _at(body, row.times)
    return value * factor if type(value) is int and type(factor) is int else _ABSENT


def _at(body: Any, path: Sequence[str]) -> Any:
    for step in path:
        if isinstance(body, list) and step.isdecimal() and int(step) < len(body):
            body = body[int(step)]
        elif isinstance(body, Mapping) and step in body:
            body = body[step]
        else:
            return _ABSENT
    return body


def _labelled(page: bytes, label: Sequence[str]) -> Any:
    """Return the product of a metric's labels that are counts, or else the text of a single one; of lines the least."""
    metric, *names = label
    values: list[Any] = []
    for line in page.decode("utf-8", errors="replace").splitlines():
        if not line.startswith(metric + "{"):
            continue
        told = {name: _unescaped(text) for name, text in _LABELS.findall(line)}
        texts = [told.get(name) for name in names]
        if all(text is not None and text.isdecimal() and len(text) <= _MOST_DIGITS for text in texts):
            values.append(math.prod(int(text or 0) for text in texts))
        elif len(names) == 1 and texts[0] is not None:
            values.append(texts[0])
        else:
            return _ABSENT
    if len(set(values)) > 1 and not all(type(value) is int for value in values):
        return _ABSENT
    return min(values, default=_ABSENT)


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), text)


def _text(value: Any, form: str) -> str | None:
    """Return a value as it is compared; None when it has not the form that it should."""
    match form:
        case "word" if value in (None, "", "None"):  # a tuple: what is no text may not be hashable
            return "none"
        case "text" | "word":
            return shown(value) if isinstance(value, str) and value else None
        case "digest":
            return sha256_digest(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) and value else None
        case "count":
            return str(value) if type(value) is int and 0 <= value < _LARGEST else None
        case "number":
            return number(value) if type(value) in {int, float} and abs(value) < _LARGEST else None
        case "truth" | "untruth":
            told = _TRUTH.get(value) if isinstance(value, bool | str) else None
            return _OPPOSITE.get(told or "") if form == "untruth" else told
        case "adapters":
            return _adapters(value)
    raise ValueError(f"{form} is no form")


def _adapters(value: Any) -> str | None:
    """Return adapters by their places, each with its path and how strong it is where nobody asks for it."""
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        return None
    told = []
    for one in value:
        place, path, scale = one.get("id"), one.get("path"), one.get("scale")
        if type(place) is not int or not isinstance(path, str) or type(scale) not in {int, float}:
            return None
        if not abs(scale) < _LARGEST:
            return None
        told.append((place, adapter(place, path, scale)))
    return shown("; ".join(text for _, text in sorted(told))) or "none"


def adapter(place: int, path: str, scale: float) -> str:
    """Return an adapter as it is compared."""
    return f"{place} {path} at {number(scale)}"


def shown(text: str) -> str:
    """Return a text as it is kept and compared: a long one as its digest."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= MAX_VALUE else sha256_digest(text.encode())


def number(value: float) -> str:
    """Return a number with the digits that a 32-bit float keeps, so that 0.8 and what an engine makes of it agree."""
    return f"{value:.6g}"
