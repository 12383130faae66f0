"""Releases brought to a phase by writing what runners and the controller would have written."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from registry.auth import Actor
from registry.service import Service
from registry.tables import ReleaseRow
from schemas.evidence import Approved, Decision, EngineBooted, Kind, SplitEntry, Staged, Traffic
from schemas.result import GateResult
from tests.support.factories import record_act, started_release
from tests.support.world import FINGERPRINT


def gated(service: Service, actor: Actor, target: str = "chat@prod", **policy: Any) -> UUID:
    """A release by `actor` whose gates have passed; nobody has looked at approval yet."""
    release = started_release(service, actor, target, **policy)
    engine = {"name": "llamacpp", "version": "t", "arguments": [], "model_ids": ["chat"], "context_tokens": 512}
    booted = {"engine": engine, "fingerprint": FINGERPRINT, "runner": "r1", "ready_ms": 10}
    record_act(service, release, Kind.STAGED, Staged(files=1, size=1, duration_ms=1))
    record_act(service, release, Kind.ENGINE_BOOTED, EngineBooted.model_validate(booted))
    for gate in ("integrity", "compatibility"):
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
        record_act(service, release, Kind.GATE_RECORDED, GateResult.model_validate(body), f"gate:{gate}")
    record_act(service, release, Kind.GATES_PASSED, Decision(gates={}))
    return release


def in_canary(service: Service, actor: Actor, target: str = "chat@prod", **policy: Any) -> UUID:
    """A release by `actor` that has its first traffic."""
    release = gated(service, actor, target, **policy)
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
