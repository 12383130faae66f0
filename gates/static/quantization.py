"""Checks of quantization: the declaration fits the tensors, the engine, its libraries and its hardware."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gates.static import companions, names, quant_forms
from gates.static.composition import Composition
from gates.static.flaw import MAX_ITEMS, Flaw, Where, flaw, listed
from gates.static.quantized import Quantization, weight_schemes
from gates.static.rules import is_within, table
from gates.static.tensors import Placed, read_bytes
from schemas.short import agreeing, many

_PACKED = (
    *("qweight", "qzeros", "weight_packed", "weight.absmax", "weight.quant_state.bitsandbytes__nf4", "SCB"),
    *("W_q", "codes", "codebooks", "Qidxs", "weight_q"),
)
"""What only quantized modules hold: of GPTQ, AWQ, compressed-tensors, bitsandbytes, HQQ, AQLM, QuIP#."""
_OF_OUTPUT = (".k_proj.output_scale", ".v_proj.output_scale")
"""What Quark, and others beside it, call the scales of keys and values: those of what the projections give out."""
_SCALED = ("weight_scale", "weight_scale_inv")
_FINE = (*_SCALED, "scale", "scale_weight", "weight_scale_2")
# Method → suffixes of which one shows that a module was quantized. Source: the tensor names of published checkpoints.
_SHOWN = {
    "gptq": ("qweight", "B"),
    "awq": ("qweight",),
    "auto-round": ("qweight", "weight_packed", "weight_scale"),
    "compressed-tensors": ("weight_packed", "weight_scale"),
    "fp8": _SCALED,
    "fbgemm_fp8": _SCALED,
    "modelopt": _SCALED,
    "bitsandbytes": ("weight.absmax", "SCB"),
    "hqq": ("W_q",),
    "aqlm": ("codes",),
    "quark": _SCALED,
    "w8a8_int8": _SCALED,
    "w8a8_fp8": _SCALED,
    "mlx": ("scales",),
}
_EXACT = frozenset({"gptq", "awq", "auto-round", "compressed-tensors", "fp8", "fbgemm_fp8", "modelopt"})
"""Methods of which every module is known to be quantized unless it is listed; of others only none at all is a fault."""
_EIGHT = frozenset({"fp8", "fbgemm_fp8"})
_NARROW = ("F8", "U8", "I8")
"""Types that hold no weights by themselves: 8-bit floats, two 4-bit numbers in a byte, and 8-bit integers."""
# Suffix of packed weights → suffixes without which nobody can unpack them, any one of each group.
_UNPACKED_BY = {"qweight": ("scales",), "weight_packed": ("weight_scale", "weight_global_scale")}
# Argument → methods whose checkpoints it reads too. Source: `override_quantization_method` of vLLM's methods, and the
# compatible methods in SGLang's model_config.py.
_READ_BY = {
    **dict.fromkeys(("gptq_marlin", "gptq_marlin_24", "gptq_bitblas", "marlin"), ("gptq",)),
    "awq_marlin": ("awq",),
    "moe_wna16": ("gptq", "awq"),
    **dict.fromkeys(("modelopt_fp4", "modelopt_fp8", "modelopt_mixed"), ("modelopt",)),
    **dict.fromkeys(("w8a8_fp8", "w8a8_int8"), ("compressed-tensors",)),
}
_G_IDX_BYTES = 16 * 1024 * 1024
_WHOLE_NUMBERS = {"I32": "<i4", "I64": "<i8"}


_INTEGERS = frozenset({"BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
_STORED = frozenset({"awq", "awq_marlin", "gptq", "gptq_marlin", "marlin", "compressed-tensors"})
"""Methods for which an engine needs the checkpoint's own configuration; others it applies to plain weights too."""


def check(c: Composition) -> Iterator[Flaw]:
    """Check how the model is quantized."""
    told = c.quantization
    tensors = c.model.weights.effective
    yield from _cache_scales(c, told)
    yield from quant_forms.check(c, told)
    if told is None:
        yield from _undeclared(c, tensors)
        yield from _asked_for(c, tensors)
        return
    if tensors:
        yield from _carried(c, told, tensors)
        yield from _scales(c, told, tensors)
        yield from _other_form(c, told, tensors)
        yield from companions.check(c, told, tensors)
        if told.method in {"gptq", "awq"}:
            yield from _packing(c, told, tensors)
        if told.method in {"gptq", "auto-round", "compressed-tensors"}:
            yield from _order(c, told, tensors)
    yield from _bits(c, told)
    yield from _method(c, told)
    yield from _libraries(c, told)


def _asked_for(c: Composition, tensors: Mapping[str, Placed]) -> Iterator[Flaw]:
    """Find launch arguments that name a method which only reads weights that were quantized by it."""
    asked = c.declared.arguments.get("--quantization", "-q")
    if asked in _STORED and tensors:
        yield flaw(
            "quant-argument-differs",
            f"The launch arguments say {asked}, and config.json says nothing of quantization.",
            pointer="--quantization",
            found=asked,
            expected="no method, as the files declare none",
            advice="Leave the argument out, or fetch the quantization_config that belongs to these weights.",
        )


def _where(c: Composition, told: Quantization) -> Where:
    return {"file": c.model.path(told.file), "pointer": told.pointer}


def _undeclared(c: Composition, tensors: Mapping[str, Placed]) -> Iterator[Flaw]:
    found = [
        module
        for module, parts in names.linears(c.model.layered, tensors, c.model.shape.layers).items()
        if any(suffix in parts for suffix in _PACKED)
        or (
            "weight" in parts
            and parts["weight"].tensor.dtype.startswith(_NARROW)
            and any(one in parts for one in _SCALED)
        )
        or ("weight" in parts and parts["weight"].tensor.dtype == "U32" and "scales" in parts)  # MLX
    ]
    if not found:
        loose = [name for name in tensors if name.endswith((".qweight", ".weight_packed"))]
        found = [name.rpartition(".")[0] for name in loose]
        blocks = [
            name for name in tensors if name.endswith("_blocks") and name.removesuffix("blocks") + "scales" in tensors
        ]
        found += [name.removesuffix("_blocks") for name in blocks]
    whole = _whole(c, tensors) if not found else []
    if whole:
        kind = tensors[whole[0]].tensor.dtype
        yield flaw(
            "quant-config-mismatch",
            f"{many(len(whole), 'weight is', 'weights are')} {kind}, which are no floating point numbers, and no file "
            f"declares a method: {listed(whole)}.",
            file=tensors[whole[0]].entry.path,
            pointer=whole[0],
            found={"dtype": kind, "count": len(whole), "tensors": whole[:MAX_ITEMS], "method": None},
            expected={"dtype": "a floating point type"},
            advice="Fetch the files again; engines would take the integers for the weights themselves.",
        )
    if found:
        yield flaw(
            "quant-config-mismatch",
            f"{many(len(found), 'module', 'holds', 'hold')} packed weights, and no file declares "
            f"a method: {listed(sorted(found))}.",
            file=c.model.path("config.json"),
            pointer="/quantization_config",
            found={"packed": len(found), "modules": sorted(found)[:MAX_ITEMS], "method": None},
            expected={"method": "the quantization that these weights have"},
            advice="Fetch config.json with its quantization_config, or quantize_config.json, from where the weights "
            "came from.",
        )


def _whole(c: Composition, tensors: Mapping[str, Placed]) -> list[str]:
    """Return weights that are stored as whole numbers, of those of which it is known what they are."""
    known = {one.name for one in c.model.needed} | {
        one.name for one in c.model.layered if names.LINEARS.match(one.rest)
    }
    ends = (names.embedding(tensors), names.head(tensors))
    known |= {name for name in ends if name is not None}
    return sorted(
        name
        for name in known
        if name.endswith(".weight") and name in tensors and tensors[name].tensor.dtype in _INTEGERS
    )


def _carried(c: Composition, told: Quantization, tensors: Mapping[str, Placed]) -> Iterator[Flaw]:
    shown = _SHOWN.get(told.method)
    modules = names.linears(c.model.layered, tensors, c.model.shape.layers)
    if told.method == "mxfp4":
        blocks = [name for name in tensors if name.endswith("_blocks")]
        experts = [name for name in tensors if ".experts." in name]
        if experts and not blocks:
            yield flaw(
                "quant-config-mismatch",
                "config.json declares mxfp4, and no expert is stored in blocks.",
                **_where(c, told),
                found={"carried": 0, "of": len(experts), "method": "mxfp4"},
                expected={"carried": len(experts), "suffix": ["_blocks"]},
            )
        return
    if shown is None or not modules:
        return
    meant = {module: parts for module, parts in modules.items() if told.quantizes(module)}
    bare = [module for module, parts in meant.items() if not _shows(parts, shown)]
    if not meant or not bare:
        return
    some = len(meant) - len(bare)
    if some and told.method not in _EXACT:
        return
    sign = shown[0] if some == 0 or told.method in {"gptq", "awq"} else " or ".join(shown)
    yield flaw(
        "quant-config-mismatch",
        f"{told.file} declares {told.method}, and {some} of {len(meant)} linear layers carry {sign}.",
        **_where(c, told),
        found={"carried": some, "of": len(meant), "method": told.method, "bare": sorted(bare)[:MAX_ITEMS]},
        expected={"carried": len(meant), "suffix": list(shown)},
    )


def _scales(c: Composition, told: Quantization, tensors: Mapping[str, Placed]) -> Iterator[Flaw]:
    """Find packed weights whose scales are not there."""
    bare = sorted(
        module
        for name in tensors
        for module, _, suffix in [name.rpartition(".")]
        if suffix in _UNPACKED_BY and not any(f"{module}.{one}" in tensors for one in _UNPACKED_BY[suffix])
    )
    if told.method in _EIGHT:
        modules = names.linears(c.model.layered, tensors, c.model.shape.layers)
        eight = {module for module, parts in modules.items() if _kind(parts).startswith("F8")}
        bare += sorted(module for module in eight if not any(one in modules[module] for one in _FINE))
        yield from _wide(c, told, modules)
    if bare:
        yield flaw(
            "quant-config-mismatch",
            f"{many(len(bare), 'module', 'holds', 'hold')} packed weights without scales: {listed(bare)}.",
            **_where(c, told),
            found={"unscaled": len(bare), "modules": bare[:MAX_ITEMS], "method": told.method},
            expected={"unscaled": 0},
            advice="Fetch the whole checkpoint: the scales belong to the packed weights.",
        )


_FORMATS = {"pack-quantized": "packed", "float-quantized": "F8", "int-quantized": "I8"}
_FORMATS |= dict.fromkeys(("nvfp4-pack-quantized", "mxfp4-pack-quantized"), "FP4")
"""Format of compressed-tensors → how its modules are stored."""


def _wanted(told: Quantization) -> set[str] | None:
    """Return how quantized modules are stored by what is declared; None where that is not known."""
    if told.method in _EIGHT:
        return {"F8"}
    if told.method == "modelopt":
        kind = str(told.told.get("quant_algo", "")).upper()
        return (
            {"F8"}
            if kind in {"FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN"}
            else {"FP4"}
            if kind == "NVFP4"
            else None
        )
    if told.method != "compressed-tensors":
        return None
    groups = told.told.get("config_groups")
    named = [one.get("format") for one in groups.values() if isinstance(one, dict)] if isinstance(groups, dict) else []
    formats = {str(one or told.told.get("format")) for one in named or [None]}
    return {_FORMATS[one] for one in formats} if formats <= set(_FORMATS) else None


def _stored(parts: Mapping[str, Placed]) -> str | None:
    """Return how a quantized module is stored; None for one that is not, or in a way of its own."""
    packed = parts.get("weight_packed")
    if packed is not None:
        return "FP4" if packed.tensor.dtype == "U8" else "packed"
    if "qweight" in parts:
        return "qweight"
    kind = _kind(parts)
    return "F8" if kind.startswith("F8") else {"U8": "FP4", "I8": "I8"}.get(kind)


def _other_form(c: Composition, told: Quantization, tensors: Mapping[str, Placed]) -> Iterator[Flaw]:
    """Find modules that are quantized in another way than the configuration says."""
    wanted = _wanted(told)
    if wanted is None:
        return
    modules = names.linears(c.model.layered, tensors, c.model.shape.layers)
    stored = {module: _stored(parts) for module, parts in modules.items() if told.quantizes(module)}
    odd = sorted(module for module, form in stored.items() if form is not None and form not in wanted)
    if odd:
        form = stored[odd[0]]
        yield flaw(
            "quant-config-mismatch",
            f"{told.file} declares {told.method} with weights stored as {' or '.join(sorted(wanted))}, and {len(odd)} "
            f"of {len(stored)} linear layers store them as {form}: {listed(odd)}.",
            **_where(c, told),
            found={"stored": form, "count": len(odd), "of": len(stored), "method": told.method},
            expected={"stored": sorted(wanted)},
        )


def _kind(parts: Mapping[str, Placed]) -> str:
    return parts["weight"].tensor.dtype if "weight" in parts else ""


def _wide(c: Composition, told: Quantization, modules: Mapping[str, Mapping[str, Placed]]) -> Iterator[Flaw]:
    """Find weights that were unpacked again, and whose scales were left beside them."""
    found = sorted(
        module
        for module, parts in modules.items()
        if _kind(parts) in {"BF16", "F16", "F32"} and any(one in parts for one in _SCALED) and not told.ignores(module)
    )
    if found:
        kind = _kind(modules[found[0]])
        yield flaw(
            "quant-config-mismatch",
            f"{told.file} declares {told.method}, and {many(len(found), 'module', 'holds', 'hold')} "
            f"{kind} weights beside their scales: {listed(found)}.",
            **_where(c, told),
            found={"wide": len(found), "modules": found[:MAX_ITEMS], "dtype": kind, "method": told.method},
            expected={"dtype": "F8_E4M3"},
        )


def _packing(c: Composition, told: Quantization, tensors: Mapping[str, Placed]) -> Iterator[Flaw]:
    """Find packed weights whose sizes are those of another method, other bits or other groups.

    Source: AutoGPTQ packs rows (in · bits / 32 × out), AutoAWQ's GEMM packs columns (in × out · bits / 32), and both
    have a row of scales for each group.
    """
    if told.bits is None or told.told.get("dynamic") or told.told.get("extra_config") or 32 % told.bits:
        return
    said = told.told
    if str(said.get("version", "gemm")).lower() != "gemm" or said.get("checkpoint_format") == "marlin":
        return
    if said.get("pack_dtype", "int32") != "int32":
        return
    factor, odd = 32 // told.bits, []
    for name in sorted(tensors):
        scales = tensors.get(f"{name.removesuffix('.qweight')}.scales")
        if not name.endswith(".qweight") or scales is None:
            continue
        (packed, stored) = (one.tensor.shape for one in (tensors[name], scales))
        if len(packed) != 2 or len(stored) != 2:
            continue
        rows, columns = (packed[0], packed[1] * factor) if told.method == "awq" else (packed[0] * factor, packed[1])
        groups = 1 if told.group is None else -(-rows // told.group)
        if stored != (groups, columns):
            odd.append((name, stored, (groups, columns)))
    if odd:
        name, stored, wanted = odd[0]
        yield flaw(
            "quant-config-mismatch",
            f"{told.file} says {told.method} with {told.bits} bits in groups of {told.group or 'all'}; by {name}, "
            f"which is packed to {list(tensors[name].tensor.shape)}, its scales are {list(wanted)}, and they are "
            f"{list(stored)}. {many(len(odd), 'module', 'is', 'are')} like this.",
            **_where(c, told),
            found={"module": name.removesuffix(".qweight"), "scales": list(stored), "count": len(odd)},
            expected={"scales": list(wanted), "bits": told.bits, "group_size": told.group},
        )


def _cache_scales(c: Composition, told: Quantization | None) -> Iterator[Flaw]:
    """Find a cache of 8-bit floats without the scales of its keys and values: then engines take 1 for each.

    Source: vLLM's quantization/kv_cache.py, its `--calculate-kv-scales`, and `get_cache_scale` of its methods.
    """
    asked = c.declared.arguments.get("--kv-cache-dtype", "--kv_cache_dtype")
    is_asked = (asked or "").startswith("fp8") and not c.declared.arguments.has("--calculate-kv-scales")
    # Of ModelOpt's checkpoints some leave out scales of 1 and say nothing of it, so that only an argument counts there.
    declared = told is not None and bool(told.told.get("kv_cache_scheme"))
    if not (is_asked or (declared and asked in (None, "auto"))) or not c.model.layered or c.model.shape.is_mla:
        return
    own = _OF_OUTPUT if told is not None else ()
    ends = (".k_scale", ".v_scale", ".kv_scale", *own)
    scaled = {one.number for one in c.model.layered if one.rest.endswith(ends)}
    attending = {one.number for one in c.model.layered if names.KEYS.search(one.rest)}
    bare = sorted(attending - scaled)
    if bare:
        why = f"--kv-cache-dtype {asked}" if is_asked else "the quantization configuration"
        yield flaw(
            "kv-scales-missing",
            f"{why} asks for a cache of 8-bit floats, and {len(bare)} of {many(len(attending), 'layer')} "
            f"{agreeing(len(bare), 'has', 'have')} no scales for it: 1 is taken for each.",
            file=None if is_asked else c.model.path("config.json" if told is None else told.file),
            pointer="--kv-cache-dtype" if is_asked else None,
            found={"layers": bare[:MAX_ITEMS], "count": len(bare)},
            expected={"tensors": ["k_scale", "v_scale"]},
        )


def _shows(parts: Mapping[str, Placed], shown: tuple[str, ...]) -> bool:
    if any(suffix in parts for suffix in shown):
        return True
    return shown == _SCALED and "weight" in parts and parts["weight"].tensor.dtype.startswith("F8")


def _order(c: Composition, told: Quantization, tensors: Mapping[str, Placed]) -> Iterator[Flaw]:
    """Check that g_idx gives each column the group that its scales were made for."""
    missing, told_of = [], 0
    in_order = told.desc_act and (told.method != "compressed-tensors" or len(told.schemes) == 1)
    weights, order, scales = ("weight_packed", "weight_g_idx", "weight_scale")
    if told.method != "compressed-tensors":
        weights, order, scales = ("qweight", "g_idx", "scales")
    for name in sorted(tensors):
        if not name.endswith(f".{weights}"):
            continue
        module = name.removesuffix(f".{weights}")
        placed = tensors.get(f"{module}.{order}")
        if placed is None:
            if in_order:
                missing.append(module)
            continue
        said = _groups(placed, told, _count_of(tensors.get(f"{module}.{scales}"), scales))
        columns = _columns(told, tensors[name])
        if said is None and columns is not None and placed.tensor.shape != (columns,):
            yield flaw(
                "g-idx-invalid",
                f"{module}.{order} has the shape {list(placed.tensor.shape)}, and {name} has {columns} columns.",
                file=placed.entry.path,
                pointer=f"{module}.{order}",
                found={"columns": list(placed.tensor.shape), "desc_act": told.desc_act},
                expected={"columns": columns},
            )
        if said is not None and told_of < MAX_ITEMS:
            told_of += 1
            used, wanted = said
            yield flaw(
                "g-idx-invalid",
                f"{module}.{order} uses the groups {_short(used)}, and there are {_short(wanted)}.",
                file=placed.entry.path,
                pointer=f"{module}.{order}",
                found={"groups": used[:MAX_ITEMS], "count": len(used), "desc_act": told.desc_act},
                expected={"groups": wanted[:MAX_ITEMS], "count": len(wanted)},
            )
    if missing:
        yield flaw(
            "g-idx-missing",
            "Columns are declared to be in an order of their own, and "
            f"{many(len(missing), 'module', 'has', 'have')} no {order}: {listed(missing)}.",
            **_where(c, told),
            found={"modules": missing[:MAX_ITEMS], "count": len(missing)},
            expected={"count": 0, "tensor": order},
        )


def _columns(told: Quantization, packed: Placed) -> int | None:
    """Return how many columns a packed module of GPTQ has; None where that is not known."""
    shape, mixed = packed.tensor.shape, told.told.get("dynamic") or told.told.get("extra_config")
    if told.method != "gptq" or mixed or not told.bits or 32 % told.bits or len(shape) != 2:
        return None
    return shape[0] * (32 // told.bits)


def _count_of(scales: Placed | None, name: str) -> int | None:
    """Return for how many groups there are scales: the rows of GPTQ's, the columns of compressed-tensors'."""
    if scales is None or not scales.tensor.shape:
        return None
    return scales.tensor.shape[-1 if name == "weight_scale" else 0]


def _groups(placed: Placed, told: Quantization, count: int | None) -> tuple[list[int], list[int]] | None:
    """Return the groups used and those there are, when a column has a group that its scales were not made for."""
    kind = _WHOLE_NUMBERS.get(placed.tensor.dtype)
    if kind is None or placed.size > _G_IDX_BYTES:
        return None
    order = np.frombuffer(read_bytes(placed, _G_IDX_BYTES), dtype=kind).astype(np.int64)
    columns = len(order)
    # The scales tell a module's own group, which may be another than that of most.
    group = -(-columns // count) if count else told.group or columns
    count = count or -(-columns // group)
    used = sorted({int(one) for one in np.unique(order)})
    wanted = list(range(count))
    if columns == 0 or used != wanted:
        return used, wanted
    if told.desc_act:
        sizes = np.bincount(order, minlength=count)
        return (used, wanted) if int(sizes.max()) > group else None
    in_order = np.arange(columns) // group
    return None if np.array_equal(order, in_order) else (used, wanted)


def _short(groups: list[int]) -> str:
    shown = ", ".join(str(one) for one in groups[:4])
    return "{" + shown + (", …" if len(groups) > 4 else "") + "}"


def _bits(c: Composition, told: Quantization) -> Iterator[Flaw]:
    rule = {"gptq": "gptq_bits", "awq": "awq_bits", "auto-round": "auto_round_bits"}.get(told.method)
    if rule is None and told.method == "compressed-tensors" and told.packed:
        rule = "gptq_bits"
    supported = c.rules.get(rule) if rule else None
    seen: set[int] = set()
    for place, bits in told.all_bits():
        if supported is None or bits in supported or bits in seen:
            continue
        seen.add(bits)
        whole = 32 % bits == 0
        factor = f"{32 / bits:.2f}".rstrip("0").rstrip(".")
        reason = "" if whole else f"; 32 / {bits} = {factor} weights in a word is no whole number"
        yield flaw(
            "quant-bits-unsupported",
            f"{c.engine or 'Engines'} cannot unpack {bits}-bit {told.method} weights{reason}.",
            file=c.model.path(told.file),
            pointer=f"{told.pointer}{place}",
            found={"bits": bits, "pack_factor": float(factor)},
            expected={"bits": supported},
        )


def _method(c: Composition, told: Quantization) -> Iterator[Flaw]:
    known = c.rules.get("quantizations")
    if known is not None and told.method and told.method not in known:
        yield flaw(
            "quant-method-unsupported",
            f"{c.engine} does not read the method {told.method}.",
            **_where(c, told),
            found=told.method,
            expected=sorted(known),
        )
    asked = c.declared.arguments.get("--quantization", "-q")
    if asked and told.method and told.method not in {asked, "auto-round", *_READ_BY.get(asked, ())}:
        yield flaw(
            "quant-argument-differs",
            f"The launch arguments say {asked}, and {told.file} says {told.method}.",
            **_where(c, told),
            found=asked,
            expected=told.method,
        )


def _libraries(c: Composition, told: Quantization) -> Iterator[Flaw]:
    for rule in table("libraries")["rules"]:
        version = c.rules.library(rule["library"])
        if version is None or told.method != rule["method"] or not is_within(version, rule["versions"]):
            continue
        places = weight_schemes(told.told) if rule["within"] == "weights" else [told.told]
        for place in places:
            if all(_is_one_of(place.get(key), values) for key, values in rule["when"].items()):
                yield flaw(
                    "quant-lib-rejects",
                    f"{rule['library']} {version} in the engine's image: {rule['says']}.",
                    **_where(c, told),
                    found={"library": rule["library"], "version": version}
                    | {key: place.get(key) for key in rule["when"]},
                    expected={"library": rule["library"], "not": rule["versions"]},
                )
                break


def _is_one_of(value: Any, values: list[Any]) -> bool:
    value = value.lower() if isinstance(value, str) else value  # as the library reads it
    return any(type(value) is type(one) and value == one for one in values)
