"""What stands beside the packed weights of a module: all that unpacking takes is there, in the sizes that it needs.

Source: vLLM 0.32, the parameters that fp8.py, modelopt.py, auto_awq.py, auto_gptq.py, mxfp4.py and the schemes of
compressed_tensors register (a checkpoint that lacks one leaves it as it was allocated), and the compressors of
compressed-tensors 0.17, which write them; of bitsandbytes, `QuantState.from_dict`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gates.static import names
from gates.static.composition import Composition
from gates.static.flaw import MAX_ITEMS, Flaw, flaw, listed
from gates.static.quantized import Quantization
from gates.static.tensors import Placed
from schemas.short import many

Parts = Mapping[str, Placed]
_WORD = 32
_EIGHT = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_FOUR_BIT_GROUP = 16
"""Numbers of NVFP4 that share a scale."""
_BLOCKS_LAST = 16
"""Bytes of one block of microscaling formats: 32 numbers of 4 bits."""


@dataclass(frozen=True, slots=True)
class Odd:
    """A companion of other sizes than its module makes it; None where any size will do."""

    module: str
    suffix: str
    found: tuple[int, ...]
    expected: tuple[int, ...]


def check(c: Composition, told: Quantization, tensors: Mapping[str, Placed]) -> Iterator[Flaw]:
    """Check what stands beside each quantized module of the model."""
    part = c.model
    if any(shard.header is None for shard in part.weights.shards.values()):
        return  # a file that cannot be read may hold anything
    lost: dict[str, list[str]] = {}
    odd: list[Odd] = []
    elsewhere = part.weights.weight_map or {}
    modules = names.linears(part.layered, tensors, part.shape.layers)
    has_zeros = any("qzeros" in parts for parts in modules.values())
    for module, parts in sorted(modules.items()):
        if told.quantizes(module):
            for suffix in _needed(told, module, parts, has_zeros=has_zeros):
                if not any(one in parts for one in suffix.split("|")) and f"{module}.{suffix}" not in elsewhere:
                    lost.setdefault(suffix.partition("|")[0], []).append(module)
            odd += _odd(told, module, parts)
    if told.method == "mxfp4":
        _blocks(tensors, lost, odd)
    yield from _lost(c, told, lost)
    yield from _misfit(c, told, odd)
    yield from _left_out(c, told, modules)


def _needed(told: Quantization, module: str, parts: Parts, *, has_zeros: bool) -> Iterator[str]:
    """Yield the suffixes that a module must have beside those that show that it is packed, alternatives with a bar."""
    if told.method == "bitsandbytes" and "weight.absmax" in parts:
        yield "|".join(_STATES)
    if "qweight" in parts and (told.method == "awq" or has_zeros or told.told.get("sym") is False):
        yield "qzeros"
    kind = _kind(parts)
    if told.method == "fp8" and kind in _EIGHT and told.told.get("activation_scheme") == "static":
        yield "input_scale|activation_scale"  # the second is what transformers itself writes
    if told.method == "modelopt":
        algorithm = str(told.told.get("quant_algo", "")).upper()
        if algorithm == "NVFP4" and kind == "U8":
            yield "weight_scale_2"
        if algorithm == "FP8" and kind in _EIGHT:
            yield from ("weight_scale", "input_scale")
    if told.method == "compressed-tensors":
        yield from _of_scheme(told.scheme_of(module), parts)


def _of_scheme(scheme: Mapping[str, Any], parts: Parts) -> Iterator[str]:
    packed, weights = parts.get("weight_packed"), _object(scheme.get("weights"))
    inputs = _object(scheme.get("input_activations"))
    if packed is not None and packed.tensor.dtype == "U8" and weights.get("group_size") == _FOUR_BIT_GROUP:
        yield "weight_global_scale"
        if inputs and inputs.get("dynamic") in (False, "local"):
            yield "input_global_scale"
        return
    if packed is None and not (_kind(parts) in _EIGHT or _kind(parts) == "I8"):
        return
    if weights.get("symmetric") is False:
        yield "weight_zero_point"
    if inputs.get("num_bits") == 8 and inputs.get("dynamic") is False:
        yield "input_scale"


def _odd(told: Quantization, module: str, parts: Parts) -> Iterator[Odd]:
    """Yield companions whose sizes are none that the module's own sizes and its scheme make."""
    if told.method == "compressed-tensors":
        yield from _odd_scheme(told, module, parts)
        return
    weight = parts.get("weight")
    if weight is None or len(weight.tensor.shape) != 2:
        return
    rows, columns = weight.tensor.shape
    if told.method in {"fp8", "modelopt"} and told.block is not None and _kind(parts) in _EIGHT:
        yield from _expect(module, parts, _in_blocks(rows, columns, told.block), "weight_scale_inv", "weight_scale")
    group = told.group or _FOUR_BIT_GROUP
    if told.method == "modelopt" and told.is_nvfp4 and _kind(parts) == "U8" and columns * 2 % group == 0:
        yield from _expect(module, parts, (rows, columns * 2 // group), "weight_scale")


def _odd_scheme(told: Quantization, module: str, parts: Parts) -> Iterator[Odd]:
    scheme = told.scheme_of(module)
    weights = _object(scheme.get("weights"))
    size = _size(parts, weights.get("num_bits"))
    form = scheme.get("format") or told.told.get("format")
    if size is None or not weights or form == "marlin-24" or told.told.get("sparsity_config"):
        return  # of weights of which half are left out, the sizes are others
    rows, columns = size
    strategy, group = weights.get("strategy"), weights.get("group_size")
    if strategy == "channel":
        expected: tuple[int, ...] | None = (rows, 1)
    elif strategy in {"group", "tensor_group"} and type(group) is int and group > 0:
        expected = None if columns % group else (rows, columns // group)
    elif strategy == "block" and told.block is not None and len(told.schemes) == 1:
        expected = _in_blocks(rows, columns, told.block)
    else:
        expected = None
    if expected is not None:
        yield from _expect(module, parts, expected, "weight_scale")


def _size(parts: Parts, bits: Any) -> tuple[int, int] | None:
    """Return rows and columns of a module's weights before they were packed."""
    packed = parts.get("weight_packed", parts.get("weight"))
    if packed is None or len(packed.tensor.shape) != 2:
        return None
    rows, columns = packed.tensor.shape
    if "weight_packed" not in parts:
        return rows, columns
    if type(bits) is not int or not 0 < bits <= 8 or _WORD % bits:
        return None
    per = 8 // bits if packed.tensor.dtype == "U8" else _WORD // bits
    return rows, columns * per


def _expect(module: str, parts: Parts, expected: tuple[int, ...], *suffixes: str) -> Iterator[Odd]:
    for suffix in suffixes:
        placed = parts.get(suffix)
        if placed is not None:
            found = placed.tensor.shape
            # Sizes of 1 are written or left out: a column may be a plain list, and ModelOpt's blocks have four.
            if [one for one in found if one != 1] != [one for one in expected if one != 1]:
                yield Odd(module, suffix, found, expected)
            return


def _in_blocks(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    return -(-rows // block[0]), -(-columns // block[1])


def _blocks(tensors: Mapping[str, Placed], lost: dict[str, list[str]], odd: list[Odd]) -> None:
    """Hold experts in blocks, as gpt-oss has them, against their scales."""
    for name in sorted(tensors):
        if not name.endswith("_blocks"):
            continue
        module, scales = name.removesuffix("_blocks"), tensors.get(f"{name.removesuffix('blocks')}scales")
        shape = tensors[name].tensor.shape
        if scales is None:
            lost.setdefault("scales", []).append(module)
        elif shape[-1:] != (_BLOCKS_LAST,):
            odd.append(Odd(module, "blocks", shape, (*scales.tensor.shape, _BLOCKS_LAST)))
        elif scales.tensor.shape != shape[:-1]:
            odd.append(Odd(module, "scales", scales.tensor.shape, shape[:-1]))


def _lost(c: Composition, told: Quantization, lost: Mapping[str, list[str]]) -> Iterator[Flaw]:
    for suffix, modules in sorted(lost.items()):
        yield flaw(
            "quant-config-mismatch",
            f"{told.file} declares {told.method}, and {many(len(modules), 'module', 'lacks', 'lack')} {suffix} beside "
            f"packed weights: {listed(modules)}.",
            file=c.model.path(told.file),
            pointer=told.pointer,
            found={"lacks": suffix, "count": len(modules), "modules": modules[:MAX_ITEMS], "method": told.method},
            expected={"count": 0, "suffix": suffix},
            advice=f"Fetch the whole checkpoint: without {suffix} the weights cannot be unpacked.",
        )


def _misfit(c: Composition, told: Quantization, odd: list[Odd]) -> Iterator[Flaw]:
    if not odd:
        return
    first, name = odd[0], f"{odd[0].module}{'_' if odd[0].suffix in {'blocks', 'scales'} else '.'}{odd[0].suffix}"
    yield flaw(
        "quant-config-mismatch",
        f"By {told.file} and the packed weights, {name} is {list(first.expected)}, and it is {list(first.found)}. "
        f"{many(len(odd), 'module', 'is', 'are')} like this.",
        file=c.model.path(told.file),
        pointer=told.pointer,
        found={"module": first.module, "tensor": name, "shape": list(first.found), "count": len(odd)},
        expected={"shape": list(first.expected), "count": 0},
    )


def _left_out(c: Composition, told: Quantization, modules: Mapping[str, Parts]) -> Iterator[Flaw]:
    """Find modules that the declaration leaves as they were, and that are packed all the same."""
    odd = sorted(
        module
        for module, parts in modules.items()
        if ("weight_packed" in parts or "weight_scale_inv" in parts)
        and not told.quantizes(module)
        and told.names_exactly(module)
    )
    if odd:
        yield flaw(
            "quant-config-mismatch",
            f"{told.file} leaves {many(len(odd), 'module')} unquantized that the files hold packed: {listed(odd)}.",
            file=c.model.path(told.file),
            pointer=told.pointer,
            found={"packed": len(odd), "modules": odd[:MAX_ITEMS], "method": told.method},
            expected={"packed": 0},
        )


def _kind(parts: Parts) -> str:
    return parts["weight"].tensor.dtype if "weight" in parts else ""


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
