"""Names of tensors: which the architecture needs, which are there, and in which form a module carries its weights."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gates.static.shape import Shape, families, moe_layers
from gates.static.tensors import Placed

CARRIERS = ("weight", "qweight", "weight_packed", "weight_q", "weight_scale")
"""How a module's weights may be called; packed forms stand for the plain one."""
EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
    "embed_in.weight",
    "embeddings.weight",
)
HEADS = ("lm_head.weight", "output.weight", "embed_out.weight", "output_layer.weight", "lm_head.linear.weight")
LINEARS = re.compile(
    r"(self_attn|attention|attn)\.(q|k|v|o|qkv|out|q_a|q_b|kv_b|kv_a)_proj(_with_mqa)?"
    r"|(mlp|feed_forward)\.(gate|up|down|gate_up)_proj|(mlp|block_sparse_moe)\.experts\.[0-9]+\.(gate_proj|up_proj|down_proj|w1|w2|w3)"
)
_LAYER = re.compile(r"^(?P<prefix>(?:[^.]+\.)*?)(?:layers|h|blocks)\.(?P<number>[0-9]{1,4})\.(?P<rest>.+)$")
_OTHER_TOWER = re.compile(
    r"(^|[._])(vis(ion|ual)?|image|audio|speech|encoder|vit|siglip|mtp|mm|talker|code2wav|vpm|resampler)"
)
_EXPERT = re.compile(r"experts\.[0-9]+\.")


@dataclass(frozen=True, slots=True)
class Needed:
    """A tensor that the architecture needs: its name, and its shape where the configuration gives one."""

    name: str
    shape: tuple[int | None, ...]

    @property
    def module(self) -> str:
        """The module that it belongs to."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class InLayer:
    """A tensor of a layer of the language model."""

    name: str
    prefix: str
    number: int
    rest: str


def embedding(tensors: Mapping[str, Any]) -> str | None:
    """Return the name of the language model's input embedding, or None."""
    found = [
        name
        for ending in EMBEDDINGS
        for name in tensors
        if (name == ending or name.endswith(f".{ending}")) and not _OTHER_TOWER.search(name)
    ]
    return min(found, key=lambda name: (len(name), name), default=None)


def head(tensors: Mapping[str, Any]) -> str | None:
    """Return the name of the language-model head in whatever form it is carried, or None."""
    for ending in HEADS:
        stem = ending.removesuffix("weight")
        for carrier in CARRIERS:
            for name in tensors:
                if (name == stem + carrier or name.endswith(f".{stem}{carrier}")) and not _LAYER.match(name):
                    return name
    return None


def in_layers(tensors: Mapping[str, Any]) -> list[InLayer]:
    """Return the tensors of the language model's layers, those of its longest list of layers."""
    groups: dict[str, list[InLayer]] = {}
    for name in tensors:
        match = _LAYER.match(name)
        if match is not None and not _OTHER_TOWER.search(match["prefix"]):
            one = InLayer(name, match["prefix"], int(match["number"]), match["rest"])
            groups.setdefault(match["prefix"], []).append(one)
    return max(groups.values(), key=len, default=[])


def symbols(shape: Shape) -> dict[str, int | None]:
    """Return what the symbols of the table of architectures mean for this model."""
    query = _times(shape.heads, shape.head_dim)
    keys = _times(shape.kv_heads, shape.head_dim)
    shared = shape.text.get("n_shared_experts")
    key_value = None if query is None or keys is None else query + 2 * keys
    compressed = None if shape.kv_rank is None or shape.rope_dim is None else shape.kv_rank + shape.rope_dim
    return {
        "H": shape.hidden,
        "V": shape.vocabulary,
        "I": shape.intermediate,
        "I2": _times(shape.intermediate, 2),
        "D": shape.head_dim,
        "A": shape.heads,
        "Q": query,
        "K": keys,
        "QKV": key_value,
        "E": shape.experts,
        "M": shape.moe_intermediate,
        "S": shape.shared_intermediate,
        "N": _times(shape.moe_intermediate, shared if type(shared) is int else None),
        "R": shape.query_rank,
        "C": shape.kv_rank,
        "CR": compressed,
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
    table = families()["tensors"].get(shape.family.get("tensors"))
    if table is None or not shape.layers:
        return
    prefix = here[0].prefix if here else "model." if start is None else start.removesuffix("embed_tokens.weight")
    values = symbols(shape)
    yield Needed(f"{prefix}embed_tokens.weight", (values["V"], values["H"]))
    sparse = moe_layers(shape)
    for layer in range(shape.layers):
        for module, dims in _modules(table, shape, is_sparse=layer in sparse).items():
            resolved = tuple(one if isinstance(one, int) else values[one] for one in dims)
            if "*" not in module:
                yield Needed(f"{prefix}layers.{layer}.{module}.weight", resolved)
                continue
            for expert in range(shape.experts or 0):
                yield Needed(f"{prefix}layers.{layer}.{module.replace('*', str(expert))}.weight", resolved)
        for name, dims in table.get("plain", {}).items():
            yield Needed(f"{prefix}layers.{layer}.{name}", tuple(values[one] for one in dims))
    yield Needed(f"{prefix}{table.get('final', 'norm')}.weight", (values["H"],))


def _modules(table: Mapping[str, Any], shape: Shape, *, is_sparse: bool) -> dict[str, list[str | int]]:
    found = dict(table["layer"])
    found |= table.get("with_query_rank" if shape.query_rank else "without_query_rank", {})
    found |= table.get("moe" if is_sparse else "dense", {})
    return found


def is_carried(one: Needed, tensors: Mapping[str, Any]) -> bool:
    """Say whether a needed tensor is there, plain or packed."""
    return one.name in tensors or any(f"{one.module}.{carrier}" in tensors for carrier in CARRIERS)


def fused_stand_ins(one: Needed, tensors: Mapping[str, Any]) -> bool:
    """Say whether all experts of a layer are stored as one tensor, as newer checkpoints do."""
    if "experts." not in one.name:
        return False
    stem = one.name.split("experts.")[0] + "experts."
    return any(name.startswith(stem) and not _EXPERT.search(name) for name in tensors)


def linears(here: Sequence[InLayer], tensors: Mapping[str, Placed], layers: int | None) -> dict[str, dict[str, Placed]]:
    """Return the modules that quantization is for: name → what each is carried by (suffix → tensor)."""
    found: dict[str, dict[str, Placed]] = {}
    for one in here:
        if layers is not None and one.number >= layers:
            continue  # layers that predict further tokens have rules of their own
        match = LINEARS.match(one.rest)
        if match is not None and match.end() < len(one.rest):
            module = one.name[: len(one.name) - len(one.rest) + match.end()]
            found.setdefault(module, {})[one.rest[match.end() + 1 :]] = tensors[one.name]
    return found


def _times(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one * other


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
