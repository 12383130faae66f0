"""What an architecture needs: each tensor by name and shape, those of a setting only where the setting asks for them.

Source: architectures.json and required.json beside this file, whose entries name theirs.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gates.static.names import CARRIERS, InLayer
from gates.static.rules import table
from gates.static.shape import Shape, families, moe_layers

_EXPERT = re.compile(r"experts\.[0-9]+\.")
_BACK = ("down_proj", "w2", "output_linear")
"""How the matrix that leads back out of an expert is called."""


@dataclass(frozen=True, slots=True)
class Needed:
    """A tensor that the architecture needs: its name, and its shape where the configuration gives one.

    With `begins`, any tensor but a bias whose name begins so will do: checkpoints store it in several forms.
    """

    name: str
    shape: tuple[int | None, ...]
    begins: bool = False

    @property
    def module(self) -> str:
        """The module that it belongs to."""
        return self.name.rpartition(".")[0]


def symbols(shape: Shape) -> dict[str, int | None]:
    """Return what the symbols of the table of architectures mean for this model."""
    query = _times(shape.heads, shape.head_dim)
    keys = _times(shape.kv_heads, shape.head_dim)
    told = shape.text.get("n_shared_experts", shape.text.get("num_shared_experts"))
    has_none = any(key in shape.text and not shape.text[key] for key in ("n_shared_experts", "num_shared_experts"))
    shared = 0 if has_none else told if type(told) is int else None
    alone = "shared_expert_intermediate_size" in shape.text and not shape.text["shared_expert_intermediate_size"]
    key_value = None if query is None or keys is None else query + 2 * keys
    return {
        "H": shape.hidden,
        "H3": _times(shape.hidden, 3),
        "V": shape.vocabulary,
        "I": shape.intermediate,
        "I2": _times(shape.intermediate, 2),
        "IM": _told(shape, "intermediate_size_mlp"),
        "F": _told(shape, "ffn_hidden_size") or _told(shape, "n_inner") or _times(shape.hidden, 4),
        "X": _told(shape, "index_head_dim"),
        "XH": _told(shape, "index_n_heads"),
        "XQ": _times(_told(shape, "index_head_dim"), _told(shape, "index_n_heads")),
        "D": shape.head_dim,
        "A": shape.heads,
        "G": shape.kv_heads,
        "Q": query,
        "K": keys,
        "QKV": key_value,
        "E": shape.experts,
        "M": shape.moe_intermediate,
        "S": 0 if alone else shape.shared_intermediate,
        "N": _times(shape.moe_intermediate, shared),
        "P": shape.context,
        "R": shape.query_rank,
        "C": shape.kv_rank,
        "CR": _plus(shape.kv_rank, shape.rope_dim),
        "QB": _times(shape.heads, _plus(shape.nope_dim, shape.rope_dim)),
        "KB": _times(shape.heads, _plus(shape.nope_dim, shape.value_dim)),
        "OV": _times(shape.heads, shape.value_dim),
    }


def needed(shape: Shape, here: Sequence[InLayer], start: str | None) -> Iterator[Needed]:
    """Yield what the architecture needs besides its head, for families whose names are known.

    Args:
        shape: of the language model.
        here: tensors of its layers that are there; their prefix tells where the language model lies.
        start: name of its embedding, which tells it too.
    """
    known = families()["tensors"].get(shape.family.get("tensors"))
    if known is None or not shape.layers or shape.is_head:
        return
    first, layers = known.get("embedding", "embed_tokens"), known.get("layers", "layers")
    prefix = here[0].prefix if here else "model." if start is None else start.removesuffix(f"{first}.weight")
    values, rules = symbols(shape), list(_rules(shape))
    yield Needed(f"{prefix}{first}.weight", (values["V"], values["H"]))
    sparse = moe_layers(shape)
    for layer in range(shape.layers):
        stem = f"{prefix}{layers}.{layer}."
        names = {f"{name}.weight": dims for name, dims in _modules(known, shape, is_sparse=layer in sparse).items()}
        for rule in rules:
            if rule.get("in", "layer") == "layer" or rule["in"] == ("moe" if layer in sparse else "dense"):
                names |= rule.get("tensors", {})
                yield from (Needed(stem + one, (), begins=True) for one in rule.get("begins", ()))
        yield from _of_layer(stem, names, values, shape.experts or 0)
    if (final := known.get("final", "norm")) is not None:
        yield Needed(f"{prefix}{final}.weight", (values["H"],))
    for rule in rules:
        for name, dims in rule["tensors"].items() if rule.get("in") == "model" else ():
            yield Needed(name[1:] if name.startswith("/") else prefix + name, _sizes(dims, values))


def _told(shape: Shape, key: str) -> int | None:
    value = shape.text.get(key)
    return value if type(value) is int else None


def _of_layer(
    stem: str, names: Mapping[str, Sequence[str | int]], values: Mapping[str, int | None], experts: int
) -> Iterator[Needed]:
    for name, dims in names.items():
        sizes = _sizes(dims, values)
        if 0 in sizes:
            continue  # what has a size of none is not there
        for one in (name.replace("*", str(expert)) for expert in range(experts)) if "*" in name else (name,):
            yield Needed(stem + one, sizes)


def _sizes(dims: Sequence[str | int], values: Mapping[str, int | None]) -> tuple[int | None, ...]:
    return tuple(one if isinstance(one, int) else values[one] for one in dims)


def _modules(known: Mapping[str, Any], shape: Shape, *, is_sparse: bool) -> dict[str, list[str | int]]:
    found = dict(known["layer"])
    found |= known.get("with_query_rank" if shape.query_rank else "without_query_rank", {})
    found |= known.get("moe" if is_sparse else "dense", {})
    return found


def _rules(shape: Shape) -> Iterator[Mapping[str, Any]]:
    """Yield the further rules of the family whose settings hold."""
    told = table("required")
    for name in told["families"].get(shape.model_type, ()):
        rule = told["rules"][name]
        if all(_holds(_setting(shape, key, usual), wanted) for key, (wanted, usual) in rule.get("if", {}).items()):
            yield rule


def _holds(value: Any, wanted: Any) -> bool:
    return bool(value) if wanted == "*" else bool(value == wanted)


def _setting(shape: Shape, key: str, usual: Any) -> Any:
    for source in (shape.text, shape.config):
        if key in source and source[key] is not None:
            return source[key]
    return usual


def is_carried(one: Needed, tensors: Mapping[str, Any]) -> bool:
    """Say whether a needed tensor is there, plain or packed."""
    if one.begins:
        return any(name.startswith(one.name) and not name.endswith("bias") for name in tensors)
    if one.name in tensors:
        return True
    return one.name.endswith(".weight") and any(f"{one.module}.{carrier}" in tensors for carrier in CARRIERS)


def missing(wanted: Sequence[Needed], tensors: Mapping[str, Any], known: Mapping[str, Any]) -> list[Needed]:
    """Return what is needed and neither there, nor known to lie elsewhere, nor stored with its fellow experts as one.

    Args:
        wanted: what the architecture needs.
        tensors: those that an engine loads.
        known: names that an index or a file holds.
    """
    fused = set()
    for name in tensors:
        stem, found, rest = name.partition("experts.")
        if found and not _EXPERT.search(name):
            fused.add((stem, rest.startswith(_BACK)))
    return [
        one
        for one in wanted
        if not is_carried(one, tensors)
        and not is_carried(one, known)
        and not (_EXPERT.search(one.name) and (one.name.partition("experts.")[0], one.module.endswith(_BACK)) in fused)
    ]


def _times(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one * other


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
