"""Checks of the tensors: all that the architecture needs are there, in the shapes that the configuration says."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from gates.files import gguf_adapter
from gates.files.refusal import shown
from gates.static import gguf_header, gguf_tensors, misshapen, names, native, required
from gates.static.composition import Composition, Part
from gates.static.flaw import MAX_ITEMS, Flaw, flaw, listed
from gates.static.misshapen import Misshapen
from gates.static.shape import KEYS, MOST, bounds_of
from gates.static.tensors import sample
from schemas.result import Severity
from schemas.short import agreeing, many

_USUAL_HEADS = tuple(one for one in names.HEADS if one.startswith("lm_head."))
MANY = 2
"""How many times more layers must have a tensor than lack it, where nothing but the layers tells which are whole."""
FORMS = 32
"""Layers of one kind that come in more forms than this are not alike at all."""
_OF_QUANTIZATION = re.compile(
    r"^(?P<module>.+)\.(weight\..+|weight_.+|qweight|qzeros|scales|g_idx|input_scale|input_global_scale|input_zero_point)$"
)
_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.")
_PLAIN = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


def check(c: Composition) -> Iterator[Flaw]:
    """Check the tensors of the model and of its draft."""
    for part in [c.model, *([c.draft] if c.draft is not None else [])]:
        for key, size in part.shape.absurd:
            bounds = bounds_of(part.shape, key)
            yield flaw(
                "size-absurd",
                f"config.json says {key} {size}, and models have from {bounds[0]} to {bounds[1]}.",
                file=part.path("config.json"),
                pointer=part.shape.at(key),
                found=size,
                expected={"from": bounds[0], "to": bounds[1]},
            )
        for key, value in part.shape.mistyped:
            yield flaw(
                "size-absurd",
                f"config.json says {key} {shown(value)} as a {type(value).__name__}, and libraries take whole numbers.",
                file=part.path("config.json"),
                pointer=part.shape.at(key),
                found=value,
                expected={"type": "int"},
            )
        yield from _empty(part)
        if part.weights.effective and part.config and not c.is_head(part):
            yield from _whole(part)
            yield from _layers(part)
            yield from _beyond(part)
            yield from _shapes(part)
        yield from _gguf(part)
    yield from native.check(c)


def _whole(part: Part) -> Iterator[Flaw]:
    weights, shape = part.weights, part.shape
    tensors = weights.effective
    told = set(weights.weight_map or {})  # in the index: then the check of the index speaks of it
    held = {name for shard in weights.shards for name in weights.held(shard)}
    if any(shard.header is None for shard in weights.shards.values()):
        return  # a file that cannot be read may hold anything
    missing = required.missing(part.needed, tensors, dict.fromkeys(told | held))
    if missing:
        lost = [one.name for one in missing]
        yield flaw(
            "tensor-missing",
            f"{many(len(lost), 'tensor')} that {shape.architecture or shape.model_type} needs "
            f"{agreeing(len(lost), 'is', 'are')} in no file: {listed(lost)}.",
            file=weights.index_path or part.path(next(iter(weights.shards))),
            found={"count": len(lost), "missing": lost[:MAX_ITEMS]},
            expected={"shapes": {one.name: list(one.shape) for one in missing[:MAX_ITEMS]}},
        )
    yield from _head(part, told | held)
    yield from _other_head(part)


def _head(part: Part, held: set[str]) -> Iterator[Flaw]:
    shape, tensors = part.shape, part.weights.effective
    if shape.is_tied is not False or not shape.is_generator or _holds_head(part, [*tensors, *held]):
        return
    start = names.embedding(tensors)
    if start is None or (shape.family.get("tensors") is None and _has_other_head(part, start)):
        return
    name = "lm_head.weight"
    where = shape.at("tie_word_embeddings")
    is_said = "tie_word_embeddings" in shape.text or "tie_word_embeddings" in shape.config
    said = "says tie_word_embeddings false" if is_said else f"says nothing, which means untied for {shape.model_type}"
    yield flaw(
        "head-missing",
        f"config.json {said}, and no file holds {name}.",
        file=part.path("config.json"),
        pointer=where,
        found={"missing": [name], "tie_word_embeddings": False},
        expected={"repairs": ["set tie_word_embeddings to true", f"write {name}"]},
    )


def _holds_head(part: Part, held: Iterable[str]) -> bool:
    """Say whether a head is there, for families whose names are known under the name that they look for."""
    table = part.shape.family.get("tensors")
    ends = names.HEADS if table is None else ("embed_out.weight",) if table == "gpt_neox" else _USUAL_HEADS
    return names.head(dict.fromkeys(held), ends) is not None


def _has_other_head(part: Part, start: str) -> bool:
    """Say whether a matrix outside the layers has a row for each token, under a name of the family's own."""
    tensors, inside = part.weights.effective, {one.name for one in part.layered}
    rows = tensors[start].tensor.shape[0]
    others = (placed.tensor.shape for name, placed in tensors.items() if name != start and name not in inside)
    return any(len(shape) == 2 and shape[0] == rows for shape in others)


def _other_head(part: Part) -> Iterator[Flaw]:
    """Find a head that is said to be the embedding, and is stored with other values."""
    shape, tensors = part.shape, part.weights.effective
    start, head = names.embedding(tensors), names.head(tensors)
    if shape.is_tied is not True or start is None or head is None or not head.endswith(".weight"):
        return
    one, other = tensors[start], tensors[head]
    is_alike = (one.tensor.dtype, one.tensor.shape) == (other.tensor.dtype, other.tensor.shape)
    if one.tensor.dtype not in _PLAIN or (is_alike and sample(one) == sample(other)):
        return
    yield flaw(
        "head-untied",
        f"config.json ties the head to {start}, and {head} holds other values: engines read one or the other.",
        file=other.entry.path,
        pointer=head,
        found={"head": head, "tie_word_embeddings": True},
        expected={"equal_to": start},
    )


def _layers(part: Part) -> Iterator[Flaw]:
    """Check by the layers alone, which works for any architecture."""
    shape, tensors = part.shape, part.weights.effective
    here = part.layered
    if not here or not shape.layers or any(shard.header is None for shard in part.weights.shards.values()):
        return
    by_layer: dict[int, set[str]] = {}
    for one in here:
        by_layer.setdefault(one.number, set()).add(one.rest)
    absent = [number for number in range(shape.layers) if number not in by_layer]
    indexed = set(part.weights.weight_map or {}) - set(tensors)
    known = shape.family.get("tensors") is not None
    if absent and not known and not indexed:
        yield flaw(
            "tensor-missing",
            f"config.json says {many(shape.layers, 'layer')}, and {len(absent)} of them "
            f"{agreeing(len(absent), 'has', 'have')} no tensors: {listed([str(one) for one in absent])}.",
            file=part.path("config.json"),
            pointer=shape.at("num_hidden_layers"),
            found={"layers": absent[:MAX_ITEMS], "count": len(absent)},
            expected=shape.layers,
        )
    elif not known and not indexed:
        yield from _odd_layer(part, by_layer, shape.layers)


def _empty(part: Part) -> Iterator[Flaw]:
    """Find weight files that are sound and hold no tensor at all."""
    shards = part.weights.shards
    if shards and all(one.header is not None and not one.header.tensors for one in shards.values()):
        yield flaw(
            "weights-absent",
            f"{listed(sorted(shards))} {agreeing(len(shards), 'holds', 'hold')} no tensors.",
            severity=Severity.BLOCK,
            file=part.path(next(iter(shards))),
            found={"files": sorted(shards)[:MAX_ITEMS], "tensors": 0},
            expected={"tensors": "those of the model"},
        )


def _beyond(part: Part) -> Iterator[Flaw]:
    """Find layers that the configuration does not count; those that predict further tokens hold more than any other.

    Source: vLLM's AutoWeightsLoader ("There is no module or parameter named"); transformers leaves them out.
    """
    shape = part.shape
    inside = {one.rest for one in part.layered if one.number < (shape.layers or 0)}
    beyond: dict[int, set[str]] = {}
    for one in part.layered:
        if shape.layers and one.number >= shape.layers:
            beyond.setdefault(one.number, set()).add(one.rest)
    numbers = sorted(number for number, rests in beyond.items() if rests <= inside)
    if numbers:
        count = max(numbers) + 1
        yield flaw(
            "layers-beyond",
            f"config.json says {many(shape.layers or 0, 'layer')}, and the files hold "
            f"{many(len(numbers), 'further one')}: {listed([str(number) for number in numbers])}.",
            file=part.path("config.json"),
            pointer=shape.at("num_hidden_layers"),
            found={"layers": shape.layers, "beyond": numbers[:MAX_ITEMS], "count": len(numbers)},
            expected={"layers": count},
        )


def _unpacked(rests: set[str]) -> set[str]:
    """Return a layer's tensors as they are called where nothing is quantized."""
    plain = {_OF_QUANTIZATION.sub(r"\g<module>.weight", one) for one in rests}
    return {one for one in plain if not one.endswith(("k_scale", "v_scale"))}


def _odd_layer(part: Part, by_layer: dict[int, set[str]], layers: int) -> Iterator[Flaw]:
    """Find the few layers that lack what the many of their kind have alike."""
    kinds = part.shape.text.get("layer_types", part.shape.text.get("layers_block_type"))
    if not isinstance(kinds, list) or len(kinds) < layers:
        kinds = [None] * layers
    if isinstance(part.shape.text.get("block_configs"), list):
        return  # an architecture that was searched for: each layer may lack what others have
    for kind in dict.fromkeys(str(one) for one in kinds):
        inner = {n: _unpacked(rests) for n, rests in by_layer.items() if n < layers and str(kinds[n]) == kind}
        counts = Counter(frozenset(rests) for rests in inner.values())
        if len(counts) > FORMS:
            continue
        for whole, others in counts.items():
            for number, rests in inner.items():
                if rests < whole and others >= MANY * counts[frozenset(rests)]:
                    lost = sorted(whole - rests)
                    yield flaw(
                        "tensor-missing",
                        f"Layer {number} lacks {many(len(lost), 'tensor')} that "
                        f"{many(others, 'other layer', 'has', 'have')}: {listed(lost)}.",
                        file=part.weights.index_path or part.path(next(iter(part.weights.shards))),
                        found={"layer": number, "missing": lost[:MAX_ITEMS], "count": len(lost)},
                        expected={"missing": [], "count": 0},
                    )


def _shapes(part: Part) -> Iterator[Flaw]:
    shape, tensors = part.shape, part.weights.effective
    wrong: list[Misshapen] = []
    for one in part.needed:
        placed = tensors.get(one.name)
        if placed is None or one.begins or placed.tensor.dtype not in _PLAIN:
            continue
        found = placed.tensor.shape
        fits = len(found) == len(one.shape) and all(
            dim is None or dim == real for dim, real in zip(one.shape, found, strict=True)
        )
        if not fits:
            wrong.append(Misshapen(one.name, placed.entry.path, found, one.shape))
    start = names.embedding(tensors)
    if start is not None and shape.family.get("tensors") is None and shape.vocabulary:
        dims = tensors[start].tensor.shape
        if len(dims) == 2 and tensors[start].tensor.dtype in _PLAIN and dims[0] < shape.vocabulary:
            wrong.append(Misshapen(start, tensors[start].entry.path, dims, (shape.vocabulary, shape.hidden)))
    head = names.head(tensors)
    if head is not None and start is not None and head.endswith(".weight") and tensors[head].tensor.dtype in _PLAIN:
        rows = tensors[head].tensor.shape[:1]
        if shape.vocabulary and shape.family.get("tensors") and rows != (shape.vocabulary,):
            found = tensors[head].tensor.shape
            wrong.append(Misshapen(head, tensors[head].entry.path, found, (shape.vocabulary, shape.hidden)))
    sizes = {key: shape.text[key] for keys in KEYS.values() for key in keys if type(shape.text.get(key)) is int}
    yield from misshapen.flaws(wrong, "config.json", sizes=sizes)


def _gguf(part: Part) -> Iterator[Flaw]:
    header = part.gguf
    if header is None or gguf_adapter.is_adapter(header.metadata):
        return
    path = part.path(next(iter(part.gguf_files)))
    tensors = {tensor.name: tensor for one in part.gguf_files.values() for tensor in one.tensors}
    architecture = header.metadata.get("general.architecture")
    count = header.metadata.get(f"{architecture}.block_count")
    there = {int(match[1]) for name in tensors if (match := _BLOCK.match(name)) is not None}
    layers = range(count) if type(count) is int and 0 < count <= MOST["layers"] else ()  # else the number is wrong
    if tensors and (absent := [number for number in layers if number not in there]):
        yield flaw(
            "tensor-missing",
            f"The header says {many(len(layers), 'block')}, and {len(absent)} of them "
            f"{agreeing(len(absent), 'has', 'have')} no tensors: {listed([str(one) for one in absent])}.",
            file=path,
            pointer=f"{architecture}.block_count",
            found={"layers": absent[:MAX_ITEMS], "count": len(absent)},
            expected=count,
            advice=gguf_tensors.ADVICE,
        )
    lost = list(gguf_tensors.missing(str(architecture), header.metadata, tensors.keys()))
    if tensors and lost:
        yield flaw(
            "tensor-missing",
            f"{many(len(lost), 'tensor')} that {architecture} needs {agreeing(len(lost), 'is', 'are')} in no file: "
            f"{listed(lost)}.",
            file=path,
            found={"count": len(lost), "missing": lost[:MAX_ITEMS]},
            expected={"count": 0, "missing": []},
            advice=gguf_tensors.ADVICE,
        )
    yield from gguf_header.check(part, header, tensors)
    start, tokens = tensors.get("token_embd.weight"), header.metadata.get("tokenizer.ggml.tokens")
    said = getattr(tokens, "count", None)
    if start is not None and isinstance(said, int) and start.shape[0] < said:
        yield flaw(
            "vocabulary-exceeds-embedding",
            f"The tokenizer has {many(said, 'token')}, and token_embd.weight {many(start.shape[0], 'row')}.",
            file=path,
            pointer="tokenizer.ggml.tokens",
            found=said,
            expected=start.shape[0],
        )
    if tensors and "token_embd.weight" not in tensors:
        yield flaw(
            "tensor-missing",
            "No file holds token_embd.weight.",
            severity=Severity.BLOCK,
            file=path,
            found={"count": 1, "missing": ["token_embd.weight"]},
            expected={"count": 0, "missing": []},
            advice=gguf_tensors.ADVICE,
        )
