"""Every process of the stack, killed at named places of its work, while a release goes over it.

Each place is one of `tests.support.fall`, or a process that the test kills from outside. After each release: one
result a gate, no orphan, no lost entry, the log verifies, no doubled engine, and the split is what the log says.
"""

import os
import signal

import pytest

from schemas.evidence import Kind
from schemas.release import Phase
from tests.support import fall
from tests.support.ground import Ground, until
from tests.support.runners import is_running
from tests.test_readme import table

LIVES = {
    "claim": (
        "runner.claim.before",
        "runner.claim.after",
        "runner.gate.mid-work",
        "control.lease.before",
        "control.lease.after",
        "control.look",
    ),
    "record": (
        "runner.gate.before-record",
        "runner.gate.after-record",
        "control.publish.before",
        "control.publish.after",
        "control.shift.in-transaction",
        "control.shift.after-record",
    ),
    "completion": (
        "runner.evaluate.before-completion",
        "runner.evaluate.after-completion",
        "control.promote.in-transaction",
        "control.promote.after-record",
        "api.create.in-transaction",
        "api.create.after-commit",
    ),
    "serving": (
        "runner.serve.after-start",
        "runner.serve.after-keeping",
        "runner.serve.before-record",
        "runner.serve.after-record",
        "api.report.in-transaction",
        "api.report.after-commit",
    ),
}
WAY_BACK = (
    "api.rollback.in-transaction",
    "control.restore.before",
    "control.restore.after",
    "control.restore.in-transaction",
)


def test_every_named_place_is_one_where_somebody_dies() -> None:
    killed = [point for points in (*LIVES.values(), WAY_BACK) for point in points]
    assert sorted(killed) == sorted(name for group in fall.POINTS.values() for name in group)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("life", LIVES)
def test_a_release_is_promoted_whoever_is_killed_at_a_place_of_its_own(ground: Ground, life: str) -> None:
    bundle = ground.bundle()
    fall.arm(ground.armed, *LIVES[life])
    with ground.traffic():
        release = ground.release(bundle)
        ground.until_phase(release, Phase.PROMOTED)
    ground.assert_sound(release)


@pytest.mark.timeout(300)
def test_traffic_goes_back_once_whoever_is_killed_on_the_way(ground: Ground) -> None:
    before = ground.showing().stable_release
    with ground.traffic():
        release = ground.release()
        ground.until_phase(release, Phase.CANARY)
        # However long the kills take: it neither goes on nor ends its soak, after which no way back is prepared.
        ground.patiently(lambda: ground.client.releases.pause(release, "a test"))
        fall.arm(ground.armed, *WAY_BACK)
        ground.roll_back(release)
        shown = ground.until_phase(release, Phase.ROLLED_BACK)
    ground.assert_sound(release)
    assert ground.showing().stable_release == before
    assert [entry.kind for entry in shown.log].count(Kind.TRAFFIC_RESTORED) == 1


@pytest.mark.timeout(300)
def test_a_release_is_promoted_though_what_it_stands_on_is_killed_under_it(ground: Ground) -> None:
    with ground.traffic():
        release = ground.release()
        gates = until(lambda: ground.engines("engines"), seconds=60, what="the engine of a gate")
        os.kill(next(iter(gates.values()))[0].pid, signal.SIGKILL)
        for part in ("valkey", "beat", "postgres"):
            ground.kill(part)
        ground.until_phase(release, Phase.CANARY, Phase.PROMOTED)
        ground.kill("envoy")
        ground.kill("postgres")
        ground.until_phase(release, Phase.PROMOTED)
    ground.assert_sound(release)


@pytest.mark.timeout(300)
def test_an_engine_that_serves_is_booted_anew_and_traffic_finds_it(ground: Ground) -> None:
    ground.settle()
    release = ground.showing().stable_release
    assert release is not None
    (engine,) = ground.engines("replicas").values()
    os.kill(engine[0].pid, signal.SIGKILL)
    until(lambda: not is_running(engine[0].pid), seconds=30, what="its end")
    ground.assert_sound(release)
    states = [
        entry.body["replica"]["state"] for entry in ground.show(release).log if entry.kind is Kind.REPLICA_CHANGED
    ]
    assert states[-1] == "ready"
    assert "failed" in states


@pytest.mark.timeout(300)
def test_a_release_goes_on_when_its_supervisor_was_killed_and_started_again(ground: Ground) -> None:
    (engine,) = ground.engines("replicas").values()
    release = ground.release()
    ground.until_phase(release, Phase.STAGED, Phase.BOOTED, Phase.GATED, Phase.APPROVED)
    former = ground.parts()
    ground.restart()
    assert not set(former.values()) & set(ground.parts().values())
    # The next start finds the live engine, and takes it up again.
    assert engine[0] in [one for found in ground.engines("replicas").values() for one in found]
    with ground.traffic():
        ground.until_phase(release, Phase.PROMOTED)
    ground.assert_sound(release)


KILLED = {
    "supervisor": "test_a_release_goes_on_when_its_supervisor_was_killed_and_started_again",
    "PostgreSQL": "test_a_release_is_promoted_though_what_it_stands_on_is_killed_under_it",
    "Valkey": "test_a_release_is_promoted_though_what_it_stands_on_is_killed_under_it",
    "API": "test_a_release_is_promoted_whoever_is_killed_at_a_place_of_its_own",
    "control worker": "test_a_release_is_promoted_whoever_is_killed_at_a_place_of_its_own",
    "beat": "test_a_release_is_promoted_though_what_it_stands_on_is_killed_under_it",
    "runner": "test_a_release_is_promoted_whoever_is_killed_at_a_place_of_its_own",
    "engine of a gate": "test_a_release_is_promoted_though_what_it_stands_on_is_killed_under_it",
    "engine that serves": "test_an_engine_that_serves_is_booted_anew_and_traffic_finds_it",
    "Envoy": "test_a_release_is_promoted_though_what_it_stands_on_is_killed_under_it",
}
"""Row of the README's process table → the test that kills it."""


def test_every_process_of_the_readme_is_killed_by_a_test() -> None:
    assert list(table("The stack on one machine")) == list(KILLED)
    assert all(name in globals() for name in KILLED.values())
