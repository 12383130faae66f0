"""What one boot of a bundle took, as the service gives it out."""

from collections.abc import Sequence
from uuid import UUID

from pydantic import Field

from schemas.common import Instant, Wire
from schemas.result import Finding
from schemas.runner import Agreement, Compared

WARM_PERCENT = 95
"""Share of the weights in memory from which on a boot counts as warm."""


class Boot(Wire):
    """One boot of one bundle: what it took, and what was there already. Durations in ms; null where not known."""

    run: UUID = Field(description="Job that booted it.")
    kind: str = Field(description="evaluate, serve or record.")
    release: UUID | None = Field(description="Release it belongs to.")
    runner: str = Field(description="Runner's name.")
    entry: str = Field(description="Digest of the entry that says so.")
    booted_at: Instant = Field(description="When that was recorded.")
    is_cold: bool | None = Field(
        description="Whether it read weights from a disk (under 95 % of them in memory at the launch) or compiled "
        "into an empty cache; null when the kernel does not say."
    )
    was_staged: bool | None = Field(description="Whether an earlier job had put the files in place.")
    page_cache_percent: int | None = Field(
        description="Share of the weights in memory at the launch, as the kernel says of a sample of their pages."
    )
    kernel_cache: str | None = Field(description="empty when it compiled anew; null when it does not compile.")
    stage_ms: int | None = Field(description="Putting the files in place.")
    loading_ms: int | None = Field(description="Launch until its health route answered.")
    compile_ms: int | None = Field(description="Compiling, as its log tells it; part of the others.")
    warming_ms: int | None = Field(description="From then until ready.")
    ready_ms: int = Field(description="Launch to ready; 0 for an engine that was taken up again.")
    gates_ms: int | None = Field(description="Gates on this boot, added up; null when there were none.")
    compared: list[Compared] | None = Field(
        description="What the engine says of itself, held against the bundle; null for a runner that did not compare."
    )
    findings: list[Finding] = Field(description="What differs and may stand; what blocks fails a boot.")

    @property
    def agreement(self) -> str:
        """What the comparison came to, in a few words; empty when there was none."""
        return agreement(self.compared or (), len(self.findings))


_WORDS = (
    (Agreement.EQUAL, "equal"),
    (Agreement.DIFFERS, "differ"),
    (Agreement.NOT_REPORTED, "not reported"),
    (Agreement.NOT_DECLARED, "not declared"),
)


def agreement(compared: Sequence[Compared], findings: int) -> str:
    """Return what a comparison came to, such as "14 equal, 4 not reported, 1 warning"; empty when there was none."""
    counts = [(sum(one.outcome is outcome for one in compared), word) for outcome, word in _WORDS]
    if findings:
        counts.append((findings, "warning" if findings == 1 else "warnings"))
    return ", ".join(f"{count} {word}" for count, word in counts if count)
