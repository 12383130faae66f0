"""What evidence says of work that somebody asked for and that belongs to no release; see `schemas.evidence`."""

from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field

from schemas.common import Closed, Digest, Instant, ShortText, Text


class RunAsked(Closed):
    """Somebody asked for a run: gates on a bundle, or the recording of a reference. It runs this and nothing else."""

    run: UUID = Field(description="Its identity.")
    kind: Literal["evaluate", "record"] = Field(description="Gates, or a recording.")
    created_by: ShortText = Field(description="Who asked.")
    created_at: Instant = Field(description="When.")
    bundle: Digest = Field(description="Bundle.")
    policy: Digest | None = Field(None, description="Policy whose rules apply; absent for a recording.")
    gates: Annotated[list[ShortText], Field(max_length=32)] = Field(description="Gates, in their order.")
    suites: list[Digest] = Field(description="Suites that they need.")
    references: dict[Digest, Digest] = Field(description="Golden suite → reference that it is compared with.")
    runner_class: ShortText = Field(description="Class of runners.")
    target: ShortText | None = Field(None, description="Target that it is for, as name@environment.")
    reason: Text | None = Field(None, description="Why, where that was said.")
    was_found: Literal[True] | None = Field(
        None, description="It had no entry of this kind: the service found it so, and holds it to that from now on."
    )


class RunCancelled(Closed):
    """Somebody cancelled a run that belongs to no release: nothing that it measures counts from here on."""

    run: UUID = Field(description="Its identity.")
    reason: Text = Field(description="Why.")
