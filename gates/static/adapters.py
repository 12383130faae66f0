"""Checks of adapters against the base and the engine: they match, they fit, and they change what they are meant to."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gates.static import adapter_fit, gguf_adapter, tekken
from gates.static.adapter_fit import LORA, at, modules_of, pattern_of, targets_of
from gates.static.composition import Composition, Part
from gates.static.declared import Adapter
from gates.static.flaw import MAX_ITEMS, Flaw, flaw, listed
from gates.static.tensors import Placed, is_zero
from gates.static.vocabulary import embedding_rows
from gates.static.words import Tokenizer, first_difference, special_texts
from schemas.result import Severity
from schemas.short import agreeing, many

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
_ABOVE_ZERO = "a number above 0"
_ROWS = re.compile(r"\.(embed_tokens|lm_head|wte|embed_out)\.(modules_to_save\.)?([^.]+\.)?weight$")


def check(c: Composition) -> Iterator[Flaw]:
    """Check every adapter."""
    for adapter, part in c.adapters:
        if gguf_adapter.is_in_force(c, part):
            yield from gguf_adapter.check(c, adapter.name, part)
            continue
        config = part.object("adapter_config.json")
        if not config:
            if not any(one.file == part.path("adapter_config.json") for one in part.flaws):
                path = part.path("adapter_config.json")
                yield _absent(adapter, path)
            continue
        if not part.weights.shards and not any(name.endswith(".bin") for name in part.entries):
            path = part.path("adapter_model.safetensors")
            yield _absent(adapter, path)
        if c.engine == "llamacpp" and part.weights.shards:
            yield flaw(
                "format-unsupported",
                f"llama.cpp reads adapters in GGUF, and {adapter.name} is in safetensors.",
                file=part.path(next(iter(part.weights.shards))),
                found="safetensors",
                expected="gguf",
                advice=f"Convert it with {gguf_adapter.CONVERTER}, or choose an engine that reads it.",
            )
        yield from _kind(c, part, config)
        yield from _features(c, part, config)
        yield from _strength(c, part, config)
        yield from _limit(c, part, config)
        yield from adapter_fit.check(c, part, config)
        yield from _flag(c, part, config)
        yield from _tokens(c, part)


def _absent(adapter: Adapter, path: str) -> Flaw:
    name = path.rpartition("/")[2]
    said = f"The adapter {adapter.name} has no {name}."
    return flaw("adapter-incomplete", said, file=path, found=None, expected=name)


def _kind(c: Composition, part: Part, config: Mapping[str, Any]) -> Iterator[Flaw]:
    magnitudes = [name for name in part.weights.effective if _MAGNITUDE.search(name)]
    if (config.get("use_dora") is True or magnitudes) and (doubt := _doubt(c, "dora")) is not None:
        yield flaw(
            "lora-kind-unsupported",
            f"{_engine(c)} does not read DoRA: use_dora is {config.get('use_dora')}, and there "
            f"{agreeing(len(magnitudes), 'is', 'are')} {many(len(magnitudes), 'magnitude vector')}.",
            severity=doubt,
            **at(part, "/use_dora"),
            found={"use_dora": config.get("use_dora"), "tensors": magnitudes[:MAX_ITEMS]},
            expected={"use_dora": False, "tensors": []},
        )
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        yield flaw(
            "lora-kind-unsupported",
            f"The adapter is of the type {kind}, and engines serve LORA.",
            **at(part, "/peft_type"),
            found=kind,
            expected="LORA",
        )
    bias = config.get("bias", "none")
    if bias not in ("none", None) and c.rules.get("lora_bias") is False:
        yield flaw(
            "lora-kind-unsupported",
            f"{_engine(c)} does not read an adapter's biases: bias is {bias}.",
            **at(part, "/bias"),
            found=bias,
            expected="none",
        )
    saved = config.get("modules_to_save")
    if saved and c.rules.get("lora_modules_to_save") is False:
        yield flaw(
            "lora-kind-unsupported",
            f"{_engine(c)} does not read modules_to_save: {saved}.",
            **at(part, "/modules_to_save"),
            found=saved,
            expected=[],
        )


def _features(c: Composition, part: Part, config: Mapping[str, Any]) -> Iterator[Flaw]:
    """Find what PEFT does when it loads an adapter and the engine does not."""
    for key in c.rules.get("lora_lacks") or ():
        if config.get(key):
            yield flaw(
                "lora-kind-unsupported",
                f"{_engine(c)} does not do what {key} asks for.",
                **at(part, f"/{key}"),
                found=config[key],
                expected=f"no {key}",
            )
    known, told = c.rules.get("lora_inits"), config.get("init_lora_weights")
    if known is not None and isinstance(told, str) and told.lower() not in known:
        yield flaw(
            "lora-kind-unsupported",
            f"The adapter was begun with {told}, which changes the base's weights when PEFT loads it; {_engine(c)} "
            "does not.",
            **at(part, "/init_lora_weights"),
            found=told,
            expected=known,
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
            **at(part, "/lora_alpha"),
            found={"lora_alpha": 0, "scale": 0.0},
            expected={"lora_alpha": _ABOVE_ZERO},
        )
    yield from _scaling(c, part, config)
    yield from _own_scaling(c, part, config)
    modules = modules_of(part)
    if modules and all(any(is_zero(one) for one in _backwards(sides)) for sides in modules.values()):
        which = "B matrix" if all(is_zero(sides["B"]) for sides in modules.values() if "B" in sides) else "product"
        yield flaw(
            "adapter-no-effect",
            f"The {which} of {agreeing(len(modules), 'its one module', f'each of {len(modules)} modules')} is zero: "
            "the adapter was not trained.",
            file=next(iter(part.weights.effective.values())).entry.path,
            found={"zero": len(modules), "of": len(modules)},
            expected={"zero": 0},
        )
    alphas = [pattern_of(config, "alpha_pattern", module) for module in modules]
    if alphas and config.get("lora_alpha") != 0 and all(type(one) in (int, float) and one == 0 for one in alphas):
        yield flaw(
            "adapter-no-effect",
            f"alpha_pattern gives {agreeing(len(alphas), 'the one module', f'all {len(alphas)} modules')} 0, so that "
            "the adapter changes nothing.",
            **at(part, "/alpha_pattern"),
            found={"lora_alpha": 0, "scale": 0.0},
            expected={"lora_alpha": _ABOVE_ZERO},
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
        **at(part, "/use_rslora"),
        found={"scale": round(used, 6), "factor": round(wanted / used, 6)},
        expected={"scale": round(wanted, 6)},
    )


def _own_scaling(c: Composition, part: Part, config: Mapping[str, Any]) -> Iterator[Flaw]:
    """Find modules whose own rank or alpha makes another scale than the adapter's, where the engine knows one only."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    doubt = _doubt(c, "lora_patterns")
    if doubt is None or type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or alpha is None:
        return
    power = 0.5 if config.get("use_rslora") is True else 1.0
    used = alpha / rank**power
    for module in sorted(modules_of(part)):
        own_rank, own_alpha = (pattern_of(config, key, module) for key in ("rank_pattern", "alpha_pattern"))
        of = own_rank if type(own_rank) is int and own_rank > 0 else rank
        over = own_alpha if type(own_alpha) in (int, float) and own_alpha is not None else alpha
        if not math.isclose(over / of**power, used):
            yield flaw(
                "lora-scaling",
                f"The patterns of adapter_config.json ask for the scale {over / of**power:g} of {module}, and "
                f"{_engine(c)} would use {used:g}.",
                severity=doubt,
                **at(part, "/alpha_pattern" if own_alpha is not None else "/rank_pattern"),
                found={"scale": round(used, 6), "module": module},
                expected={"scale": round(over / of**power, 6)},
            )
            return


def _backwards(sides: Mapping[str, Placed]) -> list[Placed]:
    """Return B before A: it is what starts at zero, so that a trained adapter is known by it alone."""
    return [sides[side] for side in sorted(sides, reverse=True)]


# ----------------------------------------------------------------------------------------------- what the engine takes


def _limit(c: Composition, part: Part, config: Mapping[str, Any]) -> Iterator[Flaw]:
    rank, ranks = config.get("r"), config.get("rank_pattern")
    if type(rank) is not int or rank < 1:
        return
    largest = max([rank, *[one for one in (ranks if isinstance(ranks, dict) else {}).values() if type(one) is int]])
    asked = c.declared.arguments.number("--max-lora-rank")
    limit = asked if asked is not None else c.rules.get("lora_default_rank")
    told = c.declared.arguments.has("--enable-lora") or asked is not None
    if isinstance(limit, int) and largest > limit and told:
        yield flaw(
            "lora-rank-too-large",
            f"The adapter has rank {largest}, and {_engine(c)} takes up to {limit}.",
            **at(part, "/r"),
            found=largest,
            expected={"at_most": limit},
            advice=f"Give the engine --max-lora-rank {largest}.",
        )


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
        f"{name} {' '.join(words)} lets {len(kept)} of the adapter's {many(len(modules), 'kind')} of modules through: "
        f"{listed(sorted(modules))}.",
        severity=Severity.BLOCK if not kept else Severity.WARN,
        file=part.path("adapter_config.json"),
        pointer=name,
        found={"matched": len(kept), "of": len(modules), "flag": words, "modules": sorted(modules)},
        expected={"matched": len(modules), "flag": sorted(modules)},
    )


def _tokens(c: Composition, part: Part) -> Iterator[Flaw]:
    """Find tokens of the adapter's own, for which the base has no row."""
    odd = [
        name
        for name in part.weights.effective
        if "token_adapter" in name or "trainable_tokens" in name or (_ROWS.search(name) and not LORA.match(name))
    ]
    if odd and c.rules.get("lora_modules_to_save") is not True:
        yield flaw(
            "unsupported-lora-tensor",
            f"{many(len(odd), 'tensor', 'replaces or adds', 'replace or add')} rows of the "
            f"embedding, which engines do not swap: {listed(odd)}.",
            file=part.weights.effective[odd[0]].entry.path,
            pointer=odd[0],
            found=odd[:MAX_ITEMS],
            expected=[],
        )
    ours, rows = c.model.tokenizer, embedding_rows(c.model)
    theirs = part.tokenizer or _beside(part)
    if theirs is not None and theirs is part.tekken:
        ours = c.model.tekken or ours
    if theirs is None or (ours is None and rows is None):
        return
    known = set() if ours is None else {*ours.ids, *ours.restored, *ours.added_file}
    beyond = {
        text: number
        for text, number in _all_ids(theirs, ours).items()
        if (text not in known if ours is not None else False) or (rows is not None and number >= rows)
    }
    place = None if ours is None or beyond else first_difference(ours.texts, theirs.texts)
    if ours is not None and place is not None:
        yield flaw(
            "lora-new-tokens",
            f"Token {place} is {ours.texts[place]!r} in the base and {theirs.texts[place]!r} for the adapter.",
            file=part.tokenizer_file,
            found={"first_difference": place, "adapter": theirs.texts[place]},
            expected={"base": ours.texts[place]},
        )
    if beyond:
        texts = sorted(beyond, key=lambda text: beyond[text])
        used = [text for text in texts if any(text in source for source, _ in part.templates)]
        also = f"; its template uses {listed(used)}" if used else ""
        yield flaw(
            "lora-new-tokens",
            f"The adapter's tokenizer has {many(len(beyond), 'token')} that the base does not have: "
            f"{listed(texts)}{also}.",
            file=part.path(next((name for name in _TOKEN_FILES if part.has(name)), "tokenizer.json")),
            found={"ids": sorted(beyond.values())[:MAX_ITEMS], "tokens": texts[:MAX_ITEMS], "in_template": used},
            expected={"rows": rows},
        )


_TOKEN_FILES = ("tokenizer.json", "added_tokens.json", "tokenizer_config.json", "special_tokens_map.json", tekken.FILE)


def _beside(part: Part) -> Tokenizer | None:
    """Return what files beside an absent tokenizer.json say of tokens; None where there are none."""
    files = [part.object(name) for name in _TOKEN_FILES[1:4]]
    return Tokenizer({}, files[1], files[2], files[0]) if any(files) else None


def _all_ids(theirs: Tokenizer, ours: Tokenizer | None) -> dict[str, int]:
    """Return an adapter's tokens with their ids; what none of its files gives one would follow the base's last."""
    found = theirs.ids | theirs.only_decoded
    found |= {text: number for text, number in theirs.added_file.items() if type(number) is int}
    size = 0 if ours is None else ours.size
    for told in (theirs.special_map, theirs.config):
        padding = set(special_texts({"pad_token": told.get("pad_token")}))  # a trainer's own, which no request uses
        for text in special_texts(told):
            if ours is not None and text not in found and text not in padding and text not in ours.ids:
                found[text] = size + len([one for one in found if one not in ours.ids])
    return found
