"""Checks of a quantization's declaration by itself: it can be read, and the engine computes in the type asked for.

Source: vLLM 0.32, the constructors of fp8.py and compressed_tensors.py, which refuse what is refused here;
vllm/config/vllm.py, `_get_quantization_config`, for the types.
"""

from collections.abc import Iterator
from typing import Any

from gates.files.refusal import shown
from gates.static.composition import Composition
from gates.static.flaw import Flaw, flaw
from gates.static.quantized import Quantization

_DTYPES = {"half": "float16", "float": "float32"}
_SCHEMES = ("dynamic", "static")
_FORMATS = frozenset(
    {"dense", "sparse-bitmask", "sparse-24-bitmask", "int-quantized", "float-quantized", "naive-quantized"}
    | {"pack-quantized", "marlin-24", "mixed-precision", "nvfp4-pack-quantized", "mxfp4-pack-quantized"}
    | {"mxfp6-pack-quantized", "mxfp8-quantized"}
)
"""Source: compressed_tensors/config/base.py, CompressionFormat."""


def check(c: Composition, told: Quantization | None) -> Iterator[Flaw]:
    """Check what is declared, whatever the tensors are."""
    if told is None:
        yield from _no_object(c)
        return
    for key, value, expected in _unreadable(told):
        yield flaw(
            "quant-config-mismatch",
            f"{told.file} says {told.method} with {key} {shown(value)}, which nothing reads.",
            file=c.model.path(told.file),
            pointer=f"{told.pointer}/{key}",
            found={key: value, "method": told.method},
            expected={key: expected},
        )
    yield from _dtype(c, told)


def _no_object(c: Composition) -> Iterator[Flaw]:
    value = c.model.config.get("quantization_config")
    if value is not None and not isinstance(value, dict):
        yield flaw(
            "quant-config-mismatch",
            f"quantization_config is {shown(value)}, and engines read an object.",
            file=c.model.path("config.json"),
            pointer="/quantization_config",
            found={"type": type(value).__name__},
            expected={"type": "object"},
        )


def _unreadable(told: Quantization) -> Iterator[tuple[str, Any, Any]]:
    """Yield keys with values that no engine reads, and what it would read."""
    said = told.told
    if told.method in {"gptq", "awq"}:
        for key in ("bits", "w_bit"):
            value = said.get(key)
            if value is not None and told.bits is None and not (type(value) is int and value >= 16):
                yield key, value, "a number of bits, such as 4"
        for key in ("group_size", "q_group_size"):
            value = said.get(key)
            if value is not None and value != -1 and told.group is None:
                yield key, value, "a number above 0, or -1 for all columns"
    if told.method == "fp8":
        scheme, block = said.get("activation_scheme"), said.get("weight_block_size")
        if scheme is not None and scheme not in _SCHEMES:
            yield "activation_scheme", scheme, list(_SCHEMES)
        if block is not None and told.block is None:
            yield "weight_block_size", block, "two numbers, such as [128, 128]"
    if told.method == "compressed-tensors":
        kind = said.get("format")
        if isinstance(kind, str) and kind not in _FORMATS:
            yield "format", kind, sorted(_FORMATS)
        groups = said.get("config_groups")
        if "config_groups" in said and not (isinstance(groups, dict) and groups) and not said.get("sparsity_config"):
            yield "config_groups", groups, "an object of groups, each with targets and weights"


def _dtype(c: Composition, told: Quantization) -> Iterator[Flaw]:
    """Find a type of numbers in which the engine has no kernel for this method."""
    rule = c.rules.get("quant_dtypes")
    argument, asked = c.declared.arguments.get("--dtype"), c.declared.arguments.get("--quantization", "-q")
    if not isinstance(rule, dict):
        return
    taken = rule.get(f"--quantization {asked}", rule.get(told.method))
    text, config = c.model.shape.text, c.model.shape.config
    stored = next((one[key] for one in (text, config) for key in ("torch_dtype", "dtype") if key in one), None)
    is_asked = argument not in (None, "auto")
    chosen = _DTYPES.get(argument or "", argument) if is_asked else stored
    # Of 32 bits in the configuration engines make 16 by themselves.
    if taken is None or chosen in taken or (not is_asked and chosen not in ("float16", "bfloat16")):
        return
    yield flaw(
        "quant-method-unsupported",
        f"{c.engine} computes {told.method} weights in {' or '.join(taken)}, and "
        f"{'--dtype asks for' if is_asked else 'config.json says'} {chosen}.",
        file=None if is_asked else c.model.path("config.json"),
        pointer="--dtype" if is_asked else "/torch_dtype",
        found={"dtype": chosen, "method": told.method},
        expected={"dtype": taken},
        advice=f"Say --dtype {taken[0]}.",
    )
