"""The plan of a composition: what each device holds in a layout, whether it fits, and the smallest layout that does."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import islice
from math import ceil
from typing import Any

from gates.files.refusal import FileRefused
from gates.placement import PlacementUnknown
from gates.placement.cache import BLOCK_TOKENS, Cache
from gates.placement.cost import per_million
from gates.placement.dtypes import numbers_of
from gates.placement.gguf import config_of
from gates.placement.layers import Reading, cache_of
from gates.placement.ledger import Judgement, Ledger, Reserve, judge
from gates.placement.shards import Group, Layout, groups_of, shares_of
from gates.placement.topology import Topology, candidates, obstacles, stages
from gates.static.composition import Composition, Part
from gates.static.context import derived, requested, rescaled
from gates.static.declared import Declared
from gates.static.experts import even_experts, expert_degree
from gates.static.names import embedding
from gates.static.shape import Shape, shape_of
from schemas.short import agreeing, many

UTILIZATION = Decimal("0.90")
_UTILIZATION_FLAGS = ("--gpu-memory-utilization", "--mem-fraction-static")
_KEEP_WINDOWS = ("--disable-hybrid-kv-cache-manager", "--swa-full", "--disable-hybrid-swa-memory")
# Engines that free what leaves a window: of all models, or of these. Source: vLLM's hybrid cache manager, llama.cpp's
# llama_kv_cache_iswa, and SGLang's is_hybrid_swa_model.
_FREES_WINDOWS = frozenset({"vllm", "llamacpp"})
_SGLANG_FREES = frozenset({"gpt_oss", "llama4", "llama4_text"})
_EXPANDS_LATENTS = frozenset({"transformers", "tgi"})
# Models with latents whose keys and values vLLM keeps whole, values as wide as keys. Source: its models/minicpm3.py.
_VLLM_EXPANDS = frozenset({"minicpm3"})
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LISTED = 3
_WEIGHTS = re.compile(r".*\.(safetensors|gguf)")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of the plan. None takes what the composition declares, or the default that the plan then states.

    `among` are the layouts that the smallest is looked for in. `price` is of one device and hour in any currency,
    `rate` the output tokens a second that one replica of the judged layout was measured to sustain.
    """

    reserve: Reserve
    topology: Topology | None = None
    among: Sequence[Topology] | None = None
    context_tokens: int | None = None
    sequences: int | None = None
    price: Decimal | None = None
    rate: Decimal | None = None
    block_tokens: int = BLOCK_TOKENS
    cache_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Laid:
    """One layout: its devices, one of each stage, and the judgement."""

    topology: Topology
    judgement: Judgement
    ledgers: tuple[Ledger, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The judged layout, the smallest one that fits, all that were tried, and what was taken for granted."""

    judged: Laid
    smallest: Laid | None
    tried: tuple[Laid, ...]
    cache: Cache
    context_tokens: int
    sequences: int
    block_tokens: int
    per_million: Fraction | None
    assumed: tuple[str, ...]
    draft: Cache | None = None


@dataclass(frozen=True, slots=True)
class _Model:
    """Everything about a composition that no layout changes."""

    part: Part
    groups: tuple[Group, ...]
    shape: Shape
    cache: Cache
    engine: str | None
    adapters: int
    has_prediction: bool
    even_experts: int | None = None
    draft: "_Model | None" = None


def plan(c: Composition, asked: Asked) -> Plan:
    """Plan a composition.

    Raises:
        PlacementUnknown: something that decides the plan is not known or not whole; nothing is guessed.
    """
    model = _model(c, asked)
    context = asked.context_tokens or c.declared.context_tokens or requested(c) or derived(model.shape)
    if context is None:
        raise PlacementUnknown("/runtime/context_tokens", "no context is told anywhere: --context")
    wanted = asked.sequences or c.declared.max_sequences or 1
    topology = asked.topology or declared_topology(c.declared, model.shape)
    among = asked.among
    if among is None:
        among = candidates(spread_experts=topology.expert > 1 and topology.expert == topology.tensor)
    judged = _lay(model, topology, asked, context, wanted)
    tried = tuple(_lay(model, one, asked, context, wanted) for one in sorted(among, key=lambda one: one.devices))
    smallest = next((one for one in tried if one.judgement.fits), judged if judged.judgement.fits else None)
    if judged.judgement.fits and smallest is not None and judged.topology.devices < smallest.topology.devices:
        smallest = judged
    price = None
    if asked.price is not None and asked.rate is not None:
        price = per_million(asked.price * topology.devices, asked.rate)
    assumed = (*model.cache.assumed, *_beyond(c, model, context), *_assumed(model, asked))
    draft = None if model.draft is None else model.draft.cache
    return Plan(judged, smallest, tried, model.cache, context, wanted, asked.block_tokens, price, assumed, draft)


def reserve_of(declared: Declared, stated: Reserve, utilization: Decimal | None) -> Reserve:
    """Return what is stated of each device, with the share of memory that was asked for, or else launched with.

    Raises:
        PlacementUnknown: the launch argument is no number above 0 and at most 1.
    """
    if utilization is None:
        text = declared.arguments.get(*_UTILIZATION_FLAGS)
        try:
            utilization = UTILIZATION if text is None else Decimal(text)
        except InvalidOperation:
            raise PlacementUnknown(_UTILIZATION_FLAGS[0], f"{text!r} is no number") from None
    if not utilization.is_finite() or not 0 < utilization <= 1:
        raise PlacementUnknown(_UTILIZATION_FLAGS[0], f"{utilization} is not above 0 and at most 1")
    return replace(stated, utilization=utilization)


def declared_topology(declared: Declared, shape: Shape) -> Topology:
    """Return the layout of one replica as it is declared.

    Raises:
        PlacementUnknown: it divides contexts over devices, which no rule here counts.
    """
    if declared.degree("context") > 1:
        raise PlacementUnknown("/topology/context_parallel", "what a divided context takes is not counted")
    tensor, pipeline = declared.degree("tensor"), declared.degree("pipeline")
    if declared.shares_attention and declared.degree("data") > 1:
        if not shape.experts:
            raise PlacementUnknown("--enable-dp-attention", "what it takes of a model without experts is not counted")
        # Each group attends to its own sequences with whole attention weights; all devices together hold the experts.
        return Topology(declared.attention_degree, pipeline, tensor)
    return Topology(tensor, pipeline, expert_degree(declared, shape))


# ---------------------------------------------------------------------------------------------------- the model


def _model(c: Composition, asked: Asked) -> _Model:
    if c.several:
        raise PlacementUnknown(c.model.folder or ".", "has several GGUF models; leave one, or choose it with --weights")
    draft = None if c.draft is None else _part_model(c, c.draft, asked)
    has_prediction = c.draft is None and c.declared.draft_method not in (None, "", "ngram")
    model = _part_model(c, c.model, asked, has_prediction=has_prediction)
    return replace(model, draft=draft, adapters=_adapter_bytes(c))


def _part_model(c: Composition, part: Part, asked: Asked, *, has_prediction: bool = False) -> _Model:
    _refuse_gaps(part)
    shape = part.shape
    if part.gguf is not None:
        try:
            shape = shape_of(config_of(part.gguf, part.entries[next(iter(part.gguf_files))]))
        except FileRefused as refused:
            raise PlacementUnknown(part.folder or ".", str(refused)) from None
    elif not part.config:
        said = "is missing or cannot be read"
        if part.has("adapter_config.json"):
            said = (
                "is missing: this is an adapter, which is planned with its base (adapters in the file of -f, or --from)"
            )
        raise PlacementUnknown(part.path("config.json"), said)
    first = embedding(part.weights.effective)
    stored = None if first is None else _FLOATS.get(part.weights.effective[first].tensor.dtype)
    numbers = numbers_of(shape, c.declared, c.engine, said=asked.cache_dtype, stored=stored)
    cache = cache_of(shape, numbers, _reading(c, shape))
    further = shape.text.get("num_nextn_predict_layers", shape.text.get("mtp_num_hidden_layers"))
    if has_prediction and type(further) is int and 0 < further <= len(cache.layers):
        cache = replace(cache, layers=cache.layers + (cache.layers[-1],) * further)
    return _Model(part, groups_of(part), shape, cache, c.engine, 0, has_prediction, even_experts(c, shape))


def _reading(c: Composition, shape: Shape) -> Reading:
    """Return how the engine keeps windows and latents; one that is known for neither keeps everything."""
    is_able = c.engine in _FREES_WINDOWS or (c.engine == "sglang" and shape.model_type in _SGLANG_FREES)
    return Reading(
        frees_windows=(c.engine is None or is_able) and not c.declared.arguments.has(*_KEEP_WINDOWS),
        keeps_latents=not (
            c.engine in _EXPANDS_LATENTS
            or (c.engine == "vllm" and shape.model_type in _VLLM_EXPANDS)
            or c.declared.variables.get("VLLM_MLA_DISABLE") == "1"
        ),
        pads_values=c.engine == "vllm",
    )


def _refuse_gaps(part: Part) -> None:
    """Refuse weights that are not all there: a plan of a part would say that the whole fits."""
    for path, entry in sorted(part.entries.items()):
        if entry.is_stub and _WEIGHTS.fullmatch(path):
            raise PlacementUnknown(entry.path, "has no tensors: it is empty, or a pointer to a file")
    gguf, shards = part.gguf_files, part.weights.shards
    unread = [one.file for one in (*part.weights.flaws, *part.flaws) if one.code == "header-invalid"]
    if unread:
        raise PlacementUnknown(unread[0] or ".", "its header cannot be read, so its tensors cannot be counted")
    if gguf and shards:
        raise PlacementUnknown(part.folder or ".", "has weights in two formats; leave one out")
    for (stem, _, count), numbers in part.weights.numbering().items():
        if len(numbers) < count:
            lost = _lost(part, stem, numbers, count)
            raise PlacementUnknown(part.folder or ".", f"has {len(numbers)} of {count} files of {stem}: {lost}")
    names = [tensor.name for header in gguf.values() for tensor in header.tensors]
    if len(set(names)) < len(names):
        raise PlacementUnknown(part.folder or ".", "has several GGUF models; leave one")
    told = part.weights.weight_map
    if told is not None and not gguf and len(part.weights.effective) < max(1, len(told)):
        missing = [name for name in told if name not in part.weights.effective]
        raise PlacementUnknown(part.weights.index_path or ".", _absent(part, told, missing))
    if not names and not part.weights.effective:
        raise PlacementUnknown(part.folder or ".", "has no tensors in safetensors or GGUF files")


def _lost(part: Part, stem: str, numbers: Collection[int], count: int) -> str:
    """Return which of a set of numbered files are not there."""
    ending = next(name.rpartition(".")[2] for name in part.entries if name.startswith(stem))
    first = 0 if 0 in numbers else 1
    missing = (number for number in range(first, count + first) if number not in numbers)
    named = [f"{stem}-{number:05}-of-{count:05}.{ending}" for number in islice(missing, _LISTED + 1)]
    more = f" and {count - len(numbers) - _LISTED} more" if count - len(numbers) > _LISTED else ""
    names = ", ".join(named[:_LISTED])
    return f"{names}{more} {agreeing(count - len(numbers), 'is', 'are')} not there"


def _absent(part: Part, told: Mapping[str, str], missing: Sequence[str]) -> str:
    """Return what an index names and no file holds: the files that are not there, or else the tensors."""
    files = sorted({told[name] for name in missing if told[name] not in part.entries})
    named = files or sorted(missing)
    more = f" and {len(named) - _LISTED} more" if len(named) > _LISTED else ""
    names = ", ".join(named[:_LISTED])
    if files:
        there = agreeing(len(named), "is", "are")
        return f"reads {many(len(missing), 'tensor')} from {names}{more}, which {there} not there"
    return f"names {many(len(named), 'tensor')} that no file holds: {names}{more}"


def _adapter_bytes(c: Composition) -> int:
    """Return what adapters take: a slot for each, or as many as are launched with, each of the largest at its rank.

    llama.cpp has no slots: it holds each adapter as it is, whether or not a request asks for it.
    """
    sizes = []
    most_rank = c.declared.arguments.number("--max-lora-rank") or 0
    for _, part in c.adapters:
        _refuse_gaps(part)
        stored = part.weights.effective_bytes or sum(
            tensor.size for header in part.gguf_files.values() for tensor in header.tensors
        )
        rank = part.object("adapter_config.json").get("r")
        scale = Fraction(max(most_rank, rank), rank) if type(rank) is int and rank > 0 else Fraction(1)
        sizes.append(ceil(stored * scale))
    if c.engine == "llamacpp":
        return sum(sizes)
    slots = c.declared.arguments.number("--max-loras", "--max-loras-per-batch") or len(sizes)
    return max(sizes, default=0) * max(slots, 1 if sizes else 0)


# ---------------------------------------------------------------------------------------------------- a layout


def _lay(model: _Model, topology: Topology, asked: Asked, context: int, wanted: int) -> Laid:
    even = model.even_experts
    blocked = next(obstacles(model.shape, topology, is_gguf=model.part.gguf is not None, even_experts=even), None)
    if blocked is not None:
        return Laid(topology, Judgement(fits=False, what="layout", message=blocked))
    held = stages(model.shape.layers or 1, topology.pipeline)
    layout = _layout(model, topology, held)
    shares, _ = shares_of(model.groups, layout)
    draft_bytes, draft_sequence = _draft(model, topology, asked, context)
    ledgers = []
    for number, (share, layers) in enumerate(zip(shares, held, strict=True)):
        is_last = number == len(held) - 1
        chosen = range(layers.start, len(model.cache.layers)) if is_last else layers
        size = model.cache.sequence_bytes(context, tensor=topology.tensor, layers=chosen, block=asked.block_tokens)
        ledgers.append(
            Ledger(
                stage=number,
                reserve=asked.reserve,
                weights=share.bytes,
                sequence_bytes=size + (draft_sequence if is_last else 0),
                adapters=model.adapters,
                draft=draft_bytes if is_last else 0,
                shares=share.lines(),
            )
        )
    judgement = judge(ledgers, context, wanted, groups=topology.groups)
    return Laid(topology, judgement, tuple(ledgers))


def _layout(model: _Model, topology: Topology, held: tuple[range, ...]) -> Layout:
    is_gguf = model.part.gguf is not None
    return Layout(model.shape, topology, held, model.engine, has_draft=model.has_prediction, is_gguf=is_gguf)


def _draft(model: _Model, topology: Topology, asked: Asked, context: int) -> tuple[int, int]:
    """Return the bytes of the draft's weights, and of its cache for one sequence, on each device of the last stage."""
    draft = model.draft
    if draft is None:
        return 0, 0
    inner = Topology(topology.tensor)
    if next(obstacles(draft.shape, inner, is_gguf=draft.part.gguf is not None), None) is not None:
        inner = Topology()  # what cannot be divided is whole on every device
    layout = _layout(draft, inner, stages(draft.shape.layers or 1, 1))
    shares, _ = shares_of(draft.groups, layout)
    size = draft.cache.sequence_bytes(context, tensor=inner.tensor, block=asked.block_tokens)
    return shares[0].bytes, size


def _beyond(c: Composition, model: _Model, context: int) -> Iterator[str]:
    """Say when more context is planned than the model has positions: memory alone does not make it answer there."""
    longest = max((one for one in (derived(model.shape), rescaled(c)) if one is not None), default=None)
    if longest is not None and context > longest:
        yield (
            f"{many(context, 'token')} of context {agreeing(context, 'is', 'are')} more than the {longest} that the "
            "model has positions for: only the memory is counted, and bundle validate blocks who declares them."
        )


def _assumed(model: _Model, asked: Asked) -> Iterator[str]:
    reserve = asked.reserve
    yield (
        f"On each device {reserve.activation_bytes:,} bytes are stated for activations, "
        f"{reserve.graph_bytes:,} for graphs and workspaces, and {reserve.headroom_bytes:,} as headroom."
    )
    yield "Weights are counted as they are stored; an engine that converts them while loading holds other sizes."
    layout = _layout(model, Topology(), (range(model.shape.layers or 1),))
    _, left_out = shares_of(model.groups, layout)
    if left_out:
        said = many(left_out, "byte")
        yield f"{said} of layers that predict further tokens are left out: nothing declares that they draft."
    if model.adapters:
        how = (
            "each with its own bytes"
            if model.engine == "llamacpp"
            else "one slot of the largest for each served at once"
        )
        yield f"Adapters are counted whole on every device, {how}."


# ---------------------------------------------------------------------------------------------------- as a document


def as_json(found: Plan) -> dict[str, Any]:
    """Return a plan as a document; whole numbers are bytes, tokens and sequences as their names say."""
    return {
        "verdict": "fits" if found.judged.judgement.fits else "does-not-fit",
        "decided_by": _decided(found.judged),
        "topology": _named(found.judged.topology),
        "context_tokens": found.context_tokens,
        "wanted_sequences": found.sequences,
        "sequences": found.judged.judgement.sequences,
        "cached_tokens": found.judged.judgement.cached_tokens,
        "cache": {
            "dtype": found.cache.dtype,
            "layers": found.cache.kinds(),
            "token_bytes": found.cache.token_bytes(),
            "windows": found.cache.windows,
            "token_bytes_beyond_windows": found.cache.further_bytes(),
            "draft_token_bytes": 0 if found.draft is None else found.draft.token_bytes(),
            "sequence_bytes": found.cache.sequence_bytes(found.context_tokens, block=found.block_tokens),
            "block_tokens": found.block_tokens,
        },
        "devices": [{"stage": one.stage} | one.lines() | {"weights": dict(one.shares)} for one in found.judged.ledgers],
        "smallest": None if found.smallest is None else _named(found.smallest.topology),
        "tried": [
            _named(one.topology)
            | {"fits": one.judgement.fits, "sequences": one.judgement.sequences, "says": one.judgement.message}
            for one in found.tried
        ],
        "price_per_million_output_tokens": None if found.per_million is None else money(found.per_million),
        "assumed": list(found.assumed),
    }


def money(amount: Fraction) -> str:
    """Return an amount with four decimals, rounded half to even."""
    return str((Decimal(amount.numerator) / Decimal(amount.denominator)).quantize(Decimal("0.0001")))


def _named(topology: Topology) -> dict[str, Any]:
    return {
        "tensor_parallel": topology.tensor,
        "pipeline_parallel": topology.pipeline,
        "expert_parallel": topology.expert,
        "devices": topology.devices,
    }


def _decided(laid: Laid) -> dict[str, Any]:
    one = laid.judgement
    return {
        "what": one.what,
        "stage": one.stage,
        "found": one.found,
        "expected": one.expected,
        "unit": one.unit,
        "says": one.message,
    }
