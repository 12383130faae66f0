"""Tables. Only the noun's own module queries them; `entries` is written by `registry.evidence` alone."""

from collections.abc import Callable
from datetime import datetime
from typing import Any, get_args
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql.base import ischema_names
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import UserDefinedType

from schemas.alias import PatternMovers
from schemas.api import RoleName
from schemas.evidence import Kind
from schemas.release import Phase
from schemas.runner import JobKind, JobState

ROLES = get_args(RoleName)
DOCUMENT_KINDS = ("bundle", "policy", "suite", "reference")
IN_PROGRESS = (Phase.CANDIDATE, Phase.STAGED, Phase.BOOTED, Phase.GATED, Phase.APPROVED, Phase.CANARY)


def _one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(str(value)) for value in values)})"


class TransactionId(UserDefinedType[int]):
    """PostgreSQL's `xid8`, a transaction's number that never wraps around; an int in Python."""

    cache_ok = True
    render_bind_cast = True

    def get_col_spec(self, **_: Any) -> str:
        """Return the name of the type."""
        return "xid8"

    def bind_processor(self, dialect: Dialect) -> Callable[[int | None], str | None]:  # noqa: ARG002 - SQLAlchemy's
        """Send text: the database has no cast from an integer."""
        return lambda value: None if value is None else str(value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], int | None]:  # noqa: ARG002
        """Return an int."""
        return lambda value: None if value is None else int(value)


# For comparing the tables with a database.
ischema_names.setdefault("xid8", TransactionId)


class Base(DeclarativeBase):
    """Base of all tables, with one naming rule for constraints."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own class attribute
        datetime: DateTime(timezone=True),
        str: Text,
        dict[str, Any]: JSONB,
        list[Any]: JSONB,
    }


class ProjectRow(Base):
    """A project."""

    __tablename__ = "projects"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]
    max_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """Most bytes of blobs; null for what the settings say, 0 for no limit. The next two are alike."""
    max_uploads: Mapped[int | None]
    max_documents: Mapped[int | None]
    max_jobs: Mapped[int | None]
    """Most jobs that runners hold for it at once; null or 0 for no limit."""
    max_runner_seconds: Mapped[int | None] = mapped_column(BigInteger)
    """Most runner time of its gates and recordings in a day; alike."""


class ProjectUsageRow(Base):
    """A part of what a project holds, counted with each change. The sum of the parts is what counts.

    A row is locked by whoever counts in it, until that is committed; so there are several: see `registry.quotas`.
    """

    __tablename__ = "project_usage"
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    part: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    bytes: Mapped[int] = mapped_column(BigInteger)
    """Of one part, also negative: what is given back is counted wherever it happens to be."""
    documents: Mapped[int] = mapped_column(BigInteger)


class TokenRow(Base):
    """A token: the SHA-256 of its secret, never the secret."""

    __tablename__ = "tokens"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    role: Mapped[str]
    targets: Mapped[list[Any] | None]
    """Targets that it may act on, as name@environment; null for all."""
    secret_sha256: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    made_by: Mapped[UUID | None] = mapped_column(index=True)
    """Token that made it, of whichever project; null where none did, or that was not kept."""
    __table_args__ = (CheckConstraint(_one_of("role", ROLES), "role"), Index(None, "project_id", "id"))


class AnswerRow(Base):
    """What a request with an Idempotency-Key was answered, sealed with what only its caller knows."""

    __tablename__ = "answers"
    id: Mapped[str] = mapped_column(primary_key=True)
    """SHA-256 over the token and its key."""
    sealed: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)


class BlobRow(Base):
    """A blob in the store, shared by all projects."""

    __tablename__ = "blobs"
    digest: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime]
    damaged_at: Mapped[datetime | None]
    """When the service found other bytes there; none once the right ones came again."""


class BlobDoubtRow(Base):
    """A blob that a runner's copy differed from, until the service has read its own again."""

    __tablename__ = "blob_doubts"
    digest: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"))
    """Where that was."""
    seen_by: Mapped[str]
    doubted_at: Mapped[datetime]
    due_at: Mapped[datetime]
    """When it is to be read: put off by whoever reads it."""
    __table_args__ = (Index(None, "due_at"),)


class ProjectBlobRow(Base):
    """A project that has shown it holds the bytes."""

    __tablename__ = "project_blobs"
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    digest: Mapped[str] = mapped_column(ForeignKey("blobs.digest"), primary_key=True)
    created_at: Mapped[datetime]
    used_at: Mapped[datetime]
    """When it was sent, asked for before a registration, or let go by a deleted bundle: grace counts from here."""
    proof: Mapped[str | None]
    """Key and signature of the service: it has seen that the project holds the bytes. None from older versions."""
    __table_args__ = (Index(None, "used_at"), Index(None, "digest"))


class RecordRow(Base):
    """A blob that is the raw record of a gate, and whether its bytes were erased."""

    __tablename__ = "records"
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    digest: Mapped[str] = mapped_column(primary_key=True)
    recorded_at: Mapped[datetime]
    erased_at: Mapped[datetime | None]
    __table_args__ = (Index("ix_records_kept", "recorded_at", postgresql_where=text("erased_at IS NULL")),)


class UploadRow(Base):
    """An upload in pieces that is under way. How far it is, its file says."""

    __tablename__ = "uploads"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"))
    digest: Mapped[str]
    size: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime]
    created_by: Mapped[str]
    touched_at: Mapped[datetime] = mapped_column(index=True)
    """When bytes of it came last."""
    __table_args__ = (UniqueConstraint("project_id", "digest", "size"), Index(None, "project_id", "id"))


class DocumentRow(Base):
    """An immutable document by digest: its canonical bytes."""

    __tablename__ = "documents"
    digest: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    schema_id: Mapped[str]
    body: Mapped[bytes] = mapped_column(LargeBinary)
    serving_digest: Mapped[str | None]
    components: Mapped[dict[str, Any] | None]
    labels: Mapped[dict[str, Any] | None]
    __table_args__ = (CheckConstraint(_one_of("kind", DOCUMENT_KINDS), "kind"),)


class ProjectDocumentRow(Base):
    """Membership of a document in a project."""

    __tablename__ = "project_documents"
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    digest: Mapped[str] = mapped_column(ForeignKey("documents.digest"), primary_key=True)
    id: Mapped[UUID] = mapped_column(unique=True)
    """UUIDv7: the order of lists."""
    kind: Mapped[str]
    name: Mapped[str]
    created_at: Mapped[datetime]
    created_by: Mapped[str]
    deleted_at: Mapped[datetime | None]
    """When a person deleted it. The document itself stays: evidence names it."""
    quarantined_at: Mapped[datetime | None]
    """Since when a bundle is quarantined: a cached fold of its stream."""
    locks: Mapped[list[Any] | None]
    """How a bundle's sources were resolved, as whoever registered it said."""
    __table_args__ = (
        Index(None, "project_id", "kind", "id"),
        Index(None, "project_id", "kind", "name", "id"),
        Index(
            "ix_project_documents_quarantined",
            "project_id",
            "id",
            postgresql_where=text("quarantined_at IS NOT NULL"),
        ),
    )


class ProjectLabelRow(Base):
    """A label of a bundle in a project: what a search for it reads, newest first."""

    __tablename__ = "project_labels"
    project_id: Mapped[UUID] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]
    id: Mapped[UUID]
    """Of the bundle's membership: the order of lists."""
    __table_args__ = (
        ForeignKeyConstraint(["project_id", "digest"], ["project_documents.project_id", "project_documents.digest"]),
        Index(None, "project_id", "name", "value", "id"),
    )


class AliasRow(Base):
    """A movable name of a bundle: a cached fold of its stream. A deleted one stays, for its generation."""

    __tablename__ = "aliases"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    """UUIDv7: the order of lists."""
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    bundle: Mapped[str | None]
    is_protected: Mapped[bool]
    generation: Mapped[int] = mapped_column(BigInteger)
    changed_at: Mapped[datetime]
    changed_by: Mapped[str]
    __table_args__ = (
        ForeignKeyConstraint(
            ["project_id", "bundle"],
            ["project_documents.project_id", "project_documents.digest"],
            name="fk_aliases_bundle",
        ),
        UniqueConstraint("project_id", "name"),
        Index(None, "project_id", "id"),
        Index(None, "project_id", "bundle", "id"),
    )


class AliasPatternRow(Base):
    """A pattern that protects aliases by their names: a cached fold of the project's stream of patterns."""

    __tablename__ = "alias_patterns"
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    pattern: Mapped[str] = mapped_column(primary_key=True)
    movers: Mapped[PatternMovers] = mapped_column(Text)
    """Least role that moves such an alias."""
    generation: Mapped[int]
    """Position of its entry."""
    set_at: Mapped[datetime]
    set_by: Mapped[str]


class BundleBlobRow(Base):
    """A blob that a project's bundle is made of. As long as it is here, the database keeps the blob."""

    __tablename__ = "bundle_blobs"
    project_id: Mapped[UUID] = mapped_column(primary_key=True)
    bundle: Mapped[str] = mapped_column(primary_key=True)
    blob: Mapped[str] = mapped_column(primary_key=True)
    __table_args__ = (
        ForeignKeyConstraint(
            ["project_id", "bundle"],
            ["project_documents.project_id", "project_documents.digest"],
            name="fk_bundle_blobs_bundle",
        ),
        ForeignKeyConstraint(
            ["project_id", "blob"],
            ["project_blobs.project_id", "project_blobs.digest"],
            name="fk_bundle_blobs_blob",
        ),
        Index(None, "project_id", "blob"),
    )


class TargetRow(Base):
    """One served name in one environment."""

    __tablename__ = "targets"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    """name@environment."""
    runner_class: Mapped[str]
    gateway: Mapped[str]
    generation: Mapped[int] = mapped_column(BigInteger)
    applied: Mapped[list[Any]]
    """Split that the gateway acknowledged last, as [{"bundle", "weight_bp"}]."""
    created_at: Mapped[datetime]
    __table_args__ = (
        UniqueConstraint("project_id", "name"),
        # The gateway tells targets apart by name.
        UniqueConstraint("gateway", "name"),
        Index(None, "project_id", "id"),
    )


class TargetReferenceRow(Base):
    """The golden reference in force on a target; its history is in the target's stream."""

    __tablename__ = "target_references"
    target_id: Mapped[UUID] = mapped_column(ForeignKey("targets.id"), primary_key=True)
    suite: Mapped[str] = mapped_column(ForeignKey("documents.digest"), primary_key=True)
    reference: Mapped[str] = mapped_column(ForeignKey("documents.digest"))


class ReleaseRow(Base):
    """A release. Everything from `phase` to `weight_bp` is a cached fold of its log, written by evidence only."""

    __tablename__ = "releases"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"))
    target_id: Mapped[UUID] = mapped_column(ForeignKey("targets.id"))
    bundle: Mapped[str] = mapped_column(ForeignKey("documents.digest"))
    policy: Mapped[str] = mapped_column(ForeignKey("documents.digest"))
    references: Mapped[dict[str, Any]]
    predecessor_id: Mapped[UUID | None] = mapped_column(ForeignKey("releases.id"))
    created_at: Mapped[datetime]
    created_by: Mapped[str]
    phase: Mapped[str]
    phase_since: Mapped[datetime]
    is_paused: Mapped[bool]
    held: Mapped[list[Any]]
    reason: Mapped[str | None]
    step: Mapped[int | None]
    weight_bp: Mapped[int | None]
    step_since: Mapped[datetime | None]
    entries: Mapped[int]
    """How long its log is: one that was cut shows it."""
    due_at: Mapped[datetime | None]
    """When reconcile should look again; null when nothing can change by itself."""
    lease_token: Mapped[int] = mapped_column(BigInteger)
    lease_until: Mapped[datetime | None]
    progress: Mapped[str | None]
    """What the present canary step waits for, as its controller said at its last look; no fold of the log."""
    __table_args__ = (
        CheckConstraint(_one_of("phase", tuple(Phase)), "phase"),
        Index(
            "uq_releases_in_progress", "target_id", unique=True, postgresql_where=text(_one_of("phase", IN_PROGRESS))
        ),
        Index("uq_releases_promoted", "target_id", unique=True, postgresql_where=text("phase = 'promoted'")),
        Index("ix_releases_due", "due_at", postgresql_where=text("due_at IS NOT NULL")),
        Index("ix_releases_leased", "lease_until", postgresql_where=text("lease_until IS NOT NULL")),
        Index(None, "project_id", "id"),
        Index(None, "project_id", "phase", "id"),
        Index(None, "target_id", "id"),
        Index(None, "bundle", "id"),
    )


class RunnerRow(Base):
    """A machine that runs models."""

    __tablename__ = "runners"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str]
    runner_class: Mapped[str]
    fingerprint: Mapped[dict[str, Any]]
    engines: Mapped[list[Any]]
    boot_id: Mapped[str]
    slots: Mapped[int | None]
    """Jobs that it holds at once; null for one that did not say."""
    environments: Mapped[dict[str, Any] | None]
    launcher: Mapped[str | None]
    disk_free_bytes: Mapped[int | None] = mapped_column(BigInteger)
    device_ids: Mapped[list[Any] | None]
    """What its driver calls the accelerators of its fingerprint, in their order; null where it did not say."""
    speaks: Mapped[int | None] = mapped_column(BigInteger)
    """Version of claims that it understands; null for one from before there were versions."""
    drained_at: Mapped[datetime | None]
    """Since when it takes no job."""
    drained_by: Mapped[str | None]
    drain_reason: Mapped[str | None]
    empty_at: Mapped[datetime | None]
    """When what it still holds is ended; null for never."""
    undrained_at: Mapped[datetime | None]
    """When somebody last let it take jobs again; null while it drains."""
    undrained_by: Mapped[str | None]
    undrain_reason: Mapped[str | None]
    registered_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    __table_args__ = (UniqueConstraint("project_id", "name"), Index(None, "project_id", "id"))


class JobRow(Base):
    """Something a runner does under a lease: evaluate, serve or record."""

    __tablename__ = "jobs"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"))
    kind: Mapped[str]
    release_id: Mapped[UUID | None] = mapped_column(ForeignKey("releases.id"))
    target_id: Mapped[UUID | None] = mapped_column(ForeignKey("targets.id"))
    bundle: Mapped[str] = mapped_column(ForeignKey("documents.digest"))
    policy: Mapped[str | None] = mapped_column(ForeignKey("documents.digest"))
    suites: Mapped[list[Any]]
    references: Mapped[dict[str, Any]]
    gates: Mapped[list[Any]]
    """Gates to run, in order."""
    runner_class: Mapped[str]
    needs: Mapped[dict[str, Any] | None]
    """What a replica of the bundle takes; null where no engine is started."""
    queue: Mapped[str | None]
    """For whom it is done: queues of a class take turns."""
    devices: Mapped[list[Any] | None]
    """Accelerators of its runner that are reserved for it while its lease lasts."""
    claimed_at: Mapped[datetime | None]
    replaces: Mapped[UUID | None]
    """Job of the replica whose place it takes, since that one's runner drains."""
    preempted_for: Mapped[UUID | None]
    """Job for live traffic that it makes room for."""
    runner_id: Mapped[UUID | None] = mapped_column(ForeignKey("runners.id"))
    state: Mapped[str]
    is_wanted: Mapped[bool]
    attempt: Mapped[int]
    due_at: Mapped[datetime]
    fencing_token: Mapped[int] = mapped_column(BigInteger)
    lease_until: Mapped[datetime | None]
    progress: Mapped[str | None]
    problem: Mapped[str | None]
    avoids: Mapped[UUID | None]
    """Runner for whose own sake its last attempt failed: another one that could take it goes first."""
    reference: Mapped[str | None] = mapped_column(ForeignKey("documents.digest"))
    replica: Mapped[dict[str, Any] | None]
    """Latest ReplicaReport, with `since`."""
    created_at: Mapped[datetime]
    created_by: Mapped[str]
    reason: Mapped[str | None]
    finished_at: Mapped[datetime | None]
    spent_ms: Mapped[int | None] = mapped_column(BigInteger)
    """Time that runners held it, of all attempts that have ended."""
    __table_args__ = (
        CheckConstraint(_one_of("kind", tuple(JobKind)), "kind"),
        CheckConstraint(_one_of("state", tuple(JobState)), "state"),
        Index(
            "uq_jobs_serve",
            "target_id",
            "bundle",
            unique=True,
            postgresql_where=text("kind = 'serve' AND state IN ('pending', 'claimed') AND replaces IS NULL"),
        ),
        Index(
            "uq_jobs_replaces",
            "replaces",
            unique=True,
            postgresql_where=text("kind = 'serve' AND state IN ('pending', 'claimed')"),
        ),
        Index("ix_jobs_open", "runner_class", "due_at", postgresql_where=text("state IN ('pending', 'claimed')")),
        Index(None, "release_id", "id"),
        Index(None, "target_id", "id"),
        Index(None, "project_id", "id"),
        Index(None, "bundle", "id"),
        Index(None, "runner_id", "id"),
        Index("ix_jobs_turns", "project_id", "runner_class", "queue", "claimed_at"),
        Index("ix_jobs_measured", "project_id", "claimed_at", postgresql_where=text("kind <> 'serve'")),
    )


class SigningKeyRow(Base):
    """A public key that signed evidence, with the time it was valid for."""

    __tablename__ = "signing_keys"
    key_id: Mapped[str] = mapped_column(primary_key=True)
    algorithm: Mapped[str]
    public_key_pem: Mapped[str]
    valid_from: Mapped[datetime]
    valid_until: Mapped[datetime | None]


class EntryRow(Base):
    """One evidence entry. A trigger refuses UPDATE, DELETE and TRUNCATE."""

    __tablename__ = "entries"
    sequence: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    id: Mapped[UUID] = mapped_column(unique=True)
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"))
    stream: Mapped[str]
    position: Mapped[int] = mapped_column(Integer)
    act: Mapped[str]
    kind: Mapped[str]
    actor: Mapped[str]
    recorded_at: Mapped[datetime]
    envelope: Mapped[bytes] = mapped_column(LargeBinary)
    """Canonical JSON of the DSSE envelope."""
    previous: Mapped[str]
    entry_digest: Mapped[str] = mapped_column(unique=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("signing_keys.key_id"))
    transaction_id: Mapped[int] = mapped_column(TransactionId, server_default=text("pg_current_xact_id()"))
    """Transaction that wrote it, or a later one that had written to its stream before: see `registry.cursors`."""
    __table_args__ = (
        CheckConstraint(_one_of("kind", tuple(Kind)), "kind"),
        UniqueConstraint("stream", "position"),
        UniqueConstraint("stream", "act"),
        Index(None, "project_id", "transaction_id", "sequence"),
        Index(None, "project_id", "kind", "transaction_id", "sequence"),
        # Checkpoints count by sequence.
        Index(None, "project_id", "sequence"),
    )


class CheckpointRow(Base):
    """A signed statement over a project's entries. A trigger refuses UPDATE, DELETE and TRUNCATE."""

    __tablename__ = "checkpoints"
    project_id: Mapped[UUID] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    sequence: Mapped[int] = mapped_column(BigInteger)
    """Highest sequence of an entry that it covers."""
    entries: Mapped[int] = mapped_column(BigInteger)
    streams: Mapped[int] = mapped_column(BigInteger)
    made_at: Mapped[datetime]
    made_by: Mapped[str]
    envelope: Mapped[bytes] = mapped_column(LargeBinary)
    """Canonical JSON of the DSSE envelope."""
    digest: Mapped[str] = mapped_column(unique=True)
    previous: Mapped[str]
    key_id: Mapped[str] = mapped_column(ForeignKey("signing_keys.key_id"))


APPEND_ONLY = ("entries", "documents", "checkpoints", "signing_keys")
"""Tables that the application reads and adds to, and never changes."""
