"""What a model keeps of each sequence: keys and values, compressed latents, windows of them, or a constant state."""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

BLOCK_TOKENS = 16
"""Tokens in a block of paged cache. Source: vLLM's default; a sequence takes whole blocks."""

Number = int | Fraction


@dataclass(frozen=True, slots=True)
class Kept:
    """What one layer keeps of one sequence.

    `kind` is full, window, latent or state. `token_bytes` is for one head and one token, `state_bytes` for one head
    and a whole sequence. `heads` are divided over tensor-parallel devices, and copied where there are fewer heads
    than devices; 0 means that each device keeps all. `window` bounds the tokens that are kept.
    """

    kind: str
    heads: int
    token_bytes: Number = 0
    state_bytes: Number = 0
    window: int | None = None

    def heads_on(self, tensor: int) -> int:
        """Return the heads that the fullest of `tensor` devices keeps."""
        return 1 if self.heads == 0 else ceil(Fraction(self.heads, tensor))

    def bytes_of(self, tokens: int, tensor: int, block: int) -> Number:
        """Return the bytes of a sequence of `tokens` on one of `tensor` devices, in whole blocks."""
        kept = tokens if self.window is None else min(tokens, self.window)
        whole = ceil(Fraction(kept, block)) * block
        return self.heads_on(tensor) * (self.token_bytes * whole + self.state_bytes)


@dataclass(frozen=True, slots=True)
class Cache:
    """What every layer keeps, in the order of layers; a layer may keep nothing, or several things."""

    layers: tuple[tuple[Kept, ...], ...]
    dtype: str = ""
    assumed: tuple[str, ...] = ()

    def sequence_bytes(
        self, tokens: int, *, tensor: int = 1, layers: range | None = None, block: int = BLOCK_TOKENS
    ) -> int:
        """Return the bytes that one sequence takes on one device.

        Args:
            tokens: cached, 1 or more.
            tensor: devices that share each layer.
            layers: those of one pipeline stage; all by default.
            block: tokens in a block of cache.
        """
        chosen = self.layers if layers is None else self.layers[layers.start : layers.stop]
        return ceil(sum((one.bytes_of(tokens, tensor, block) for kept in chosen for one in kept), Fraction(0)))

    def token_bytes(self, *, tensor: int = 1) -> int:
        """Return the bytes that each further token takes on one device while no window is full."""
        return ceil(sum((one.heads_on(tensor) * one.token_bytes for kept in self.layers for one in kept), Fraction(0)))

    def further_bytes(self, *, tensor: int = 1) -> int:
        """Return the bytes that each further token takes on one device once every window is full."""
        kept = (one for layer in self.layers for one in layer if one.window is None)
        return ceil(sum((one.heads_on(tensor) * one.token_bytes for one in kept), Fraction(0)))

    @property
    def windows(self) -> list[int]:
        """Widths of the windows, in tokens, the smallest first."""
        return sorted({one.window for layer in self.layers for one in layer if one.window is not None})

    def kinds(self) -> dict[str, int]:
        """Return how many layers keep what: kind → layers; `none` for those that keep nothing."""
        found: dict[str, int] = {}
        for kept in self.layers:
            for kind in {one.kind for one in kept} or {"none"}:
                found[kind] = found.get(kind, 0) + 1
        return dict(sorted(found.items()))


def kv_bytes(
    *, sequences: int, layers: int, tokens: int, width: int, element_bytes: Number, devices_sharing: int = 1
) -> int:
    """Return the bytes of a key-value cache, `2 · B · L · T · d_KV · b`, on each of the devices that share it evenly.

    Args:
        sequences: active at once (B).
        layers: of the model (L).
        tokens: cached of each sequence (T).
        width: key-value heads times head dimension (d_KV).
        element_bytes: of one stored number (b): 2 for BF16 and FP16, 1 for 8 bits.
        devices_sharing: by which key-value heads are divided, 1 or more.

    Source: equation 4.3, a lower bound: neither block padding nor allocator metadata is in it.
    """
    return ceil(Fraction(2 * sequences * layers * tokens * width) * element_bytes / devices_sharing)


def uniform(layers: int, heads: int, head_dim: int, element_bytes: Number) -> Cache:
    """Return the cache of a model whose layers all attend to everything, with keys and values of the same width."""
    one = Kept("full", heads, 2 * head_dim * element_bytes)
    return Cache(((one,),) * layers)
