"""Runs every check over a composition, and says what was inferred on the way."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from gates.facts import gguf_quantization
from gates.files.header import Tensor
from gates.static import (
    adapters,
    context,
    draft,
    files,
    index,
    origins,
    quantization,
    sampling,
    serving,
    stops,
    template,
    topology,
    values,
    vocabulary,
    weights,
)
from gates.static.composition import Composition, Part
from gates.static.flaw import Flaw
from gates.static.listing import changed
from gates.static.shape import rope_of
from gates.static.vocabulary import embedding_rows
from schemas.result import Severity, Verdict

CHECKS: Final[dict[str, Callable[[Composition], Iterator[Flaw]]]] = {
    "files": files.check,
    "index": index.check,
    "weights": weights.check,
    "values": values.check,
    "tokenizer": vocabulary.check,
    "template": template.check,
    "stops": stops.check,
    "sampling": sampling.check,
    "quantization": quantization.check,
    "topology": topology.check,
    "context": context.check,
    "adapters": adapters.check,
    "draft": draft.check,
    "serving": serving.check,
    "stability": lambda c: changed(c.listing),
}
"""Every check in the order in which they run. `stability` is last: it sees what the others took time for."""

MOST_OF_A_CODE: Final = 200
_ORDER = {Severity.BLOCK: 0, Severity.WARN: 1, Severity.INFO: 2}


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found, what blocks first, and what was inferred."""

    flaws: tuple[Flaw, ...]
    inferred: dict[str, Any]

    @property
    def verdict(self) -> Verdict:
        """Failed when anything blocks, else passed."""
        return verdict_of(self.flaws)


def verdict_of(flaws: tuple[Flaw, ...]) -> Verdict:
    """Return the verdict that findings give."""
    return Verdict.FAILED if any(one.severity is Severity.BLOCK for one in flaws) else Verdict.PASSED


def examine(c: Composition, *, progress: Callable[[str], None] = lambda _: None, with_digest: bool = False) -> Examined:
    """Run every check.

    Args:
        c: what to look at.
        progress: takes the name of each check before it runs.
        with_digest: also hash the tensors that an engine loads.

    Raises:
        OSError: a file cannot be read any more.
    """
    found: list[Flaw] = []
    for name, check in CHECKS.items():
        progress(name)
        found += check(c)
    flaws = sorted(_bounded(found), key=lambda one: _ORDER[one.severity])
    return Examined(tuple(flaws), infer(c, with_digest=with_digest))


def _bounded(found: list[Flaw]) -> Iterator[Flaw]:
    """Yield each flaw once, and of one code no more than a report can hold; the last of these says how many follow."""
    by_code: dict[str, dict[tuple[str, str | None, str | None], Flaw]] = {}
    for one in found:
        by_code.setdefault(one.code, {}).setdefault((one.message, one.file, one.pointer), one)
    for flaws in by_code.values():
        kept, more = list(flaws.values())[:MOST_OF_A_CODE], len(flaws) - MOST_OF_A_CODE
        yield from kept[:-1]
        yield kept[-1] if more <= 0 else replace(kept[-1], message=f"{kept[-1].message} {more} more are like this.")


def infer(c: Composition, *, with_digest: bool = False) -> dict[str, Any]:
    """Return what the files say about the composition, as JSON, and under `from` where each value came from."""
    part, shape = c.model, c.model.shape
    rope = rope_of(shape)
    tensors = part.weights.effective
    words = part.tokenizer
    quantization_told = c.quantization
    told: dict[str, Any] = {
        "engine": {"name": c.engine, "version": c.declared.version},
        "format": "gguf" if part.gguf is not None else "safetensors" if part.weights.shards else None,
        "architecture": shape.architecture or None,
        "model_type": shape.model_type or None,
        "shape": {
            "layers": shape.layers,
            "hidden": shape.hidden,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "intermediate": shape.intermediate,
            "experts": shape.experts,
            "vocabulary": shape.vocabulary,
            "tied": shape.is_tied,
        },
        "context": {"derived": context.derived(shape), "requested": context.requested(c)},
        "rope": {"theta": rope["theta"], "type": rope["type"], "factor": rope["factor"]},
        "weights": {
            "files": part.weights.used_files,
            "tensors": len(tensors),
            "effective_bytes": part.weights.effective_bytes,
            "superseded": len(part.weights.superseded),
            "dtypes": _dtypes(placed.tensor for placed in tensors.values()),
        },
        "embedding_rows": embedding_rows(part),
        "tokenizer": None if words is None else {"size": words.size, "prefix": words.prefix},
        "template": None if c.template is None else c.template[1],
        "quantization": None
        if quantization_told is None
        else {
            "method": quantization_told.method,
            "bits": quantization_told.bits,
            "group_size": quantization_told.group,
        },
        "stops": {**stops.sources_of(part), "effective": stops.effective_stops(c, stops.sources_of(part))},
        "sampling": sampling.effective_defaults(c),
        "adapters": [adapter.name for adapter, _ in c.adapters],
        "draft": None if c.draft is None else c.draft.folder or ".",
        "left_out": list(c.listing.left_out),
    }
    if with_digest:
        told["weights"]["digest"] = part.weights.digest()
    told |= _of_gguf(c, part)
    return told | {"from": origins.of(c, told)}


def _dtypes(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Return number formats → bytes in each, the most first."""
    found: dict[str, int] = {}
    for one in tensors:
        found[one.dtype] = found.get(one.dtype, 0) + one.size
    return dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))


def _of_gguf(c: Composition, part: Part) -> dict[str, Any]:
    """Return what a GGUF header says where other files do not."""
    header = part.gguf
    if header is None:
        return {}
    told = header.metadata
    name = told.get("general.architecture")
    tensors = [tensor for one in part.gguf_files.values() for tensor in one.tensors]
    rows = next((tensor.shape[0] for tensor in tensors if tensor.name == "token_embd.weight"), None)
    shape = {
        key: value if type(value := told.get(f"{name}.{end}")) is int else None
        for key, end in origins.GGUF_SHAPE.items()
    }
    has_head = any(tensor.name == "output.weight" for tensor in tensors)
    quantized = gguf_quantization(header)
    return {
        "architecture": name,
        "model_type": name,
        "shape": shape | {"vocabulary": rows, "tied": not has_head},
        "context": {
            "derived": context.derived_of_gguf(part),
            "requested": c.declared.arguments.number("-c", "--ctx-size"),
        },
        "weights": {
            "files": list(part.gguf_files),
            "tensors": len(tensors),
            "effective_bytes": sum(tensor.size for tensor in tensors),
            "superseded": 0,
            "dtypes": _dtypes(tensors),
        },
        "quantization": None
        if quantized is None
        else {"method": quantized["method"], "bits": quantized.get("bits"), "group_size": None},
        "embedding_rows": rows,
    }
