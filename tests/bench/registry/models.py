"""What the service itself writes once: a bundle, a release that has ended, and one that waits for an approval."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import select, text

from registry import evidence, releases
from registry.auth import Actor
from registry.service import Service
from registry.tables import EntryRow, ProjectDocumentRow, ReleaseRow
from schemas.api import ReleaseCreate
from schemas.evidence import (
    Approved,
    Decision,
    EngineBooted,
    Judgement,
    Kind,
    Note,
    Replaced,
    ReplicaChanged,
    SplitEntry,
    Staged,
    Traffic,
)
from schemas.result import GateResult
from schemas.runner import ReplicaReport
from tests.bench.registry import fill
from tests.support import factories
from tests.support.factories import record_act
from tests.support.world import FINGERPRINT

GATES = ("integrity", "compatibility")
STEPS = (500, 2500, 10_000)
COPIED = """
INSERT INTO releases (id, project_id, target_id, bundle, policy, "references", created_at, created_by, phase,
    phase_since, is_paused, held, reason, step, weight_bp, step_since, due_at, lease_token, entries)
SELECT %(id)s::uuid, project_id, %(target)s::uuid, %(bundle)s, policy, "references", created_at, created_by, phase,
    phase_since, is_paused, held, replace(reason, '{model}', %(id)s::uuid::text), step, weight_bp, step_since, NULL, 0,
    entries
FROM releases WHERE id = '{model}'
"""


@dataclass(frozen=True)
class Models:
    """What the rows of the fill are made of."""

    bundle: fill.Model
    ended: fill.Model
    ended_row: str
    waiting: fill.Model
    waiting_row: str


def make(service: Service, author: Actor) -> Models:
    """Have the service write one of each, and read what it wrote."""
    factories.upload(service, author, b"shard 0\n", *fill.shared_files().values())
    bundle = factories._registered(service, author, "bundle", _bundle())
    ended = _release(service, author, bundle.digest, "ended@bench", approval={"required": 0})
    _until_gated(service, ended)
    _until_superseded(service, ended, bundle.digest)
    waiting = _release(service, author, bundle.digest, "waiting@bench", approval={"required": 1})
    _until_gated(service, waiting)
    with service.database.transaction() as session:
        stream = f"documents/{author.project_id}/{bundle.digest}"
        session.execute(text("UPDATE releases SET due_at = NULL"))
        return Models(
            bundle=_model(evidence.read(session, stream), ()),
            ended=_of_release(service, ended, "ended@bench", bundle.digest),
            ended_row=COPIED.format(model=ended),
            waiting=_of_release(service, waiting, "waiting@bench", bundle.digest),
            waiting_row=COPIED.format(model=waiting),
        )


def _bundle() -> Any:
    return fill.Bundle.model_validate(fill.body(0))


def _release(service: Service, author: Actor, bundle: str, target: str, **policy: Any) -> UUID:
    factories.created_target(service, author, target)
    rules = factories.registered_policy(service, author, target.partition("@")[0], **policy)
    body = ReleaseCreate(target=target, bundle=bundle, policy=rules.digest, reason="a bench")
    with service.database.transaction() as session:
        return releases.create(session, service, author, body).id


def _until_gated(service: Service, release: UUID) -> None:
    engine = {"name": "llamacpp", "version": "t", "arguments": [], "model_ids": ["chat"], "context_tokens": 512}
    booted = {"engine": engine, "fingerprint": FINGERPRINT, "runner": "r1", "ready_ms": 4100}
    record_act(service, release, Kind.STAGED, Staged(files=12, size=5_000_000_000, duration_ms=9000))
    record_act(service, release, Kind.ENGINE_BOOTED, EngineBooted.model_validate(booted))
    for gate in GATES:
        measured = [
            {"name": f"measure {place}", "unit": "ms", "statistic": "p90", "value": 12.5, "n": 60} for place in range(8)
        ]
        body: dict[str, Any] = {
            "gate": gate,
            "definition": "sha256:" + "d" * 64,
            "verdict": "passed",
            "summary": "it passed: every measure is within its limit",
            "measurements": measured,
            "findings": [],
            "duration_ms": 5000,
            "source": "run",
        }
        record_act(service, release, Kind.GATE_RECORDED, GateResult.model_validate(body), f"gate:{gate}")
    record_act(service, release, Kind.GATES_PASSED, Decision(gates={}))


def _until_superseded(service: Service, release: UUID, bundle: str) -> None:
    note = Note(reason="the policy asks for no approval")
    record_act(service, release, Kind.APPROVAL_NOT_REQUIRED, note)
    record_act(service, release, Kind.APPROVED, Approved(approvals=[], required=0))
    for place, state in enumerate(("loading", "warming", "ready")):
        record_act(service, release, Kind.REPLICA_CHANGED, _replica(release, state), f"replica:{place}")
    for step, weight in enumerate(STEPS):
        at = datetime.now(UTC)
        shifted = Traffic(
            desired=[SplitEntry(bundle=bundle, weight_bp=weight)],
            revision=str(step),
            applied_ms=31.5,
            step=step,
            requested_at=at,
            applied_at=at,
        )
        record_act(service, release, Kind.TRAFFIC_SHIFTED, shifted, f"shift:{step}")
        passed = Judgement(step=step, reasons=["no request failed"], measurements=[])
        record_act(service, release, Kind.STEP_PASSED, passed, f"step:{step}")
    record_act(service, release, Kind.PROMOTED, Note(reason="every step passed"))
    for place, state in enumerate(("draining", "stopped")):
        record_act(service, release, Kind.REPLICA_CHANGED, _replica(release, state), f"replica:end:{place}")
    record_act(service, release, Kind.REPLACED, Replaced(release=release))


def _replica(release: UUID, state: str) -> ReplicaChanged:
    return ReplicaChanged(
        job=release, purpose="live", replica=ReplicaReport.model_validate({"state": state, "cause": "as asked"})
    )


def _of_release(service: Service, release: UUID, target: str, bundle: str) -> fill.Model:
    old = (str(release).encode(), target.encode(), bundle.removeprefix("sha256:").encode())
    with service.database.transaction() as session:
        assert session.get_one(ReleaseRow, release).phase in {"superseded", "gated"}
        return _model(evidence.read(session, evidence.release_stream(release)), old)


def _model(rows: list[EntryRow], old: tuple[bytes, ...]) -> fill.Model:
    entries = [
        (row.act, row.kind, row.actor, fill.Envelope.model_validate_json(row.envelope).payload_bytes()) for row in rows
    ]
    return fill.Model(tuple(entries), rows[0].stream, old)


def digests(service: Service, project: UUID, limit: int) -> list[str]:
    """Return digests of bundles of the project, oldest first."""
    with service.database.transaction() as session:
        query = select(ProjectDocumentRow.digest).where(
            ProjectDocumentRow.project_id == project, ProjectDocumentRow.kind == "bundle"
        )
        return list(session.scalars(query.order_by(ProjectDocumentRow.id).limit(limit)))
