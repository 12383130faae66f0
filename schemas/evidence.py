"""Evidence: what happened, as signed in-toto statements in append-only hash chains.

An entry's `envelope` is a DSSE envelope (payload, payload type, one ECDSA P-256 signature) around an in-toto
Statement v1. Its `entry_digest` is the SHA-256 of the canonical JSON of
`{"act","envelope_sha256","id","kind","position","previous","project","recorded_at","stream"}`; `previous` is the
entry digest before it in the same stream, or 64 zeros at position 1.
"""

import base64
import binascii
from enum import StrEnum
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from pydantic import Field

from schemas.asked import RunAsked as RunAsked  # noqa: PLC0414 - a part of what this module offers
from schemas.asked import RunCancelled as RunCancelled  # noqa: PLC0414 - likewise
from schemas.common import (
    BasisPoints,
    Closed,
    Digest,
    Instant,
    Integer,
    Positive,
    ShortText,
    Text,
    Wire,
    canonical_json,
)
from schemas.failures import Cause
from schemas.lock import Locks
from schemas.membership import ProjectSet as ProjectSet  # noqa: PLC0414 - a part of what this module offers
from schemas.membership import TokenCreated as TokenCreated  # noqa: PLC0414 - a part of what this module offers
from schemas.membership import TokenFound as TokenFound  # noqa: PLC0414 - a part of what this module offers
from schemas.membership import TokenRevoked as TokenRevoked  # noqa: PLC0414 - a part of what this module offers
from schemas.result import Finding, GateResult, Measurement, Verdict
from schemas.runner import Compared, EngineIdentity, Fingerprint, ReplicaReport

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
PREDICATE_BASE = "https://sluicegate.dev/evidence/"
GENESIS = "sha256:" + "0" * 64


class Kind(StrEnum):
    """What an entry records."""

    CREATED = "created"
    STAGED = "staged"
    ENGINE_BOOTED = "engine_booted"
    GATE_RECORDED = "gate_recorded"
    GATES_PASSED = "gates_passed"
    REFUSED = "refused"
    APPROVAL_GRANTED = "approval_granted"
    APPROVAL_NOT_REQUIRED = "approval_not_required"
    APPROVAL_WITHDRAWN = "approval_withdrawn"
    APPROVED = "approved"
    FINDING_ACCEPTED = "finding_accepted"
    TRAFFIC_SHIFTED = "traffic_shifted"
    STEP_PASSED = "step_passed"
    STOP_CONDITION_FIRED = "stop_condition_fired"
    TRAFFIC_RESTORED = "traffic_restored"
    PROMOTED = "promoted"
    REPLACED = "replaced"
    REINSTATED = "reinstated"
    PAUSED = "paused"
    RESUMED = "resumed"
    HELD = "held"
    ATTEMPT_ERRORED = "attempt_errored"
    RUN_ASKED = "run_asked"
    RUN_ENDED = "run_ended"
    RUN_CANCELLED = "run_cancelled"
    PROMOTION_REQUESTED = "promotion_requested"
    ROLLBACK_REQUESTED = "rollback_requested"
    RESTORE_OBSERVED = "restore_observed"
    REPLICA_CHANGED = "replica_changed"
    BUNDLE_REGISTERED = "bundle_registered"
    BUNDLE_DELETED = "bundle_deleted"
    BUNDLE_QUARANTINED = "bundle_quarantined"
    QUARANTINE_LIFTED = "quarantine_lifted"
    ALIAS_SET = "alias_set"
    ALIAS_DELETED = "alias_deleted"
    ALIAS_PROTECTED = "alias_protected"
    ALIAS_PATTERN_SET = "alias_pattern_set"
    ALIAS_PATTERN_REMOVED = "alias_pattern_removed"
    RECORDS_ERASED = "records_erased"
    POLICY_REGISTERED = "policy_registered"
    SUITE_REGISTERED = "suite_registered"
    TARGET_CREATED = "target_created"
    REFERENCE_SET = "reference_set"
    PROJECT_SET = "project_set"
    TOKEN_CREATED = "token_created"  # noqa: S105 - a kind of entry, no secret
    TOKEN_FOUND = "token_found"  # noqa: S105 - as above
    TOKEN_REVOKED = "token_revoked"  # noqa: S105 - as above
    KEY_ROTATED = "key_rotated"
    EVIDENCE_REVOKED = "evidence_revoked"
    RUNNER_DRAINED = "runner_drained"
    RUNNER_UNDRAINED = "runner_undrained"


QuarantineCause = Literal["person", "integrity_gate", "blob_damaged"]
"""Person: by hand. Integrity_gate: that gate failed. Blob_damaged: the store has other bytes for one of its files."""


class SplitEntry(Closed):
    """One arm of a split."""

    bundle: Digest = Field(description="Bundle that the arm serves.")
    weight_bp: BasisPoints = Field(description="Weight in basis points.")


class Created(Closed):
    """A release was created; everything it will be judged by is bound here."""

    target: ShortText = Field(description="name@environment.")
    bundle: Digest = Field(description="Candidate.")
    serving_digest: Digest = Field(description="Digest over what the engine reads and how it is run.")
    policy: Digest = Field(description="Frozen policy.")
    references: dict[Digest, Digest] = Field(description="Golden suite → reference.")
    predecessor: UUID | None = Field(None, description="Release that was live.")
    stable_bundle: Digest | None = Field(None, description="Bundle that was live.")
    reason: Text | None = Field(None, description="Why, by the author.")


class Staged(Closed):
    """Every file lies where the engine will read it, with the right bytes."""

    files: Positive = Field(description="Files staged.")
    size: Integer = Field(description="Bytes staged.")
    duration_ms: Integer = Field(description="Time taken.")


class EngineBooted(Closed):
    """The engine answered a real completion under the expected model id."""

    engine: EngineIdentity = Field(description="What booted.")
    fingerprint: Fingerprint = Field(description="On which hardware.")
    runner: ShortText = Field(description="Runner's name.")
    ready_ms: Integer = Field(description="Launch to ready.")
    stage_ms: Integer | None = Field(None, description="Time that it took to put the files in place.")
    was_staged: bool | None = Field(None, description="Whether an earlier job had put them there.")
    page_cache_percent: Annotated[int, Field(ge=0, le=100, strict=True)] | None = Field(
        None, description="Share of the weights in memory at the launch, as the kernel says of a sample of their pages."
    )
    kernel_cache: Literal["empty"] | None = Field(
        None, description="Empty: the engine compiles, and its cache began with this boot; absent when it does not."
    )
    loading_ms: Integer | None = Field(None, description="Launch until its health route answered.")
    compile_ms: Integer | None = Field(None, description="Compiling, as its log tells it; part of the others.")
    warming_ms: Integer | None = Field(None, description="From then until ready.")
    warm_requests: Integer | None = Field(None, description="Requests of intended shapes sent before it was ready.")
    warm_failed: Integer | None = Field(None, description="Of those, how many did not end properly.")
    compared: Annotated[list[Compared], Field(max_length=64)] | None = Field(
        None, description="What it says of itself, held against the bundle; absent in entries of older runners."
    )
    findings: Annotated[list[Finding], Field(max_length=64)] | None = Field(
        None, description="What differs and may stand. Nothing that blocks is here: such an engine is not served."
    )


class Reasoned(Closed):
    """A decision with its reasons."""

    reasons: Annotated[list[Text], Field(min_length=1, max_length=50)] = Field(description="Why, one sentence each.")
    cause: ShortText | None = Field(
        None, description="Short name of the cause, such as gate_failed or controller_lost."
    )
    findings: list[Finding] | None = Field(None, description="Findings behind it.")


class Decision(Closed):
    """All required gates passed, on this evidence."""

    gates: dict[ShortText, Digest] = Field(description="Gate → entry digest of its passing result.")


class Approved(Closed):
    """The approval rule is met."""

    approvals: list[Digest] = Field(description="Entry digests of the approvals counted.")
    required: Integer = Field(description="Approvals that the policy asks for.")


class Withdrawn(Closed):
    """An approval counts no more."""

    approval: Digest = Field(description="Entry digest of the approval.")
    approver: ShortText = Field(description="Who had approved.")
    reason: Text = Field(description="Why.")


class Accepted(Closed):
    """A manager answers for the warnings of one gate's result. A later result has to be accepted anew."""

    gate: ShortText = Field(description="Gate.")
    result: Digest = Field(description="Entry digest of its result.")
    codes: Annotated[list[ShortText], Field(min_length=1, max_length=500)] = Field(description="Findings, by code.")
    reason: Text = Field(description="Why they may stand.")


class Traffic(Closed):
    """A change of weights: what was wanted, what the gateway acknowledged."""

    desired: Annotated[list[SplitEntry], Field(max_length=8)] = Field(
        description="Wanted split; empty when nothing serves."
    )
    revision: ShortText = Field(description="Revision that the gateway acknowledged.")
    applied_ms: float = Field(description="Publish to acknowledgement.", ge=0, allow_inf_nan=False)
    step: Integer | None = Field(None, description="Index of the canary step, from 0.")
    breach_at: Instant | None = Field(None, description="When the deciding request ended, for a restore.")
    requested_at: Instant = Field(description="When the change was begun.")
    applied_at: Instant = Field(description="When the gateway acknowledged.")
    cause: ShortText | None = Field(None, description="Why traffic moved.")
    reasons: list[Text] | None = Field(None, description="Reasons, one sentence each.")


class Judgement(Closed):
    """What live traffic showed at a step."""

    step: Integer = Field(description="Index of the step; for the soak, the number of steps.")
    reasons: Annotated[list[Text], Field(min_length=1, max_length=50)] = Field(description="One sentence each.")
    measurements: list[Measurement] = Field(description="What was measured.")
    breach_at: Instant | None = Field(None, description="When the deciding request ended.")


class Restored(Closed):
    """New requests are seen to be served by the restored arm alone."""

    observed: Integer = Field(description="Requests seen after the restore, all of them on the restored arm.")
    first_at: Instant | None = Field(None, description="First such request.")
    seconds: float = Field(description="Breach to this moment.", ge=0, allow_inf_nan=False)


class Attempt(Closed):
    """A technical error; the phase stays."""

    problem: ShortText = Field(description="Problem kind.")
    detail: Text = Field(description="What happened.")
    cause: Cause | None = Field(None, description="Class, where an engine failed.")
    attempt: Positive = Field(description="Which attempt.")
    retry_in_seconds: float | None = Field(None, description="When it is tried again; absent when it is not.", ge=0)


class RunEnded(Closed):
    """A run that belongs to no release is over."""

    outcome: Literal["passed", "failed", "undecided", "recorded"] = Field(
        description="What its gates add up to; recorded for a reference that was put in force."
    )
    problem: ShortText | None = Field(None, description="Technical problem that it ended with.")


class Note(Closed):
    """A person's act with a reason."""

    reason: Text = Field(description="Why.")


class RollbackRequested(Note):
    """A person asked that all traffic be taken back."""

    to_nothing: bool | None = Field(
        None, description="It was said that the target is to serve nothing: no earlier version is put in its place."
    )
    no_way_back: bool | None = Field(
        None, description="There was no earlier version when it was asked: the target may serve nothing then."
    )


class Replaced(Closed):
    """Another release took over or gave back."""

    release: UUID = Field(description="The other release.")


class Registered(Closed):
    """A document was registered."""

    digest: Digest = Field(description="Its digest.")
    name: ShortText = Field(description="Its family name.")
    serving_digest: Digest | None = Field(None, description="For a bundle.")
    components: dict[ShortText, Digest] | None = Field(None, description="For a bundle.")
    locks: Locks | None = Field(None, description="For a bundle: how its sources were resolved, where that was said.")


class Deleted(Closed):
    """A bundle was deleted: its files may go, the document stays."""

    digest: Digest = Field(description="Its digest.")
    name: ShortText = Field(description="Its family name.")
    reason: Text = Field(description="Why.")


class Quarantined(Closed):
    """A bundle is trusted no more: nothing goes on with it until a person lifts this."""

    digest: Digest = Field(description="Its digest.")
    name: ShortText = Field(description="Its family name.")
    cause: QuarantineCause = Field(description="Who or what found it out.")
    reason: Text = Field(description="Why.")
    result: Digest | None = Field(None, description="Entry digest of the integrity result that failed.")
    blob: Digest | None = Field(None, description="Blob whose bytes are others in the store.")
    found: Digest | None = Field(None, description="Digest of the bytes that are there instead.")
    seen_by: ShortText | None = Field(None, description="Who met it; absent when that was in another project.")


class QuarantineLifted(Closed):
    """A person answers for a bundle that was quarantined."""

    digest: Digest = Field(description="Its digest.")
    name: ShortText = Field(description="Its family name.")
    grounds: Annotated[list[Digest], Field(min_length=1)] = Field(
        description="Entry digests of what it was quarantined for, all of them."
    )
    reason: Text = Field(description="Why it is trusted again.")


class AliasChanged(Closed):
    """An alias is as this says from now on."""

    alias: ShortText = Field(description="Its name.")
    bundle: Digest | None = Field(None, description="What it names; absent once it is deleted.")
    previous: Digest | None = Field(None, description="What it named before.")
    is_protected: bool = Field(description="Whether only managers move it.")
    generation: Positive = Field(description="Its generation.")
    reason: Text = Field(description="Why.")


class AliasPatternChanged(Closed):
    """Aliases whose names fit a pattern are moved by whom this says from now on."""

    pattern: ShortText = Field(description="The pattern.")
    movers: Literal["engineer", "manager", "admin"] | None = Field(
        None, description="Least role that moves them; absent once the pattern is removed."
    )
    reason: Text = Field(description="Why.")


class RecordsErased(Closed):
    """The raw records of a gate are gone on purpose. The result that was judged from them stands."""

    records: Digest = Field(description="Digest of the bytes that were erased.")
    cause: Literal["person", "retention"] = Field(description="Whether somebody asked for it, or their time was over.")
    reason: Text = Field(description="Why.")


class TargetCreated(Closed):
    """A target exists."""

    name: ShortText = Field(description="name@environment.")
    runner_class: ShortText = Field(description="Runners that serve it.")
    gateway: ShortText = Field(description="Gateway in front of it.")


class ReferenceSet(Closed):
    """A golden reference was recorded and set on a target."""

    target: ShortText = Field(description="name@environment.")
    suite: Digest = Field(description="Golden suite.")
    reference: Digest = Field(description="Reference.")
    bundle: Digest = Field(description="Bundle that answered.")
    previous: Digest | None = Field(None, description="Reference that it takes the place of.")


class KeyRotated(Closed):
    """Another key signs from now on. The old key says so, which hands its trust on."""

    key_id: ShortText = Field(description="New key: SHA-256 of its public half's DER, in hexadecimal.")
    public_key_pem: Annotated[str, Field(max_length=4096)] = Field(description="New public key as PEM.")
    valid_from: Instant = Field(description="New key signs from.")
    retired: ShortText = Field(description="Old key.")
    valid_until: Instant = Field(description="Old key signs until.")
    reason: Text = Field(description="Why.")
    countersigned: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Base64: the new key's signature over this body without this field; absent in older entries."
    )

    def payload(self) -> bytes:
        """Return what the new key signs: that it takes the place of this old one, and of no other."""
        return canonical_json(self.model_dump(mode="json", exclude_none=True, exclude={"countersigned"}))


class EvidenceRevoked(Closed):
    """A gate result does not count any more, from now on."""

    entry: Digest = Field(description="Digest of the entry with the result.")
    gate: ShortText = Field(description="Gate whose result it is.")
    reason: Text = Field(description="Why.")


class RunnerDrained(Closed):
    """A runner takes no job any more; with an instant, what it still holds then is ended."""

    runner: ShortText = Field(description="Its name.")
    reason: Text = Field(description="Why.")
    empty_at: Instant | None = Field(None, description="When what it holds is ended; absent for never.")
    loses: Annotated[list[Text], Field(max_length=200)] | None = Field(
        None, description="What would have been lost at this moment, a sentence for each job; absent for nothing."
    )
    since: Instant | None = Field(None, description="Since when it drains; absent in older entries.")


class RunnerUndrained(Closed):
    """A runner takes jobs again."""

    runner: ShortText = Field(description="Its name.")
    reason: Text | None = Field(None, description="Why, where that was said.")
    since: Instant | None = Field(None, description="Since when; absent in older entries.")


class ReplicaChanged(Closed):
    """A replica changed state."""

    job: UUID = Field(description="Job that owns it.")
    purpose: Literal["gates", "live"] = Field(description="What it is for.")
    replica: ReplicaReport = Field(description="State and cause.")


BODIES: dict[Kind, type[Closed]] = {
    Kind.CREATED: Created,
    Kind.STAGED: Staged,
    Kind.ENGINE_BOOTED: EngineBooted,
    Kind.GATE_RECORDED: GateResult,
    Kind.GATES_PASSED: Decision,
    Kind.REFUSED: Reasoned,
    Kind.APPROVAL_GRANTED: Note,
    Kind.APPROVAL_WITHDRAWN: Withdrawn,
    Kind.APPROVAL_NOT_REQUIRED: Note,
    Kind.APPROVED: Approved,
    Kind.FINDING_ACCEPTED: Accepted,
    Kind.TRAFFIC_SHIFTED: Traffic,
    Kind.STEP_PASSED: Judgement,
    Kind.STOP_CONDITION_FIRED: Judgement,
    Kind.TRAFFIC_RESTORED: Traffic,
    Kind.PROMOTED: Note,
    Kind.REPLACED: Replaced,
    Kind.REINSTATED: Replaced,
    Kind.PAUSED: Note,
    Kind.RESUMED: Note,
    Kind.HELD: Reasoned,
    Kind.ATTEMPT_ERRORED: Attempt,
    Kind.RUN_ASKED: RunAsked,
    Kind.RUN_ENDED: RunEnded,
    Kind.RUN_CANCELLED: RunCancelled,
    Kind.PROMOTION_REQUESTED: Note,
    Kind.ROLLBACK_REQUESTED: RollbackRequested,
    Kind.RESTORE_OBSERVED: Restored,
    Kind.REPLICA_CHANGED: ReplicaChanged,
    Kind.BUNDLE_REGISTERED: Registered,
    Kind.BUNDLE_DELETED: Deleted,
    Kind.BUNDLE_QUARANTINED: Quarantined,
    Kind.QUARANTINE_LIFTED: QuarantineLifted,
    Kind.ALIAS_SET: AliasChanged,
    Kind.ALIAS_DELETED: AliasChanged,
    Kind.ALIAS_PROTECTED: AliasChanged,
    Kind.ALIAS_PATTERN_SET: AliasPatternChanged,
    Kind.ALIAS_PATTERN_REMOVED: AliasPatternChanged,
    Kind.RECORDS_ERASED: RecordsErased,
    Kind.POLICY_REGISTERED: Registered,
    Kind.SUITE_REGISTERED: Registered,
    Kind.TARGET_CREATED: TargetCreated,
    Kind.REFERENCE_SET: ReferenceSet,
    Kind.PROJECT_SET: ProjectSet,
    Kind.TOKEN_CREATED: TokenCreated,
    Kind.TOKEN_FOUND: TokenFound,
    Kind.TOKEN_REVOKED: TokenRevoked,
    Kind.KEY_ROTATED: KeyRotated,
    Kind.EVIDENCE_REVOKED: EvidenceRevoked,
    Kind.RUNNER_DRAINED: RunnerDrained,
    Kind.RUNNER_UNDRAINED: RunnerUndrained,
}
"""Kind → the closed model of its body. Every kind has one."""


class Subject(Closed):
    """What a statement is about."""

    name: ShortText = Field(description="bundle, policy, release …")
    digest: dict[Literal["sha256"], Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(description="Its digest.")


class Statement(Closed):
    """in-toto Statement v1. Source: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type", description="Statement type.")
    subject: Annotated[list[Subject], Field(min_length=1, max_length=16)] = Field(description="What it is about.")
    predicate_type: ShortText = Field(alias="predicateType", description="Type of the predicate.")
    predicate: dict[str, Any] = Field(description="What is claimed.")


class Signature(Closed):
    """One DSSE signature."""

    keyid: ShortText = Field(description="SHA-256 of the public key's DER, in hexadecimal.")
    sig: ShortText = Field(description="Base64 of the DER ECDSA signature over the pre-authentication encoding.")


class Envelope(Closed):
    """DSSE envelope. Source: https://github.com/secure-systems-lab/dsse/blob/master/envelope.md."""

    payload: str = Field(description="Base64 of the statement's bytes.")
    payload_type: Literal["application/vnd.in-toto+json"] = Field(alias="payloadType", description="Payload type.")
    signatures: Annotated[list[Signature], Field(min_length=1, max_length=1)] = Field(description="Exactly one.")

    def payload_bytes(self) -> bytes:
        """Return the statement's bytes. Raises ValueError when the base64 is not canonical."""
        try:
            raw = base64.b64decode(self.payload, validate=True)
        except binascii.Error as error:
            raise ValueError("payload is not base64") from error
        if base64.b64encode(raw).decode() != self.payload:
            raise ValueError("payload is not canonical base64")
        return raw


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that DSSE signs. Source: DSSE protocol v1.0.2."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


class Entry(Wire):
    """One evidence entry as the service gives it out."""

    sequence: int = Field(description="Order over all streams.")
    id: UUID = Field(description="Identity.")
    project: UUID = Field(description="Project it belongs to.")
    stream: str = Field(description="release/<id>, documents/<project>/<digest>, target/<id> …")
    position: int = Field(description="Place in the stream, from 1.")
    act: str = Field(description="Name of the act; unique in the stream.")
    kind: Kind = Field(description="What it records.")
    actor: str = Field(description="Who did it.")
    recorded_at: Instant = Field(description="When it was recorded.")
    body: dict[str, Any] = Field(description="What is claimed.")
    previous: str = Field(description="Entry digest before it in the stream.")
    entry_digest: str = Field(description="Its own digest.")
    key_id: str = Field(description="Key that signed.")
    envelope: Envelope | None = Field(description="DSSE envelope; left out of lists unless asked for.")


class Fault(Wire):
    """One thing that verification found wrong."""

    stream: str = Field(description="Stream.")
    position: int = Field(description="Position; 0 for the stream as a whole.")
    problem: str = Field(description="What is wrong, in one sentence.")


class Verification(Wire):
    """Outcome of verifying evidence."""

    entries: int = Field(description="Entries read.")
    streams: int = Field(description="Streams read.")
    checkpoints: int = Field(description="Checkpoints read.")
    sealed: int = Field(description="Entries that a checkpoint covers: of those, none can be cut off unseen.")
    erased: int = Field(description="Records that were erased on purpose: their results stand, and say so.")
    verified: bool = Field(description="True only when entries were read and nothing is wrong.")
    faults: list[Fault] = Field(description="What is wrong.")


class RecomputationCreate(Closed):
    """Which result to recompute."""

    entry_digest: Digest = Field(description="Entry digest of a gate's result.")


class Agreement(StrEnum):
    """What a recomputation showed."""

    SAME = "same"
    """The records give the recorded result, bit for bit."""
    DIFFERENT = "different"
    """The entry, the records or the result are not what was recorded."""
    ERASED = "erased"
    """The records were erased on purpose, as evidence says: nothing can be computed, and nothing is damaged."""
    IMPOSSIBLE = "impossible"
    """Records or documents are not at hand, or another version of the gate made them."""


class Recomputation(Wire):
    """A recorded result beside what its records give now."""

    entry_digest: str = Field(description="Entry.")
    stream: str = Field(description="Its stream.")
    position: int = Field(description="Its place in the stream.")
    gate: str | None = Field(description="Gate; null when the entry cannot be read.")
    recorded: Verdict | None = Field(description="Verdict in the entry.")
    recomputed: Verdict | None = Field(description="Verdict that the records give now.")
    outcome: Agreement = Field(description="same, different, erased or impossible.")
    faults: list[str] = Field(description="What is wrong or lacking, one sentence each.")
