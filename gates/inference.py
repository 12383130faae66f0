"""Writes the bundle document of a directory: what its files tell, and what a person adds where they cannot."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from gates.directory import Contents, DirectoryRefused, Found
from gates.files import remote_code
from gates.files.contents import Reader
from gates.files.launch import refuse_launch
from gates.files.refusal import FileRefused
from schemas.bundle import Bundle, Role
from schemas.common import NAME_PATTERN
from schemas.short import many

DEFAULT_CONTEXT_TOKENS = 4096
"""Context per request when neither the files nor the launch arguments ask for less or more."""
DEFAULT_SEQUENCES = 4
FEATURES = ("chat", "completions", "logprobs", "streaming")
"""What a bundle serves that nobody said anything else of."""
POOLED_FEATURES = ("embeddings",)
"""The same, of a model whose output is pooled."""
UNKNOWN_LICENCE = "NOASSERTION"
"""SPDX's word for terms that nobody stated."""

# The engine's own words for context and concurrency; llama.cpp's context is shared by its slots.
_LIMIT_ARGUMENTS = {
    "llamacpp": ("--ctx-size", "--parallel"),
    "vllm": ("--max-model-len", "--max-num-seqs"),
    "sglang": ("--context-length", "--max-running-requests"),
}
_SHORTER = {"--ctx-size": "-c", "--parallel": "-np"}
"""llama.cpp's own short names of these."""
_DRAFT_ARGUMENTS = ("--draft-max", "--draft", "--speculative-num-draft-tokens", "--num-speculative-tokens")
_SPDX = {
    "apache-2.0": "Apache-2.0",
    "mit": "MIT",
    "bsd-3-clause": "BSD-3-Clause",
    "cc-by-4.0": "CC-BY-4.0",
    "cc-by-sa-4.0": "CC-BY-SA-4.0",
    "cc-by-nc-4.0": "CC-BY-NC-4.0",
    "cc0-1.0": "CC0-1.0",
    "gpl-3.0": "GPL-3.0-only",
    "agpl-3.0": "AGPL-3.0-only",
}


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """What the person who registers says about the engine. One of `image` and `environment` names the program.

    `remote_code` names the files with code that come with the model and that the engine may run.
    """

    name: str
    version: str | None = None
    environment: str | None = None
    image: str | None = None
    arguments: Sequence[str] = ()
    variables: Mapping[str, str] | None = None
    remote_code: Sequence[str] = ()

    def reader(self, weights: str | None = None) -> Reader:
        """Return who reads the files; `weights` chooses among several sets of them."""
        return Reader(self.name, tuple(self.arguments), weights, frozenset(self.remote_code))


def bundle_document(contents: Contents, *, name: str | None, engine: EngineChoice) -> dict[str, Any]:
    """Return the bundle document that the files tell. It may lack what they do not know, and is not validated.

    The document holds no place and no time, so that the same files make the same bundle on every machine.

    Args:
        contents: of the directory.
        name: of the bundle's family; None takes the one in the weights, if it makes a name.
        engine: that shall serve.

    Raises:
        DirectoryRefused: the files are several models, or only part of one.
    """
    refused = [*_check_weights(contents), *_check_index(contents), *_check_templates(contents)]
    refused += _check_code(contents, engine)
    paths = [file.path for file in contents.files]
    refused += refuse_launch(engine.name, engine.arguments, engine.variables or {}, paths)
    if refused:
        raise DirectoryRefused(refused)
    told = _Told(contents)
    family = name or _slug(told.first("name"))
    runtime: dict[str, Any] = _limits(engine, told.first("context"))
    sampling = {key: value if key == "top_k" else str(value) for key, value in told.first("sampling", {}).items()}
    if sampling:
        runtime["sampling"] = sampling
    document = {
        "schema": Bundle.SCHEMA_ID,
        "name": family,
        "sources": [{"kind": "directory", "revision": contents.revision}],
        "files": [
            {"path": file.path, "size": file.size, "sha256": file.sha256, "role": str(file.role)}
            for file in contents.files
        ],
        "model": {
            "format": told.first("format"),
            "architecture": told.first("architecture"),
            "parameters": told.parameters(),
        },
        "tokenizer": {
            # GGUF holds its tokenizer; files beside it are for other engines.
            "origin": "weights" if told.first("format") == "gguf" else "files",
            "special_tokens": told.first("special_tokens"),
        },
        "template": _template(contents),
        "quantization": told.first("quantization", {"method": "none"}),
        "adapters": _adapters(contents) or None,
        "draft": _draft(contents, engine),
        "engine": {
            "name": engine.name,
            "version": engine.version,
            "image": engine.image,
            "environment": engine.environment,
            "arguments": list(engine.arguments),
        },
        "topology": {
            **dict.fromkeys((f"{kind}_parallel" for kind in ("tensor", "pipeline", "expert", "data", "context")), 1),
            "nodes": 1,
        },
        "hardware": {"accelerator": "cpu", "count": 0},
        "runtime": runtime,
        "serving": {
            "served_name": family,
            "features": list(POOLED_FEATURES if told.first("is_pooled") else FEATURES),
            "usage": "all_tokens",
            "cancellation": "on_disconnect",
        },
        "licence": _licence(contents, told.first("licence")),
    }
    return {key: _without_nulls(value) for key, value in document.items() if value is not None}


def merge(document: Any, patch: Any) -> Any:
    """Return a document with a JSON Merge Patch applied: objects are merged, all else replaces, null removes.

    Source: RFC 7396.
    """
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    merged = dict(document) if isinstance(document, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


# ------------------------------------------------------------------------------------------- what must be whole


def _check_weights(contents: Contents) -> list[FileRefused]:
    weights = contents.with_role(Role.WEIGHTS)
    names = ", ".join(file.path for file in weights)
    if not weights:
        return [FileRefused("weights-missing", "holds no weights", file="")]
    formats = sorted({str(file.facts.get("format")) for file in weights})
    if len(formats) > 1:
        said = f"holds weights in {' and '.join(formats)}"
        return [FileRefused("weights-ambiguous", said, file="", found=names, advice="leave one out with --exclude")]
    if formats != ["gguf"]:
        return []
    shards = [file.facts.get("shard") for file in weights]
    return [] if len(weights) == 1 and shards == [None] else _check_shards(weights, names)


def _check_shards(weights: list[Found], names: str) -> list[FileRefused]:
    """Check that the shards of a GGUF model are all there, once each, under the names by which engines find them."""
    shards = [file.facts.get("shard") for file in weights]
    expected = [[place, len(weights)] for place in range(len(weights))]
    if None in shards or sorted(shard[:2] for shard in shards if shard) != expected:
        said = f"holds {many(len(weights), 'shard', 'that is', 'that are')} not one complete set"
        advice = "fetch the missing ones, or leave out what does not belong with --exclude"
        return [FileRefused("split", said, file="", found=names, expected=f"{len(weights)} of them", advice=advice)]
    held, totals = sum(shard[2] for shard in shards if shard), {shard[3] for shard in shards if shard}
    if totals != {held}:
        told = " or ".join(map(str, sorted(totals)))
        said = f"holds shards with {many(held, 'tensor')}, and they say that there are {told}"
        return [FileRefused("split", said, file="", found=held, expected=sorted(totals), advice="fetch them again")]
    refused = []
    for file in weights:
        number, count = file.facts["shard"][:2]
        ending = f"-{number + 1:05d}-of-{count:05d}.gguf"
        if not file.path.endswith(ending):
            said = f"is shard {number} of {count}, and llama.cpp does not find it under this name"
            refused.append(FileRefused("split", said, file=file.path, found=file.path, expected=f"NAME{ending}"))
    return refused


def _check_index(contents: Contents) -> list[FileRefused]:
    """Check that an index names exactly the shards beside it."""
    refused = []
    for index in contents.with_role(Role.WEIGHTS_INDEX):
        folder = PurePosixPath(index.path).parent
        beside = {
            PurePosixPath(file.path).name
            for file in contents.with_role(Role.WEIGHTS)
            if PurePosixPath(file.path).parent == folder
        }
        named = set(index.facts.get("shards", ()))
        for shard in sorted(named - beside):
            said = f"names the shard {shard}, which is not beside it"
            refused.append(FileRefused("shard-missing", said, file=index.path, found=shard, advice="fetch it"))
        for shard in sorted(beside - named):
            said, file = f"is not named by {index.path}", str(folder / shard)
            refused.append(FileRefused("shard-orphan", said, file=file, advice="leave it out with --exclude"))
    return refused


def _check_templates(contents: Contents) -> list[FileRefused]:
    templates = [file.path for file in contents.with_role(Role.TEMPLATE) if "/" not in file.path]
    if len(templates) > 1 and "chat_template.jinja" not in templates:
        advice = 'name one with -f: {"template": {"origin": "file", "file": …}}, or leave the others out'
        said = f"holds several templates: {', '.join(templates)}"
        return [FileRefused("templates-ambiguous", said, file="", found=", ".join(templates), advice=advice)]
    return []


def _check_code(contents: Contents, engine: EngineChoice) -> list[FileRefused]:
    said = {file.path: file.facts["code"] for file in contents.files if "code" in file.facts}
    model_types = {
        file.path.rpartition("/")[0]: str(file.facts["architecture"])
        for file in contents.files
        if PurePosixPath(file.path).name == "config.json" and "architecture" in file.facts
    }
    code = [file.path for file in contents.with_role(Role.CODE)]
    is_trusted = remote_code.trusts(engine.arguments, engine.variables)
    # Only where files are judged: it brings in what compares versions, and takes a moment.
    from gates.static.rules import implemented

    own = implemented(engine.name, engine.version)
    return list(remote_code.refuse_code(said, model_types=model_types, is_trusted=is_trusted, accepted=code, own=own))


# ------------------------------------------------------------------------------------------------ what they tell


class _Told:
    """What all files tell together; the first by path speaks where several do, weights before configuration."""

    def __init__(self, contents: Contents) -> None:
        roles = (Role.QUANTIZATION, Role.WEIGHTS, Role.CONFIG, Role.GENERATION_CONFIG, Role.DOCUMENTATION)
        self.files: list[Found] = [file for role in roles for file in contents.with_role(role)]
        self.weights = contents.with_role(Role.WEIGHTS)

    def first(self, fact: str, default: Any = None) -> Any:
        return next((file.facts[fact] for file in self.files if fact in file.facts), default)

    def parameters(self) -> int | None:
        # Integer tensors may hold several weights a number, so a count would be wrong.
        packed = any(
            not set(file.facts.get("kinds", ())) <= {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
            for file in self.weights
        )
        return None if packed else sum(file.facts.get("parameters", 0) for file in self.weights) or None


def _template(contents: Contents) -> dict[str, Any]:
    paths = [file.path for file in contents.with_role(Role.TEMPLATE) if "/" not in file.path]
    if paths:
        return {"origin": "file", "file": "chat_template.jinja" if "chat_template.jinja" in paths else paths[0]}
    for role, origin in ((Role.WEIGHTS, "weights"), (Role.TOKENIZER, "tokenizer_config")):
        if any(file.facts.get("has_template") for file in contents.with_role(role)):
            return {"origin": origin}
    return {"origin": "none"}


def _adapters(contents: Contents) -> list[dict[str, Any]]:
    found = []
    files = contents.with_role(Role.ADAPTER)
    for config in files:
        if "rank" not in config.facts:
            continue
        folder = PurePosixPath(config.path).parent
        beside = [file.path for file in files if PurePosixPath(file.path).parent == folder]
        is_packed = config.facts.get("format") == "gguf"
        found.append(
            {
                "name": _slug(folder.name) or "adapter",
                "files": [config.path] if is_packed else beside,
                "rank": config.facts["rank"],
                "target_modules": config.facts["target_modules"],
            }
        )
    return sorted(found, key=lambda adapter: str(adapter["name"]))


def _limits(engine: EngineChoice, model_context: int | None) -> dict[str, Any]:
    """Return context and concurrency: what the launch arguments ask for, else the defaults within the model."""
    context_argument, sequences_argument = limit_arguments(engine.name)
    asked = _given(engine.arguments, context_argument) or _given(engine.arguments, _SHORTER.get(context_argument, ""))
    sequences = _given(engine.arguments, sequences_argument) or DEFAULT_SEQUENCES
    sequences = _given(engine.arguments, _SHORTER.get(sequences_argument, "")) or sequences
    if asked and engine.name == "llamacpp" and not {"--kv-unified", "-kvu"}.intersection(engine.arguments):
        asked //= sequences
    context = asked or min(model_context or DEFAULT_CONTEXT_TOKENS, DEFAULT_CONTEXT_TOKENS)
    return {"context_tokens": context, "max_sequences": sequences}


def _draft(contents: Contents, engine: EngineChoice) -> dict[str, Any] | None:
    """Return the draft model that there is; how many tokens it proposes only launch arguments tell."""
    files = [file.path for file in contents.with_role(Role.DRAFT)]
    if not files:
        return None
    tokens = next((count for name in _DRAFT_ARGUMENTS if (count := _given(engine.arguments, name))), None)
    return {"method": "draft_model", "files": files, "tokens": tokens}


def limit_arguments(engine: str) -> tuple[str, str]:
    """Return an engine's arguments for context and for concurrency; empty where it has none that is known here."""
    return _LIMIT_ARGUMENTS.get(engine, ("", ""))


def _given(arguments: Sequence[str], name: str) -> int | None:
    """Return a launch argument's whole number above 0, or None; what is wrong with it, the engine's driver says."""
    for place, argument in enumerate(arguments[:-1]):
        if name and argument == name:
            text = arguments[place + 1]
            return int(text) or None if re.fullmatch(r"[0-9]{1,9}", text) else None
    return None


def _licence(contents: Contents, told: str | None) -> dict[str, Any]:
    texts = [file.path for file in contents.with_role(Role.LICENCE)]
    if told is None:
        identifier = UNKNOWN_LICENCE
    else:
        known = _SPDX.get(told.lower())
        identifier = known or "LicenseRef-" + re.sub(r"[^A-Za-z0-9.-]+", "-", told)
    return {"identifier": identifier, "file": texts[0] if len(texts) == 1 else None}


def _slug(text: str | None) -> str | None:
    slug = re.sub(r"[^a-z0-9.]+", "-", (text or "").lower()).strip("-.")[:63].strip("-.")
    return slug if re.fullmatch(NAME_PATTERN, slug) else None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
