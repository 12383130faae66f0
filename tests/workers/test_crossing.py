"""Two releases of one target are taken back one after the other, or one while the other begins."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import UUID

import pytest

from registry import releases, verification
from registry.auth import Actor
from registry.service import Service
from registry.tables import JobRow
from schemas.api import Act
from schemas.bundle import Bundle
from schemas.evidence import Kind, Traffic
from schemas.holds import Hold, holds
from schemas.release import Phase
from schemas.runner import Claim
from tests.support.gateway import ask_many
from tests.support.streams import StreamEngine, stream_engine
from tests.support.world import QUICK_CANARY, World, world

STEP = {"weight_bp": 5000, "hold_seconds": "600", "min_requests": 29, "max_seconds": "6000"}
SLOW = QUICK_CANARY | {"steps": [STEP, STEP | {"weight_bp": 10_000}]}


@pytest.fixture
def here(service: Service, actor: Actor, tmp_path: Path) -> Iterator[World]:
    with world(service, actor, tmp_path) as made:
        yield made
        with made.service.database.transaction() as session:
            found = verification.verify(session, made.actor.project_id)
        assert found.verified, found.faults


def roll_back(here: World, release: UUID) -> None:
    with here.service.database.transaction() as session:
        releases.rollback(session, here.service, here.actor, release, Act(reason="wrong language"))


def restored(here: World, release: UUID) -> Traffic:
    (body,) = [entry.body for entry in here.show(release).log if entry.kind is Kind.TRAFFIC_RESTORED]
    return Traffic.model_validate(body)


def test_a_live_release_goes_back_although_the_one_after_it_went_back_to_it_a_moment_ago(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two, stream_engine("three") as three:
        bundles = [here.bundle(name, name.encode()) for name in ("one", "two", "three")]
        first = here.live(bundles[0], here.policy(), one)
        stopped = here.serving_jobs()[0]
        second = here.live(bundles[1], here.policy(), two)
        here.complete_by_token(stopped.id, stopped.fencing_token)
        third = here.release(bundles[2], here.policy("slow", canary=SLOW))
        here.evaluate()
        here.serve(three, pid=3000)
        here.until_phase(third, Phase.CANARY)
        roll_back(here, third)
        here.until_phase(third, Phase.ROLLED_BACK)
        # Nobody asks for anything, so that the third one's arm stays in the split while its streams may be open.
        roll_back(here, second)
        here.serve(one, pid=4000)
        here.until_phase(second, Phase.ROLLED_BACK)
        assert int(restored(here, second).revision) > int(restored(here, third).revision)
        assert [(arm.bundle, arm.weight_bp) for arm in restored(here, second).desired] == [
            (bundles[0].digest, 10_000),
            (bundles[1].digest, 0),
        ]
        assert here.show(first).phase is Phase.PROMOTED
        assert set(ask_many(here.envoy.url(), 10).engines) == {"one"}


def without_way_back(
    here: World, bundles: Sequence[Bundle], one: StreamEngine, two: StreamEngine
) -> tuple[UUID, UUID, Claim]:
    """Have a second release that is to be taken back, and whose first does not boot again: it holds for that.

    Returns both, and what a runner claims to boot the first.
    """
    first = here.live(bundles[0], here.policy(), one)
    stopped = here.serving_jobs()[0]
    second = here.live(bundles[1], here.policy(), two)
    here.complete_by_token(stopped.id, stopped.fencing_token)
    roll_back(here, second)
    back = here.claim()
    assert back.bundle == bundles[0].digest
    with here.service.database.transaction() as session:
        job = session.get_one(JobRow, back.job)
        job.attempt, job.problem = 3, "it does not boot"
    here.until(lambda: bool(here.show(second).held))
    return first, second, back


def test_a_release_gets_no_traffic_beside_one_that_is_being_taken_back(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two, stream_engine("three") as three:
        bundles = [here.bundle(name, name.encode()) for name in ("one", "two", "three")]
        first = here.live(bundles[0], here.policy(), one)
        stopped = here.serving_jobs()[0]
        second = here.live(bundles[1], here.policy(), two)
        here.complete_by_token(stopped.id, stopped.fencing_token)
        third = here.release(bundles[2], here.policy("slow", canary=SLOW))
        here.evaluate()
        here.until_phase(third, Phase.APPROVED)
        here.turn()
        ready = here.claim()
        assert ready.bundle == bundles[2].digest
        roll_back(here, second)
        here.replica(ready, "ready", three, pid=3000)
        back = here.claim()
        assert back.bundle == bundles[0].digest
        for _ in range(4):
            here.turn()
        waiting = here.show(third)
        assert waiting.phase is Phase.APPROVED
        assert waiting.waits.startswith(f"the live one beside it goes first: release {second} is being taken back, as ")
        assert holds(waiting) == [Hold.LIVE_GOES_BACK]
        here.replica(back, "ready", one, pid=4000)
        here.until_phase(second, Phase.ROLLED_BACK)
        assert restored(here, second).cause == "requested"
        # What it shares traffic with now is what came back.
        with here.traffic():
            shown = here.until_phase(third, Phase.CANARY)
        assert (shown.waits, holds(shown)) == (None, [])
        assert Kind.TRAFFIC_RESTORED not in [entry.kind for entry in shown.log]
        assert here.show(first).phase is Phase.PROMOTED
        shifted = next(entry.body for entry in shown.log if entry.kind is Kind.TRAFFIC_SHIFTED)
        shares = [(arm.bundle, arm.weight_bp) for arm in Traffic.model_validate(shifted).desired]
        assert shares == [(bundles[0].digest, 5000), (bundles[2].digest, 5000)]


def test_a_release_may_follow_one_that_cannot_be_taken_back_and_lends_it_no_way_back(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two, stream_engine("three") as three:
        bundles = [here.bundle(name, name.encode()) for name in ("one", "two", "three")]
        first, second, back = without_way_back(here, bundles, one, two)
        third = here.release(bundles[2], here.policy("slow", canary=SLOW))
        here.evaluate()
        here.serve(three, pid=3000)
        here.until_phase(third, Phase.CANARY)
        # It boots after all: what was asked before the canary began comes after it.
        here.replica(back, "ready", one, pid=4000)
        for _ in range(4):
            here.turn()
        assert (here.show(third).phase, here.show(second).phase) == (Phase.CANARY, Phase.PROMOTED)
        assert here.show(third).weight_bp == 5000
        roll_back(here, third)
        here.until_phase(third, Phase.ROLLED_BACK)
        here.until_phase(second, Phase.ROLLED_BACK)
        whole = [[arm.bundle for arm in restored(here, of).desired if arm.weight_bp] for of in (third, second)]
        assert whole == [[bundles[1].digest], [bundles[0].digest]]
        assert int(restored(here, second).revision) > int(restored(here, third).revision)
        assert here.show(first).phase is Phase.PROMOTED
        assert set(ask_many(here.envoy.url(), 10).engines) == {"one"}


def test_what_was_asked_of_a_release_before_another_replaced_it_takes_nothing_back_when_it_returns(here: World) -> None:
    with stream_engine("one") as one, stream_engine("two") as two, stream_engine("three") as three:
        bundles = [here.bundle(name, name.encode()) for name in ("one", "two", "three")]
        first, second, back = without_way_back(here, bundles, one, two)
        third = here.live(bundles[2], here.policy(), three)
        assert here.show(second).phase is Phase.SUPERSEDED
        (gone,) = [job for job in here.serving_jobs() if job.bundle == bundles[1].digest]
        here.complete_by_token(gone.id, gone.fencing_token)
        roll_back(here, third)
        again = here.claim()
        assert again.bundle == bundles[1].digest
        here.replica(again, "ready", two, pid=5000)
        here.until_phase(third, Phase.ROLLED_BACK)
        here.until_phase(second, Phase.PROMOTED)
        # What was once asked of it is of another time: nobody boots what it would go back to.
        here.complete_by_token(back.job, back.fencing_token)
        for _ in range(6):
            here.turn()
        assert [job.bundle for job in here.serving_jobs() if job.is_wanted] == [bundles[1].digest]
        shown = here.show(second)
        assert (shown.phase, shown.held, here.show(first).phase) == (Phase.PROMOTED, [], Phase.SUPERSEDED)
        assert set(ask_many(here.envoy.url(), 10).engines) == {"two"}
        # Who wants that now asks anew, and it is done once.
        roll_back(here, second)
        roll_back(here, second)
        last = here.claim()
        assert last.bundle == bundles[0].digest
        here.replica(last, "ready", one, pid=6000)
        here.until_phase(second, Phase.ROLLED_BACK)
        asked = [entry.act for entry in here.show(second).log if entry.kind is Kind.ROLLBACK_REQUESTED]
        assert (len(asked), asked[0], asked[1].partition(":")[0]) == (2, "rollback", "rollback")
        assert here.show(first).phase is Phase.PROMOTED
