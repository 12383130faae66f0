"""A controller that stood still, or was overtaken by a person: the gateway is as the log says, whoever woke up late."""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gates.router import CANDIDATE, Applied, Split
from registry import releases, verification
from registry.auth import Actor
from registry.service import Service
from schemas.api import Act
from schemas.evidence import Kind
from schemas.release import Phase
from tests.support.gateway import ask_many
from tests.support.runners import until
from tests.support.streams import stream_engine
from tests.support.world import World, world
from workers import rollout
from workers.control import Control
from workers.reconcile import reconcile
from workers.traffic.envoy import EnvoyGateway
from workers.traffic.guard import DeadManSwitch

LEASE_SECONDS = 3.0


@pytest.fixture
def here(service: Service, actor: Actor, tmp_path: Path) -> Iterator[World]:
    settings = service.settings.model_copy(update={"release_lease_seconds": LEASE_SECONDS})
    with world(replace(service, settings=settings), actor, tmp_path) as made:
        yield made


class Busy:
    """The gateway's lock, held by somebody else: who wants to change the gateway stands still until it is let go."""

    def __init__(self, here: World) -> None:
        self.handle = os.open(here.envoy.gateway.lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self.handle, fcntl.LOCK_EX)

    def let_go(self) -> None:
        os.close(self.handle)


def standing(here: World, release, control: Control) -> threading.Thread:
    """Have a controller take the release on, and return once it waits for the gateway with the release in its hands."""
    thread = threading.Thread(target=reconcile, args=(control, release), kwargs={"turn_seconds": 0.0})
    thread.start()
    until(lambda: is_held(here, release), what="the claim")
    time.sleep(0.3)  # it has read what it decides by, and asks for the lock again and again
    return thread


def is_held(here: World, release) -> bool:
    with here.service.database.transaction() as session:
        return releases.get(session, here.actor.project_id, release).lease_until is not None


def ready_candidate(here: World, one, two):
    """A live bundle, and an approved release of another one whose replica is ready: the next look moves traffic."""
    here.live(here.bundle("one", b"1" * 10), here.policy(), one)
    second = here.release(here.bundle("two", b"2" * 10), here.policy())
    here.evaluate()
    here.until_phase(second, Phase.APPROVED)
    here.turn()
    claim = here.claim()
    here.replica(claim, "ready", two, pid=2000)
    return second


def assert_sound(here: World) -> None:
    """Weights in force are those that were recorded last, and the log verifies."""

    def in_force() -> dict[str, int]:
        split = here.envoy.gateway.desired(here.name)
        return {arm.cluster.split("/")[1]: arm.weight_bp for arm in split.arms if arm.weight_bp} if split else {}

    def recorded() -> dict[str, int]:
        return {arm.bundle[7:19]: arm.weight_bp for arm in here.target().applied if arm.weight_bp}

    ends = time.monotonic() + 5
    while in_force() != recorded() and time.monotonic() < ends:
        here.turn()
    assert in_force() == recorded()
    with here.service.database.transaction() as session:
        found = verification.verify(session, here.actor.project_id)
    assert found.verified, found.faults


def test_a_controller_that_stood_still_past_its_lease_moves_no_traffic_and_another_one_does(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        second = ready_candidate(here, one, two)
        before = here.envoy.gateway.desired(here.name)
        busy = Busy(here)
        late = standing(here, second, Control.build(here.service, here.rung.append))
        # Its lease runs out, and a person rejects the release, while it waits for its turn at the gateway.
        until(lambda: here.control.revive() == 1, what="the end of its lease")
        with here.service.database.transaction() as session:
            releases.reject(session, here.service, here.actor, second, Act(reason="wrong weights"))
        busy.let_go()
        late.join(20)
        assert here.envoy.gateway.desired(here.name) == before
        here.until(lambda: not any(job.is_wanted for job in here.serving_jobs() if job.release_id == second))
        assert here.show(second).phase is Phase.REJECTED
        assert set(ask_many(here.envoy.url(), 20).engines) == {"one"}
        assert_sound(here)


def test_traffic_that_moved_while_a_person_rejected_the_release_goes_back_at_once(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        second = ready_candidate(here, one, two)
        busy = Busy(here)
        moving = standing(here, second, here.control)
        with here.service.database.transaction() as session:
            releases.reject(session, here.service, here.actor, second, Act(reason="wrong weights"))
        busy.let_go()
        moving.join(20)
        here.until(lambda: not any(job.is_wanted for job in here.serving_jobs() if job.release_id == second))
        shown = here.show(second)
        assert shown.phase is Phase.REJECTED
        split = here.envoy.gateway.desired(here.name)
        assert split is not None
        assert split.weight_bp(CANDIDATE) == 0
        assert set(ask_many(here.envoy.url(), 20).engines) == {"one"}
        assert_sound(here)


def test_two_controllers_that_are_told_of_one_release_again_and_again_do_each_thing_once(here: World) -> None:
    others = [here.control, Control.build(here.service, here.rung.append)]
    with stream_engine("one") as one, stream_engine("two") as two:
        second = ready_candidate(here, one, two)
        with here.traffic():
            ends = [False]

            def deliver(control: Control) -> None:
                while not ends[0]:
                    reconcile(control, second, turn_seconds=0.2)

            threads = [threading.Thread(target=deliver, args=(control,)) for control in others for _ in range(2)]
            for thread in threads:
                thread.start()
            try:
                here.until(lambda: here.show(second).phase is Phase.PROMOTED)
            finally:
                ends[0] = True
                for thread in threads:
                    thread.join(20)
        kinds = [entry.kind for entry in here.show(second).log]
        assert [kinds.count(kind) for kind in (Kind.TRAFFIC_SHIFTED, Kind.STEP_PASSED, Kind.PROMOTED)] == [2, 2, 1]
        here.until(here.is_settled)
        assert_sound(here)


def killed_after(here: World, release, point: str) -> None:
    """A controller that dies right after it has prepared the way back, or has moved traffic: nothing more is done."""

    class Dead(BaseException):
        """It is gone: no handler of the product's sees this."""

    class Dying(EnvoyGateway):
        def prepare_rollback(self, *words: Any, **named: Any) -> None:
            super().prepare_rollback(*words, **named)
            if point == "prepared":
                raise Dead

        def apply(self, split: Split) -> Applied:
            super().apply(split)
            raise Dead

    control = Control.build(here.service, here.rung.append)
    gateway = here.envoy.gateway
    control.gateways["local"] = Dying(gateway.directory, port=gateway.port)
    held = control.claim(release)
    assert held is not None
    with pytest.raises(Dead):
        rollout.begin(control, held)


def test_traffic_that_a_dead_controller_moved_is_recorded_and_watched_by_the_next_one(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        second = ready_candidate(here, one, two)
        killed_after(here, second, "published")
        assert here.show(second).phase is Phase.APPROVED
        shown = here.until_phase(second, Phase.CANARY, seconds=3 * LEASE_SECONDS)
        assert [entry.kind for entry in shown.log].count(Kind.TRAFFIC_SHIFTED) == 1
        assert shown.weight_bp == 5000
        assert_sound(here)


def test_traffic_that_a_dead_controller_moved_goes_back_when_a_person_rejected_the_release_meanwhile(
    here: World,
) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        second = ready_candidate(here, one, two)
        killed_after(here, second, "published")
        with here.service.database.transaction() as session:
            releases.reject(session, here.service, here.actor, second, Act(reason="wrong weights"))
        here.until(lambda: not any(job.is_wanted for job in here.serving_jobs() if job.release_id == second))
        shown = here.show(second)
        assert shown.phase is Phase.REJECTED
        assert shown.log[-1].body["problem"] == "traffic-unrecorded"
        assert set(ask_many(here.envoy.url(), 20).engines) == {"one"}
        assert_sound(here)


@pytest.mark.parametrize("why", ["its replica is dead too", "a person paused it"])
def test_traffic_that_a_dead_controller_moved_goes_back_when_it_should_not_be_there(here: World, why: str) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        second = ready_candidate(here, one, two)
        killed_after(here, second, "published")
        if why == "a person paused it":
            with here.service.database.transaction() as session:
                releases.pause(session, here.service, here.actor, second, Act(reason="lunch"))
        else:
            job = next(job for job in here.serving_jobs() if job.release_id == second)
            here.replica_by_token(job.id, job.fencing_token, "failed", two, pid=2000)
        here.until(lambda: any(entry.kind is Kind.ATTEMPT_ERRORED for entry in here.show(second).log))
        shown = here.show(second)
        assert shown.phase is Phase.APPROVED
        assert shown.log[-1].body["problem"] == "traffic-unrecorded"
        assert set(ask_many(here.envoy.url(), 20).engines) == {"one"}
        assert_sound(here)


@pytest.mark.parametrize("point", ["prepared", "published"])
def test_a_switch_that_fired_before_the_first_traffic_was_recorded_is_told_and_the_release_goes_on(
    here: World, point: str
) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        second = ready_candidate(here, one, two)
        killed_after(here, second, point)
        switch = DeadManSwitch(here.envoy.gateway, monotonic=0.0)
        assert switch.check(monotonic=1000.0, now=datetime.now(UTC)) is not None
        assert set(ask_many(here.envoy.url(), 20).engines) == {"one"}
        with here.traffic():
            here.until_phase(second, Phase.PROMOTED)
        said = [entry.body["problem"] for entry in here.show(second).log if entry.kind is Kind.ATTEMPT_ERRORED]
        assert said == ["controller-lost"]
        assert here.envoy.gateway.take_notice() is None
        here.until(here.is_settled)
        assert_sound(here)
