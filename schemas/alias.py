"""Aliases: movable names of bundles in a project. What is bound to a bundle names its digest, never an alias."""

from pydantic import Field

from schemas.common import Closed, Digest, Instant, Text, Wire


class AliasSet(Closed):
    """Make an alias, or move it from where it was seen to be."""

    bundle: Digest = Field(description="What it shall name.")
    expected: Digest | None = Field(
        None, description="What it names now, as the caller saw it; absent to make it. If-Match does as well."
    )
    reason: Text = Field(description="Why; kept in evidence.")


class AliasDelete(Closed):
    """Take an alias away. Its history stays."""

    reason: Text = Field(description="Why; kept in evidence.")


class AliasProtect(Closed):
    """Let only managers move an alias, or everybody who proposes again."""

    is_protected: bool = Field(description="Whether only managers move it from now on.", strict=True)
    reason: Text = Field(description="Why; kept in evidence.")


class Alias(Wire):
    """A movable name of a bundle."""

    name: str = Field(description="Its name; `@name` on the command line.")
    bundle: str | None = Field(description="What it names; null once it is deleted.")
    bundle_name: str | None = Field(description="That bundle's family name.")
    is_protected: bool = Field(description="Whether only managers move it.")
    is_quarantined: bool = Field(description="Whether the bundle is quarantined now.")
    generation: int = Field(description="Grows with each act on it; for If-Match.")
    changed_at: Instant = Field(description="When it was changed last.")
    changed_by: str = Field(description="By whom.")


class AliasChange(Wire):
    """One act on an alias."""

    at: Instant = Field(description="When.")
    kind: str = Field(description="alias_set, alias_deleted or alias_protected.")
    bundle: str | None = Field(description="What it named from then on; null for nothing.")
    is_protected: bool = Field(description="Whether only managers moved it from then on.")
    generation: int = Field(description="Its generation from then on.")
    by: str = Field(description="Who did it.")
    reason: str = Field(description="Why.")
    entry: str = Field(description="Digest of its entry.")


class AliasAt(Wire):
    """What an alias named at an instant, by its evidence."""

    name: str = Field(description="The alias.")
    at: Instant = Field(description="The instant asked for.")
    bundle: str | None = Field(description="What it named; null for nothing.")
    change: AliasChange | None = Field(description="The latest act on it by then; null before the first.")
