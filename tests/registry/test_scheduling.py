"""Which job goes to which runner: what fits, what is free, who comes first, and what is said where nothing does."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select, update

from registry import db, draining, evidence, jobs, projects, quotas, releases, runners, runs, targets
from registry.auth import Actor
from registry.service import Service
from registry.tables import JobRow, ProjectRow, ReleaseRow
from schemas.api import Complete, LimitsSet, Progress, RecordCreate, ReleaseCreate, Run, RunCreate
from schemas.problems import NoRunnerFits, NotPermitted
from schemas.runner import Claim, Drain, JobKind, Report, RunnerRegistration
from tests.support import factories, phases
from tests.support.together import together
from tests.support.world import FINGERPRINT

H100 = {"sku": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_520_809_984}
WITH_ENGINE = ("integrity", "compatibility")


def register(service: Service, actor: Actor, name: str, *cards: dict[str, Any], **changes: Any) -> UUID:
    """Have a runner of class cpu say what it has. Returns its identity."""
    body = {
        "name": name, "runner_class": "cpu", "engines": ["llamacpp"], "boot_id": "b", "slots": 8, "speaks": 1,
        "fingerprint": FINGERPRINT | {"accelerators": list(cards)} | changes.pop("fingerprint", {}),
    }  # fmt: skip
    with service.database.transaction() as session:
        return runners.register(session, actor.project_id, RunnerRegistration.model_validate(body | changes)).id


def bundle(service: Service, actor: Actor, name: str = "one", count: int = 0, **changes: Any) -> str:
    """Register a bundle that takes so many H100. Returns its digest."""
    row = {"accelerator": "nvidia-h100" if count else "cpu", "count": count}
    return factories.registered_bundle(service, actor, name, name.encode(), hardware=row, **changes).digest


def ask(service: Service, actor: Actor, digest: str, kind: JobKind = JobKind.EVALUATE, **changes: Any) -> UUID:
    """Make a job of a bundle."""
    with service.database.transaction() as session:
        said = {"gates": WITH_ENGINE, "runner_class": "cpu", "created_by": "maria", "now": db.now(session)} | changes
        return jobs.create(session, actor.project_id, kind, bundle=digest, **said).id


def claim(service: Service, actor: Actor, runner: UUID) -> Claim | None:
    with service.database.transaction() as session:
        return jobs.claim(session, service, runners.get(session, actor.project_id, runner))


def claimed(service: Service, actor: Actor, runner: UUID, count: int) -> list[UUID]:
    """Return the jobs that a runner gets, one after another."""
    found = [claim(service, actor, runner) for _ in range(count)]
    return [one.job for one in found if one is not None]


def end(service: Service, actor: Actor, held: Claim) -> None:
    with service.database.transaction() as session:
        jobs.complete(session, service, actor.project_id, held.job, Complete(fencing_token=held.fencing_token))


def change(service: Service, job: UUID, **values: Any) -> None:
    with service.database.transaction() as session:
        session.execute(update(JobRow).where(JobRow.id == job).values(**values))


def before(service: Service, seconds: float) -> Any:
    with service.database.transaction() as session:
        return db.now(session) - timedelta(seconds=seconds)


def shown(service: Service, actor: Actor, job: UUID) -> Run:
    with service.database.transaction() as session:
        return jobs.wire(session, jobs.get(session, actor.project_id, job))


def test_a_job_goes_only_to_a_runner_that_has_what_its_bundle_needs(service: Service, actor: Actor) -> None:
    made = ask(service, actor, bundle(service, actor, count=2))
    small, large = register(service, actor, "small", H100), register(service, actor, "large", H100, H100)
    assert claim(service, actor, small) is None
    held = claim(service, actor, large)
    assert held is not None
    assert (held.job, held.devices) == (made, [0, 1])


def test_what_does_not_fit_keeps_nobody_behind_it_waiting(service: Service, actor: Actor) -> None:
    large, small = bundle(service, actor, "large", 2), bundle(service, actor, "small", 1)
    runner = register(service, actor, "r1", H100)
    ask(service, actor, large)
    second = ask(service, actor, small)
    files = ask(service, actor, large, gates=["integrity", "static"])
    # Gates that read files run anywhere.
    assert claimed(service, actor, runner, 3) == [second, files]


def test_accelerators_are_reserved_until_the_job_ends_or_its_lease_does(service: Service, actor: Actor) -> None:
    one = bundle(service, actor, count=1)
    first, second, third = (ask(service, actor, one) for _ in range(3))
    runner, other = register(service, actor, "r1", H100, H100), register(service, actor, "r2", H100)
    held = [claim(service, actor, runner) for _ in range(3)]
    assert [(each.job, each.devices) if each else None for each in held] == [(first, [0]), (second, [1]), None]
    assert str(shown(service, actor, third).waits).endswith("to take it")  # by r2
    with service.database.transaction() as session:
        session.execute(update(JobRow).where(JobRow.id == second).values(lease_until=db.now(session)))
    # Somebody else takes it, and what it had here is free.
    taken = claim(service, actor, other)
    assert taken is not None
    assert (taken.job, taken.devices) == (second, [0])
    assert held[0] is not None
    end(service, actor, held[0])
    last = claim(service, actor, runner)
    assert last is not None
    assert (last.job, last.devices) == (third, [0])


def test_a_job_that_comes_back_to_its_runner_keeps_the_accelerators_that_its_engine_is_on(
    service: Service, actor: Actor
) -> None:
    one, runner = bundle(service, actor, count=1), register(service, actor, "r1", H100, H100)
    first, second = ask(service, actor, one), ask(service, actor, one)
    held = [claim(service, actor, runner) for _ in range(2)]
    assert held[0] is not None
    assert held[1] is not None
    end(service, actor, held[0])
    change(service, second, lease_until=before(service, 1))
    again = claim(service, actor, runner)
    assert again is not None
    assert (again.job, again.devices) == (second, [1])
    ask(service, actor, one)
    other = claim(service, actor, runner)
    assert other is not None
    assert other.devices == [0]
    assert first != other.job


def test_a_job_that_waits_for_accelerators_says_so(service: Service, actor: Actor) -> None:
    one = bundle(service, actor, count=1)
    runner = register(service, actor, "r1", H100)
    ask(service, actor, one)
    waiting = ask(service, actor, one)
    assert claim(service, actor, runner) is not None
    said = str(shown(service, actor, waiting).waits)
    assert "for room for 1 × nvidia-h100, llamacpp test in" in said
    assert said.endswith("r1 has reserved 1 of 1 accelerators")


def test_memory_of_a_processor_is_reserved_too(service: Service, actor: Actor) -> None:
    runner = register(service, actor, "r1", fingerprint={"memory_bytes": 10 * 10**9})
    made = []
    for name in ("one", "two", "three"):
        job = ask(service, actor, bundle(service, actor, name))
        needs = shown_needs(service, job) | {"held_bytes": 4 * 10**9}
        change(service, job, needs=needs)
        made.append(job)
    assert claimed(service, actor, runner, 3) == made[:2]
    assert str(shown(service, actor, made[2]).waits).endswith("r1 has reserved 8.0 of 10.0 GB")


def shown_needs(service: Service, job: UUID) -> dict[str, Any]:
    with service.database.transaction() as session:
        return dict(session.get_one(JobRow, job).needs or {})


def test_nothing_begins_that_no_runner_of_the_class_could_ever_run(service: Service, actor: Actor) -> None:
    manager = Actor(project_id=actor.project_id, project="default", name="mia", role="manager")
    four, policy = bundle(service, actor, count=4), factories.registered_policy(service, actor).digest
    suite = factories.registered_golden(service, actor).digest
    factories.created_target(service, actor)
    run = RunCreate(bundle=four, policy=policy, runner_class="cpu")
    release = ReleaseCreate(target="chat@prod", bundle=four, policy=policy, reason="a test")
    record = RecordCreate(suite=suite, bundle=four, target="chat@prod", reason="a test")

    def told(call: Any) -> NoRunnerFits:
        with pytest.raises(NoRunnerFits) as refused, service.database.transaction() as session:
            call(session)
        return refused.value

    with service.database.transaction() as session:
        made = runs.create(session, service, actor, run).id  # nobody has come yet: one that fits may
    register(service, actor, "a", H100)
    register(service, actor, "b", slots=1)
    for call in (
        lambda session: runs.create(session, service, actor, run),
        lambda session: runs.record(session, service, manager, record),
        lambda session: releases.create(session, service, actor, release),
    ):
        problem = told(call)
        assert problem.detail.startswith("no runner of class cpu has 4 × nvidia-h100: a: it has 1 × NVIDIA")
        assert problem.detail.endswith(
            "a: it has 1 × NVIDIA H100 80GB HBM3 of 85.5 GB. b: it has no accelerator, only a processor with "
            "1.1 GB of memory; "
            "nor does it fit a runner of another class"
        )
        assert [one["runner"] for one in problem.members["runners"]] == ["a", "b"]
        assert problem.members["fits"] == []
    register(service, actor, "large", *[H100] * 4, runner_class="h100")
    problem = told(lambda session: runs.create(session, service, actor, run))
    assert problem.detail.endswith("1.1 GB of memory; it fits large of class h100")
    assert problem.members["fits"] == [{"runner": "large", "runner_class": "h100"}]
    assert "a: it has 1 × NVIDIA H100 80GB HBM3 of 85.5 GB. b: it has no" in str(shown(service, actor, made).waits)
    with service.database.transaction() as session:
        # What only reads files needs no accelerator.
        runs.create(session, service, actor, run.model_copy(update={"gates": ["integrity"]}))
    register(service, actor, "c", *[H100] * 4)
    with service.database.transaction() as session:
        assert releases.create(session, service, actor, release).bundle == four
    assert str(shown(service, actor, made).waits).endswith("to take it")


def test_traffic_comes_first_then_gates_of_releases_then_what_was_asked_for(service: Service, actor: Actor) -> None:
    release = factories.started_release(service, actor)
    with service.database.transaction() as session:
        row = session.get_one(ReleaseRow, release)
        of_release, target = row.bundle, row.target_id
    record = ask(service, actor, bundle(service, actor, "three"), JobKind.RECORD)
    run = ask(service, actor, bundle(service, actor, "two"))
    gates = ask(service, actor, of_release, release=release)
    candidate = ask(service, actor, bundle(service, actor, "four"), JobKind.SERVE, target=target)
    serve = ask(service, actor, of_release, JobKind.SERVE, release=release, target=target)
    runner = register(service, actor, "r1")

    def order(phase: str) -> list[UUID]:
        with service.database.transaction() as session:
            session.execute(update(ReleaseRow).where(ReleaseRow.id == release).values({"phase": phase}))
        found = claimed(service, actor, runner, 5)
        for one in found:
            change(service, one, state="pending", runner_id=None, claimed_at=None)
        return found

    assert order("canary") == [candidate, serve, gates, run, record]
    assert order("superseded") == [serve, candidate, gates, run, record]
    # Whoever has waited for long is no longer behind a release's gates, and still behind traffic.
    change(service, record, created_at=before(service, 3 * 600.0), due_at=before(service, 1700.0))
    assert order("promoted") == [serve, candidate, record, gates, run]


def test_those_for_whom_runners_work_take_turns(service: Service, actor: Actor) -> None:
    one = bundle(service, actor)
    greedy = [ask(service, actor, one, created_by="greedy") for _ in range(3)]
    modest = [ask(service, actor, one, created_by="modest") for _ in range(2)]
    runner = register(service, actor, "r1")
    assert claimed(service, actor, runner, 5) == [greedy[0], modest[0], greedy[1], modest[1], greedy[2]]


@pytest.mark.parametrize("gates", [("integrity",), ("integrity", "static", "placement")])
def test_a_job_that_starts_no_engine_needs_nothing(service: Service, actor: Actor, gates: Sequence[str]) -> None:
    made = ask(service, actor, bundle(service, actor, count=2), gates=gates)
    assert shown_needs(service, made) == {}


# ------------------------------------------------------------------------------------------- making room, draining


def renew(service: Service, actor: Actor, held: Claim) -> bool:
    """Renew a lease. Returns whether the job is still wanted."""
    with service.database.transaction() as session:
        said = Progress(fencing_token=held.fencing_token)
        return jobs.renew(session, service, actor.project_id, held.job, said).is_wanted


def live(service: Service, actor: Actor, waits: float, name: str = "live", count: int = 0) -> UUID:
    """Ask for the replica of a release that is live, and has waited for so many seconds."""
    factories.created_target(service, actor, f"{name}@prod")
    digest, policy = bundle(service, actor, name, count), factories.registered_policy(service, actor).digest
    release = phases.promoted(service, actor, digest, policy, f"{name}@prod")
    with service.database.transaction() as session:
        target = session.get_one(ReleaseRow, release).target_id
    due = before(service, waits)
    return ask(service, actor, digest, JobKind.SERVE, release=release, target=target, now=due)


def taken(service: Service, actor: Actor, runner: UUID) -> Claim:
    found = claim(service, actor, runner)
    assert found is not None
    return found


def test_a_gate_makes_room_for_what_is_live_and_loses_no_attempt(service: Service, actor: Actor) -> None:
    runner = register(service, actor, "r1", slots=1)
    gates = ask(service, actor, bundle(service, actor))
    held = taken(service, actor, runner)
    urgent = live(service, actor, waits=2)
    assert renew(service, actor, held)  # a runner that is free may still take it
    change(service, urgent, due_at=before(service, 6))
    assert not renew(service, actor, held)
    assert not renew(service, actor, held)
    end(service, actor, held)
    row = shown(service, actor, gates)
    assert (row.state, row.attempt, row.outcome) == ("pending", 0, None)
    assert str(row.problem).startswith("preempted: it made room on runner r1 for the replica of bundle sha256:")
    with service.database.transaction() as session:
        entries = evidence.read(session, f"run/{gates}")
        (said,) = [evidence.claim_of(entry.envelope)["body"] for entry in entries]
    assert (said["problem"], said["attempt"]) == ("preempted", 1)
    assert taken(service, actor, runner).job == urgent
    register(service, actor, "r1", slots=2)
    # The other slot is kept for what is live, until there are more.
    register(service, actor, "r1", slots=3)
    again = taken(service, actor, runner)
    assert (again.job, again.attempt) == (gates, 1)
    assert renew(service, actor, again)


def test_what_has_failed_already_is_not_put_back(service: Service, actor: Actor) -> None:
    runner = register(service, actor, "r1", slots=1)
    gates = ask(service, actor, bundle(service, actor))
    held = taken(service, actor, runner)
    live(service, actor, waits=6)
    assert not renew(service, actor, held)
    failed: dict[str, object] = {
        "gate": "integrity", "definition": "sha256:" + "d" * 64, "verdict": "failed", "summary": "bad",
        "measurements": [], "findings": [], "duration_ms": 1, "source": "run",
    }  # fmt: skip
    said = Report(fencing_token=held.fencing_token, act="gate:integrity", kind="gate_recorded", body=failed)
    with service.database.transaction() as session:
        jobs.report(session, service, actor.project_id, held.job, said)
    end(service, actor, held)
    assert shown(service, actor, gates).outcome == "failed"


def test_the_fewest_and_least_needed_make_room_and_only_where_that_helps(service: Service, actor: Actor) -> None:
    one, two = bundle(service, actor, "one", 1), bundle(service, actor, "two", 2)
    small, large = register(service, actor, "small", H100, H100), register(service, actor, "large", *[H100] * 3)
    asked = [(one, JobKind.RECORD, small), (one, JobKind.EVALUATE, small), (two, JobKind.EVALUATE, large)]
    held = []
    for digest, kind, runner in [*asked, (one, JobKind.EVALUATE, large)]:
        made = ask(service, actor, digest, kind)
        held.append(taken(service, actor, runner))
        assert held[-1].job == made
    live(service, actor, waits=6, count=2)
    # On `small` two would have to end; on `large` the older one will do, which holds two accelerators.
    assert [renew(service, actor, each) for each in held] == [True, True, False, True]


def test_what_makes_room_does_not_take_it_again_before_all_of_it_is_made(service: Service, actor: Actor) -> None:
    one, runner = bundle(service, actor, "one", 1), register(service, actor, "r1", H100, H100)
    for _ in range(2):
        ask(service, actor, one)
    held = [taken(service, actor, runner) for _ in range(2)]
    urgent = live(service, actor, waits=6, count=2)
    assert [renew(service, actor, each) for each in held] == [False, False]
    end(service, actor, held[0])
    assert claim(service, actor, runner) is None
    end(service, actor, held[1])
    serves = taken(service, actor, runner)
    assert (serves.job, serves.devices) == (urgent, [0, 1])


def test_room_that_nobody_waits_for_any_more_is_given_out_again(service: Service, actor: Actor) -> None:
    one, runner = bundle(service, actor, "one", 1), register(service, actor, "r1", H100, H100)
    made = {ask(service, actor, one) for _ in range(2)}
    held = [taken(service, actor, runner) for _ in range(2)]
    urgent = live(service, actor, waits=6, count=2)
    assert [renew(service, actor, each) for each in held] == [False, False]
    change(service, urgent, is_wanted=False, state="cancelled")
    end(service, actor, held[0])
    again = taken(service, actor, runner)
    assert again.job in made


def test_what_fits_nowhere_does_not_keep_others_from_room(service: Service, actor: Actor) -> None:
    runner = register(service, actor, "r1", H100)
    held_job = ask(service, actor, bundle(service, actor, "one", 1))
    held = taken(service, actor, runner)
    assert held.job == held_job
    live(service, actor, waits=60, name="large", count=1)
    with service.database.transaction() as session:
        large = session.scalars(select(JobRow).where(JobRow.kind == JobKind.SERVE)).one()
        large.needs = {**(large.needs or {}), "count": 8}
    small = live(service, actor, waits=6, name="small", count=1)
    assert not renew(service, actor, held)
    end(service, actor, held)
    assert taken(service, actor, runner).job == small


def test_nothing_ends_for_what_would_find_no_room_all_the_same(service: Service, actor: Actor) -> None:
    runner = register(service, actor, "r1", H100, H100)
    first, second = (live(service, actor, waits=6, name=name, count=1) for name in ("one", "two"))
    assert [taken(service, actor, runner).job for _ in range(2)] == [first, second]
    ask(service, actor, bundle(service, actor))
    held = taken(service, actor, runner)
    live(service, actor, waits=6, name="three", count=1)
    assert renew(service, actor, held)


def test_a_drained_runner_takes_nothing_more_and_says_what_it_holds(service: Service, actor: Actor) -> None:
    manager = Actor(project_id=actor.project_id, project="default", name="mia", role="manager")
    runner = register(service, actor, "r1")
    gates, serve = ask(service, actor, bundle(service, actor)), live(service, actor, waits=0)
    held = [taken(service, actor, runner) for _ in range(2)]
    waiting = ask(service, actor, bundle(service, actor))

    def drain() -> Drain:
        with service.database.transaction() as session:
            shown = draining.wire(session, runners.drain(session, manager, "r1", "a new driver")).drain
        assert shown is not None
        return shown

    found = drain()
    assert (found.by, found.reason) == ("mia", "a new driver")
    assert [line.split(":")[0] for line in found.waits_for] == [
        f"run {gates}",
        f"the replica of bundle {shown(service, actor, serve).bundle[7:19]} on live@prod",
    ]
    assert claim(service, actor, runner) is None
    assert str(shown(service, actor, waiting).waits).endswith("for a runner of class cpu that takes jobs: r1 drained")
    register(service, actor, "r1")  # a runner that starts again is still drained
    assert claim(service, actor, runner) is None
    end(service, actor, next(one for one in held if one.job == gates))
    change(service, serve, is_wanted=False)
    end(service, actor, next(one for one in held if one.job == serve))
    assert drain().waits_for == []
    with service.database.transaction() as session:
        assert draining.wire(session, runners.undrain(session, manager, "r1")).drain is None
    assert taken(service, actor, runner).job == waiting


def test_nobody_whose_token_is_for_some_targets_drains_a_runner(service: Service, actor: Actor) -> None:
    register(service, actor, "r1")
    limited = Actor(
        project_id=actor.project_id, project="default", name="mia", role="manager", targets=frozenset({"chat@prod"})
    )
    with pytest.raises(NotPermitted), service.database.transaction() as session:
        runners.drain(session, limited, "r1", "why not")


# ---------------------------------------------------------------------------------------------------- drills

DRILLED = (*WITH_ENGINE, "rollback")


def test_a_drill_reserves_accelerators_for_what_traffic_goes_back_to(service: Service, actor: Actor) -> None:
    factories.created_target(service, actor)
    accepted, policy = bundle(service, actor, "accepted", 1), factories.registered_policy(service, actor).digest
    release = phases.promoted(service, actor, accepted, policy)
    with service.database.transaction() as session:
        target = session.get_one(ReleaseRow, release).target_id
    one = bundle(service, actor, "candidate", 1)
    made = ask(service, actor, one, gates=DRILLED, target=target)
    small, large = register(service, actor, "small", H100), register(service, actor, "large", H100, H100, H100)
    assert claim(service, actor, small) is None
    held = taken(service, actor, large)
    assert (held.job, held.devices, held.accepted) == (made, [0, 1], accepted)
    # One is left, and a drill takes two.
    again = ask(service, actor, one, gates=DRILLED, target=target)
    assert claim(service, actor, large) is None
    assert "beside it 1 × nvidia-h100" in str(shown(service, actor, again).waits)
    plain = ask(service, actor, one, target=target)
    assert taken(service, actor, large).job == plain
    end(service, actor, held)
    assert taken(service, actor, large).job == again


def test_a_drill_takes_what_is_accepted_when_it_is_claimed(service: Service, actor: Actor) -> None:
    factories.created_target(service, actor)
    with service.database.transaction() as session:
        target = targets.get(session, actor.project_id, "chat@prod").id
    made = ask(service, actor, bundle(service, actor, "candidate", 1), gates=DRILLED, target=target)
    policy = factories.registered_policy(service, actor).digest
    phases.promoted(service, actor, bundle(service, actor, "accepted", 2), policy)
    runner = register(service, actor, "two", H100, H100)
    # It was asked for when nothing was accepted, and does not fit this machine any more.
    assert claim(service, actor, runner) is None
    assert str(shown(service, actor, made).waits).endswith("and a drill takes what both bundles do at once")
    assert taken(service, actor, register(service, actor, "three", H100, H100, H100)).devices == [0, 1, 2]


def test_a_drill_that_no_runner_could_ever_hold_does_not_begin(service: Service, actor: Actor) -> None:
    factories.created_target(service, actor)
    phases.promoted(
        service, actor, bundle(service, actor, "accepted", 1), factories.registered_policy(service, actor).digest
    )
    suite = factories.registered_load(service, actor, gap_us=20_000)
    rules = [{"gate": "integrity"}, {"gate": "compatibility", "boot_seconds": "60", "answer_seconds": "10"}]
    drilled = factories.registered_policy(
        service, actor, "drilled", gates=[*rules, {"gate": "rollback", "suite": suite.digest}]
    ).digest
    candidate = bundle(service, actor, "candidate", 1)
    register(service, actor, "one", H100)
    asked = RunCreate(bundle=candidate, policy=drilled, runner_class="cpu", target="chat@prod")
    wanted = ReleaseCreate(target="chat@prod", bundle=candidate, policy=drilled, reason="a test")
    for begin in (
        lambda session: runs.create(session, service, actor, asked),
        lambda session: releases.create(session, service, actor, wanted),
    ):
        with (
            pytest.raises(NoRunnerFits, match="a drill takes what both bundles do"),
            service.database.transaction() as session,
        ):
            begin(session)
    with service.database.transaction() as session:
        runs.create(session, service, actor, asked.model_copy(update={"gates": ["integrity", "compatibility"]}))


# ------------------------------------------------------------------------------------------------- a project's quota


def allow(service: Service, actor: Actor, **most: int) -> None:
    """Set the limits of the actor's project."""
    with service.database.transaction() as session:
        projects.set_limits(session, service, replace(actor, role="admin"), actor.project, LimitsSet(**most))


def test_what_is_above_a_projects_jobs_waits_and_says_why_and_traffic_goes_on(service: Service, actor: Actor) -> None:
    one = bundle(service, actor)
    runner = register(service, actor, "r1")
    allow(service, actor, jobs=2)
    first, second, third = (ask(service, actor, one) for _ in range(3))
    candidate = ask(service, actor, bundle(service, actor, "candidate"), JobKind.SERVE, created_by="controller")
    assert claimed(service, actor, runner, 4) == [candidate, first]
    for waiting in (second, third):
        assert str(shown(service, actor, waiting).waits).endswith(
            "the quota of project default: runners hold 2 of its jobs, and it may have 2 at once"
        )
    # What is live is counted, and never held back.
    replica = live(service, actor, 0.0)
    held = taken(service, actor, runner)
    assert held.job == replica
    change(service, first, state="done")
    assert claim(service, actor, runner) is None
    end(service, actor, held)
    change(service, replica, state="done")
    assert claimed(service, actor, runner, 2) == [second]
    allow(service, actor, jobs=0)
    assert claimed(service, actor, runner, 2) == [third]


def test_no_quota_holds_back_what_is_live_whoever_asked_for_it_or_is_to_end(service: Service, actor: Actor) -> None:
    runner = register(service, actor, "r1")
    allow(service, actor, jobs=1)
    ask(service, actor, bundle(service, actor))
    assert len(claimed(service, actor, runner, 2)) == 1
    # A later release of the same bundle had it booted, and was rejected when traffic went back to the earlier one.
    replica, other = live(service, actor, 0.0), factories.started_release(service, actor)
    change(service, replica, release_id=other)
    assert str(shown(service, actor, replica).waits).endswith("to take it")
    assert claimed(service, actor, runner, 2) == [replica]
    left = ask(service, actor, bundle(service, actor, "left"), JobKind.SERVE, created_by="controller")
    assert claim(service, actor, runner) is None
    running = {"state": "ready", "cause": "it is ready", "pid": 7, "address": "127.0.0.1:1"}
    change(service, left, is_wanted=False, replica=running)
    assert claimed(service, actor, runner, 2) == [left]


def test_runners_that_claim_at_once_do_not_exceed_a_quota_together(service: Service, actor: Actor) -> None:
    one = bundle(service, actor)
    allow(service, actor, jobs=3)
    machines = [register(service, actor, f"r{place}") for place in range(6)]
    for _ in machines:
        ask(service, actor, one)
    found = together(*[lambda runner=runner: claim(service, actor, runner) for runner in machines])
    assert sorted(type(each).__name__ for each in found) == ["Claim"] * 3 + ["NoneType"] * 3


def test_gates_wait_when_a_project_has_used_its_runner_time_of_the_day(service: Service, actor: Actor) -> None:
    one, runner = bundle(service, actor), register(service, actor, "r1")
    used, waiting = ask(service, actor, one), ask(service, actor, one)
    change(service, used, state="done", claimed_at=before(service, 60.0), spent_ms=5_400_000)
    allow(service, actor, runner_seconds=5400)
    assert claim(service, actor, runner) is None
    assert str(shown(service, actor, waiting).waits).endswith(
        "the quota of project default: its gates and recordings of the last 24 hours took 1.5 hours of runners, "
        "and it may have 1.5"
    )
    candidate = ask(service, actor, bundle(service, actor, "candidate"), JobKind.SERVE, created_by="controller")
    assert claimed(service, actor, runner, 2) == [candidate]
    # A day later it is as if it had not been.
    change(service, used, claimed_at=before(service, 86_401.0))
    assert claimed(service, actor, runner, 2) == [waiting]


def test_a_job_that_runs_for_longer_than_a_day_counts_the_last_one(service: Service, actor: Actor) -> None:
    made = ask(service, actor, bundle(service, actor))
    assert claimed(service, actor, register(service, actor, "r1"), 1) == [made]
    change(service, made, claimed_at=before(service, 1e5), spent_ms=50_000_000)
    with service.database.transaction() as session:
        found = quotas.shown(session, service.settings, session.get_one(ProjectRow, actor.project_id))
    assert found.runner_seconds == 86_400


def test_a_job_counts_the_time_of_each_attempt(service: Service, actor: Actor) -> None:
    made, runner = ask(service, actor, bundle(service, actor)), register(service, actor, "r1")
    assert claimed(service, actor, runner, 1) == [made]
    # Its holder was not heard of any more for the last half of the time.
    change(service, made, claimed_at=before(service, 600.0), lease_until=before(service, 300.0))
    second = taken(service, actor, runner)
    assert second.job == made
    change(service, made, claimed_at=before(service, 100.0))
    with service.database.transaction() as session:
        running = quotas.shown(session, service.settings, session.get_one(ProjectRow, actor.project_id))
    assert (running.jobs, 400 <= running.runner_seconds < 500) == (1, True)
    end(service, actor, second)
    with service.database.transaction() as session:
        spent = session.get_one(JobRow, made).spent_ms
    assert spent is not None
    assert 400_000 <= spent < 500_000
