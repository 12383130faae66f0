"""Evidence that stops counting between a controller's look and its record lets no more traffic through."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from gates.router import CANDIDATE
from registry import releases, verification
from registry.auth import Actor
from registry.service import Service
from schemas.api import Act, Revoke
from schemas.evidence import Kind
from schemas.release import Phase
from tests.support.gateway import ask_many
from tests.support.streams import StreamEngine, stream_engine
from tests.support.world import QUICK_CANARY, World, world
from tests.workers.test_rollout import Overtaken

SLOW_CANARY = QUICK_CANARY | {
    "steps": [
        {"weight_bp": 100, "hold_seconds": "600", "min_requests": 29, "max_seconds": "6000"},
        {"weight_bp": 10_000, "hold_seconds": "600", "min_requests": 29, "max_seconds": "6000"},
    ]
}


@pytest.fixture
def here(service: Service, actor: Actor, tmp_path: Path) -> Iterator[World]:
    with world(service, actor, tmp_path) as made:
        yield made
        with made.service.database.transaction() as session:
            found = verification.verify(session, made.actor.project_id)
        assert found.verified, found.faults


def revoke(here: World, release: UUID) -> None:
    log = here.show(release).log
    (result,) = [one for one in log if one.kind is Kind.GATE_RECORDED and one.body["gate"] == "compatibility"]
    with here.service.database.transaction() as session:
        body = Revoke(entry=result.entry_digest, reason="the runner was throttled")
        releases.revoke(session, here.service, here.actor, body)


def overtake(here: World) -> list[Callable[[], None]]:
    """Have what is added to the list be done while the gateway takes its next split."""
    before = here.control.gateways["local"]
    gateway = Overtaken(before.directory, host=before.host, port=before.port)
    here.control.gateways["local"] = gateway
    return gateway.meanwhile


def approved(here: World, one: StreamEngine, canary: dict[str, Any] = QUICK_CANARY) -> UUID:
    """A bundle that is live, and an approved release of another one that waits for its replica."""
    here.live(here.bundle("one", b"1" * 10), here.policy("first"), one)
    second = here.release(here.bundle("two", b"2" * 10), here.policy(canary=canary))
    here.evaluate()
    here.until_phase(second, Phase.APPROVED)
    return second


def serve_on(here: World, engine: StreamEngine) -> None:
    here.serve(engine, pid=2000)
    here.until(lambda: False)


def weight(here: World) -> int:
    split = here.envoy.gateway.desired(here.name)
    return split.weight_bp(CANDIDATE) if split else 0


def test_a_result_that_is_revoked_while_the_gateway_takes_the_first_traffic_takes_it_back(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        second = approved(here, one)
        overtake(here).append(lambda: revoke(here, second))
        here.serve(two, pid=2000)
        here.until(lambda: bool(here.show(second).held))
        shown = here.show(second)
        assert shown.phase is Phase.APPROVED
        assert "compatibility" in shown.held[0]
        assert Kind.TRAFFIC_SHIFTED not in [entry.kind for entry in shown.log]
        assert weight(here) == 0
        assert set(ask_many(here.envoy.url(), 20).engines) == {"one"}


def test_a_result_that_is_revoked_while_the_gateway_takes_the_next_step_brings_the_step_before_back(
    here: World,
) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        second = approved(here, one)
        meanwhile = overtake(here)
        here.serve(two, pid=2000)
        here.until_phase(second, Phase.CANARY)
        meanwhile.append(lambda: revoke(here, second))
        with here.traffic():
            here.until(lambda: bool(here.show(second).held))
            here.until(lambda: weight(here) == 5000)
        shown = here.show(second)
        assert (shown.phase, shown.step, shown.weight_bp) == (Phase.CANARY, 0, 5000)
        undone = next(entry for entry in shown.log if entry.kind is Kind.ATTEMPT_ERRORED)
        assert "took step 2" in str(undone.body["detail"])
        shifts = [entry.body["desired"] for entry in shown.log if entry.kind is Kind.TRAFFIC_SHIFTED]
        assert [[arm["weight_bp"] for arm in split] for split in shifts] == [[5000, 5000], [5000, 5000]]


def test_a_promotion_that_was_asked_for_moves_nothing_once_a_result_was_revoked(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two:
        second = approved(here, one, SLOW_CANARY)
        here.serve(two, pid=2000)
        here.until_phase(second, Phase.CANARY)
        kim = replace(here.actor, name="kim")
        with here.service.database.transaction() as session:
            releases.promote(session, here.service, kim, second, Act(reason="hotfix"))
        revoke(here, second)
        here.until(lambda: bool(here.show(second).held))
        for _ in range(3):
            here.turn()
        shown = here.show(second)
        assert (shown.phase, shown.step, weight(here)) == (Phase.CANARY, 0, 100)
        assert "compatibility" in shown.held[0]
        assert [entry.kind for entry in shown.log].count(Kind.TRAFFIC_SHIFTED) == 1


def test_first_traffic_that_a_dead_controller_had_moved_goes_back_when_a_result_was_revoked_since(here: World) -> None:
    class Died(BaseException):
        """What ends a controller between the gateway's acknowledgement and its record."""

    def dies() -> None:
        raise Died

    with stream_engine("one") as one, stream_engine("two") as two:
        second = approved(here, one)
        overtake(here).append(dies)
        with pytest.raises(Died):
            serve_on(here, two)
        assert weight(here) == 5000
        revoke(here, second)
        here.until(lambda: weight(here) == 0)
        here.until(lambda: bool(here.show(second).held))
        shown = here.show(second)
        assert shown.phase is Phase.APPROVED
        assert Kind.TRAFFIC_SHIFTED not in [entry.kind for entry in shown.log]
        assert any(entry.body.get("problem") == "traffic-unrecorded" for entry in shown.log)
        assert set(ask_many(here.envoy.url(), 20).engines) == {"one"}


def test_a_gate_that_failed_stays_failed_however_old_its_result_is(here: World) -> None:
    release = here.release(here.bundle("one", b"1" * 10), here.policy(evidence_seconds="0"))
    claim = here.claim()
    with here.service.database.transaction() as session:
        releases.pause(session, here.service, here.actor, release, Act(reason="lunch"))
    here.report(claim, "staged:1", "staged", {"files": 1, "size": 10, "duration_ms": 1})
    here.verdict(claim, "integrity", "passed")
    here.verdict(claim, "compatibility", "failed")
    here.complete(claim)
    with here.service.database.transaction() as session:
        releases.resume(session, here.service, here.actor, release, Act(reason="back"))
    shown = here.until_phase(release, Phase.REJECTED, seconds=10)
    assert "compatibility said failed" in str(shown.reason)
