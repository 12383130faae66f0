"""Checks of the contract with callers: declared features have what they need, and an ending replica has time."""

import re
from collections.abc import Iterator

from gates.static import arguments, features, known, together
from gates.static.composition import Composition
from gates.static.flaw import Flaw, flaw
from schemas.bundle import Feature

_NAME_ARGUMENTS = ("--served-model-name", "--alias", "-a", "--served-name")
_SHUTDOWN = ("--shutdown-timeout",)


def check(c: Composition) -> Iterator[Flaw]:
    """Check names, launch arguments, served name, features and drain times."""
    yield from known.check(c)
    yield from arguments.check(c)
    yield from together.check(c)
    yield from _name(c)
    yield from _tool_flags(c)
    yield from _embeddings(c)
    yield from features.check(c)
    yield from _drain(c)


def _name(c: Composition) -> Iterator[Flaw]:
    wanted = c.declared.served_name
    said = [word for text in c.declared.arguments.all(*_NAME_ARGUMENTS) for word in re.split(r"[,\s]+", text) if word]
    if wanted is not None and said and wanted not in said:
        yield flaw(
            "served-name-differs",
            f"Callers are told {wanted}, and the launch arguments serve {', '.join(said)}.",
            pointer="/serving/served_name",
            found=said,
            expected=wanted,
        )
    mark = c.rules.get("served_name_without")
    for name in dict.fromkeys([wanted, *said] if wanted is not None else said):
        if mark is not None and mark in name:
            yield flaw(
                "served-name-refused",
                f"{c.engine} refuses a served name with {mark!r} in it, such as {name}.",
                pointer="/serving/served_name" if name == wanted else "--served-model-name",
                found=name,
                expected=f"a name without {mark!r}",
            )
    names = [adapter.name for adapter, _ in c.adapters]
    if taken := [name for name in names if name == wanted or name in said]:
        yield flaw(
            "served-name-differs",
            f"The adapter {taken[0]} has the name that the base is served under.",
            pointer="/adapters",
            found=names,
            expected="a name of its own",
        )


def _tool_flags(c: Composition) -> Iterator[Flaw]:
    flags = c.rules.get("tool_flags")
    if not c.declared.has(Feature.TOOLS) or not flags:
        return
    named = c.declared.tool_parser is not None
    missing = [flag for flag in flags if not c.declared.arguments.has(flag)]
    if missing and not named:
        yield flaw(
            "tool-parser-missing",
            f"The bundle declares tools, and {c.engine} is started without {' and '.join(missing)}.",
            pointer=missing[0],
            found=list(c.declared.arguments.words),
            expected=list(flags),
        )


def _embeddings(c: Composition) -> Iterator[Flaw]:
    shape = c.model.shape
    generating = {Feature.CHAT, Feature.COMPLETIONS, Feature.TOOLS}
    wanted = sorted(feature.value for feature in generating if c.declared.has(feature))
    if c.model.config and shape.architecture and not shape.is_generator and wanted and shape.family:
        yield flaw(
            "head-absent-for-feature",
            f"{shape.architecture} has no language-model head, and the bundle declares {', '.join(wanted)}.",
            file=c.model.path("config.json"),
            pointer="/architectures/0",
            found=shape.architecture,
            expected="a class with a language-model head",
        )


def _drain(c: Composition) -> Iterator[Flaw]:
    told = c.declared
    if told.termination_seconds is None:
        return
    argument = told.arguments.get(*_SHUTDOWN)
    shutdown = told.shutdown_seconds
    if shutdown is None and argument is not None and re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", argument):
        shutdown = float(argument)
    if not shutdown and c.engine == "vllm":
        yield flaw(
            "drain-too-short",
            "vLLM without --shutdown-timeout ends running streams at once."
            if shutdown is None
            else "vLLM with a --shutdown-timeout of 0 ends running streams at once.",
            pointer="--shutdown-timeout",
            found=shutdown,
            expected={"argument": "--shutdown-timeout"},
        )
        return
    needed = (told.pre_stop_seconds or 0) + (shutdown or 0)
    if told.termination_seconds < needed:
        yield flaw(
            "drain-too-short",
            f"A replica is killed after {told.termination_seconds:g} s, and {told.pre_stop_seconds or 0:g} s before it "
            f"stops with {shutdown or 0:g} s of draining take {needed:g}.",
            pointer="/drain",
            found={"termination_grace": told.termination_seconds},
            expected={"at_least": needed},
        )
