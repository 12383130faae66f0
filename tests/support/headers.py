"""Writes weight files byte by byte, sound and unsound, without the libraries that would refuse to."""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

Entry = Mapping[str, object]


def safetensors(header: object, data: bytes = b"", *, pad: bytes | None = None) -> bytes:
    """Return a file of a header, given as JSON or as its bytes, and data; `pad` None pads to 8 with spaces."""
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8) if pad is None else pad
    return struct.pack("<Q", len(raw)) + raw + data


def tensor(start: object, end: object, *, dtype: object = "F32", shape: object = None) -> dict[str, object]:
    """Return one entry of a header; the shape is that of as many four-byte numbers."""
    if shape is None:
        assert isinstance(start, int)
        assert isinstance(end, int)
        shape = [(end - start) // 4]
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def sparse_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, Iterable[int], int]], metadata: Mapping[str, str] | None = None
) -> Path:
    """Write a file of name → (type, shape, bytes), whose data is a hole of that size."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    raw = safetensors(header)
    with path.open("wb") as file:
        file.write(raw)
        file.truncate(len(raw) + position)
    return path


def gguf(
    *pairs: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, data: bytes = b"", alignment: int = 32
) -> bytes:
    """Return a GGUF file of keys and tensors that are already written."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


def text(value: bytes) -> bytes:
    """Return a text as GGUF writes it."""
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    """Return a key with a value that is already written."""
    return text(key) + struct.pack("<I", kind) + value


def texts(key: bytes, items: Iterable[bytes]) -> bytes:
    """Return a key with an array of texts."""
    listed = [text(item) for item in items]
    return pair(key, 9, struct.pack("<IQ", 8, len(listed)) + b"".join(listed))


def numbers(key: bytes, kind: int, count: int, raw: bytes) -> bytes:
    """Return a key with an array of numbers that are already written."""
    return pair(key, 9, struct.pack("<IQ", kind, count) + raw)


def info(name: bytes, shape: tuple[int, ...], start: int = 0, kind: int = 0) -> bytes:
    """Return the entry of one tensor, its shape as the file has it: innermost dimension first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)
