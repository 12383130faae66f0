"""Which device holds which part of the weights, from the headers of the real files.

The rule. Layers are divided over pipeline stages; the embedding lies on the first one, the last norm and the head on
the last one, and where both are one tensor, each of the two has it. Within a stage, tensor parallelism divides
queries, outputs, feed-forward layers, experts and recurrent mixers evenly, and keys and values by their heads, which
are copied where there are more devices than heads. Vocabulary (embedding and head) is divided by rows, padded to 64,
by engines known to do so. Everything else is on every device: norms, routers, latent down-projections, what follows
the sum of a row-parallel layer, other towers, tensors of 256 values or fewer, and whatever is not known by name.
Experts of an expert-parallel layout are whole on their device, except that groups smaller than `tensor` cut them.
Every tensor is counted as it is stored.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

from gates.files.header import Header, Tensor
from gates.placement.topology import Topology
from gates.static.composition import Part
from gates.static.names import embedding, head
from gates.static.shape import Shape

SMALL_VALUES = 256
"""Tensors of so few values are copied to every device."""
VOCABULARY_STEP = 64
DIVIDES_VOCABULARY = frozenset({"vllm", "sglang", "tgi"})

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "gate_inp"})
_WHOLE = frozenset({"kv_a_proj_with_mqa", "kv_a_proj", "q_a_proj", "fused_qkv_a_proj_with_mqa", "indexer"})
_KEYS = frozenset({"k_proj", "v_proj", "wk", "wv"})
_FUSED = frozenset({"qkv_proj", "c_attn", "query_key_value", "Wqkv", "wqkv", "qkv", "W_pack"})
_COLUMNS = frozenset(
    {
        *("q_proj", "wq", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "c_fc", "fc1"),
        *("fc_in", "dense_h_to_4h", "in_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_a"),
        *("in_proj_b", "conv1d", "dt_proj", "A_log", "D", "dt_bias", "input_linear"),
    }
)
_ROWS = frozenset(
    {
        "o_proj",
        "wo",
        "down_proj",
        "w2",
        "c_proj",
        "fc2",
        "fc_out",
        "dense",
        "dense_4h_to_h",
        "out_proj",
        "x_proj",
        "output_linear",
    }
)
_FURTHER = re.compile(r"(^|\.)(mtp|eagle|medusa)[._]")
_TOWER = re.compile(r"(^|[._])(vis(ion|ual)?|image|audio|speech|encoder|vit|siglip|projector|mm|vpm|resampler)")
_EXPERT = re.compile(r"experts\.[0-9]+\.")
_GGUF_LAYER = re.compile(r"blk\.([0-9]{1,4})\.")


@dataclass(slots=True)
class Shares:
    """Bytes of one stage on its fullest device, by what they are."""

    parts: dict[str, Fraction] = field(default_factory=dict)

    def add(self, kind: str, amount: Fraction) -> None:
        """Count bytes."""
        self.parts[kind] = self.parts.get(kind, Fraction(0)) + amount

    @property
    def bytes(self) -> int:
        """All of them, rounded up."""
        return ceil(sum(self.parts.values(), Fraction(0)))

    def lines(self) -> tuple[tuple[str, int], ...]:
        """Return kind → bytes, each rounded up, the most first."""
        return tuple(sorted(((kind, ceil(one)) for kind, one in self.parts.items()), key=lambda one: (-one[1], one[0])))


@dataclass(frozen=True, slots=True)
class Layout:
    """What decides shares besides the names: sizes, the layout, its stages, and what the engine does."""

    shape: Shape
    topology: Topology
    stages: tuple[range, ...]
    engine: str | None = None
    has_draft: bool = False
    is_gguf: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one layer that are alike but for their expert's number, or one tensor outside of the layers.

    `place` is layer, prediction, embedding, head or other; `rest` is the name after the layer's number, and `size`
    the bytes of all of them. `one` is the first of them.
    """

    place: str
    layer: int
    rest: str
    one: Tensor
    size: int


def groups_of(part: Part) -> tuple[Group, ...]:
    """Return the tensors that an engine loads, sorted out once for all layouts."""
    if part.gguf_files:
        return tuple(_gguf_groups(part.gguf_files.values()))
    tensors = {name: placed.tensor for name, placed in part.weights.effective.items()}
    here = {one.name: one for one in part.layered}
    first, last = embedding(tensors), head(tensors)
    found: dict[tuple[str, int, str, tuple[int, ...]], Group] = {}
    for name, tensor in tensors.items():
        layer = here.get(name)
        if _FURTHER.search(name) is not None:
            place, number, rest = "prediction", 0, name
        elif layer is not None:
            place, number, rest = "layer", layer.number, _EXPERT.sub("experts.", layer.rest)
        else:
            place = "embedding" if name == first else "head" if name == last else "other"
            number, rest = 0, name
        key = (place, number, rest, tensor.shape)
        known = found.get(key)
        size = tensor.size + (0 if known is None else known.size)
        found[key] = Group(place, number, rest, tensor, size)
    return tuple(found.values())


def shares_of(groups: Sequence[Group], layout: Layout) -> tuple[tuple[Shares, ...], int]:
    """Return the shares of each stage, and the bytes of layers that only predict further tokens and are left out."""
    found = tuple(Shares() for _ in layout.stages)
    left_out = 0
    has_head = any(group.place == "head" for group in groups)
    for group in groups:
        stage = _stage(group.layer, layout)
        if group.place == "prediction" or (group.place == "layer" and stage is None):
            if layout.has_draft:
                found[-1].add("prediction", Fraction(group.size))
            else:
                left_out += group.size
        elif group.place == "layer":
            kind, share = share_of(group.rest, group.one, layout)
            found[stage or 0].add(kind, group.size * share)
        elif group.place == "embedding":
            _add_vocabulary(
                found,
                group.one,
                layout,
                is_shared=not has_head or (layout.shape.is_tied is True and not layout.is_gguf),
            )
        elif group.place == "head":
            if layout.is_gguf or layout.shape.is_tied is not True:
                found[-1].add("head", group.size * _vocabulary(group.one, layout))
        else:
            at = 0 if _TOWER.search(group.rest) or "norm" not in group.rest else -1
            found[at].add("other", Fraction(group.size))
    return found, left_out


def share_of(rest: str, tensor: Tensor, layout: Layout) -> tuple[str, Fraction]:
    """Return what a tensor of a layer is, and the share of it that the fullest device holds.

    Args:
        rest: of its name, after the layer's number.
        tensor: itself.
        layout: over which it is divided.
    """
    words = rest.split(".")
    tensor_degree, shape = layout.topology.tensor, layout.shape
    if layout.is_gguf:
        return "experts" if "_exps" in rest else "layers", Fraction(1)
    if "experts" in words or ("block_sparse_moe" in words and _ROUTERS.isdisjoint(words)):
        return "experts", _expert_share(words, tensor, layout)
    if any("norm" in word for word in words) or tensor.values <= SMALL_VALUES or words[-1] == "g_idx":
        return "copied", Fraction(1)
    if not _ROUTERS.isdisjoint(words) or not _WHOLE.isdisjoint(words):
        return "copied", Fraction(1)
    if not _KEYS.isdisjoint(words) and shape.kv_heads:
        return "attention", Fraction(ceil(Fraction(shape.kv_heads, tensor_degree)), shape.kv_heads)
    if not _FUSED.isdisjoint(words) and shape.kv_heads and shape.heads:
        queries, keys = (ceil(Fraction(one, tensor_degree)) for one in (shape.heads, shape.kv_heads))
        return "attention", Fraction(queries + 2 * keys, shape.heads + 2 * shape.kv_heads)
    kind = "attention" if any("att" in word for word in words) else "feed forward"
    if not _COLUMNS.isdisjoint(words):
        return kind, Fraction(1, tensor_degree)
    if not _ROWS.isdisjoint(words):
        # Biases and scales of a row-parallel layer belong to its whole output.
        is_whole = len(tensor.shape) < 2 or tensor.shape[-1] == 1
        return kind, Fraction(1) if is_whole else Fraction(1, tensor_degree)
    return "copied", Fraction(1)


def _expert_share(words: list[str], tensor: Tensor, layout: Layout) -> Fraction:
    topology, count = layout.topology, layout.shape.experts
    if topology.expert == 1 or not count:
        spread, slices = Fraction(1), topology.tensor
    else:
        spread = Fraction(ceil(Fraction(count, topology.expert)), count)
        slices = max(1, topology.tensor // topology.expert)
    is_whole = words[-1] == "down_proj_bias" or (not _ROWS.isdisjoint(words) and len(tensor.shape) < 2)
    return spread if is_whole else spread / slices


def _stage(layer: int, layout: Layout) -> int | None:
    return next((number for number, held in enumerate(layout.stages) if layer in held), None)


def _vocabulary(tensor: Tensor, layout: Layout) -> Fraction:
    if layout.engine not in DIVIDES_VOCABULARY or len(tensor.shape) < 2:
        return Fraction(1)
    rows, degree = tensor.shape[0], layout.topology.tensor
    padded = ceil(Fraction(rows, VOCABULARY_STEP)) * VOCABULARY_STEP
    return Fraction(ceil(Fraction(padded, degree)), rows)


def _add_vocabulary(found: tuple[Shares, ...], tensor: Tensor, layout: Layout, *, is_shared: bool) -> None:
    amount = tensor.size * _vocabulary(tensor, layout)
    found[0].add("embedding", amount)
    if is_shared and len(found) > 1 and layout.shape.is_generator:
        found[-1].add("head", amount)


def _gguf_groups(headers: Iterable[Header]) -> Iterator[Group]:
    """Yield the tensors of GGUF files, whose engine divides them by layers and by nothing else."""
    for header in headers:
        for tensor in header.tensors:
            match = _GGUF_LAYER.match(tensor.name)
            if match is not None:
                yield Group("layer", int(match[1]), tensor.name[match.end() :], tensor, tensor.size)
            elif tensor.name == "token_embd.weight":
                yield Group("embedding", 0, tensor.name, tensor, tensor.size)
            else:
                place = "head" if tensor.name == "output.weight" else "other"
                yield Group(place, 0, tensor.name, tensor, tensor.size)
