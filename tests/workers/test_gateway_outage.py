"""A gateway that dies, or cannot be asked, while a release moves: nothing passes on what nobody could see."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import update

from gates import canary
from gates.router import Split
from registry import releases
from registry.auth import Actor
from registry.service import Service
from registry.tables import ReleaseRow
from schemas.api import Act
from schemas.evidence import Judgement, Kind, Traffic
from schemas.release import Phase
from tests.support.gateway import TARGET, ask_many
from tests.support.streams import Script, StreamEngine, stream_engine
from tests.support.world import QUICK_CANARY, World, world
from workers import holds
from workers.traffic.envoy import EnvoyGateway

HOLD_SECONDS = 1.5


@pytest.fixture
def here(service: Service, actor: Actor, tmp_path: Path) -> Iterator[World]:
    with world(service, actor, tmp_path) as made:
        yield made


@pytest.fixture
def engines() -> Iterator[tuple[StreamEngine, StreamEngine]]:
    with stream_engine("one") as one, stream_engine("two") as two:
        yield one, two


def in_canary(here: World, one: StreamEngine, two: StreamEngine) -> tuple[UUID, UUID]:
    """A successor in its first step, at half of the traffic, which it may leave after `HOLD_SECONDS`."""
    steps: list[dict[str, Any]] = [step | {"hold_seconds": str(HOLD_SECONDS)} for step in QUICK_CANARY["steps"]]
    first = here.live(here.bundle("one", b"1" * 10), here.policy(), one)
    policy = here.policy("slower", canary=QUICK_CANARY | {"steps": steps})
    second = here.release(here.bundle("two", b"2" * 10), policy)
    here.evaluate()
    here.serve(two, pid=2000)
    here.until_phase(second, Phase.CANARY)
    return first, second


def kinds(here: World, release: UUID) -> list[Kind]:
    return [entry.kind for entry in here.show(release).log]


def assert_blind(here: World, release: UUID) -> None:
    """A controller that cannot read what happens says so on the release, and does not show that it lives: so traffic
    goes back by the switch."""
    path, heartbeat = here.envoy.gateway.log.path, here.envoy.gateway.heartbeat(here.name)
    aside = path.rename(path.with_name("aside"))
    path.mkdir()
    before = heartbeat.stat().st_mtime_ns
    here.until(lambda: Kind.ATTEMPT_ERRORED in kinds(here, release))
    here.turn()
    assert heartbeat.stat().st_mtime_ns == before
    (told,) = (entry.body for entry in here.show(release).log if entry.kind is Kind.ATTEMPT_ERRORED)
    assert told["problem"] == "unavailable"
    assert told["detail"] == f"the controller's machine refuses: Is a directory: {path.name}"
    path.rmdir()
    aside.rename(path)
    here.until(lambda: heartbeat.stat().st_mtime_ns > before)


@pytest.mark.parametrize("is_same_worker", [True, False], ids=["the same worker", "another worker"])
def test_a_step_begins_anew_when_the_gateway_was_killed_in_it(
    here: World, engines: tuple[StreamEngine, StreamEngine], is_same_worker: bool
) -> None:
    one, two = engines
    _, second = in_canary(here, one, two)
    # Enough for the step, but for its hold. Then streams are cut, and no line of the log ever says so.
    assert ask_many(here.envoy.url(), 100).engines["two"] >= 29
    here.turn()
    here.envoy.kill()
    here.envoy.restart()
    restarted_at = datetime.now(UTC)
    if not is_same_worker:
        here.control.watches.clear()
    while (datetime.now(UTC) - restarted_at).total_seconds() < HOLD_SECONDS + 1:
        here.turn()
        time.sleep(0.1)
    shown = here.show(second)
    assert (shown.phase, shown.step, shown.held) == (Phase.CANARY, 0, [])
    assert Kind.STEP_PASSED not in kinds(here, second)
    with here.traffic():
        here.until_phase(second, Phase.PROMOTED)
    passed = next(entry for entry in here.show(second).log if entry.kind is Kind.STEP_PASSED)
    assert Judgement.model_validate(passed.body).step == 0
    assert passed.recorded_at > restarted_at


def test_a_gateway_that_cannot_be_asked_lets_nothing_pass_and_the_release_holds_and_says_why(
    here: World, engines: tuple[StreamEngine, StreamEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "STALE_SECONDS", 3.0)
    here.control.gateways["local"].deadline_seconds = 1.0
    one, two = engines
    first, second = in_canary(here, one, two)
    gateway = here.envoy.gateway
    assert_blind(here, second)
    socket = gateway.admin.path
    socket.unlink()
    with here.traffic():
        here.until(lambda: bool(here.show(second).held))
        shown = here.show(second)
        assert (shown.phase, shown.step) == (Phase.CANARY, 0)
        assert Kind.STEP_PASSED not in kinds(here, second)
        (reason,) = shown.held
        assert reason.startswith("the gateway has not answered for ")
        assert str(socket) in reason
        # Nor does a person's word replace what nobody can see, whichever worker looks.
        kim = Actor(here.actor.project_id, "default", "kim", "manager")
        with here.service.database.transaction() as session:
            releases.promote(session, here.service, kim, second, Act(reason="hotfix"))
        assert not here.show(second).held
        here.until(lambda: bool(here.show(second).held))
        here.control.watches.clear()
        for _ in range(2):
            here.turn()
        assert here.show(second).phase is Phase.CANARY
        assert gateway.desired(TARGET).weight_bp("candidate") == 5000  # type: ignore[union-attr]
        # A breach is told all the same, and the way back is a rename that asks nobody.
        two.script = Script(fault="503")
        here.until(lambda: gateway.desired(TARGET).weight_bp("candidate") == 0)  # type: ignore[union-attr]
        assert ask_many(here.envoy.url(), 20).revisions == {"4": 20}
    # It could not be confirmed, so it is not recorded before it is.
    assert here.show(second).phase is Phase.CANARY
    here.envoy.kill()
    here.envoy.restart()
    here.until_phase(second, Phase.ROLLED_BACK)
    restored = next(entry.body for entry in here.show(second).log if entry.kind is Kind.TRAFFIC_RESTORED)
    assert restored["cause"] == "stop_condition"
    assert restored["reasons"][0].startswith("error_ratio: ")
    assert restored["breach_at"] is not None
    assert kinds(here, second).count(Kind.STOP_CONDITION_FIRED) == 1
    assert here.show(first).phase is Phase.PROMOTED
    assert set(ask_many(here.envoy.url(), 20).engines) == {"one"}


def test_a_release_goes_on_by_itself_when_the_gateway_that_it_held_for_answers_again_and_for_nothing_else(
    here: World, engines: tuple[StreamEngine, StreamEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "STALE_SECONDS", 2.0)
    monkeypatch.setattr(holds, "RENEWED_SECONDS", 0.0)
    here.control.gateways["local"].deadline_seconds = 1.0
    _, second = in_canary(here, *engines)
    gateway = here.envoy.gateway
    socket, away = gateway.admin.path, gateway.admin.path.with_name("away")
    socket.rename(away)
    here.until(lambda: bool(here.show(second).held))
    # Another worker, which has just begun to look, does not take the silence for an answer.
    here.control.watches.clear()
    for _ in range(3):
        here.turn()
    assert here.show(second).held
    away.rename(socket)
    here.until(lambda: not here.show(second).held)
    last = here.show(second).log[-1]
    assert (last.kind, last.actor) == (Kind.RESUMED, "controller")
    assert last.body["reason"] == "the gateway answers again, and nothing else held the release"

    # A log that nobody can read is no silence: the release says so once it is, and waits for a person.
    socket.rename(away)
    here.until(lambda: bool(here.show(second).held))
    with gateway.log.path.open("ab") as log:
        log.write(b"what?\n")
    here.until(lambda: any("could not be read" in reason for reason in here.show(second).held))
    away.rename(socket)
    here.until(lambda: here.control.watches[second].tally.open("candidate") is not None)
    for _ in range(5):
        here.turn()
        time.sleep(0.1)
    shown = here.show(second)
    assert (shown.phase, shown.step) == (Phase.CANARY, 0)
    assert [reason for reason in shown.held if "could not be read" in reason]
    # The silence, the silence again, and then with what came to it: each is one entry.
    assert [len(entry.body["reasons"]) for entry in shown.log if entry.kind is Kind.HELD] == [1, 1, 2]
    assert kinds(here, second).count(Kind.RESUMED) == 1


def test_traffic_that_was_taken_back_by_a_worker_that_died_stays_back_and_is_recorded(
    here: World, engines: tuple[StreamEngine, StreamEngine]
) -> None:
    first, second = in_canary(here, *engines)
    here.turn()
    # One process renames, and is gone; another one finds it.
    EnvoyGateway(here.envoy.gateway.directory, port=here.envoy.gateway.port).put_in_force(TARGET)
    here.control.watches.clear()
    here.until_phase(second, Phase.ROLLED_BACK)
    (restored,) = (entry for entry in here.show(second).log if entry.kind is Kind.TRAFFIC_RESTORED)
    assert restored.body["cause"] == "interrupted"
    assert kinds(here, second).count(Kind.TRAFFIC_SHIFTED) == 1
    assert set(ask_many(here.envoy.url(), 20).engines) == {"one"}
    assert here.show(first).phase is Phase.PROMOTED


def test_traffic_that_was_taken_back_in_a_soak_does_not_come_again_when_the_soak_is_over(
    here: World, engines: tuple[StreamEngine, StreamEngine]
) -> None:
    one, two = engines
    first = here.live(here.bundle("one", b"1" * 10), here.policy(), one)
    long = here.policy("long", canary=QUICK_CANARY | {"soak_seconds": "60"})
    second = here.release(here.bundle("two", b"2" * 10), long)
    here.evaluate()
    here.serve(two, pid=2000)
    with here.traffic():
        here.until_phase(second, Phase.PROMOTED)
    EnvoyGateway(here.envoy.gateway.directory, port=here.envoy.gateway.port).put_in_force(TARGET)
    here.until_phase(second, Phase.ROLLED_BACK)
    assert here.show(first).phase is Phase.PROMOTED
    here.until(lambda: here.envoy.gateway.desired(TARGET).arm("candidate") is None)  # type: ignore[union-attr]
    assert last_revision(here, first) == revision_seen(here)
    assert set(ask_many(here.envoy.url(), 20).engines) == {"one"}


def test_a_replica_that_moved_is_recorded_with_the_revision_that_clients_see(
    here: World, engines: tuple[StreamEngine, StreamEngine]
) -> None:
    one, moved = engines
    release = here.release(here.bundle("one", b"1" * 10), here.policy())
    here.evaluate()
    claim = here.serve(one)
    with here.traffic():
        here.until_phase(release, Phase.PROMOTED)
    here.until(here.is_settled)
    here.replica(claim, "ready", moved, pid=4000)
    here.until(lambda: set(ask_many(here.envoy.url(), 5).engines) == {"two"})
    assert last_revision(here, release) == revision_seen(here)


def test_a_split_whose_record_died_with_its_worker_is_recorded_at_the_next_look(
    here: World, engines: tuple[StreamEngine, StreamEngine]
) -> None:
    release = here.live(here.bundle("one", b"1" * 10), here.policy(), engines[0])
    gateway = here.envoy.gateway
    split = gateway.desired(TARGET)
    assert split is not None
    gateway.apply(Split(TARGET, split.revision + 1, split.arms))
    assert last_revision(here, release) != revision_seen(here)
    for _ in range(2):
        told = len(here.show(release).log)
        with here.service.database.transaction() as session:
            session.execute(update(ReleaseRow).where(ReleaseRow.id == release).values(due_at=datetime.now(UTC)))
        here.until(lambda: last_revision(here, release) == revision_seen(here))
    here.turn()
    assert len(here.show(release).log) == told


def revision_seen(here: World) -> str:
    (revision,) = ask_many(here.envoy.url(), 5).revisions
    return revision


def last_revision(here: World, release: UUID) -> str:
    changes = [entry for entry in here.show(release).log if entry.kind is Kind.TRAFFIC_SHIFTED]
    return Traffic.model_validate(changes[-1].body).revision
