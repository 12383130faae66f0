"""Who says that a target is to serve nothing gets that at once, whatever there is to go back to."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest

from registry import db, releases, targets, verification
from registry.auth import Actor
from registry.service import Service
from registry.tables import JobRow, ReleaseRow
from schemas.api import Act, RollBack
from schemas.evidence import Kind, Traffic
from schemas.holds import Hold, holds, way_out
from schemas.problems import Conflict
from schemas.release import Phase
from tests.support.gateway import ask_many
from tests.support.streams import StreamEngine, stream_engine
from tests.support.world import QUICK_CANARY, World, world
from workers.facts import gather
from workers.restores import restore
from workers.traffic.guard import DeadManSwitch

STEP = {"weight_bp": 5000, "hold_seconds": "600", "min_requests": 29, "max_seconds": "6000"}
SLOW = QUICK_CANARY | {"steps": [STEP, STEP | {"weight_bp": 10_000}]}
SOAKING = QUICK_CANARY | {"soak_seconds": "600"}
WHY = "it leaks names"


@pytest.fixture
def here(service: Service, actor: Actor, tmp_path: Path) -> Iterator[World]:
    with world(service, actor, tmp_path) as made:
        yield made
        with made.service.database.transaction() as session:
            found = verification.verify(session, made.actor.project_id)
        assert found.verified, found.faults


def roll_back(here: World, release: UUID, *, to_nothing: bool, name: str = "kim") -> None:
    with here.service.database.transaction() as session:
        kim = Actor(here.actor.project_id, "default", name, "manager")
        said = RollBack(reason=WHY, to_nothing=True) if to_nothing else Act(reason="wrong language")
        releases.rollback(session, here.service, kim, release, said)


def two_live(here: World, one: StreamEngine, two: StreamEngine, *, is_warm: bool) -> tuple[UUID, UUID]:
    """Have a second release live over a first, whose replica is kept in its soak, or gone."""
    first = here.live(here.bundle("one", b"1" * 10), here.policy(), one)
    (before,) = here.serving_jobs()
    policy = here.policy("soaking", canary=SOAKING) if is_warm else here.policy()
    second = here.release(here.bundle("two", b"2" * 10), policy)
    here.evaluate()
    here.serve(two, pid=2000)
    with here.traffic():
        here.until_phase(second, Phase.PROMOTED)
    if not is_warm:
        here.until(here.is_settled)
        here.until(lambda: not all(job.is_wanted for job in here.serving_jobs()))
        here.complete_by_token(before.id, before.fencing_token)
    return first, second


def assert_nothing_serves(here: World, first: UUID, second: UUID) -> None:
    """What was asked is done, said, and stays so."""
    shown = here.show(second)
    (asked,) = [entry for entry in shown.log if entry.kind is Kind.ROLLBACK_REQUESTED and entry.body.get("to_nothing")]
    assert (asked.actor, asked.body) == ("kim", {"reason": WHY, "to_nothing": True})
    (body,) = [entry.body for entry in shown.log if entry.kind is Kind.TRAFFIC_RESTORED]
    restored = Traffic.model_validate(body)
    assert (restored.desired, restored.cause) == ([], "requested")
    assert restored.reasons is not None
    assert restored.reasons[0] == f"kim: {WHY}"
    assert "serves nothing" in restored.reasons[1]
    here.until(lambda: not any(job.is_wanted for job in here.serving_jobs()))
    for _ in range(3):
        here.turn()
    assert here.show(first).phase is Phase.SUPERSEDED
    assert (here.target().stable_release, here.target().applied) == (None, [])
    assert not here.envoy.gateway.is_prepared(here.name)
    here.until(lambda: ask_many(here.envoy.url(), 5).statuses[503] == 5)


def test_an_order_to_nothing_waits_for_no_earlier_version_that_does_not_boot(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two, stream_engine("three") as three:
        first, second = two_live(here, one, two, is_warm=False)
        began = here.release(here.bundle("three", b"3" * 10), here.policy())
        here.evaluate()
        here.until_phase(began, Phase.APPROVED)
        here.turn()
        waiting = here.claim()
        roll_back(here, second, to_nothing=False, name="lee")
        back = here.claim()
        assert back.bundle == here.show(first).bundle
        with here.service.database.transaction() as session:
            job = session.get_one(JobRow, back.job)
            job.attempt, job.problem = 3, "it does not boot"
        here.until(lambda: bool(here.show(second).held))
        shown = here.show(second)
        assert "does not become ready again, in 3 attempts: it does not boot" in shown.held[0]
        command = f"`sluicegate release rollback {second} --to-nothing --reason …`"
        assert command in shown.held[0]
        assert (holds(shown), command in str(way_out(shown))) == ([Hold.WAY_BACK_FAILED], True)
        assert set(ask_many(here.envoy.url(), 5).engines) == {"two"}

        roll_back(here, second, to_nothing=True)
        here.until_phase(second, Phase.ROLLED_BACK)
        here.until(lambda: not here.is_wanted(back))
        assert here.is_wanted(waiting)
        # What began beside it goes on as the first release of a target does: nothing is behind it.
        with here.service.database.transaction() as session:
            assert targets.way_back(session, session.get_one(ReleaseRow, began)) is None
        here.replica(waiting, "ready", three, pid=3000)
        with here.traffic():
            here.until_phase(began, Phase.PROMOTED)
        here.until(here.is_settled)
        assert set(ask_many(here.envoy.url(), 10).engines) == {"three"}
        assert here.show(first).phase is Phase.SUPERSEDED


def test_an_order_to_nothing_passes_by_an_earlier_version_that_is_warm(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        first, second = two_live(here, one, two, is_warm=True)
        assert here.envoy.gateway.is_prepared(here.name)
        roll_back(here, second, to_nothing=True)
        roll_back(here, second, to_nothing=True)
        here.until_phase(second, Phase.ROLLED_BACK)
        assert_nothing_serves(here, first, second)


def test_an_order_to_nothing_that_comes_while_traffic_goes_back_is_carried_out_next(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        first, second = two_live(here, one, two, is_warm=True)
        roll_back(here, second, to_nothing=False, name="lee")
        here.control.revive()
        held = here.control.claim(second)
        assert held is not None
        facts = gather(here.control, held)
        roll_back(here, second, to_nothing=True)
        restore(here.control, held, facts, cause="requested", reasons=["lee: wrong language"])
        here.control.let_go(held, due_in_seconds=0.0)
        # What served for a moment is told, and the release is not over before the order is carried out.
        shown = here.show(second)
        assert (shown.phase, here.show(first).phase) == (Phase.PROMOTED, Phase.SUPERSEDED)
        passed = Traffic.model_validate([e.body for e in shown.log if e.kind is Kind.TRAFFIC_SHIFTED][-1])
        assert [arm.bundle for arm in passed.desired if arm.weight_bp] == [here.show(first).bundle]
        here.until_phase(second, Phase.ROLLED_BACK)
        assert_nothing_serves(here, first, second)


def test_an_order_to_nothing_is_carried_out_where_the_switch_has_gone_back_meanwhile(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        first, second = two_live(here, one, two, is_warm=True)
        roll_back(here, second, to_nothing=True)
        # No controller lives, and the switch knows nothing of what people say.
        switch = DeadManSwitch(here.envoy.gateway, monotonic=0.0)
        assert switch.check(monotonic=1000.0, now=datetime.now(UTC)) is not None
        assert set(ask_many(here.envoy.url(), 5).engines) == {"one"}
        shown = here.until_phase(second, Phase.ROLLED_BACK)
        passed = Traffic.model_validate([e.body for e in shown.log if e.kind is Kind.TRAFFIC_SHIFTED][-1])
        assert passed.cause == "controller_lost"
        assert [arm.bundle for arm in passed.desired if arm.weight_bp] == [here.show(first).bundle]
        assert here.envoy.gateway.take_notice() is None
        assert_nothing_serves(here, first, second)


def test_a_way_back_that_no_runner_takes_is_told_with_what_helps(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        first, second = two_live(here, one, two, is_warm=False)
        roll_back(here, second, to_nothing=False)
        bundle = here.show(first).bundle
        here.until(lambda: bundle in [job.bundle for job in here.serving_jobs()])
        here.turn()
        assert here.show(second).held == []
        with here.service.database.transaction() as session:
            for row in session.query(JobRow).filter_by(state="pending"):
                row.due_at = db.now(session) - timedelta(minutes=2)
        here.until(lambda: bool(here.show(second).held))
        (why,) = here.show(second).held
        assert "its job waits for a runner of class cpu to take it" in why
        assert "--to-nothing" in why
        here.serve(one, pid=3000)
        here.until_phase(second, Phase.ROLLED_BACK)
        assert here.show(first).phase is Phase.PROMOTED


def test_a_canary_beside_a_live_release_is_not_taken_back_to_nothing_alone(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        first = here.live(here.bundle("one", b"1" * 10), here.policy(), one)
        second = here.release(here.bundle("two", b"2" * 10), here.policy("slow", canary=SLOW))
        here.evaluate()
        here.serve(two, pid=2000)
        here.until_phase(second, Phase.CANARY)
        with pytest.raises(Conflict, match="would serve on") as told:
            roll_back(here, second, to_nothing=True)
        assert f"`sluicegate release rollback {second} --reason …`, then" in told.value.detail
        assert f"`sluicegate release rollback {first} --to-nothing --reason …`" in told.value.detail
        roll_back(here, second, to_nothing=False)
        here.until_phase(second, Phase.ROLLED_BACK)
        roll_back(here, first, to_nothing=True)
        here.until_phase(first, Phase.ROLLED_BACK)
        here.until(lambda: ask_many(here.envoy.url(), 5).statuses[503] == 5)
