"""What is wrong with JSON, for the person who wrote it: where, what was found there, and what is allowed.

Takes pydantic's errors apart and puts them in words. What is allowed (fields, choices, tags) is read from the JSON
Schema of the model, so that a slip of the pen is answered with what was meant. Pure.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from schemas.api import TARGET_PATTERN
from schemas.common import DIGEST_PATTERN, MAX_INTEGER, NAME_PATTERN
from schemas.suite import ITEM_PATTERN

MAX_FAULTS = 100
"""Faults that are told of one document."""
MAX_NAMES = 24
"""Names that are listed as allowed."""
LONGEST_VALUE = 60
"""Characters of a value that are repeated."""
LEAST_LIKENESS = 0.6

FORMS = {
    DIGEST_PATTERN: "`sha256:` and 64 of the digits 0–9 and a–f",
    r"^(sha256:)?[0-9a-f]{8,64}$": "a digest: 8 to 64 of the digits 0–9 and a–f, with or without `sha256:`",
    NAME_PATTERN: "a name: 1 to 63 of a–z, 0–9, `.` and `-`, with a letter or a digit first and last",
    TARGET_PATTERN: "a name and an environment, such as chat@prod: each 1 to 63 of a–z, 0–9, `.` and `-`",
    ITEM_PATTERN: "an id: 1 to 64 letters, digits, `.`, `_` and `-`, with a letter or a digit first",
}
"""Pattern → the same in words."""

_WANTED = {
    "string": "text",
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "bool": "true or false",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
    "mapping": "an object",
    "uuid": "an id such as 01a2289b-8894-74d9-8d4f-da769c0550b2",
    "datetime": "an instant such as 2026-03-03T14:03:00Z",
    "timezone": "an instant such as 2026-03-03T14:03:00Z",
    "none": "null",
}
"""First word of a type of error → what is wanted there."""
_BOUNDS = {
    "greater_than_equal": "at least",
    "less_than_equal": "at most",
    "greater_than": "above",
    "less_than": "below",
}

_LONG = re.compile(r"[0-9]{19,}")
"""Digits of a whole number that a file of YAML keeps as a text."""

Shape = type[BaseModel] | TypeAdapter[Any]


def pointer(path: Sequence[str | int]) -> str:
    """Return a path as a JSON Pointer (RFC 6901)."""
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in path)


def faults_of(error: ValidationError, document: Any, shape: Shape) -> list[dict[str, str]]:
    """Return {"pointer", "detail"} of each place of a document that its model refused."""
    schema = shape.json_schema() if isinstance(shape, TypeAdapter) else shape.model_json_schema()
    found = error.errors(include_url=False)[:MAX_FAULTS]
    return [fault(one, document, Schema(schema, schema)) for one in found]


def fault(error: Mapping[str, Any], document: Any, schema: "Schema") -> dict[str, str]:
    """Return {"pointer", "detail"} of one error of pydantic's.

    Its path also names the chosen members of unions, which the JSON does not have: only parts that exist there are
    kept, and the last one of a missing field. A union whose tag is unknown is wrong at its tag, and a rule over a
    whole object at the field with which its sentence begins.

    Args:
        error: with `type`, `loc`, `msg` and perhaps `ctx` and `input`.
        document: the JSON that was validated.
        schema: of the model.
    """
    path: list[str | int] = []
    at = document
    *parents, last = error["loc"] or ("",)
    for part in (*parents, last):
        if (isinstance(at, dict) and part in at) or (isinstance(at, list) and isinstance(part, int) and part < len(at)):
            path.append(part)
            at = at[part]
    if error["type"] == "missing" and error["loc"]:
        path.append(last)
    elif error["type"] in {"union_tag_invalid", "union_tag_not_found"}:
        # The last name quoted is the one in the JSON: a field's alias follows the field.
        path.append(error["ctx"]["discriminator"].split("'")[-2])
    elif error["type"] == "value_error" and isinstance(at, dict):
        field = _said(error).split(" ", 1)[0].rstrip(":").split(".")[0]
        path += [field] if field in at else []
    detail = sentence(error, schema.places(path, document), schema, path, document)
    # The pointer has named the field that a refusal begins with.
    return {"pointer": pointer(path), "detail": detail.removeprefix(f"{path[-1]}: ") if path else detail}


def sentence(
    error: Mapping[str, Any],
    places: Sequence[Mapping[str, Any]] = (),
    schema: "Schema | None" = None,
    path: Sequence[str | int] = (),
    document: Any = None,
) -> str:
    """Return what is wrong at a place, to be read after its name.

    Args:
        error: as for `fault`.
        places: the schemas that hold at the place.
        schema: of the whole, for the fields beside an unknown one.
        path: of the place.
        document: the JSON that was validated.
    """
    kind, context, value = str(error["type"]), error.get("ctx") or {}, error.get("input")
    match kind:
        case "missing":
            return "is required" + _described(places)
        case "extra_forbidden":
            names = schema.fields(path[:-1], document) if schema is not None else []
            return "is no field here" + instead(str(path[-1]) if path else "", names, "the fields are")
        case "union_tag_not_found":
            return "is required" + _listed(_choices(places), ": one of ")
        case "union_tag_invalid":
            return _none_of(context["tag"], _choices(places) or _quoted(str(context["expected_tags"])))
        case "literal_error" | "enum":
            return _none_of(value, _choices(places) or _quoted(str(context.get("expected", ""))))
        case "string_pattern_mismatch":
            pattern = str(context["pattern"])
            return f"is {shown(value)}, and has to be {FORMS.get(pattern, f'text of the form {pattern}')}"
        case "too_short" | "too_long":
            bound = "at least" if kind == "too_short" else "at most"
            most = context.get("min_length" if kind == "too_short" else "max_length")
            return f"has {_counted(context.get('actual_length') or len(value or ()), 'item')}, and needs {bound} {most}"
        case "string_too_short":
            return f"is {shown(value)}, and needs at least {_counted(context['min_length'], 'character')}"
        case "string_too_long":
            length = len(value) if isinstance(value, str) else "too many"
            return f"is {length} characters long, and may have {context['max_length']}"
        case "value_error":
            said = _said(error)
            return f"is {shown(value)}, and {said}" if said.startswith("must ") and _is_scalar(value) else said
        case _:
            return _of_type(kind, context, value, error)


def _of_type(kind: str, context: Mapping[str, Any], value: Any, error: Mapping[str, Any]) -> str:
    if kind in _BOUNDS:
        return f"is {shown(value)}, and has to be {_BOUNDS[kind]} {next(iter(context.values()))}"
    if kind == "string_unicode":
        return "is text that Unicode does not have"
    wanted = _WANTED.get(kind.split("_", 1)[0])
    if wanted == _WANTED["int"] and isinstance(value, str) and _LONG.fullmatch(value):
        return f"is {shown(value)}, which is too large: it has to be {wanted} of at most {MAX_INTEGER}"
    if wanted is not None:
        return f"is {shown(value)}, and has to be {wanted}"
    said = _said(error)
    return (
        f"is {shown(value)}, and {said.replace('Input should', 'has to', 1)}"
        if said.startswith("Input should")
        else said
    )


def _said(error: Mapping[str, Any]) -> str:
    return str(error["msg"]).removeprefix("Value error, ")


def shown(value: Any) -> str:
    """Return a value as a sentence names it: text in quotation marks and cut, lists and objects by their kind."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "a list"
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        cut = value if len(value) <= LONGEST_VALUE else value[:LONGEST_VALUE] + "…"
        # Half of a surrogate pair can be in JSON, and cannot be in an answer.
        return json.dumps(cut, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)[:LONGEST_VALUE]


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _counted(count: int, what: str) -> str:
    return f"{count or 'no'} {what}" + ("" if count == 1 else "s")


def _described(places: Sequence[Mapping[str, Any]]) -> str:
    text = next((str(one["description"]) for one in places if "description" in one), "").rstrip(".")
    choices = _choices(places)
    if len(choices) > 1:
        return _listed(choices, ": one of ")
    return f": {text[:1].lower() + text[1:] if text[1:2].islower() else text}" if text else ""


def _none_of(value: Any, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"is {shown(value)}, and has to be {json.dumps(names[0])}"
    meant = near(str(value), names)
    return f"is {shown(value)}, which is none of {', '.join(names[:MAX_NAMES])}" + (meant and f"; {meant}")


def instead(word: str, names: Sequence[str], opening: str) -> str:
    """Return the question whether a name like a word was meant, or all names after an opening."""
    meant = near(word, names)
    return f"; {meant}" if meant else _listed(names, f"; {opening} ")


def _listed(names: Sequence[str], opening: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return opening + ", ".join(names[:MAX_NAMES]) + more


def near(word: str, names: Sequence[str]) -> str:
    """Return the question whether the name that is most like a word was meant; nothing when none is like it."""
    plain = {_folded(name): name for name in names}
    found = difflib.get_close_matches(_folded(word), plain, n=1, cutoff=LEAST_LIKENESS)
    return f"did you mean {plain[found[0]]}?" if found else ""


def _folded(word: str) -> str:
    return re.sub(r"[-_. ]", "", word).casefold()


def _choices(places: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a place may be, where its schemas list that."""
    found: dict[str, None] = {}
    for one in places:
        for value in one.get("enum", [one["const"]] if "const" in one else []):
            found.setdefault(str(value))
    return list(found)


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text)


class Schema:
    """A JSON Schema, and what of it holds at a place of a document."""

    def __init__(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> None:
        """Take a schema, and the document in which its references are looked up."""
        self._schema, self._root = schema, root

    def places(self, path: Sequence[str | int], document: Any) -> list[Mapping[str, Any]]:
        """Return the schemas at a path; of a union's members those that the document has chosen, else all."""
        if not path:
            return list(self._expanded(self._schema, document))
        *parents, last = path
        within = self._within(parents, document)
        found = [one for parent, _ in within for one in self._children(parent, last)]
        value = _child(within[0][1], last) if within else None
        return [one for child in found for one in self._expanded(child, value)]

    def fields(self, path: Sequence[str | int], document: Any) -> list[str]:
        """Return the names of the fields that an object at a path may have."""
        names = (name for one, _ in self._within(path, document) for name in one.get("properties", {}))
        return list(dict.fromkeys(names))

    def _within(self, path: Sequence[str | int], document: Any) -> list[tuple[Mapping[str, Any], Any]]:
        here = [(one, document) for one in self._expanded(self._schema, document)]
        for part in path:
            here = [
                (expanded, _child(at, part))
                for one, at in here
                for child in self._children(one, part)
                for expanded in self._expanded(child, _child(at, part))
            ]
        return here

    def _children(self, schema: Mapping[str, Any], part: str | int) -> Iterator[Mapping[str, Any]]:
        if isinstance(part, int):
            inner = schema.get("items")
        else:
            inner = schema.get("properties", {}).get(part, schema.get("additionalProperties"))
        if isinstance(inner, Mapping):
            yield inner

    def _expanded(self, schema: Mapping[str, Any], document: Any) -> Iterator[Mapping[str, Any]]:
        """Follow references, and unions to the members that may be meant."""
        if "$ref" in schema:
            target: Any = self._root
            for part in str(schema["$ref"]).removeprefix("#/").split("/"):
                target = target[part]
            # A field's own description comes before its type's.
            own = {name: value for name, value in schema.items() if name != "$ref"}
            yield from self._expanded({**target, **own}, document)
            return
        members = schema.get("oneOf") or schema.get("anyOf")
        if not members:
            yield schema
            return
        own = {name: schema[name] for name in ("description",) if name in schema}
        tagged = schema.get("discriminator", {})
        tag = document.get(tagged.get("propertyName")) if isinstance(document, Mapping) else None
        chosen = tagged.get("mapping", {}).get(tag) if isinstance(tag, str) else None
        for member in [{"$ref": chosen}] if chosen else members:
            if member.get("type") != "null":
                yield from self._expanded({**member, **own}, document)


def _child(at: Any, part: str | int) -> Any:
    try:
        return at[part]
    except (LookupError, TypeError):
        return None
