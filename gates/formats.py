"""Reads the headers of weight files without trusting them: safetensors and GGUF.

Each reader is stricter than the engines' own: what two parsers could read differently is refused, and every
count and length is held against the bytes that are there before anything is allocated. No tensor data is read.

Source: https://github.com/huggingface/safetensors#format and
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

import math
import re
import struct
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

from schemas.common import strict_json

MAX_HEADER_BYTES = 32 * 1024 * 1024
"""Largest header of a safetensors file that is read. The format itself allows 100 MB."""
MAX_TENSORS = 200_000
MAX_KEYS = 4096
MAX_STRING_BYTES = 8 * 1024 * 1024
"""Longest text in a GGUF header, such as its chat template."""

GGUF_MAGIC = b"GGUF"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"

# What a file that weights, tokenizers, configurations or documents are made of never starts with.
_EXECUTABLE_MAGIC = (
    (b"PK\x03\x04", "a ZIP archive, as pickled weights are"),
    (b"PK\x05\x06", "a ZIP archive"),
    (b"\x7fELF", "a program (ELF)"),
    (b"MZ", "a program (PE)"),
    (b"\xfe\xed\xfa\xce", "a program (Mach-O)"),
    (b"\xfe\xed\xfa\xcf", "a program (Mach-O)"),
    (b"\xce\xfa\xed\xfe", "a program (Mach-O)"),
    (b"\xcf\xfa\xed\xfe", "a program (Mach-O)"),
    (b"\xca\xfe\xba\xbe", "a program (Mach-O or Java)"),
    (b"#!", "a script"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (LFS_POINTER, "a Git-LFS pointer in place of the file; fetch it with `git lfs pull`"),
)


class FormatError(ValueError):
    """The file is not what its name says, or two readers could disagree about it."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: its type as the format spells it, its shape, and its bytes counted from the start of the data."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def values(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Array:
    """A list in a GGUF header, whose items were checked and skipped."""

    kind: str
    count: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a weight file says about itself. `metadata` holds texts, numbers and booleans, in GGUF also arrays."""

    format: str
    metadata: dict[str, str | int | float | bool | Array]
    tensors: tuple[Tensor, ...]

    @property
    def parameters(self) -> int:
        """How many numbers its tensors hold."""
        return sum(tensor.values for tensor in self.tensors)

    def kinds(self) -> dict[str, int]:
        """Return kind of tensor → bytes stored in it, most bytes first."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.end - tensor.start
        return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


def foreign_magic(head: bytes) -> str | None:
    """Say what a file that should be text really is, by its first 512 bytes; None when nothing speaks against it.

    Not for safetensors: their first bytes are a length and may look like anything.
    """
    for magic, said in _EXECUTABLE_MAGIC:
        if head.startswith(magic):
            return said
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return "a Python pickle, which runs code when it is loaded"
    if head[257:262] == b"ustar":
        return "a tar archive"
    return None


# ---------------------------------------------------------------------------------------------- safetensors

_SAFETENSORS_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_TENSOR_FIELDS = {"dtype", "shape", "data_offsets"}


def read_safetensors(file: BinaryIO, size: int, *, max_header_bytes: int = MAX_HEADER_BYTES) -> Header:
    """Read the header of a safetensors file.

    Args:
        file: opened for reading in binary.
        size: of the file, in bytes.
        max_header_bytes: longest header accepted.

    Raises:
        FormatError: not that format, truncated, with bytes that no tensor covers, or readable in two ways.
    """
    file.seek(0)
    if size < 8:
        raise FormatError("is shorter than the 8 bytes that tell the header's length")
    (length,) = struct.unpack("<Q", _exactly(file, 8))
    if length > max_header_bytes:
        raise FormatError(f"declares a header of {length} bytes; at most {max_header_bytes} are read")
    if 8 + length > size:
        raise FormatError(f"declares a header of {length} bytes, but only {size - 8} follow: it is truncated")
    raw = _exactly(file, length)
    if not raw.startswith(b"{"):
        raise FormatError("has a header that does not start with '{'")
    if raw.rstrip(b" ")[-1:] != b"}":
        raise FormatError("has a header padded with something else than spaces")
    try:
        header = strict_json(raw, limit=max_header_bytes, depth=3)
    except ValueError as error:
        raise FormatError(f"has a header that {error}") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError("has __metadata__ that does not map texts to texts")
    if len(header) > MAX_TENSORS:
        raise FormatError(f"holds {len(header)} tensors; at most {MAX_TENSORS} are read")
    tensors = sorted((_safetensor(*item) for item in header.items()), key=lambda t: (t.start, t.end, t.name))
    _check_cover(tensors, size - 8 - length)
    return Header("safetensors", metadata, tuple(tensors))


def _safetensor(name: str, entry: object) -> Tensor:
    _check_name(name)
    if not isinstance(entry, dict) or set(entry) != _TENSOR_FIELDS:
        raise FormatError(f"describes tensor {name} by other fields than dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = _SAFETENSORS_BITS.get(kind) if isinstance(kind, str) else None
    if bits is None:
        raise FormatError(f"gives tensor {name} the unknown type {str(kind)[:40]}")
    if not _are_counts(shape) or len(shape) > 8:
        raise FormatError(f"gives tensor {name} a shape that is not at most 8 whole numbers")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise FormatError(f"gives tensor {name} offsets that are not two whole numbers")
    start, end = offsets
    if math.prod(shape) * bits != (end - start) * 8:
        raise FormatError(f"gives tensor {name} {end - start} bytes, which its type and shape do not fill")
    if start % max(1, bits // 8):
        raise FormatError(f"places tensor {name} at byte {start}, which is not aligned to its type")
    return Tensor(name, kind, tuple(shape), start, end)


def _are_counts(value: object) -> bool:
    # A boolean is an int to Python, and a shape of 2**63 would overflow in an engine.
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**48 for item in value)


def _check_name(name: str) -> None:
    plain = name.isprintable() and unicodedata.is_normalized("NFC", name)
    if not 1 <= len(name) <= 256 or not plain:
        raise FormatError(f"names a tensor {name[:60]!a}, which is empty, too long or not plain text")


def _check_cover(tensors: Iterable[Tensor], data_bytes: int) -> None:
    position = 0
    for tensor in tensors:
        if tensor.start != position:
            said = "overlaps the one before" if tensor.start < position else "leaves bytes that no tensor covers"
            raise FormatError(f"places tensor {tensor.name} at byte {tensor.start}, where it {said}")
        position = tensor.end
    if position != data_bytes:
        raise FormatError(f"has {data_bytes} bytes of data where its tensors need {position}")


# ------------------------------------------------------------------------------------------------------ GGUF

_SCALARS = {
    0: ("u8", "<B"),
    1: ("i8", "<b"),
    2: ("u16", "<H"),
    3: ("i16", "<h"),
    4: ("u32", "<I"),
    5: ("i32", "<i"),
    6: ("f32", "<f"),
    7: ("bool", "<B"),
    10: ("u64", "<Q"),
    11: ("i64", "<q"),
    12: ("f64", "<d"),
}
_STRING, _ARRAY = 8, 9

# Type number → name, values in a block, bytes of a block. Source: ggml.h and ggml-quants.h of llama.cpp.
_GGML_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
# `general.file_type` → what people call the quantization and its bits a weight. Source: llama.h, enum llama_ftype.
FILE_TYPES = {
    0: ("none", 32),
    1: ("none", 16),
    2: ("q4_0", 4),
    3: ("q4_1", 4),
    7: ("q8_0", 8),
    8: ("q5_0", 5),
    9: ("q5_1", 5),
    10: ("q2_k", 2),
    11: ("q3_k_s", 3),
    12: ("q3_k_m", 3),
    13: ("q3_k_l", 3),
    14: ("q4_k_s", 4),
    15: ("q4_k_m", 4),
    16: ("q5_k_s", 5),
    17: ("q5_k_m", 5),
    18: ("q6_k", 6),
    19: ("iq2_xxs", 2),
    20: ("iq2_xs", 2),
    21: ("q2_k_s", 2),
    22: ("iq3_xs", 3),
    23: ("iq3_xxs", 3),
    24: ("iq1_s", 1),
    25: ("iq4_nl", 4),
    26: ("iq3_s", 3),
    27: ("iq3_m", 3),
    28: ("iq2_s", 2),
    29: ("iq2_m", 2),
    30: ("iq4_xs", 4),
    31: ("iq1_m", 1),
    32: ("none", 16),
    36: ("tq1_0", 1),
    37: ("tq2_0", 2),
    38: ("mxfp4", 4),
    39: ("nvfp4", 4),
    40: ("q1_0", 1),
}
_KEY = re.compile(r"[A-Za-z0-9_.-]{1,256}")


class _Cursor:
    """Walks through a file whose every length is held against the bytes that are left."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size, self.position = file, size, 0
        file.seek(0)

    def left(self) -> int:
        return self.size - self.position

    def take(self, count: int) -> bytes:
        if count > self.left():
            raise FormatError(f"ends after {self.size} bytes in the middle of its header: it is truncated")
        self.position += count
        return _exactly(self.file, count)

    def skip(self, count: int) -> None:
        if count > self.left():
            raise FormatError(f"ends after {self.size} bytes in the middle of its header: it is truncated")
        self.position += count
        self.file.seek(self.position)

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text(self, limit: int = MAX_STRING_BYTES) -> str:
        length = self.number("<Q")
        if length > limit:
            raise FormatError(f"has a text of {length} bytes in its header; at most {limit} are read")
        raw = self.take(length)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise FormatError("has a text in its header that is not UTF-8") from None


def read_gguf(file: BinaryIO, size: int) -> Header:
    """Read the header of a GGUF file, version 2 or 3, little endian.

    Arrays, such as the vocabulary, are checked and skipped. Tensors must lie in the file one after another.

    Args:
        file: opened for reading in binary.
        size: of the file, in bytes.

    Raises:
        FormatError: not that format, truncated, with bytes that no tensor covers, or readable in two ways.
    """
    cursor = _Cursor(file, size)
    if cursor.take(min(4, size)) != GGUF_MAGIC:
        raise FormatError("does not start with 'GGUF'")
    version, tensor_count, key_count = cursor.number("<I"), cursor.number("<Q"), cursor.number("<Q")
    if version not in (2, 3):
        raise FormatError(f"has version {version & 0xFFFFFFFF}; versions 2 and 3, little endian, are read")
    if tensor_count > MAX_TENSORS or key_count > MAX_KEYS:
        raise FormatError(
            f"declares {tensor_count} tensors and {key_count} keys; at most {MAX_TENSORS} and {MAX_KEYS} are read"
        )
    metadata: dict[str, str | int | float | bool | Array] = {}
    for _ in range(key_count):
        key = cursor.text(limit=65_535)
        if not _KEY.fullmatch(key):
            raise FormatError(f"has the key {key[:60]!a}, which is not plain text")
        if key in metadata:
            raise FormatError(f"has the key {key} twice")
        metadata[key] = _value(cursor)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 65_536 or alignment & (alignment - 1):
        raise FormatError(f"declares the alignment {alignment}, which is no power of two from 8 to 65536")
    tensors = [_ggml_tensor(cursor) for _ in range(tensor_count)]
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise FormatError("names two tensors alike")
    _check_layout(tensors, alignment, size - _padded(cursor.position, alignment))
    return Header("gguf", metadata, tuple(tensors))


def _value(cursor: _Cursor) -> str | int | float | bool | Array:
    kind = cursor.number("<I")
    if kind == _STRING:
        return cursor.text()
    if kind == _ARRAY:
        return _array(cursor)
    if kind not in _SCALARS:
        raise FormatError(f"has a value of the unknown type {kind} in its header")
    name, code = _SCALARS[kind]
    value = cursor.number(code)
    if name == "bool" and value not in (0, 1):
        raise FormatError(f"has the truth value {value} in its header")
    return bool(value) if name == "bool" else value


def _array(cursor: _Cursor) -> Array:
    kind, count = cursor.number("<I"), cursor.number("<Q")
    least = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind][1]) if kind in _SCALARS else None
    if least is None:
        raise FormatError(f"has an array of the type {kind} in its header, which is unknown or nested")
    if count * least > cursor.left():
        raise FormatError(f"declares an array of {count} items, more than its bytes can hold: it is truncated")
    if kind != _STRING:
        cursor.skip(count * least)
        return Array(_SCALARS[kind][0], count)
    for _ in range(count):
        length = cursor.number("<Q")
        if length > MAX_STRING_BYTES:
            raise FormatError(f"has a text of {length} bytes in its header; at most {MAX_STRING_BYTES} are read")
        cursor.take(length)  # read, not skipped: seeking would throw the buffer away for each of 200,000 tokens
    return Array("string", count)


def _ggml_tensor(cursor: _Cursor) -> Tensor:
    name = cursor.text(limit=256)
    _check_name(name)
    dimensions = cursor.number("<I")
    if not 1 <= dimensions <= 4:
        raise FormatError(f"gives tensor {name} {dimensions} dimensions; 1 to 4 are read")
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))
    kind, start = cursor.number("<I"), cursor.number("<Q")
    if kind not in _GGML_TYPES:
        raise FormatError(f"gives tensor {name} the unknown type {kind}")
    label, block, block_bytes = _GGML_TYPES[kind]
    values = math.prod(shape)
    if not 0 < values < 2**48 or shape[0] % block:
        raise FormatError(f"gives tensor {name} the shape {shape}, which is empty, too large or splits a block")
    return Tensor(name, label, shape, start, start + values // block * block_bytes)


def _check_layout(tensors: list[Tensor], alignment: int, data_bytes: int) -> None:
    position = 0
    for tensor in tensors:  # in the order in which they are listed, as llama.cpp wants them
        if tensor.start != position:
            raise FormatError(f"places tensor {tensor.name} at byte {tensor.start} of its data, not at {position}")
        position = _padded(tensor.end, alignment)
    end = max((tensor.end for tensor in tensors), default=0)
    if not end <= data_bytes <= position:
        said = "it is truncated" if data_bytes < end else "something is appended"
        raise FormatError(f"has {max(0, data_bytes)} bytes of data where its tensors need {end}: {said}")


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _exactly(file: BinaryIO, count: int) -> bytes:
    raw = file.read(count)
    if len(raw) != count:
        raise FormatError("became shorter while it was read")
    return raw
