"""What a cluster says of the objects of a replica, held against what it was given: admission may have changed them.

Additions that make nothing else of an engine, as defaults and labels, are passed over; variables, containers, shares of
accelerators, and what opens it to the node are not.

Source: the Kubernetes API reference for v1 PodSpec and Container, and for quantities (`resource.Quantity`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from workers.launchers.kube_objects import CONTAINER
from workers.launchers.made import Difference, Findings, Made, as_text, differences

SOURCE = "the pod's spec"
_PROBES = frozenset({"startupProbe", "readinessProbe", "livenessProbe"})
_OPEN = ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace")
_OTHERS = ("containers", "initContainers", "ephemeralContainers")
_GROUP_S = "LWS_"
"""How the variables begin that the controller of groups gives each pod."""
_QUANTITY = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)([EPTGMK]i|[EPTGMkm]|)")
_SCALES = {"": 0, "m": -1, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

Pair = tuple[str, Mapping[str, Any], Mapping[str, Any]]
"""A pod's name, its spec as it was asked for, and as it is."""


def pairs(
    asked: Mapping[str, Any], found: Mapping[str, Any], members: Sequence[Mapping[str, Any]]
) -> tuple[list[Pair], list[Mapping[str, Any]]]:
    """Return the specs to compare of a replica's object and of its pods, where these are others, and their statuses."""
    name = found["metadata"]["name"]
    if asked["kind"] == "Pod":
        return [(name, asked["spec"], found.get("spec") or {})], [found.get("status") or {}]
    ours, there = (one["spec"]["leaderWorkerTemplate"] for one in (asked, found))
    kinds = ("leaderTemplate", "workerTemplate")
    made = [(kind, ours[kind]["spec"], (there.get(kind) or {}).get("spec") or {}) for kind in kinds]
    for pod in sorted(members, key=lambda one: str(one["metadata"]["name"])):
        kind = kinds[0] if pod["metadata"]["name"] == f"{name}-0" else kinds[1]
        made.append((pod["metadata"]["name"], ours[kind]["spec"], pod.get("spec") or {}))
    return made, [pod.get("status") or {} for pod in members]


def read(specs: Sequence[Pair], statuses: Sequence[Mapping[str, Any]], *, is_whole: bool) -> Made:
    """Compare the pods of a replica, the one that answers first, with what was asked for.

    Args:
        specs: each spec with what was asked for.
        statuses: of the pods that there are, for the images that really run.
        is_whole: all of it is known as it was asked for; else, of what an earlier runner made, command line and image.
    """
    findings = Findings(SOURCE)
    lines = []
    for name, asked, told in specs:
        ours, there = _engine(asked), _engine(told)
        lines.append((ours["command"], [*(there.get("command") or []), *(there.get("args") or [])]))
        place = f"{name} " if len(specs) > 1 else ""
        findings.add("image", _image(place, ours["image"], there.get("image")))
        if is_whole:
            _container(findings, place, ours, there)
            _pod(findings, place, asked, told)
    image = _engine(specs[0][1])["image"]
    findings.add("image_id", [one for status in statuses for one in _image_id(image, status)])
    asked_words, words = next((line for line in lines if line[0] != line[1]), lines[0])
    return findings.made(words, asked_words)


def _engine(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next((one for one in spec.get("containers") or [] if one.get("name") == CONTAINER), {})
    return found


def _image(place: str, asked: str, told: object) -> list[Difference]:
    """Compare by digest: a mirror that has the very same image has it under another name."""
    named = _DIGEST.findall(told) if isinstance(told, str) else []
    return [] if named == _DIGEST.findall(asked) else [Difference(place.strip(), asked, as_text(told))]


def _image_id(asked: str, status: Mapping[str, Any]) -> list[Difference]:
    """Compare with the image that a node says that it runs, where it names it by a registry's digest.

    A node may name the image of its own kind of processor out of an index, which is no difference that anybody could
    tell from another image: so this only warns.
    """
    found = []
    for one in status.get("containerStatuses") or []:
        told = str(one.get("imageID") or "")
        named = _DIGEST.findall(told) if one.get("name") == CONTAINER and "@" in told else []
        if named and named != _DIGEST.findall(asked):
            found.append(Difference("", asked, told))
    return found


def _container(findings: Findings, place: str, ours: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    variables = {one["name"]: one.get("value", as_text(one.get("valueFrom"))) for one in there.get("env") or []}
    asked = {one["name"]: one["value"] for one in ours["env"]}
    findings.add("variables", differences(asked, variables, f"{place}env"))
    beyond = [name for name in variables if name not in asked and not name.startswith(_GROUP_S)]
    findings.beyond("variables_beyond", beyond + ["envFrom"] * bool(there.get("envFrom")))
    findings.add("resources", _resources(place, ours["resources"], there.get("resources") or {}))
    for name in _PROBES & ours.keys():
        findings.add("probes", differences(ours[name], there.get(name), f"{place}{name}"))
    told = _PROBES | {"command", "args", "image", "env", "resources"}
    rest = {key: value for key, value in ours.items() if key not in told}
    findings.add("confinement", differences(rest, there, place.strip()))
    gained = ((there.get("securityContext") or {}).get("capabilities") or {}).get("add")
    findings.add("confinement", [Difference(f"{place}capabilities.add", "none", as_text(gained))] if gained else [])
    mounts = {one["mountPath"] for one in ours["volumeMounts"]}
    over = [
        one.get("mountPath") or ""
        for one in there.get("volumeMounts") or []
        if one.get("mountPath") not in mounts and _hides(one.get("mountPath") or "", mounts)
    ]
    findings.add("confinement", [Difference(f"{place}volumeMounts", "none", one) for one in over])


def _hides(path: str, mounts: set[str]) -> bool:
    """Tell whether a mount puts other files in the place of what is mounted."""
    return any(path.startswith(f"{one}/") or one.startswith(f"{path.rstrip('/')}/") for one in mounts)


def _pod(findings: Findings, place: str, asked: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    rest = {key: value for key, value in asked.items() if key != "containers"}
    findings.add("confinement", differences(rest, told, place.strip()))
    findings.add("confinement", [Difference(place + key, "false", "true") for key in _OPEN if told.get(key)])
    others = [one.get("name", "") for key in _OTHERS for one in told.get(key) or [] if one.get("name") != CONTAINER]
    findings.beyond("containers", others)


def _resources(place: str, asked: Mapping[str, Any], told: Mapping[str, Any]) -> Iterator[Difference]:
    for kind in ("limits", "requests"):
        ours, there = asked.get(kind) or {}, told.get(kind) or {}
        for name in sorted({*ours, *there}):
            # What is not asked for may be a namespace's default, but no accelerator: those have a vendor and a slash.
            if name not in ours and ("/" not in name or name in (asked.get("limits") or {})):
                continue
            if quantity(ours.get(name)) != quantity(there.get(name)):
                yield Difference(f"{place}{kind}.{name}", as_text(ours.get(name)), as_text(there.get(name)))


def quantity(told: object) -> Decimal | str | None:
    """Return a quantity as a number, since a cluster writes the same one in its own way; another text as it is."""
    match = _QUANTITY.fullmatch(str(told)) if told is not None else None
    if match is None:
        return None if told is None else str(told)
    base = 1024 if match[2].endswith("i") else 1000
    return Decimal(match[1]) * Decimal(base) ** _SCALES[match[2].removesuffix("i").replace("K", "k")]
