"""Checks of the layout over devices: everything that is divided can be, and the devices know the number format."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from gates.files.refusal import shown
from gates.static.composition import Composition
from gates.static.experts import even_experts, expert_degree
from gates.static.flaw import MAX_ITEMS, Flaw, Where, flaw
from gates.static.quantized import Quantization
from gates.static.rules import capability, lacks
from gates.static.shape import MOST, Shape, moe_layers
from schemas.result import Severity
from schemas.short import agreeing, many

_KEY_HEADS: Final = (
    *("num_global_key_value_heads", "swa_num_key_value_heads", "num_key_value_heads_per_layer"),
    *("num_key_value_heads", "num_kv_heads"),
)
_RECURRENT: Final = {
    "linear_num_key_heads": "key heads of linear attention",
    "linear_num_value_heads": "value heads of linear attention",
    "mamba_n_heads": "heads of a state-space layer",
    "mamba_num_heads": "heads of a state-space layer",
    "mamba_n_groups": "groups of a state-space layer",
    "n_groups": "groups of a state-space layer",
}
_GROUPS: Final = frozenset({"mamba_n_groups", "n_groups"})
_METHOD: Final = ("--quantization", "-q")
_SIZES_OF: Final = {
    "num_attention_heads": "attention_width",
    "num_key_value_heads": "key_width",
    "n_shared_experts": "shared_experts_width",
}
"""What a size is called that is no number of a configuration, by the key that it comes from."""
_MOST_DEGREES: Final = 16
_SHOWN_DEGREES: Final = 8
LEAST_REFINED: Final = 32
"""Smallest block that vLLM makes of larger ones. Source: its fused_moe/oracle/fp8.py."""


def check(c: Composition) -> Iterator[Flaw]:
    """Check the declared layout against the model's sizes."""
    yield from _degrees(c)
    shape, told = c.model.shape, c.quantization
    if c.model.config:
        yield from _layers(c, shape)
        yield from _experts(c, shape)
    found = list(_tensor(c, shape, told))
    if any(_names_degrees(one) for one in found):
        fitting = _fitting(c, shape, told)
        found = [_with_degrees(one, fitting) if _names_degrees(one) else one for one in found]
    yield from found
    yield from list(_arch(c, told)) or _brain(c, shape)
    if told is not None and told.patience.is_spent:
        yield _slow(c, told)


def _slow(c: Composition, told: Quantization) -> Flaw:
    """Say that patterns were left untried, by which this check and that of quantization would have gone."""
    patterns = [*told.ignored, *told.only, *(target for scheme in told.schemes for target in scheme.targets)]
    return flaw(
        "quant-patterns-slow",
        f"{many(len(patterns), 'pattern', 'takes', 'take')} longer than {told.patience.seconds:g} s to be held against "
        "the modules, so that not all were.",
        file=c.model.path(told.file),
        pointer=told.pointer,
        found={"patterns": [shown(one) for one in patterns[:MAX_ITEMS]], "count": len(patterns)},
        expected={"at_most_seconds": told.patience.seconds},
    )


def _tensor(c: Composition, shape: Shape, told: Quantization | None) -> Iterator[Flaw]:
    """Find what the devices that share each layer cannot share."""
    if c.model.config:
        yield from _heads(c, shape)
        yield from _widths(c, shape)
    if told is not None:
        yield from _groups(c, shape, told)
        yield from _blocks(c, shape, told)


def _fitting(c: Composition, shape: Shape, told: Quantization | None) -> list[int]:
    """Return degrees that every rule of tensor parallelism lets pass: powers of two, and divisors of the heads."""
    heads = shape.heads or 1
    tried = sorted({1, 2, 4, 8, 16, 32, 64, *(n for n in range(1, 65) if heads % n == 0)})[:_MOST_DEGREES]
    found = []
    for degree in tried:
        declared = replace(c.declared, parallel={**c.declared.parallel, "tensor": degree})
        other = replace(c, declared=declared)
        if all(one.severity is not Severity.BLOCK for one in _tensor(other, shape, told)):
            found.append(degree)
    return found


def _names_degrees(one: Flaw) -> bool:
    return isinstance(one.expected, dict) and "tp" in one.expected


def _with_degrees(one: Flaw, fitting: list[int]) -> Flaw:
    told = {**(one.expected if isinstance(one.expected, dict) else {}), "tp": fitting}
    if fitting:
        degrees = (
            f"{', '.join(map(str, fitting[:_SHOWN_DEGREES]))}{' and more' if len(fitting) > _SHOWN_DEGREES else ''}"
        )
        return replace(
            one,
            expected=told,
            advice=f"{one.advice.removesuffix('.')}; tp {degrees} {agreeing(len(fitting), 'fits', 'fit')}.",
        )
    advice = "No degree fits: choose an engine or version that takes these sizes, or weights in another form."
    return replace(one, expected=told, advice=advice)


def _degrees(c: Composition) -> Iterator[Flaw]:
    for kind in ("tensor", "pipeline", "expert", "data"):
        said, asked = c.declared.parallel.get(kind), c.declared.argument_degree(kind)
        if said and asked and said != asked:
            yield flaw(
                "topology-arguments-differ",
                f"The topology says {kind}_parallel {said}, and the launch arguments {asked}.",
                pointer=f"/topology/{kind}_parallel",
                found=asked,
                expected=said,
            )
    kinds = ("tensor", "pipeline", "context", *(() if c.declared.shares_attention else ("data",)))
    product = math.prod(c.declared.degree(kind) for kind in kinds)
    devices = c.declared.devices
    if devices and product > devices:
        yield flaw(
            "devices-short",
            f"The layout takes {many(product, 'device')}, and the hardware has {devices}.",
            pointer="/hardware/count",
            found=devices,
            expected=product,
        )


def _heads(c: Composition, shape: Shape) -> Iterator[Flaw]:
    degree, heads = c.declared.attention_degree, shape.heads
    if degree == 1:
        return
    if heads and heads % degree and c.rules.get("heads_divide"):
        yield flaw(
            "heads-tp",
            f"{many(heads, 'attention head')} cannot be divided over {degree} devices.",
            file=c.model.path("config.json"),
            pointer=shape.at("num_attention_heads"),
            found={"heads": heads, "tp": degree},
            expected={"tp": []},  # told with all that fits
        )
    if c.rules.get("heads_divide"):
        yield from _recurrent(c, shape, degree)
    if shape.is_mla:
        return
    seen = set[int]()
    for key, keys in key_heads(shape):
        if keys % degree and keys not in seen:
            seen.add(keys)
            yield _key_heads(c, shape, key, keys)


def key_heads(shape: Shape) -> Iterator[tuple[str, int]]:
    """Yield each number of key-value heads that some layer has, and the key that says it.

    Source: the configurations of Gemma 4 (`num_global_key_value_heads`), MiMo-V2 (`swa_num_key_value_heads`), OpenELM
    and DeciLM (one number a layer).
    """
    if shape.kv_heads:
        yield "num_key_value_heads", shape.kv_heads
    for key in _KEY_HEADS:
        told = shape.text.get(key)
        for one in told if isinstance(told, list) else [told]:
            if type(one) is int and 0 < one <= MOST["kv_heads"]:
                yield key, one


def _key_heads(c: Composition, shape: Shape, key: str, keys: int) -> Flaw:
    degree = c.declared.attention_degree
    where: Where = {"file": c.model.path("config.json"), "pointer": shape.at(key)}
    found = {"kv_heads": keys, "tp": degree}
    if degree % keys:
        message = f"{many(keys, 'key-value head')} can be neither divided nor copied over {degree} devices."
        expected: dict[str, object] = {"kv_heads": f"a divisor or multiple of {degree}"}
        return flaw("kv-heads-lt-tp", message, **where, found=found, expected=expected)
    if c.rules.get("kv_replication") is True:
        return flaw(
            "kv-replicated",
            f"{many(keys, 'key-value head', 'is', 'are')} copied over {degree} devices: the KV cache per GPU is not "
            f"reduced below tp {keys}.",
            **where,
            found=found,
            expected={"kv_heads": f"a multiple of {degree}"},
        )
    engine, fewer = c.engine or "The engine", agreeing(keys, "is", "are")
    message = f"{engine} does not copy key-value heads, and {keys} {fewer} fewer than {degree} devices."
    return flaw("kv-heads-lt-tp", message, **where, found=found, expected={"tp": keys})


def _recurrent(c: Composition, shape: Shape, degree: int) -> Iterator[Flaw]:
    """Find heads of recurrent layers that cannot be divided.

    Source: vLLM 0.32, mamba_mixer2.py (`num_heads` must divide; groups must, unless there is one) and the gated delta
    net of Qwen3-Next, which divides key and value heads.
    """
    for key, what in _RECURRENT.items():
        count = shape.text.get(key)
        if type(count) is not int or count <= 0 or count % degree == 0 or (key in _GROUPS and count == 1):
            continue
        yield flaw(
            "heads-tp",
            f"{count} {what} cannot be divided over {degree} devices.",
            file=c.model.path("config.json"),
            pointer=shape.at(key),
            found={"heads": count, "tp": degree},
            expected={"tp": []},
        )


def _layers(c: Composition, shape: Shape) -> Iterator[Flaw]:
    degree = c.declared.degree("pipeline")
    if shape.layers and degree > shape.layers:
        yield flaw(
            "layers-pp",
            f"{many(shape.layers, 'layer')} cannot be divided over {degree} stages.",
            file=c.model.path("config.json"),
            pointer=shape.at("num_hidden_layers"),
            found={"layers": shape.layers, "pp": degree},
            expected={"pp": shape.layers},
        )


def _experts(c: Composition, shape: Shape) -> Iterator[Flaw]:
    degree, even = expert_degree(c.declared, shape), even_experts(c, shape)
    flag = c.rules.get("experts_needed")
    is_dense = not shape.experts and bool(shape.family) and "moe" not in shape.family
    if degree == 1 and is_dense and flag and c.declared.arguments.has(flag):
        yield flaw(
            "experts-ep",
            f"{flag} is said, {c.engine} refuses it of a model without experts, and {shape.model_type} has none.",
            pointer=flag,
            found={"experts": 0},
            expected={"experts": "1 or more"},
            advice="Leave the argument out.",
        )
    if degree == 1:
        return
    pointer = "/topology/expert_parallel"  # of what is declared, so of no file
    if not shape.experts:
        yield flaw(
            "experts-ep",
            f"The model has no experts to divide over {degree} devices.",
            pointer=pointer,
            found={"ep": degree},
            expected={"ep": [1]},
        )
    elif degree > shape.experts or (even is not None and even % degree):
        fitting = [one for one in range(1, shape.experts + 1) if even is None or even % one == 0]
        yield flaw(
            "experts-ep",
            f"{many(even or shape.experts, 'expert')} cannot be divided over {degree} devices.",
            pointer=pointer,
            found={"experts": even or shape.experts, "ep": degree},
            expected={"ep": fitting[:16]},
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """A width that devices share: key in the configuration, what it is, its size, and the modules that have it."""

    key: str
    what: str
    size: int
    paths: tuple[str, ...]
    layers: tuple[int, ...]
    degree: int

    @property
    def name(self) -> str:
        """What the size is called: the key's name, where it is that key's own number."""
        return _SIZES_OF.get(self.key, self.key)


def _divided(c: Composition, shape: Shape) -> Iterator[_Part]:
    """Yield what row-parallel layers divide, but attention.

    Source: SGLang's `--moe-dense-tp-size`, for the dense layers of a model with experts; with an all-to-all of tokens
    (`--moe-a2a-backend`) experts are spread, and the shared ones whole on each device.
    """
    sparse, count, degree = moe_layers(shape), shape.layers or 1, c.declared.degree("tensor")
    arguments = c.declared.arguments
    sends = arguments.get("--moe-a2a-backend") not in (None, "none") or arguments.has("--enable-deepep-moe")
    inner_degree = (arguments.number("--moe-dense-tp-size") or degree) if shape.experts else degree
    layers = tuple(range(min(count, MOST["layers"])))
    dense = tuple(layer for layer in layers if not shape.experts or layer not in sparse)
    if shape.intermediate and (dense or not sparse):
        paths = ("mlp.down_proj", "feed_forward.down_proj", "mlp.fc2", "feed_forward.w2")
        yield _Part(
            "intermediate_size", "the MLP's inner size", shape.intermediate, paths, dense or layers, inner_degree
        )
    spread = _is_spread(c)
    moe = tuple(layer for layer in layers if layer in sparse) or layers
    experts = _expert_part(c, shape)
    if experts is not None and not spread:
        yield experts
    shared = ("mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj", "feed_forward.shared_expert.down_proj")
    if sends:
        return
    if shape.shared_intermediate:
        key = "shared_expert_intermediate_size"
        yield _Part(key, "the shared expert's inner size", shape.shared_intermediate, shared, moe, degree)
    several = shape.text.get("n_shared_experts")
    if shape.moe_intermediate and type(several) is int and 0 < several <= MOST["experts"]:
        size = shape.moe_intermediate * several
        yield _Part("n_shared_experts", "the shared experts' inner size", size, shared, moe, degree)


def _is_spread(c: Composition) -> bool:
    """Say whether experts lie whole on their devices."""
    arguments = c.declared.arguments
    sends = arguments.get("--moe-a2a-backend") not in (None, "none") or arguments.has("--enable-deepep-moe")
    return sends or c.declared.degree("expert") > 1 or arguments.has("--enable-expert-parallel", "--enable-ep-moe")


def _expert_part(c: Composition, shape: Shape) -> _Part | None:
    """Return the inner width of one routed expert; divided over no device where experts are spread."""
    if not shape.experts or not shape.moe_intermediate:
        return None
    sparse, layers = moe_layers(shape), tuple(range(min(shape.layers or 1, MOST["layers"])))
    key = "intermediate_size" if "moe_intermediate_size" not in shape.text else "moe_intermediate_size"
    inner = ("mlp.experts.0.down_proj", "block_sparse_moe.experts.0.w2", "feed_forward.experts.down_proj")
    moe = tuple(layer for layer in layers if layer in sparse) or layers
    degree = 1 if _is_spread(c) else c.declared.degree("tensor")
    return _Part(key, "an expert's inner size", shape.moe_intermediate, inner, moe, degree)


def _attention(c: Composition, shape: Shape) -> Iterator[_Part]:
    """Yield the width of the attention's output, which devices share by heads."""
    width = shape.value_dim if shape.is_mla else shape.head_dim
    if shape.heads and width:
        layers, degree = tuple(range(min(shape.layers or 1, MOST["layers"]))), c.declared.attention_degree
        paths = ("self_attn.o_proj", "self_attention.dense", "attention.wo")
        yield _Part("num_attention_heads", "the attention's output", shape.heads * width, paths, layers, degree)


def _widths(c: Composition, shape: Shape) -> Iterator[Flaw]:
    for one in _divided(c, shape):
        if one.size % one.degree:
            yield flaw(
                "intermediate-tp",
                f"{_first_upper(one.what)} {one.size} cannot be divided over {one.degree} devices.",
                file=c.model.path("config.json"),
                pointer=shape.at(one.key),
                found={one.name: one.size, "tp": one.degree},
                expected={"tp": []},
            )


def _groups(c: Composition, shape: Shape, told: Quantization) -> Iterator[Flaw]:
    if told.method in {"mxfp4", "bitsandbytes"}:
        return
    for one in (*_divided(c, shape), *_attention(c, shape)):
        if told.method == "modelopt" and one.degree == 1:
            continue  # kernels pad what no devices share
        sizes = {scheme.group for scheme in told.schemes_of(one.paths, one.layers) if not scheme.block}
        cut = sorted(
            group for group in sizes if group and one.size % one.degree == 0 and one.size // one.degree % group
        )
        if cut:
            yield _cut_groups(c, shape, one, cut[-1])


def _cut_groups(c: Composition, shape: Shape, one: _Part, group: int) -> Flaw:
    share = one.size // one.degree
    over = "" if one.degree == 1 else f"over {one.degree} devices is {share}, "
    return flaw(
        "quant-group-tp",
        f"{_first_upper(one.what)} {one.size} {over or 'is '}{share / group:g} groups of {group}.",
        file=c.model.path("config.json"),
        pointer=shape.at(one.key),
        found={one.name: one.size, "tp": one.degree, "per_device": share, "groups": share / group},
        expected={"group_size": group, "tp": []},
    )


def _blocks(c: Composition, shape: Shape, told: Quantization) -> Iterator[Flaw]:
    if c.rules.get("fp8_sub_blocks") is True:
        return
    rule, experts = c.rules.get("fp8_expert_blocks"), _expert_part(c, shape)
    for one in (*_divided(c, shape), *_attention(c, shape)):
        if rule is not None and one == experts:
            continue
        for block in _blocks_of(told, one):
            if one.degree > 1 and one.size % one.degree == 0 and one.size // one.degree % max(block):
                yield _cut_block(c, shape, one, block, max(block))
    if rule is not None and experts is not None:
        yield from _expert_blocks(c, shape, told, experts)
    yield from _merged_blocks(c, shape, told)


def _blocks_of(told: Quantization, one: _Part) -> list[tuple[int, int]]:
    return sorted({scheme.block for scheme in told.schemes_of(one.paths, one.layers) if scheme.block})


def _expert_blocks(c: Composition, shape: Shape, told: Quantization, experts: _Part) -> Iterator[Flaw]:
    """Find experts whose share is no whole number of blocks: gate and up are merged, so that one device counts too.

    Rows of gate and up have to be whole blocks, and the columns of down where there are several devices. With the rule
    `refined` scales are repeated for smaller blocks, down to LEAST_REFINED, which divide everything.
    """
    refined = c.rules.get("fp8_expert_blocks") == "refined" and told.method == "fp8"
    if experts.size % experts.degree or (refined and c.declared.arguments.get("--moe-backend") not in (None, "auto")):
        return  # told by itself; and of kernels that were chosen some pad
    share = experts.size // experts.degree
    for rows, columns in _blocks_of(told, experts):
        steps = (rows, columns) if c.declared.degree("tensor") > 1 else (rows,)
        cut = [step for step in steps if share % step]
        smaller = math.gcd(rows, columns, share, shape.hidden or 1)
        if cut and not (refined and smaller >= LEAST_REFINED):
            yield _cut_block(c, shape, experts, (rows, columns), cut[0])


def _merged_blocks(c: Composition, shape: Shape, told: Quantization) -> Iterator[Flaw]:
    """Find key and value projections whose share of rows is no whole number of blocks.

    They are divided by heads, and copied where there are fewer heads than devices. On one device they count too where
    an engine wants whole blocks of each part of what it merges.
    """
    degree, keys, width = c.declared.attention_degree, shape.kv_heads, shape.head_dim
    if degree == 1 and c.rules.get("fp8_merged_whole") is not True:
        return
    if not keys or not width or shape.is_mla or c.rules.get("fp8_merged_sub_blocks") is True:
        return
    layers = tuple(range(min(shape.layers or 1, MOST["layers"])))
    one = _Part("num_key_value_heads", "the keys' width", keys * width, ("self_attn.k_proj",), layers, degree)
    share = max(1, keys // degree) * width
    for block in _blocks_of(told, one):
        if (keys % degree == 0 or degree % keys == 0) and share % block[0]:
            yield _cut_block(c, shape, one, block, block[0], share)


def _cut_block(
    c: Composition, shape: Shape, one: _Part, block: tuple[int, int], step: int, share: int | None = None
) -> Flaw:
    share = one.size // one.degree if share is None else share
    over = "is whole on each device" if one.degree == 1 else f"over {one.degree} devices is {share}"
    return flaw(
        "fp8-block-tp",
        f"{_first_upper(one.what)} {one.size} {over}, and {share} mod {step} = {share % step}.",
        file=c.model.path("config.json"),
        pointer=shape.at(one.key),
        found={one.name: one.size, "tp": one.degree, "per_device": share, "remainder": share % step},
        expected={"block": list(block), "tp": []},
    )


def _arch(c: Composition, told: Quantization | None) -> Iterator[Flaw]:
    """Find accelerators without 8-bit or 4-bit floats, for weights that have them or are given them at the start."""
    asked = c.declared.arguments.get(*_METHOD)
    kind, bits = ("nvfp4", 4) if told is not None and told.is_nvfp4 else ("fp8", 8)
    if kind == "fp8" and not (told.is_fp8 if told is not None else asked == "fp8"):
        return
    found, rule = capability(c.declared.accelerator), c.rules.get(kind)
    has_none = lacks(c.declared.accelerator, kind)
    if not has_none and (found is None or not isinstance(rule, dict) or found >= rule["native"]):
        return
    native, fallback = (rule.get("native"), rule.get("fallback")) if isinstance(rule, dict) else (None, None)
    can = found is not None and fallback is not None and found >= fallback
    name = c.declared.accelerator if found is None else f"sm_{found}"
    method = f"the weights are {told.method}" if told is not None else f"{_METHOD[0]} {asked} is asked for"
    message = f"{name} has no {bits}-bit floating point arithmetic, and {method}"
    yield flaw(
        "arch-unsupported",
        f"{message}; {c.engine} serves them weight-only there." if can else f"{message}; {c.engine} cannot serve them.",
        severity=Severity.WARN if can else Severity.BLOCK,
        pointer="/hardware/accelerator",
        found={"arch": name, "engine": c.engine, "mode": "weight-only" if can else "none"},
        expected={"arch": f"sm_{native}"},
        advice="Throughput that was measured on another architecture says nothing here: measure again."
        if can
        else None,
    )


def _brain(c: Composition, shape: Shape) -> Iterator[Flaw]:
    """Find accelerators without bfloat16, where the engine would compute in another format than the weights'."""
    found, native = capability(c.declared.accelerator), c.rules.get("bfloat16")
    if found is None or type(native) is not int or found >= native:
        return
    asked = c.declared.arguments.get("--dtype")
    stored = next(
        (one[key] for one in (shape.text, shape.config) for key in ("torch_dtype", "dtype") if key in one), None
    )
    if asked not in (None, "auto", "bfloat16") or (asked != "bfloat16" and stored != "bfloat16"):
        return
    ends = "does not start with it" if asked == "bfloat16" else "computes in float16, which overflows earlier"
    yield flaw(
        "arch-unsupported",
        f"sm_{found} has no bfloat16 arithmetic, and the weights are bfloat16: {c.engine} {ends}.",
        severity=Severity.BLOCK if asked == "bfloat16" else Severity.WARN,
        pointer="--dtype" if asked == "bfloat16" else "/hardware/accelerator",
        found={"arch": f"sm_{found}", "engine": c.engine, "dtype": stored},
        expected={"arch": f"sm_{native}"},
        advice="Say --dtype float16 and record goldens with it, or choose newer GPUs.",
    )


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
