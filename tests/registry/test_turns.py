"""Who waits for whom among runners: nobody for ever, and what failed on one goes to another first."""

from uuid import UUID

import pytest
from sqlalchemy import update

from registry import jobs, runners
from registry.auth import Actor
from registry.service import Service
from registry.tables import JobRow, RunnerRow
from schemas.api import Complete
from schemas.failures import Cause
from schemas.problems import Conflict
from schemas.runner import Claim, JobKind
from tests.registry.test_scheduling import (
    H100,
    ask,
    before,
    bundle,
    change,
    claim,
    end,
    live,
    register,
    shown,
    taken,
)


def fail(service: Service, actor: Actor, held: Claim, problem: str, cause: Cause | None = None) -> None:
    """End an attempt in a problem; its next try is due now."""
    with service.database.transaction() as session:
        said = Complete(fencing_token=held.fencing_token, problem=problem, detail="no room", cause=cause)
        jobs.complete(session, service, actor.project_id, held.job, said)
    change(service, held.job, due_at=before(service, 1))


def silence(service: Service, runner: UUID, seconds: float) -> None:
    """Let a runner have been heard of last so many seconds ago."""
    with service.database.transaction() as session:
        session.execute(update(RunnerRow).where(RunnerRow.id == runner).values(last_seen_at=before(service, seconds)))


def test_what_needs_all_of_a_machine_gets_it_though_small_jobs_never_end(service: Service, actor: Actor) -> None:
    small, large = bundle(service, actor, "small", 1), bundle(service, actor, "large", 2)
    idler, busy = register(service, actor, "a", H100, H100), register(service, actor, "b", H100, H100)
    held = [taken(service, actor, busy) for _ in range(2) if ask(service, actor, small)]
    held += [taken(service, actor, idler) for _ in range(2) if ask(service, actor, small)]
    big = ask(service, actor, large)
    end(service, actor, held[2])
    ask(service, actor, small)
    held[2] = taken(service, actor, idler)  # it has not waited for long
    change(service, big, due_at=before(service, 601))
    end(service, actor, held[2])
    ask(service, actor, small)
    # Fewer have to end on this one, and the other goes on as before.
    assert claim(service, actor, idler) is None
    assert str(shown(service, actor, big).waits).endswith(
        "a has reserved 1 of 2 accelerators; b has reserved 2 of 2 accelerators; a takes no other gates until it has it"
    )
    end(service, actor, held[0])
    assert taken(service, actor, busy).bundle == small
    end(service, actor, held[3])
    found = taken(service, actor, idler)
    assert (found.job, found.devices) == (big, [0, 1])


def test_turns_are_kept_though_all_of_them_have_waited_for_long(service: Service, actor: Actor) -> None:
    one, runner = bundle(service, actor, count=1), register(service, actor, "a", H100)
    greedy = [ask(service, actor, one, created_by="greedy") for _ in range(3)]
    modest = [ask(service, actor, one, created_by="modest") for _ in range(2)]
    for place, job in enumerate([*greedy, *modest]):
        change(service, job, due_at=before(service, 900 - place))
    order = []
    for _ in range(5):
        held = taken(service, actor, runner)
        order.append(held.job)
        assert claim(service, actor, runner) is None
        end(service, actor, held)
    assert order == [greedy[0], modest[0], greedy[1], modest[1], greedy[2]]


def test_what_is_live_still_finds_room_on_a_runner_that_is_kept(service: Service, actor: Actor) -> None:
    small, runner = bundle(service, actor, "small", 1), register(service, actor, "a", H100, H100)
    ask(service, actor, small)
    first = taken(service, actor, runner)
    change(service, ask(service, actor, bundle(service, actor, "large", 2)), due_at=before(service, 601))
    ask(service, actor, small)
    assert claim(service, actor, runner) is None
    replica = live(service, actor, 0.0, count=1)
    assert taken(service, actor, runner).job == replica
    # Beside what is live the large one never fits here, so nothing is kept for it.
    end(service, actor, first)
    assert taken(service, actor, runner).bundle == small


@pytest.mark.parametrize(
    ("kind", "problem", "cause", "is_left"),
    [
        (JobKind.EVALUATE, "disk-full", None, True),
        (JobKind.EVALUATE, "engine-failed", Cause.OUT_OF_MEMORY, True),
        (JobKind.EVALUATE, "runner-stopped", None, False),
        (JobKind.SERVE, "disk-full", None, True),
        (JobKind.SERVE, "engine-failed", Cause.EXITED, False),
    ],
)
def test_what_failed_on_a_runner_is_left_to_another_that_fits(
    service: Service, actor: Actor, kind: JobKind, problem: str, cause: Cause | None, is_left: bool
) -> None:
    made = ask(service, actor, bundle(service, actor, count=1), kind)
    first = register(service, actor, "a", H100)
    fail(service, actor, taken(service, actor, first), problem, cause)
    # There is nobody else: one does not fit, one is not heard of.
    register(service, actor, "small")
    second = register(service, actor, "b", H100)
    silence(service, second, 60)
    again = taken(service, actor, first)
    assert again.job == made
    fail(service, actor, again, problem, cause)
    silence(service, second, 0)
    assert (claim(service, actor, first) is None) == is_left
    if is_left:
        change(service, made, due_at=before(service, 31))  # the other is busy all the while
        third = taken(service, actor, first)
        change(service, made, attempt=1)
        fail(service, actor, third, problem, cause)
        assert taken(service, actor, second).job == made


def test_what_a_killed_runner_held_does_not_keep_it_from_taking_that_again(service: Service, actor: Actor) -> None:
    made, runner = ask(service, actor, bundle(service, actor)), register(service, actor, "a", slots=2)
    waiting = ask(service, actor, bundle(service, actor, "two"))
    assert taken(service, actor, runner).job == made
    assert claim(service, actor, runner) is None  # the other slot is kept
    assert "hold 1 job in 2 slots; 1 is kept" in str(shown(service, actor, waiting).waits)
    change(service, made, lease_until=before(service, 1))
    again = taken(service, actor, runner)
    assert (again.job, again.attempt) == (made, 2)


# ----------------------------------------------------------------------------------------------- one name, one machine


def test_a_name_is_one_machine_for_as_long_as_that_is_heard_of(service: Service, actor: Actor) -> None:
    runner = register(service, actor, "a", boot_id="here")
    register(service, actor, "a", boot_id="here")
    with pytest.raises(Conflict, match=r"another machine \(boot here; this one is there\)"):
        register(service, actor, "a", boot_id="there")
    silence(service, runner, 31)
    assert register(service, actor, "a", boot_id="there") == runner

    def speak(boot_id: str | None) -> None:
        with service.database.transaction() as session:
            runners.heartbeat(session, actor.project_id, runner, boot_id=boot_id)

    speak("there")
    speak(None)  # an older one
    with pytest.raises(Conflict, match="boot there; this one is here"):
        speak("here")
    # The runner of a cluster is on one node or another.
    silence(service, runner, 31)
    register(service, actor, "a", boot_id="node-1", launcher="kubernetes")
    register(service, actor, "a", boot_id="node-2", launcher="kubernetes")
    speak("node-1")


def test_jobs_keep_their_accelerators_whatever_stands_in_their_places_now(service: Service, actor: Actor) -> None:
    one, cards = bundle(service, actor, count=1), [f"GPU-{place}" for place in range(4)]
    runner = register(service, actor, "a", *[H100] * 4, device_ids=cards)
    held = [taken(service, actor, runner) for _ in range(3) if ask(service, actor, one)]
    assert [each.devices for each in held] == [[0], [1], [2]]
    # The second fell off its bus.
    register(service, actor, "a", *[H100] * 3, device_ids=[cards[0], cards[2], cards[3]])
    assert [devices(service, each.job) for each in held] == [[0], [], [1]]
    ask(service, actor, one)
    assert taken(service, actor, runner).devices == [2]
    ask(service, actor, one)
    assert claim(service, actor, runner) is None
    # Of a version that does not say their names, all may be in use.
    register(service, actor, "a", *[H100] * 4)
    assert [devices(service, each.job) for each in (held[0], held[2])] == [[0, 1, 2, 3]] * 2
    assert claim(service, actor, runner) is None
    for each in (held[0], held[2]):
        end(service, actor, each)
    register(service, actor, "a", *[H100] * 4, device_ids=cards)
    assert claim(service, actor, runner) is None  # what was taken in between has all of them still


def devices(service: Service, job: UUID) -> list[int]:
    with service.database.transaction() as session:
        return list(session.get_one(JobRow, job).devices or [])
