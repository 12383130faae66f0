"""What is to take the place of a replica that serves finds room, and takes none from what serves nobody yet."""

from uuid import UUID

from sqlalchemy import update

from registry import db, handover, runners
from registry.auth import Actor
from registry.service import Service
from registry.tables import JobRow, ReleaseRow
from schemas.runner import Claim, JobKind
from tests.registry.test_scheduling import (
    H100,
    allow,
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
from tests.support import factories

READY = {"state": "ready", "cause": "it is ready", "pid": 7, "address": "127.0.0.1:1"}


def drained(service: Service, actor: Actor, count: int = 0) -> tuple[Claim, UUID]:
    """Have what is live served by a runner that drains. Returns its claim, and the job that is to take its place."""
    runner = register(service, actor, "old", *[H100] * count)
    serves = live(service, actor, waits=0, name="served", count=count)
    held = taken(service, actor, runner)
    assert held.job == serves
    change(service, serves, replica=READY)
    manager = Actor(project_id=actor.project_id, project="default", name="mia", role="manager")
    with service.database.transaction() as session:
        runners.drain(session, manager, "old", "a new driver")
        target = session.get_one(JobRow, serves).target_id
        assert target is not None
        (made,) = handover.begin(session, target, db.now(session))
        return held, made.id


def bundle_of(service: Service, job: UUID) -> str:
    with service.database.transaction() as session:
        return session.get_one(JobRow, job).bundle


def test_the_slot_that_is_kept_for_a_rollback_is_not_taken_by_what_another_replica_serves_for(
    service: Service, actor: Actor
) -> None:
    held, beside = drained(service, actor)
    runner = register(service, actor, "new", slots=2)
    gates = ask(service, actor, bundle(service, actor, "gates"))
    change(service, beside, due_at=before(service, -60))
    assert taken(service, actor, runner).job == gates
    change(service, beside, due_at=before(service, 1))
    assert claim(service, actor, runner) is None
    assert str(shown(service, actor, beside).waits).endswith("1 is kept for what is live or was")
    # A rollback finds it.
    back = live(service, actor, waits=0, name="back")
    assert taken(service, actor, runner).job == back
    change(service, back, state="done")
    # Nobody serves for it any more.
    change(service, held.job, state="cancelled")
    assert taken(service, actor, runner).job == beside


def test_a_rollback_comes_before_what_another_replica_serves_for(service: Service, actor: Actor) -> None:
    _, beside = drained(service, actor)
    runner = register(service, actor, "new")
    back = live(service, actor, waits=0, name="back")
    with service.database.transaction() as session:
        session.execute(
            update(ReleaseRow).where(ReleaseRow.bundle == bundle_of(service, back)).values(phase="superseded")
        )
    assert [taken(service, actor, runner).job for _ in range(2)] == [back, beside]


def test_gates_make_room_for_a_rollback_first_and_never_a_kept_slot_for_a_replacement(
    service: Service, actor: Actor
) -> None:
    _, beside = drained(service, actor)
    change(service, beside, due_at=before(service, -60))
    runner = register(service, actor, "new", slots=3)
    held = []
    for _ in range(2):
        ask(service, actor, bundle(service, actor))
        held.append(taken(service, actor, runner))
    change(service, beside, due_at=before(service, 60))
    # A slot is free, and kept: one gate makes room in the others.
    assert sorted(renew(service, actor, each) for each in held) == [False, True]
    ended = next(each for each in held if not renew(service, actor, each))
    back = live(service, actor, waits=6, name="back")
    # It takes the kept one at once; and the room that is made, if that is free first.
    assert taken(service, actor, runner).job == back
    end(service, actor, ended)
    assert claim(service, actor, runner) is None
    change(service, back, state="done")
    assert taken(service, actor, runner).job == beside


def test_what_waits_longest_to_take_a_place_makes_no_room_before_a_rollback(service: Service, actor: Actor) -> None:
    _, beside = drained(service, actor, count=1)
    change(service, beside, due_at=before(service, -60))
    runner = register(service, actor, "new", H100)
    ask(service, actor, bundle(service, actor, count=1), JobKind.RECORD)
    held = taken(service, actor, runner)
    change(service, beside, due_at=before(service, 600))
    back = live(service, actor, waits=6, name="back", count=1)
    assert not renew(service, actor, held)
    with service.database.transaction() as session:
        assert session.get_one(JobRow, held.job).preempted_for == back


def test_a_candidate_that_its_projects_quota_held_back_is_booted_once_there_is_room_and_so_is_one_whose_runner_is_lost(
    service: Service, actor: Actor
) -> None:
    runner, other = register(service, actor, "r1"), register(service, actor, "r2")
    release = factories.started_release(service, actor)
    with service.database.transaction() as session:
        row = session.get_one(ReleaseRow, release)
        row.phase = "canary"
        digest, target = row.bundle, row.target_id
    allow(service, actor, jobs=1)
    ask(service, actor, bundle(service, actor))
    held = taken(service, actor, runner)
    candidate = ask(service, actor, digest, JobKind.SERVE, release=release, target=target)
    assert claim(service, actor, runner) is None
    end(service, actor, held)
    assert taken(service, actor, runner).job == candidate
    # Its runner is lost, and another's gates have taken the room meanwhile.
    change(service, candidate, lease_until=before(service, 1), due_at=before(service, -60), runner_class="away")
    ask(service, actor, bundle(service, actor, "more"))
    held = taken(service, actor, other)
    change(service, candidate, due_at=before(service, 1), runner_class="cpu")
    assert claim(service, actor, other) is None
    end(service, actor, held)
    assert taken(service, actor, other).job == candidate
