"""Checks that what is declared by name is a name that something here knows: a misspelt one is held to no rule."""

import re
from collections.abc import Iterator
from typing import Final

from gates.dialects import releases
from gates.static.composition import Composition
from gates.static.flaw import Flaw, flaw
from gates.static.rules import capability, is_within, lacks, table
from gates.static.typed import short
from schemas.faults import near
from schemas.result import Severity

_WITHOUT_CAPABILITY: Final = re.compile(
    r"(cpu|amd|intel|apple|metal|google|tpu|aws|trainium|inferentia|gfx|mi[0-9]|x86|arm|aarch64|none|any)"
)
"""How accelerators begin that have no compute capability."""


def check(c: Composition) -> Iterator[Flaw]:
    """Check the engine's name and version, the accelerator's name, and the draft's method."""
    yield from _engine(c)
    yield from _version(c)
    yield from _accelerator(c)
    yield from _method(c)


def _engine(c: Composition) -> Iterator[Flaw]:
    known = sorted({*table("engines")["engines"], "external"})
    name = c.declared.engine
    if name is None or name in known:
        return
    meant, others = near(name, known), f"the engines are {', '.join(known)}."
    yield flaw(
        "engine-unknown",
        f"No rules are known of the engine {name[:80]}; {meant or others}",
        severity=Severity.BLOCK if meant else Severity.WARN,
        pointer="/engine/name",
        found=name,
        expected=known,
    )


def _accelerator(c: Composition) -> Iterator[Flaw]:
    name = c.declared.accelerator
    if name is None or capability(name) is not None or _WITHOUT_CAPABILITY.match(name.lower().strip()):
        return
    if lacks(name, "fp8"):
        return
    known = sorted(table("hardware")["capability"])
    meant = near(re.sub(r"^nvidia[-_ ]+", "", name.lower().strip()), known)
    yield flaw(
        "accelerator-unknown",
        f"The accelerator {name[:80]} is in no table, and no number format is held against what it has; "
        f"{meant or 'say its SKU, or its compute capability, such as sm_90.'}",
        pointer="/hardware/accelerator",
        found=name,
        expected=known,
    )


def _version(c: Composition) -> Iterator[Flaw]:
    name, version = c.declared.engine, c.declared.version
    if name is None or version is None or name not in releases.recorded():
        return
    supported = releases.supported(name)
    if is_within(version, supported):
        return
    yield flaw(
        "engine-version-untried",
        f"{name} {short(version)} is none of the versions that are started here, {supported}.",
        pointer="/engine/version",
        found=version,
        expected=supported,
    )


def _method(c: Composition) -> Iterator[Flaw]:
    known = _methods(c)
    for pointer, method in _named(c):
        if not known or method.lower() in known:
            continue
        others = near(method, known) or f"but by {', '.join(known)}."
        yield flaw(
            "draft-method-unknown",
            f"{c.engine} is not known to draft by {short(method)}; {others}",
            pointer=pointer,
            found=method,
            expected=known,
        )


def _named(c: Composition) -> Iterator[tuple[str, str]]:
    """Yield where a draft's method is named, and the name."""
    if c.declared.draft_method is not None:
        yield "/draft/method", c.declared.draft_method
    configuration = c.declared.arguments.json("--speculative-config") or {}
    if isinstance(method := configuration.get("method"), str):
        yield "--speculative-config", method
    if (algorithm := c.declared.arguments.get("--speculative-algorithm")) is not None:
        yield "--speculative-algorithm", algorithm


def _methods(c: Composition) -> list[str]:
    """Return the methods that the engine drafts by, in small letters; none where no table has them."""
    if c.engine == "vllm":
        return sorted(table("vllm")["arguments"]["--spec-method"]["choices"])
    return list(c.rules.get("draft_methods") or ())
