"""Bodies of requests, and lists, that are not documents."""

from typing import Annotated, Generic, Literal, TypeVar
from uuid import UUID

from pydantic import Field

from schemas.common import Closed, Digest, Instant, Integer, Name, ShortText, Text, Wire
from schemas.evidence import Entry, QuarantineCause
from schemas.failures import Cause
from schemas.release import Replica
from schemas.runner import Runner

TARGET_PATTERN = r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?@[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"
TargetName = Annotated[str, Field(pattern=TARGET_PATTERN)]
"""name@environment."""

ItemT = TypeVar("ItemT")


class Page(Wire, Generic[ItemT]):
    """One page of a list."""

    items: list[ItemT] = Field(description="Items, newest first unless said otherwise.")
    next: str | None = Field(description="Cursor of the next page; null at the end.")


RoleName = Literal["viewer", "ci", "engineer", "manager", "auditor", "admin", "runner"]
"""Viewer: reads. Ci: proposes. Engineer: proposes and stops. Manager: makes rules and lets through. Auditor: reads,
also who holds tokens. Admin: everything but running jobs. Runner: that alone."""


class ProjectCreate(Closed):
    """Make a project."""

    name: Name = Field(description="Project name.")


class Project(Wire):
    """A project owns targets, policies, suites, tokens and membership of bundles."""

    id: UUID = Field(description="Identity.")
    name: str = Field(description="Name.")
    created_at: Instant = Field(description="When it was created.")


class Limits(Wire):
    """What a project may hold: 0 is any number."""

    bytes: int | None = Field(description="Bytes of blobs, each counted once.")
    uploads: int | None = Field(description="Uploads in pieces under way at once.")
    documents: int | None = Field(description="Documents.")
    jobs: int | None = Field(description="Jobs that runners hold at once.")
    runner_seconds: int | None = Field(description="Runner time of gates and recordings within 24 hours, in seconds.")


class ProjectUsage(Wire):
    """What a project holds, and how much it may."""

    name: str = Field(description="Project.")
    bytes: int = Field(description="Bytes of the blobs that it holds.")
    bytes_coming: int = Field(description="Bytes of the uploads that are under way; they count against the limit.")
    uploads: int = Field(description="Uploads in pieces that are under way.")
    documents: int = Field(description="Documents registered: bundles, policies, suites and references.")
    jobs: int = Field(description="Jobs that runners hold for it, live replicas among them.")
    runner_seconds: int = Field(
        description="Seconds that runners held gates and recordings which they took within the last 24 hours."
    )
    limits: Limits = Field(description="What holds now.")
    own_limits: Limits = Field(description="What an administrator set for it; null for what the settings say.")
    generation: int = Field(description="Grows with each change of them; for If-Match.")


class LimitsSet(Closed):
    """Set a project's limits: null for what the settings say, 0 for any number; what is not named stays as it is.

    So a client that was made before there was a limit does not clear it.
    """

    bytes: Integer | None = Field(None, description="Bytes of blobs.")
    uploads: Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)] | None = Field(
        None, description="Uploads in pieces under way at once."
    )
    documents: Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)] | None = Field(None, description="Documents.")
    jobs: Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)] | None = Field(
        None, description="Jobs that runners hold at once; no setting limits them, and what is live is never held back."
    )
    runner_seconds: Integer | None = Field(
        None, description="Runner time of gates and recordings within 24 hours, in seconds; no setting limits it."
    )


class TokenCreate(Closed):
    """Make a token."""

    name: Name = Field(description="Whose it is: shown as actor in evidence.")
    role: RoleName = Field(description="What it may do.")
    expires_at: Instant | None = Field(None, description="When it ends.")
    project: Name | None = Field(None, description="Project it is for; the caller's own when absent.")
    targets: Annotated[list[TargetName], Field(min_length=1, max_length=64)] | None = Field(
        None, description="Targets that it may act on; all when absent. For engineers, managers and ci."
    )


class TokenCreated(Wire):
    """A new token; the secret is shown once."""

    id: UUID = Field(description="Identity.")
    name: str = Field(description="Whose it is.")
    role: RoleName = Field(description="What it may do.")
    secret: str = Field(description="The bearer token. Not stored; not shown again.")
    expires_at: Instant | None = Field(description="When it ends.")
    targets: list[str] | None = Field(description="Targets that it may act on; null for all.")


class Token(Wire):
    """A token, without its secret."""

    id: UUID = Field(description="Identity.")
    project: str = Field(description="Project it belongs to.")
    name: str = Field(description="Whose it is.")
    role: RoleName = Field(description="What it may do.")
    targets: list[str] | None = Field(description="Targets that it may act on; null for all.")
    created_at: Instant = Field(description="When it was made.")
    expires_at: Instant | None = Field(description="When it ends.")
    revoked_at: Instant | None = Field(description="When it was revoked.")
    made_by: UUID | None = Field(
        description="The token that made it; null for one of the operator, or made when that was not kept."
    )
    is_valid: bool = Field(description="Whether it counts now.")


class EndedToken(Token):
    """A token that was revoked, and what it leaves."""

    made: list[Token] = Field(description="Tokens that it made and that count on, as far as the caller administers.")


class Identity(Wire):
    """Who a token is."""

    project: str = Field(description="Project.")
    name: str = Field(description="Actor name.")
    role: RoleName = Field(description="Role.")
    targets: list[str] | None = Field(description="Targets that it may act on; null for all.")
    expires_at: Instant | None = Field(description="When the token ends; null for one that does not.")


class Version(Wire):
    """What answers."""

    name: str = Field(description="The software.")
    version: str = Field(description="Its version.")
    interface: str = Field(description="Version of the HTTP interface.")


class Health(Wire):
    """How the process is."""

    status: Literal["alive"] = Field(description="It answers.")


class Readiness(Wire):
    """Whether the service can work."""

    status: Literal["ready"] = Field(description="Its database answers and is migrated.")
    blobs: Literal["reachable", "unreachable"] = Field(
        description="Whether the blob store answers. Without it traffic can still be taken back."
    )
    broker: Literal["reachable", "unreachable"] = Field(
        description="Whether the broker lets the service in, as of the last ten seconds. Without it no release "
        "goes on, and a canary's traffic goes back."
    )


class PublicKey(Wire):
    """A public key that signs or signed evidence."""

    key_id: str = Field(description="SHA-256 of the key's DER, in hexadecimal.")
    algorithm: str = Field(description="Signature algorithm.")
    public_key_pem: str = Field(description="The key, as PEM.")
    valid_from: Instant = Field(description="When it was enrolled.")
    valid_until: Instant | None = Field(description="When it was retired; null while it signs.")


class Ground(Wire):
    """One thing that a bundle is quarantined for."""

    cause: QuarantineCause = Field(description="person, integrity_gate or blob_damaged.")
    reason: str = Field(description="Why.")
    by: str = Field(description="Who did it: a person, or the part of the service that found out.")
    at: Instant = Field(description="When.")
    entry: str = Field(description="Digest of its entry.")


class Quarantine(Wire):
    """A bundle with which nothing goes on until a person lifts it."""

    since: Instant = Field(description="Since when.")
    grounds: list[Ground] = Field(description="What it is quarantined for, oldest first.")
    version: str = Field(description="Names the grounds as they are; for If-Match when it is lifted.")


class QuarantineState(Wire):
    """Whether a bundle is quarantined."""

    digest: str = Field(description="The bundle.")
    name: str = Field(description="Family name.")
    quarantine: Quarantine | None = Field(description="Null when it is not.")


class LockedSource(Wire):
    """A source of a bundle, as it was resolved by whoever registered it."""

    part: str = Field(description="What it brings: base, tokenizer, template, code, draft or adapter:NAME.")
    kind: str = Field(description="Kind of source.")
    asked: str = Field(description="What was asked for.")
    location: str | None = Field(description="Repository, bucket and prefix, or URL; null for a directory.")
    revision: str = Field(description="What it resolved to: commit, version id, or digest.")
    resolved_at: Instant = Field(description="When, by the clock of the machine that resolved it.")


class Registered(Wire):
    """A stored document."""

    digest: str = Field(description="Its name.")
    name: str = Field(description="Family name.")
    schema_id: str = Field(description="Schema of the document.")
    created_at: Instant = Field(description="When it was registered here.")
    created_by: str = Field(description="By whom.")
    document: dict[str, object] | None = Field(description="The document itself; left out of lists.")
    serving_digest: str | None = Field(description="For bundles.")
    components: dict[str, str] | None = Field(description="For bundles: component digests.")
    labels: dict[str, str] | None = Field(description="For bundles that have any: what they are found by.")
    quarantine: Quarantine | None = Field(description="For bundles that are quarantined: why.")
    locks: list[LockedSource] | None = Field(
        description="For bundles that came with them: how their sources were resolved; left out of lists."
    )
    aliases: list[str] | None = Field(
        description="For a bundle that is asked for by itself: the aliases that name it now, sorted."
    )


class MissingBlobs(Closed):
    """Which of these blobs does the project lack?"""

    digests: Annotated[list[Digest], Field(min_length=1, max_length=10_000)] = Field(description="Blobs asked about.")


class Missing(Wire):
    """Blobs that have to be uploaded."""

    missing: list[str] = Field(description="In the order asked.")


class StoredBlob(Wire):
    """A blob that was received and verified."""

    digest: str = Field(description="Its SHA-256.")
    size: int = Field(description="Its size in bytes.")


class BlobCheck(Wire):
    """What the service found when it read a blob of its store again."""

    digest: str = Field(description="SHA-256 that it is named after.")
    is_intact: bool = Field(description="Whether its bytes have that.")
    found: str | None = Field(description="What they have instead; null when they are intact.")
    quarantined: list[str] = Field(description="The project's bundles that are made of it, which are quarantined now.")


class UploadCreate(Closed):
    """Begin an upload in pieces, or take up the one that is under way."""

    digest: Digest = Field(description="SHA-256 of the whole blob.")
    size: Integer = Field(description="Its size in bytes.")


class Upload(Wire):
    """An upload in pieces: what has arrived, and how it goes on."""

    id: UUID | None = Field(description="Identity; null when the project has the blob and nothing needs to be sent.")
    digest: str = Field(description="SHA-256 of the whole blob.")
    size: int = Field(description="Its size in bytes.")
    offset: int = Field(description="Bytes that have arrived: where the next PATCH begins.")
    is_complete: bool = Field(description="Whether the blob is whole, verified and stored.")
    created_by: str | None = Field(description="Who began it.")
    expires_at: Instant | None = Field(description="When what has arrived is removed, unless more comes before.")


class TargetCreate(Closed):
    """Make a target."""

    name: TargetName = Field(description="name@environment.")
    runner_class: Name = Field(description="Class of runners that serve it.")
    gateway: Name = Field(description="Gateway in front of it.")


class ReleaseCreate(Closed):
    """Start a release."""

    target: TargetName = Field(description="Where it shall serve.")
    bundle: Digest = Field(description="What shall serve.")
    policy: Digest = Field(description="Under which rules.")
    reason: Text | None = Field(None, description="Why.")


class Act(Closed):
    """A person's act on a release."""

    reason: Text = Field(description="Why; kept in evidence.")


class RunnerAct(Closed):
    """A person's act on a runner."""

    reason: Text = Field(description="Why; shown with the runner.")


class RunnerDrain(RunnerAct):
    """Have a runner take no job any more."""

    force_in_seconds: Annotated[int, Field(ge=0, le=30 * 86_400, strict=True)] | None = Field(
        None, description="After how many seconds what it still holds is ended, whatever that loses; absent for never."
    )


class Approve(Act):
    """Approve a release, and answer for the warnings of its gates."""

    accept: Annotated[list[ShortText], Field(max_length=500)] | None = Field(
        None, description="Codes of `warn` findings that may stand, for the reason given."
    )


class Withdraw(Act):
    """Take an approval back."""

    approver: Name | None = Field(None, description="Whose it is, for administrators; one's own when absent.")


class RollBack(Act):
    """Take traffic back; only who says so leaves a target without any that is past its soak."""

    to_nothing: bool | None = Field(
        None,
        description="Let the target serve nothing, at once: no earlier version is put in its place, also where there "
        "is one. Refused of a canary beside a live release, which would serve on.",
    )


class Revoke(Closed):
    """Let a gate result count no more."""

    entry: Digest = Field(description="Digest of the entry that holds the result.")
    reason: Text = Field(description="Why; kept in evidence.")


class Erase(Closed):
    """Erase the raw records of a gate's result. The result stays, and can be recomputed no more."""

    entry: Digest = Field(description="Digest of the entry that holds the result.")
    reason: Text = Field(description="Why; kept in evidence.")


class BundleDeleted(Wire):
    """A bundle that was deleted."""

    digest: str = Field(description="Its digest. The document stays in evidence; its files go.")
    name: str = Field(description="Family name.")
    blobs: int = Field(description="Blobs that no other bundle of the project is made of.")
    bytes: int = Field(description="Their bytes.")
    free_at: Instant = Field(description="When these blobs may go, unless something needs them before.")


class Collect(Closed):
    """Clear up blobs that nothing needs."""

    is_dry_run: bool = Field(description="Only tell what would go.")


class Collected(Wire):
    """What clearing up found."""

    is_dry_run: bool = Field(description="Whether everything is still there.")
    blobs: int = Field(description="Blobs that went, or would go.")
    bytes: int = Field(description="Their bytes.")
    strays: int = Field(description="Files in the store that no project ever recorded, which went or would go.")
    missing: list[str] = Field(description="Blobs that are recorded, and are not in the store; 1,000 at most.")
    missing_count: int = Field(description="How many those are.")


class RunCreate(Closed):
    """Run gates on a bundle without a release."""

    bundle: Digest = Field(description="Bundle.")
    policy: Digest = Field(description="Policy whose rules apply.")
    runner_class: Name = Field(description="Class of runners.")
    gates: Annotated[list[Name], Field(min_length=1, max_length=32)] | None = Field(
        None, description="Only these gates of the policy; all when absent."
    )
    target: TargetName | None = Field(None, description="Target whose references and accepted bundle gates use.")


class RecordCreate(Closed):
    """Record a golden reference from a bundle and set it on a target."""

    suite: Digest = Field(description="Golden suite.")
    bundle: Digest = Field(description="Bundle that shall answer.")
    target: TargetName = Field(description="Target that gets the reference.")
    expected: Digest | None = Field(
        None,
        description="Reference that is in force, as the caller saw it; absent for the first. If-Match does as well.",
    )
    reason: Text = Field(description="Why this bundle is the yardstick; kept in evidence.")


class Run(Wire):
    """A run: one boot of one bundle with its gate results."""

    id: UUID = Field(description="Identity.")
    kind: str = Field(description="evaluate, serve or record.")
    release: UUID | None = Field(description="Release it belongs to.")
    bundle: str = Field(description="Bundle.")
    policy: str | None = Field(description="Policy.")
    runner_class: str = Field(description="Class of runners.")
    runner: str | None = Field(description="Runner that holds it.")
    state: str = Field(description="pending, claimed, done or cancelled.")
    attempt: int = Field(description="Times it was claimed.")
    progress: str | None = Field(description="What it is doing now.")
    outcome: str | None = Field(description="For a run without a release: passed, failed or undecided.")
    problem: str | None = Field(description="Last technical problem.")
    created_at: Instant = Field(description="When it was created.")
    results: list[dict[str, object]] = Field(description="Gate results so far.")
    reference: str | None = Field(description="Reference it recorded.")
    waits: str | None = Field(description="What it waits for while it is pending and due, in one sentence.")
    replica: Replica | None = Field(description="Its engine as last reported; null while it has started none.")


class RunnerDetail(Runner):
    """A registered runner with what it does and did."""

    registered_at: Instant = Field(description="When it was first heard of.")
    runs: list[Run] = Field(description="The newest runs that it holds or held last, newest first; at most 20.")
    loses: list[str] = Field(description="What would be lost if it were emptied now, a sentence for each job it holds.")


class Complete(Closed):
    """A runner ends a job."""

    fencing_token: int = Field(description="From the claim.", ge=0)
    problem: ShortText | None = Field(None, description="Problem kind when it ended in a technical error.")
    detail: Text | None = Field(None, description="What happened.")
    cause: Cause | None = Field(None, description="Class, where an engine failed.")


class Progress(Closed):
    """What a job is doing now."""

    fencing_token: int = Field(description="From the claim.", ge=0)
    progress: Annotated[str, Field(max_length=200)] | None = Field(None, description="One line.")


class Reported(Wire):
    """A report is in the log."""

    entry_digest: str = Field(description="Digest of its entry.")


class Event(Wire):
    """One entry of the log as it is told to those who follow it."""

    cursor: str = Field(description="Where to read on from: everything up to this entry has been told.")
    entry: Entry = Field(description="The entry.")
