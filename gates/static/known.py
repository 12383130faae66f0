"""Checks that what is declared by name is a name that something here knows: a misspelt one is held to no rule."""

import re
from collections.abc import Iterator
from typing import Final

from gates.static.composition import Composition
from gates.static.flaw import Flaw, flaw
from gates.static.rules import capability, lacks, table
from schemas.faults import near
from schemas.result import Severity

_WITHOUT_CAPABILITY: Final = re.compile(
    r"(cpu|amd|intel|apple|metal|google|tpu|aws|trainium|inferentia|gfx|mi[0-9]|x86|arm|aarch64|none|any)"
)
"""How accelerators begin that have no compute capability."""


def check(c: Composition) -> Iterator[Flaw]:
    """Check the engine's and the accelerator's names."""
    yield from _engine(c)
    yield from _accelerator(c)


def _engine(c: Composition) -> Iterator[Flaw]:
    known = sorted({*table("engines")["engines"], "external"})
    name = c.declared.engine
    if name is None or name in known:
        return
    meant = near(name, known)
    yield flaw(
        "engine-unknown",
        f"No rules are known of the engine {name[:80]}; {meant or 'the engines are ' + ', '.join(known)}",
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
        f"{meant or 'say its SKU, or its compute capability, such as sm_90'}",
        pointer="/hardware/accelerator",
        found=name,
        expected=known,
    )
