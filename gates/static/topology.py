"""Checks of the layout over devices: everything that is divided can be, and the devices know the number format."""

from collections.abc import Iterator

from gates.static.composition import Composition
from gates.static.flaw import Flaw, Where, flaw
from gates.static.quantized import Quantization
from gates.static.rules import capability
from gates.static.shape import Shape, moe_layers
from schemas.result import Severity


def check(c: Composition) -> Iterator[Flaw]:
    """Check the declared layout against the model's sizes."""
    yield from _degrees(c)
    shape = c.model.shape
    if c.model.config:
        yield from _heads(c, shape)
        yield from _layers(c, shape)
        yield from _experts(c, shape)
        yield from _widths(c, shape)
    told = c.quantization
    if told is not None:
        yield from _groups(c, shape, told)
        yield from _blocks(c, shape, told)
        yield from _arch(c, told)


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
    degrees = [c.declared.degree(kind) for kind in ("tensor", "pipeline", "data", "context")]
    product = degrees[0] * degrees[1] * degrees[2] * degrees[3]
    devices = c.declared.devices
    if devices and product > devices:
        yield flaw(
            "devices-short",
            f"The layout takes {product} devices, and the hardware has {devices}.",
            pointer="/hardware/count",
            found=devices,
            expected=product,
        )


def _heads(c: Composition, shape: Shape) -> Iterator[Flaw]:
    degree, heads, keys = c.declared.degree("tensor"), shape.heads, shape.kv_heads
    if degree == 1:
        return
    if heads and heads % degree and c.rules.get("heads_divide"):
        yield flaw(
            "heads-tp",
            f"{heads} attention heads cannot be divided over {degree} devices.",
            file=c.model.path("config.json"),
            pointer=shape.at("num_attention_heads"),
            found={"heads": heads, "tp": degree},
            expected={"tp": [one for one in range(1, heads + 1) if heads % one == 0][:16]},
        )
    if not keys or shape.is_mla or keys % degree == 0:
        return
    where: Where = {"file": c.model.path("config.json"), "pointer": shape.at("num_key_value_heads")}
    found = {"kv_heads": keys, "tp": degree}
    if degree > keys and degree % keys == 0:
        if c.rules.get("kv_replication") is True:
            yield flaw(
                "kv-replicated",
                f"{keys} key-value heads are copied over {degree} devices: the KV cache per GPU is not reduced below "
                f"tp {keys}.",
                **where,
                found=found,
            )
            return
        message = (
            f"{c.engine or 'The engine'} does not copy key-value heads, and {keys} are fewer than {degree} devices."
        )
        yield flaw("kv-heads-lt-tp", message, **where, found=found, expected={"tp": keys})
    else:
        message = f"{keys} key-value heads can be neither divided nor copied over {degree} devices."
        yield flaw(
            "kv-heads-lt-tp", message, **where, found=found, expected={"kv_heads": f"a divisor or multiple of {degree}"}
        )


def _layers(c: Composition, shape: Shape) -> Iterator[Flaw]:
    degree = c.declared.degree("pipeline")
    if shape.layers and degree > shape.layers:
        yield flaw(
            "layers-pp",
            f"{shape.layers} layers cannot be divided over {degree} stages.",
            file=c.model.path("config.json"),
            pointer=shape.at("num_hidden_layers"),
            found={"layers": shape.layers, "pp": degree},
            expected={"pp": shape.layers},
        )


def _experts(c: Composition, shape: Shape) -> Iterator[Flaw]:
    degree = c.declared.parallel.get("expert") or c.declared.argument_degree("expert") or 1
    if degree == 1:
        return
    where: Where = {"file": c.model.path("config.json"), "pointer": "/topology/expert_parallel"}
    if not shape.experts:
        yield flaw(
            "experts-ep", f"The model has no experts to divide over {degree} devices.", **where, found={"ep": degree}
        )
    elif shape.experts % degree:
        yield flaw(
            "experts-ep",
            f"{shape.experts} experts cannot be divided over {degree} devices.",
            **where,
            found={"experts": shape.experts, "ep": degree},
            expected={"ep": [one for one in range(1, shape.experts + 1) if shape.experts % one == 0][:16]},
        )


def _divided(c: Composition, shape: Shape) -> Iterator[tuple[str, str, int]]:
    """Yield what row-parallel layers divide: (key in the configuration, what it is, size)."""
    sparse = moe_layers(shape)
    dense = not shape.experts or (shape.layers is not None and len(sparse) < shape.layers)
    if shape.intermediate and (dense or not sparse):
        yield "intermediate_size", "the MLP's inner size", shape.intermediate
    spread = c.declared.degree("expert") > 1 or c.declared.arguments.has("--enable-expert-parallel", "--enable-ep-moe")
    if shape.experts and shape.moe_intermediate and not spread:
        key = "intermediate_size" if "moe_intermediate_size" not in shape.text else "moe_intermediate_size"
        yield key, "an expert's inner size", shape.moe_intermediate
    if shape.shared_intermediate:
        yield "shared_expert_intermediate_size", "the shared expert's inner size", shape.shared_intermediate


def _attention(shape: Shape) -> int | None:
    width = shape.value_dim if shape.is_mla else shape.head_dim
    return shape.heads * width if shape.heads and width else None


def _widths(c: Composition, shape: Shape) -> Iterator[Flaw]:
    degree = c.declared.degree("tensor")
    for key, what, size in _divided(c, shape):
        if size % degree:
            yield flaw(
                "intermediate-tp",
                f"{_first_upper(what)} {size} cannot be divided over {degree} devices.",
                file=c.model.path("config.json"),
                pointer=shape.at(key),
                found={key: size, "tp": degree},
                expected={"tp": [one for one in (1, 2, 4, 8, 16, 32, 64) if size % one == 0]},
            )


def _groups(c: Composition, shape: Shape, told: Quantization) -> Iterator[Flaw]:
    degree, group = c.declared.degree("tensor"), told.group
    if group is None or told.block or told.method in {"mxfp4", "bitsandbytes"}:
        return
    sizes = list(_divided(c, shape))
    if (width := _attention(shape)) is not None:
        sizes.append(("num_attention_heads", "the attention's output", width))
    modules = {"num_attention_heads": "o_proj"}
    for key, what, size in sizes:
        if size % degree or size // degree % group == 0 or told.ignores(f"x.{modules.get(key, 'down_proj')}"):
            continue
        share = size // degree
        fitting = [one for one in (1, 2, 4, 8, 16, 32) if size % one == 0 and size // one % group == 0]
        yield flaw(
            "quant-group-tp",
            f"{_first_upper(what)} {size} over {degree} devices is {share}, {share / group:g} groups of {group}.",
            file=c.model.path("config.json"),
            pointer=shape.at(key),
            found={key: size, "tp": degree, "per_device": share, "groups": share / group},
            expected={"group_size": group, "tp": fitting},
        )


def _blocks(c: Composition, shape: Shape, told: Quantization) -> Iterator[Flaw]:
    degree, block = c.declared.degree("tensor"), told.block
    if block is None or degree == 1 or c.rules.get("fp8_sub_blocks") is True:
        return
    sizes = list(_divided(c, shape))
    if (width := _attention(shape)) is not None:
        sizes.append(("num_attention_heads", "the attention's output", width))
    shared = shape.text.get("n_shared_experts")
    if shape.moe_intermediate and type(shared) is int and shared:
        sizes.append(("n_shared_experts", "the shared experts' inner size", shape.moe_intermediate * shared))
    step = max(block)
    for key, what, size in sizes:
        if size % degree or size // degree % step == 0:
            continue
        share = size // degree
        yield flaw(
            "fp8-block-tp",
            f"{_first_upper(what)} {size} over {degree} devices is {share}, and {share} mod {step} = {share % step}.",
            file=c.model.path("config.json"),
            pointer=shape.at(key),
            found={key: size, "tp": degree, "per_device": share, "remainder": share % step},
            expected={
                "block": list(block),
                "tp": [one for one in (1, 2, 4, 8, 16, 32) if size % one == 0 and size // one % step == 0],
            },
        )


def _arch(c: Composition, told: Quantization) -> Iterator[Flaw]:
    found = capability(c.declared.accelerator)
    if found is None or not told.is_fp8:
        return
    rule = c.rules.get("fp8")
    if not isinstance(rule, dict) or found >= rule["native"]:
        return
    fallback = rule.get("fallback")
    can = fallback is not None and found >= fallback
    message = f"sm_{found} has no 8-bit floating point arithmetic, and the weights are {told.method}"
    yield flaw(
        "arch-unsupported",
        f"{message}; {c.engine} serves them weight-only there." if can else f"{message}; {c.engine} cannot serve them.",
        severity=Severity.WARN if can else Severity.BLOCK,
        file=c.model.path(told.file),
        pointer="/hardware/accelerator",
        found={"arch": f"sm_{found}", "engine": c.engine, "mode": "weight-only" if can else "none"},
        expected={"arch": f"sm_{rule['native']}"},
        advice="Throughput that was measured on another architecture says nothing here: measure again."
        if can
        else None,
    )


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
