"""What evidence says of a project itself, and of who holds tokens of it; see `schemas.evidence`."""

from typing import Annotated, Literal
from uuid import UUID

from pydantic import Field

from schemas.common import Closed, Digest, Instant, Integer, Positive, ShortText, Text


class ProjectSet(Closed):
    """A project is as this says from now on. Limits are its own: absent for what the settings say, 0 for none."""

    name: ShortText = Field(description="Its name.")
    created_at: Instant = Field(description="When it was made.")
    max_bytes: Integer | None = Field(None, description="Most bytes of blobs.")
    max_uploads: Integer | None = Field(None, description="Most uploads under way at once.")
    max_documents: Integer | None = Field(None, description="Most documents.")
    max_jobs: Integer | None = Field(None, description="Most jobs that runners hold at once.")
    max_runner_seconds: Integer | None = Field(None, description="Most runner time within 24 hours, in seconds.")
    was_found: Literal[True] | None = Field(
        None, description="It had no entry of this kind: the service found it so, and holds it to that from now on."
    )
    keys: Annotated[list[ShortText], Field(max_length=1000)] | None = Field(
        None,
        description="Keys that had signed before, when this was taken over, or that sign still although another has "
        "taken their place: who signs this vouches for them.",
    )
    adopted: Positive | None = Field(
        None,
        description="Up to which version all that older ones kept without an entry has one: 2 with runs; absent for 1.",
    )


class TokenCreated(Closed):
    """A token was made. The secret is nowhere in evidence."""

    token: UUID = Field(description="Token's identity.")
    role: ShortText = Field(description="Role it carries.")
    name: ShortText = Field(description="Whose it is.")
    expires_at: Instant | None = Field(None, description="When it ends.")
    targets: Annotated[list[ShortText], Field(max_length=64)] | None = Field(
        None, description="Targets that it may act on; absent for all."
    )
    created_at: Instant | None = Field(None, description="When it was made; absent in older entries.")
    bound: Digest | None = Field(
        None,
        description="Digest over its identity and what the service stores of its secret; absent in older entries.",
    )
    made_by: UUID | None = Field(
        None, description="Identity of the token that made it; absent where none did, and in older entries."
    )


class TokenFound(Closed):
    """A token whose entry does not say which secret it has is held to the one that the service found it with."""

    token: UUID = Field(description="Token's identity.")
    created_at: Instant = Field(description="When it was made.")
    revoked_at: Instant | None = Field(None, description="When it was revoked, if it was.")
    bound: Digest = Field(description="Digest over its identity and what the service stores of its secret.")


class TokenRevoked(Closed):
    """A token counts no more."""

    token: UUID = Field(description="Token's identity.")
    name: ShortText = Field(description="Whose it was.")
    reason: Text = Field(description="Why.")
    revoked_at: Instant | None = Field(None, description="Since when; absent in older entries.")
