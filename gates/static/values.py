"""Checks of the numbers themselves: what is no number, and what never varies although its neighbours do.

Small models are read whole. Of a larger one evenly spread slices are, about BUDGET_BYTES in all: a fault that fills
a tensor or a long stretch of it is found, a single number may not be, and the finding says how much was looked at.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gates.static import gguf_values, names
from gates.static.composition import Composition, Part
from gates.static.flaw import MAX_ITEMS, Flaw, flaw, listed
from gates.static.tensors import Placed
from schemas.short import agreeing, many

BUDGET_BYTES = 160 * 1024 * 1024
LEAST_SLICE = 4096
SLICES = 4
SLICE_BYTES = 64 * 1024
"""Of a large tensor many small slices are looked at, so that a stretch is found wherever it begins."""
WHOLE_TENSOR = 64 * 1024
MOVING = 3
"""One of so many matrices has to vary for those to be told that never do: a file of nothing but zeros is a sketch."""

Numbers = npt.NDArray[np.bool_]

# Kind → type of the raw numbers, exponent bits that are all set in what is no number, and mantissa bits.
_FLOATS: dict[str, tuple[str, int, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000, 0x000F_FFFF_FFFF_FFFF),
    "F32": ("<u4", 0x7F80_0000, 0x007F_FFFF),
    "F16": ("<u2", 0x7C00, 0x03FF),
    "BF16": ("<u2", 0x7F80, 0x007F),
    "F8_E5M2": ("u1", 0x7C, 0x03),
}
# Kinds without infinities: mask and value of the patterns that are no number. Source: the OCP 8-bit specification.
_PATTERNS: dict[str, tuple[int, int]] = {
    "F8_E4M3": (0x7F, 0x7F),
    "F8_E4M3FNUZ": (0xFF, 0x80),
    "F8_E5M2FNUZ": (0xFF, 0x80),
    "F8_E8M0": (0xFF, 0xFF),
}
READABLE = frozenset(_FLOATS) | frozenset(_PATTERNS)
_POWERS = "F8_E8M0"
"""Powers of two in a byte each, as which microscaling formats keep their scales."""


@dataclass(slots=True)
class Scan:
    """What was seen of one tensor. `first` is the flat index of the first value that is no number."""

    looked_at: int = 0
    bad: int = 0
    first: int | None = None
    kind: str = ""
    bits: int | None = None
    varies: bool = False

    @property
    def is_constant(self) -> bool:
        """Whether all values looked at have the same bits."""
        return self.looked_at > 1 and not self.varies


def check(c: Composition) -> Iterator[Flaw]:
    """Scan the tensors that an engine loads, of the model, its adapters and its draft."""
    for part in c.parts:
        yield from _scan_part(part)
        yield from gguf_values.check(part, BUDGET_BYTES)


def _scan_part(part: Part) -> Iterator[Flaw]:
    kinds = {name: kind_of(name, part.weights.effective) for name in part.weights.effective}
    tensors = {name: placed for name, placed in part.weights.effective.items() if kinds[name] in READABLE}
    total = sum(placed.size for placed in tensors.values())
    allowed = None if total <= BUDGET_BYTES else max(LEAST_SLICE, BUDGET_BYTES // max(1, len(tensors)))
    by_file: dict[Path, list[Placed]] = {}
    for placed in tensors.values():
        by_file.setdefault(placed.entry.place, []).append(placed)
    scans: dict[str, Scan] = {}
    for place, held in by_file.items():
        with place.open("rb", buffering=0) as file:
            if allowed is not None:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for placed in held:
                name = placed.tensor.name
                scans[name] = scan(file.fileno(), placed, allowed, kinds[name])
    told = 0
    for name in sorted(scans):
        seen = scans[name]
        if not seen.bad:
            continue
        told += 1
        if told <= MAX_ITEMS:
            yield _not_finite(tensors[name], seen)
    yield from _constant(part, scans, tensors)


def kind_of(name: str, tensors: Mapping[str, Placed]) -> str:
    """Return the kind of a tensor's numbers; scales of microscaling formats are stored as plain bytes.

    Source: the files of gpt-oss (`_blocks`, `_scales`), and those of compressed-tensors and ModelOpt (`weight_scale`).
    """
    kind = tensors[name].tensor.dtype
    is_scale = name.endswith((".weight_scale", ".weight_scale_inv")) or (
        name.endswith("_scales") and f"{name.removesuffix('scales')}blocks" in tensors
    )
    return _POWERS if kind == "U8" and is_scale else kind


def scan(descriptor: int, placed: Placed, allowed: int | None, kind: str) -> Scan:
    """Look at a tensor's values.

    Args:
        descriptor: of its file, opened.
        placed: the tensor.
        allowed: bytes to look at, in slices; None for all of them.
        kind: of its numbers, in READABLE.
    """
    seen = Scan()
    code = _FLOATS[kind][0] if kind in _FLOATS else "u1"
    width = np.dtype(code).itemsize
    for start, length in _slices(placed.size, allowed, width):
        raw = os.pread(descriptor, length, placed.offset + start)
        _look(seen, np.frombuffer(raw, dtype=code), start // width, kind)
    return seen


def _slices(size: int, allowed: int | None, width: int) -> Iterator[tuple[int, int]]:
    if allowed is None or size <= max(allowed, WHOLE_TENSOR):
        step = 8 * 1024 * 1024
        for start in range(0, size, step):
            yield start, min(step, size - start)
        return
    count = max(SLICES, allowed // SLICE_BYTES)
    length = max(LEAST_SLICE // SLICES, allowed // count) // width * width
    for place in range(count):
        yield (size - length) * place // (count - 1) // width * width, length


def _look(seen: Scan, raw: npt.NDArray[np.unsignedinteger], start: int, kind: str) -> None:
    if raw.size == 0:
        return
    if kind in _FLOATS:
        _, exponent, mantissa = _FLOATS[kind]
        wrong: Numbers = (raw & exponent) == exponent
    else:
        mantissa = 0
        mask, pattern = _PATTERNS[kind]
        wrong = (raw & mask) == pattern
    count = int(np.count_nonzero(wrong))
    if count and seen.first is None:
        place = int(np.argmax(wrong))
        seen.first = start + place
        is_infinite = kind in _FLOATS and not int(raw[place]) & mantissa
        seen.kind = "inf" if is_infinite else "nan"
    seen.bad += count
    seen.looked_at += raw.size
    if not seen.varies:
        seen.bits = int(raw[0]) if seen.bits is None else seen.bits
        seen.varies = bool((raw != seen.bits).any())


def _not_finite(placed: Placed, seen: Scan) -> Flaw:
    tensor = placed.tensor
    extent = "" if seen.looked_at == tensor.values else f" among the {seen.looked_at} of {tensor.values} looked at"
    return flaw(
        "non-finite-weight",
        f"{tensor.name} ({tensor.dtype}) has {many(seen.bad, 'non-finite value')}{extent}, "
        f"the first ({seen.kind}) at flat index {seen.first}.",
        file=placed.entry.path,
        pointer=tensor.name,
        found={
            "tensor": tensor.name,
            "count": seen.bad,
            "first_index": seen.first,
            "kind": seen.kind,
            "dtype": tensor.dtype,
            "looked_at": seen.looked_at,
        },
        expected={"count": 0},
    )


def _constant(part: Part, scans: dict[str, Scan], tensors: dict[str, Placed]) -> Iterator[Flaw]:
    """Find matrices that never vary, where the same matrix of most other layers does, or many of the others do."""
    alike: dict[str, list[str]] = {}
    for one in part.layered:
        if one.name in scans and len(tensors[one.name].tensor.shape) >= 2:
            alike.setdefault(one.rest, []).append(one.name)
    told: set[str] = set()
    for rest, group in sorted(alike.items()):
        still = [name for name in group if scans[name].is_constant]
        if still and len(still) * 2 < len(group):
            told |= set(still)
            others = f"{rest} of {many(len(group) - len(still), 'other layer', 'does', 'do')}"
            yield _still(still, tensors, others)
    matrices = [name for name in _matrices(part) if name in scans]
    dead = [name for name in matrices if scans[name].is_constant]
    still = [name for name in dead if name not in told]
    moving = len(matrices) - len(dead)
    if still and moving * MOVING >= len(matrices):
        yield _still(still, tensors, many(moving, "other matrix does", "other matrices do"))


def _matrices(part: Part) -> list[str]:
    """Return the linear layers of the language model, its embedding and its head."""
    tensors = part.weights.effective
    modules = names.linears(part.layered, tensors, part.shape.layers)
    found = [parts["weight"].tensor.name for parts in modules.values() if "weight" in parts]
    ends = [names.embedding(tensors), names.head(tensors)]
    return [*found, *(name for name in ends if name is not None and len(tensors[name].tensor.shape) == 2)]


def _still(still: list[str], tensors: Mapping[str, Placed], others: str) -> Flaw:
    return flaw(
        "constant-weight",
        f"{listed(still)} {agreeing(len(still), 'never varies', 'never vary')}, and {others}.",
        file=tensors[still[0]].entry.path,
        pointer=still[0],
        found={"tensors": still[:MAX_ITEMS], "count": len(still)},
        expected={"tensors": [], "count": 0},
    )
