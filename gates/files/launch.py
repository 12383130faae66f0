"""Says which launch arguments and variables let an engine load what is not in its bundle, or leave its sandbox.

One table an engine, with the reason. Python's argparse takes the beginning of an option for all of it, vLLM dashes and
underscores alike, and `--option.key` for a key of an option that holds JSON: all of these are read here, of any engine.
What is told is exact or refused; an argument in no table is the engine's.

Source: `engine/arg_utils.py`, `entrypoints/openai/cli_args.py` and `envs.py` of vLLM, and what of its configurations
leads to `importlib` in 0.33.0; `server_args.py`, `environ.py` and `srt/arg_groups` of SGLang, and what they lead to in
0.5.23; of the others those of their data files in gates/static.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from gates.files.refusal import FileRefused, pointer, shown

CODE: Final = "launch-refused"
_IMPORTED: Final = re.compile(r"(module_path|_plugin|_cls)$")
"""How keys end by which engines name what they import."""
_OPTION: Final = re.compile(r"--?[A-Za-z]")
_ADVICE: Final = "leave it out; what is served comes from the bundle's files"
_DEEPEST: Final = 32
"""Keys within keys that are followed."""
_CODE: Final = "loads code that is not in the bundle"
_WEIGHTS: Final = "loads weights or words that are not in the bundle"
_OUT: Final = "takes the engine out of its sandbox"

Wrong = Callable[[Sequence[str], Collection[str]], bool]
"""Tells whether an option's values are refused, given the paths of the bundle."""


def _always(values: Sequence[str], paths: Collection[str]) -> bool:  # noqa: ARG001 - others look
    return True


def _is_inside(place: str, paths: Collection[str]) -> bool:
    place = place.removeprefix("./").rstrip("/")
    return place == "." or place in paths or any(path.startswith(f"{place}/") for path in paths if place)


def _outside(values: Sequence[str], paths: Collection[str]) -> bool:
    return not values or not all(_is_inside(value, paths) for value in values)


def _outside_but(*allowed: str) -> Wrong:
    def wrong(values: Sequence[str], paths: Collection[str]) -> bool:
        return not values or not all(value in allowed or _is_inside(value, paths) for value in values)

    return wrong


def _adapters_outside(values: Sequence[str], paths: Collection[str]) -> bool:
    return not values or not all(_is_inside(place, paths) for value in values for place in _adapter_places(value))


def _listed_outside(values: Sequence[str], paths: Collection[str]) -> bool:
    return _adapters_outside([one for value in values for one in value.split(",")], paths)


def _of_a_repository(values: Sequence[str], paths: Collection[str]) -> bool:  # noqa: ARG001 - others look
    return not values or any("/" in value for value in values)


def _adapter_places(value: str) -> list[str]:
    """Return the places that NAME=PATH, PATH or JSON names; one that is nowhere for what cannot be read."""
    if not value.lstrip().startswith(("{", "[")):
        return [value.partition("=")[2] or value]
    try:
        told = json.loads(value)
    except (ValueError, RecursionError):
        return [""]
    listed = told if isinstance(told, list) else [told]
    return [str(one.get("path") or one.get("lora_path") or "") if isinstance(one, dict) else str(one) for one in listed]


def _without_draft(values: Sequence[str], paths: Collection[str]) -> bool:
    """Tell whether a configuration of speculative decoding names a model that is not in the bundle."""
    told = _objects(values)
    if told is None:
        return True
    named = [one[key] for one in told for key in ("model", "draft_model", "tokenizer") if one.get(key) is not None]
    return not all(isinstance(one, str) and (one in _NO_MODEL or _is_inside(one, paths)) for one in named)


def _imports(values: Sequence[str], paths: Collection[str]) -> bool:  # noqa: ARG001 - others look
    """Tell whether JSON names, at any depth, a module, a class or a plugin that the engine would import."""
    told = _objects(values)
    return told is None or any(_IMPORTED.search(key) and value for one in told for key, value in _keys(one))


def _compiles(values: Sequence[str], paths: Collection[str]) -> bool:  # noqa: ARG001 - others look
    """Tell whether a configuration of compilation names a backend or a pass by its module."""
    if values and all(value.isdecimal() for value in values):
        return False  # a mode, as older versions take it
    told = _objects(values)
    return told is None or any(one.get("inductor_passes") or "." in str(one.get("backend")) for one in told)


def _keys(told: object, depth: int = _DEEPEST) -> Iterator[tuple[str, object]]:
    """Yield each key of objects within objects and lists, with its value; what is deeper counts as a module."""
    if depth == 0:
        yield "module_path", told
    elif isinstance(told, dict):
        for key, value in told.items():
            yield str(key), value
            yield from _keys(value, depth - 1)
    elif isinstance(told, list):
        for value in told:
            yield from _keys(value, depth - 1)


def _objects(values: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return JSON objects; None when one of the values is none."""
    try:
        told = [json.loads(value) for value in values]
    except (ValueError, RecursionError):
        return None
    return told if told and all(isinstance(one, dict) for one in told) else None


def _one_of(*refused: str) -> Wrong:
    def wrong(values: Sequence[str], paths: Collection[str]) -> bool:  # noqa: ARG001 - others look
        return not values or any(value.casefold() in refused for value in values)

    return wrong


def _none_of(*allowed: str) -> Wrong:
    def wrong(values: Sequence[str], paths: Collection[str]) -> bool:  # noqa: ARG001 - others look
        return not values or any(value.casefold() not in allowed for value in values)

    return wrong


_NO_MODEL: Final = ("ngram", "[ngram]", "suffix")
# Formats that take pickles are refused where files are chosen: `gates.files.contents`.
_FORMATS: Final = _one_of("tensorizer", "dummy", "remote", "remote_instance")

REFUSED: Final[Mapping[str, Mapping[str, tuple[Wrong, str]]]] = {
    "vllm": {
        "--middleware": (_always, _CODE),
        "--worker-cls": (_none_of("auto"), _CODE),
        "--worker-extension-cls": (_always, _CODE),
        "--scheduler-cls": (_always, _CODE),
        "--logits-processors": (_always, _CODE),
        "--tool-parser-plugin": (_always, _CODE),
        "--reasoning-parser-plugin": (_always, _CODE),
        "--io-processor-plugin": (_always, _CODE),
        "--distributed-executor-backend": (_none_of("mp", "uni", "ray", "external_launcher"), _CODE),
        "--kv-transfer-config": (_imports, _CODE),
        "--ec-transfer-config": (_imports, _CODE),
        "--ec-manager-config": (_imports, _CODE),
        "--structured-outputs-config": (_imports, _CODE),
        "--compilation-config": (_compiles, _CODE),
        "--config": (_always, "reads arguments that the bundle does not show"),
        "--model": (_outside, _WEIGHTS),
        "--tokenizer": (_outside, _WEIGHTS),
        "--hf-config-path": (_outside, _WEIGHTS),
        "--download-dir": (_outside, _OUT),
        "--lora-modules": (_adapters_outside, _WEIGHTS),
        "--load-format": (_FORMATS, "loads other weights than the bundle's, or none"),
        "--speculative-config": (_without_draft, _WEIGHTS),
        "--speculative-model": (_outside, _WEIGHTS),
        "--spec-model": (_outside, _WEIGHTS),
        "--generation-config": (_outside_but("auto", "vllm"), "takes sampling defaults that are not in the bundle"),
        "--allowed-local-media-path": (_always, _OUT),
    },
    "sglang": {
        "--custom-weight-loader": (_always, _CODE),
        "--forward-hooks": (_always, _CODE),
        "--tool-parser-plugin": (_always, _CODE),
        "--reasoning-parser-plugin": (_always, _CODE),
        "--custom-sigquit-handler": (_always, _CODE),
        "--sidecar": (_always, _CODE),
        "--hicache-storage-backend-extra-config": (_imports, _CODE),
        "--unified-cache-external-linker-config": (_imports, _CODE),
        "--config": (_always, "reads arguments that the bundle does not show"),
        "--model": (_outside, _WEIGHTS),
        "--model-path": (_outside, _WEIGHTS),
        "--tokenizer-path": (_outside, _WEIGHTS),
        "--download-dir": (_outside, _OUT),
        "--lora-paths": (_adapters_outside, _WEIGHTS),
        "--load-format": (_FORMATS, "loads other weights than the bundle's, or none"),
        "--speculative-draft-model": (_outside, _WEIGHTS),
        "--speculative-draft-model-path": (_outside, _WEIGHTS),
        "--speculative-token-map": (_outside, _WEIGHTS),
        "--uno-lora-path": (_outside, _WEIGHTS),
        "--kt-weight-path": (_outside, _WEIGHTS),
        "--modelopt-checkpoint-restore-path": (_outside, _WEIGHTS),
        "--quantization-param-path": (_outside, _WEIGHTS),
        "--decrypted-config-file": (_always, "reads a configuration that the bundle does not show"),
        "--decrypted-draft-config-file": (_always, "reads a configuration that the bundle does not show"),
    },
    # What these take is written with underscores too, and is compared with dashes.
    "trtllm": {
        "--custom-module-dirs": (_always, _CODE),
        "--custom-tokenizer": (_always, _CODE),
        "--middleware": (_always, _CODE),
        "--post-processor-hook": (_always, _CODE),
        "--config": (_always, "reads options that the bundle does not show"),
        "--extra-llm-api-options": (_always, "reads options that the bundle does not show"),
        "--set": (_always, "sets options that no table holds to what they may be"),
        "--tokenizer": (_outside, _WEIGHTS),
    },
    "tgi": {
        "--model-id": (_outside, _WEIGHTS),
        "--tokenizer-config-path": (_outside, _WEIGHTS),
        "--weights-cache-override": (_outside, _WEIGHTS),
        "--huggingface-hub-cache": (_outside, _WEIGHTS),
        "--lora-adapters": (_listed_outside, _WEIGHTS),
        "--ngrok": (_always, _OUT),
    },
    "transformers": {
        "--attn-implementation": (_of_a_repository, _CODE),
        "--decision-config": (_outside, "reads a configuration that the bundle does not show"),
    },
}
"""Engine → option → when it is refused, and why. An abbreviation counts as every option that it may stand for."""
ORDINARY: Final = frozenset({"--reasoning-parser", "--quantization", "--hicache-storage-backend"})
"""Options that are whole although a refused one begins with them."""
_SHORT: Final = {"-sc": "--speculative-config", "-cc": "--compilation-config"}

_EVERYWHERE: Final = {
    **dict.fromkeys(("PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "PYTHONUSERBASE"), _CODE),
    **dict.fromkeys(("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "CUDA_INJECTION64_PATH", "PATH"), _CODE),
    "HF_MODULES_CACHE": _CODE,
    "HF_ENDPOINT": _WEIGHTS,
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), _OUT),
}
VARIABLES: Final[Mapping[str, Mapping[str, str]]] = {
    "vllm": {
        **_EVERYWHERE,
        "VLLM_PLUGINS": _CODE,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": _CODE,
        "VLLM_USE_MODELSCOPE": _WEIGHTS,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": _WEIGHTS,
        "VLLM_LORA_RESOLVER_CACHE_DIR": _WEIGHTS,
    },
    "sglang": {
        **_EVERYWHERE,
        "SGLANG_EXTERNAL_MODEL_PACKAGE": _CODE,
        "SGLANG_PLUGINS": _CODE,
        "SGLANG_USE_MODELSCOPE": _WEIGHTS,
    },
    "trtllm": {**_EVERYWHERE, "TLLM_USE_MODELSCOPE": _WEIGHTS},
    "transformers": dict(_EVERYWHERE),
    # It takes each argument from a variable of its name too.
    "tgi": {
        **_EVERYWHERE,
        **dict.fromkeys(("MODEL_ID", "TOKENIZER_CONFIG_PATH", "WEIGHTS_CACHE_OVERRIDE", "LORA_ADAPTERS"), _WEIGHTS),
        "TRUST_REMOTE_CODE": _CODE,
        "NGROK": _OUT,
    },
}
"""Engine → variable, in capital letters → why it is refused."""


def refuse_launch(
    engine: str | None, arguments: Sequence[str], variables: Mapping[str, str], paths: Collection[str]
) -> Iterator[FileRefused]:
    """Yield a refusal for each argument and variable of an engine that a bundle may not have.

    Args:
        engine: its name; those without a table of their own raise nothing.
        arguments: launch arguments, word by word.
        variables: of its environment.
        paths: of the bundle's files.
    """
    table = REFUSED.get(engine or "", {})
    for place, word in enumerate(arguments):
        if not table or not _OPTION.match(word):
            continue
        name, values = _read(word, arguments[place + 1 :])
        for option in _meant(name, table):
            wrong, why = table[option]
            if wrong(values, paths):
                whole = "" if option == name else f" (the beginning of {option})"
                said = f"has the argument {shown(name)}{whole}, which {why}"
                yield _refused(said, pointer("engine", "arguments", place), word)
                break
    for name in sorted(variables):
        reason = VARIABLES.get(engine or "", {}).get(name.upper())
        if reason is not None:
            said = f"has the variable {shown(name)}, which {reason}"
            yield _refused(said, pointer("engine", "variables", name), variables[name])


def _read(word: str, following: Sequence[str]) -> tuple[str, list[str]]:
    """Return an option's name and its values: what is after `=`, or up to the next option; a key within it as JSON."""
    name, equals, value = word.partition("=")
    values = [value] if equals else []
    if not equals:
        for other in following:
            if _OPTION.match(other):
                break
            values.append(other)
    name, _, key = name.partition(".")
    name = _SHORT.get(name, name).replace("_", "-")
    if key:
        parts = key.rstrip("+").replace("-", "_").split(".")
        values = [json.dumps(_within(parts, one)) for one in values]
    return name, values


def _within(parts: Sequence[str], value: str) -> dict[str, Any]:
    """Return the object that a path of keys leads into; of one too deep to be read, a module."""
    made: Any = value
    for part in reversed(parts if len(parts) <= _DEEPEST else ["module_path"]):
        made = {part: made}
    return dict(made)


def _meant(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of a table that a name may stand for."""
    if name in table:
        yield name
    elif name.startswith("--") and len(name) > 2 and name not in ORDINARY:
        yield from (option for option in table if option.startswith(name))


def _refused(said: str, place: str, found: str) -> FileRefused:
    return FileRefused(CODE, said, file="", pointer=place, found=found, expected="none", advice=_ADVICE)
