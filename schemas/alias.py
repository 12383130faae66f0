"""Aliases: movable names of bundles in a project. What is bound to a bundle names its digest, never an alias."""

from typing import Annotated, Literal

from pydantic import Field

from schemas.common import Closed, Digest, Instant, Text, Wire

Movers = Literal["ci", "engineer", "manager", "admin"]
"""Least role that may move an alias; `ci` is everybody who proposes."""
PatternMovers = Literal["engineer", "manager", "admin"]
"""Least role that moves the aliases that a pattern fits."""
PATTERN_FORM = r"^[a-z0-9.-]*\*[a-z0-9.*-]*$"
Pattern = Annotated[str, Field(pattern=PATTERN_FORM, max_length=63)]
"""Letters of a name with at least one `*`, which stands for any letters, also none."""


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


class AliasPatternSet(Closed):
    """Protect every alias whose name fits, made or not: from now on the role that is named, or more, moves it."""

    pattern: Pattern = Field(description="Names that it fits: `*` stands for any letters, such as `prod-*`.")
    movers: PatternMovers = Field(description="Least role that moves such an alias.")
    expected: PatternMovers | None = Field(
        None, description="The role that it names now, as the caller saw it; absent to make it. If-Match does as well."
    )
    reason: Text = Field(description="Why; kept in evidence.")


class AliasPatternRemove(Closed):
    """Let a pattern protect nothing any more."""

    pattern: Pattern = Field(description="The pattern, as it was set.")
    reason: Text = Field(description="Why; kept in evidence.")


class AliasPattern(Wire):
    """A pattern that protects aliases by their names."""

    pattern: str = Field(description="Names that it fits: `*` stands for any letters, also none.")
    movers: PatternMovers = Field(description="Least role that moves such an alias.")
    generation: int = Field(description="Another one with each act on it; for If-Match.")
    set_at: Instant = Field(description="When that was said.")
    set_by: str = Field(description="By whom.")


class AliasPatterns(Wire):
    """All patterns of a project, sorted."""

    items: list[AliasPattern] = Field(description="The patterns.")


class Alias(Wire):
    """A movable name of a bundle."""

    name: str = Field(description="Its name; `@name` on the command line.")
    bundle: str | None = Field(description="What it names; null once it is deleted.")
    bundle_name: str | None = Field(description="That bundle's family name.")
    is_protected: bool = Field(description="Whether it is protected itself, so that only managers move it.")
    movers: Movers = Field(description="Least role that moves it, by that and by the patterns that its name fits.")
    patterns: list[str] = Field(description="The patterns that its name fits, sorted.")
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
