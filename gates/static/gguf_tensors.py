"""Which tensors llama.cpp needs of a GGUF file, by architecture.

Only what every version of its loader asks for is here; a tensor that some files carry fused is one of several ways.

Source: llama-model.cpp and llama-arch.cpp of llama.cpp.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

from gates.files.header import Array, Tensor

ADVICE: Final = "Fetch the file again; if it stays so, convert the model again from a directory that is whole."
"""What to do about a file whose tensors are not those that its header needs."""

Ways = tuple[tuple[str, ...], ...]
"""Sets of tensors of which one has to be there whole."""

_ATTENTION: Final[tuple[Ways, ...]] = (
    (("attn_norm",),),
    (("attn_q", "attn_k", "attn_v"), ("attn_qkv",)),
    (("attn_output",),),
)
_DENSE: Final[tuple[Ways, ...]] = ((("ffn_up",),), (("ffn_down",),))
_GATED: Final[tuple[Ways, ...]] = ((("ffn_gate", "ffn_up"),), (("ffn_down",),))
_EXPERTS: Final[tuple[Ways, ...]] = (
    (("ffn_gate_inp",),),
    (("ffn_up_exps",), ("ffn_gate_up_exps",), ("ffn_up.0",)),
    (("ffn_down_exps",), ("ffn_down.0",)),
)
_NORM: Final[Ways] = (("ffn_norm",),)
_AFTER: Final[tuple[Ways, ...]] = ((("post_attention_norm",),), (("post_ffw_norm",),))
_HEADS: Final[tuple[Ways, ...]] = ((("attn_q_norm",),), (("attn_k_norm",),))

BLOCK: Final[Mapping[str, tuple[Ways, ...]]] = {
    "llama": (
        *_ATTENTION,
        _NORM,
        (("ffn_gate", "ffn_up", "ffn_down"), ("ffn_gate_inp", "ffn_down_exps"), ("ffn_gate_inp", "ffn_down.0")),
    ),
    "qwen2": (*_ATTENTION, _NORM, *_GATED),
    "qwen2moe": (*_ATTENTION, _NORM, *_EXPERTS),
    "qwen3": (*_ATTENTION, *_HEADS, _NORM, *_GATED),
    "qwen3moe": (*_ATTENTION, *_HEADS, _NORM, *_EXPERTS),
    "gemma": (*_ATTENTION, _NORM, *_GATED),
    "gemma2": (*_ATTENTION, _NORM, *_AFTER, *_GATED),
    "gemma3": (*_ATTENTION, *_HEADS, _NORM, *_AFTER, *_GATED),
    "phi3": (*_ATTENTION, _NORM, *_DENSE),
    "gpt-oss": (*_ATTENTION, (("post_attention_norm",),), (("attn_sinks",),), *_EXPERTS),
}
"""Architecture → what each of its blocks needs, as weights. Experts and dense layers of one are both counted in."""
NEEDED: Final = "output_norm.weight"


def missing(architecture: str, metadata: Mapping[str, Any], names: AbstractSet[str]) -> Iterator[str]:
    """Yield the tensors that an architecture needs and no file holds; nothing for one that is not in the table."""
    if architecture not in BLOCK:
        return
    if NEEDED not in names:
        yield NEEDED
    count = metadata.get(f"{architecture}.block_count")
    if type(count) is not int:
        return
    for number in range(min(count, 4096)):
        stem = f"blk.{number}."
        if not any(name.startswith(stem) for name in names):
            continue  # told as a block without any tensor
        for ways in BLOCK[architecture]:
            lacking = [[one for one in way if not _holds(names, stem + one)] for way in ways]
            if all(lacking):
                yield from (f"{stem}{one}.weight" for one in min(lacking, key=len))


def _holds(names: AbstractSet[str], stem: str) -> bool:
    return f"{stem}.weight" in names


_SHAPES: Final[Mapping[str, tuple[str, ...]]] = {
    "token_embd": ("V", "H"),
    "output": ("V", "H"),
    "output_norm": ("H",),
    "attn_norm": ("H",),
    "ffn_norm": ("H",),
    "attn_q": ("Q", "H"),
    "attn_k": ("K", "H"),
    "attn_v": ("W", "H"),
    "attn_output": ("H", "O"),
    "ffn_up": ("F", "H"),
    "ffn_gate": ("F", "H"),
    "ffn_down": ("H", "F"),
}
"""Tensor → its sizes: vocabulary, hidden, queries, keys, values, the attention's output, and the feed-forward layer."""
_FUSED: Final = frozenset({"phi3"})
"""Architectures whose ffn_up holds the gate too."""


def misshapen(
    architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield tensors whose shape is another than the header makes it: name, shape, and the shape that it must have.

    llama.cpp loads nothing then. Sizes that differ from layer to layer are left out.
    """
    if architecture not in BLOCK:
        return
    sizes = _sizes(architecture, metadata)
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        inner = stem.split(".", 2)[2] if stem.startswith("blk.") and stem.count(".") == 2 else stem
        if stem == name or inner not in _SHAPES or (inner == "ffn_up" and architecture in _FUSED):
            continue
        wanted = [sizes.get(one) for one in _SHAPES[inner]]
        known = tuple(one for one in wanted if one is not None)
        if len(known) == len(wanted) and known != tensor.shape:
            yield name, tensor.shape, known


def _sizes(architecture: str, metadata: Mapping[str, Any]) -> dict[str, int]:
    def told(key: str) -> int | None:
        value = metadata.get(f"{architecture}.{key}")
        return value if type(value) is int and value > 0 else None

    hidden, heads, keys = told("embedding_length"), told("attention.head_count"), told("attention.head_count_kv")
    keys = heads if f"{architecture}.attention.head_count_kv" not in metadata else keys
    usual = hidden // heads if hidden and heads else None
    key, value = told("attention.key_length") or usual, told("attention.value_length") or usual
    tokens = metadata.get("tokenizer.ggml.tokens")
    found = {
        "V": tokens.count if isinstance(tokens, Array) else None,
        "H": hidden,
        "Q": heads * key if heads and key else None,
        "K": keys * key if keys and key else None,
        "W": keys * value if keys and value else None,
        "O": heads * value if heads and value else None,
        "F": told("feed_forward_length"),
    }
    return {name: size for name, size in found.items() if size is not None}
