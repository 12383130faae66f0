"""A runner that has to be empty at some time: what it holds ends then, and has not failed by that."""

import threading
from uuid import UUID

import pytest
from sqlalchemy import text

from registry import draining, emptying, evidence, failures, handover, jobs, releases, runners, verification
from registry.auth import Actor
from registry.service import Service
from registry.tables import JobRow, RunnerRow, TargetRow
from schemas.api import RunnerDrain
from schemas.problems import Conflict, NotPermitted, StaleEdit
from schemas.runner import ReplicaReport, Report
from tests.registry.test_scheduling import (
    ask,
    before,
    bundle,
    change,
    claim,
    end,
    live,
    register,
    renew,
    shown,
    taken,
)
from tests.support.together import together

WAITING = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()")


def drain(service: Service, actor: Actor, seconds: int | None, reason: str = "it burns") -> RunnerRow:
    manager = Actor(project_id=actor.project_id, project="default", name="mia", role="manager")
    with service.database.transaction() as session:
        body = RunnerDrain(reason=reason, force_in_seconds=seconds)
        return emptying.drain(session, service, manager, "r1", body)


def losses(service: Service, runner: UUID) -> list[str]:
    with service.database.transaction() as session:
        return emptying.losses(session, session.get_one(RunnerRow, runner))


def ready(service: Service, actor: Actor, job: UUID, token: int) -> None:
    body = ReplicaReport.model_validate(
        {"state": "ready", "cause": "it is", "address": "127.0.0.1:1", "pid": 7, "start_time": "1", "boot_id": "b"}
    )
    said = Report(
        fencing_token=token, act="ready", kind="replica_changed", body=body.model_dump(mode="json", exclude_none=True)
    )
    with service.database.transaction() as session:
        jobs.report(session, service, actor.project_id, job, said)


def test_gates_end_at_the_deadline_and_begin_again_elsewhere_with_no_attempt_lost(
    service: Service, actor: Actor
) -> None:
    runner = register(service, actor, "r1")
    made = ask(service, actor, bundle(service, actor))
    held = taken(service, actor, runner)
    assert drain(service, actor, 3600).empty_at is not None
    assert renew(service, actor, held)
    assert losses(service, runner) == [f"run {made} begins its gate again elsewhere; it has lost no attempt"]
    drain(service, actor, 0)
    assert not renew(service, actor, held)
    end(service, actor, held)
    row = shown(service, actor, made)
    assert (row.state, row.attempt) == ("pending", 0)
    assert str(row.problem).startswith("runner-emptied: runner r1 was emptied by mia: it burns")
    assert claim(service, actor, runner) is None
    assert taken(service, actor, register(service, actor, "r2")).attempt == 1


def test_what_serves_alone_boots_elsewhere_and_has_not_failed(service: Service, actor: Actor) -> None:
    runner = register(service, actor, "r1")
    serves = live(service, actor, waits=0)
    held = taken(service, actor, runner)
    ready(service, actor, serves, held.fencing_token)
    with service.database.transaction() as session:
        job = session.get_one(JobRow, serves)
        session.get_one(TargetRow, job.target_id).applied = [{"bundle": job.bundle, "weight_bp": 10_000}]
        release = job.release_id
    drain(service, actor, None)
    change(service, serves, lease_until=before(service, 1))
    with service.database.transaction() as session:
        told = draining.wire(session, runners.get(session, actor.project_id, runner)).drain
    assert told is not None
    assert "the runner is not heard of, its engine may serve on" in told.waits_for[0]
    assert renew(service, actor, held)
    (line,) = losses(service, runner)
    assert "on live@prod is the only one, and has 100 % of the target's requests" in line
    drain(service, actor, 0)
    assert not renew(service, actor, held)
    end(service, actor, held)
    again = taken(service, actor, register(service, actor, "r2"))
    assert (again.job, again.attempt) == (serves, 1)
    assert release is not None
    with service.database.transaction() as session:
        log = releases.log(session, release)
        assert failures.history(log).failures == 0
        assert [evidence.claim_of(one.envelope)["body"]["problem"] for one in log if one.kind == "attempt_errored"] == [
            "runner-emptied"
        ]
        replica = session.get_one(JobRow, serves).replica
    assert replica is not None
    assert replica["state"] == "stopped"


@pytest.mark.parametrize("serves", [False, True])
def test_what_was_told_to_end_has_not_failed_although_the_drain_is_over_before_it_has(
    service: Service, actor: Actor, serves: bool
) -> None:
    runner = register(service, actor, "r1")
    made = live(service, actor, waits=0) if serves else ask(service, actor, bundle(service, actor))
    held = taken(service, actor, runner)
    if serves:
        ready(service, actor, made, held.fencing_token)
    drain(service, actor, 0)
    assert not renew(service, actor, held)
    manager = Actor(project_id=actor.project_id, project="default", name="mia", role="manager")
    with service.database.transaction() as session:
        emptying.undrain(session, service, manager, "r1")
    end(service, actor, held)
    row = shown(service, actor, made)
    assert (row.state, row.problem) == ("pending", "runner-emptied: runner r1 was emptied before its drain ended")
    again = taken(service, actor, runner)
    assert (again.job, again.attempt) == (made, 1)
    assert renew(service, actor, again)


def test_what_another_takes_the_place_of_ends_for_good(service: Service, actor: Actor) -> None:
    runner = register(service, actor, "r1")
    serves = live(service, actor, waits=0)
    held = taken(service, actor, runner)
    ready(service, actor, serves, held.fencing_token)
    drain(service, actor, None)
    with service.database.transaction() as session:
        target = session.get_one(JobRow, serves).target_id
        assert target is not None
        (beside,) = handover.begin(session, target, session.get_one(RunnerRow, runner).last_seen_at)
    drain(service, actor, 0, "now")
    end(service, actor, held)
    assert shown(service, actor, serves).state == "cancelled"
    assert taken(service, actor, register(service, actor, "r2")).job == beside.id


def test_a_drain_that_is_asked_for_again_says_nothing_new_and_one_that_is_over_has_no_deadline(
    service: Service, actor: Actor
) -> None:
    runner = register(service, actor, "r1")
    first = drain(service, actor, 60, "one").empty_at
    assert drain(service, actor, None, "two").empty_at == first
    manager = Actor(project_id=actor.project_id, project="default", name="mia", role="manager")
    with service.database.transaction() as session:
        assert emptying.undrain(session, service, manager, "r1").empty_at is None
        emptying.undrain(session, service, manager, "r1")
    with service.database.transaction() as session:
        entries = evidence.read(session, draining.stream(runner))
        assert [(one.kind, one.actor) for one in entries] == [("runner_drained", "mia"), ("runner_undrained", "mia")]
        assert draining.wire(session, runners.get(session, actor.project_id, runner)).drain is None
    drain(service, actor, None, "three")

    def again() -> None:
        with service.database.transaction() as session:
            emptying.undrain(session, service, manager, "r1")

    with service.database.transaction() as session:
        # Whoever asks meanwhile finds it drained, and waits.
        emptying.undrain(session, service, manager, "r1")
        other = threading.Thread(target=again)
        other.start()
        with service.database.look() as connection:
            while not connection.scalar(WAITING):
                assert other.is_alive()
    other.join()
    with service.database.transaction() as session:
        kinds = [one.kind for one in evidence.read(session, draining.stream(runner))]
        assert kinds == ["runner_drained", "runner_undrained"] * 2
    limited = Actor(actor.project_id, "default", "mia", "manager", targets=frozenset({"chat@prod"}))
    with pytest.raises(NotPermitted), service.database.transaction() as session:
        emptying.drain(session, service, limited, "r1", RunnerDrain(reason="why not", force_in_seconds=0))


def person(actor: Actor, name: str) -> Actor:
    return Actor(project_id=actor.project_id, project="default", name=name, role="manager")


def test_what_somebody_else_drains_is_changed_only_as_it_was_seen(service: Service, actor: Actor) -> None:
    runner = register(service, actor, "r1")
    mia, noa = person(actor, "mia"), person(actor, "noa")

    def say(who: Actor, seconds: int | None = None, if_match: str | None = None, *, ends: bool = False) -> int:
        with service.database.transaction() as session:
            if ends:
                row = emptying.undrain(session, service, who, "r1", "done", if_match=if_match)
            else:
                body = RunnerDrain(reason=f"{who.name} says", force_in_seconds=seconds)
                row = emptying.drain(session, service, who, "r1", body, if_match=if_match)
            return draining.wire(session, row).generation

    assert say(mia, if_match="0") == 1
    assert say(mia) == say(mia, if_match="0") == 1
    for seconds in (None, 60):
        with pytest.raises(Conflict, match=r"is drained by mia since .*: mia says; .*--if-match 1") as refused:
            say(noa, seconds)
        members = refused.value.members
        assert (members["holder"], members["version"], members["change"]) == ("mia", "1", "runner_drained")
    for stale in (lambda: say(noa, 60, "0"), lambda: say(noa, None, "0"), lambda: say(noa, None, "0", ends=True)):
        with pytest.raises(StaleEdit, match=r"the drain of runner r1 is 1 now, not 0; .* by mia"):
            stale()
    assert say(noa, None, "1") == 1
    assert say(noa, 60, "1") == say(noa) == 2
    # The deadline is noa's now.
    with pytest.raises(Conflict, match=r"what it holds at .* is ended") as taken_over:
        say(mia, 3600)
    assert taken_over.value.members["holder"] == "noa"
    assert say(noa, 120) == 3
    assert say(mia, None, "3", ends=True) == say(mia, None, "3", ends=True) == 4
    with pytest.raises(StaleEdit, match="runner_undrained by mia"):
        say(noa, None, "3", ends=True)
    with pytest.raises(StaleEdit):
        say(noa, None, "3")
    assert say(noa, ends=True) == 4
    assert say(noa) == 5
    with service.database.transaction() as session:
        log = [(one.kind, one.actor) for one in evidence.read(session, draining.stream(runner))]
        assert verification.verify(session, actor.project_id).faults == []
    assert log == [
        ("runner_drained", "mia"),
        ("runner_drained", "noa"),
        ("runner_drained", "noa"),
        ("runner_undrained", "mia"),
        ("runner_drained", "noa"),
    ]


def test_of_two_who_drain_a_runner_at_once_one_does_and_the_other_is_told_who(service: Service, actor: Actor) -> None:
    register(service, actor, "r1")
    people = [person(actor, name) for name in ("mia", "noa")]

    def drains(who: Actor, seconds: int | None, if_match: str | None) -> tuple[str, int]:
        with service.database.transaction() as session:
            body = RunnerDrain(reason="at once", force_in_seconds=seconds)
            row = emptying.drain(session, service, who, "r1", body, if_match=if_match)
            return who.name, draining.generation(session, row)

    def ends(who: Actor, if_match: str | None) -> tuple[str, int]:
        with service.database.transaction() as session:
            row = emptying.undrain(session, service, who, "r1", if_match=if_match)
            return who.name, draining.generation(session, row)

    for round_ in range(4):
        seconds = (None, 600)[round_ % 2]
        done = together(*(lambda who=who, s=seconds: drains(who, s, None) for who in people))
        (won,), (lost,) = ([one for one in done if isinstance(one, kind)] for kind in (tuple, Conflict))
        assert (lost.members["holder"], lost.members["version"]) == (won[0], str(won[1]))
        seen = str(won[1])
        # Somebody sets a deadline while the other ends the drain: both saw the same.
        later = together(lambda s=seen: drains(people[0], 60, s), lambda s=seen: ends(people[1], s))
        (first,), (stale,) = ([one for one in later if isinstance(one, kind)] for kind in (tuple, StaleEdit))
        assert stale.members["changed_by"] == first[0]
        ends(people[1], None)
