"""Checks of adapters against the base and the engine: they match, they fit, and they change what they are meant to."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gates.static.composition import Composition, Part
from gates.static.flaw import MAX_ITEMS, Flaw, Where, flaw, listed
from gates.static.tensors import Placed, read_bytes
from gates.static.vocabulary import embedding_rows
from schemas.result import Severity

_PREFIX = re.compile(r"^(base_model\.model\.|base_model\.)?")
_LORA = re.compile(r"^(?P<module>.+)\.lora_(?P<side>A|B)(\.[^.]+)?(\.weight)?$")
_EMBEDDING = re.compile(r"^(?P<module>.+)\.lora_embedding_(?P<side>A|B)(\.[^.]+)?$")
_MAGNITUDE = re.compile(r"\.lora_magnitude_vector(\.|$)")
# Engines hold these modules fused; a flag may name either. Source: packed_modules_mapping of vLLM's models.
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "w13",
    "w3": "w13",
}
_ZERO_BYTES = 64 * 1024 * 1024


def check(c: Composition) -> Iterator[Flaw]:
    """Check every adapter."""
    for adapter, part in c.adapters:
        config = part.object("adapter_config.json")
        if not config:
            if not any(one.file == part.path("adapter_config.json") for one in part.flaws):
                path = part.path("adapter_config.json")
                yield flaw("adapter-incomplete", f"The adapter {adapter.name} has no adapter_config.json.", file=path)
            continue
        if not part.weights.shards and not any(name.endswith(".bin") for name in part.entries):
            path = part.path("adapter_model.safetensors")
            yield flaw("adapter-incomplete", f"The adapter {adapter.name} has no adapter_model.safetensors.", file=path)
        yield from _kind(c, part, config)
        yield from _strength(c, part, config)
        yield from _rank(c, part, config)
        yield from _match(c, part, config)
        yield from _flag(c, part, config)
        yield from _tokens(c, part)


def _at(part: Part, pointer: str) -> Where:
    return {"file": part.path("adapter_config.json"), "pointer": pointer}


def _kind(c: Composition, part: Part, config: Mapping[str, Any]) -> Iterator[Flaw]:
    magnitudes = [name for name in part.weights.effective if _MAGNITUDE.search(name)]
    if (config.get("use_dora") is True or magnitudes) and (doubt := _doubt(c, "dora")) is not None:
        yield flaw(
            "lora-kind-unsupported",
            f"{_engine(c)} does not read DoRA: use_dora is {config.get('use_dora')}, and there are {len(magnitudes)} "
            "magnitude vectors.",
            severity=doubt,
            **_at(part, "/use_dora"),
            found={"use_dora": config.get("use_dora"), "tensors": magnitudes[:MAX_ITEMS]},
        )
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        yield flaw(
            "lora-kind-unsupported",
            f"The adapter is of the type {kind}, and engines serve LORA.",
            **_at(part, "/peft_type"),
            found=kind,
            expected="LORA",
        )
    bias = config.get("bias", "none")
    if bias not in ("none", None) and c.rules.get("lora_bias") is False:
        yield flaw(
            "lora-kind-unsupported",
            f"{_engine(c)} does not read an adapter's biases: bias is {bias}.",
            **_at(part, "/bias"),
            found=bias,
            expected="none",
        )
    saved = config.get("modules_to_save")
    if saved and c.rules.get("lora_modules_to_save") is False:
        yield flaw(
            "lora-kind-unsupported",
            f"{_engine(c)} does not read modules_to_save: {saved}.",
            **_at(part, "/modules_to_save"),
            found=saved,
        )


def _doubt(c: Composition, rule: str) -> Severity | None:
    """Return how much it weighs that the engine may lack an ability; None where it has it, or none is declared."""
    if c.engine is None or c.rules.get(rule) is True:
        return None
    return Severity.BLOCK if c.rules.knows(rule) else Severity.WARN


def _engine(c: Composition) -> str:
    return " ".join(one for one in (c.engine or "The engine", c.declared.version) if one)


# ---------------------------------------------------------------------------------------------- how strong it is


def _strength(c: Composition, part: Part, config: Mapping[str, Any]) -> Iterator[Flaw]:
    if config.get("lora_alpha") == 0:
        yield flaw(
            "adapter-no-effect",
            "lora_alpha is 0, so that the adapter changes nothing.",
            **_at(part, "/lora_alpha"),
            found={"lora_alpha": 0, "scale": 0.0},
        )
    yield from _scaling(c, part, config)
    seconds = {name: placed for name, placed in part.weights.effective.items() if _side(name) == "B"}
    if seconds and all(_is_zero(placed) for placed in seconds.values()):
        yield flaw(
            "adapter-no-effect",
            f"All {len(seconds)} B matrices are zero: the adapter was not trained.",
            file=next(iter(seconds.values())).entry.path,
            found={"zero": len(seconds), "of": len(seconds)},
        )


def _scaling(c: Composition, part: Part, config: Mapping[str, Any]) -> Iterator[Flaw]:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if config.get("use_rslora") is not True or type(rank) is not int or rank < 2 or not isinstance(alpha, int | float):
        return
    doubt = _doubt(c, "rslora")
    if not alpha or doubt is None:
        return
    wanted, used = alpha / math.sqrt(rank), alpha / rank
    yield flaw(
        "lora-scaling",
        f"use_rslora asks for the scale {wanted:g}, and {_engine(c)} would use {used:g}, {wanted / used:g} times less.",
        severity=doubt,
        **_at(part, "/use_rslora"),
        found={"scale": round(used, 6), "factor": round(wanted / used, 6)},
        expected={"scale": round(wanted, 6)},
    )


def _side(name: str) -> str | None:
    match = _LORA.match(name) or _EMBEDDING.match(name)
    return None if match is None else match["side"]


def _is_zero(placed: Placed) -> bool:
    raw = np.frombuffer(read_bytes(placed, _ZERO_BYTES), dtype=np.uint8)
    if not raw.any():
        return placed.size > 0
    # Minus zero is zero too: only the highest bit of each number is set.
    width = max(1, placed.size // max(1, placed.tensor.values))
    return (
        width <= 8
        and not (raw[: len(raw) // width * width].reshape(-1, width)[:, -1] & 0x7F).any()
        and not raw.reshape(-1, width)[:, :-1].any()
    )


# ------------------------------------------------------------------------------------------------ what it fits


def _rank(c: Composition, part: Part, config: Mapping[str, Any]) -> Iterator[Flaw]:
    rank = config.get("r")
    if type(rank) is not int or rank < 1:
        yield flaw("adapter-incomplete", f"adapter_config.json says r {rank!r}.", **_at(part, "/r"), found=rank)
        return
    ranks = config.get("rank_pattern")
    largest = (
        max([rank, *[one for one in (ranks or {}).values() if type(one) is int]]) if isinstance(ranks, dict) else rank
    )
    asked = c.declared.arguments.number("--max-lora-rank")
    limit = asked if asked is not None else c.rules.get("lora_default_rank")
    told = c.declared.arguments.has("--enable-lora") or asked is not None
    if isinstance(limit, int) and largest > limit and told:
        yield flaw(
            "lora-rank-too-large",
            f"The adapter has rank {largest}, and {_engine(c)} takes up to {limit}.",
            **_at(part, "/r"),
            found=largest,
            expected={"at_most": limit},
            advice=f"Give the engine --max-lora-rank {largest}.",
        )
    patterned = isinstance(ranks, dict) and bool(ranks)
    for name, placed in sorted(part.weights.effective.items()):
        match, shape = _LORA.match(name), placed.tensor.shape
        if match is None or len(shape) != 2 or patterned:
            continue
        found = shape[0] if match["side"] == "A" else shape[1]
        if found != rank:
            yield flaw(
                "lora-shape",
                f"{name} has the shape {list(shape)}, and r is {rank}.",
                file=placed.entry.path,
                pointer=name,
                found=list(shape),
                expected={"r": rank},
            )
            return


def modules_of(part: Part) -> dict[str, dict[str, Placed]]:
    """Return the modules that an adapter changes, without PEFT's prefix: name → side → tensor."""
    found: dict[str, dict[str, Placed]] = {}
    for name, placed in part.weights.effective.items():
        match = _LORA.match(name) or _EMBEDDING.match(name)
        if match is not None:
            found.setdefault(_PREFIX.sub("", match["module"], count=1), {})[match["side"]] = placed
    return found


def _match(c: Composition, part: Part, config: Mapping[str, Any]) -> Iterator[Flaw]:
    base = c.model.weights.effective
    modules = modules_of(part)
    if not base or not modules:
        yield from _by_config(c, part, config, modules)
        return
    there = {name.rpartition(".")[0] for name in base}
    matched = [module for module in modules if module in there]
    if len(matched) == len(modules):
        yield from _shapes(c, modules)
        return
    missing = sorted(set(modules) - there)
    alike = [name for name in sorted(there) if name.endswith("." + _tail(missing[0]))]
    yield flaw(
        "lora-no-match",
        f"{len(matched)} of {len(modules)} of the adapter's modules are in the base: {listed(missing)} is not.",
        severity=Severity.BLOCK,
        file=part.path("adapter_model.safetensors"),
        found={"matched": len(matched), "of": len(modules), "missing": missing[:MAX_ITEMS]},
        expected={"matched": len(modules), "in_base": alike[:3]},
    )


def _tail(module: str) -> str:
    match = re.search(r"layers\.[0-9]+\..*", module)
    return match[0] if match else module.rpartition(".")[2]


def _by_config(c: Composition, part: Part, config: Mapping[str, Any], modules: Mapping[str, Any]) -> Iterator[Flaw]:
    """Without tensors on both sides, the names in target_modules are held against the base's."""
    base = c.model.weights.effective
    targets = targets_of(config)
    if modules or not base or not targets:
        return
    last = {name.rpartition(".")[0].rpartition(".")[2] for name in base}
    lost = sorted(target for target in targets if target.rpartition(".")[2] not in last)
    if len(lost) == len(targets):
        yield flaw(
            "lora-no-match",
            f"0 of {len(targets)} target modules are in the base: {listed(lost)}.",
            **_at(part, "/target_modules"),
            found={"matched": 0, "of": len(targets), "missing": lost},
        )


def _shapes(c: Composition, modules: Mapping[str, Mapping[str, Placed]]) -> Iterator[Flaw]:
    base = c.model.weights.effective
    for module, sides in sorted(modules.items()):
        weight = base.get(f"{module}.weight")
        if weight is None or len(weight.tensor.shape) != 2 or not weight.tensor.dtype.startswith(("F", "BF")):
            continue
        rows, columns = weight.tensor.shape
        if module.endswith("embed_tokens"):
            continue  # its A and B lie the other way round
        wanted = {"A": columns, "B": rows}
        for side, placed in sorted(sides.items()):
            shape = placed.tensor.shape
            found = None if len(shape) != 2 else shape[1] if side == "A" else shape[0]
            if found is not None and found != wanted[side]:
                yield flaw(
                    "lora-shape",
                    f"{placed.tensor.name} has the shape {list(shape)}, and {module}.weight {[rows, columns]}.",
                    file=placed.entry.path,
                    pointer=placed.tensor.name,
                    found=list(shape),
                    expected={"in": columns, "out": rows},
                )
                return


def targets_of(config: Mapping[str, Any]) -> list[str]:
    """Return an adapter's target modules; a single word may stand without a list."""
    told = config.get("target_modules")
    if isinstance(told, str):
        return [] if told == "all-linear" or re.search(r"[*\\|()^$\[]", told) else [told]
    return [one for one in told if isinstance(one, str)] if isinstance(told, list) else []


def _flag(c: Composition, part: Part, config: Mapping[str, Any]) -> Iterator[Flaw]:
    name = "--lora-target-modules"
    words = [word for text in c.declared.arguments.all(name) for word in re.split(r"[,\s]+", text) if word]
    if not words or "all" in words:
        return
    modules = {module.rpartition(".")[2] for module in modules_of(part)} or {
        target.rpartition(".")[2] for target in targets_of(config)
    }
    if not modules:
        return
    allowed = {_FUSED.get(word.rpartition(".")[2], word.rpartition(".")[2]) for word in words}
    kept = sorted(module for module in modules if _FUSED.get(module, module) in allowed)
    if len(kept) == len(modules):
        return
    yield flaw(
        "lora-no-match",
        f"{name} {' '.join(words)} lets {len(kept)} of the adapter's {len(modules)} kinds of modules through: "
        f"{listed(sorted(modules))}.",
        severity=Severity.BLOCK if not kept else Severity.WARN,
        file=part.path("adapter_config.json"),
        pointer=name,
        found={"matched": len(kept), "of": len(modules), "flag": words, "modules": sorted(modules)},
    )


def _tokens(c: Composition, part: Part) -> Iterator[Flaw]:
    """Find tokens of the adapter's own, for which the base has no row."""
    odd = [
        name
        for name in part.weights.effective
        if "token_adapter" in name
        or "trainable_tokens" in name
        or name.endswith((".embed_tokens.weight", ".lm_head.weight"))
    ]
    if odd:
        yield flaw(
            "unsupported-lora-tensor",
            f"{len(odd)} tensors replace or add rows of the embedding, which engines do not swap: {listed(odd)}.",
            file=part.weights.effective[odd[0]].entry.path,
            pointer=odd[0],
            found=odd[:MAX_ITEMS],
        )
    theirs, ours = part.tokenizer, c.model.tokenizer
    rows = embedding_rows(c.model)
    if theirs is None or (ours is None and rows is None):
        return
    known = {} if ours is None else ours.ids
    beyond = {
        text: number
        for text, number in theirs.ids.items()
        if (text not in known if ours is not None else False) or (rows is not None and number >= rows)
    }
    if beyond:
        texts = sorted(beyond, key=lambda text: beyond[text])
        used = [text for text in texts if any(text in source for source, _ in part.templates)]
        also = f"; its template uses {listed(used)}" if used else ""
        yield flaw(
            "lora-new-tokens",
            f"The adapter's tokenizer has {len(beyond)} tokens that the base does not: {listed(texts)}{also}.",
            file=part.path("tokenizer.json"),
            found={"ids": sorted(beyond.values())[:MAX_ITEMS], "tokens": texts[:MAX_ITEMS], "in_template": used},
            expected={"rows": rows},
        )
