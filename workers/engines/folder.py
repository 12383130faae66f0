"""What drivers of engines that serve a folder of safetensors have in common: what they need of a bundle, and refuse."""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from gates.dialects import releases
from gates.static.rules import is_within, table
from schemas.bundle import Adapter, Bundle, Role
from workers.engines.arguments import Table, Told

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
"""Nothing is fetched, and nobody is told: all that is served lies in the bundle."""
_CONFIG = "config.json"
_ADAPTER_CONFIG = "adapter_config.json"
# What a section says becomes a word of the command line, where a dash in front would make an argument of it.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


def problems(bundle: Bundle, told: Sequence[Told]) -> list[str]:
    """Return why an engine with a table of arguments cannot serve a bundle, one sentence each.

    Args:
        bundle: of that engine.
        told: the arguments that its sections lead to.
    """
    engine, allowed = bundle.engine, Table.load(bundle.engine.name)
    versions = releases.supported(engine.name)
    if not is_within(engine.version, versions):
        return [f"{engine.name} {engine.version} is not known here, only {versions}"]
    unsayable = [one for one in told if one.value is not None and not _WORD.fullmatch(one.value)]
    if unsayable:
        return [f"{one.section} {one.value!r} cannot be said as {one.name}" for one in unsayable]
    found = allowed.check(engine.arguments, engine.version) or allowed.contradictions(engine.arguments, told)
    found += allowed.check_variables(engine.variables or {})
    return found + _of_name(bundle) + _of_files(bundle) + _of_quantization(bundle)


def _of_name(bundle: Bundle) -> list[str]:
    # Some engines are told the name as a folder that leads to the files.
    name = bundle.serving.served_name
    parts = name.split("/")
    return [] if all(parts) and not {".", ".."} & set(parts) else [f"serving.served_name {name} names no folder"]


def _of_files(bundle: Bundle) -> list[str]:
    if bundle.model.format != "safetensors":
        return [f"{bundle.engine.name} serves safetensors here, not {bundle.model.format}"]
    found = []
    if not any(file.path == _CONFIG and file.role is Role.CONFIG for file in bundle.files):
        found.append(f"there is no {_CONFIG} beside the weights")
    apart = [one.path for one in bundle.weights() if "/" in one.path or not one.path.endswith(".safetensors")]
    if apart:
        found.append(f"{apart[0]} is no .safetensors file in the bundle's own folder")
    return found


def _of_quantization(bundle: Bundle) -> list[str]:
    method = bundle.quantization.method
    for rule in table("engines")["engines"].get(bundle.engine.name, {}).get("quantizations", ()):
        if is_within(bundle.engine.version, rule["versions"]):
            is_known = method == "none" or method in rule["value"]
            return [] if is_known else [f"{bundle.engine.name} knows no quantization {method}"]
    return []


def adapter_folder(adapter: Adapter) -> str | None:
    """Return the folder that holds an adapter whole, in the bundle; None when its files are not one folder."""
    folders = {str(PurePosixPath(path).parent) for path in adapter.files}
    names = {PurePosixPath(path).name for path in adapter.files}
    return folders.pop() if len(folders) == 1 and folders != {"."} and _ADAPTER_CONFIG in names else None


def adapter_problems(bundle: Bundle) -> list[str]:
    """Return what keeps the adapters of a bundle from being loaded from folders of their own."""
    return [
        f"adapter {one.name} is no folder of its own with an {_ADAPTER_CONFIG}"
        for one in bundle.adapters or []
        if adapter_folder(one) is None
    ]


def draft_folder(bundle: Bundle) -> str | None:
    """Return the folder that holds the draft model; None when there is none, or its files are not one folder."""
    files = (bundle.draft.files if bundle.draft is not None else None) or []
    folders = {str(PurePosixPath(path).parent) for path in files}
    return folders.pop() if len(folders) == 1 and folders != {"."} else None


def has_generation_config(bundle: Bundle) -> bool:
    """Tell whether the bundle brings sampling defaults in a file that engines read by themselves."""
    return any(file.role is Role.GENERATION_CONFIG for file in bundle.files)


def sampling_problems(bundle: Bundle) -> list[str]:
    """Return why declared sampling defaults would not apply on an engine that takes them from a file alone."""
    if bundle.runtime.sampling is None or has_generation_config(bundle):
        return []
    advice = "add that file, or leave runtime.sampling out"
    return [f"{bundle.engine.name} takes sampling defaults from generation_config.json alone; {advice}"]


def layout_problems(bundle: Bundle, *known: str) -> list[str]:
    """Return what a bundle's layout asks for that a driver does not do.

    Args:
        bundle: whose topology is looked at.
        known: names in it that the driver can make more than 1.
    """
    return [
        f"this driver starts {bundle.engine.name} with {name} 1, not {degree}"
        for name, degree in bundle.topology.model_dump().items()
        if degree != 1 and name not in known
    ]
