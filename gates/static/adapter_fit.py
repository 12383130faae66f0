"""Checks of an adapter's matrices: they are those that its configuration names, and they fit it and the base.

Source: the file format of PEFT 0.17 (LoraConfig, and `get_peft_model_state_dict` for the names of tensors).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gates.files.refusal import shown
from gates.static.composition import Composition, Part
from gates.static.flaw import MAX_ITEMS, Flaw, Where, flaw, listed
from gates.static.tensors import Placed
from schemas.result import Severity
from schemas.short import agreeing, many

_PREFIX = re.compile(r"^(base_model\.model\.|base_model\.)?")
LORA = re.compile(r"^(?P<module>.+)\.lora_(?P<side>A|B)(\.(?!bias$)[^.]+)?(\.weight)?$")
EMBEDDING = re.compile(r"^(?P<module>.+)\.lora_embedding_(?P<side>A|B)(\.[^.]+)?$")
_NAMED = re.compile(r"\.lora_(A|B)\.(?!weight$|bias$)[^.]+\.weight$")
"""As a model in training calls them. Source: vLLM's lora/utils.py, parse_fine_tuned_lora_name, refuses such a name."""
_WRAPPED = re.compile(r"^(?:model\.language_model\.|language_model\.model\.)(?P<rest>.+)$")
_EXPERTS = re.compile(r"\.experts(\.|$)")
_OTHER = re.compile(
    r"\.(lora_E|lora_B\.bias|lora_bias\b|ranknum|vera_lambda_[bd]|hada_\w+|lokr_\w+|oft_\w+|weight_m_wdecomp|ia3_l)(\.|$)"
)
"""What AdaLoRA, biases of LoRA, VeRA, LoHa, LoKr, OFT, the first DoRA and IA3 call their tensors."""
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.]+")
_WHOLE = "a whole number of 1 or more"
_OTHER_FILES = "Fetch adapter_config.json and adapter_model.safetensors together again: they are not of one training."

Modules = dict[str, dict[str, Placed]]


def check(c: Composition, part: Part, config: Mapping[str, Any]) -> Iterator[Flaw]:
    """Check one adapter's matrices against its configuration and the base."""
    modules = modules_of(part)
    yield from _strange(c, part, config, modules)
    yield from _rank(part, config, modules)
    yield from _halves(part, modules)
    yield from _saved(part, config)
    yield from _match(c, part, config, modules)
    yield from _targets(c, part, config, modules)


def at(part: Part, pointer: str) -> Where:
    """Return a place in the adapter's configuration."""
    return {"file": part.path("adapter_config.json"), "pointer": pointer}


def modules_of(part: Part) -> Modules:
    """Return the modules that an adapter changes, without PEFT's prefix: name → side → tensor."""
    found: Modules = {}
    for name, placed in part.weights.effective.items():
        match = LORA.match(name) or EMBEDDING.match(name)
        if match is not None:
            found.setdefault(_PREFIX.sub("", match["module"], count=1), {})[match["side"]] = placed
    return found


def _strange(c: Composition, part: Part, config: Mapping[str, Any], modules: Modules) -> Iterator[Flaw]:
    """Find tensors of another kind of adapter, or under the names of another library, which engines do not read."""
    tensors, shards = part.weights.effective, part.weights.shards.values()
    if shards and all(one.header is not None and not one.header.tensors for one in shards):
        file = part.path(next(iter(part.weights.shards)))
        says = f"{file.rpartition('/')[2]} holds no tensors."
        yield flaw("adapter-incomplete", says, file=file, found={"tensors": 0}, expected="matrices A and B")
    if config.get("peft_type", "LORA") != "LORA" or not tensors:
        return
    named = sorted(name for name in tensors if _NAMED.search(name))
    if named and c.engine != "sglang":
        yield flaw(
            "lora-no-match",
            f"{many(len(named), 'tensor', 'bears', 'bear')} the adapter's own name behind lora_A or lora_B, as none of "
            f"a saved adapter does: {listed(named)}.",
            file=tensors[named[0]].entry.path,
            pointer=named[0],
            found={"tensors": named[:MAX_ITEMS], "count": len(named)},
            expected="names that end in lora_A.weight and lora_B.weight",
            advice="Save it with save_pretrained, which takes the adapter's name out of the tensors' names.",
        )
    if not modules:
        held = sorted(tensors)
        yield flaw(
            "lora-no-match",
            f"None of {many(len(held), 'tensor')} is a matrix of an adapter by its name: {listed(held)}.",
            file=part.path("adapter_model.safetensors"),
            found={"matched": 0, "of": len(held), "missing": held[:MAX_ITEMS]},
            expected="names that end in lora_A.weight and lora_B.weight",
        )
        return
    odd = sorted(name for name in tensors if _OTHER.search(name))
    if odd and c.engine != "transformers" and c.rules.get("lora_bias") is not True:
        yield flaw(
            "lora-kind-unsupported",
            f"{many(len(odd), 'tensor', 'is', 'are')} of another kind of adapter, which "
            f"{c.engine or 'engines'} cannot apply: {listed(odd)}.",
            file=tensors[odd[0]].entry.path,
            pointer=odd[0],
            found={"tensors": odd[:MAX_ITEMS], "count": len(odd)},
            expected="matrices A and B alone",
        )


def targets_of(config: Mapping[str, Any]) -> list[str]:
    """Return an adapter's target modules; a single word may stand without a list."""
    told = config.get("target_modules")
    if isinstance(told, str):
        return [] if told == "all-linear" or re.search(r"[*\\|()^$\[]", told) else [told]
    return [one for one in told if isinstance(one, str)] if isinstance(told, list) else []


def pattern_of(config: Mapping[str, Any], key: str, module: str) -> Any:
    """Return what `rank_pattern` or `alpha_pattern` says for a module; None when nothing, or only in a pattern's way.

    A pattern comes from outside and could run for ever: plain names alone are compared, as ends of the module's name.
    """
    told = config.get(key)
    words = module.split(".")
    ends = {".".join(words[place:]) for place in range(len(words))}
    for name, value in told.items() if isinstance(told, dict) else ():
        if name in ends and _PLAIN_KEY.fullmatch(name):
            return value
    return None


def has_patterns(config: Mapping[str, Any], key: str) -> bool:
    """Say whether a key of patterns holds any that cannot be compared as plain names."""
    told = config.get(key)
    return isinstance(told, dict) and not all(_PLAIN_KEY.fullmatch(name) for name in told)


def _hits(module: str, targets: list[str]) -> bool:
    return any(module == target or module.endswith("." + target) for target in targets)


def _rank(part: Part, config: Mapping[str, Any], modules: Modules) -> Iterator[Flaw]:
    rank = config.get("r")
    if type(rank) is not int or rank < 1:
        yield flaw(
            "adapter-incomplete", f"adapter_config.json says r {rank!r}.", **at(part, "/r"), found=rank, expected=_WHOLE
        )
        return
    alpha = config.get("lora_alpha")
    if type(alpha) not in (int, float):
        says = f"adapter_config.json says lora_alpha {alpha!r}."
        yield flaw("adapter-incomplete", says, **at(part, "/lora_alpha"), found=alpha, expected="a number")
    if not config.get("target_modules") and not config.get("target_parameters"):
        says = "adapter_config.json names no target_modules."
        yield flaw(
            "adapter-incomplete",
            says,
            **at(part, "/target_modules"),
            found=config.get("target_modules"),
            expected="the names of the modules that were trained",
        )
    if has_patterns(config, "rank_pattern"):
        return
    for module, sides in sorted(modules.items()):
        told = pattern_of(config, "rank_pattern", module)
        wanted = told if type(told) is int else rank
        for side, placed in sorted(sides.items()):
            shape = placed.tensor.shape
            if len(shape) != 2 or _EXPERTS.search(module):
                continue  # the matrices of fused experts lie one after another
            found = shape[0] if side == "A" else shape[1]
            if found != wanted:
                yield flaw(
                    "lora-shape",
                    f"{placed.tensor.name} has the shape {list(shape)}, and r is {wanted}.",
                    file=placed.entry.path,
                    pointer=placed.tensor.name,
                    found=list(shape),
                    expected={"r": wanted},
                    advice=_OTHER_FILES,
                )
                return


def _halves(part: Part, modules: Modules) -> Iterator[Flaw]:
    """Find modules of which one matrix is there, and pairs of different ranks."""
    alone = sorted(module for module, sides in modules.items() if len(sides) == 1)
    if alone:
        yield flaw(
            "adapter-incomplete",
            f"{len(alone)} of {many(len(modules), 'module')} {agreeing(len(alone), 'has', 'have')} one of two "
            f"matrices: {listed(alone)}.",
            file=part.path("adapter_model.safetensors"),
            found={"count": len(alone), "of": len(modules), "modules": alone[:MAX_ITEMS]},
            expected={"count": 0, "matrices": ["A", "B"]},
        )
    for module, sides in sorted(modules.items()):
        if len(sides) != 2 or any(len(one.tensor.shape) != 2 for one in sides.values()):
            continue
        inner = sides["A"].tensor.shape[0], sides["B"].tensor.shape[1]
        if inner[0] != inner[1]:
            yield flaw(
                "lora-shape",
                f"The matrices of {module} have the ranks {inner[0]} and {inner[1]}.",
                file=sides["B"].entry.path,
                pointer=sides["B"].tensor.name,
                found={"A": inner[0], "B": inner[1]},
                expected={"A": inner[0], "B": inner[0]},
                advice=_OTHER_FILES,
            )
            return


def _saved(part: Part, config: Mapping[str, Any]) -> Iterator[Flaw]:
    """Find modules that were trained whole, and are not there."""
    told = config.get("modules_to_save")
    names = [told] if isinstance(told, str) else told if isinstance(told, list) else []
    tensors = part.weights.effective
    lost = [one for one in names if isinstance(one, str) and not any(f".{one}." in f".{name}" for name in tensors)]
    if lost and tensors:
        yield flaw(
            "adapter-incomplete",
            f"modules_to_save names {listed(lost)}, and no file holds {agreeing(len(lost), 'it', 'them')}.",
            **at(part, "/modules_to_save"),
            found={"missing": lost[:MAX_ITEMS]},
            expected={"missing": []},
        )


# -------------------------------------------------------------------------------------------- against the base


def _places(base: Part) -> set[str]:
    """Return every module of the base, and every group of modules."""
    found: set[str] = set()
    for name in base.weights.effective:
        stem = name
        while (stem := stem.rpartition(".")[0]) and stem not in found:
            found.add(stem)
    return found


def _resolved(base: Part, module: str, there: set[str]) -> str | None:
    """Return the base's name of a module, or None.

    Libraries wrap the language model of a multimodal one in two ways, and engines map both; nothing maps the names of
    a plain language model to those of a wrapped one.
    """
    module = module.removesuffix(".base_layer")
    wrapped = _WRAPPED.match(module)
    names = [module]
    if wrapped is not None:
        names += [f"model.language_model.{wrapped['rest']}", f"language_model.model.{wrapped['rest']}"]
        names += [f"model.{wrapped['rest']}"] if "vision_config" in base.config or "audio_config" in base.config else []
    return next((name for name in names if name in there), None)


def _match(c: Composition, part: Part, config: Mapping[str, Any], modules: Modules) -> Iterator[Flaw]:
    if part.folder == c.model.folder and not c.model.config:
        return  # an adapter alone, without its base
    if not c.model.weights.effective or not modules:
        yield from _by_config(c, part, config, modules)
        return
    there = _places(c.model)
    known = {module: _resolved(c.model, module, there) for module in modules}
    missing = sorted(module for module, name in known.items() if name is None)
    if not missing:
        found = {name: modules[module] for module, name in known.items() if name is not None}
        yield from _shapes(c, config, found)
        return
    alike = [name for name in sorted(there) if name.endswith("." + _tail(missing[0]))]
    matched = len(modules) - len(missing)
    yield flaw(
        "lora-no-match",
        f"{matched} of the adapter's {many(len(modules), 'module')} {agreeing(matched, 'is', 'are')} in the base; "
        f"{listed(missing)} {agreeing(len(missing), 'is', 'are')} not.",
        severity=Severity.BLOCK,
        file=part.path("adapter_model.safetensors"),
        found={"matched": matched, "of": len(modules), "missing": missing[:MAX_ITEMS]},
        expected={"matched": len(modules), "in_base": alike[:3]},
    )


def _tail(module: str) -> str:
    match = re.search(r"layers\.[0-9]+\..*", module)
    return match[0] if match else module.rpartition(".")[2]


def _by_config(c: Composition, part: Part, config: Mapping[str, Any], modules: Modules) -> Iterator[Flaw]:
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
            f"None of {many(len(targets), 'target module')} is in the base: {listed(lost)}.",
            **at(part, "/target_modules"),
            found={"matched": 0, "of": len(targets), "missing": lost},
            expected={"matched": len(targets), "in_base": sorted(last)[:MAX_ITEMS]},
        )


def _shapes(c: Composition, config: Mapping[str, Any], modules: Mapping[str, Mapping[str, Placed]]) -> Iterator[Flaw]:
    wanted = {one.name: one.shape for one in c.model.needed}
    for module, sides in sorted(modules.items()):
        name = f"{module}.weight"
        weight = c.model.weights.effective.get(name)
        is_plain = weight is not None and weight.tensor.dtype.startswith(("F", "BF"))
        shape = weight.tensor.shape if is_plain and weight is not None else wanted.get(name, ())
        if len(shape) != 2 or module.endswith("embed_tokens"):
            continue  # an embedding's A and B lie the other way round
        rows, columns = reversed(shape) if config.get("fan_in_fan_out") is True else shape
        for side, placed in sorted(sides.items()):
            own = placed.tensor.shape
            found, size = (own[-1], columns) if side == "A" else (own[0], rows)
            if len(own) == 2 and size is not None and found != size:
                yield flaw(
                    "lora-shape",
                    f"{placed.tensor.name} has the shape {list(own)}, and {name} {[rows, columns]}.",
                    file=placed.entry.path,
                    pointer=placed.tensor.name,
                    found=list(own),
                    expected={"in": columns, "out": rows},
                    advice=_of_base(config),
                )
                return


def _of_base(config: Mapping[str, Any]) -> str:
    """Return what to do about an adapter that fits another base, which its configuration may name."""
    told = config.get("base_model_name_or_path")
    name = f", which it calls {shown(told)}" if isinstance(told, str) and told else ""
    return f"Serve it on the base that it was trained on{name}, or train it on this one."


# -------------------------------------------------------------------------------------- against target_modules


def _targets(c: Composition, part: Part, config: Mapping[str, Any], modules: Modules) -> Iterator[Flaw]:
    """Find modules that the configuration names and nothing was trained for, and the other way round."""
    targets = targets_of(config)
    if not targets or not modules or config.get("target_parameters"):
        return
    extra = sorted(one for one in modules if not _hits(one, targets) and not _EXPERTS.search(one))
    if extra:
        yield flaw(
            "lora-targets-differ",
            f"{len(extra)} of {many(len(modules), 'module')} with matrices {agreeing(len(extra), 'is', 'are')} not "
            f"among target_modules: {listed(extra)}.",
            **at(part, "/target_modules"),
            found={"extra": extra[:MAX_ITEMS], "count": len(extra), "target_modules": targets[:MAX_ITEMS]},
            expected={"extra": [], "count": 0},
        )
    expected = _expected(c.model, config, targets)
    there = _places(c.model)
    held = {_resolved(c.model, module, there) for module in modules}
    lost = [name for name in expected if name not in held]
    if not lost or len(lost) == len(expected):
        return  # with none of them, the adapter is another base's, which is said elsewhere
    trained = {number for name, number in expected.items() if name in held}
    by_layer = all(number not in trained for name, number in expected.items() if name in lost)
    yield flaw(
        "lora-targets-differ",
        f"{len(lost)} of {many(len(expected), 'module')} of the base that target_modules names "
        f"{agreeing(len(lost), 'has', 'have')} no matrices: {listed(lost)}.",
        severity=Severity.WARN if by_layer else Severity.BLOCK,
        **at(part, "/target_modules"),
        found={"held": len(expected) - len(lost), "of": len(expected), "missing": lost[:MAX_ITEMS]},
        expected={"held": len(expected), "missing": []},
    )


def _expected(base: Part, config: Mapping[str, Any], targets: list[str]) -> dict[str, int]:
    """Return the modules in the base's layers that target_modules names, with the layer of each."""
    told = config.get("layers_to_transform")
    only = {told} if type(told) is int else set(told) if isinstance(told, list) and told else None
    if config.get("exclude_modules") or config.get("layers_pattern"):
        return {}
    found: dict[str, int] = {}
    for one in base.layered:
        module = one.name.rpartition(".")[0]
        is_in = one.number < (base.shape.layers or one.number + 1) and (only is None or one.number in only)
        if is_in and _hits(module, targets) and not _EXPERTS.search(module):
            found[module] = one.number
    return found
