"""The lock of a source: what was asked for, what it resolved to, and when. Part of a bundle's record, not of it.

Two people who fetch the same commit by different branches at different times make the same bundle; the record of
each registration says how it came about.
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from schemas.bundle import Bundle
from schemas.common import Closed, Instant, ShortText

MAX_LOCKS = 64
MAX_ASKED = 1024
BASE = "base"
"""The part that every bundle has."""
PART_PATTERN = r"^(base|tokenizer|template|code|draft|adapter:[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?)$"

Part = Annotated[str, StringConstraints(pattern=PART_PATTERN)]
"""What a source brings into a bundle: base, tokenizer, template, code, draft, or adapter:NAME."""


class Lock(Closed):
    """One source of a bundle, as it was resolved."""

    part: Part = Field(description="What it brings: base, tokenizer, template, code, draft or adapter:NAME.")
    kind: Literal["directory", "huggingface", "s3", "https"] = Field(description="Kind of source.")
    asked: Annotated[str, StringConstraints(min_length=1, max_length=MAX_ASKED)] = Field(
        description="What was asked for, such as hf:owner/name@main; of a directory its name."
    )
    location: ShortText | None = Field(
        None, description="Repository, bucket and prefix, or URL; absent for a directory."
    )
    revision: ShortText = Field(description="What it resolved to: commit, version id, or digest.")
    resolved_at: Instant = Field(description="When, by the clock of the machine that resolved it.")


Locks = Annotated[list[Lock], Field(min_length=1, max_length=MAX_LOCKS)]


class BundleRegistration(Closed):
    """A bundle, with how its sources were resolved."""

    bundle: Bundle = Field(description="The bundle. Its digest is the same without the locks.")
    locks: Locks = Field(description="Its sources as they were resolved, the base first.")
