"""Checks of heads that draft from the target's own states: EAGLE, Medusa, and layers that came with the target.

Source: vllm/model_executor/models/llama_eagle.py, llama_eagle3.py and medusa.py, and vllm/config/speculative.py, of
0.32.0.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gates.static.composition import Composition, Part
from gates.static.flaw import Flaw, flaw

_LAYERS: Final = re.compile(r"(^|\.)(mtp|nextn|eh_proj|shared_head)", re.IGNORECASE)
_KEYS: Final = re.compile(r"(?i)(mtp|nextn|n_predict)")
_OWN: Final = ("mtp", "deepseek_mtp")


def check(c: Composition, part: Part) -> Iterator[Flaw]:
    """Check that a head has the target's sizes, and a vocabulary that leads to the target's."""
    inner = part.config.get("transformer_layer_config")
    told: Mapping[str, Any] = {**part.config, **(inner if isinstance(inner, dict) else {})}
    yield from _hidden(c, part, told)
    yield from _vocabulary(c, part, told)


def _hidden(c: Composition, part: Part, told: Mapping[str, Any]) -> Iterator[Flaw]:
    target = c.model.shape.hidden
    wanted, key = _size(told, "target_hidden_size"), "target_hidden_size"
    if wanted is None:
        wanted, key = _size(told, "hidden_size"), "hidden_size"
    if target is None or wanted is None:
        return
    file = part.path("config.json")
    joined = _shape(part, "fc.weight")
    if wanted != target:
        yield flaw(
            "draft-shape",
            f"The draft reads states of {wanted} numbers ({key}), and the target's have {target}.",
            file=file,
            pointer=f"/{key}",
            found={"draft": wanted},
            expected={"target": target},
        )
    elif joined is not None and len(joined) == 2 and joined[1] % target:
        yield flaw(
            "draft-shape",
            f"The draft's fc.weight reads {joined[1]} numbers, which are no whole number of the target's {target}.",
            file=file,
            pointer="fc.weight",
            found={"shape": list(joined)},
            expected={"multiple_of": target},
        )


def _vocabulary(c: Composition, part: Part, told: Mapping[str, Any]) -> Iterator[Flaw]:
    target = c.model.shape.vocabulary
    all_tokens, own = _size(told, "vocab_size"), _size(told, "draft_vocab_size")
    file = part.path("config.json")
    if target is not None and all_tokens is not None and all_tokens != target:
        yield flaw(
            "draft-vocab",
            f"The draft is made for {all_tokens} tokens, and the target has {target}.",
            file=file,
            pointer="/vocab_size",
            found={"draft": all_tokens},
            expected={"target": target},
        )
        return
    rows = own or all_tokens
    head, places = _shape(part, "lm_head.weight"), _shape(part, "d2t")
    if rows is not None and head is not None and head[0] != rows:
        said = f"The draft's head has {head[0]} rows, and its configuration says {rows} tokens."
        yield _rows(part, "lm_head.weight", said, head[0], rows)
    if own is None or target is None or own == target or not part.weights.shards:
        return
    if places is None:
        said = f"The draft has {own} tokens of its own, and no d2t says which of the target's {target} they are."
        yield _rows(part, "d2t", said, "no d2t", own)
    elif places[0] != own:
        said = f"The draft has {own} tokens of its own, and d2t says of {places[0]} which of the target's they are."
        yield _rows(part, "d2t", said, places[0], own)


def _rows(part: Part, name: str, said: str, found: object, expected: int) -> Flaw:
    file = next((one.entry.path for key, one in part.weights.effective.items() if key.endswith(name)), None)
    where = file or part.path("model.safetensors")
    return flaw("draft-vocab", said, file=where, pointer=name, found=found, expected=expected)


def _size(told: Mapping[str, Any], key: str) -> int | None:
    value = told.get(key)
    return value if type(value) is int and value > 0 else None


def _shape(part: Part, name: str) -> tuple[int, ...] | None:
    tensors = part.weights.effective
    found = next((one for key, one in tensors.items() if key == name or key.endswith(f".{name}")), None)
    return None if found is None or not found.tensor.shape else tuple(found.tensor.shape)


def own(c: Composition) -> Iterator[Flaw]:
    """Find a target that is asked to draft by layers of its own, and has none."""
    speculative = c.declared.arguments.json("--speculative-config") or {}
    method = c.declared.draft_method or speculative.get("method")
    elsewhere = c.draft is not None or speculative.get("model") is not None
    if not isinstance(method, str) or method.lower() not in _OWN or elsewhere or c.model.gguf is not None:
        return
    told = {**c.model.config, **c.model.shape.text}
    said = {key: value for key, value in told.items() if _KEYS.search(key) and value}
    if said or any(_LAYERS.search(name) for name in c.model.weights.effective):
        return
    yield flaw(
        "draft-incomplete",
        f"The target is to draft by layers of its own ({method}), and has none.",
        file=c.model.path("config.json"),
        pointer="/num_nextn_predict_layers",
        found={"method": method, "layers": 0},
        expected={"layers": "1 or more"},
        advice="Draft by another method, or use the checkpoint that holds the layers.",
    )
