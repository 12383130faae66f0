"""A project with a row in every table, each written by the product's own code, and all of it sealed."""

from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.orm import Session

from registry import (
    alias_patterns,
    aliases,
    auth,
    blobs,
    checkpoints,
    db,
    deletion,
    emptying,
    erasure,
    jobs,
    projects,
    quarantine,
    runners,
    runs,
    tokens,
    uploads,
)
from registry.auth import Actor
from registry.service import Service
from registry.tables import ProjectRow, ReleaseRow
from schemas.alias import AliasPatternSet, AliasSet
from schemas.api import Act, Complete, Erase, LimitsSet, RecordCreate, RunnerDrain, UploadCreate
from schemas.common import canonical_json, sha256_digest
from schemas.evidence import Decision, Kind
from schemas.runner import Claim, JobKind, Report, RunnerRegistration
from tests.support.factories import record_act, reference_body, registered_bundle, registered_golden, started_release
from tests.support.phases import let_in
from tests.support.world import FINGERPRINT

WHY = Act(reason="a test")
RECORDS = (b"what was asked first", b"what was asked then")


def fill(service: Service, actor: Actor) -> None:
    """Do all of it. The service has one connection: nothing here waits for another."""
    root = Actor(actor.project_id, actor.project, "root", "admin")
    with service.database.transaction() as session:
        _people(session, service, root)
    _bundles(service, actor)
    _work(service, actor, started_release(service, actor))
    for spare in (b"sent, and made into nothing yet", b"sent as well"):
        blobs.store(service, actor.project_id, sha256_digest(spare), [spare], limit=10**6)
    with service.database.transaction() as session:
        uploads.begin(session, service, actor, UploadCreate(digest="sha256:" + "9" * 64, size=70))
        session.execute(
            text(
                "INSERT INTO answers VALUES ('a', 'sealed', now(), now() + interval '1 day'), "
                "('b', 'other', now(), now() + interval '1 day')"
            )
        )
        doubt = "INSERT INTO blob_doubts VALUES (:digest, :project, 'runner/r1', now(), now())"
        session.execute(text(doubt), {"digest": sha256_digest(RECORDS[0]), "project": actor.project_id})


def seal(service: Service, actor: Actor) -> str:
    """Seal the log. Returns the digest of the checkpoint that somebody keeps."""
    return checkpoints.make(service, actor.project_id, by="root")[0].digest


def _people(session: Session, service: Service, root: Actor) -> None:
    project = session.get_one(ProjectRow, root.project_id)
    projects.set_limits(session, service, root, root.project, LimitsSet(bytes=10**9, jobs=4))
    now = db.now(session)
    first = auth.create_token(session, service, project, "root", "admin", by="bootstrap", now=now)
    ends: dict[str, Any] = {"expires_at": now + timedelta(days=1), "targets": ["chat@prod"]}
    auth.create_token(session, service, project, "pipeline", "ci", by="root", now=now, made_by=first.id, **ends)
    lost = auth.create_token(session, service, project, "nora", "manager", by="root", now=now)
    tokens.revoke(session, service, root, lost.id, WHY)


def _bundles(service: Service, actor: Actor) -> None:
    first = registered_bundle(service, actor, "labelled", b"one", labels={"team": "search", "stage": "trial"})
    second = registered_bundle(service, actor, "other", b"two", labels={"team": "ads"})
    gone = registered_bundle(service, actor, "gone", b"three")
    with service.database.transaction() as session:
        deletion.delete_bundle(session, service, actor, gone.digest, WHY)
        quarantine.impose(session, service, actor, second.digest, WHY)
        for name, pattern in (("prod", "prod-*"), ("trial", "trial-*")):
            aliases.put(session, service, actor, name, AliasSet(bundle=first.digest, reason="a test"))
            body = AliasPatternSet(pattern=pattern, movers="manager", reason="a test")
            alias_patterns.put(session, service, actor, body)


def _work(service: Service, actor: Actor, release: UUID) -> None:
    with service.database.transaction() as session:
        row = session.get_one(ReleaseRow, release)
        target = row.target_id
        now = db.now(session)
        common: dict[str, Any] = {"bundle": row.bundle, "policy": row.policy, "runner_class": "cpu", "release": release}
        controlled: dict[str, Any] = {"created_by": "controller", "now": now}
        jobs.create(session, actor.project_id, JobKind.EVALUATE, gates=["integrity"], **common, **controlled)
    runner = _runner(service, actor, "r1")
    held = _claimed(service, actor, runner)
    _report(service, actor, held, "staged", "staged", {"files": 1, "size": 19, "duration_ms": 3})
    _report(service, actor, held, "booted", "engine_booted", BOOTED)
    for place, raw in enumerate(RECORDS):
        _measure(service, actor, held, raw, f"integrity:{place}")
    with service.database.transaction() as session:
        jobs.complete(session, service, actor.project_id, held.job, Complete(fencing_token=held.fencing_token))
    record_act(service, release, Kind.GATES_PASSED, Decision(gates={}))
    let_in(service, release)
    with service.database.transaction() as session:
        jobs.create(session, actor.project_id, JobKind.SERVE, target=target, **common, **controlled)
    held = _claimed(service, actor, runner)
    _report(service, actor, held, "ready", "replica_changed", {**REPLICA, "address": "127.0.0.1:7001"})
    _record(service, actor, runner, target)
    with service.database.transaction() as session:
        manager = Actor(actor.project_id, actor.project, "mia", "manager")
        emptying.drain(session, service, manager, "r1", RunnerDrain(reason="it burns", force_in_seconds=600))
    _runner(service, actor, "r2")
    with service.database.transaction() as session:
        emptying.drain(session, service, manager, "r2", RunnerDrain(reason="it burns"))
        emptying.undrain(session, service, manager, "r2", "it is cold")
        results = text("SELECT entry_digest FROM entries WHERE act LIKE '%integrity:1' AND kind = 'gate_recorded'")
        entry = session.execute(results).scalar_one()
        erasure.erase(session, service, actor, Erase(entry=entry, reason="a customer asked"))


ENGINE = {"name": "llamacpp", "version": "t", "arguments": [], "model_ids": ["chat"], "context_tokens": 512}
BOOTED = {"engine": ENGINE, "fingerprint": FINGERPRINT, "runner": "r1", "ready_ms": 10}
REPLICA = {"state": "ready", "cause": "it is", "pid": 7, "start_time": "1", "boot_id": "b"}


def _runner(service: Service, actor: Actor, name: str) -> UUID:
    body = {
        "name": name,
        "runner_class": "cpu",
        "fingerprint": FINGERPRINT,
        "engines": ["llamacpp"],
        "boot_id": "b",
    } | {"slots": 8, "speaks": 1}
    with service.database.transaction() as session:
        return runners.register(session, actor.project_id, RunnerRegistration.model_validate(body)).id


def _claimed(service: Service, actor: Actor, runner: UUID) -> Claim:
    with service.database.transaction() as session:
        claim = jobs.claim(session, service, runners.get(session, actor.project_id, runner))
    assert claim is not None
    return claim


def _report(service: Service, actor: Actor, held: Claim, act: str, kind: str, body: dict[str, Any]) -> None:
    said = Report(fencing_token=held.fencing_token, act=act, kind=kind, body=body)
    with service.database.transaction() as session:
        jobs.report(session, service, actor.project_id, held.job, said)


def _measure(service: Service, actor: Actor, held: Claim, raw: bytes, act: str) -> None:
    with service.blobs.stage() as staged:
        staged.write(raw, limit=10**6)
        blobs.keep(service, actor.project_id, sha256_digest(raw), staged, is_record=True)
    result = {
        "gate": "integrity",
        "definition": "sha256:" + "d" * 64,
        "verdict": "passed",
        "summary": "it passed",
        "measurements": [],
        "findings": [],
        "records": sha256_digest(raw),
        "duration_ms": 5,
        "source": "run",
    }
    _report(service, actor, held, act, "gate_recorded", result)


def _record(service: Service, actor: Actor, runner: UUID, target: UUID) -> None:
    """Have two suites' references recorded and put in force."""
    bundle = registered_bundle(service, actor, "yardstick", b"four")
    for name in ("first", "second"):
        suite = registered_golden(service, actor, name)
        with service.database.transaction() as session:
            body = RecordCreate(suite=suite.digest, bundle=bundle.digest, target="chat@prod", reason="a test")
            runs.record(session, service, actor, body)
        held = _claimed(service, actor, runner)
        raw = canonical_json(reference_body(suite, bundle.digest))
        with service.database.transaction() as session:
            runs.store_reference(session, service, actor.project_id, held.job, held.fencing_token, raw)
            jobs.complete(session, service, actor.project_id, held.job, Complete(fencing_token=held.fencing_token))
