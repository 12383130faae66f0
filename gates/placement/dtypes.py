"""Which numbers a cache is made of, from the launch arguments and the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from gates.files.gguf_types import BLOCKS
from gates.placement import PlacementUnknown
from gates.static.declared import Declared
from gates.static.shape import Shape

_BYTES: dict[str, Fraction] = {
    **dict.fromkeys(("float32", "f32", "fp32", "float"), Fraction(4)),
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "f16", "half"), Fraction(2)),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "int8"), Fraction(1)),
    **{name.lower(): Fraction(size, values) for name, values, size in BLOCKS.values() if name.startswith(("Q", "IQ"))},
}
# Flags of vLLM, SGLang, TensorRT-LLM; llama.cpp states keys and values apart.
_BOTH = ("--kv-cache-dtype", "--kv_cache_dtype")
_KEYS, _VALUES = ("--cache-type-k", "-ctk"), ("--cache-type-v", "-ctv")
_MODEL = ("--dtype",)
_STATE = ("--mamba-ssm-cache-dtype",)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Bytes of one stored number: of keys, of values, of the model's own numbers, and of recurrent state."""

    name: str
    key: Fraction
    value: Fraction
    model: Fraction
    state: Fraction

    @property
    def is_eight_bit(self) -> bool:
        """Whether keys are stored in one byte each."""
        return self.key == 1


def numbers_of(
    shape: Shape, declared: Declared, engine: str | None, *, said: str | None = None, stored: str | None = None
) -> Numbers:
    """Return the numbers that the cache is made of.

    Args:
        shape: of the model, whose configuration names its own type.
        declared: with the launch arguments, which come first.
        engine: whose default counts: llama.cpp keeps 16 bits whatever the weights are.
        said: what a bundle document says under `quantization.kv_cache`.
        stored: type of the embedding in the files, which counts where the configuration names none.

    Raises:
        PlacementUnknown: a type that is named is not known, or none is named anywhere.
    """
    arguments = declared.arguments
    model_name = arguments.get(*_MODEL)
    if model_name in (None, "auto"):
        model_name = _own_type(shape.text) or _own_type(shape.config) or stored
    if engine == "llamacpp":
        model_name = "f16"
    both = arguments.get(*_BOTH) or said
    names = [arguments.get(*_KEYS) or both, arguments.get(*_VALUES) or both]
    resolved = [model_name if name in (None, "auto") else name for name in names]
    if model_name is None:
        if None in resolved:
            raise PlacementUnknown(shape.at("torch_dtype"), "names no type of numbers, and no argument does: --dtype")
        model_name = "float32"  # for recurrent state and nothing else: the widest
    model = _size(model_name, "--dtype")
    if model == 4 and engine == "vllm" and arguments.get(*_MODEL) in (None, "auto"):
        model = Fraction(2)  # vLLM serves 32-bit checkpoints in 16 bits
        resolved = ["bfloat16" if name == model_name else name for name in resolved]
    key, value = (_size(str(name), "--kv-cache-dtype") for name in resolved)
    state = _STATE_DEFAULT if (asked := arguments.get(*_STATE)) in (None, "auto") else _size(str(asked), _STATE[0])
    name = str(resolved[0]) if resolved[0] == resolved[1] else f"{resolved[0]}, {resolved[1]}"
    return Numbers(name, key, value, model, state)


_STATE_DEFAULT = Fraction(4)
"""Recurrent state that no argument gives a type is counted in 32 bits, the widest that engines keep it in."""


def _own_type(config: Mapping[str, Any]) -> str | None:
    told = config.get("torch_dtype", config.get("dtype"))
    return told.removeprefix("torch.") if isinstance(told, str) else None


def _size(name: str, pointer: str) -> Fraction:
    found = _BYTES.get(name.lower())
    if found is None:
        raise PlacementUnknown(pointer, f"{name} is no known type of numbers")
    return found
