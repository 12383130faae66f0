"""Replicas that fail again and again: the release holds, says why, and goes on when one is ready."""

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from registry import db, releases
from registry.auth import Actor
from registry.service import Service
from registry.tables import JobRow
from schemas.api import Act
from schemas.evidence import Kind
from schemas.failures import Cause
from schemas.release import Phase
from tests.support.gateway import ask_many
from tests.support.streams import stream_engine
from tests.support.world import QUICK_CANARY, World, world


@pytest.fixture
def here(service: Service, actor: Actor, tmp_path: Path) -> Iterator[World]:
    with world(service, actor, tmp_path) as made:
        yield made


def due(here: World) -> None:
    """Let what waits for its next try be tried now."""
    with here.service.database.transaction() as session:
        now = db.now(session)
        for row in session.query(JobRow).filter_by(state="pending"):
            row.due_at = now


def fail(here: World, times: int) -> None:
    """Have the serve job that waits fail so often."""
    for _ in range(times):
        due(here)
        claim = here.claim()
        assert claim.kind == "serve"
        here.complete(claim, "engine-failed")


def held(here: World, release: UUID) -> list[str]:
    here.turn()
    return here.show(release).held


def test_a_release_whose_replica_fails_three_times_holds_until_a_person_lets_it_try_again(here: World) -> None:
    with stream_engine("one") as one:
        release = here.release(here.bundle("one", b"1" * 10), here.policy())
        here.evaluate()
        here.until_phase(release, Phase.APPROVED)
        fail(here, 2)
        assert held(here, release) == []
        fail(here, 1)
        here.until(lambda: bool(here.show(release).held))
        (why,) = here.show(release).held
        assert why.startswith("the replica did not become ready in 3 attempts: engine-failed: as scripted")
        with here.service.database.transaction() as session:
            releases.resume(session, here.service, here.actor, release, Act(reason="a new driver"))
        fail(here, 1)
        assert held(here, release) == []
        due(here)
        here.serve(one)
        with here.traffic():
            here.until_phase(release, Phase.PROMOTED)


def test_a_live_release_whose_replica_does_not_come_back_says_so_and_says_when_it_did(here: World) -> None:
    with stream_engine("one") as one, stream_engine("again") as again:
        release = here.live(here.bundle("one", b"1" * 10), here.policy(), one)
        (serving,) = here.serving_jobs()
        here.replica_by_token(serving.id, serving.fencing_token, "failed", one, pid=1000)
        here.complete_by_token(serving.id, serving.fencing_token)
        fail(here, 2)
        here.until(lambda: bool(here.show(release).held))
        shown = here.show(release)
        assert shown.phase is Phase.PROMOTED
        assert "did not become ready in 3 attempts" in shown.held[0]
        due(here)
        here.serve(again, pid=2000)
        here.until(lambda: not here.show(release).held)
        assert any(e.kind is Kind.RESUMED and e.actor == "controller" for e in here.show(release).log)
        here.until(lambda: set(ask_many(here.envoy.url(), 5).engines) == {"again"})


def test_a_way_back_that_does_not_boot_is_told_to_who_asked_for_it_while_what_serves_goes_on(here: World) -> None:
    policy = here.policy()
    with stream_engine("one") as one, stream_engine("two") as two:
        first = here.live(here.bundle("one", b"1" * 10), policy, one)
        (stopped,) = here.serving_jobs()
        second = here.release(here.bundle("two", b"2" * 10), policy)
        here.evaluate()
        here.serve(two, pid=2000)
        with here.traffic():
            here.until_phase(second, Phase.PROMOTED)
        here.until(here.is_settled)
        here.until(lambda: not all(job.is_wanted for job in here.serving_jobs()))
        here.complete_by_token(stopped.id, stopped.fencing_token)
        with here.service.database.transaction() as session:
            releases.rollback(session, here.service, here.actor, second, Act(reason="answers look odd"))
        fail(here, 3)
        here.until(lambda: bool(here.show(second).held))
        shown = here.show(second)
        assert shown.phase is Phase.PROMOTED
        assert "does not become ready again, in 3 attempts" in shown.held[0]
        assert set(ask_many(here.envoy.url(), 5).engines) == {"two"}
        due(here)
        here.serve(one, pid=3000)
        here.until_phase(second, Phase.ROLLED_BACK)
        assert here.show(first).phase is Phase.PROMOTED
        assert set(ask_many(here.envoy.url(), 5).engines) == {"one"}


def test_a_first_release_whose_engine_came_back_while_it_soaks_is_published_again_at_once(here: World) -> None:
    policy = here.policy("long", canary={**QUICK_CANARY, "soak_seconds": "600"})
    with stream_engine("one") as one, stream_engine("again") as again:
        release = here.release(here.bundle("one", b"1" * 10), policy)
        here.evaluate()
        here.serve(one)
        with here.traffic():
            here.until_phase(release, Phase.PROMOTED)
        (serving,) = here.serving_jobs()
        here.replica_by_token(serving.id, serving.fencing_token, "failed", one, pid=1000)
        here.complete_by_token(serving.id, serving.fencing_token)
        due(here)
        here.serve(again, pid=2000)
        here.until(lambda: set(ask_many(here.envoy.url(), 5).engines) == {"again"})
        shown = here.show(release)
        assert shown.phase is Phase.PROMOTED
        assert not here.is_settled()
        shifts = [entry.body for entry in shown.log if entry.kind is Kind.TRAFFIC_SHIFTED]
        assert [arm["weight_bp"] for arm in shifts[-1]["desired"]] == [10_000]
        assert len({shift["revision"] for shift in shifts}) == len(shifts)


def test_a_replica_that_fails_for_good_is_not_tried_again_before_a_person_lets_it(here: World) -> None:
    with stream_engine("one") as one:
        release = here.release(here.bundle("one", b"1" * 10), here.policy())
        here.evaluate()
        here.until_phase(release, Phase.APPROVED)
        due(here)
        claim = here.claim()
        here.complete(claim, "engine-failed", cause=Cause.SHAPE_MISMATCH)
        here.until(lambda: bool(here.show(release).held))
        shown = here.show(release)
        assert shown.held[0].startswith("the replica is not tried again before this is resumed: engine-failed")
        (errored,) = [entry.body for entry in shown.log if entry.kind is Kind.ATTEMPT_ERRORED]
        assert (errored["cause"], errored.get("retry_in_seconds")) == ("shape_mismatch", None)
        for _ in range(3):
            here.turn()
        assert here.serving_jobs() == []
        with here.service.database.transaction() as session:
            releases.resume(session, here.service, here.actor, release, Act(reason="other weights are in place"))
        here.serve(one)
        with here.traffic():
            here.until_phase(release, Phase.PROMOTED)
