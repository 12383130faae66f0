"""What releases do when their bundle is quarantined: rejected without traffic, taken back with some, left when live."""

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import update

from gates.router import CANDIDATE
from registry import acts, approvals, db, quarantine, releases, verification
from registry.auth import Actor
from registry.service import Service
from registry.tables import ProjectDocumentRow
from schemas.api import Act, Approve
from schemas.evidence import Kind
from schemas.problems import BundleQuarantined
from schemas.release import Phase
from tests.support.gateway import ask_many
from tests.support.streams import StreamEngine, stream_engine
from tests.support.world import QUICK_CANARY, World, world
from workers.facts import gather
from workers.restores import restore

WHY = "its publisher withdrew it"
LONG = {**QUICK_CANARY, "steps": [{**step, "hold_seconds": "40"} for step in QUICK_CANARY["steps"]]}


@pytest.fixture
def here(service: Service, actor: Actor, tmp_path: Path) -> Iterator[World]:
    with world(service, actor, tmp_path) as made:
        yield made


def impose(here: World, bundle: str) -> None:
    acts.perform(
        here.service, lambda session: quarantine.impose(session, here.service, here.actor, bundle, Act(reason=WHY))
    )


def lift(here: World, bundle: str) -> None:
    acts.perform(
        here.service, lambda session: quarantine.lift(session, here.service, here.actor, bundle, Act(reason="sound"))
    )


def why(here: World, release: UUID, kind: Kind) -> dict[str, object]:
    return next(entry.body for entry in here.show(release).log if entry.kind is kind)


def assert_refused(here: World, release: UUID) -> None:
    shown = here.until_phase(release, Phase.REJECTED)
    assert shown.quarantined == [f"{here.actor.name}: {WHY}"]
    body = why(here, release, Kind.REFUSED)
    assert body["cause"] == "bundle_quarantined"
    assert body["reasons"] == [f"the bundle is quarantined: {here.actor.name}: {WHY}"]


def test_a_release_without_traffic_is_rejected_in_whatever_phase_it_waits(here: World) -> None:
    bundle = here.bundle("a", b"1" * 10)
    policy, asking = here.policy(), here.policy("asking", approval={"required": 1})

    waiting = here.release(bundle, policy)
    here.turn()
    with here.service.database.transaction() as session:
        releases.pause(session, here.service, here.actor, waiting, Act(reason="lunch"))
    here.turn()
    impose(here, bundle.digest)  # a paused one, too, and nobody takes its job
    assert_refused(here, waiting)
    lift(here, bundle.digest)

    gated = here.release(bundle, asking)
    here.evaluate()
    here.until_phase(gated, Phase.GATED)
    impose(here, bundle.digest)
    with here.service.database.transaction() as session, pytest.raises(BundleQuarantined):
        approvals.approve(
            session, here.service, Actor(here.actor.project_id, "default", "kim", "manager"), gated, Approve(reason="x")
        )
    assert_refused(here, gated)
    lift(here, bundle.digest)

    approved = here.release(bundle, policy)
    here.evaluate()
    here.until_phase(approved, Phase.APPROVED)
    impose(here, bundle.digest)
    assert_refused(here, approved)
    here.until(lambda: not here.serving_jobs())
    lift(here, bundle.digest)

    undriven = here.release(bundle, policy)
    here.evaluate()
    here.until_phase(undriven, Phase.APPROVED)
    gateways = here.control.gateways.copy()
    here.control.gateways.clear()  # nobody here drives its gateway: that keeps it from traffic, and from nothing else
    here.turn()
    impose(here, bundle.digest)
    assert_refused(here, undriven)
    here.control.gateways.update(gateways)
    here.until(lambda: not here.serving_jobs())
    lift(here, bundle.digest)

    failed = here.release(bundle, policy)
    here.evaluate(integrity="failed")
    shown = here.until_phase(failed, Phase.REJECTED)
    assert shown.quarantined == ["integrity failed: integrity said failed"]
    with pytest.raises(BundleQuarantined, match="integrity failed"):
        here.release(bundle, policy)


def until_heard_of(here: World) -> None:
    """Wait until the gateway hears that a controller lives: else it would take traffic back by itself."""
    heartbeat = here.envoy.gateway.heartbeat(here.name)
    before = heartbeat.stat().st_mtime_ns
    here.until(lambda: heartbeat.stat().st_mtime_ns > before)


def test_a_way_back_that_is_quarantined_while_it_boots_is_passed_by_and_traffic_is_recorded_where_it_went(
    here: World,
) -> None:
    def became_live(name: str, engine: StreamEngine) -> UUID:
        release = here.live(here.bundle(name, name.encode()), here.policy(), engine)
        for job in here.serving_jobs():
            if not job.is_wanted:
                here.complete_by_token(job.id, job.fencing_token)
        return release

    def deleted(is_deleted: bool) -> None:
        """As though two who deleted bundles, and one who quarantined one, had not seen each other."""
        with here.service.database.transaction() as session:
            members = update(ProjectDocumentRow).where(ProjectDocumentRow.digest.in_([oldest, poisoned]))
            session.execute(members.values(deleted_at=db.now(session) if is_deleted else None))

    with stream_engine("zero") as zero, stream_engine("one") as one, stream_engine("two") as two:
        first, second, third = became_live("zero", zero), became_live("one", one), became_live("two", two)
        oldest, poisoned = here.show(first).bundle, here.show(second).bundle
        with here.service.database.transaction() as session:
            releases.rollback(session, here.service, here.actor, third, Act(reason="bad answers"))
        deleted(True)
        here.until(lambda: bool(here.show(third).held))  # nobody said that nothing may serve
        assert "--to-nothing" in here.show(third).held[0]
        assert set(ask_many(here.envoy.url(), 10).engines) == {"two"}
        until_heard_of(here)
        deleted(False)
        here.until(lambda: poisoned in [job.bundle for job in here.serving_jobs()])
        until_heard_of(here)
        impose(here, poisoned)
        here.until(lambda: oldest in [job.bundle for job in here.serving_jobs()])
        assert poisoned not in [job.bundle for job in here.serving_jobs() if job.is_wanted]
        claim = here.claim()
        assert claim.bundle == oldest
        here.replica(claim, "ready", zero, pid=77)
        # A worker has looked, and moves traffic by what it saw; the quarantine is lifted between the two.
        held = here.control.claim(third)
        assert held is not None
        facts = gather(here.control, held)
        lift(here, poisoned)
        restore(here.control, held, facts, cause="requested", reasons=["bad answers"])
        here.control.let_go(held, due_in_seconds=0.0)
        assert [here.show(one).phase for one in (first, second, third)] == [
            Phase.PROMOTED,
            Phase.SUPERSEDED,
            Phase.ROLLED_BACK,
        ]
        assert why(here, third, Kind.TRAFFIC_RESTORED)["desired"][0]["bundle"] == oldest
        assert set(ask_many(here.envoy.url(), 10).engines) == {"zero"}
    with here.service.database.transaction() as session:
        found = verification.verify(session, here.actor.project_id)
    assert found.verified, found.faults


def test_traffic_is_taken_back_from_a_canary_and_in_a_soak_and_what_is_live_serves_on(here: World) -> None:
    quick, slow = here.policy(), here.policy("slow", canary=LONG)
    soaking = here.policy("soaking", canary={**QUICK_CANARY, "soak_seconds": "60"})
    with stream_engine("one") as one, stream_engine("two") as two:
        first = here.live(here.bundle("one", b"1" * 10), quick, one)
        bundle = here.bundle("two", b"2" * 10)

        canary = here.release(bundle, slow)
        here.evaluate()
        here.serve(two, pid=2000)
        here.until_phase(canary, Phase.CANARY)
        impose(here, bundle.digest)
        here.until_phase(canary, Phase.ROLLED_BACK)
        restored = why(here, canary, Kind.TRAFFIC_RESTORED)
        assert restored["cause"] == "bundle_quarantined"
        assert restored["reasons"] == [f"the bundle is quarantined: {here.actor.name}: {WHY}"]
        assert set(ask_many(here.envoy.url(), 10).engines) == {"one"}
        assert here.show(first).phase is Phase.PROMOTED
        here.until(lambda: [job.bundle for job in here.serving_jobs() if job.is_wanted] == [here.show(first).bundle])
        lift(here, bundle.digest)
        for job in here.serving_jobs():
            if job.bundle == bundle.digest:
                here.complete_by_token(job.id, job.fencing_token)

        soaked = here.release(bundle, soaking)
        here.evaluate()
        here.serve(two, pid=3000)
        with here.traffic():
            here.until_phase(soaked, Phase.PROMOTED)
        impose(here, bundle.digest)
        here.until_phase(soaked, Phase.ROLLED_BACK)
        assert why(here, soaked, Kind.TRAFFIC_RESTORED)["cause"] == "bundle_quarantined"
        assert here.show(first).phase is Phase.PROMOTED
        here.until(here.is_settled)

        impose(here, here.show(first).bundle)
        for _ in range(3):
            here.turn()
        assert here.show(first).phase is Phase.PROMOTED
        assert here.target().quarantined == [f"{here.actor.name}: {WHY}"]
        assert set(ask_many(here.envoy.url(), 10).engines) == {"one"}
        split = here.envoy.gateway.desired(here.name)
        assert split is not None
        assert split.arm(CANDIDATE) is None
    with here.service.database.transaction() as session:
        found = verification.verify(session, here.actor.project_id)
    assert found.verified, found.faults
