"""Checks of the numbers in GGUF files: plain ones, and the scales of quantized blocks, of which one spoils its block.

Source: the block layouts of ggml-common.h, and what `ggml_validate_row_data` of ggml-quants.c looks at.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from gates.files.gguf_types import BLOCKS
from gates.files.header import Tensor
from gates.static.composition import Part
from gates.static.flaw import MAX_ITEMS, Flaw, flaw
from gates.static.listing import Entry
from schemas.short import many

_HALF, _BRAIN, _SINGLE, _DOUBLE = ("<u2", 0x7C00), ("<u2", 0x7F80), ("<u4", 0x7F80_0000), ("<u8", 0x7FF0 << 48)
_POWER = ("u1", 0xFF)
"""A power of two in one byte, of which the highest stands for no number."""

FIELDS: Final[dict[str, tuple[tuple[int, tuple[str, int]], ...]]] = {
    "F64": ((0, _DOUBLE),),
    "F32": ((0, _SINGLE),),
    "F16": ((0, _HALF),),
    "BF16": ((0, _BRAIN),),
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), ((0, _HALF),)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), ((0, _HALF),)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), ((0, _HALF), (2, _HALF))),
    "Q2_K": ((80, _HALF), (82, _HALF)),
    "Q3_K": ((108, _HALF),),
    "Q6_K": ((208, _HALF),),
    "Q8_K": ((0, _SINGLE),),
    "TQ1_0": ((52, _HALF),),
    "TQ2_0": ((64, _HALF),),
    "MXFP4": ((0, _POWER),),
}
"""Type → where in a block a number stands, and its form: an unsigned type, and the bits that are all set in none."""
_SIZES: Final = {name: (values, size) for name, values, size in BLOCKS.values()}
_STEP = 8 * 1024 * 1024
_SLICES = 4


@dataclass(slots=True)
class _Seen:
    bad: int = 0
    first: int | None = None
    blocks: int = 0


def check(part: Part, budget: int) -> Iterator[Flaw]:
    """Find tensors with numbers that are none; of a large model about `budget` bytes are read, in slices."""
    held = [
        (part.entries[name], tensor)
        for name, header in part.gguf_files.items()
        for tensor in header.tensors
        if tensor.dtype in FIELDS
    ]
    total = sum(tensor.size for _, tensor in held)
    allowed = None if total <= budget else max(_SLICES * 4096, budget // max(1, len(held)))
    told = 0
    for entry, tensor in held:
        seen = _look(entry, tensor, allowed)
        if seen.first is not None and told < MAX_ITEMS:
            told += 1
            yield _not_finite(entry, tensor, seen)


def _look(entry: Entry, tensor: Tensor, allowed: int | None) -> _Seen:
    seen, (_, width) = _Seen(), _SIZES[tensor.dtype]
    with entry.place.open("rb", buffering=0) as file:
        for start, length in _slices(tensor.size, allowed, width):
            raw = np.frombuffer(os.pread(file.fileno(), length, tensor.offset + start), dtype="u1")
            blocks = raw[: len(raw) // width * width].reshape(-1, width)
            wrong = _wrong(blocks, tensor.dtype)
            count = int(np.count_nonzero(wrong))
            if count and seen.first is None:
                seen.first = start // width + int(np.argmax(wrong))
            seen.bad += count
            seen.blocks += len(blocks)
    return seen


def _wrong(blocks: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.bool_]:
    """Say of each block whether one of its numbers is none."""
    wrong = np.zeros(len(blocks), dtype=bool)
    for place, (code, bits) in FIELDS[dtype]:
        kind = np.dtype(code)
        field = np.ascontiguousarray(blocks[:, place : place + kind.itemsize]).view(kind).reshape(-1)
        wrong |= (field & kind.type(bits)) == bits
    return wrong


def _slices(size: int, allowed: int | None, width: int) -> Iterator[tuple[int, int]]:
    if allowed is None or size <= allowed:
        step = _STEP // width * width
        for start in range(0, size, step):
            yield start, min(step, size - start)
        return
    length = max(width, allowed // _SLICES // width * width)
    for place in range(_SLICES):
        yield (size - length) * place // (_SLICES - 1) // width * width, length


def _not_finite(entry: Entry, tensor: Tensor, seen: _Seen) -> Flaw:
    values, width = _SIZES[tensor.dtype]
    first = (seen.first or 0) * values
    odd = many(seen.bad, "value", "that is no number", "that are no numbers")
    if values > 1:
        odd = f"{many(seen.bad, 'block')} whose scale is no number"
    whole = seen.blocks * width >= tensor.size
    extent = "" if whole else f" among the {seen.blocks} of {tensor.size // width} looked at"
    return flaw(
        "non-finite-weight",
        f"{tensor.name} ({tensor.dtype}) has {odd}{extent}, the first at flat index {first}.",
        file=entry.path,
        pointer=tensor.name,
        found={
            "tensor": tensor.name,
            "count": seen.bad,
            "first_index": first,
            "dtype": tensor.dtype,
            "looked_at": seen.blocks * values,
        },
        expected={"count": 0},
    )
