"""The database stands still while a release has traffic: nobody can ask for the way back, and traffic goes back."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from schemas.evidence import Kind, Traffic
from schemas.policy import Policy
from schemas.release import Phase
from tests.support import factories, stopping
from tests.support.gateway import ask_many
from tests.support.ground import CANARY, TARGET, Ground, until

SILENCE_SECONDS = 6


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """Let a process and what it started stand still: they refuse nothing, and answer nobody."""
    postmaster = psutil.Process(pid)
    stopping.stand_still(pid)
    stopped = [postmaster, *postmaster.children(recursive=True)]  # it starts no more of them
    try:
        for each in stopped[1:]:
            stopping.stand_still(each.pid)
        yield
    finally:
        for each in stopped[::-1]:
            stopping.go_on(each.pid)


@pytest.mark.timeout(300)
def test_traffic_goes_back_while_the_database_is_away_and_is_recorded_once_it_is_there_again(ground: Ground) -> None:
    canary = CANARY | {"dead_man_seconds": str(SILENCE_SECONDS)}
    policy = ground.client.policies.create(
        Policy.model_validate(factories.policy_body("away", canary=canary)).canonical()
    )
    before = ground.showing()
    with ground.traffic() as statuses:
        release = ground.release(policy=policy.digest)
        ground.until_phase(release, Phase.CANARY)
        ground.patiently(lambda: ground.client.releases.pause(release, "a test"))
        assert len(ground.weights()) == 2
        with standing_still(ground.parts()["postgres"]):
            alone = {str(before.stable_bundle)[7:19]: 10_000}
            until(lambda: ground.weights() == alone, seconds=60, what="the way back")
            url = f"{ground.stack.facts['gateway_url']}/{TARGET}/v1/chat/completions"
            assert ask_many(url, 10).whole == 10
        shown = ground.until_phase(release, Phase.ROLLED_BACK)
    assert set(statuses) == {200}
    (restored,) = [Traffic.model_validate(one.body) for one in shown.log if one.kind is Kind.TRAFFIC_RESTORED]
    assert restored.cause == "controller_lost"
    ground.assert_sound(release)
    assert ground.showing().stable_release == before.stable_release
