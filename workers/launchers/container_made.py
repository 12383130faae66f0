"""What a container engine says of a container, held against the command line that it was given.

Source: `podman container inspect` and `docker container inspect`: `Config.Entrypoint` is a list, and a text to podman
before 5; `HostConfig` has what confines it. What an image adds of its own, as its variables, is part of its digest.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from workers.launchers.made import Difference, Findings, Made, as_text

_CONFINED = {"ReadonlyRootfs": True, "Privileged": False}


def read(
    found: Mapping[str, Any], *, source: str, words: Sequence[str], image: str, variables: Mapping[str, str] | None
) -> Made | None:
    """Compare one container with its order; None where its command line is not told.

    Args:
        found: what `inspect` shows.
        source: who showed it.
        words: the command line that was asked for.
        image: the image that was asked for, by digest.
        variables: those that were asked for; None where that is not known any more.
    """
    config, host = found.get("Config") or {}, found.get("HostConfig") or {}
    there = _words(config)
    if there is None:
        return None
    findings = Findings(source)
    findings.add("image", _different("", image, config.get("Image")))
    if variables is not None and isinstance(config.get("Env"), list):
        told = dict(one.partition("=")[::2] for one in config["Env"])
        findings.add(
            "variables", [one for key, value in variables.items() for one in _different(key, value, told.get(key))]
        )
    confined = [one for key, value in _CONFINED.items() if key in host for one in _different(key, value, host[key])]
    findings.add("confinement", confined)
    return findings.made(there, words)


def _words(config: Mapping[str, Any]) -> list[str] | None:
    program, arguments = config.get("Entrypoint"), config.get("Cmd") or []
    if isinstance(program, str):
        program = [program]
    return [*program, *arguments] if isinstance(program, list) and isinstance(arguments, list) else None


def _different(place: str, asked: object, told: object) -> list[Difference]:
    return [] if asked == told else [Difference(place, as_text(asked), as_text(told))]
