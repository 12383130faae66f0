import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar
from uuid import UUID

import pytest

from gates.router import CANDIDATE, Applied, Split
from registry import approvals, db, documents, evidence, releases, verification
from registry.auth import Actor
from registry.service import Service
from schemas.api import Act, Approve, Withdraw
from schemas.evidence import Kind, Traffic
from schemas.problems import Conflict, InvalidDocument, NotEligible, NotPermitted, TransitionRefused
from schemas.release import Phase, ReleaseDetail
from tests.support.gateway import ask_many
from tests.support.settled import assert_recorded_as_served, why_settled
from tests.support.streams import Script, stream_engine
from tests.support.world import QUICK_CANARY, World, world
from workers.reconcile import reconcile
from workers.restores import LET_GO, SOAKED
from workers.sweep import sweep
from workers.traffic.envoy import EnvoyGateway
from workers.traffic.guard import DeadManSwitch


@pytest.fixture
def here(service: Service, actor: Actor, tmp_path: Path) -> Iterator[World]:
    with world(service, actor, tmp_path) as made:
        yield made


def kinds(release: ReleaseDetail) -> list[Kind]:
    return [entry.kind for entry in release.log]


def body(release: ReleaseDetail, kind: Kind) -> dict[str, object]:
    return next(entry.body for entry in release.log if entry.kind is kind)


def assert_verified(here: World) -> None:
    with here.service.database.transaction() as session:
        found = verification.verify(session, here.actor.project_id)
    assert found.verified, found.faults


def test_a_first_release_goes_from_nothing_to_everything_and_a_successor_step_by_step(here: World) -> None:
    policy = here.policy()
    with stream_engine("one") as one, stream_engine("two") as two:
        assert ask_many(here.envoy.url(), 2).statuses[404] == 2
        first = here.live(here.bundle("one", b"1" * 10), policy, one)
        # Once with all traffic, once more when its soak was over and it had become the stable arm: it says so.
        assert kinds(here.show(first)).count(Kind.TRAFFIC_SHIFTED) == 2
        assert body(here.show(first), Kind.TRAFFIC_SHIFTED)["desired"][0]["weight_bp"] == 10_000  # type: ignore[index]
        assert why_settled(here, first) == [SOAKED]
        assert_recorded_as_served(here, first)

        second = here.release(here.bundle("two", b"2" * 10), policy)
        here.evaluate()
        here.serve(two, pid=2000)
        with here.traffic() as answers:
            shown = here.until_phase(second, Phase.PROMOTED)
        assert kinds(shown).count(Kind.TRAFFIC_SHIFTED) == 2
        assert kinds(shown).count(Kind.STEP_PASSED) == 2
        assert here.show(first).phase is Phase.SUPERSEDED
        assert sum(each.broken for each in answers) == 0
        assert set().union(*(each.statuses for each in answers)) == {200}

        here.until(here.is_settled)
        assert why_settled(here, second) == [LET_GO]
        # The replica of the release before is asked to stop, and the new one serves alone.
        assert [job.is_wanted for job in here.serving_jobs()] == [False, True]
        assert set(ask_many(here.envoy.url(), 10).engines) == {"two"}
        assert_recorded_as_served(here, second)
    assert_verified(here)


def test_a_breach_takes_all_traffic_back_by_itself_and_says_when_and_why(here: World) -> None:
    policy = here.policy()
    with stream_engine("one") as one, stream_engine("slow", Script(ttft_ms=600)) as slow:
        first = here.live(here.bundle("one", b"1" * 10), policy, one)
        second = here.release(here.bundle("slow", b"2" * 10), policy)
        here.evaluate()
        here.serve(slow, pid=2000)
        with here.traffic() as answers:
            shown = here.until_phase(second, Phase.ROLLED_BACK)
            here.until(lambda: Kind.RESTORE_OBSERVED in kinds(here.show(second)))
        restored = body(shown, Kind.TRAFFIC_RESTORED)
        assert restored["cause"] == "stop_condition"
        assert restored["desired"][0]["weight_bp"] == 10_000  # type: ignore[index]
        assert "ttft above 300 ms" in str(shown.reason)
        assert restored["breach_at"] <= restored["applied_at"]  # type: ignore[operator]
        # It is the gateway's instant, not that of the record, which follows.
        stop = next(entry for entry in shown.log if entry.kind is Kind.STOP_CONDITION_FIRED)
        assert Traffic.model_validate(restored).applied_at <= stop.recorded_at
        assert 0 <= float(str(body(here.show(second), Kind.RESTORE_OBSERVED)["seconds"])) < 10
        assert here.show(first).phase is Phase.PROMOTED
        assert sum(each.broken for each in answers) == 0
        here.until(lambda: not any(job.is_wanted for job in here.serving_jobs() if job.release_id == second))
        assert set(ask_many(here.envoy.url(), 10).engines) == {"one"}
        assert_recorded_as_served(here, first)
        # A worker that died between the change and its record finds the split in force, and records it once.
        told = len(here.show(first).log)
        here.turn()
        assert len(here.show(first).log) == told
    assert_verified(here)


def test_a_stop_on_a_first_release_leaves_no_traffic_rather_than_an_unproved_bundle(here: World) -> None:
    with stream_engine("bad", Script(fault="503")) as bad:
        release = here.release(here.bundle("bad", b"3" * 10), here.policy())
        here.evaluate()
        here.serve(bad)
        with here.traffic():
            here.until_phase(release, Phase.ROLLED_BACK)
        answers = ask_many(here.envoy.url(), 5)
        assert answers.statuses[503] == 5
        assert answers.engines["bad"] == 0
    assert_verified(here)


@pytest.mark.parametrize(
    ("verdict", "phase", "evaluations"),
    [("failed", Phase.REJECTED, 1), ("errored", Phase.BOOTED, 3), ("inconclusive", Phase.BOOTED, 1)],
)
def test_a_verdict_leads_where_it_should(here: World, verdict: str, phase: Phase, evaluations: int) -> None:
    release = here.release(here.bundle("one", b"1" * 10), here.policy())
    for _ in range(evaluations):
        here.evaluate(compatibility=verdict)
    here.until(lambda: here.show(release).phase is Phase.REJECTED or bool(here.show(release).held))
    shown = here.show(release)
    assert shown.phase is phase
    assert f"compatibility said {verdict}" in str(shown.reason)
    assert shown.weight_bp is None
    assert not here.serving_jobs()
    if verdict != "failed":
        with here.service.database.transaction() as session:
            releases.resume(session, here.service, here.actor, release, Act(reason="look again"))
        again = here.evaluate()
        assert again.gates == ["integrity", "compatibility"]
        here.until(lambda: here.show(release).phase is Phase.APPROVED)
    assert_verified(here)


def test_results_that_expire_while_the_gates_still_run_are_measured_again_and_then_hold(here: World) -> None:
    release = here.release(here.bundle("one", b"1" * 10), here.policy(evidence_seconds="0"))
    claims = [here.evaluate() for _ in range(3)]
    assert [claim.gates for claim in claims] == [["integrity", "compatibility"]] * 3
    here.until(lambda: bool(here.show(release).held))
    shown = here.show(release)
    assert shown.phase is Phase.BOOTED
    assert shown.held == [f"{gate} ran too long ago: its result counts for 0 s" for gate in claims[0].gates]
    with here.service.database.transaction() as session:
        row = releases.get(session, here.actor.project_id, release)
        policy = documents.load_policy(session, here.actor.project_id, row.policy)
        with pytest.raises(releases.NotEligible, match="compatibility ran too long ago"):
            releases.require_eligible(session, row, policy, now=db.now(session))


def test_a_release_waits_for_as_many_managers_as_its_policy_asks_for(here: World) -> None:
    release = here.release(here.bundle("one", b"1" * 10), here.policy(approval={"required": 2}))
    here.evaluate()
    here.until_phase(release, Phase.GATED)
    # The author counts for nobody, and nobody counts twice.
    with pytest.raises(NotPermitted, match="somebody else"), here.service.database.transaction() as session:
        approvals.approve(session, here.service, here.actor, release, Act(reason="my own"))
    for name, phase in (("kim", Phase.GATED), ("kim", Phase.GATED), ("jo", Phase.APPROVED)):
        manager = Actor(here.actor.project_id, "default", name, "manager")
        with here.service.database.transaction() as session:
            approvals.approve(session, here.service, manager, release, Act(reason="looks right"))
        assert here.show(release).phase is phase
    assert len(body(here.show(release), Kind.APPROVED)["approvals"]) == 2  # type: ignore[arg-type]


def _approved(here: World, release: UUID, name: str, *accept: str) -> None:
    manager = Actor(here.actor.project_id, "default", name, "manager")
    said = Approve(reason=f"{name} has read them", accept=[*accept] or None)
    with here.service.database.transaction() as session:
        approvals.approve(session, here.service, manager, release, said)


@pytest.mark.parametrize("required", [0, 1])
def test_warnings_of_gates_hold_a_release_until_a_manager_answers_for_each(here: World, required: int) -> None:
    here.warned = {"compatibility": ["stop-not-probed", "context-unproved"], "integrity": ["odd-name"]}
    release = here.release(here.bundle("one", b"1" * 10), here.policy(approval={"required": required}))
    here.evaluate()
    here.until(lambda: bool(here.show(release).held))
    shown = here.show(release)
    assert shown.phase is Phase.GATED
    assert [text.rpartition(": ")[2] for text in sorted(shown.held)] == [
        "context-unproved, stop-not-probed",
        "odd-name",
    ]
    told = len(shown.log)
    with pytest.raises(NotEligible, match="context-unproved, stop-not-probed") as raised:
        _approved(here, release, "kim", "odd-name")
    assert raised.value.members["findings"] == {"compatibility": ["context-unproved", "stop-not-probed"]}
    with pytest.raises(InvalidDocument, match=r"no gate .* has the finding made-up"):
        _approved(here, release, "kim", "odd-name", "context-unproved", "stop-not-probed", "made-up")
    assert len(here.show(release).log) == told
    _approved(here, release, "kim", "odd-name", "context-unproved", "stop-not-probed")
    here.until_phase(release, Phase.APPROVED)
    shown = here.show(release)
    assert not shown.held
    results = {e.body["gate"]: e.entry_digest for e in shown.log if e.kind is Kind.GATE_RECORDED}
    accepted = [e for e in shown.log if e.kind is Kind.FINDING_ACCEPTED]
    assert [(e.actor, e.body) for e in sorted(accepted, key=lambda e: e.body["gate"])] == [
        (
            "kim",
            {"gate": gate, "result": results[gate], "codes": codes, "reason": "kim has read them"},
        )
        for gate, codes in (("compatibility", ["context-unproved", "stop-not-probed"]), ("integrity", ["odd-name"]))
    ]
    assert_verified(here)


def test_what_one_manager_has_accepted_the_next_need_not_and_a_failure_needs_no_acceptance(here: World) -> None:
    here.warned = {"compatibility": ["stop-not-probed"]}
    release = here.release(here.bundle("one", b"1" * 10), here.policy(approval={"required": 2}))
    here.evaluate()
    here.until(lambda: bool(here.show(release).held))
    _approved(here, release, "kim", "stop-not-probed")
    assert here.show(release).held == []
    here.turn()
    assert here.show(release).held == []
    _approved(here, release, "jo")
    assert here.show(release).phase is Phase.APPROVED
    with here.service.database.transaction() as session:
        releases.reject(session, here.service, here.actor, release, Act(reason="enough"))
    failing = here.release(here.bundle("two", b"2" * 10), here.policy())
    here.evaluate(compatibility="failed")
    here.until_phase(failing, Phase.REJECTED)


class Overtaken(EnvoyGateway):
    """A gateway that takes a split while somebody else does something."""

    # Shared by every copy of the gateway: a controller works with one that is its own for as long as its lease.
    meanwhile: ClassVar[list[Callable[[], None]]] = []

    def apply(self, split: Split) -> Applied:
        applied = super().apply(split)
        if self.meanwhile:
            self.meanwhile.pop()()
        return applied


@pytest.mark.parametrize("deed", ["withdraw", "reject"])
def test_who_is_first_while_the_gateway_takes_the_first_split_wins_and_traffic_goes_back(
    here: World, deed: str
) -> None:
    before = here.control.gateways["local"]
    gateway = Overtaken(before.directory, host=before.host, port=before.port)
    here.control.gateways["local"] = gateway
    policy = here.policy(approval={"required": 1})
    manager = Actor(here.actor.project_id, "default", "kim", "manager")

    def overtake() -> None:
        with here.service.database.transaction() as session:
            if deed == "reject":
                releases.reject(session, here.service, manager, second, Act(reason="no"))
            else:
                approvals.withdraw(session, here.service, manager, second, Withdraw(reason="one answer is wrong"))

    with stream_engine("one") as one, stream_engine("two") as two:
        first = here.release(here.bundle("one", b"1" * 10), here.policy("first"))
        here.evaluate()
        here.serve(one)
        with here.traffic():
            here.until_phase(first, Phase.PROMOTED)
        here.until(here.is_settled)
        second = here.release(here.bundle("two", b"2" * 10), policy)
        here.evaluate()
        here.until_phase(second, Phase.GATED)
        gateway.meanwhile.append(overtake)
        _approved(here, second, "kim")
        here.serve(two, pid=2000)
        here.until(lambda: not gateway.meanwhile)
        here.turn()
        split = gateway.desired(here.name)
        assert split is not None
        assert [arm.weight_bp for arm in split.arms if arm.name == CANDIDATE] in ([0], [])
        shown = here.show(second)
        assert Kind.TRAFFIC_SHIFTED not in kinds(shown)
        assert shown.phase is (Phase.REJECTED if deed == "reject" else Phase.GATED)
        if deed == "withdraw":
            _approved(here, second, "jo")
            here.until_phase(second, Phase.CANARY)
    assert_verified(here)


def test_no_approval_required_is_itself_an_entry(here: World) -> None:
    release = here.release(here.bundle("one", b"1" * 10), here.policy())
    here.evaluate()
    here.until_phase(release, Phase.APPROVED)
    assert Kind.APPROVAL_NOT_REQUIRED in kinds(here.show(release))


def test_a_paused_canary_moves_no_further_but_its_stop_conditions_stay_armed(here: World) -> None:
    policy = here.policy()
    with stream_engine("one") as one, stream_engine("two") as two:
        here.live(here.bundle("one", b"1" * 10), policy, one)
        second = here.release(here.bundle("two", b"2" * 10), policy)
        here.evaluate()
        here.serve(two, pid=2000)
        here.until_phase(second, Phase.CANARY)
        with here.service.database.transaction() as session:
            releases.pause(session, here.service, here.actor, second, Act(reason="lunch"))
        with here.traffic():
            here.turn()
            assert here.show(second).step == 0
            two.script = Script(fault="503")
            shown = here.until_phase(second, Phase.ROLLED_BACK)
        assert shown.is_paused
        assert Kind.STEP_PASSED not in kinds(shown)


def test_no_traffic_holds_and_says_so_and_a_resumed_step_begins_anew(here: World) -> None:
    steps = [{"weight_bp": 10_000, "hold_seconds": "0", "min_requests": 29, "max_seconds": "1"}]
    policy = here.policy(canary=QUICK_CANARY | {"steps": steps})
    with stream_engine("one") as one:
        release = here.release(here.bundle("one", b"1" * 10), policy)
        here.evaluate()
        here.serve(one)
        here.until(lambda: bool(here.show(release).held))
        assert "no traffic" in here.show(release).held[0]
        assert here.show(release).doing is None
        assert here.show(release).phase is Phase.CANARY
        with here.traffic():
            with here.service.database.transaction() as session:
                releases.resume(session, here.service, here.actor, release, Act(reason="traffic is back"))
            here.until(lambda: here.show(release).phase is Phase.PROMOTED or bool(here.show(release).held))


def test_a_manual_rollback_after_the_soak_boots_the_accepted_bundle_before_traffic_moves(here: World) -> None:
    policy = here.policy()
    with stream_engine("one") as one, stream_engine("two") as two:
        first = here.live(here.bundle("one", b"1" * 10), policy, one)
        stopped = here.serving_jobs()[0]
        second = here.release(here.bundle("two", b"2" * 10), policy)
        here.evaluate()
        here.serve(two, pid=2000)
        with here.traffic():
            here.until_phase(second, Phase.PROMOTED)
        here.until(here.is_settled)
        # The runner stops the old replica, as it was asked to.
        here.complete_by_token(stopped.id, stopped.fencing_token)
        with here.service.database.transaction() as session:
            releases.rollback(session, here.service, here.actor, second, Act(reason="answers look odd"))
        here.turn()
        assert here.show(second).phase is Phase.PROMOTED
        assert set(ask_many(here.envoy.url(), 5).engines) == {"two"}
        here.serve(one, pid=3000)
        shown = here.until_phase(second, Phase.ROLLED_BACK)
        assert "answers look odd" in str(shown.reason)
        assert here.show(first).phase is Phase.PROMOTED
        assert set(ask_many(here.envoy.url(), 10).engines) == {"one"}
        with here.service.database.transaction() as session:
            again = releases.rollback(session, here.service, here.actor, second, Act(reason="again"))
        assert again.phase == Phase.ROLLED_BACK
    assert_verified(here)


def test_a_candidate_whose_predecessor_was_rolled_back_shares_traffic_with_the_bundle_that_came_back(
    here: World,
) -> None:
    policy = here.policy()
    asking = here.policy("asking", approval={"required": 1})
    with stream_engine("one") as one, stream_engine("two") as two, stream_engine("three") as three:
        first = here.live(here.bundle("one", b"1" * 10), policy, one)
        second = here.release(here.bundle("two", b"2" * 10), policy)
        here.evaluate()
        here.serve(two, pid=2000)
        with here.traffic():
            here.until_phase(second, Phase.PROMOTED)
        here.until(here.is_settled)
        [stopped] = [job for job in here.serving_jobs() if not job.is_wanted]
        here.complete_by_token(stopped.id, stopped.fencing_token)

        third = here.release(here.bundle("three", b"3" * 10), asking)
        here.evaluate()
        here.until_phase(third, Phase.GATED)
        with here.service.database.transaction() as session:
            releases.rollback(session, here.service, here.actor, second, Act(reason="answers look odd"))
        here.turn()
        here.serve(one, pid=3000)
        here.until_phase(second, Phase.ROLLED_BACK)
        with here.service.database.transaction() as session:
            kim = Actor(here.actor.project_id, "default", "kim", "manager")
            approvals.approve(session, here.service, kim, third, Act(reason="looks right"))
        here.turn()
        here.serve(three, pid=4000)
        shown = here.until_phase(third, Phase.CANARY)
        weights = [entry["weight_bp"] for entry in body(shown, Kind.TRAFFIC_SHIFTED)["desired"]]  # type: ignore[attr-defined]
        assert weights == [5000, 5000]
        with here.traffic():
            here.until_phase(third, Phase.PROMOTED)
        assert here.show(first).phase is Phase.SUPERSEDED

        # And the way back of the one that is live now is that bundle, not nothing.
        with here.service.database.transaction() as session:
            releases.rollback(session, here.service, here.actor, third, Act(reason="also odd"))
        here.until_phase(third, Phase.ROLLED_BACK)
        assert here.show(first).phase is Phase.PROMOTED
        assert set(ask_many(here.envoy.url(), 10).engines) == {"one"}
    assert_verified(here)


def test_a_bundle_that_is_live_already_is_not_released_again(here: World) -> None:
    policy = here.policy()
    bundle = here.bundle("one", b"1" * 10)
    with stream_engine("one") as one, stream_engine("two") as two:
        first = here.live(bundle, policy, one)
        with pytest.raises(Conflict) as refused:
            here.release(bundle, policy)
        assert refused.value.members["holder"] == str(first)

        # Nor is one that came back while its own second release was on the way.
        second = here.release(here.bundle("two", b"2" * 10), policy)
        here.evaluate()
        here.serve(two, pid=2000)
        with here.traffic():
            here.until_phase(second, Phase.PROMOTED)
        again = here.release(bundle, policy)
        with here.service.database.transaction() as session:
            releases.rollback(session, here.service, here.actor, second, Act(reason="answers look odd"))
        here.until_phase(second, Phase.ROLLED_BACK)
        here.evaluate()
        here.until(lambda: bool(here.show(again).held))
        assert "is live already" in here.show(again).held[0]
        assert here.show(again).phase is Phase.APPROVED
        with here.service.database.transaction() as session:
            releases.reject(session, here.service, here.actor, again, Act(reason="not needed"))
        for _ in range(5):
            here.turn()
        assert set(ask_many(here.envoy.url(), 10).engines) == {"one"}
        assert any(job.is_wanted for job in here.serving_jobs() if job.bundle == bundle.digest)
    assert_verified(here)


def test_a_dead_candidate_replica_takes_traffic_back(here: World) -> None:
    policy = here.policy()
    with stream_engine("one") as one, stream_engine("two") as two:
        here.live(here.bundle("one", b"1" * 10), policy, one)
        second = here.release(here.bundle("two", b"2" * 10), policy)
        here.evaluate()
        claim = here.serve(two, pid=2000)
        here.until_phase(second, Phase.CANARY)
        here.replica(claim, "failed", two, pid=2000)
        shown = here.until_phase(second, Phase.ROLLED_BACK)
        assert body(shown, Kind.TRAFFIC_RESTORED)["cause"] == "replica_failed"
        # The same arms are published once more before anybody asks: the way back is observed all the same.
        split = here.envoy.gateway.desired(here.name)
        here.envoy.gateway.apply(replace(split, revision=split.revision + 1))
        ask_many(here.envoy.url(), 3)
        here.until(lambda: Kind.RESTORE_OBSERVED in kinds(here.show(second)))


def test_a_stable_replica_that_moved_is_published_again_and_the_canary_goes_on(here: World) -> None:
    policy = here.policy()
    with stream_engine("one") as one, stream_engine("two") as two, stream_engine("moved") as moved:
        here.live(here.bundle("one", b"1" * 10), policy, one)
        serving = here.serving_jobs()[0]
        second = here.release(here.bundle("two", b"2" * 10), policy)
        here.evaluate()
        here.serve(two, pid=2000)
        here.until_phase(second, Phase.CANARY)
        here.replica_by_token(serving.id, serving.fencing_token, "ready", moved, pid=4000)
        with here.traffic():
            here.until_phase(second, Phase.PROMOTED)
        engines = set(ask_many(here.envoy.url(), 10).engines)
        assert engines == {"two"}


def test_two_releases_on_one_target_the_second_is_told_who_holds_it(here: World) -> None:
    policy = here.policy()
    first = here.release(here.bundle("one", b"1" * 10), policy)
    with pytest.raises(Conflict) as refused:
        here.release(here.bundle("two", b"2" * 10), policy)
    assert refused.value.members["holder"] == str(first)


def test_acts_out_of_place_are_refused_and_leave_nothing(here: World) -> None:
    release = here.release(here.bundle("one", b"1" * 10), here.policy())
    before = len(here.show(release).log)
    kim = Actor(here.actor.project_id, "default", "kim", "manager")
    for act in (approvals.approve, releases.promote, releases.rollback, releases.resume):
        with (
            pytest.raises((TransitionRefused, Conflict, releases.NotEligible)),
            here.service.database.transaction() as session,
        ):
            act(session, here.service, kim, release, Act(reason="too early"))
    assert len(here.show(release).log) == before
    with here.service.database.transaction() as session:
        rejected = releases.reject(session, here.service, here.actor, release, Act(reason="wrong weights"))
        assert rejected.phase == Phase.REJECTED
    assert evidence.release_stream(release) in {entry.stream for entry in here.show(release).log}


def test_a_manager_may_skip_the_remaining_steps(here: World) -> None:
    steps = [
        {"weight_bp": 100, "hold_seconds": "600", "min_requests": 29, "max_seconds": "6000"},
        {"weight_bp": 10_000, "hold_seconds": "600", "min_requests": 29, "max_seconds": "6000"},
    ]
    policy = here.policy("slow", canary=QUICK_CANARY | {"steps": steps})
    with stream_engine("one") as one, stream_engine("two") as two:
        here.live(here.bundle("one", b"1" * 10), here.policy(), one)
        second = here.release(here.bundle("two", b"2" * 10), policy)
        here.evaluate()
        here.serve(two, pid=2000)
        here.until_phase(second, Phase.CANARY)
        here.until(lambda: here.show(second).doing is not None)
        length = len(here.show(second).log)
        told = here.show(second).doing or ""
        assert re.match(r"step 1 of 2: 0 of 29 requests, 0 refused, .* of 600 s; begun .* ago, limit 1 h 40 min$", told)
        here.until(lambda: here.show(second).doing != told)
        assert len(here.show(second).log) == length
        with here.service.database.transaction() as session:
            kim = Actor(here.actor.project_id, "default", "kim", "manager")
            releases.promote(session, here.service, kim, second, Act(reason="hotfix"))
        here.until_phase(second, Phase.PROMOTED)
        assert here.show(second).doing is None
        assert set(ask_many(here.envoy.url(), 5).engines) == {"two"}


def test_a_rejection_ends_an_evaluation_that_still_runs(here: World) -> None:
    release = here.release(here.bundle("one", b"1" * 10), here.policy())
    claim = here.claim()
    with here.service.database.transaction() as session:
        releases.reject(session, here.service, here.actor, release, Act(reason="wrong weights"))
    here.until(lambda: not here.is_wanted(claim))
    here.complete(claim)
    assert here.show(release).phase is Phase.REJECTED


def test_traffic_that_no_controller_looks_at_goes_back_by_itself_and_the_release_says_so(here: World) -> None:
    policy = here.policy(canary=QUICK_CANARY | {"dead_man_seconds": "16"})
    with stream_engine("one") as one, stream_engine("two") as two:
        first = here.live(here.bundle("one", b"1" * 10), here.policy("first"), one)
        second = here.release(here.bundle("two", b"2" * 10), policy)
        here.evaluate()
        here.serve(two, pid=2000)
        here.until_phase(second, Phase.CANARY)
        began = time.monotonic()
        switch = DeadManSwitch(here.envoy.gateway, monotonic=began)
        # The sweep goes on, but nobody looks at the release. A second here is twenty for the switch.
        while switch.check(monotonic=began + 20 * (time.monotonic() - began), now=datetime.now(UTC)) is None:
            assert time.monotonic() < began + 10
            sweep(here.control, lambda _: None)
            time.sleep(0.1)
        assert set(ask_many(here.envoy.url(), 10).engines) == {"one"}
        shown = here.until_phase(second, Phase.ROLLED_BACK)
        assert body(shown, Kind.TRAFFIC_RESTORED)["cause"] == "controller_lost"
        assert here.show(first).phase is Phase.PROMOTED
        here.until(lambda: here.envoy.gateway.take_notice() is None)
    assert_verified(here)


def test_a_release_in_its_soak_says_that_the_switch_took_its_traffic_whichever_release_is_looked_at_first(
    here: World,
) -> None:
    soaking = here.policy("soaking", canary=QUICK_CANARY | {"soak_seconds": "60"})
    other = here.beside("code@prod")
    with stream_engine("one") as one, stream_engine("two") as two:
        first = here.live(here.bundle("one", b"1" * 10), here.policy(), one)
        second = here.release(here.bundle("two", b"2" * 10), soaking)
        here.evaluate()
        here.serve(two, pid=2000)
        with here.traffic():
            here.until_phase(second, Phase.PROMOTED)

        other.live(here.bundle("one", b"1" * 10), here.policy(), one)
        moving = other.release(here.bundle("two", b"2" * 10), here.policy())
        other.evaluate()
        other.serve(two, pid=5000)
        other.until_phase(moving, Phase.CANARY)

        switch = DeadManSwitch(here.envoy.gateway, monotonic=0.0)
        assert switch.check(monotonic=1000.0, now=datetime.now(UTC)) is not None
        reconcile(here.control, moving, turn_seconds=0.0)
        assert here.show(moving).phase is Phase.ROLLED_BACK
        shown = here.until_phase(second, Phase.ROLLED_BACK)
        assert body(shown, Kind.TRAFFIC_RESTORED)["cause"] == "controller_lost"
        assert here.show(first).phase is Phase.PROMOTED
        here.until(lambda: here.envoy.gateway.take_notice() is None)
        assert set(ask_many(here.envoy.url(), 10).engines) == {"one"}
    assert_verified(here)
