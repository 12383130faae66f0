"""Makes requests out of an OpenAPI document: some as it says, some nearly, some not at all. For Hypothesis."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from hypothesis import strategies as st

Json = Any
Value = TypeVar("Value")
MAX_DEPTH = 6
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=12)
)
ANYTHING: st.SearchStrategy[Json] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
HEADER_TEXT = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)


@dataclass(frozen=True)
class Call:
    """One request."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    headers: Mapping[str, str]
    content: bytes | None


@st.composite
def mostly(draw: st.DrawFn, usual: st.SearchStrategy[Value], other: st.SearchStrategy[Value]) -> Value:
    """Draw from `usual` three times out of four."""
    return draw(other if draw(st.integers(0, 3)) == 3 else usual)


class Fuzz:
    """Requests for the operations of one document.

    Args:
        document: OpenAPI 3.1.
        known: parameter or field name → values that exist in the service, so that requests get past its look-ups.
    """

    def __init__(self, document: dict[str, Any], known: Mapping[str, list[str]]) -> None:
        self._components: dict[str, Any] = document["components"]["schemas"]
        self._known = known

    def calls(self, method: str, path: str, operation: dict[str, Any]) -> st.SearchStrategy[Call]:
        """Return requests for one operation."""

        @st.composite
        def made(draw: st.DrawFn) -> Call:
            target, query, headers = path, [], {}
            for parameter in operation.get("parameters", []):
                name, place = parameter["name"], parameter["in"]
                if place != "path" and not parameter.get("required") and draw(st.booleans()):
                    continue
                value = draw(self._parameter(name, parameter["schema"], place=place))
                if place == "path":
                    target = target.replace(f"{{{name}}}", _quoted(value))
                elif place == "query":
                    query.append((name, value))
                else:
                    headers[name] = value
            content = None
            body = operation.get("requestBody", {}).get("content", {})
            if body:
                kind = next(iter(body))
                content = draw(self._content(kind, body[kind]["schema"]))
                headers["content-type"] = draw(mostly(st.just(kind), st.just("text/plain")))
            return Call(method, target, tuple(query), headers, content)

        return made()

    def _parameter(self, name: str, schema: dict[str, Any], *, place: str) -> st.SearchStrategy[str]:
        is_header = place == "header"
        strategy = mostly(self.value(schema, name).map(_plain), HEADER_TEXT if is_header else TEXT)
        if known := self._known.get(f"{place}:{name}", self._known.get(name)):
            strategy = mostly(st.sampled_from(known), strategy)
        if is_header:
            return strategy.filter(lambda text: text.isascii() and text.isprintable() and text.strip() == text)
        return strategy

    def _content(self, kind: str, schema: dict[str, Any]) -> st.SearchStrategy[bytes]:
        raw = st.binary(max_size=64)
        if "json" not in kind:
            return raw
        valid = self.value(schema)
        nearly = st.tuples(valid, TEXT, ANYTHING).map(_disturbed)
        return mostly(mostly(valid, st.one_of(nearly, nearly, ANYTHING)).map(_dumped), raw)

    def value(self, schema: dict[str, Any], name: str = "", depth: int = 0) -> st.SearchStrategy[Json]:
        """Return values that a schema takes, as far as its keywords are understood here."""
        if name in self._known and depth and schema.get("type") == "string":
            return mostly(st.sampled_from(self._known[name]), self._string(schema))
        if "$ref" in schema:
            return st.deferred(lambda: self.value(self._components[schema["$ref"].rsplit("/", 1)[1]], name, depth))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return st.one_of(*(self.value(one, name, depth) for one in schema[keyword]))
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if depth > MAX_DEPTH:
            return ANYTHING
        return self._typed(schema, name, depth)

    def _typed(self, schema: dict[str, Any], name: str, depth: int) -> st.SearchStrategy[Json]:
        match schema.get("type"):
            case "object":
                return self._object(schema, depth)
            case "array":
                least = schema.get("minItems", 0)
                most = min(schema.get("maxItems", 3), max(3, least))
                items = self.value(schema.get("items", {}), name, depth + 1)
                return st.lists(items, min_size=least, max_size=most)
            case "integer":
                low, high = schema.get("minimum", -10), schema.get("maximum", 2**53)
                return st.integers(low, high)
            case "number":
                return st.floats(schema.get("minimum", 0), schema.get("maximum", 1e6), allow_nan=False)
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
            case "string":
                return self._string(schema)
            case _:
                return ANYTHING

    def _string(self, schema: dict[str, Any]) -> st.SearchStrategy[str]:
        if schema.get("format") == "uuid":
            return st.uuids().map(str)
        if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True)
        low = schema.get("minLength", 0)
        return st.text(min_size=low, max_size=min(schema.get("maxLength", 20), max(20, low)))

    def _object(self, schema: dict[str, Any], depth: int) -> st.SearchStrategy[Json]:
        properties, required = schema.get("properties", {}), set(schema.get("required", []))
        values = {name: self.value(one, name, depth + 1) for name, one in properties.items()}
        further = schema.get("additionalProperties")
        if not properties and isinstance(further, dict):
            return st.dictionaries(TEXT, self.value(further, depth=depth + 1), max_size=2)
        return st.fixed_dictionaries(
            {name: one for name, one in values.items() if name in required},
            optional={name: one for name, one in values.items() if name not in required},
        )


def _plain(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    """Return a path segment; dots alone would be another path."""
    return "x" if text in {"", ".", ".."} else quote(text, safe="@:", errors="surrogatepass")


def _dumped(value: Json) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _disturbed(parts: tuple[Json, str, Json]) -> Json:
    """Put something else in the place of one member, or beside them all."""
    value, name, other = parts
    if not isinstance(value, dict):
        return other
    keys = sorted(value)
    place = keys[len(name) % len(keys)] if keys and len(name) % 2 else name
    return {**value, place: other}
