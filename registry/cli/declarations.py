"""What a file of `-f` says, as a patch of a bundle document: `create` understands what `validate` and `plan` do.

Short names become those of the document, and folders of adapters and of a draft become sources of their own. What is
no name anywhere stays as it is, and is refused with the document.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gates.static.declared import ENGINE_NAMES, PARALLEL_NAMES
from gates.static.rules import names_told
from schemas.problems import InvalidDocument

SHORT: Mapping[str, Mapping[str, str]] = {
    "engine": {
        **dict.fromkeys(("family",), "name"),
        **dict.fromkeys(("args", "launch_args"), "arguments"),
        **dict.fromkeys(("env", "environment_variables"), "variables"),
        **dict.fromkeys(("libraries", "packages", "rules"), "build"),
        "image_digest": "image",
    },
    "topology": {short: f"{kind}_parallel" for kind, names in PARALLEL_NAMES.items() for short in names},
    "hardware": {
        **dict.fromkeys(("gpu_arch", "arch", "architecture", "gpu"), "accelerator"),
        **dict.fromkeys(("gpus", "devices"), "count"),
    },
    "runtime": {"context_length": "context_tokens"},
    "serving": {"name": "served_name"},
}
TOP = {
    "features": ("serving", "features"),
    "capabilities": ("serving", "features"),
    "served_name": ("serving", "served_name"),
    "context_tokens": ("runtime", "context_tokens"),
    "context_length": ("runtime", "context_tokens"),
    "max_context": ("runtime", "context_tokens"),
    "gpu_arch": ("hardware", "accelerator"),
    "accelerator": ("hardware", "accelerator"),
}
FOLDERS = ("directory", "folder", "path", "model")
ONLY_CHECKED = ("drain",)
"""What `bundle validate` holds against others, and no bundle document has."""
TOPOLOGY_ARCHITECTURE = ("gpu_arch", "arch")
"""Names of the accelerator that may stand with the layout."""


def as_patch(document: Mapping[str, Any], places: list[Path]) -> dict[str, Any]:
    """Return a file's declaration as a JSON Merge Patch of a bundle document; `from` maps parts to sources.

    Args:
        document: what the file says.
        places: folders that its own folders are looked for in, the first first.

    Raises:
        InvalidDocument: a value is said twice under two names, or a folder is none.
    """
    aside = {*TOP, *ONLY_CHECKED, "draft_model", "libraries"}
    patch = {key: value for key, value in document.items() if key not in aside}
    if isinstance(patch.get("engine"), str):
        patch["engine"] = {"name": patch["engine"]}
    for key, (section, name) in TOP.items():
        if key in document:
            _put(patch.setdefault(section, {}), name, document[key], f"/{key}")
    _take_architecture(patch)
    for section, names in SHORT.items():
        told = patch.get(section)
        if isinstance(told, Mapping):
            patch[section] = _long(told, names, f"/{section}")
    _take_libraries(patch, document.get("libraries"))
    _spell(patch)
    sources = _parts(patch, document, places)
    if sources:
        told = patch.get("from") or {}
        patch["from"] = {**told, **sources} if isinstance(told, Mapping) else told
    return patch


def _take_architecture(patch: dict[str, Any]) -> None:
    """Move an accelerator that stands with the layout to the hardware."""
    layout = patch.get("topology")
    if isinstance(layout, Mapping):
        patch["topology"] = {key: value for key, value in layout.items() if key not in TOPOLOGY_ARCHITECTURE}
        for key in TOPOLOGY_ARCHITECTURE:
            if key in layout:
                _put(patch.setdefault("hardware", {}), "accelerator", layout[key], f"/topology/{key}")


def _take_libraries(patch: dict[str, Any], libraries: Any) -> None:
    """Move versions of libraries, and rules, that stand beside the engine or its version to what it is built of."""
    engine = patch.setdefault("engine", {}) if libraries is not None else patch.get("engine")
    if not isinstance(engine, dict):
        return
    told = {key: engine[key] for key in names_told() if isinstance(engine.get(key), bool | int | str)}
    for key in told:
        del engine[key]
    for key, value in (told | (dict(libraries) if isinstance(libraries, Mapping) else {})).items():
        _put(engine.setdefault("build", {}), key, value, "/engine/build")


def _long(told: Mapping[str, Any], names: Mapping[str, str], place: str) -> dict[str, Any]:
    found = {key: value for key, value in told.items() if names.get(key, key) == key}
    for key, value in told.items():
        if names.get(key, key) != key:
            _put(found, names[key], value, f"{place}/{key}")
    return found


def _put(section: Any, name: str, value: Any, place: str) -> None:
    # What is no object is refused with the document.
    if isinstance(section, dict) and section.setdefault(name, value) != value:
        raise _wrong(place, f"says something else than {name}, which means the same")


def _spell(patch: dict[str, Any]) -> None:
    """Write values as a document does: names of engines, arguments as texts, features in order."""
    engine, serving = patch.get("engine"), patch.get("serving")
    if isinstance(engine, dict):
        name, arguments, build = engine.get("name"), engine.get("arguments"), engine.get("build")
        if isinstance(name, str):
            engine["name"] = ENGINE_NAMES.get(name.lower(), name.lower())
        if isinstance(arguments, list):
            engine["arguments"] = [_text(one) for one in arguments]
        if isinstance(build, Mapping):
            engine["build"] = {str(key): _text(one) for key, one in build.items()}
        if isinstance(engine.get("version"), int):
            engine["version"] = str(engine["version"])
    features = serving.get("features") if isinstance(serving, dict) else None
    if isinstance(features, Mapping):  # {"tools": true, "reasoning": false}
        features = [str(name) for name, is_on in features.items() if is_on]
    if isinstance(serving, dict) and isinstance(features, list) and all(isinstance(one, str) for one in features):
        serving["features"] = sorted(set(features))


def _text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, bool | int) else value


def _parts(patch: dict[str, Any], document: Mapping[str, Any], places: list[Path]) -> dict[str, str]:
    """Take folders of adapters and of a draft out of a patch, and return them as sources."""
    found: dict[str, str] = {}
    adapters = patch.get("adapters")
    if isinstance(adapters, Mapping):
        for name, folder in adapters.items():
            found[f"adapter:{name}"] = _source(folder, f"/adapters/{name}", places)
        del patch["adapters"]
    elif isinstance(adapters, list) and any(_folder(one) for one in adapters):
        for number, one in enumerate(adapters):
            name = one.get("name") if isinstance(one, Mapping) else None
            found[f"adapter:{name}"] = _source(_folder(one), f"/adapters/{number}", places)
        del patch["adapters"]
    draft = document.get("draft", document.get("draft_model"))
    if isinstance(draft, str):
        found["draft"] = _source(draft, "/draft", places)
        patch.pop("draft", None)
    elif isinstance(draft, Mapping):
        key = next((key for key in FOLDERS if key in draft), None)
        if key is not None:
            found["draft"] = _source(draft[key], f"/draft/{key}", places)
        patch["draft"] = {name: value for name, value in draft.items() if name not in FOLDERS}
    return found


def _folder(adapter: Any) -> Any:
    if not isinstance(adapter, Mapping):
        return None
    return next((adapter[key] for key in FOLDERS if key in adapter), None)


def _source(folder: Any, place: str, places: list[Path]) -> str:
    if not isinstance(folder, str) or not folder:
        raise _wrong(place, "has to be a directory")
    inside = next((one / folder for one in places if (one / folder).is_dir()), None)
    if inside is not None:
        return str(inside)
    if ":" in folder:
        return folder  # another source
    raise _wrong(place, f"there is no directory {folder} in {' or '.join(map(str, places))}")


def _wrong(place: str, detail: str) -> InvalidDocument:
    return InvalidDocument("the file of -f is not valid", errors=[{"pointer": place, "detail": detail}])
