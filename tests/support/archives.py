"""Archives of evidence, made without a service: a project's keys, entries, checkpoints and documents in memory."""

import io
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from cryptography.hazmat.primitives.asymmetric import ec

from gates import archive
from gates.evidence import ALGORITHM, Record, heads_of, root_of
from registry.evidence import state
from registry.keys import Signer
from schemas.checkpoint import (
    ARCHIVE_FORMAT,
    CHECKPOINT,
    ArchivedCheckpoint,
    ArchivedDocument,
    ArchivedEntry,
    ArchivedKey,
    ArchiveHead,
    KeyValidity,
    Sealed,
)
from schemas.common import Closed, canonical_json, sha256_digest, strict_json
from schemas.evidence import GENESIS, STATEMENT_TYPE, Envelope, Kind, Note, Registered

START = datetime(2026, 1, 1, tzinfo=UTC)
PROJECT = UUID(int=7)


class Story:
    """A project whose log is written as a service writes it. Parts may be changed before it is put into an archive."""

    def __init__(self) -> None:
        """Begin with one key."""
        self.now = START
        self.signer = Signer(ec.generate_private_key(ec.SECP256R1()))
        self.keys: list[ArchivedKey] = []
        self.enroll(self.signer)
        self.entries: list[ArchivedEntry] = []
        self.envelopes: list[bytes] = []
        self.documents: list[ArchivedDocument] = []
        self._sealed = 0

    def enroll(self, signer: Signer) -> None:
        """Let a key sign from now on."""
        self.keys.append(
            ArchivedKey(
                key_id=signer.key_id,
                algorithm=ALGORITHM,
                public_key_pem=signer.public_key_pem,
                valid_from=self.now,
                valid_until=None,
            )
        )

    def end(self, key_id: str, at: datetime) -> None:
        """Let a key sign until then."""
        self.keys = [key.model_copy(update={"valid_until": at}) if key.key_id == key_id else key for key in self.keys]

    def add(self, stream: str, act: str, kind: Kind = Kind.PAUSED, body: Closed | None = None) -> None:
        """Append an entry."""
        self.now += timedelta(seconds=1)
        body = body or Note(reason=f"because {act}")
        subjects = {"bundle": sha256_digest(b"bundle")}
        signed = state(self.signer, stream, act, "maria", kind, body, subjects=subjects, now=self.now)
        log = [entry for entry in self.entries if entry.stream == stream]
        record = Record(
            sequence=len(self.entries) + 1,
            id=UUID(int=len(self.entries) + 1),
            project=PROJECT,
            stream=stream,
            position=len(log) + 1,
            act=act,
            kind=str(kind),
            actor="maria",
            recorded_at=self.now,
            envelope=signed.envelope,
            previous=log[-1].entry_digest if log else GENESIS,
            entry_digest="",
            key_id=signed.key_id,
        )
        self.entries.append(
            ArchivedEntry(
                sequence=record.sequence,
                id=record.id,
                stream=stream,
                position=record.position,
                act=act,
                kind=kind,
                actor="maria",
                recorded_at=record.recorded_at,
                previous=record.previous,
                entry_digest=record.link(),
                key_id=record.key_id,
                envelope=Envelope.model_validate(strict_json(signed.envelope)),
            )
        )

    def register(self, document: dict[str, Any]) -> None:
        """Register a policy document, with its entry."""
        digest = sha256_digest(canonical_json(document))
        self.documents.append(ArchivedDocument(digest=digest, document=document))
        body = Registered(digest=digest, name="quick")
        self.add(f"documents/{PROJECT}/{digest}", "registered", Kind.POLICY_REGISTERED, body)

    def seal(self, **changes: Any) -> None:
        """Make a checkpoint over what is not under one."""
        self.now += timedelta(seconds=1)
        new = self.entries[self._sealed :]
        sealed = Sealed(
            project=PROJECT,
            number=len(self.envelopes) + 1,
            previous=sha256_digest(self.envelopes[-1]) if self.envelopes else GENESIS,
            made_at=self.now,
            made_by="controller",
            sequence=new[-1].sequence,
            entries=len(self.entries),
            streams=len({entry.stream for entry in self.entries}),
            heads=heads_of((entry.stream, entry.position, entry.entry_digest) for entry in new),
            keys=[
                KeyValidity(key_id=key.key_id, valid_from=key.valid_from, valid_until=key.valid_until)
                for key in sorted(self.keys, key=lambda key: key.key_id)
            ],
        ).model_copy(update=changes)
        root = root_of((entry.sequence, entry.entry_digest) for entry in new)
        statement = {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": "evidence", "digest": {"sha256": root.removeprefix("sha256:")}}],
            "predicateType": CHECKPOINT,
            "predicate": sealed.model_dump(mode="json", exclude_none=True),
        }
        envelope = self.signer.sign(canonical_json(statement)).model_dump(mode="json", by_alias=True)
        self.envelopes.append(canonical_json(envelope))
        self._sealed = len(self.entries)

    def archive(self, change: Callable[[list[bytes]], Sequence[bytes]] | None = None) -> bytes:
        """Return an archive of it; `change` may alter the lines, and the last line is made to fit."""
        written = io.BytesIO()
        writer = archive.Writer(written)
        writer.write(ArchiveHead(format=ARCHIVE_FORMAT, project=PROJECT, name="default"))
        for key in self.keys:
            writer.write(key)
        for envelope in self.envelopes:
            writer.write(ArchivedCheckpoint(envelope=Envelope.model_validate(strict_json(envelope))))
        for line in (*self.entries, *self.documents):
            writer.write(line)
        if change is None:
            writer.end()
            return written.getvalue()
        return ended(change(written.getvalue().splitlines(keepends=True)))


def ended(lines: Sequence[bytes]) -> bytes:
    """Return lines with the last line that fits them, as whoever alters an archive would write it."""
    above = b"".join(lines)
    end = {"end": {"lines": len(lines), "sha256": sha256_digest(above)}}
    return above + canonical_json(end) + b"\n"


def small() -> Story:
    """Return a story of two streams and a document, under two checkpoints."""
    story = Story()
    story.register({"schema": "sluicegate.dev/policy/v1", "name": "quick"})
    story.add("release/a", "1")
    story.seal()
    story.add("release/a", "2")
    story.add("release/b", "1")
    story.seal()
    return story


def tiny() -> Story:
    """Return a story of one entry, with its document, under one checkpoint."""
    story = Story()
    story.register({"name": "quick"})
    story.seal()
    return story
