"""A runner that drains hands over what serves: another boots first, traffic moves, and only then the old one ends."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from registry import approvals, draining, failures, handover, releases, runners
from registry.auth import Actor
from registry.service import Service
from schemas.api import Act, Withdraw
from schemas.failures import Cause
from schemas.release import Phase
from schemas.runner import RunnerRegistration
from tests.support.gateway import ask_many
from tests.support.streams import Script, StreamEngine, stream_engine
from tests.support.world import FINGERPRINT, QUICK_CANARY, World, world


@pytest.fixture
def here(service: Service, actor: Actor, tmp_path: Path) -> Iterator[World]:
    with world(service, actor, tmp_path) as made:
        yield made


def another(here: World, **changes: object) -> World:
    """Return the world as a second runner sees it, which registers now."""
    body = {"name": "r2", "runner_class": "cpu", "fingerprint": FINGERPRINT, "engines": ["llamacpp"], "boot_id": "b"}
    with here.service.database.transaction() as session:
        registration = RunnerRegistration.model_validate(body | changes)
        return replace(here, runner=runners.register(session, here.actor.project_id, registration).id)


def manager(here: World) -> Actor:
    return replace(here.actor, role="manager")


def drain(here: World, name: str = "r1") -> None:
    with here.service.database.transaction() as session:
        runners.drain(session, manager(here), name, "a new driver")


def undrain(here: World, name: str = "r1") -> None:
    with here.service.database.transaction() as session:
        runners.undrain(session, manager(here), name)


def waits_for(here: World, name: str = "r1") -> list[str]:
    with here.service.database.transaction() as session:
        shown = draining.wire(session, runners.named(session, here.actor.project_id, name)).drain
    assert shown is not None
    return shown.waits_for


def test_traffic_moves_once_another_is_ready_and_then_the_old_one_ends_without_a_lost_request(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        here.live(here.bundle("chat", b"weights"), here.policy(), one)
        (old,) = here.serving_jobs()
        other = another(here)
        with here.traffic() as answers:
            drain(here)
            here.until(lambda: len(here.serving_jobs()) == 2)
            taken = other.claim()
            assert (taken.kind, taken.bundle) == ("serve", old.bundle)
            other.replica(taken, "loading", two, pid=2000)
            here.turn()
            # Nothing ends and nothing moves before another can answer.
            assert [job.is_wanted for job in here.serving_jobs()] == [True, True]
            assert waits_for(here)[0].endswith("it serves until another has taken its place, on runner r2: loading")
            assert set(ask_many(here.envoy.url(), 5).engines) == {"one"}
            other.replica(taken, "ready", two, pid=2000)
            here.until(lambda: [job.is_wanted for job in here.serving_jobs()] == [False, True])
            assert set(ask_many(here.envoy.url(), 5).engines) == {"two"}
            assert waits_for(here)[0].endswith("its open requests end, then it stops")
        assert sum(each.broken for each in answers) == 0
        assert {status for each in answers for status in each.statuses} == {200}
        here.complete_by_token(old.id, old.fencing_token)
        assert waits_for(here) == []
        here.turn()
        assert [job.id for job in here.serving_jobs()] == [taken.job]


def test_the_replica_serves_on_where_no_other_runner_fits_or_what_boots_there_fails_beside_it(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        release = here.live(here.bundle("chat", b"weights"), here.policy(), one)
        another(here, engines=["vllm"])
        drain(here)
        here.until(lambda: len(here.serving_jobs()) == 2)
        for _ in range(3):
            here.turn()
        (line,) = waits_for(here)
        assert "it serves until another has taken its place, which waits for a runner that has a processor" in line
        assert line.endswith("r2: it has vllm, and not llamacpp")
        waits = here.show(release).waits or ""
        assert re.match(r"it serves on, and runner .* drains: the replica that is to take its place has waited ", waits)
        assert set(ask_many(here.envoy.url(), 5).engines) == {"one"}
        # The drain is over: what was to take its place is not wanted any more.
        undrain(here)
        here.until(lambda: len(here.serving_jobs()) == 1)
        assert set(ask_many(here.envoy.url(), 5).engines) == {"one"}
        other = another(here)
        drain(here)
        here.until(lambda: len(here.serving_jobs()) == 2)
        job = here.serving_jobs()[-1].id
        for _ in range(4):
            claim = other.claim()
            other.complete(claim, "engine-failed", cause=Cause.UNSUPPORTED)
            with here.service.database.transaction() as session:
                row = session.get_one(type(here.serving_jobs()[0]), job)
                assert row.state == "pending"
                row.due_at = row.created_at
            here.turn()
        assert not here.show(release).held
        with here.service.database.transaction() as session:
            seen = failures.history(releases.log(session, release))
        assert (seen.failures, seen.is_over) == (0, False)
        assert set(ask_many(here.envoy.url(), 5).engines) == {"one"}
        other.serve(two, pid=2000)
        here.until(lambda: set(ask_many(here.envoy.url(), 5).engines) == {"two"})


def test_the_old_one_is_wanted_while_the_other_is_not_ready_or_the_gateway_does_not_say_that_traffic_has_moved(
    here: World,
) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        here.live(here.bundle("chat", b"weights"), here.policy(), one)
        other = another(here)
        drain(here)
        here.until(lambda: len(here.serving_jobs()) == 2)
        here.envoy.kill()
        taken = other.serve(two, pid=2000)
        here.turn()
        assert [job.is_wanted for job in here.serving_jobs()] == [True, True]

        def replaced() -> list[UUID]:
            with here.service.database.transaction() as session:
                return [job.id for job in handover.replaced(session, target, taken.job)]

        old, _ = here.serving_jobs()
        target = old.target_id
        assert target is not None
        assert replaced() == [old.id]
        other.replica(taken, "failed", two, pid=2000)
        assert replaced() == []
        other.replica(taken, "ready", two, pid=2001)
        here.envoy.restart()
        here.until(lambda: [job.is_wanted for job in here.serving_jobs()] == [False, True])


def test_where_every_runner_drains_in_turn_traffic_moves_to_one_that_does_not(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two, stream_engine("three") as three:
        here.live(here.bundle("chat", b"weights"), here.policy(), one)
        (old,) = here.serving_jobs()
        other = another(here)
        drain(here)
        here.until(lambda: len(here.serving_jobs()) == 2)
        taken = other.claim()
        other.replica(taken, "loading", two, pid=2000)
        # The drain ends and begins again, while what was booted beside has not stopped yet.
        undrain(here)
        here.turn()
        assert [job.is_wanted for job in here.serving_jobs()] == [True, False]
        drain(here)
        here.turn()
        assert [job.is_wanted for job in here.serving_jobs()] == [True, False]
        other.complete(taken)
        here.until(lambda: [job.is_wanted for job in here.serving_jobs()] == [True, True])
        taken = other.claim()
        other.replica(taken, "loading", two, pid=2001)
        # The runner where it boots drains as well, before there is anything that could take the traffic.
        drain(here, "r2")
        here.turn()
        assert [job.id for job in here.serving_jobs()] == [old.id, taken.job]
        other.replica(taken, "ready", two, pid=2001)
        here.until(lambda: len(here.serving_jobs()) == 3)
        assert [job.is_wanted for job in here.serving_jobs()] == [True, True, True]
        third = another(here, name="r3").serve(three, pid=3000)
        here.until(lambda: [job.is_wanted for job in here.serving_jobs()] == [False, False, True])
        assert here.serving_jobs()[-1].id == third.job
        assert set(ask_many(here.envoy.url(), 5).engines) == {"three"}


def test_a_canary_is_judged_and_goes_back_to_what_serves_while_the_successor_of_that_is_not_reached(
    here: World,
) -> None:
    steps = [QUICK_CANARY["steps"][0] | {"hold_seconds": "60"}, QUICK_CANARY["steps"][1]]
    with stream_engine("one") as one, stream_engine("two") as two:
        here.live(here.bundle("chat", b"weights"), here.policy(), one)
        policy = here.policy("slow", canary=QUICK_CANARY | {"steps": steps})
        release = here.release(here.bundle("next", b"other"), policy)
        here.evaluate()
        here.serve(two, pid=2000)
        here.until_phase(release, Phase.CANARY)
        here.control.gateways["local"].deadline_seconds = 1.0
        drain(here)
        here.until(lambda: len(here.serving_jobs()) == 4)
        other = another(here)
        taken = other.claim()
        assert taken.bundle == here.serving_jobs()[0].bundle
        other.replica(taken, "ready", StreamEngine("nobody", port=1), pid=3000)
        here.turn()
        assert [job.is_wanted for job in here.serving_jobs()] == [True] * 4
        assert set(ask_many(here.envoy.url(), 20).engines) == {"one", "two"}
        two.script = Script(fault="503")
        with here.traffic():
            shown = here.until_phase(release, Phase.ROLLED_BACK)
        assert "stop_condition_fired" in [entry.kind for entry in shown.log]
        assert ask_many(here.envoy.url(), 10).engines == {"one": 10}


def test_a_release_that_has_no_traffic_hands_its_replica_over_too_whether_it_is_gated_or_paused(here: World) -> None:
    kim = Actor(here.actor.project_id, "default", "kim", "manager")
    with stream_engine("one") as one, stream_engine("two") as two:
        release = here.release(here.bundle("chat", b"weights"), here.policy(approval={"required": 1}))
        here.evaluate()
        here.until_phase(release, Phase.GATED)
        with here.service.database.transaction() as session:
            approvals.approve(session, here.service, kim, release, Act(reason="as asked"))
        held = here.claim()
        with here.service.database.transaction() as session:
            approvals.withdraw(session, here.service, kim, release, Withdraw(reason="not yet"))
        here.replica(held, "ready", one)
        drain(here)
        here.until(lambda: len(here.serving_jobs()) == 2)
        other = another(here)
        taken = other.serve(two, pid=2000)
        here.until(lambda: [job.is_wanted for job in here.serving_jobs()] == [False, True])
        assert here.show(release).phase is Phase.GATED
        here.complete(held)
        assert waits_for(here) == []
        undrain(here)
        with here.service.database.transaction() as session:
            approvals.approve(session, here.service, kim, release, Act(reason="now"))
            releases.pause(session, here.service, kim, release, Act(reason="wait for me"))
        drain(here, "r2")
        here.until(lambda: len(here.serving_jobs()) == 2)
        here.serve(one, pid=3000)
        here.until(lambda: [job.is_wanted for job in here.serving_jobs()] == [False, True])
        assert here.show(release).phase is Phase.APPROVED
        other.complete(taken)
        assert waits_for(here, "r2") == []
