"""The whole life of a project on the real service and gateway, for archives: two releases, a canary taken back by a
person, a result revoked, a key rotated, checkpoints between."""

from dataclasses import replace
from pathlib import Path

from registry import approvals, auth, checkpoints, db, projects, releases, rotation, targets
from registry.auth import Actor
from registry.documents import register
from registry.service import Service
from schemas.api import Act, Revoke
from schemas.common import canonical_json
from schemas.evidence import Kind
from schemas.release import Phase
from tests.support.factories import reference_body, registered_golden
from tests.support.streams import stream_engine
from tests.support.world import World, world


def live_through(service: Service, actor: Actor, folder: Path) -> None:
    """Do it. The log then holds most kinds of entries."""
    with service.database.transaction() as session:
        project = projects.named(session, actor.project)
        auth.create_token(session, service, project, "maria", "manager", by="operator", now=db.now(session))
    with world(service, actor, folder) as stage, stream_engine("one") as one, stream_engine("two") as two:
        policy = stage.policy()
        first = stage.bundle("chat", b"first weights")
        stage.live(first, policy, one)
        checkpoints.make(service, actor.project_id, by="controller")
        _set_reference(stage, first.digest)
        reviewed = stage.policy("reviewed", approval={"required": 1})
        second = stage.release(stage.bundle("chat", b"second weights"), reviewed, "a better answer")
        stage.evaluate()
        stage.until_phase(second, Phase.GATED)
        with service.database.transaction() as session:
            other = replace(actor, name="nora")
            approvals.approve(session, service, other, second, Act(reason="read by two people"))
        stage.serve(two, pid=2000)
        stage.until_phase(second, Phase.CANARY)
        rotation.rotate(service.database, service.settings.signing_key, reason="yearly", overlap_seconds=60)
        _act(stage, releases.pause, second, "lunch")
        _act(stage, releases.resume, second, "back")
        _act(stage, releases.rollback, second, "answers in the wrong language")
        with stage.traffic():
            stage.until_phase(second, Phase.ROLLED_BACK)
        _revoke(stage, second)
        refused = stage.release(stage.bundle("chat", b"third weights"), policy)
        stage.evaluate(compatibility="failed")
        stage.until_phase(refused, Phase.REJECTED)


def _act(stage: World, act: object, release: object, reason: str) -> None:
    with stage.service.database.transaction() as session:
        act(session, stage.service, stage.actor, release, Act(reason=reason))  # type: ignore[operator] # one of four


def _set_reference(stage: World, bundle: str) -> None:
    suite = registered_golden(stage.service, stage.actor)
    raw = canonical_json(reference_body(suite, bundle))
    with stage.service.database.transaction() as session:
        reference, _ = register(session, stage.service, stage.actor, "reference", raw)
        target = targets.get(session, stage.actor.project_id, "chat@prod", lock=True)
        targets.set_reference(
            session,
            stage.service,
            target,
            suite=suite.digest,
            reference=reference.digest,
            bundle=bundle,
            actor=stage.actor.name,
            act="reference:1",
        )


def _revoke(stage: World, release: object) -> None:
    shown = stage.show(release)  # type: ignore[arg-type] # a release's id
    result = next(entry for entry in shown.log if entry.kind is Kind.GATE_RECORDED)
    body = Revoke(entry=result.entry_digest, reason="the runner was throttled")
    with stage.service.database.transaction() as session:
        releases.revoke(session, stage.service, stage.actor, body)
