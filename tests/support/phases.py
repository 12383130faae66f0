"""Releases brought to a phase by writing what runners and the controller would have written."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from registry import releases
from registry.auth import Actor
from registry.service import Service
from registry.tables import ReleaseRow
from schemas.api import ReleaseCreate
from schemas.evidence import Approved, Decision, EngineBooted, Kind, Note, SplitEntry, Staged, Traffic
from schemas.result import GateResult
from tests.support.factories import record_act, started_release
from tests.support.world import FINGERPRINT


def gated(service: Service, actor: Actor, target: str = "chat@prod", **policy: Any) -> UUID:
    """A release by `actor` whose gates have passed; nobody has looked at approval yet."""
    return pass_gates(service, started_release(service, actor, target, **policy))


def pass_gates(service: Service, release: UUID, *, against: str | None = None) -> UUID:
    """Let a release's gates have passed; with `against`, a rollback drill too, back to that bundle."""
    engine = {"name": "llamacpp", "version": "t", "arguments": [], "model_ids": ["chat"], "context_tokens": 512}
    booted = {"engine": engine, "fingerprint": FINGERPRINT, "runner": "r1", "ready_ms": 10}
    record_act(service, release, Kind.STAGED, Staged(files=1, size=1, duration_ms=1))
    record_act(service, release, Kind.ENGINE_BOOTED, EngineBooted.model_validate(booted))
    for gate in ("integrity", "compatibility", *(["rollback"] if against else [])):
        body: dict[str, Any] = {
            "gate": gate,
            "definition": "sha256:" + "d" * 64,
            "verdict": "passed",
            "summary": "it passed",
            "measurements": [],
            "findings": [],
            "duration_ms": 5,
            "source": "run",
        }
        if gate == "rollback":
            body["against"] = against
        record_act(service, release, Kind.GATE_RECORDED, GateResult.model_validate(body), f"gate:{gate}")
    record_act(service, release, Kind.GATES_PASSED, Decision(gates={}))
    return release


def in_canary(service: Service, actor: Actor, target: str = "chat@prod", **policy: Any) -> UUID:
    """A release by `actor` that has its first traffic."""
    return let_in(service, gated(service, actor, target, **policy))


def let_in(service: Service, release: UUID) -> UUID:
    """Approve a gated release and give it its first traffic."""
    record_act(service, release, Kind.APPROVED, Approved(approvals=[], required=0))
    first_traffic(service, release)
    return release


def first_traffic(service: Service, release: UUID) -> str:
    """Record that an approved release has its first traffic. Returns the phase. Raises TransitionRefused."""
    with service.database.transaction() as session:
        bundle = session.get_one(ReleaseRow, release).bundle
    at = datetime.now(UTC)
    shifted = Traffic(
        desired=[SplitEntry(bundle=bundle, weight_bp=1000)],
        revision="1",
        applied_ms=1.0,
        step=0,
        requested_at=at,
        applied_at=at,
    )
    return record_act(service, release, Kind.TRAFFIC_SHIFTED, shifted)


def promoted(service: Service, actor: Actor, bundle: str, policy: str, target: str = "chat@prod") -> UUID:
    """A release of a bundle that is live on a target; the bundle is what the target has accepted."""
    body = ReleaseCreate(target=target, bundle=bundle, policy=policy, reason="a test")
    with service.database.transaction() as session:
        release = releases.create(session, service, actor, body).id
    let_in(service, pass_gates(service, release))
    record_act(service, release, Kind.PROMOTED, Note(reason="a test"))
    return release
