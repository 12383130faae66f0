"""Checks of weights in Mistral's own form: what params.json makes of them is what consolidated files hold.

Source: vLLM 0.32, transformers_utils/configs/mistral.py and the names that models/llama.py maps (`mistral_mapping`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from gates.static import misshapen
from gates.static.composition import Composition, Part
from gates.static.context import reads_params
from gates.static.flaw import MAX_ITEMS, Flaw, flaw, listed
from gates.static.misshapen import Misshapen
from gates.static.shape import MOST
from gates.static.tensors import CONSOLIDATED, Placed
from schemas.short import agreeing, many

_PLAIN = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3"})
_KEYS = ("dim", "n_layers", "n_heads", "hidden_dim", "vocab_size")
_OTHERWISE = ("moe", "q_lora_rank", "kv_lora_rank")
"""Settings of decoders whose layers hold other tensors."""

Sizes = Mapping[str, int]


def check(c: Composition) -> Iterator[Flaw]:
    """Hold consolidated files against params.json where an engine reads both."""
    part = c.model
    files = [name for name in part.weights.shards if CONSOLIDATED.fullmatch(name)]
    if not files or reads_params(c) is None or any(part.weights.shards[name].header is None for name in files):
        return
    told = part.object("params.json")
    sizes = _sizes(told)
    if sizes is None or any(told.get(key) for key in _OTHERWISE):
        return
    tensors = {name: placed for file in files for name, placed in part.weights.held(file).items()}
    yield from _held(part, dict(_needed(sizes, told)), tensors, sizes)


def _sizes(told: Mapping[str, Any]) -> Sizes | None:
    """Return the sizes that params.json says; None where one of those that are needed is no size."""
    found = {key: told.get(key) for key in _KEYS}
    found["head_dim"] = told.get("head_dim")
    found["n_kv_heads"] = told.get("n_kv_heads", told.get("n_heads"))
    sizes = {key: one for key, one in found.items() if type(one) is int and one > 0}
    return sizes if len(sizes) == len(found) and sizes["n_layers"] <= MOST["layers"] else None


def _needed(sizes: Sizes, told: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    dim, inner, rows = sizes["dim"], sizes["hidden_dim"], sizes["vocab_size"]
    queries, keys = sizes["n_heads"] * sizes["head_dim"], sizes["n_kv_heads"] * sizes["head_dim"]
    yield "tok_embeddings.weight", (rows, dim)
    for layer in range(sizes["n_layers"]):
        stem = f"layers.{layer}."
        yield f"{stem}attention.wq.weight", (queries, dim)
        yield f"{stem}attention.wk.weight", (keys, dim)
        yield f"{stem}attention.wv.weight", (keys, dim)
        yield f"{stem}attention.wo.weight", (dim, queries)
        yield f"{stem}attention_norm.weight", (dim,)
        yield f"{stem}ffn_norm.weight", (dim,)
        yield f"{stem}feed_forward.w1.weight", (inner, dim)
        yield f"{stem}feed_forward.w2.weight", (dim, inner)
        yield f"{stem}feed_forward.w3.weight", (inner, dim)
    yield "norm.weight", (dim,)
    if told.get("tied_embeddings") is not True:
        yield "output.weight", (rows, dim)


def _held(
    part: Part, needed: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Placed], sizes: Sizes
) -> Iterator[Flaw]:
    file = part.path("params.json")
    inside = {name for name in needed if name.startswith("layers.")}
    if not any(name in tensors for name in inside):
        return  # another decoder's names, such as one inside a model that hears
    lost = sorted(name for name in inside if name not in tensors)
    if lost:
        yield flaw(
            "tensor-missing",
            f"params.json says {many(sizes['n_layers'], 'layer')}, and {many(len(lost), 'tensor')} of them "
            f"{agreeing(len(lost), 'is', 'are')} in no file: {listed(lost)}.",
            file=file,
            pointer="/n_layers",
            found={"count": len(lost), "missing": lost[:MAX_ITEMS]},
            expected={"count": 0, "missing": []},
            advice="Fetch the consolidated files again, or the params.json that belongs to them.",
        )
    wrong = [
        Misshapen(name, tensors[name].entry.path, tensors[name].tensor.shape, shape)
        for name, shape in needed.items()
        if name in tensors and tensors[name].tensor.dtype in _PLAIN and tensors[name].tensor.shape != shape
    ]
    advice = "Use the params.json that belongs to these weights."
    yield from misshapen.flaws(wrong, "params.json", sizes=sizes, advice=advice)
