"""The soak of a release: what ends it, what takes it back at its end, and whose faults count."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry import verification
from registry.auth import Actor
from registry.service import Service
from schemas.evidence import Kind
from schemas.release import Phase
from tests.support.gateway import ask_many
from tests.support.streams import Script, stream_engine
from tests.support.world import QUICK_CANARY, World, world


@pytest.fixture
def here(service: Service, actor: Actor, tmp_path: Path) -> Iterator[World]:
    with world(service, actor, tmp_path) as made:
        yield made
        with made.service.database.transaction() as session:
            found = verification.verify(session, made.actor.project_id)
        assert found.verified, found.faults


def test_what_a_release_did_in_its_soak_is_not_held_against_the_one_that_comes_back(here: World) -> None:
    soaking = QUICK_CANARY | {"soak_seconds": "60"}
    with stream_engine("one") as one, stream_engine("two") as two:
        watched = here.policy("watched", canary=QUICK_CANARY | {"soak_seconds": "5"})
        first = here.live(here.bundle("one", b"1" * 10), watched, one)
        again = here.release(here.bundle("two", b"2" * 10), here.policy("soaking", canary=soaking))
        here.evaluate()
        here.serve(two, pid=2000)
        with here.traffic():
            here.until_phase(again, Phase.PROMOTED)
        two.script = Script(fault="503")
        ask_many(here.envoy.url(), 400, concurrency=8)
        here.until_phase(again, Phase.ROLLED_BACK)
        # Nobody asks for anything, so that its arm stays in the split while its streams may be open.
        for _ in range(6):
            here.turn()
        shown = here.show(first)
        assert shown.phase is Phase.PROMOTED
        assert Kind.TRAFFIC_RESTORED not in [entry.kind for entry in shown.log]
        assert set(ask_many(here.envoy.url(), 10).engines) == {"one"}


def test_a_breach_in_a_soak_that_ended_while_the_controller_was_away_takes_traffic_back(here: World) -> None:
    brief = QUICK_CANARY | {"soak_seconds": "2"}
    with stream_engine("one") as one, stream_engine("two") as two:
        first = here.live(here.bundle("one", b"1" * 10), here.policy("first"), one)
        second = here.release(here.bundle("two", b"2" * 10), here.policy("brief", canary=brief))
        here.evaluate()
        here.serve(two, pid=2000)
        with here.traffic():
            here.until_phase(second, Phase.PROMOTED)
        two.script = Script(fault="503")
        ask_many(here.envoy.url(), 60, concurrency=4)
        time.sleep(2.5)
        shown = here.until_phase(second, Phase.ROLLED_BACK)
        assert "error_ratio" in str(shown.reason)
        assert Kind.STOP_CONDITION_FIRED in [entry.kind for entry in shown.log]
        assert here.show(first).phase is Phase.PROMOTED
