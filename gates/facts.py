"""What one file tells about a bundle, read once and remembered: small, JSON-able, and the same on every machine."""

import re
from collections.abc import Callable
from typing import Any, BinaryIO

from gates.files import gguf_adapter, magic, remote_code
from gates.files.gguf_types import FILE_TYPES
from gates.files.header import Header
from gates.files.names import refuse_name
from gates.files.refusal import FileRefused, pointer
from gates.files.strict_json import read_json, read_object
from gates.files.weights import read as read_weights
from schemas.bundle import Role

VERSION = 5
"""Changes whenever a reader tells more or other things, so that nothing remembered is taken for it."""
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
        FileRefused: it is not what its name says.
    """
    if size == 0 and role not in (Role.LICENCE, Role.DOCUMENTATION):
        raise FileRefused("empty-file", "is empty", offset=0, found=0)
    return _READERS[_reader(name, role)](file, size)


def reader_name(name: str, role: Role) -> str:
    """Return the name and version of the reader that `read` uses, as part of a key to remember by."""
    return f"{_reader(name, role)}/{VERSION}"


def _reader(name: str, role: Role) -> str:
    if name.endswith(".gguf"):
        return "gguf-adapter" if role is Role.ADAPTER else "gguf"
    if name.endswith(".safetensors"):
        return "safetensors"
    if name in _READERS:
        return name
    if name.endswith(".safetensors.index.json"):
        return "index"
    if role in (Role.DOCUMENTATION, Role.LICENCE):
        return "readme" if name.lower() == "readme.md" else "document"
    if role is Role.TOKENIZER and ".model" in name and not name.startswith("tiktoken"):
        return "opaque"
    return "json" if name.endswith(".json") else "text"


# ---------------------------------------------------------------------------------------------------- weights


def _gguf(file: BinaryIO, size: int) -> Facts:
    header = read_weights(file, size, "model.gguf")
    if gguf_adapter.is_adapter(header.metadata):
        said, place = "is an adapter, and no model", pointer(gguf_adapter.KIND)
        advice = "name its directory under adapters in the file of -f, beside a base"
        raise FileRefused("adapter-as-model", said, pointer=place, found="adapter", expected="model", advice=advice)
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
            "quantization": gguf_quantization(header),
            "parameters": header.parameters,
            "has_template": bool(texts.get("tokenizer.chat_template")),
            "is_pooled": True if is_pooled(header) else None,
            "special_tokens": special,
            "sampling": sampling,
            "shard": _shard(whole, len(header.tensors)) if count > 1 else None,
        }
    )


def _gguf_adapter(file: BinaryIO, size: int) -> Facts:
    header = read_weights(file, size, "adapter.gguf")
    if not gguf_adapter.is_adapter(header.metadata):
        found = _text(header.metadata.get(gguf_adapter.KIND))
        said = f"has the role adapter, and its header says {found or 'no type'}"
        place = pointer(gguf_adapter.KIND)
        raise FileRefused("adapter-kind", said, pointer=place, found=found, expected="adapter")
    kind = _text(header.metadata.get(gguf_adapter.TYPE))
    if kind != "lora":
        said, place = f"is an adapter of the type {kind or 'of which it says none'}", pointer(gguf_adapter.TYPE)
        raise FileRefused("adapter-kind", said, pointer=place, found=kind, expected="lora")
    held = gguf_adapter.packed(header)
    if held.rank is None:
        raise FileRefused("adapter-config", "has no pair of matrices", found=len(header.tensors), expected="1 or more")
    return {"format": "gguf", "rank": held.rank, "target_modules": held.modules}


def _shard(whole: dict[str, int], tensors: int) -> list[int]:
    """Return its number from 0, how many shards there are, its tensors, and those of all shards."""
    return [whole["split.no"], whole["split.count"], tensors, whole["split.tensors.count"]]


def _gguf_special() -> list[tuple[str, str]]:
    return [(name, "unknown" if name == "unk" else "padding" if name == "pad" else name) for name in _SPECIAL]


def is_pooled(header: Header) -> bool:
    """Tell whether a GGUF header is that of a model whose output is pooled: it gives embeddings, and no text."""
    return any(key.endswith(".pooling_type") for key in header.metadata)


def gguf_quantization(header: Header) -> Facts | None:
    """Return the method of a GGUF file, such as q4_k_m, with its bits where the file type tells them."""
    named = FILE_TYPES.get(header.metadata.get("general.file_type"))  # type: ignore[arg-type]  # any value may be there
    if named is not None:
        return {"method": named[0], "bits": named[1]}
    kinds = list(header.dtypes())
    if not kinds:
        return None  # a shard that holds only metadata
    return {"method": "none" if kinds[0] in _FLOATS else kinds[0].lower()}


def _safetensors(file: BinaryIO, size: int) -> Facts:
    header = read_weights(file, size, "model.safetensors")
    magic.refuse_appended_archive(file, size)
    return {"format": "safetensors", "parameters": header.parameters, "kinds": list(header.dtypes())}


# ------------------------------------------------------------------------------------------------------- JSON


def _plain_json(file: BinaryIO, size: int) -> Facts:
    value = read_json(file, size)
    code = remote_code.told(value) if isinstance(value, dict) else {}
    return {"code": code} if code else {}


def _index(file: BinaryIO, size: int) -> Facts:
    weights = read_object(file, size).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(shard, str) for shard in weights.values()):
        said = "has no weight_map from tensors to files"
        raise FileRefused("index", said, pointer="/weight_map", expected="an object of file names")
    for tensor, shard in weights.items():
        # Some loaders join it to a folder as it stands.
        if "/" in shard or not shard.endswith(".safetensors") or refuse_name(shard) is not None:
            said = f"names {shard[:120]!a} as a file of weights, which is no plain name beside it"
            where = pointer("weight_map", tensor[:256])
            raise FileRefused("index-path", said, pointer=where, found=shard, expected="NAME.safetensors")
    return {"shards": sorted(set(weights.values()))}


def _config(file: BinaryIO, size: int) -> Facts:
    config = read_object(file, size)
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
            "code": remote_code.told(config),
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
    told = read_object(file, size)
    inner = told.get("quantization")
    return {"quantization": _quantization(inner if isinstance(inner, dict) else told)}


def _tokenizer_config(file: BinaryIO, size: int) -> Facts:
    told = read_object(file, size)
    return _present({"has_template": bool(told.get("chat_template")), "code": remote_code.told(told)})


def _generation_config(file: BinaryIO, size: int) -> Facts:
    told = read_object(file, size)
    sampling = {name: _decimal(told[name]) for name in _SAMPLING if type(told.get(name)) in (int, float)}
    return {"sampling": sampling}


def _adapter_config(file: BinaryIO, size: int) -> Facts:
    told = read_object(file, size)
    modules = told.get("target_modules")
    targets = [modules] if isinstance(modules, str) else modules
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        said = "names no target_modules"
        raise FileRefused("adapter-config", said, pointer="/target_modules", found=modules, expected="names")
    rank = _count(told.get("r"))
    if rank is None:
        raise FileRefused("adapter-config", "names no rank r", pointer="/r", found=told.get("r"), expected="1 or more")
    return {"rank": rank, "target_modules": sorted(set(targets))}


# ------------------------------------------------------------------------------------------------------- text


def _plain_text(file: BinaryIO, size: int) -> Facts:
    _refuse_disguise(file, size, "text")
    if size > MAX_TEXT_BYTES:
        said = f"has {size} bytes; at most {MAX_TEXT_BYTES} of text are read"
        raise FileRefused("too-large", said, found=size, expected=f"at most {MAX_TEXT_BYTES} bytes")
    try:
        file.read(size + 1).decode()
    except UnicodeDecodeError as error:
        raise FileRefused("not-utf8", "is not UTF-8", offset=error.start, expected="UTF-8") from None
    return {}


def _opaque(file: BinaryIO, size: int) -> Facts:
    _refuse_disguise(file, size, "a tokenizer")  # SentencePiece's own form, which only its library reads
    return {}


def _document(file: BinaryIO, size: int) -> Facts:
    _refuse_disguise(file, size, "a document", pages=True)  # for people, in whatever encoding
    return {}


def _readme(file: BinaryIO, size: int) -> Facts:
    _refuse_disguise(file, size, "a document", pages=True)
    front = _FRONT_MATTER.match(file.read(64 * 1024).decode(errors="replace"))
    licence = re.search(r"^license:\s*([A-Za-z0-9.+-]+)\s*$", front[1], re.MULTILINE) if front else None
    return {"licence": licence[1]} if licence else {}


# ---------------------------------------------------------------------------------------------------- helpers


def _refuse_disguise(file: BinaryIO, size: int, expected: str, *, pages: bool = False) -> None:
    file.seek(0)
    magic.refuse_disguise(file.read(magic.HEAD_BYTES), size, expected, pages=pages)
    file.seek(0)


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
    "gguf-adapter": _gguf_adapter,
    "safetensors": _safetensors,
    "index": _index,
    "config.json": _config,
    "params.json": _plain_json,
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
    "opaque": _opaque,
}
