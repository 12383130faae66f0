"""Releases and targets as the service gives them out."""

from enum import StrEnum
from uuid import UUID

from pydantic import Field

from schemas.common import Instant, Wire
from schemas.evidence import Entry, SplitEntry


class Phase(StrEnum):
    """Phase of a release: the fold of its log."""

    CANDIDATE = "candidate"
    STAGED = "staged"
    BOOTED = "booted"
    GATED = "gated"
    APPROVED = "approved"
    CANARY = "canary"
    PROMOTED = "promoted"
    SUPERSEDED = "superseded"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"


TERMINAL = frozenset({Phase.SUPERSEDED, Phase.REJECTED, Phase.ROLLED_BACK})
LIVE = frozenset({Phase.CANARY, Phase.PROMOTED})
SERVES_ON = "it serves on,"
BESIDE = "the live one beside it goes first:"
"""How a release says that what it waits for keeps no request from it."""


class GateStatus(Wire):
    """One required gate of a release."""

    gate: str = Field(description="Gate.")
    verdict: str | None = Field(description="Verdict; null while it has not run.")
    summary: str | None = Field(description="Why.")
    entry: str | None = Field(description="Entry digest of the result.")
    duration_ms: int | None = Field(description="How long it took.")


class Release(Wire):
    """One attempt to take a bundle live on a target under a policy."""

    id: UUID = Field(description="Identity.")
    target: str = Field(description="name@environment.")
    bundle: str = Field(description="Candidate bundle.")
    bundle_name: str = Field(description="Its family name.")
    policy: str = Field(description="Policy.")
    phase: Phase = Field(description="Fold of the log.")
    phase_since: Instant = Field(description="Since when.")
    is_paused: bool = Field(description="Whether a person paused it.")
    held: list[str] = Field(description="Why it holds; empty when it does not.")
    waits: str | None = Field(description="What keeps its job from being taken by a runner; null when none waits.")
    reason: str | None = Field(description="Why it ended as it did, or the latest decision.")
    created_at: Instant = Field(description="When it was created.")
    created_by: str = Field(description="Its author.")
    predecessor: UUID | None = Field(description="Release that was live when it was created.")
    step: int | None = Field(description="Canary step now, from 0.")
    weight_bp: int | None = Field(description="Candidate's applied weight.")
    version: str = Field(description="Phase and length of the log, such as gated:7; for If-Match.")
    gates: list[GateStatus] = Field(description="Required gates, in order.")
    quarantined: list[str] = Field(description="Why its bundle is quarantined now; empty when it is not.")


class ReleaseDetail(Release):
    """A release with its log."""

    doing: str | None = Field(
        description="What a runner does for it now, or what its canary step waits for; null for neither. No evidence."
    )
    log: list[Entry] = Field(description="Its entries, oldest first.")


class Replica(Wire):
    """One engine instance."""

    job: UUID = Field(description="Job that owns it.")
    bundle: str = Field(description="Bundle.")
    purpose: str = Field(description="gates or live.")
    state: str = Field(description="Lifecycle state.")
    since: Instant = Field(description="Since when.")
    address: str | None = Field(description="host:port.")
    cause: str = Field(description="Why it is in this state.")
    failure: str | None = Field(description="Class of its failure; null unless it failed.")
    log_tail: list[str] | None = Field(description="Last lines of its log, after a failure.")


class Target(Wire):
    """One served name in one environment."""

    id: UUID = Field(description="Identity.")
    name: str = Field(description="name@environment.")
    runner_class: str = Field(description="Runners that serve it.")
    gateway: str = Field(description="Gateway in front of it.")
    url: str | None = Field(description="Base URL for OpenAI clients.")
    generation: int = Field(description="Grows with every change of what it serves or is about to; for If-Match.")
    stable_release: UUID | None = Field(description="Live release.")
    stable_bundle: str | None = Field(description="Live bundle.")
    candidate_release: UUID | None = Field(description="Release under way.")
    quarantined: list[str] = Field(description="Why the live bundle is quarantined; empty when it is not.")
    references: dict[str, str] = Field(description="Golden suite → reference.")
    applied: list[SplitEntry] = Field(description="Split that the gateway acknowledged last.")
    replicas: list[Replica] = Field(description="Its replicas.")
    created_at: Instant = Field(description="When it was created.")


class ServedAt(Wire):
    """What a target served at an instant, who let it, and which entries say so."""

    target: str = Field(description="name@environment.")
    at: Instant = Field(description="The instant asked for.")
    live_release: UUID | None = Field(description="Release that was promoted and neither replaced nor taken back.")
    live_bundle: str | None = Field(description="Its bundle; null when nothing was live.")
    live_since: Instant | None = Field(description="When it became live, the last time before.")
    live_by: str | None = Field(description="Who asked for that or let it: a person's name, controller or policy.")
    live_reason: str | None = Field(description="Why.")
    live_entry: str | None = Field(description="Digest of the entry that made it live.")
    split: list[SplitEntry] = Field(description="Weights that the gateway had acknowledged; empty when nothing served.")
    split_since: Instant | None = Field(description="When it acknowledged them.")
    split_entry: str | None = Field(description="Digest of the entry that says so.")


class TargetChange(Wire):
    """One change of what a target serves."""

    at: Instant = Field(description="When the gateway acknowledged it, or else when it was recorded.")
    kind: str = Field(description="traffic_shifted, traffic_restored, promoted, replaced or reinstated.")
    release: UUID = Field(description="Release in whose log it is.")
    bundle: str = Field(description="That release's bundle.")
    split: list[SplitEntry] | None = Field(description="Weights from then on; null when none moved.")
    by: str = Field(description="Who asked for that or let it: a person's name, controller or policy.")
    actor: str = Field(description="Who did and recorded it.")
    reason: str | None = Field(description="Why.")
    entry: str = Field(description="Digest of its entry.")
    sequence: int = Field(description="Place of its entry among all.")
