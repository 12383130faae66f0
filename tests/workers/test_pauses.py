"""A pause that was acknowledged lets nothing move on, whatever a controller was about to do."""

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from gates.canary import StepJudgement, StepOutcome
from gates.router import CANDIDATE, Split
from registry import releases, verification
from registry.auth import Actor
from registry.service import Service
from schemas.api import Act
from schemas.evidence import Kind, Traffic
from schemas.release import Phase
from tests.support.streams import stream_engine
from tests.support.world import World, world
from tests.workers.test_rollout import Overtaken
from workers import rollout
from workers.control import Control
from workers.facts import Facts
from workers.traffic.envoy import EnvoyGateway

Deed = Callable[[], None]


@pytest.fixture
def here(service: Service, actor: Actor, tmp_path: Path) -> Iterator[World]:
    with world(service, actor, tmp_path) as made:
        yield made


@pytest.fixture
def after_a_pass(monkeypatch: pytest.MonkeyPatch) -> list[Deed]:
    """What somebody does when a step has been judged as passed, and nothing has followed from that yet."""
    deeds: list[Deed] = []
    real = rollout.look

    def look(
        control: Control, facts: Facts, gateway: EnvoyGateway, split: Split
    ) -> tuple[StepJudgement, datetime | None]:
        judgement, breach_at = real(control, facts, gateway, split)
        if judgement.outcome is StepOutcome.PASSED and deeds:
            deeds.pop()()
        return judgement, breach_at

    monkeypatch.setattr(rollout, "look", look)
    return deeds


def since_the_pause(here: World, release: UUID) -> list[Kind]:
    log = [entry.kind for entry in here.show(release).log]
    return log[len(log) - log[::-1].index(Kind.PAUSED) :]


def weight(here: World) -> int:
    split = here.envoy.gateway.desired(here.name)
    return split.weight_bp(CANDIDATE) if split else 0


def test_nothing_moves_on_after_a_pause_was_acknowledged_until_somebody_resumes(
    here: World, after_a_pass: list[Deed]
) -> None:
    before = here.control.gateways["local"]
    gateway = Overtaken(before.directory, host=before.host, port=before.port)
    here.control.gateways["local"] = gateway

    def act(deed: Any) -> None:
        with here.service.database.transaction() as session:
            deed(session, here.service, here.actor, second, Act(reason="stop here"))

    def pause() -> None:
        act(releases.pause)

    def until_paused() -> None:
        here.until(lambda: here.show(second).is_paused)
        for _ in range(4):
            here.turn()

    with stream_engine("one") as one, stream_engine("two") as two:
        here.live(here.bundle("one", b"1" * 10), here.policy(), one)
        second = here.release(here.bundle("two", b"2" * 10), here.policy())
        here.evaluate()
        here.until_phase(second, Phase.APPROVED)
        # While the gateway takes its first traffic.
        gateway.meanwhile.append(pause)
        here.serve(two, pid=2000)
        until_paused()
        assert here.show(second).phase is Phase.APPROVED
        assert Kind.TRAFFIC_SHIFTED not in since_the_pause(here, second)
        assert weight(here) == 0
        act(releases.resume)
        here.until_phase(second, Phase.CANARY)

        with here.traffic():
            # Before its first step is recorded as passed.
            after_a_pass.append(pause)
            until_paused()
            assert (here.show(second).step, weight(here)) == (0, 5000)
            assert since_the_pause(here, second) == []
            # While the gateway takes the next step.
            gateway.meanwhile.append(pause)
            act(releases.resume)
            until_paused()
            assert (here.show(second).step, weight(here)) == (0, 5000)
            assert since_the_pause(here, second) == [Kind.ATTEMPT_ERRORED, Kind.TRAFFIC_SHIFTED]
            back = Traffic.model_validate(here.show(second).log[-1].body)
            assert [entry.weight_bp for entry in back.desired] == [5000, 5000]
            split = here.envoy.gateway.desired(here.name)
            assert split is not None
            assert back.revision == f"{split.revision}"
            # Before it is promoted.
            act(releases.resume)
            here.until(lambda: here.show(second).step == 1)
            after_a_pass.append(pause)
            until_paused()
            assert here.show(second).phase is Phase.CANARY
            assert since_the_pause(here, second) == []
            # Nor does a release whose traffic is to be taken back become the live one first.
            after_a_pass.append(lambda: act(releases.rollback))
            act(releases.resume)
            shown = here.until_phase(second, Phase.ROLLED_BACK)
        assert Kind.PROMOTED not in [entry.kind for entry in shown.log]
    with here.service.database.transaction() as session:
        found = verification.verify(session, here.actor.project_id)
    assert found.verified, found.faults
