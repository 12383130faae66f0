"""Names of tensors: which are there, what they are for, and in which form a module carries its weights."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gates.static.tensors import Placed

CARRIERS = ("weight", "qweight", "weight_packed", "weight_q", "weight_scale", "W_q", "q_weight", "B")
"""How a module's weights may be called; packed forms stand for the plain one. The last ones are HQQ's, ExLlamaV2's and
Marlin's own."""
EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
    "embed_in.weight",
    "embeddings.weight",
)
_BELOW_EMBEDDINGS = tuple(f".{ending}" for ending in EMBEDDINGS)
HEADS = ("lm_head.weight", "output.weight", "embed_out.weight", "output_layer.weight", "lm_head.linear.weight")
LINEARS = re.compile(
    r"(self_attn|self_attention|attention|attn)\.((q|k|v|o|qkv|out|q_a|q_b|kv_b|kv_a)_proj(_with_mqa)?"
    r"|query_key_value|dense|c_attn|c_proj|Wqkv|wqkv|wo)"
    r"|(mlp|feed_forward|ffn|shared_mlp|mlp\.shared_experts?|feed_forward\.shared_expert)\.((gate|up|down|gate_up)_proj"
    r"|dense_h_to_4h|dense_4h_to_h|c_fc|c_proj|fc1|fc2|fc_in|fc_out|w1|w2|w3)"
    r"|(mlp|block_sparse_moe|feed_forward)\.experts\.[0-9]+\.(gate_proj|up_proj|down_proj|w1|w2|w3)"
    r"|fc1|fc2"
)
KEYS = re.compile(r"(^|\.)(k_proj|qkv_proj|query_key_value|c_attn|Wqkv|wqkv|W_pack)\.")
"""What tells a layer that keeps keys and values."""
_LAYER = re.compile(r"^(?P<prefix>(?:[^.]+\.)*?)(?:layers|h|blocks)\.(?P<number>[0-9]{1,4})\.(?P<rest>.+)$")
_NUMBERED = re.compile(r"\.[0-9]+\.")
"""Of one of several alike, such as layers: no head is."""
_OTHER_TOWER = re.compile(
    r"(^|[._])(vis(ion|ual)?|image|audio|speech|encoder|vit|siglip|mtp|mm|talker|code2wav|vpm|resampler)"
)
_TOWER = re.compile(r"(^|[._])(vis(ion|ual)|image|audio|speech|vit|siglip|mm|multi_modal|vpm|resampler|mlp1)")
"""Of what a model sees or hears with; layers that predict further tokens are none of it."""


def is_of_tower(name: str) -> bool:
    """Say whether a tensor is one that pictures or sounds go through before the language model."""
    return _TOWER.search(name) is not None


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
        for name in tensors
        if (name.endswith(_BELOW_EMBEDDINGS) or name in EMBEDDINGS) and not _OTHER_TOWER.search(name)
    ]
    return min(found, key=lambda name: (len(name), name), default=None)


def head(tensors: Mapping[str, Any], ends: Sequence[str] = HEADS) -> str | None:
    """Return the name of the language-model head in whatever form it is carried, or None.

    Args:
        tensors: that are there.
        ends: how it may be called.
    """
    wanted = [ending.removesuffix("weight") + carrier for ending in ends for carrier in CARRIERS]
    # Of tens of thousands a few are left, among which the first kind that is there decides.
    suffixes = tuple(wanted)
    likely = [name for name in tensors if name.endswith(suffixes) and not _NUMBERED.search(name)]
    for ending in wanted:
        for name in likely:
            if name == ending or name.endswith(f".{ending}"):
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
