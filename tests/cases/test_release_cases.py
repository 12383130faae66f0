"""Incident cases about releases: what was live, canaries without traffic or with late news, and taking back nothing."""

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from gates.canary import StepOutcome, Tally, judge_step
from gates.router import Arm, Split
from registry import db, history, releases, targets, verification
from registry.auth import Actor
from registry.service import Service
from schemas.api import RollBack
from schemas.evidence import Kind
from schemas.policy import ErrorRatioCondition, Step, TtftCondition
from schemas.problems import InvalidDocument, TransitionRefused
from schemas.release import Phase, ServedAt, TargetChange
from tests.gates.test_canary import GOOD, ON_STABLE, PROBE, SLOW
from tests.support.gateway import ask_many
from tests.support.streams import Script, stream_engine
from tests.support.world import QUICK_CANARY, World, world

T0 = datetime(2026, 11, 3, 14, 0, tzinfo=UTC)


@pytest.fixture
def here(service: Service, actor: Actor, tmp_path: Path) -> Iterator[World]:
    with world(service, actor, tmp_path) as made:
        yield made


def now(here: World) -> datetime:
    with here.service.database.transaction() as session:
        return db.now(session)


def served(here: World, at: datetime) -> ServedAt:
    with here.service.database.transaction() as session:
        return history.served_at(session, targets.get(session, here.actor.project_id, here.name), at)


def changes(here: World, limit: int = 100) -> list[TargetChange]:
    with here.service.database.transaction() as session:
        target = targets.get(session, here.actor.project_id, here.name)
        return [history.wire(session, row) for row in history.browse(session, target, after=None, limit=limit)]


def act(here: World, name: str, release: object, reason: str, who: str = "kim") -> None:
    with here.service.database.transaction() as session:
        actor = Actor(here.actor.project_id, "default", who, "manager")
        getattr(releases, name)(session, here.service, actor, release, RollBack(reason=reason))


def test_c133_what_was_live_at_an_instant_is_told_from_the_log_with_who_and_why(here: World) -> None:
    policy = here.policy(canary=QUICK_CANARY | {"soak_seconds": "0"})
    before = now(here)
    with stream_engine("one") as one, stream_engine("two") as two:
        bundles = here.bundle("one", b"1" * 10), here.bundle("two", b"2" * 10)
        first = here.live(bundles[0], policy, one)
        at_first = now(here)
        second = here.release(bundles[1], policy)
        here.evaluate()
        here.serve(two, pid=2000)
        with here.traffic():
            here.until_phase(second, Phase.CANARY)
            in_canary = now(here)
            here.until_phase(second, Phase.PROMOTED)
        at_second = now(here)
        act(here, "rollback", second, "answers look odd")
        here.until_phase(second, Phase.ROLLED_BACK)
        at_third = now(here)

        found = {name: served(here, at) for name, at in vars_of(before, at_first, in_canary, at_second, at_third)}
        live = {name: one.live_bundle for name, one in found.items()}
        first_bundle, second_bundle = bundles[0].digest, bundles[1].digest
        assert live == {
            "before": None,
            "first": first_bundle,
            "canary": first_bundle,
            "second": second_bundle,
            "third": first_bundle,
        }
        assert found["before"].split == []
        assert {arm.bundle: arm.weight_bp for arm in found["canary"].split} == {first_bundle: 5000, second_bundle: 5000}
        assert [arm.weight_bp for arm in found["third"].split if arm.bundle == first_bundle] == [10_000]
        # Who let it, why, and which entry says so: the one who asked for the way back answers for it.
        assert (found["third"].live_release, found["third"].live_by) == (first, "kim")
        assert str(second) in str(found["third"].live_reason)
        told = changes(here)
        by = {change.entry: change.by for change in told}
        assert all(by[then.live_entry] == then.live_by for then in found.values() if then.live_entry is not None)
        newest = {change.kind: change for change in told[::-1]}
        assert {newest[kind].by for kind in ("reinstated", "traffic_restored")} == {"kim"}
        assert newest["reinstated"].actor != "kim"
        assert {found["second"].live_entry, found["second"].split_entry} <= {one.entry for one in told}
        assert [one.kind for one in told if one.split is None][::-1] == [
            "promoted",
            "replaced",
            "promoted",
            "reinstated",
        ]
        assert any("answers look odd" in str(one.reason) for one in told)
        assert [one.at for one in told] == sorted((one.at for one in told), reverse=True)
        with pytest.raises(InvalidDocument, match="yet to come"):
            served(here, now(here) + timedelta(seconds=60))
    # Its rows are there to stay.
    for statement in ("UPDATE entries SET actor = 'nobody'", "DELETE FROM entries", "TRUNCATE entries CASCADE"):
        with pytest.raises(DBAPIError), here.service.database.transaction() as session:
            session.execute(text(statement))
    assert changes(here) == told


def vars_of(*instants: datetime) -> list[tuple[str, datetime]]:
    return list(zip(("before", "first", "canary", "second", "third"), instants, strict=True))


STABLE = Arm("stable", "chat@prod/aaaaaaaaaaaa/r1", "127.0.0.1:8001", 7_500)
CANDIDATE = Arm("candidate", "chat@prod/bbbbbbbbbbbb/r2", "127.0.0.1:8002", 2_500)
SPLIT = Split("chat@prod", 7, (STABLE, CANDIDATE))
STEP = Step(weight_bp=2_500, hold_seconds=Decimal(3), min_requests=200, max_seconds=Decimal(60))
CONDITIONS = (ErrorRatioCondition(metric="error_ratio", max_ratio=Decimal("0.05")),)


def judged(
    tally: Tally, seconds: float, *, alive: bool = True, step: Step = STEP, conditions=CONDITIONS
) -> StepOutcome:
    at = T0 + timedelta(seconds=seconds)
    tally.expect(T0)
    if alive:
        tally.add([_at(PROBE, seconds - 0.5)])
        tally.see(at, {})
    return judge_step(tally, step, conditions=conditions, now=at).outcome


def _at(record, seconds: float):
    return replace(record, at=T0 + timedelta(seconds=seconds), duration_ms=1.0)


@pytest.mark.parametrize(
    ("name", "requests", "alive", "outcomes"),
    [
        ("no request", 0, True, (StepOutcome.WAITING, StepOutcome.INCONCLUSIVE)),
        ("three requests", 3, True, (StepOutcome.WAITING, StepOutcome.INCONCLUSIVE)),
        ("one too few", 199, True, (StepOutcome.WAITING, StepOutcome.INCONCLUSIVE)),
        ("no log at all", 0, False, (StepOutcome.ERRORED, StepOutcome.ERRORED)),
        ("a log that went silent", 400, False, (StepOutcome.ERRORED, StepOutcome.ERRORED)),
    ],
)
def test_c139_a_canary_that_shows_nothing_neither_passes_nor_is_taken_back(name, requests, alive, outcomes) -> None:
    tally = Tally(SPLIT, T0)
    tally.add([_at(GOOD, 0.0)] * requests + [_at(ON_STABLE, 0.0)] * (3 * requests))
    tally.expect(T0 + timedelta(seconds=1))
    seen = tuple(judged(tally, seconds, alive=alive) for seconds in (30, 61))
    assert seen == outcomes, name
    enough = Tally(SPLIT, T0)
    enough.add([_at(GOOD, 1.0)] * 200 + [_at(ON_STABLE, 1.0)] * 600)
    assert judged(enough, 30) is StepOutcome.PASSED


def test_c139_a_canary_whose_gateway_does_not_answer_holds_where_it_is_and_says_so(here: World) -> None:
    steps = [
        {"weight_bp": weight, "hold_seconds": "0", "min_requests": 29, "max_seconds": "60"} for weight in (5000, 10_000)
    ]
    policy = here.policy("short", canary=QUICK_CANARY | {"steps": steps})
    with stream_engine("one") as one, stream_engine("two") as two:
        here.live(here.bundle("one", b"1" * 10), here.policy(), one)
        second = here.release(here.bundle("two", b"2" * 10), policy)
        here.evaluate()
        here.serve(two, pid=2000)
        here.until_phase(second, Phase.CANARY)
        here.envoy.kill()
        here.until(lambda: any("gateway" in reason for reason in here.show(second).held))
        shown = here.show(second)
        assert (shown.phase, shown.step, shown.weight_bp) == (Phase.CANARY, 0, 5000)
        assert not {entry.kind for entry in shown.log} & {Kind.TRAFFIC_RESTORED, Kind.STEP_PASSED, Kind.PROMOTED}
        here.envoy.restart()
        assert {arm.weight_bp for arm in here.target().applied} == {5000}


def test_c141_no_step_passes_before_its_last_analysis_is_decided() -> None:
    # Errors are known at once, time to first token only of streams, and those come late: after the hold is over.
    conditions = (*CONDITIONS, TtftCondition(metric="ttft", percentile=Decimal("0.9"), max_ms=400))
    tally = Tally(SPLIT, T0)
    plain = replace(_at(GOOD, 1.0), is_event_stream=False)
    tally.add([plain] * 300 + [_at(ON_STABLE, 1.0)] * 900)
    assert judged(tally, 2, conditions=conditions) is StepOutcome.WAITING
    assert judged(tally, 4, conditions=conditions) is StepOutcome.WAITING
    assert judged(tally, 5.9, conditions=conditions) is StepOutcome.WAITING
    tally.add([_at(SLOW, 6.0)] * 12)
    assert judged(tally, 6.1, conditions=conditions) is StepOutcome.FAILED


def test_c141_a_failure_that_arrives_after_the_promotion_takes_traffic_back(here: World) -> None:
    soaking = here.policy("soaking", canary=QUICK_CANARY | {"soak_seconds": "60"})
    with stream_engine("one") as one, stream_engine("two") as two:
        first = here.live(here.bundle("one", b"1" * 10), here.policy(), one)
        second = here.release(here.bundle("two", b"2" * 10), soaking)
        here.evaluate()
        here.serve(two, pid=2000)
        with here.traffic():
            here.until_phase(second, Phase.PROMOTED)
            two.script = Script(fault="503")
            shown = here.until_phase(second, Phase.ROLLED_BACK)
        assert next(e.body["cause"] for e in shown.log if e.kind is Kind.TRAFFIC_RESTORED) == "stop_condition"
        assert here.show(first).phase is Phase.PROMOTED
        assert set(ask_many(here.envoy.url(), 10).engines) == {"one"}


def test_c142_an_abort_when_nothing_is_rolling_out_changes_nothing_and_says_so(here: World) -> None:
    with stream_engine("one") as one:
        first = here.live(here.bundle("one", b"1" * 10), here.policy(), one)

        def state() -> tuple[object, ...]:
            replicas = [(job.id, job.is_wanted, job.state) for job in here.serving_jobs()]
            log = [entry.entry_digest for entry in here.show(first).log]
            return here.envoy.gateway.desired(here.name), here.target().applied, replicas, log

        before = state()
        for _ in range(2):
            with pytest.raises(TransitionRefused, match="has traffic"):
                act(here, "reject", first, "abort")
            with pytest.raises(TransitionRefused, match="there is no earlier version"):
                act(here, "rollback", first, "abort")
            here.turn()
        ended = here.release(here.bundle("two", b"2" * 10), here.policy())
        act(here, "reject", ended, "not this one")
        with pytest.raises(TransitionRefused, match="there is nothing to take back"):
            act(here, "rollback", ended, "abort")
        for _ in range(3):
            here.turn()
        assert state() == before
        assert set(ask_many(here.envoy.url(), 10).engines) == {"one"}
        with here.service.database.transaction() as session:
            assert verification.verify(session, here.actor.project_id).verified


def test_c142_the_only_version_there_is_can_still_be_taken_off_by_who_says_so(here: World) -> None:
    with stream_engine("one") as one:
        first = here.live(here.bundle("one", b"1" * 10), here.policy(), one)
        with here.service.database.transaction() as session:
            kim = Actor(here.actor.project_id, "default", "kim", "manager")
            said = RollBack(reason="it leaks names", to_nothing=True)
            releases.rollback(session, here.service, kim, first, said)
        here.until_phase(first, Phase.ROLLED_BACK)
        time.sleep(0.1)
        assert ask_many(here.envoy.url(), 5).statuses[503] == 5
