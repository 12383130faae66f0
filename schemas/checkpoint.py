"""Checkpoints and archives: what makes a log that was cut or replaced visible, here and without the service.

A checkpoint is a signed in-toto statement over every entry that a project recorded since the checkpoint before:
`heads` has the length and last entry digest of each stream that grew, and `root` is the SHA-256 of the lines
`SEQUENCE ENTRY_DIGEST` of those entries, in the order of their sequence. Its digest is the SHA-256 of its envelope's
canonical JSON, and it names the checkpoint before it. So the last one vouches for every stream of the project.

An archive is a file of lines of canonical JSON, each an object of one key: `archive`, then `key`, `checkpoint`,
`entry`, `document`, at last `end` with the SHA-256 of everything above it.
"""

from typing import Annotated, Any, Final, Literal
from uuid import UUID

from pydantic import Field

from schemas.common import Closed, Digest, Instant, Positive, ShortText, Wire
from schemas.evidence import PREDICATE_BASE, Envelope, Kind

CHECKPOINT: Final = f"{PREDICATE_BASE}checkpoint/v1"
"""Predicate type of a checkpoint."""
ARCHIVE_FORMAT: Final = "sluicegate.dev/evidence-archive/v1"
MAX_SEALED: Final = 1000
"""Most entries that one checkpoint adds; more take several checkpoints."""


class Head(Closed):
    """How far a stream had grown."""

    stream: ShortText = Field(description="Stream.")
    position: Positive = Field(description="Its length.")
    digest: Digest = Field(description="Digest of its last entry.")


class KeyValidity(Closed):
    """A signing key, as it was known then."""

    key_id: ShortText = Field(description="SHA-256 of the public key's DER, in hexadecimal.")
    valid_from: Instant = Field(description="Signs from.")
    valid_until: Instant | None = Field(None, description="Signs until; absent while it signs.")


class Sealed(Closed):
    """What a checkpoint claims."""

    project: UUID = Field(description="Project.")
    number: Positive = Field(description="Place among the project's checkpoints, from 1.")
    previous: Digest = Field(description="Digest of the checkpoint before; 64 zeros for the first.")
    made_at: Instant = Field(description="When it was made.")
    made_by: ShortText = Field(description="By whom.")
    sequence: Positive = Field(description="Highest sequence that it covers.")
    entries: Positive = Field(description="Entries of the project up to there.")
    streams: Positive = Field(description="Streams of the project up to there.")
    heads: Annotated[list[Head], Field(min_length=1, max_length=MAX_SEALED)] = Field(
        description="Streams that grew since the checkpoint before, sorted by name."
    )
    keys: Annotated[list[KeyValidity], Field(min_length=1)] = Field(description="Every signing key, sorted by id.")


class Checkpoint(Wire):
    """A checkpoint as the service gives it out."""

    project: UUID = Field(description="Project.")
    number: int = Field(description="Place among the project's checkpoints, from 1.")
    digest: str = Field(description="Digest of its envelope: keep it elsewhere, and no entry below it can be lost.")
    previous: str = Field(description="Digest of the checkpoint before.")
    made_at: Instant = Field(description="When it was made.")
    made_by: str = Field(description="By whom.")
    sequence: int = Field(description="Highest sequence that it covers.")
    entries: int = Field(description="Entries of the project up to there.")
    streams: int = Field(description="Streams of the project up to there.")
    key_id: str = Field(description="Key that signed.")
    envelope: Envelope | None = Field(description="DSSE envelope; left out of lists unless asked for.")


class ArchiveHead(Closed):
    """First line of an archive."""

    format: Literal["sluicegate.dev/evidence-archive/v1"] = Field(description="Format.")
    project: UUID = Field(description="Project.")
    name: ShortText = Field(description="Its name.")


class ArchivedKey(Closed):
    """A public key."""

    key_id: ShortText = Field(description="SHA-256 of the public key's DER, in hexadecimal.")
    algorithm: ShortText = Field(description="Signature algorithm.")
    public_key_pem: Annotated[str, Field(max_length=4096)] = Field(description="Public key as PEM.")
    valid_from: Instant = Field(description="Signs from.")
    valid_until: Instant | None = Field(None, description="Signs until; absent while it signs.")


class ArchivedCheckpoint(Closed):
    """A checkpoint: everything about it is in its envelope."""

    envelope: Envelope = Field(description="DSSE envelope.")


class ArchivedEntry(Closed):
    """An entry."""

    sequence: Positive = Field(description="Order over all streams.")
    id: UUID = Field(description="Identity.")
    stream: ShortText = Field(description="Stream.")
    position: Positive = Field(description="Place in the stream, from 1.")
    act: ShortText = Field(description="Name of the act; unique in the stream.")
    kind: Kind = Field(description="What it records.")
    actor: ShortText = Field(description="Who did it.")
    recorded_at: Instant = Field(description="When it was recorded.")
    previous: Digest = Field(description="Entry digest before it in the stream.")
    entry_digest: Digest = Field(description="Its own digest.")
    key_id: ShortText = Field(description="Key that signed.")
    envelope: Envelope = Field(description="DSSE envelope.")


class ArchivedDocument(Closed):
    """A document that an entry names."""

    digest: Digest = Field(description="Its digest.")
    document: dict[str, Any] = Field(description="The document.")


class ArchiveEnd(Closed):
    """Last line of an archive."""

    lines: Positive = Field(description="Lines above.")
    sha256: Digest = Field(description="SHA-256 of the bytes above.")


class Archived(Wire):
    """What an export wrote."""

    entries: int = Field(description="Entries.")
    checkpoints: int = Field(description="Checkpoints.")
    documents: int = Field(description="Documents.")
    keys: int = Field(description="Public keys.")
    checkpoint: str = Field(description="Digest of the last checkpoint.")
    size: int = Field(description="Size in bytes.")
