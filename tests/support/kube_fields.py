"""What a strict API server refuses in an object: by the published names and kinds of fields, in kube_fields.json."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PUBLISHED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_KINDS: dict[str, type] = {"string": str, "boolean": bool, "integer": int, "object": dict, "number": float}


def faults(value: object, kind: str) -> list[str]:
    """Return what is wrong with an object of a published kind, such as Pod: fields, their kinds, and fixed values."""
    return list(_faults(value, kind, "", _PUBLISHED["values"]))


def _faults(value: object, kind: Any, place: str, values: dict[str, list[str]], field: str = "") -> Iterator[str]:
    if isinstance(kind, list):
        if not isinstance(value, list):
            yield f"{place} is no list"
            return
        for number, item in enumerate(value):
            yield from _faults(item, kind[0], f"{place}[{number}]", values, field)
    elif isinstance(kind, dict):
        if not isinstance(value, dict):
            yield f"{place} is no map"
            return
        for key, item in value.items():
            yield from _faults(item, kind["of"], f"{place}.{key}", values)
    elif isinstance(kind, str) and kind in _PUBLISHED["definitions"]:
        yield from _of_definition(value, kind, place, values)
    elif not any(type(value) is _KINDS[one] for one in kind.split("|")):
        yield f"{place} is no {kind}"
    elif field in values and value not in values[field]:
        yield f'{place} is "{value}", none of {", ".join(values[field])}'


def _of_definition(value: object, kind: str, place: str, values: dict[str, list[str]]) -> Iterator[str]:
    definition = _PUBLISHED["definitions"][kind]
    if isinstance(definition, str):
        yield from _faults(value, definition, place, values)
        return
    if not isinstance(value, dict):
        yield f"{place or kind} is no object"
        return
    yield from (f"{place}.{name} is missing".lstrip(".") for name in definition["required"] if name not in value)
    for key, item in value.items():
        inside = f"{place}.{key}".lstrip(".")
        if key in definition["fields"]:
            yield from _faults(item, definition["fields"][key], inside, values, f"{kind}.{key}")
        else:
            yield f'unknown field "{inside}"'
