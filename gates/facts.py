"""What one file tells about a bundle, read once and remembered: small, JSON-able, and the same on every machine."""

import re
from collections.abc import Callable
from typing import Any, BinaryIO

from gates.formats import FILE_TYPES, FormatError, Header, foreign_magic, read_gguf, read_safetensors
from schemas.bundle import Role
from schemas.common import strict_json

VERSION = 1
"""Changes whenever a reader tells more or other things, so that nothing remembered is taken for it."""
MAX_JSON_BYTES = 64 * 1024 * 1024
MAX_TEXT_BYTES = 8 * 1024 * 1024

Facts = dict[str, Any]

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_SPECIAL = ("bos", "eos", "eot", "unk", "pad")
_GGUF_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?\n)---\s*\n", re.DOTALL)


def read(name: str, role: Role, file: BinaryIO, size: int) -> Facts:
    """Return what a file tells, by its name and role.

    Raises:
        FormatError: it is not what its name says.
    """
    return _READERS[_reader(name, role)](file, size)


def reader_name(name: str, role: Role) -> str:
    """Return the name and version of the reader that `read` uses, as part of a key to remember by."""
    return f"{_reader(name, role)}/{VERSION}"


def _reader(name: str, role: Role) -> str:
    if name.endswith(".gguf"):
        return "gguf"
    if name.endswith(".safetensors"):
        return "safetensors"
    if name in _READERS:
        return name
    if name.endswith(".safetensors.index.json"):
        return "index"
    if role in (Role.DOCUMENTATION, Role.LICENCE):
        return "readme" if name.lower() == "readme.md" else "document"
    return "json" if name.endswith(".json") else "text"


# ---------------------------------------------------------------------------------------------------- weights


def _gguf(file: BinaryIO, size: int) -> Facts:
    _refuse_foreign(file)
    header = read_gguf(file, size)
    texts = {key: value for key, value in header.metadata.items() if isinstance(value, str)}
    whole = {key: value for key, value in header.metadata.items() if type(value) is int}
    architecture = texts.get("general.architecture", "")
    count = whole.get("split.count", 1)
    special = {
        name: whole[f"tokenizer.ggml.{key}_token_id"]
        for name, key in _gguf_special()
        if f"tokenizer.ggml.{key}_token_id" in whole
    }
    sampling = {
        field: _decimal(header.metadata[f"general.sampling.{key}"])
        for key, field in _GGUF_SAMPLING.items()
        if isinstance(header.metadata.get(f"general.sampling.{key}"), int | float)
    }
    return _present(
        {
            "format": "gguf",
            "architecture": architecture,
            "name": texts.get("general.name"),
            "licence": texts.get("general.license"),
            "context": whole.get(f"{architecture}.context_length"),
            "quantization": _gguf_quantization(header),
            "parameters": header.parameters,
            "has_template": bool(texts.get("tokenizer.chat_template")),
            "special_tokens": special,
            "sampling": sampling,
            "shard": [whole.get("split.no", 0), count] if count > 1 else None,
        }
    )


def _gguf_special() -> list[tuple[str, str]]:
    return [(name, "unknown" if name == "unk" else "padding" if name == "pad" else name) for name in _SPECIAL]


def _gguf_quantization(header: Header) -> Facts | None:
    named = FILE_TYPES.get(header.metadata.get("general.file_type"))  # type: ignore[arg-type]  # any value may be there
    if named is not None:
        return {"method": named[0], "bits": named[1]}
    kinds = list(header.kinds())
    if not kinds:
        return None  # a shard that holds only metadata
    return {"method": "none" if kinds[0] in _FLOATS else kinds[0].lower()}


def _safetensors(file: BinaryIO, size: int) -> Facts:
    header = read_safetensors(file, size)
    return {"format": "safetensors", "parameters": header.parameters, "kinds": list(header.kinds())}


# ------------------------------------------------------------------------------------------------------- JSON


def _json(file: BinaryIO, size: int) -> Any:
    if size > MAX_JSON_BYTES:
        raise FormatError(f"has {size} bytes; at most {MAX_JSON_BYTES} of JSON are read")
    _refuse_foreign(file)
    try:
        return strict_json(file.read(size + 1), limit=MAX_JSON_BYTES)
    except ValueError as error:
        raise FormatError(str(error)) from None


def _object(file: BinaryIO, size: int) -> Facts:
    value = _json(file, size)
    if not isinstance(value, dict):
        raise FormatError("is not a JSON object")
    return value


def _plain_json(file: BinaryIO, size: int) -> Facts:
    _json(file, size)
    return {}


def _index(file: BinaryIO, size: int) -> Facts:
    weights = _object(file, size).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(shard, str) for shard in weights.values()):
        raise FormatError("has no weight_map from tensors to files")
    return {"shards": sorted(set(weights.values()))}


def _config(file: BinaryIO, size: int) -> Facts:
    config = _object(file, size)
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    quantized = config.get("quantization_config")
    special = {name: config.get(f"{name}_token_id") for name in _SPECIAL}
    return _present(
        {
            "architecture": _text(config.get("model_type")),
            "context": _count(config.get("max_position_embeddings", inner.get("max_position_embeddings"))),
            "quantization": _quantization(quantized) if isinstance(quantized, dict) else None,
            "special_tokens": {name: value for name, value in special.items() if type(value) is int and value >= 0},
        }
    )


def _quantization(told: Facts) -> Facts:
    return _present(
        {
            "method": _text(told.get("quant_method", told.get("quant_algo"))),
            "bits": _count(told.get("bits", told.get("w_bit"))),
            "group_size": _count(told.get("group_size", told.get("q_group_size"))),
        }
    )


def _quantization_file(file: BinaryIO, size: int) -> Facts:
    told = _object(file, size)
    inner = told.get("quantization")
    return {"quantization": _quantization(inner if isinstance(inner, dict) else told)}


def _tokenizer_config(file: BinaryIO, size: int) -> Facts:
    return {"has_template": bool(_object(file, size).get("chat_template"))}


def _generation_config(file: BinaryIO, size: int) -> Facts:
    told = _object(file, size)
    sampling = {name: _decimal(told[name]) for name in _SAMPLING if type(told.get(name)) in (int, float)}
    return {"sampling": sampling}


def _adapter_config(file: BinaryIO, size: int) -> Facts:
    told = _object(file, size)
    modules = told.get("target_modules")
    targets = [modules] if isinstance(modules, str) else modules
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise FormatError("names no target_modules")
    rank = _count(told.get("r"))
    if rank is None:
        raise FormatError("names no rank r")
    return {"rank": rank, "target_modules": sorted(set(targets))}


# ------------------------------------------------------------------------------------------------------- text


def _plain_text(file: BinaryIO, size: int) -> Facts:
    _refuse_foreign(file)
    if size > MAX_TEXT_BYTES:
        raise FormatError(f"has {size} bytes; at most {MAX_TEXT_BYTES} of text are read")
    try:
        file.read(size + 1).decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"is not UTF-8 at byte {error.start}") from None
    return {}


def _document(file: BinaryIO, _size: int) -> Facts:
    _refuse_foreign(file)  # for people, in whatever encoding
    return {}


def _readme(file: BinaryIO, _size: int) -> Facts:
    _refuse_foreign(file)
    front = _FRONT_MATTER.match(file.read(64 * 1024).decode(errors="replace"))
    licence = re.search(r"^license:\s*([A-Za-z0-9.+-]+)\s*$", front[1], re.MULTILINE) if front else None
    return {"licence": licence[1]} if licence else {}


# ---------------------------------------------------------------------------------------------------- helpers


def _refuse_foreign(file: BinaryIO) -> None:
    file.seek(0)
    said = foreign_magic(file.read(512))
    file.seek(0)
    if said is not None:
        raise FormatError(f"is {said}")


def _present(facts: Facts) -> Facts:
    return {key: value for key, value in facts.items() if value not in (None, "", {})}


def _text(value: object) -> str | None:
    return value[:256] if isinstance(value, str) and value else None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 < value <= 2**53 else None


def _decimal(value: Any) -> int | str:
    """Return a whole number as it is, and another as the shortest decimal with six significant digits."""
    return value if type(value) is int else f"{value:.6f}".rstrip("0").rstrip(".")


_READERS: dict[str, Callable[[BinaryIO, int], Facts]] = {
    "gguf": _gguf,
    "safetensors": _safetensors,
    "index": _index,
    "config.json": _config,
    "tokenizer_config.json": _tokenizer_config,
    "generation_config.json": _generation_config,
    "adapter_config.json": _adapter_config,
    "quantize_config.json": _quantization_file,
    "quantization_config.json": _quantization_file,
    "quant_config.json": _quantization_file,
    "hf_quant_config.json": _quantization_file,
    "readme": _readme,
    "document": _document,
    "json": _plain_json,
    "text": _plain_text,
}
