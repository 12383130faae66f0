"""What the files cannot tell: engine, topology, hardware, adapters, draft, contract; from a bundle or from `-f`."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from schemas.bundle import Bundle, Feature
from schemas.common import MAX_INTEGER
from schemas.faults import shown

ENGINE_NAMES = {
    **dict.fromkeys(("llama.cpp", "llama-cpp", "llama_cpp", "llama-server"), "llamacpp"),
    **dict.fromkeys(("tensorrt-llm", "tensorrt_llm", "trt-llm", "trt_llm"), "trtllm"),
    "text-generation-inference": "tgi",
}
PARALLEL_NAMES = {
    "tensor": ("tensor_parallel", "tp", "tensor_parallel_size"),
    "pipeline": ("pipeline_parallel", "pp", "pipeline_parallel_size"),
    "expert": ("expert_parallel", "ep", "expert_parallel_size"),
    "data": ("data_parallel", "dp", "data_parallel_size"),
    "context": ("context_parallel", "cp", "context_parallel_size"),
}
# How each engine spells a degree on its command line.
_PARALLEL_ARGUMENTS = {
    "tensor": ("--tensor-parallel-size", "-tp", "--tp-size", "--tp", "--tp_size", "--num-shard"),
    "pipeline": ("--pipeline-parallel-size", "-pp", "--pp-size", "--pp_size"),
    "expert": ("--expert-parallel-size", "--ep-size", "--ep", "--ep_size"),
    "data": ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
}
_DEPTH = 16
MOST_SECONDS = 10**9
_LONG = re.compile(r"[0-9]{19,}")
"""Digits of a whole number that a file of YAML keeps as a text."""
_SIZES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


class DeclaredError(ValueError):
    """What was declared cannot be read. `errors` has each place, as a JSON Pointer, with what is wrong there."""

    def __init__(self, errors: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{pointer}: {detail}" for pointer, detail in errors))
        self.errors = tuple(errors)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Launch arguments as an engine reads them: `--name value` and `--name=value`, dashes and underscores alike."""

    words: tuple[str, ...] = ()

    def has(self, *names: str) -> bool:
        """Say whether a flag or argument is there under one of its names."""
        return any(self._is(word, name) for word in self.words for name in names)

    def get(self, *names: str) -> str | None:
        """Return an argument's last value, or None."""
        found = None
        for place, word in enumerate(self.words):
            for name in names:
                if self._is(word, name):
                    after = self.words[place + 1] if place + 1 < len(self.words) else None
                    found = word.split("=", 1)[1] if "=" in word else after
        return found

    def all(self, *names: str) -> list[str]:
        """Return the values after a name, up to the next argument: some take several words."""
        found: list[str] = []
        for place, word in enumerate(self.words):
            if not any(self._is(word, name) for name in names):
                continue
            if "=" in word:
                found.append(word.split("=", 1)[1])
                continue
            for following in self.words[place + 1 :]:
                if following.startswith("--"):
                    break
                found.append(following)
        return found

    def number(self, *names: str) -> int | None:
        """Return a whole number, also written as 32k or 1M; None when there is none."""
        text = self.get(*names)
        match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([kKmMgG]?)", text or "")
        if match is None:
            return None
        return int(float(match[1]) * _SIZES[match[2]]) if match[2] else int(float(match[1]))

    def json(self, *names: str) -> dict[str, Any] | None:
        """Return an argument that holds a JSON object, with what `--name.key value` says of its keys one by one.

        Source: vLLM's FlexibleArgumentParser.
        """
        try:
            value = _loaded(self.get(*names) or "null")
        except ValueError:
            value = None
        found: dict[str, Any] | None = value if isinstance(value, dict) else None
        for place, word in enumerate(self.words):
            given, _, said = word.partition("=")
            start, _, path = given.partition(".")
            if path and path.count(".") < _DEPTH and any(self._is(start, name) for name in names):
                after = self.words[place + 1] if place + 1 < len(self.words) else ""
                found = _with(found or {}, path.split("."), _parsed(said if "=" in word else after))
        return found

    @staticmethod
    def _is(word: str, name: str) -> bool:
        given = word.split("=", 1)[0]
        return given == name or (given.startswith("--") and given.replace("_", "-") == name.replace("_", "-"))


def _with(told: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return an object with a value at a path of keys."""
    inner = told.get(path[0])
    last = len(path) == 1
    return {**told, path[0]: value if last else _with(inner if isinstance(inner, dict) else {}, path[1:], value)}


def _loaded(text: str) -> Any:
    """Return what a JSON text says; a number that is none, or too large for one, stays the text that it is."""
    return json.loads(text, parse_constant=str, parse_float=lambda one: value if isfinite(value := float(one)) else one)


def _parsed(text: str) -> Any:
    try:
        return _loaded(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter by its served name and folder, or by its files."""

    name: str
    folder: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Declared:
    """What a person or the bundle document says. None means that nothing was said."""

    engine: str | None = None
    version: str | None = None
    image: str | None = None
    arguments: Arguments = field(default_factory=Arguments)
    variables: Mapping[str, str] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    parallel: Mapping[str, int] = field(default_factory=dict)
    accelerator: str | None = None
    devices: int | None = None
    context_tokens: int | None = None
    max_sequences: int | None = None
    adapters: tuple[Adapter, ...] = ()
    draft_folder: str | None = None
    draft_method: str | None = None
    features: frozenset[str] | None = None
    served_name: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    template_file: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    termination_seconds: float | None = None
    pre_stop_seconds: float | None = None
    shutdown_seconds: float | None = None
    code: frozenset[str] = frozenset()

    def degree(self, kind: str) -> int:
        """Return a parallel degree, from the topology or else from the arguments; 1 when neither says one."""
        return self.parallel.get(kind) or self.argument_degree(kind) or 1

    def argument_degree(self, kind: str) -> int | None:
        """Return the degree that the launch arguments say, or None."""
        return self.arguments.number(*_PARALLEL_ARGUMENTS.get(kind, ()))

    @property
    def shares_attention(self) -> bool:
        """Whether data parallelism divides the devices of tensor parallelism, instead of multiplying them.

        Source: SGLang's `--enable-dp-attention`: tp devices are groups of tp / dp for attention.
        """
        return self.arguments.has("--enable-dp-attention")

    @property
    def attention_degree(self) -> int:
        """Over how many devices one layer's attention is divided."""
        tensor = self.degree("tensor")
        return max(1, tensor // self.degree("data")) if self.shares_attention else tensor

    def has(self, feature: Feature) -> bool:
        """Say whether a feature is declared; what nobody said is not."""
        return self.features is not None and feature.value in self.features


def declared_by(bundle: Bundle) -> Declared:
    """Return what a bundle document declares."""
    engine, runtime, template, topology = bundle.engine, bundle.runtime, bundle.template, bundle.topology
    draft = bundle.draft
    return Declared(
        engine=engine.name,
        version=engine.version,
        image=engine.image,
        arguments=Arguments(tuple(engine.arguments)),
        variables=dict(engine.variables or {}),
        libraries=dict(engine.build or {}),
        parallel={kind: getattr(topology, f"{kind}_parallel") for kind in PARALLEL_NAMES},
        accelerator=bundle.hardware.accelerator,
        devices=bundle.hardware.count,
        context_tokens=runtime.context_tokens,
        max_sequences=runtime.max_sequences,
        adapters=tuple(
            Adapter(one.name, one.files[0].rpartition("/")[0], tuple(one.files)) for one in bundle.adapters or []
        ),
        draft_folder=draft.files[0].rpartition("/")[0] if draft is not None and draft.files else None,
        draft_method=None if draft is None else draft.method,
        features=frozenset(feature.value for feature in bundle.serving.features),
        served_name=bundle.serving.served_name,
        tool_parser=template.tool_parser,
        reasoning_parser=template.reasoning_parser,
        template_file=template.file,
        template_arguments=dict(template.arguments or {}),
        code=frozenset(engine.remote_code.files if engine.remote_code is not None else ()),
    )


# ---------------------------------------------------------------------------------------------- what -f says


def read_declared(document: Mapping[str, Any]) -> Declared:
    """Return what a file of `-f` declares: a part of a bundle document, in which short names are understood too.

    Raises:
        DeclaredError: values are of another kind than their places ask for, or out of range; each of them is told.
    """
    read = _Reader(document)
    found = _declared(read)
    if read.wrong:
        raise DeclaredError(list(dict.fromkeys(read.wrong)))  # some places are read twice
    return found


def _declared(read: "_Reader") -> Declared:
    engine = read.section("engine")
    topology, hardware = read.section("topology"), read.section("hardware")
    runtime, serving, template = read.section("runtime"), read.section("serving"), read.section("template")
    drain = read.section("drain")
    draft = read.draft()
    arguments = Arguments(tuple(engine.command("arguments", "args", "launch_args")))
    name = (engine.text("name", "family") or "").lower() or None
    features = serving.words_or_none("features") or read.top.words_or_none("features", "capabilities")
    return Declared(
        engine=None if name is None else ENGINE_NAMES.get(name, name),
        version=engine.text("version"),
        image=engine.text("image", "image_digest"),
        arguments=arguments,
        variables=engine.texts("variables", "env", "environment_variables"),
        libraries={
            **engine.scalars(),
            **engine.texts("build"),
            **engine.texts("libraries", "packages", "rules"),
            **read.top.texts("libraries"),
        },
        parallel={kind: count for kind, names in PARALLEL_NAMES.items() if (count := topology.count(*names))},
        accelerator=hardware.text("accelerator", "gpu_arch", "arch", "architecture", "gpu")
        or topology.text("gpu_arch", "arch")
        or read.top.text("gpu_arch", "accelerator"),
        devices=hardware.count("count", "gpus", "devices", allow_zero=True),
        context_tokens=runtime.count("context_tokens", "context_length")
        or read.top.count("context_tokens", "context_length", "max_context"),
        max_sequences=runtime.count("max_sequences"),
        adapters=read.adapters(),
        draft_folder=draft.text("directory", "folder", "path", "model"),
        draft_method=draft.text("method"),
        features=None if features is None else frozenset(features),
        served_name=serving.text("served_name", "name") or read.top.text("served_name"),
        tool_parser=template.text("tool_parser"),
        reasoning_parser=template.text("reasoning_parser"),
        template_file=template.text("file"),
        template_arguments=template.mapping("arguments"),
        termination_seconds=drain.number("termination_grace_seconds", "termination_grace"),
        pre_stop_seconds=drain.number("pre_stop_seconds", "pre_stop"),
        shutdown_seconds=drain.number("shutdown_seconds", "shutdown_timeout"),
        code=frozenset(read.code()),
    )


class _Section:
    """One object of the document; every getter takes all the names a value may have there."""

    def __init__(self, pointer: str, values: Mapping[str, Any], wrong: list[tuple[str, str]]) -> None:
        self.pointer, self.values, self._wrong = pointer, values, wrong

    def _find(self, names: Sequence[str]) -> tuple[str, Any]:
        return next(((name, self.values[name]) for name in names if self.values.get(name) is not None), ("", None))

    def _refuse(self, name: str, wanted: str, *, too_large: bool = False) -> None:
        value, joint = self.values[name], ", which is too large: it" if too_large else ", and"
        self._wrong.append((f"{self.pointer}/{name}", f"is {shown(value)}{joint} has to be {wanted}"))

    def text(self, *names: str) -> str | None:
        name, value = self._find(names)
        if value is None:
            return None
        if isinstance(value, bool | list | dict):
            self._refuse(name, "a text")
            return None
        return str(value)

    def number(self, *names: str) -> float | None:
        name, value = self._find(names)
        if value is None:
            return None
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?s?", value):
            return float(value.rstrip("s"))
        if type(value) not in (int, float) or not 0 <= value <= MOST_SECONDS:
            self._refuse(name, f"a number from 0 to {MOST_SECONDS}")
            return None
        return float(value)

    def count(self, *names: str, allow_zero: bool = False) -> int | None:
        name, value = self._find(names)
        if value is None:
            return None
        least = 0 if allow_zero else 1
        if type(value) is not int or not least <= value <= MAX_INTEGER:
            is_long = isinstance(value, str) and _LONG.fullmatch(value) is not None
            too_large = is_long or (type(value) is int and value > MAX_INTEGER)
            self._refuse(name, f"a whole number from {least} to {MAX_INTEGER}", too_large=too_large)
            return None
        return value

    def words(self, *names: str) -> list[str]:
        return self.words_or_none(*names) or []

    def command(self, *names: str) -> list[str]:
        """Return the words of a command line, which may also stand in one text as a shell has them."""
        name, value = self._find(names)
        if not isinstance(value, str):
            return self.words(*names)
        try:
            return shlex.split(value)
        except ValueError as error:
            self._refuse(name, f"words as a shell has them ({error})")
            return []

    def words_or_none(self, *names: str) -> list[str] | None:
        name, value = self._find(names)
        if value is None:
            return None
        if isinstance(value, dict):  # {"tools": true, "reasoning": false}
            return [str(key) for key, is_on in value.items() if is_on]
        if not isinstance(value, list) or any(isinstance(item, dict | list) or item is None for item in value):
            self._refuse(name, "a list of texts")
            return None
        return [json.dumps(item) if isinstance(item, bool) else str(item) for item in value]

    def texts(self, *names: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, dict):
                self._refuse(name, "an object of texts")
                continue
            found |= {
                str(key): str(item).lower() if isinstance(item, bool) else str(item) for key, item in value.items()
            }
        return found

    def scalars(self) -> dict[str, str]:
        """Return the plain values by their names, such as a rule's that stands beside the engine's version."""
        return {
            str(key): json.dumps(value) if isinstance(value, bool) else str(value)
            for key, value in self.values.items()
            if isinstance(value, bool | int | str) and key not in {"name", "family", "version", "image", "image_digest"}
        }

    def mapping(self, *names: str) -> dict[str, Any]:
        name, value = self._find(names)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self._refuse(name, "an object")
            return {}
        return dict(value)


class _Reader:
    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self.wrong: list[tuple[str, str]] = []
        self.top = self._section("", document)

    def _section(self, pointer: str, values: Mapping[str, Any]) -> _Section:
        return _Section(pointer, values, self.wrong)

    def section(self, name: str) -> _Section:
        value = self.document.get(name)
        if name == "engine" and isinstance(value, str):
            return self._section("/engine", {"name": value})
        if value is not None and not isinstance(value, dict):
            self.wrong.append((f"/{name}", f"is {shown(value)}, and has to be an object"))
        return self._section(f"/{name}", value if isinstance(value, dict) else {})

    def code(self) -> list[str]:
        told = self.section("engine").mapping("remote_code")
        return self._section("/engine/remote_code", told).words("files")

    def draft(self) -> _Section:
        for name in ("draft", "draft_model"):
            value = self.document.get(name)
            if isinstance(value, str):
                return self._section(f"/{name}", {"directory": value})
            if isinstance(value, dict):
                return self._section(f"/{name}", value)
            if value is not None:
                self.wrong.append((f"/{name}", f"is {shown(value)}, and has to be a directory, or an object with one"))
        return self._section("/draft", {})

    def adapters(self) -> tuple[Adapter, ...]:
        value = self.document.get("adapters")
        if value is None:
            return ()
        if isinstance(value, dict):
            items = list(value.items())
        elif isinstance(value, list) and all(isinstance(one, dict) for one in value):
            items = [(one.get("name"), _folder(one)) for one in value]
        else:
            self.wrong.append(("/adapters", f"is {shown(value)}, and has to map names to directories"))
            return ()
        whole = [(name, folder) for name, folder in items if isinstance(name, str) and isinstance(folder, str)]
        for name, folder in items:
            if (name, folder) not in whole:
                self.wrong.append((f"/adapters/{name}", f"is {shown(folder)}, and has to be a directory"))
        return tuple(Adapter(name, folder) for name, folder in sorted(whole))


def _folder(adapter: Mapping[str, Any]) -> object:
    files = adapter.get("files")
    if isinstance(files, list) and files and isinstance(files[0], str):
        return files[0].rpartition("/")[0]
    return next((adapter[key] for key in ("directory", "folder", "path") if key in adapter), None)
