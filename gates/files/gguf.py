"""Reads the header of a GGUF file, version 2 or 3: its keys, and where its tensors lie.

Arrays, such as the vocabulary, are checked and skipped unless the caller asks for them. No tensor data is read.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and gguf.cpp of llama.cpp where it is stricter.
"""

import math
import struct
from collections.abc import Collection
from typing import BinaryIO, Final, NoReturn

from gates.files import magic
from gates.files.gguf_metadata import Cursor, read_metadata
from gates.files.gguf_types import BLOCKS, REMOVED
from gates.files.header import Header, Tensor, Value, check_name
from gates.files.refusal import FileRefused, pointer
from schemas.short import many

MAGIC: Final = b"GGUF"
MAX_TENSORS: Final = 65_536
MAX_KEYS: Final = 4096
MAX_ALIGNMENT: Final = 65_536
MAX_NAME_BYTES: Final = 63
"""Longest name of a tensor. Source: GGML_MAX_NAME of ggml.h, which counts the zero at its end."""

_EXPECTED = "a GGUF file"


def read_gguf(file: BinaryIO, size: int, name: str, *, keep: Collection[str] = ()) -> Header:
    """Read the header of a GGUF file, little endian. Tensors must lie in the file one after another.

    Args:
        file: opened for reading in binary.
        size: of the file, in bytes.
        name: of the file, for its tensors.
        keep: keys whose arrays are wanted whole.

    Raises:
        FileRefused: not that format, truncated, with bytes that no tensor covers, or readable in two ways.
    """
    cursor = Cursor(file, size)
    tensor_count, key_count = _preamble(cursor)
    metadata = read_metadata(cursor, key_count, keep)
    alignment = _alignment(metadata)
    _check_split(metadata, tensor_count)
    listed = [_tensor(cursor) for _ in range(tensor_count)]
    data = _padded(cursor.position, alignment)
    found = [
        Tensor(tensor, dtype, shape, name, data + start, length) for tensor, dtype, shape, start, length, _ in listed
    ]
    _check_names(listed)
    _check_layout(listed, alignment, data, size)
    return Header("gguf", metadata, tuple(found), data)


def _preamble(cursor: Cursor) -> tuple[int, int]:
    """Check magic, version and counts; return how many tensors and keys follow."""
    head = cursor.file.read(min(cursor.size, magic.HEAD_BYTES))
    if not head.startswith(MAGIC):
        if not head:
            raise FileRefused("empty-file", "is empty", offset=0, found=0, expected=_EXPECTED)
        magic.refuse_disguise(head, cursor.size, _EXPECTED)
        if MAGIC.startswith(head):
            said = "ends in the middle of its first word: it is truncated"
            raise FileRefused("header-truncated", said, offset=cursor.size, found=cursor.size, expected="24 bytes")
        if head.startswith(MAGIC[::-1]):
            _refuse_big_endian(0)
        raise FileRefused("magic", "does not start with 'GGUF'", offset=0, found=head[:4], expected="GGUF")
    cursor.skip(4)
    version = cursor.number("I")
    if version not in (2, 3):
        if version and version & 0xFFFF == 0:
            _refuse_big_endian(4)
        said = f"has version {version}; versions 2 and 3 are read"
        raise FileRefused("version", said, offset=4, found=version, expected="2 or 3", advice="convert it again")
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    for count, limit, what, offset in ((tensors, MAX_TENSORS, "tensors", 8), (keys, MAX_KEYS, "keys", 16)):
        if count > limit:
            said = f"declares {count} {what}; at most {limit} are read"
            raise FileRefused(f"too-many-{what}", said, offset=offset, found=count, expected=f"at most {limit}")
    return tensors, keys


def _refuse_big_endian(offset: int) -> NoReturn:
    advice = "convert it for little-endian machines"
    said = "is written for big-endian machines"
    raise FileRefused("big-endian", said, offset=offset, expected="little endian", advice=advice)


def _alignment(metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", 32)
    assert type(alignment) is int  # noqa: S101 - `_wanted` has refused another type
    if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        said = f"declares the alignment {alignment}, which is no power of two from 8 to {MAX_ALIGNMENT}"
        expected = f"a power of two from 8 to {MAX_ALIGNMENT}"
        raise FileRefused("alignment", said, pointer="/general.alignment", found=alignment, expected=expected)
    return alignment


def _check_split(metadata: dict[str, Value], tensors: int) -> None:
    """Check that a shard says which of how many it is, and holds no more tensors than all have together."""
    number, count, total = (metadata.get(f"split.{key}") for key in ("no", "count", "tensors.count"))
    if number is None and count is None and total is None:
        return
    if type(number) is not int or type(count) is not int or not number < count:
        said = f"says that it is shard {number} of {count}"
        raise FileRefused(
            "split", said, pointer="/split.no", found=number, expected="split.no from 0, below split.count"
        )
    if count > 1 and type(total) is not int:
        said = "is a shard that does not say how many tensors all shards have"
        raise FileRefused("split", said, pointer="/split.tensors.count", found=total, expected="a whole number")
    if type(total) is int and (tensors > total or (count == 1 and tensors != total)):
        said = f"has {many(tensors, 'tensor')} where all shards together have {total}"
        raise FileRefused("split", said, pointer="/split.tensors.count", found=tensors, expected=total)


# --------------------------------------------------------------------------------------------------------- tensors

_Listed = tuple[str, str, tuple[int, ...], int, int, int]
"""Name, type, shape, offset in the data, size in bytes, and where in the file it is listed."""


def _tensor(cursor: Cursor) -> _Listed:
    begun = cursor.position
    name = cursor.text(1024)
    check_name(name, begun + 8)
    if len(name.encode()) > MAX_NAME_BYTES:
        said = f"names a tensor in {len(name.encode())} bytes; llama.cpp reads at most {MAX_NAME_BYTES}"
        raise FileRefused("tensor-name", said, offset=begun + 8, pointer=pointer(name), found=name)
    where = pointer(name)
    at = cursor.position
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= 4:
        said = f"gives tensor {name} {many(dimensions, 'dimension')}; 1 to 4 are read"
        raise FileRefused("shape", said, offset=at, pointer=where, found=dimensions, expected="1 to 4")
    stored = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions))
    kind_at = cursor.position
    kind, start = struct.unpack("<IQ", cursor.take(12))
    if kind not in BLOCKS:
        removed = f", {REMOVED[kind]}, which engines do not load any more" if kind in REMOVED else ""
        said = f"gives tensor {name} the unknown type {kind}{removed}"
        raise FileRefused("dtype-unknown", said, offset=kind_at, pointer=where, found=kind, expected=sorted(BLOCKS))
    label, block, block_bytes = BLOCKS[kind]
    values = math.prod(stored)
    if not 0 < values < 2**48:
        said = f"gives tensor {name} the shape {list(stored)}, which is empty or overflows"
        raise FileRefused("shape", said, offset=at + 4, pointer=where, found=list(stored), expected="1 to 2^48 values")
    if stored[0] % block:
        said = f"gives tensor {name} rows of {stored[0]} values, which split a block of {label}"
        expected = f"a multiple of {block}"
        raise FileRefused("shape", said, offset=at + 4, pointer=where, found=stored[0], expected=expected)
    return name, label, stored[::-1], start, values // block * block_bytes, kind_at + 4


def _check_names(listed: list[_Listed]) -> None:
    seen: set[str] = set()
    for name, _, _, _, _, offset in listed:
        if name in seen:
            raise FileRefused(
                "duplicate-key", f"names two tensors {name}", offset=offset, pointer=pointer(name), found=name
            )
        seen.add(name)


def _check_layout(listed: list[_Listed], alignment: int, data: int, size: int) -> None:
    """Check that tensors lie one after another in the order in which they are listed, as llama.cpp wants them."""
    position = end = 0
    for name, _, _, start, length, offset in listed:
        if start != position:
            code, said = _misplaced(start, position, alignment, size - data)
            said = f"places tensor {name} at byte {start} of the data, not at {position}: {said}"
            raise FileRefused(code, said, offset=offset, pointer=pointer(name), found=start, expected=position)
        end = start + length
        position = _padded(end, alignment)
    held = max(0, size - data)
    if held < end or held > position:
        truncated = held < end
        said = "it is truncated" if truncated else "something is appended"
        raise FileRefused(
            "data-truncated" if truncated else "data-trailing",
            f"has {held} bytes of data where its tensors need {end}: {said}",
            offset=size if truncated else data + position,
            found=held,
            expected=end,
        )


def _misplaced(start: int, position: int, alignment: int, data_bytes: int) -> tuple[str, str]:
    if start > data_bytes:
        return "data-truncated", "that is beyond the end of the file"
    if start % alignment:
        return "tensor-alignment", f"it is not aligned to {alignment} bytes"
    if start < position:
        return "tensor-overlap", "it overlaps one before"
    return "tensor-hole", "no tensor covers the bytes before it"


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
