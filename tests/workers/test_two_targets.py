"""Two targets behind one gateway: what is done for one says nothing of the other."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest

from gates.router import CANDIDATE
from registry import releases, verification
from registry.auth import Actor
from registry.service import Service
from schemas.api import Act
from schemas.evidence import Kind
from schemas.release import Phase
from tests.support.gateway import ask_many
from tests.support.streams import stream_engine
from tests.support.world import QUICK_CANARY, World, world
from workers.reconcile import reconcile
from workers.sweep import sweep
from workers.traffic.guard import DeadManSwitch

STEP = {"weight_bp": 5000, "hold_seconds": "600", "min_requests": 29, "max_seconds": "6000"}
SLOW = QUICK_CANARY | {"steps": [STEP, STEP | {"weight_bp": 10_000}], "dead_man_seconds": "16"}


@pytest.fixture
def here(service: Service, actor: Actor, tmp_path: Path) -> Iterator[World]:
    with world(service, actor, tmp_path) as made:
        yield made
        with made.service.database.transaction() as session:
            found = verification.verify(session, made.actor.project_id)
        assert found.verified, found.faults


def moving(stage: World, one: object, two: object, pid: int) -> UUID:
    """A canary of the target whose step lasts, beside what is live."""
    stage.live(stage.bundle("one", b"1" * 10), stage.policy("first"), one)  # type: ignore[arg-type] # an engine
    release = stage.release(stage.bundle("two", b"2" * 10), stage.policy("slow", canary=SLOW))
    stage.evaluate()
    stage.serve(two, pid=pid)  # type: ignore[arg-type] # an engine
    stage.until_phase(release, Phase.CANARY)
    return release


def test_a_canary_that_nobody_looks_at_goes_back_although_another_targets_is_looked_at(here: World) -> None:
    other = here.beside("code@prod")
    with stream_engine("one") as one, stream_engine("two") as two:
        unseen, seen = moving(here, one, two, 2000), moving(other, one, two, 5000)
        began = time.monotonic()
        switch = DeadManSwitch(here.envoy.gateway, monotonic=began)
        # A second here is ten for the switch, so that a look a second is one in ten seconds of its own.
        while switch.check(monotonic=began + 10 * (time.monotonic() - began), now=datetime.now(UTC)) is None:
            assert time.monotonic() < began + 10, "one target's looks kept the other's traffic alive"
            found: list[UUID] = []
            sweep(here.control, found.append)
            for release in found:
                if release == seen:
                    reconcile(here.control, release, turn_seconds=0.0)
            time.sleep(0.05)
        assert set(ask_many(here.envoy.url(), 10).engines) == {"one"}
        shown = here.until_phase(unseen, Phase.ROLLED_BACK)
        told = next(entry.body for entry in shown.log if entry.kind is Kind.TRAFFIC_RESTORED)
        assert told["cause"] == "controller_lost"
        here.until(lambda: here.envoy.gateway.take_notice() is None)


def test_a_release_that_waits_without_traffic_takes_no_other_targets_back(here: World) -> None:
    other = here.beside("code@prod")
    with stream_engine("one") as one, stream_engine("two") as two:
        seen = moving(other, one, two, 5000)
        here.live(here.bundle("one", b"1" * 10), here.policy("first"), one)
        waiting = here.release(here.bundle("two", b"2" * 10), here.policy("slow", canary=SLOW))
        here.evaluate()
        here.until_phase(waiting, Phase.APPROVED)
        with here.service.database.transaction() as session:
            releases.pause(session, here.service, here.actor, waiting, Act(reason="lunch"))
        # What a controller leaves that failed between preparing the way back and moving traffic.
        split = here.envoy.gateway.desired(here.name)
        assert split is not None
        here.envoy.gateway.prepare_rollback(here.name, split.arms, silence_seconds=16)
        here.until(lambda: not here.envoy.gateway.is_prepared(here.name))
        assert here.envoy.gateway.is_prepared(other.name)
        kept = here.envoy.gateway.desired(other.name)
        assert kept is not None
        assert kept.weight_bp(CANDIDATE) == 5000
        assert here.show(seen).phase is Phase.CANARY
