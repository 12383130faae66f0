"""What the header of a GGUF file says when it is an adapter and not a model: what it is for, and its pairs of matrices.

Source: llama-adapter.cpp of llama.cpp, and what its convert_lora_to_gguf.py writes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gates.files.header import Header, Tensor, Value

KIND, TYPE, ALPHA = "general.type", "adapter.type", "adapter.lora.alpha"
"""Keys: what the file is, which kind of adapter, and how strong it is."""
INVOCATION: Final = "adapter.alora.invocation_tokens"
"""Key of an adapter that is in force only after tokens of its own."""
EMBEDDING: Final = "token_embd.weight"
"""The one tensor whose matrices lie the other way round."""
_SIDE = re.compile(r"(?P<target>.+)\.lora_(?P<side>[ab])")
_IN_BLOCK = re.compile(r"blk\.[0-9]+\.")


@dataclass(frozen=True, slots=True)
class Packed:
    """The tensors of an adapter: name of the base's tensor → side → matrix, and what belongs to no pair."""

    pairs: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    others: tuple[Tensor, ...] = ()

    @property
    def rank(self) -> int | None:
        """The largest rank of a pair; None without any."""
        return max((rank_of(sides["b"]) for sides in self.pairs.values() if "b" in sides), default=None)

    @property
    def modules(self) -> list[str]:
        """What is changed, whichever block it is in, sorted: `attn_q`."""
        return sorted({_IN_BLOCK.sub("", name, count=1).removesuffix(".weight") for name in self.pairs})


def is_adapter(metadata: Mapping[str, Value]) -> bool:
    """Tell whether a header is that of an adapter, of whichever kind."""
    return metadata.get(KIND) == "adapter"


def rank_of(b: Tensor) -> int:
    """Return the rank by matrix B, as the engine takes it."""
    return b.shape[-1]


def packed(header: Header) -> Packed:
    """Return the matrices of an adapter."""
    pairs: dict[str, dict[str, Tensor]] = {}
    others = []
    for tensor in header.tensors:
        match = _SIDE.fullmatch(tensor.name)
        if match is None:
            others.append(tensor)
        else:
            pairs.setdefault(match["target"], {})[match["side"]] = tensor
    return Packed(pairs, tuple(others))
