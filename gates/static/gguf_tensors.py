"""Which tensors llama.cpp needs of a GGUF file, by architecture.

Only what every version of its loader asks for is here; a tensor that some files carry fused is one of several ways.

Source: llama-model.cpp and llama-arch.cpp of llama.cpp.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

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
