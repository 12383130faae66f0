"""Where each inferred value came from: a place in a file, a launch argument, a declaration, or a rule of its own."""

from collections.abc import Iterator, Mapping
from typing import Any

from gates.static.composition import Composition, Part
from gates.static.names import embedding
from gates.static.sampling import GGUF_SAMPLING, of_arguments
from gates.static.shape import KEYS, Shape, place_of

GGUF_SHAPE = {
    "layers": "block_count",
    "hidden": "embedding_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate": "feed_forward_length",
    "experts": "expert_count",
}
_LENGTHS = ("--max-model-len", "--context-length", "--max-context-length", "--max-seq-len", "--max-total-tokens")
_GGUF_LENGTHS = ("-c", "--ctx-size")

Origin = dict[str, str]
"""`by` is file, argument, declared, derived or default; `file` and `pointer` say where. A pointer is a JSON Pointer, a
key of GGUF metadata, the name of a tensor, or a launch argument."""


def of(c: Composition, told: Mapping[str, Any]) -> dict[str, Origin]:
    """Return JSON Pointer in what was inferred → its origin. A pointer covers everything below it."""
    found = dict(_declared(c))
    found |= dict(_of_header(c)) if c.model.gguf is not None else dict(_of_configuration(c))
    found |= dict(_of_words(c, told))
    return {place: origin for place, origin in found.items() if _value(told, place) is not None}


def file(path: str, pointer: str | None = None) -> Origin:
    """Return the origin of a value that stands in a file."""
    return {"by": "file", "file": path} | ({} if pointer is None else {"pointer": pointer})


def _value(told: Any, place: str) -> Any:
    for key in place.split("/")[1:]:
        told = told.get(key) if isinstance(told, dict) else None
    return told


def _declared(c: Composition) -> Iterator[tuple[str, Origin]]:
    declared = c.declared
    if declared.engine is not None:
        yield "/engine/name", {"by": "declared", "pointer": "/engine/name"}
    elif c.model.gguf is not None:
        yield "/engine/name", {"by": "derived", "pointer": "/format"}
    yield "/engine/version", {"by": "declared", "pointer": "/engine/version"}
    flags = _LENGTHS if c.model.gguf is None else _GGUF_LENGTHS
    flag = next((one for one in flags if declared.arguments.has(one)), flags[0])
    yield "/context/requested", {"by": "argument", "pointer": flag}
    found = [(adapter, part) for adapter, part in c.adapters]
    if found:
        by = {"by": "declared", "pointer": "/adapters"}
        first = next(iter(found[0][1].gguf_files), "adapter_config.json")
        yield "/adapters", by if declared.adapters else file(found[0][1].path(first))
    yield "/draft", {"by": "declared", "pointer": "/draft"}
    yield "/left_out", {"by": "derived"}


def _of_configuration(c: Composition) -> Iterator[tuple[str, Origin]]:
    part, shape = c.model, c.model.shape
    config = part.path("config.json")
    first = next(iter(part.weights.used_files), None)
    weights = part.weights.index_path if part.weights.weight_map is not None else first
    if weights is not None:
        for name in ("/format", "/weights"):
            yield name, file(weights)
    yield "/architecture", file(config, "/architectures/0")
    yield "/model_type", file(config, _named(c, "model_type"))
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "experts", "vocabulary"):
        yield f"/shape/{name}", _of_size(shape, name, config)
    tied = _named(c, "tie_word_embeddings")
    yield "/shape/tied", file(config, tied) if tied else {"by": "default", "pointer": shape.model_type}
    place = place_of(shape, "context")
    yield "/context/derived", file(config, place) if place else {"by": "default", "pointer": shape.model_type}
    yield from _of_rope(part, config)
    rows = embedding(part.weights.effective)
    if rows is not None:
        yield "/embedding_rows", file(part.weights.effective[rows].entry.path, rows)


def _of_size(shape: Shape, name: str, config: str) -> Origin:
    place = place_of(shape, name)
    if place is not None and _value(shape.config, place) == getattr(shape, name):
        return file(config, place)
    if not set(KEYS[name]).isdisjoint(shape.family.get("defaults", {})):
        return {"by": "default", "pointer": shape.model_type}
    return {"by": "derived", "pointer": "/shape"}


def _of_rope(part: Part, config: str) -> Iterator[tuple[str, Origin]]:
    text, pointer = part.shape.text, part.shape.pointer
    parameters = text.get("rope_parameters")
    inner = f"{pointer}/rope_parameters"
    if isinstance(parameters, dict) and isinstance(parameters.get("full_attention"), dict):
        parameters, inner = parameters["full_attention"], f"{inner}/full_attention"
    is_new = isinstance(parameters, dict) and bool(parameters)
    new = isinstance(parameters, dict) and type(parameters.get("rope_theta")) in (int, float)
    yield "/rope/theta", file(config, f"{inner}/rope_theta" if new else f"{pointer}/rope_theta")
    told = parameters if is_new else text.get("rope_scaling")
    place = inner if is_new else f"{pointer}/rope_scaling"
    key = next((key for key in ("rope_type", "type") if isinstance(told, dict) and key in told), None)
    yield "/rope/type", file(config, f"{place}/{key}") if key else {"by": "default"}
    yield "/rope/factor", file(config, f"{place}/factor")


def _named(c: Composition, key: str) -> str | None:
    """Return where a value of the language model's configuration stands, or in the outer one; None in neither."""
    shape = c.model.shape
    if key in shape.text:
        return shape.at(key)
    return f"/{key}" if key in shape.config else None


def _of_header(c: Composition) -> Iterator[tuple[str, Origin]]:
    part, header = c.model, c.model.gguf
    names = list(part.gguf_files)
    path = part.path(names[0])
    metadata = {} if header is None else header.metadata
    architecture = metadata.get("general.architecture")
    for place in ("/format", "/weights"):
        yield place, file(path)
    for place in ("/architecture", "/model_type"):
        yield place, file(path, "general.architecture")
    for name, key in GGUF_SHAPE.items():
        yield f"/shape/{name}", file(path, f"{architecture}.{key}")
    rows = next(
        (
            part.path(name)
            for name, one in part.gguf_files.items()
            for t in one.tensors
            if t.name == "token_embd.weight"
        ),
        path,
    )
    for place in ("/shape/vocabulary", "/embedding_rows"):
        yield place, file(rows, "token_embd.weight")
    yield "/shape/tied", file(path, "output.weight")
    kind = "general.file_type"
    yield "/quantization", file(path, kind) if kind in metadata else {"by": "derived", "pointer": "/weights/dtypes"}
    yield "/context/derived", file(path, f"{architecture}.context_length")
    if part.config:
        yield from _of_rope(part, part.path("config.json"))
    else:
        yield "/rope/type", {"by": "default"}
    stated = of_arguments(c)
    for name, key in GGUF_SAMPLING.items():
        told = f"general.sampling.{key}"
        origin = file(path, told) if told in metadata else {"by": "default"}
        yield f"/sampling/{name}", {"by": "argument", "pointer": stated[name][1]} if name in stated else origin


def _of_words(c: Composition, inferred: Mapping[str, Any]) -> Iterator[tuple[str, Origin]]:
    part = c.model
    header = next((part.path(name) for name in part.gguf_files), None)
    inside = None if header is None else file(header, "tokenizer.ggml.tokens")
    yield "/tokenizer", inside or file(part.tokenizer_file)
    if c.template is not None:
        _, path = c.template
        is_json = path.endswith(".json")
        is_gguf = path.endswith(".gguf")
        yield "/template", file(path, "/chat_template" if is_json else "tokenizer.chat_template" if is_gguf else None)
    if c.quantization is not None:
        yield "/quantization", file(part.path(c.quantization.file), c.quantization.pointer or None)
    named = {"config": "config.json", "generation": "generation_config.json"}
    for name, path in named.items():
        pointer = _named(c, "eos_token_id") if name == "config" else "/eos_token_id"
        yield f"/stops/{name}", file(part.path(path), pointer) if part.has(path) else {"by": "default"}
    words = next((one for one in ("tokenizer_config.json", "tokenizer.json") if part.has(one)), None)
    yield "/stops/tokenizer", {"by": "default"} if words is None else file(part.path(words), "/eos_token")
    if header is not None:
        yield "/stops/tokenizer", file(header, "tokenizer.ggml.eos_token_id")
    yield "/stops/effective", {"by": "derived", "pointer": "/stops"}
    if part.gguf is None:
        told, place = part.object("generation_config.json"), part.path("generation_config.json")
        stated = of_arguments(c)
        for name in GGUF_SAMPLING:
            origin = file(place, f"/{name}") if name in told else {"by": "default"}
            if _value(inferred, f"/sampling/{name}") != told.get(name):  # the engine does not take it
                origin = {"by": "default"}
            if name in stated:
                origin = {"by": "argument", "pointer": stated[name][1]}
            yield f"/sampling/{name}", origin
