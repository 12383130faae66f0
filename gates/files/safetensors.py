"""Reads the header of a safetensors file: strictly, in one pass over its bytes, and in bounded memory.

The reference parser builds whatever JSON it is given before it looks at it; 32 MB of `[[],[],…` would take a
gigabyte. Here the grammar of the header itself is what is parsed, so that the first byte that does not belong ends it.
No tensor data is read.

Source: https://github.com/huggingface/safetensors#format, and the types of its release 0.8.
"""

import json
import math
import re
from operator import itemgetter
from typing import BinaryIO, NamedTuple, NoReturn

from gates.files import magic
from gates.files.header import MAX_NAME, Header, Tensor, Value, check_name
from gates.files.refusal import FileRefused, pointer

MAX_HEADER_BYTES = 16 * 1024 * 1024
"""Largest header that is read. The format itself allows 100 MB."""
MAX_TENSORS = 65_536
"""Most tensors of one file; the largest shards of published models have a few thousand."""
MAX_METADATA_KEYS = 10_000
MAX_METADATA_BYTES = 8 * 1024 * 1024
MAX_DIMENSIONS = 8
_EXPECTED = "a safetensors file: the length of its header, then the header"

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Type → bits of one number."""

_S = rb"[ \t\n\r]*+"
_STRING = rb'"((?:[^"\\\x00-\x1f]++|\\.)*+)"'
_COUNT = rb"(?:0|[1-9][0-9]{0,18}+)"
_FIELD = (
    rb'(?:"dtype"' + _S + b":" + _S + rb'"([A-Z0-9_]{1,16}+)"'
    rb'|"shape"' + _S + b":" + _S + rb"\[" + _S + b"((?:" + _COUNT + b"(?:" + _S + b"," + _S + _COUNT + rb"){0,7}+)?+)"
    + _S + rb'\]|"data_offsets"' + _S + b":" + _S + rb"\[" + _S + b"(" + _COUNT + b")" + _S + b"," + _S
    + b"(" + _COUNT + b")" + _S + rb"\])"
)  # fmt: skip
# A whole entry in the order of any writer. Three fields of which none is missing are the three, each once.
_ENTRY = re.compile(
    _S + _STRING + _S + b":" + _S + rb"\{" + _S
    + b"(?:" + _FIELD + _S + rb"(?:," + _S + rb'(?=")|(?=\}))){3}\}' + _S
)  # fmt: skip
_METADATA = re.compile(_S + rb'"__metadata__"' + _S + b":" + _S + rb"\{" + _S)
_PAIR = re.compile(_S + _STRING + _S + b":" + _S + _STRING + _S)
_KEY = re.compile(_S + _STRING + _S)
_SPACE = re.compile(_S)
_BY_BYTES = itemgetter(4, 5, 0)
_VALUE = re.compile(rb'"(?:[^"\\\x00-\x1f]++|\\.)*+"|\[[^\[\]{}"]*+\]|[^,\[\]{}\x00-\x20"]++')


def read_safetensors(file: BinaryIO, size: int, name: str, *, max_header_bytes: int = MAX_HEADER_BYTES) -> Header:
    """Read the header of a safetensors file.

    Args:
        file: opened for reading in binary.
        size: of the file, in bytes.
        name: of the file, for its tensors.
        max_header_bytes: longest header accepted.

    Raises:
        FileRefused: not that format, truncated, with bytes that no tensor covers, or readable in two ways.
    """
    file.seek(0)
    head = file.read(min(size, magic.HEAD_BYTES))
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > max_header_bytes or 8 + length > size:
        _refuse_length(head, length, size, max_header_bytes)
    file.seek(8)
    raw = file.read(length)
    if len(raw) != length:
        raise FileRefused("source-unstable", "became shorter while it was read", offset=8 + len(raw))
    if not raw.startswith(b"{"):
        magic.refuse_disguise(head, size, _EXPECTED)
        raise FileRefused(
            "header-start", "has a header that does not start with '{'", offset=8, found=raw[:8], expected="{"
        )
    metadata, tensors = _Header(raw, name).read()
    _check_cover(tensors, 8 + length, size)
    return Header("safetensors", metadata, tuple(tensors), 8 + length)


def _refuse_length(head: bytes, length: int, size: int, limit: int) -> NoReturn:
    magic.refuse_disguise(head, size, _EXPECTED)
    if head.startswith(b"GGUF"):
        raise FileRefused("other-format", "is a GGUF file under another name", offset=0, found="GGUF")
    if size < 8:
        said = "is empty" if not size else "is shorter than the 8 bytes that tell the header's length"
        raise FileRefused("empty-file" if not size else "header-truncated", said, offset=size, found=size, expected=8)
    if length > limit:
        said = f"declares a header of {length} bytes; at most {limit} are read"
        raise FileRefused("header-too-long", said, offset=0, found=length, expected=f"at most {limit}")
    said = f"declares a header of {length} bytes, but only {size - 8} follow: it is truncated"
    raise FileRefused("header-truncated", said, offset=size, found=size - 8, expected=length)


class _Form(NamedTuple):
    """What a type and a shape come to, shared by all tensors that have them. `size` is None for half a byte."""

    dtype: str
    shape: tuple[int, ...]
    size: int | None
    alignment: int


class _Header:
    """One pass over the bytes of a header. Places are counted from the header's start; refusals tell the file's."""

    def __init__(self, raw: bytes, file: str) -> None:
        self.raw, self.file, self.data = raw, file, 8 + len(raw)
        # Then every name is printable as it stands, and its spelling needs no further look.
        self.is_plain = raw.isascii() and not any(mark in raw for mark in (b"\\", b"\x7f", b".."))
        self.names: set[str] = set()
        self.forms: dict[tuple[bytes, bytes], _Form] = {}
        self.metadata: dict[str, Value] | None = None

    def read(self) -> tuple[dict[str, Value], list[Tensor]]:
        tensors: list[Tensor] = []
        position = self._skip(1)
        while self.raw[position : position + 1] != b"}" or self.names or self.metadata is not None:
            match = _ENTRY.match(self.raw, position)
            if match is not None:
                tensors.append(self._tensor(match))
                position = match.end()
            else:
                position = self._metadata(position)
            if len(tensors) > MAX_TENSORS:
                raise self._refused("too-many-tensors", f"holds more than {MAX_TENSORS} tensors", position)
            mark = self.raw[position : position + 1]
            if mark == b"}":
                break
            if mark != b",":
                raise self._syntax(position, "a comma or the end of the header")
            position += 1
        if self.raw[position + 1 :].strip(b" "):
            rest = self.raw[position + 1 :]
            place = position + 1 + len(rest) - len(rest.lstrip(b" "))
            said = "has something else than spaces after its header"
            raise self._refused("header-padding", said, place, found=self.raw[place : place + 16], expected="spaces")
        return self.metadata or {}, tensors

    def _tensor(self, match: re.Match[bytes]) -> Tensor:
        raw_name, dtype, shape, start, end = match.groups()
        if dtype is None or shape is None or start is None:
            self._explain(match.start())
        name = raw_name.decode() if self.is_plain else self._text(raw_name, match.start(1))
        if not self.is_plain or not name or name[0] in " _/" or name[-1] == " " or len(name) > MAX_NAME:
            check_name(name, 8 + match.start(1))
        if name in self.names:
            raise self._twice(name, match.start(1), pointer(name))
        self.names.add(name)
        form = self.forms.get((dtype, shape))
        if form is None:
            form = self.forms[dtype, shape] = self._form(name, match)
        first, last = int(start), int(end)
        if form.size != last - first:
            said = f"gives tensor {name} {last - first} bytes, which its type and shape do not fill"
            where = pointer(name, "data_offsets")
            need = "whole bytes" if form.size is None else f"{form.size} bytes for {form.dtype} {list(form.shape)}"
            found = [first, last]
            raise self._refused("tensor-size", said, match.start(4), where=where, found=found, expected=need)
        if first % form.alignment:
            said = f"places tensor {name} at byte {first} of the data, which is not aligned to its type"
            where, need = pointer(name, "data_offsets"), f"a multiple of {form.alignment}"
            raise self._refused("tensor-alignment", said, match.start(4), where=where, found=first, expected=need)
        return Tensor(name, form.dtype, form.shape, self.file, self.data + first, last - first)

    def _form(self, name: str, match: re.Match[bytes]) -> "_Form":
        kind = match[2].decode()
        bits = BITS.get(kind)
        if bits is None:
            said, known = f"gives tensor {name} the unknown type {kind}", ", ".join(BITS)
            where = pointer(name, "dtype")
            raise self._refused("dtype-unknown", said, match.start(2), where=where, found=kind, expected=known)
        shape = tuple(map(int, match[3].split(b","))) if match[3] else ()
        if shape and max(shape) >= 2**48:
            said, where = f"gives tensor {name} a dimension of 2^48 or more", pointer(name, "shape")
            expected = "less than 2^48"
            raise self._refused("shape", said, match.start(3), where=where, found=list(shape), expected=expected)
        size, rest = divmod(math.prod(shape) * bits, 8)
        return _Form(kind, shape, None if rest else size, max(1, bits // 8))

    def _metadata(self, position: int) -> int:
        match = _METADATA.match(self.raw, position)
        if match is None:
            self._explain(position)
        if self.metadata is not None:
            raise self._twice("__metadata__", position, "/__metadata__")
        self.metadata, position = {}, match.end()
        begun = position
        if self.raw[position : position + 1] == b"}":
            return self._skip(position + 1)
        while True:
            pair = _PAIR.match(self.raw, position)
            if pair is None:
                said = "has __metadata__ that does not map texts to texts"
                raise self._refused(
                    "metadata", said, position, where="/__metadata__", found=self._here(position), expected="text: text"
                )
            key = self._text(pair[1], pair.start(1))
            if key in self.metadata:
                raise self._twice(key, pair.start(1), pointer("__metadata__", key[:256]))
            self.metadata[key] = self._text(pair[2], pair.start(2))
            position = pair.end()
            if len(self.metadata) > MAX_METADATA_KEYS or position - begun > MAX_METADATA_BYTES:
                said = f"has more than {MAX_METADATA_KEYS} texts or {MAX_METADATA_BYTES} bytes of __metadata__"
                raise self._refused("metadata-too-large", said, position, where="/__metadata__")
            mark = self.raw[position : position + 1]
            position += 1
            if mark == b"}":
                return self._skip(position)
            if mark != b",":
                raise self._syntax(position - 1, "a comma or the end of __metadata__")

    def _skip(self, position: int) -> int:
        match = _SPACE.match(self.raw, position)
        return position if match is None else match.end()

    def _text(self, raw: bytes, position: int) -> str:
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            said = "has a text in its header that is not UTF-8"
            raise self._refused("not-utf8", said, position + error.start, found=raw[error.start :][:8]) from None
        if "\\" in text:
            try:
                text = json.loads(f'"{text}"')
                text.encode()  # a surrogate alone is no character
            except ValueError:
                said = "has an escape in a text of its header that stands for no character"
                raise self._refused("json-escape", said, position, found=raw[:60]) from None
        return text

    # ------------------------------------------------------------------------------ what is wrong with an entry

    def _explain(self, position: int) -> NoReturn:
        """Refuse an entry that is none, by the first of its bytes that does not belong."""
        match = _KEY.match(self.raw, position)
        if match is None:
            raise self._syntax(position, "the name of a tensor in quotes")
        name = self._text(match[1], match.start(1))
        if name == "__metadata__":
            said = "has __metadata__ that does not map texts to texts"
            raise self._refused("metadata", said, match.start(), where="/__metadata__", expected="an object of texts")
        check_name(name, 8 + match.start(1))
        position = self._expect(match.end(), b":")
        position = self._expect(self._skip(position), b"{", what="an object with dtype, shape and data_offsets")
        self._explain_fields(name, position)

    def _explain_fields(self, name: str, position: int) -> NoReturn:
        fields: set[str] = set()
        while True:
            match = _KEY.match(self.raw, position)
            if match is None:
                break
            field = match[1].decode(errors="replace")
            if field in fields:
                raise self._twice(field, match.start(1), pointer(name, field))
            if field not in ("dtype", "shape", "data_offsets"):
                said = f"describes tensor {name} by another field than dtype, shape and data_offsets"
                raise self._refused("tensor-fields", said, match.start(1), where=pointer(name), found=field)
            fields.add(field)
            position = self._skip(self._expect(match.end(), b":"))
            value = _VALUE.match(self.raw, position)
            self._explain_value(name, field, position, b"" if value is None else value[0])
            assert value is not None  # noqa: S101 - an empty value was refused above
            position = self._skip(value.end())
            if self.raw[position : position + 1] != b",":
                break
            position += 1
        position = self._skip(position)
        if self.raw[position : position + 1] != b"}" or self.raw[position - 1 : position] == b",":
            raise self._syntax(position, "a comma or the end of the tensor's entry")
        missing = [field for field in ("dtype", "shape", "data_offsets") if field not in fields]
        said = f"describes tensor {name} without {' and '.join(missing)}"
        raise self._refused("tensor-fields", said, position, where=pointer(name), found=sorted(fields))

    def _explain_value(self, name: str, field: str, position: int, value: bytes) -> None:
        """Refuse a value that no entry can have; return for one that it can."""
        where, found = pointer(name, field), value or self._here(position)
        if field == "dtype":
            if re.fullmatch(rb'"[A-Z0-9_]{1,16}"', value):
                return
            said = f"gives tensor {name} an unknown type"
            raise self._refused("dtype-unknown", said, position, where=where, found=found, expected=", ".join(BITS))
        most = MAX_DIMENSIONS if field == "shape" else 2
        is_short = value.startswith(b"[") and value.count(b",") < most
        inner = value[1:-1].strip(b" \t\n\r") if is_short else b"no list, or a long one"
        counts = re.split(_S + b"," + _S, inner) if inner else []
        are_counts = all(re.fullmatch(_COUNT, count) for count in counts)
        if are_counts and (len(counts) <= most if field == "shape" else len(counts) == most):
            return
        code = "shape" if field == "shape" else "tensor-offsets"
        expected = f"at most {most} whole numbers" if field == "shape" else "two whole numbers"
        said = f"gives tensor {name} {field} that are not {expected}"
        raise self._refused(code, said, position, where=where, found=found, expected=expected)

    def _expect(self, position: int, mark: bytes, what: str | None = None) -> int:
        if self.raw[position : position + 1] != mark:
            raise self._syntax(position, what or f"'{mark.decode()}'")
        return position + 1

    def _here(self, position: int) -> str:
        return self.raw[position : position + 40].decode("utf-8", "backslashreplace")

    def _syntax(self, position: int, expected: str) -> FileRefused:
        found = self._here(position) or "the end of the header"
        return self._refused("json-syntax", "has a header that is not JSON", position, found=found, expected=expected)

    def _twice(self, key: str, position: int, where: str) -> FileRefused:
        return self._refused("duplicate-key", f"has the key {key[:100]!a} twice", position, where=where, found=key)

    def _refused(
        self,
        code: str,
        said: str,
        position: int,
        *,
        where: str | None = None,
        found: object = None,
        expected: object = None,
    ) -> FileRefused:
        return FileRefused(code, said, offset=8 + position, pointer=where, found=found, expected=expected)


def _check_cover(tensors: list[Tensor], data: int, size: int) -> None:
    """Sort the tensors by their bytes, and refuse what overlaps, leaves a hole, or does not end with the file."""
    tensors.sort(key=_BY_BYTES)
    position = data
    for tensor in tensors:
        if tensor.offset != position:
            overlaps = tensor.offset < position
            said = "it overlaps the one before" if overlaps else "no tensor covers the bytes before it"
            raise FileRefused(
                "tensor-overlap" if overlaps else "tensor-hole",
                f"places tensor {tensor.name} at byte {tensor.offset - data} of the data, where {said}",
                offset=tensor.offset,
                pointer=pointer(tensor.name, "data_offsets"),
                found=tensor.offset - data,
                expected=position - data,
            )
        position += tensor.size
    if position != size:
        truncated = position > size
        said = "it is truncated" if truncated else "something is appended"
        raise FileRefused(
            "data-truncated" if truncated else "data-trailing",
            f"has {size - data} bytes of data where its tensors need {position - data}: {said}",
            offset=min(position, size),
            found=size - data,
            expected=position - data,
        )
