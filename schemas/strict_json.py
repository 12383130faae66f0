"""JSON without what parsers disagree on, in bounded memory: one reader for documents, answers and bundles' files.

Refused are duplicate keys, NaN and Infinity, numbers that overflow, surrogates that stand alone, a byte order mark, and
what is deeper, larger or of more values than the caller allows. Standard parsers take all of these, each in its way.

Source: RFC 8259, RFC 7493 (I-JSON) and RFC 6901 for the places of what is refused.
"""

import json
import math
import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

MAX_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
MAX_VALUES = 4_000_000
"""Values in one document. A tokenizer of 262,144 tokens with their merges has 1.6 million."""
MAX_CONTAINERS = 1_000_000
"""Objects and lists in one document, which take the most memory: that tokenizer has half a million."""
MAX_DIGITS = 4300
"""Digits of a whole number; longer ones take a time that grows with the square of their length."""

_STRING = re.compile(rb'"[^"]*+"?')
"""A string without escapes. One without end takes the rest: scanning stays linear in the size."""
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{},"'))
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# Escapes from the left: a pair of surrogates, then one alone, then any other.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
_ONE_DIGIT = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 39
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


class NotStrictJson(ValueError):
    """JSON that is not read. `offset` counts bytes, `pointer` is a JSON Pointer; None where it does not fit."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        offset: int | None = None,
        pointer: str | None = None,
        found: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.offset, self.pointer, self.found = code, message, offset, pointer, found


class _Fault:
    """Stands in a parsed document for what is refused there, so that its place can be found."""

    def __init__(self, refused: NotStrictJson, key: str | None) -> None:
        self.refused, self.key = refused, key


def strict_json(
    raw: bytes,
    *,
    limit: int = MAX_BYTES,
    depth: int = MAX_DEPTH,
    values: int = MAX_VALUES,
    digits: int = MAX_DIGITS,
) -> Any:
    """Parse JSON without what parsers disagree on.

    Args:
        raw: UTF-8 bytes.
        limit: largest size, in bytes.
        depth: deepest nesting of objects and arrays.
        values: most values, keys not counted.
        digits: most digits of a whole number; at least 38.

    Raises:
        NotStrictJson: too large, too deep, not UTF-8, not JSON, a duplicate key, or a value that JSON does not know.
    """
    if len(raw) > limit:
        raise NotStrictJson("too-large", f"is larger than {limit} bytes", found=f"{len(raw)} bytes")
    if raw.startswith(b"\xef\xbb\xbf"):
        raise NotStrictJson("json-bom", "begins with a byte order mark", offset=0)
    _check_structure(raw, depth, values)
    if b"\\u" in raw and (lone := _lone_surrogate(raw)) is not None:
        found = raw[lone : lone + 6].decode()
        raise NotStrictJson("json-escape", "has half a character", offset=lone, found=found)
    try:
        return _Parser(raw, digits).parse()
    except NotStrictJson as refused:
        if refused.offset is None and refused.pointer is None:
            refused.pointer = _Parser(raw, digits).place()
        raise


class _Parser:
    """One parsing of a document, with the standard parser's hooks."""

    def __init__(self, raw: bytes, digits: int) -> None:
        self.raw, self.digits = raw, digits
        self.is_search = False
        self.faults: list[_Fault] = []

    def parse(self) -> Any:
        """Return the document, or raise the first refusal."""
        hooks: dict[str, Any] = {
            "object_pairs_hook": self._object,
            "parse_constant": self._constant,
            "parse_float": self._decimal,
        }
        if _LONG in self.raw.translate(_ONE_DIGIT):
            hooks["parse_int"] = self._whole
        try:
            return json.loads(self.raw.decode("utf-8"), **hooks)
        except UnicodeDecodeError as error:
            raise NotStrictJson("not-utf8", f"is not UTF-8 at byte {error.start}", offset=error.start) from None
        except json.JSONDecodeError as error:
            offset = len(error.doc[: error.pos].encode())
            message = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
            found = error.doc[error.pos : error.pos + 20]
            raise NotStrictJson("json-syntax", message, offset=offset, found=found) from None

    def place(self) -> str | None:
        """Return where the first refusal lies, or None when the document does not go on as JSON after it."""
        self.is_search = True
        try:
            value = self.parse()
        except NotStrictJson:
            return None
        return next((place for place, fault in _faults(value, "") if fault is self.faults[0]), None)

    def _refuse(self, code: str, message: str, found: str, key: str | None = None) -> _Fault:
        refused = NotStrictJson(code, message, found=found)
        if not self.is_search:
            raise refused
        self.faults.append(_Fault(refused, key))
        return self.faults[-1]

    def _object(self, pairs: list[tuple[str, Any]]) -> Any:
        value = dict(pairs)
        if len(value) == len(pairs):
            return value
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                return self._refuse("duplicate-key", f"has the key {key[:100]!r} twice", key[:100], key)
            seen.add(key)
        return value

    def _constant(self, word: str) -> _Fault:
        return self._refuse("json-number", f"has the value {word}, which JSON does not know", word)

    def _decimal(self, text: str) -> float | _Fault:
        value = float(text)
        if math.isfinite(value):
            return value
        return self._refuse("json-number", "has a number that is too large", text[:60])

    def _whole(self, text: str) -> int | _Fault:
        if len(text.lstrip("-")) <= self.digits:
            return int(text)
        return self._refuse("json-number", f"has a number of more than {self.digits} digits", text[:60])


def _faults(value: Any, place: str) -> Iterator[tuple[str, _Fault]]:
    if isinstance(value, _Fault):
        yield place if value.key is None else _below(place, value.key), value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _faults(item, _below(place, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            if isinstance(item, dict | list | _Fault):
                yield from _faults(item, _below(place, number))


def _below(place: str, part: str | int) -> str:
    return place + "/" + str(part)[:256].replace("~", "~0").replace("/", "~1")


def _check_structure(raw: bytes, depth: int, values: int) -> None:
    """Refuse nesting and numbers of values over the limits, before anything is built. Works on whole bytes, fast."""
    containers = raw.count(b"[") + raw.count(b"{")
    if containers <= depth and raw.count(b",") + containers <= values:
        return  # with so few, also those within strings, it is neither deeper nor larger
    bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw
    bare = bare.translate(None, _NOT_STRUCTURE)
    # Two quotes side by side are an empty string, or one that ends where the next begins: neither has structure.
    bare = bare.replace(b'""', b"")
    if b'"' in bare:
        bare = _STRING.sub(b"", bare)
    containers = bare.count(b"[") + bare.count(b"{")
    if containers > MAX_CONTAINERS or containers + bare.count(b",") > values:
        raise NotStrictJson("too-large", f"has more than {values} values, or {MAX_CONTAINERS} objects and lists")
    brackets = bare.translate(_ONE_KIND, _NOT_BRACKETS)
    inner = brackets
    for _ in range(depth):
        inner = inner.replace(b"[]", b"")  # takes out the innermost level
        if not inner:
            return
    # Deeper, or not balanced, which the parser says better.
    if max(accumulate(1 if mark == 0x5B else -1 for mark in brackets)) > depth:
        raise NotStrictJson("too-deep", f"is nested deeper than {depth} levels")


def _lone_surrogate(raw: bytes) -> int | None:
    return next((match.start(1) for match in _ESCAPE.finditer(raw) if match[1] is not None), None)
