"""How a model says that it is quantized, in one form for all the ways of saying it.

Source: the quantization configurations of transformers 5.24, AutoAWQ, GPTQModel, compressed-tensors 0.17 and
TensorRT Model Optimizer, as published checkpoints hold them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gates.static.patterns import Patience, Patterns

QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json")
_GPTQ = frozenset({"desc_act", "sym", "damp_percent", "true_sequential", "static_groups", "checkpoint_format", "w_bit"})
_GPTQ |= {"zero_point", "q_group_size", "config_groups", "model_file_base_name", "quant_algo", "dynamic", "lm_head"}
"""Keys of other methods' declarations; without any of them and without a name, bits and a group are MLX's."""
_CLASS = re.compile(r"[A-Z][A-Za-z0-9]*")


LAYERED = ("model.layers.", "model.language_model.layers.", "language_model.model.layers.")
"""What the names of a language model's layers begin with, alone and inside a model that also sees or hears."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How some modules are quantized: those whose names match a target, or all others where it has none."""

    targets: tuple[str, ...] = ()
    group: int | None = None
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Quantization:
    """What is declared. `pointer` and `file` say where; `told` is the declaration itself.

    `patience` is what its patterns of modules may take.
    """

    method: str
    file: str
    pointer: str
    told: Mapping[str, Any]
    bits: int | None = None
    group: int | None = None
    desc_act: bool = False
    block: tuple[int, int] | None = None
    ignored: tuple[str, ...] = ()
    floating: bool = False
    packed: bool = False
    schemes: tuple[Scheme, ...] = ()
    only: tuple[str, ...] = ()
    patience: Patience = field(default_factory=Patience, compare=False)

    @property
    def is_fp8(self) -> bool:
        """Whether weights, or some of them, are 8-bit floating point numbers."""
        some = weight_schemes(self.told) if self.method == "compressed-tensors" else []
        return (self.floating and self.bits == 8) or any(
            one.get("type") == "float" and one.get("num_bits") == 8 for one in some
        )

    @property
    def is_nvfp4(self) -> bool:
        """Whether weights, or some of them, are 4-bit floating point numbers with an 8-bit scale for each 16."""
        if self.method == "modelopt":
            return "NVFP4" in str(self.told.get("quant_algo", self.told.get("quant_method", ""))).upper()
        some = weight_schemes(self.told) if self.method == "compressed-tensors" else []
        return any(
            one.get("type") == "float" and one.get("num_bits") == 4 and one.get("group_size") == 16 for one in some
        )

    def all_bits(self) -> Iterator[tuple[str, int]]:
        """Yield every number of bits that some modules have, with its place in the declaration."""
        if self.bits is not None:
            yield "/bits", self.bits
        if self.method == "compressed-tensors":
            groups = self.told.get("config_groups")
            for name, one in groups.items() if isinstance(groups, dict) else ():
                weights = one.get("weights") if isinstance(one, dict) else None
                if isinstance(weights, dict) and (bits := _bits(weights.get("num_bits"))):
                    yield f"/config_groups/{name}/weights/num_bits", bits
        for key in ("dynamic", "extra_config"):  # GPTQModel's and AutoRound's exceptions, by module
            over = self.told.get(key)
            for name, one in over.items() if isinstance(over, dict) else ():
                if isinstance(one, dict) and not name.startswith("-:") and (bits := _bits(one.get("bits"))):
                    yield f"/{key}/{name}/bits", bits

    def ignores(self, module: str) -> bool:
        """Say whether a module was left as it was."""
        return self._ignoring.match(module)

    def quantizes(self, module: str) -> bool:
        """Say whether a module is one of those that were quantized: `only` names them where not all are."""
        return not self.ignores(module) and (not self.only or self._including.match(module))

    def names_exactly(self, module: str) -> bool:
        """Say whether it is beyond doubt what a module is: left out by its whole name, or named by no group."""
        return module in self.ignored or (self.method == "compressed-tensors" and not self.ignores(module))

    def scheme_of(self, module: str) -> Mapping[str, Any]:
        """Return the group of compressed-tensors that a module belongs to; nothing where that is not known."""
        groups = self.told.get("config_groups")
        told = [one for one in groups.values() if isinstance(one, dict)] if isinstance(groups, dict) else []
        told = [one for one in told if isinstance(one.get("weights"), dict)]
        if len(told) != len(self.schemes):
            return {}
        pairs = list(zip(told, self.schemes, self._targeting, strict=True))
        named = [one for one, scheme, patterns in pairs if scheme.targets and patterns.match(module)]
        others = [one for one, scheme, _ in pairs if not scheme.targets]
        return next(iter(named or others), {})

    @cached_property
    def _ignoring(self) -> Patterns:
        return Patterns(self.ignored, self.patience)

    @cached_property
    def _including(self) -> Patterns:
        return Patterns(self.only, self.patience)

    @cached_property
    def _targeting(self) -> list[Patterns]:
        return [Patterns(one.targets, self.patience) for one in self.schemes]

    def schemes_of(self, paths: Sequence[str], layers: Sequence[int]) -> list[Scheme]:
        """Return how a kind of module is quantized in these layers; nothing when it was left as it was in all of them.

        `paths` are names that it may have inside a layer, such as `self_attn.o_proj`. Schemes that name it come before
        those for everything else, as compressed-tensors and GPTQModel choose.
        """
        named = [[f"{start}{layer}.{path}" for layer in layers] for start in LAYERED for path in paths]
        if any(all(self.ignores(module) for module in modules) for modules in named):
            return []
        own = [
            scheme
            for scheme, patterns in zip(self.schemes, self._targeting, strict=True)
            if any(patterns.match(module) for modules in named for module in modules)
        ]
        return own or [one for one in self.schemes if not one.targets]


def quantization_of(config: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> Quantization | None:
    """Return what config.json declares, or else a file of its own."""
    for pointer, told in _places(config):
        if isinstance(told, dict) and told:
            return _read("config.json", pointer, told)
    for name in QUANTIZATION_FILES:
        told = files.get(name)
        if told:
            inner = told.get("quantization")
            is_inner = isinstance(inner, dict)
            return _read(name, "/quantization" if is_inner else "", inner if isinstance(inner, dict) else told)
    return None


def _places(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    names = ("quantization_config", "compression_config", "quantization")  # the last one is MLX's own
    places = [(f"/{name}", config.get(name)) for name in names]
    for outer in ("text_config", "llm_config", "language_config"):
        text = config.get(outer)
        if isinstance(text, dict):
            places.append((f"/{outer}/quantization_config", text.get("quantization_config")))
    return places


def _read(file: str, pointer: str, told: Mapping[str, Any]) -> Quantization:
    method = _method(file, told)
    reader = _READERS.get(method, _read_plain)
    values = reader(told)
    schemes = _schemes(told) or (Scheme(group=values.get("group"), block=values.get("block")),)
    return Quantization(
        method=method,
        file=file,
        pointer=pointer,
        told=told,
        ignored=_ignored(told),
        schemes=schemes,
        only=_only(told, schemes),
        **values,
    )


def _only(told: Mapping[str, Any], schemes: Sequence[Scheme]) -> tuple[str, ...]:
    """Return the modules that are quantized where others are not; nothing where all are."""
    layers = told.get("quantized_layers")  # TensorRT Model Optimizer, of several algorithms
    if isinstance(layers, dict) and layers:
        return tuple(layers)
    inside = told.get("modules_in_block_to_quantize")  # GPTQ of optimum: lists of names inside a block
    named = [one for group in (inside if isinstance(inside, list) else []) for one in _texts(group)]
    if named:
        return tuple(named)
    groups = told.get("config_groups")
    if isinstance(groups, dict) and schemes and all(one.targets for one in schemes):
        return tuple(target for one in schemes for target in one.targets)
    return ()


def _texts(value: object) -> list[str]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def _schemes(told: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Return the schemes of a configuration that has several; nothing for one that has the same for all."""
    groups, dynamic = told.get("config_groups"), told.get("dynamic")
    found = []
    for one in groups.values() if isinstance(groups, dict) else ():
        weights = one.get("weights") if isinstance(one, dict) else None
        if isinstance(weights, dict):
            targets = one.get("targets")
            texts = [text for text in targets if isinstance(text, str)] if isinstance(targets, list) else []
            # A class, such as Linear, is everything that no other group names.
            named = () if any(_CLASS.fullmatch(text) for text in texts) else tuple(texts)
            found.append(Scheme(named, _group(weights.get("group_size")), _block(weights.get("block_structure"))))
    if isinstance(dynamic, dict) and not found:  # GPTQModel: "+:pattern" changes what is quantized otherwise
        over = [
            (key, value)
            for key, value in dynamic.items()
            if isinstance(key, str) and isinstance(value, dict) and not key.startswith("-:")
        ]
        usual = told.get("group_size")
        found = [
            Scheme(("re:" + key.removeprefix("+:"),), _group(value.get("group_size", usual))) for key, value in over
        ]
        found.append(Scheme((), _group(usual)))
    return tuple(found)


def _method(file: str, told: Mapping[str, Any]) -> str:
    named = told.get("quant_method", told.get("quant_algo", told.get("quant_type", "")))
    method = str(named or "").lower()
    if file == "hf_quant_config.json" or method.startswith(("modelopt", "nvfp4")) or "producer" in told:
        return "modelopt"
    if not method and {"bits", "group_size"} <= set(told) and not _GPTQ & set(told):
        return "mlx"
    if not method and ("w_bit" in told or "zero_point" in told):
        return "awq"
    if not method and ("desc_act" in told or "bits" in told):
        return "gptq"
    if not method and "config_groups" in told:
        return "compressed-tensors"
    return {"auto-round": "auto-round", "auto_round": "auto-round", "intel/auto-round": "auto-round"}.get(
        method, method
    )


def _read_plain(told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "bits": _bits(told.get("bits", told.get("w_bit", told.get("weight_bits")))),
        "group": _group(told.get("group_size", told.get("q_group_size"))),
        "desc_act": told.get("desc_act") is True,
        "packed": True,
    }


def _read_fp8(told: Mapping[str, Any]) -> dict[str, Any]:
    return {"bits": 8, "floating": True, "block": _block(told.get("weight_block_size"))}


def _read_compressed(told: Mapping[str, Any]) -> dict[str, Any]:
    weights = next(iter(weight_schemes(told)), {})
    groups = told.get("config_groups")
    formats = {str(told.get("format", ""))}
    for one in groups.values() if isinstance(groups, dict) else ():
        formats |= {str(one.get("format", ""))} if isinstance(one, dict) else set()
    return {
        "bits": _count(weights.get("num_bits")),
        "group": _group(weights.get("group_size")),
        "desc_act": weights.get("actorder") in ("group", "dynamic", True),
        "block": _block(weights.get("block_structure")),
        "floating": weights.get("type") == "float",
        "packed": any("pack" in one for one in formats),
    }


def _read_modelopt(told: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(told.get("quant_algo", told.get("quant_method", ""))).upper()
    is_four = "NVFP4" in kind or "FP4" in kind
    return {
        "bits": 4 if is_four or "INT4" in kind or "W4" in kind else 8,
        "group": _group(told.get("group_size", 16 if is_four else None)),
        # Its names for 8-bit floats that share a scale in squares. Source: vLLM 0.32, quantization/modelopt.py.
        "block": (128, 128) if kind in {"FP8_PB_WO", "FP8_BLOCK_SCALES"} else None,
        "floating": is_four or "FP8" in kind,
    }


def _read_bitsandbytes(told: Mapping[str, Any]) -> dict[str, Any]:
    return {"bits": 4 if told.get("load_in_4bit") or told.get("_load_in_4bit") else 8}


def _read_hqq(told: Mapping[str, Any]) -> dict[str, Any]:
    inner = told.get("quant_config")
    weights = inner.get("weight_quant_params") if isinstance(inner, dict) else None
    weights = weights if isinstance(weights, dict) else {}
    return {"bits": _count(weights.get("nbits")), "group": _group(weights.get("group_size"))}


def _read_mxfp4(_told: Mapping[str, Any]) -> dict[str, Any]:
    return {"bits": 4, "group": 32, "floating": True}


_READERS = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
    "bitsandbytes": _read_bitsandbytes,
    "mxfp4": _read_mxfp4,
    "hqq": _read_hqq,
}


def weight_schemes(told: Any) -> list[dict[str, Any]]:
    """Return every object that stands under the key `weights`, wherever it is."""
    found = []
    if isinstance(told, dict):
        for key, value in told.items():
            if key == "weights" and isinstance(value, dict):
                found.append(value)
            found += weight_schemes(value)
    return found


def _ignored(told: Mapping[str, Any]) -> tuple[str, ...]:
    found: list[str] = []
    for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "llm_int8_skip_modules"):
        value = told.get(key)
        found += [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
    further = told.get("extra_config")
    if isinstance(further, dict):  # AutoRound: a module of 16 bits is left as it was
        whole = [key for key, one in further.items() if isinstance(one, dict) and (_count(one.get("bits")) or 0) >= 16]
        found += [f"re:{key}" if re.search(r"[*+^$\\|]", key) else key for key in whole]
    dynamic = told.get("dynamic")
    if isinstance(dynamic, dict):  # GPTQModel: "-:pattern" leaves modules out
        found += ["re:" + key[2:] for key in dynamic if key.startswith("-:")]
    return tuple(found)


def _bits(value: object) -> int | None:
    """Return a number of bits, also where it is written as a text; 16 and more mean that nothing is packed."""
    bits = int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,2}", value) else _count(value)
    return bits if bits is not None and bits < 16 else None


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _group(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _block(value: object) -> tuple[int, int] | None:
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", value)):
        value = (int(match[1]), int(match[2]))
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        first, second = value
        if type(first) is int and type(second) is int and first > 0 and second > 0:
            return first, second
    return None
