"""What a bundle's files tell, where each value came from, and what the gate static will find: as `bundle validate`."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gates.directory import Contents, Memory
from gates.inference import limit_arguments
from registry.cli.output import Output
from schemas import VERSION as PRODUCT
from schemas.bundle import Bundle
from schemas.short import many

if TYPE_CHECKING:
    from gates.static.origins import Origin

VERSION = 4
"""Changes whenever more or other things are inferred, so that nothing remembered is taken for it."""
_LISTED = 10
_DECLARED = {
    "name": ("name",),
    "served_name": ("serving", "served_name"),
    "licence": ("licence", "identifier"),
    "features": ("serving", "features"),
    "context_tokens": ("runtime", "context_tokens"),
    "max_sequences": ("runtime", "max_sequences"),
    "accelerator": ("hardware", "accelerator"),
}
_FACTS = {"name": ("name", "general.name"), "licence": ("licence", "general.license")}


def infer(
    bundle: Bundle, contents: Contents, overlay: Mapping[str, Any], memory: Memory, *, name: str | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what the files of a bundle tell, under `bundle` what was decided from it, and what the checks find.

    Args:
        bundle: as it will be registered.
        contents: its files, and what was left out.
        overlay: what the file of `-f` and options declare.
        memory: of earlier readings: the same files under the same declarations tell the same.
        name: that an option gives.

    Raises:
        OSError: a file cannot be read any more.
    """
    # The checks are those of this version. What blocks is looked at each time: the reason may have passed.
    key = f"examined:{VERSION}:{PRODUCT}:{bundle.digest}"
    kept = memory.get(key)
    seen: dict[str, Any] = _read(bundle, contents) if kept is None else json.loads(kept)
    if kept is None and seen["verdict"] == "passed":
        memory.put(key, json.dumps(seen))
    told: dict[str, Any] = seen["inferred"]
    told["left_out"] = [one.path for one in contents.left_out]
    if told["left_out"]:
        told["from"]["/left_out"] = {"by": "derived"}
    told["bundle"] = {
        "name": bundle.name,
        "served_name": bundle.serving.served_name,
        "licence": bundle.licence.identifier,
        "features": [str(one) for one in bundle.serving.features],
        "context_tokens": bundle.runtime.context_tokens,
        "max_sequences": bundle.runtime.max_sequences,
        "accelerator": bundle.hardware.accelerator,
    }
    for key in told["bundle"]:
        told["from"][f"/bundle/{key}"] = _origin(key, bundle, contents, overlay, name)
    return told, seen["findings"]


def warn(output: Output, findings: list[dict[str, Any]]) -> None:
    """Say on standard error what blocks a bundle, and how much else there is to know."""
    blocking = [one for one in findings if one["severity"] == "block"]
    others = sorted({one["code"] for one in findings if one["severity"] == "warn"})
    for one in blocking[:_LISTED]:
        output.note(f"{one['code']}: {one['message']}", "warn")
        output.note(f"      → {one['advice']}")
    if blocking:
        codes = ", ".join(sorted({one["code"] for one in blocking}))
        said = many(len(blocking), "finding", "blocks", "block")
        output.note(f"the gate static will fail: {said} ({codes}); bundle validate tells more", "warn")
    if others:
        output.note(f"the gate static will warn: {', '.join(others)}; bundle validate tells more")


def _read(bundle: Bundle, contents: Contents) -> dict[str, Any]:
    # Only where it is asked for: it brings in what reads tensors, and takes a moment.
    from gates.static import composition, examine, report

    places = {found.path: found.place for found in contents.files}
    return report.as_json(examine.examine(composition.of_files(bundle, places)))


def _origin(key: str, bundle: Bundle, contents: Contents, overlay: Mapping[str, Any], name: str | None) -> "Origin":
    if _is_declared(overlay, _DECLARED[key]):
        return {"by": "declared", "pointer": "/" + "/".join(_DECLARED[key])}
    if key == "name" and name is not None:
        return {"by": "argument", "pointer": "--name"}
    if key == "served_name":
        return {"by": "derived", "pointer": "/bundle/name"}
    if key in _FACTS:
        fact, metadata = _FACTS[key]
        held = next((one for one in contents.files if one.facts.get(fact)), None)
        if held is not None:
            return {"by": "file", "file": held.path, "pointer": metadata if held.path.endswith(".gguf") else "license"}
    if key in {"context_tokens", "max_sequences"}:
        flag = limit_arguments(bundle.engine.name)[key == "max_sequences"]
        if flag and flag in bundle.engine.arguments:
            return {"by": "argument", "pointer": flag}
        if key == "context_tokens" and bundle.runtime.context_tokens in {
            one.facts.get("context") for one in contents.files
        }:
            return {"by": "derived", "pointer": "/context/derived"}
    return {"by": "default"}


def _is_declared(document: Any, keys: tuple[str, ...]) -> bool:
    for key in keys:
        if not isinstance(document, Mapping) or key not in document:
            return False
        document = document[key]
    return True


def say(out: Output, told: Mapping[str, Any]) -> None:
    """Print every inferred value with its origin."""
    rows = [
        [place[1:].replace("/", " "), _shown(value), _from(origin)]
        for place, origin in told["from"].items()
        if (value := _at(told, place)) is not None and place != "/left_out" and _shown(value) != ""
    ]
    out.table(["INFERRED", "VALUE", "FROM"], rows)


def _at(document: Any, place: str) -> Any:
    for key in place.split("/")[1:]:
        document = document[key]
    return document


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items() if one is not None and one != [])
    if isinstance(value, list):
        if not value:
            return "none"
        more = f" and {len(value) - 3} more" if len(value) > 3 else ""
        return ", ".join(map(str, value[:3])) + more
    return str(value)


def _from(origin: Mapping[str, str]) -> str:
    words = (origin.get("file"), origin.get("pointer"))
    if origin["by"] in {"file", "argument"}:
        return " ".join(word for word in words if word)
    return " ".join(word for word in (origin["by"], *words) if word)
