"""Reads the keys and values of a GGUF header, with every count and length held against the bytes that are there."""

import array
import re
import struct
import sys
from collections.abc import Collection, Sequence
from typing import Any, BinaryIO, Final

from gates.files.gguf_types import ARRAY, ARRAY_KEYS, BOOL, ID_KEYS, SCALARS, STRING, TEXT_KEYS, TRUTH_KEYS, WHOLE_KEYS
from gates.files.header import Array, Value
from gates.files.refusal import FileRefused, pointer
from schemas.short import many

MAX_HEADER_BYTES: Final = 128 * 1024 * 1024
MAX_STRINGS: Final = 2_000_000
"""Texts in all arrays of a header together. Large vocabularies have 262,144 tokens and twice as many merges."""
MAX_NUMBERS: Final = 4_000_000
"""Numbers in one array."""
MAX_TEXT_BYTES: Final = 8 * 1024 * 1024
"""Longest text, such as a chat template."""
MAX_TEXTS_BYTES: Final = 32 * 1024 * 1024
"""All texts that are kept, together."""

_WINDOW = 1024 * 1024
_KEY = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_LENGTH = struct.Struct("<Q")


class Cursor:
    """Walks through a file in windows; every length is held against the bytes that are left before it is used."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size
        self.window, self.begin, self.at = b"", 0, 0
        file.seek(0)

    @property
    def position(self) -> int:
        """Offset in the file of the next byte."""
        return self.begin + self.at

    def left(self) -> int:
        """Return how many bytes of the file follow."""
        return self.size - self.position

    def require(self, count: int) -> None:
        """Make the window hold the next `count` bytes."""
        if self.at + count <= len(self.window):
            return
        position = self.position
        if count > self.left():
            said = f"ends after {self.size} bytes in the middle of its header: it is truncated"
            found = f"{self.left()} bytes left"
            raise FileRefused("header-truncated", said, offset=position, found=found, expected=f"{count} bytes more")
        if position + count > MAX_HEADER_BYTES:
            said = f"has a header of more than {MAX_HEADER_BYTES} bytes"
            raise FileRefused("header-too-long", said, offset=position)
        self.file.seek(position)
        self.window = self.file.read(min(max(count, _WINDOW), self.left()))
        self.begin, self.at = position, 0
        if len(self.window) < count:
            raise FileRefused("source-unstable", "became shorter while it was read", offset=position)

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        self.require(count)
        self.at += count
        return self.window[self.at - count : self.at]

    def skip(self, count: int) -> None:
        """Go on without reading `count` bytes, which the caller knows to be there."""
        if self.at + count > len(self.window):
            position = self.position + count
            self.window, self.begin, self.at = b"", position, 0
        else:
            self.at += count

    def number(self, code: str) -> Any:
        """Return the next number, by its code in `struct`."""
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value

    def text(self, limit: int, where: str | None = None) -> str:
        """Return the next text, of at most `limit` bytes."""
        begun = self.position
        length = self.number("Q")
        if length > limit:
            said = f"has a text of {length} bytes in its header; at most {limit} are read"
            raise FileRefused(
                "text-too-long", said, offset=begun, pointer=where, found=length, expected=f"at most {limit}"
            )
        raw = self.take(length)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise not_utf8(begun + 8 + error.start, raw[error.start : error.start + 8], where) from None


def not_utf8(offset: int, found: bytes, where: str | None) -> FileRefused:
    """Return the refusal of a text that is not UTF-8."""
    said = "has a text in its header that is not UTF-8"
    return FileRefused("not-utf8", said, offset=offset, pointer=where, found=found, expected="UTF-8")


def read_metadata(cursor: Cursor, count: int, keep: Collection[str]) -> dict[str, Value]:
    """Return the next `count` keys with their values; arrays whole where `keep` names their key."""
    metadata: dict[str, Value] = {}
    reader = _Values(cursor, keep)
    for _ in range(count):
        begun = cursor.position
        key = cursor.text(65_535)
        if not _KEY.fullmatch(key):
            said = "has a key that is not 1 to 256 of letters, digits, '_', '.' and '-'"
            raise FileRefused("key-name", said, offset=begun + 8, found=ascii(key[:60]))
        if key in metadata:
            raise FileRefused(
                "duplicate-key", f"has the key {key} twice", offset=begun + 8, pointer=pointer(key), found=key
            )
        metadata[key] = reader.value(key)
    return metadata


class _Values:
    """Reads values, and counts what they amount to."""

    def __init__(self, cursor: Cursor, keep: Collection[str]) -> None:
        self.cursor, self.keep = cursor, keep
        self.strings = self.text_bytes = 0

    def value(self, key: str) -> Value:
        begun = self.cursor.position
        kind = self.cursor.number("I")
        where = pointer(key)
        if kind == STRING:
            value: Value = self._text(where)
            told = "string"
        elif kind == ARRAY:
            value = self._array(key, where)
            told = f"array of {value.kind}"
        elif kind in SCALARS:
            value = self._scalar(kind, where)
            told = SCALARS[kind][0]
        else:
            said = f"has a value of the unknown type {kind} in its header"
            raise FileRefused("value-type", said, offset=begun, pointer=where, found=kind, expected="0 to 12")
        expected = _wanted(key, value)
        if expected is not None:
            said = f"has a value of type {told} for {key}"
            raise FileRefused("value-type", said, offset=begun, pointer=where, found=told, expected=expected)
        return value

    def _text(self, where: str) -> str:
        begun = self.cursor.position
        text = self.cursor.text(MAX_TEXT_BYTES, where)
        self.text_bytes += self.cursor.position - begun
        if self.text_bytes > MAX_TEXTS_BYTES:
            said = f"has more than {MAX_TEXTS_BYTES} bytes of texts in its header"
            raise FileRefused("header-too-long", said, offset=begun, pointer=where)
        return text

    def _scalar(self, kind: int, where: str) -> Value:
        code = SCALARS[kind][1]
        begun = self.cursor.position
        value: int | float = self.cursor.number(code)
        if kind != BOOL:
            return value
        if value not in (0, 1):
            said = f"has the truth value {value} in its header"
            raise FileRefused("truth-value", said, offset=begun, pointer=where, found=value, expected="0 or 1")
        return bool(value)

    def _array(self, key: str, where: str) -> Array:
        cursor, begun = self.cursor, self.cursor.position
        kind, count = cursor.number("I"), cursor.number("Q")
        if kind == ARRAY:
            said = "has an array of arrays in its header, which engines do not read"
            raise FileRefused("array-nested", said, offset=begun, pointer=where, expected="an array of values")
        if kind != STRING and kind not in SCALARS:
            said = f"has an array of the unknown type {kind} in its header"
            raise FileRefused("value-type", said, offset=begun, pointer=where, found=kind, expected="0 to 12")
        least = 8 if kind == STRING else struct.calcsize("<" + SCALARS[kind][1])
        if count * least > cursor.left():
            said = f"declares an array of {many(count, 'item')}, more than its bytes can hold: it is truncated"
            found = f"{cursor.left()} bytes left"
            need = f"{count * least} bytes for {count} items"
            raise FileRefused("array-length", said, offset=begun + 4, pointer=where, found=found, expected=need)
        if kind == STRING:
            self.strings += count
            limit, counted = MAX_STRINGS, self.strings
        else:
            limit, counted = MAX_NUMBERS, count
        if counted > limit:
            said = f"has arrays of {counted} items in its header; at most {limit} are read"
            raise FileRefused(
                "array-length", said, offset=begun + 4, pointer=where, found=counted, expected=f"at most {limit}"
            )
        wanted = key in self.keep
        if kind == STRING:
            return Array("string", count, self._strings(count, where, wanted=wanted))
        return self._numbers(kind, count, where, wanted=wanted)

    def _numbers(self, kind: int, count: int, where: str, *, wanted: bool) -> Array:
        name, code = SCALARS[kind]
        size = count * struct.calcsize("<" + code)
        if kind != BOOL and not wanted:
            self.cursor.skip(size)
            return Array(name, count)
        begun = self.cursor.position
        raw = self.cursor.take(size)
        if kind == BOOL and (odd := raw.translate(None, b"\0\1")):
            place = begun + raw.index(odd[0])
            said = f"has the truth value {odd[0]} in its header"
            raise FileRefused("truth-value", said, offset=place, pointer=where, found=odd[0], expected="0 or 1")
        items = array.array(code)
        items.frombytes(raw if wanted else b"")
        if sys.byteorder == "big":
            items.byteswap()
        return Array(name, count, items if wanted else None)

    def _strings(self, count: int, where: str, *, wanted: bool) -> Sequence[str] | None:
        """Check texts, and return them where they are wanted. A tight loop over the window: there may be a million."""
        cursor, items = self.cursor, list[str]()
        unpack, keep = _LENGTH.unpack_from, items.append
        window, at, end = cursor.window, cursor.at, len(cursor.window)
        for _ in range(count):
            begin = at + 8
            stop = begin + unpack(window, at)[0] if begin <= end else end + 1
            if stop > end:
                cursor.at = at
                text = self._text_of_array(where)
                window, at, end = cursor.window, cursor.at, len(cursor.window)
            else:
                try:
                    text = window[begin:stop].decode()
                except UnicodeDecodeError as error:
                    place = cursor.begin + begin + error.start
                    raise not_utf8(place, window[begin:stop][error.start :][:8], where) from None
                at = stop
            if wanted:
                keep(text)
        cursor.at = at
        return items if wanted else None

    def _text_of_array(self, where: str) -> str:
        return self.cursor.text(MAX_TEXT_BYTES, where)


def _wanted(key: str, value: Value) -> str | None:
    """Return what a key that is read must hold when it holds something else."""
    if key in TEXT_KEYS:
        return None if isinstance(value, str) else "string"
    if key in WHOLE_KEYS:
        return None if type(value) is int and value >= 0 else "a whole number"
    if key in ID_KEYS:
        return None if type(value) is int else "a whole number"
    if key in TRUTH_KEYS:
        return None if isinstance(value, bool) else "bool"
    kinds = ARRAY_KEYS.get(key)
    if kinds is not None and not (isinstance(value, Array) and value.kind in kinds):
        return f"array of {' or '.join(sorted(kinds))}"
    return None
