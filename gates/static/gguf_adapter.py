"""Checks of adapters in GGUF: llama.cpp loads them, they fit the base, and they change something.

llama.cpp ends the boot on the first pair that does not fit; an alpha that is not there it takes in silence for
"unscaled", which is another strength than the adapter was trained with.

Source: llama-adapter.cpp of llama.cpp; refusals seen with xllamacpp 2026.10.11549.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gates.files.gguf_adapter import ALPHA, EMBEDDING, INVOCATION, KIND, TYPE, Packed, packed, rank_of
from gates.files.header import Array, Header, Tensor
from gates.static.composition import Composition, Part
from gates.static.flaw import MAX_ITEMS, Flaw, flaw, listed
from gates.static.tensors import Placed, is_zero
from schemas.result import Severity
from schemas.short import agreeing, many

CONVERTER: Final = "convert_lora_to_gguf.py"
"""llama.cpp's own program that writes such a file."""
_UNREADABLE: Final = frozenset({"I8", "I16", "I32", "I64", "F64"})
_NORM: Final = "_norm.weight"


def is_in_force(c: Composition, part: Part) -> bool:
    """Tell whether of a part its GGUF files count: those of PEFT win where the engine reads them and they are there."""
    has_packed = any(name.endswith(".gguf") for name in part.entries)
    return has_packed and (c.engine == "llamacpp" or not part.has("adapter_config.json"))


def check(c: Composition, name: str, part: Part) -> Iterator[Flaw]:
    """Check one adapter whose files are in GGUF.

    Args:
        c: the composition.
        name: of the adapter.
        part: its files.
    """
    if not part.gguf_files:
        return  # what cannot be read is told by itself
    file, header = next(iter(part.gguf_files.items()))
    path = part.path(file)
    if c.engine != "llamacpp":
        engine = c.engine or "An engine that serves safetensors"
        yield flaw(
            "format-unsupported",
            f"{engine} reads adapters in safetensors, and {name} is in GGUF.",
            file=path,
            found="gguf",
            expected="safetensors",
            advice="Take the adapter in the form that PEFT saves: adapter_config.json and adapter_model.safetensors.",
        )
        return
    if len(part.gguf_files) > 1:
        names = sorted(part.gguf_files)
        message = f"The adapter {name} has {len(names)} GGUF files, and llama.cpp is given one: {listed(names)}."
        yield flaw("adapter-incomplete", message, file=path, found=names, expected=1, advice="Leave the others out.")
        return
    wrong = list(_kind(c, header, path))
    yield from wrong
    held = packed(header)
    yield from _strength(part, header, held, path)
    if not wrong:
        yield from _tensors(header, held, path)
        yield from _fit(c, held, path)


def _kind(c: Composition, header: Header, path: str) -> Iterator[Flaw]:
    for key, wanted in ((KIND, "adapter"), (TYPE, "lora")):
        told = header.metadata.get(key)
        if told != wanted:
            said = "says no" if told is None else f"says {told} for"
            yield flaw(
                "lora-kind-unsupported",
                f"{path} {said} {key}, and llama.cpp loads an adapter only of {wanted}.",
                file=path,
                pointer=key,
                found=_plain(told),
                expected=wanted,
                advice=f"Make it with {CONVERTER}.",
            )
            return
    own = header.metadata.get("general.architecture")
    base = None if c.model.gguf is None else c.model.gguf.metadata.get("general.architecture")
    if c.model.gguf is not None and own != base:
        yield flaw(
            "lora-no-match",
            f"{path} is for the architecture {_plain(own)}, and the base is {_plain(base)}.",
            file=path,
            pointer="general.architecture",
            found=_plain(own),
            expected=_plain(base),
            advice="Use the base that the adapter was trained on.",
        )


def _plain(value: object) -> Any:
    return value if isinstance(value, str | int | float) else None


def _strength(part: Part, header: Header, held: Packed, path: str) -> Iterator[Flaw]:
    alpha = header.metadata.get(ALPHA)
    if not isinstance(alpha, float) or not (math.isfinite(alpha) and alpha > 0):
        rank = held.rank or 1
        told = alpha if isinstance(alpha, float) and math.isfinite(alpha) else None if alpha is None else str(alpha)
        said = f"says no {ALPHA}" if alpha is None else f"says {ALPHA} {told}"
        yield flaw(
            "adapter-incomplete",
            f"{path} {said}; llama.cpp scales by alpha / rank, and without an alpha not at all (rank {rank}).",
            file=path,
            pointer=ALPHA,
            found=told,
            expected="a number above 0, of the type float32",
            advice=f"Convert it again with {CONVERTER}, from an adapter_config.json that says lora_alpha.",
        )
    if (tokens := header.metadata.get(INVOCATION)) is not None:
        is_read = isinstance(tokens, Array) and tokens.kind == "u32"
        says = "no gate asks with them" if is_read else "llama.cpp reads them as a list of u32 alone"
        yield flaw(
            "lora-kind-unsupported",
            f"{path} is in force only after tokens of its own; {says}.",
            severity=Severity.WARN if is_read else Severity.BLOCK,
            file=path,
            pointer=INVOCATION,
            found={"tokens": tokens.count if isinstance(tokens, Array) else _plain(tokens)},
            expected={"tokens": 0},
        )
    entry = part.entries[next(iter(part.gguf_files))]
    pairs = [[Placed(sides[side], entry) for side in ("b", "a") if side in sides] for sides in held.pairs.values()]
    if pairs and all(any(is_zero(one) for one in pair) for pair in pairs):
        yield flaw(
            "adapter-no-effect",
            f"The product of {agreeing(len(pairs), 'its one pair', f'each of {len(pairs)} pairs')} is zero: the "
            "adapter was not trained.",
            file=path,
            found={"zero": len(pairs), "of": len(pairs)},
            expected={"zero": 0},
        )


def _tensors(header: Header, held: Packed, path: str) -> Iterator[Flaw]:
    """Find tensors that are no pair, pairs that are not whole, and numbers that no engine multiplies with."""
    odd = sorted(one.name for one in held.others if not one.name.endswith(_NORM))
    norms = sorted(one.name for one in held.others if one.name.endswith(_NORM))
    for names, severity, does in ((odd, Severity.BLOCK, "refuses the adapter"), (norms, Severity.WARN, "ignores that")):
        if names:
            yield flaw(
                "lora-kind-unsupported",
                f"{many(len(names), 'tensor', 'is no matrix', 'are no matrices')} of an adapter by "
                f"{agreeing(len(names), 'its name', 'their names')}, and llama.cpp {does}: {listed(names)}.",
                severity=severity,
                file=path,
                pointer=names[0],
                found={"tensors": names[:MAX_ITEMS], "count": len(names)},
                expected="names that end in .lora_a and .lora_b",
            )
    if not held.pairs and not odd:
        yield flaw(
            "lora-no-match",
            f"{path} has no pair of matrices.",
            file=path,
            found={"matched": 0, "of": 0},
            expected="names that end in .lora_a and .lora_b",
        )
    alone = sorted(name for name, sides in held.pairs.items() if len(sides) == 1)
    if alone:
        yield flaw(
            "adapter-incomplete",
            f"{len(alone)} of {many(len(held.pairs), 'tensor')} {agreeing(len(alone), 'has', 'have')} one of "
            f"two matrices: {listed(alone)}.",
            file=path,
            found={"count": len(alone), "of": len(held.pairs), "modules": alone[:MAX_ITEMS]},
            expected={"count": 0, "matrices": ["a", "b"]},
        )
    strange = sorted(one.name for one in header.tensors if one.dtype in _UNREADABLE)
    if strange:
        yield flaw(
            "lora-kind-unsupported",
            f"{agreeing(len(strange), '1 matrix is', f'{len(strange)} matrices are')} of a type that llama.cpp does "
            f"not multiply with: {listed(strange)}.",
            file=path,
            pointer=strange[0],
            found={"tensors": strange[:MAX_ITEMS], "count": len(strange)},
            expected={"count": 0},
        )


def _fit(c: Composition, held: Packed, path: str) -> Iterator[Flaw]:
    """Hold pairs against each other and against the base's tensors; of those that do not fit the first is told."""
    base = {tensor.name: tensor for one in c.model.gguf_files.values() for tensor in one.tensors}
    missing = sorted(name for name in held.pairs if name not in base)
    if base and missing:
        matched = len(held.pairs) - len(missing)
        yield flaw(
            "lora-no-match",
            f"{matched} of {many(len(held.pairs), 'tensor')} that the adapter changes {agreeing(matched, 'is', 'are')} "
            f"in the base; not {listed(missing)}.",
            file=path,
            pointer=missing[0],
            found={"matched": matched, "of": len(held.pairs), "missing": missing[:MAX_ITEMS]},
            expected={"matched": len(held.pairs)},
            advice="Use the base that the adapter was trained on: llama.cpp loads it whole or not at all.",
        )
    for name, sides in sorted(held.pairs.items()):
        if len(sides) == 2 and (found := next(_misfit(name, sides, base.get(name)), None)) is not None:
            tensor, expected = found
            yield flaw(
                "lora-shape",
                f"{tensor.name} has the shape {list(tensor.shape)}, where {expected} is needed.",
                file=path,
                pointer=tensor.name,
                found=list(tensor.shape),
                expected=expected,
            )
            return


def _misfit(name: str, sides: Mapping[str, Tensor], target: Tensor | None) -> Iterator[tuple[Tensor, str]]:
    """Yield the matrix that does not fit, and what its shape should be. Shapes have the outermost dimension first."""
    a, b = sides["a"], sides["b"]
    turned = name == EMBEDDING
    if len(a.shape) < 2 or len(b.shape) < 2:
        yield (a if len(a.shape) < 2 else b), "two dimensions"
        return
    rank = rank_of(b)
    if (a.shape[-1] if turned else a.shape[-2]) != rank:
        yield a, f"the rank {rank} of matrix B"
    if target is None or len(target.shape) < 2:
        return
    rows, columns = target.shape[-2:]
    if turned:  # both lie as the embedding does: a row for each token, and for each of its values
        if a.shape[-2] != rows:
            yield a, f"[{rows}, {rank}]"
        if b.shape[-2] != columns:
            yield b, f"[{columns}, {rank}]"
        return
    if a.shape[-1] != columns:
        yield a, f"[{rank}, {columns}]"
    if b.shape[-2] != rows:
        yield b, f"[{rows}, {rank}]"
    if target.shape[:-2] != a.shape[:-2] or target.shape[:-2] != b.shape[:-2]:
        yield (a if target.shape[:-2] != a.shape[:-2] else b), f"a matrix for each of the {target.shape[0]} experts"
