from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from registry import db, evidence, failures, jobs, releases, runners
from registry.auth import Actor
from registry.service import Service
from registry.tables import JobRow, ReleaseRow, RunnerRow
from schemas.api import Act, Complete, Progress, ReleaseCreate
from schemas.evidence import Kind, SplitEntry, Traffic
from schemas.problems import InvalidDocument, LeaseLost
from schemas.runner import Claim, JobKind, JobState, Report, RunnerRegistration
from tests.support import factories, phases
from tests.support.world import FINGERPRINT


def runner(session: Session, actor: Actor, name: str = "r1", runner_class: str = "cpu") -> RunnerRow:
    body = {
        "name": name,
        "runner_class": runner_class,
        "fingerprint": FINGERPRINT,
        "engines": ["llamacpp"],
        "boot_id": "b",
    }
    return runners.register(session, actor.project_id, RunnerRegistration.model_validate(body))


def job(service: Service, actor: Actor, kind: JobKind = JobKind.EVALUATE, name: str = "one") -> UUID:
    bundle = factories.registered_bundle(service, actor, name, name.encode())
    policy = factories.registered_policy(service, actor)
    with service.database.transaction() as session:
        return jobs.create(
            session,
            actor.project_id,
            kind,
            bundle=bundle.digest,
            policy=policy.digest,
            gates=["integrity", "compatibility"],
            runner_class="cpu",
            created_by="maria",
            now=db.now(session),
        ).id


def claim(service: Service, actor: Actor, name: str = "r1", runner_class: str = "cpu") -> Claim | None:
    with service.database.transaction() as session:
        return jobs.claim(session, service, runner(session, actor, name, runner_class))


def expire(service: Service, job_id: UUID) -> None:
    with service.database.transaction() as session:
        past = db.now(session) - timedelta(seconds=1)
        session.execute(update(JobRow).where(JobRow.id == job_id).values(lease_until=past))


def report(service: Service, actor: Actor, held: Claim, act: str = "staged", kind: str = "staged") -> tuple[str, bool]:
    body = {"files": 1, "size": 3, "duration_ms": 1}
    with service.database.transaction() as session:
        said = Report(fencing_token=held.fencing_token, act=act, kind=kind, body=body)
        return jobs.report(session, service, actor.project_id, held.job, said)


def state(service: Service, actor: Actor, job_id: UUID) -> tuple[str, int]:
    with service.database.transaction() as session:
        row = jobs.get(session, actor.project_id, job_id)
        return row.state, row.attempt


def test_a_job_is_held_by_one_runner_until_its_lease_runs_out(service: Service, actor: Actor) -> None:
    made = job(service, actor)
    first = claim(service, actor, "r1")
    assert first is not None
    assert first.job == made
    assert first.gates == ["integrity", "compatibility"]
    assert claim(service, actor, "r2") is None
    expire(service, made)
    second = claim(service, actor, "r2")
    assert second is not None
    assert second.fencing_token > first.fencing_token
    assert second.attempt == 2
    assert lost(service, made) == ["runner-lost: runner r1 was not heard of for as long as its lease lasts, again in 0"]


def lost(service: Service, job_id: UUID) -> list[str]:
    """What a run's log says of attempts that came to nothing."""
    with service.database.transaction() as session:
        found = [evidence.claim_of(row.envelope)["body"] for row in evidence.read(session, f"run/{job_id}")]
    told = [body for body in found if "problem" in body and "attempt" in body]
    return [f"{body['problem']}: {body['detail']}, again in {body.get('retry_in_seconds')}" for body in told]


def test_a_run_whose_runners_are_replaced_one_after_another_loses_no_attempt(service: Service, actor: Actor) -> None:
    made = job(service, actor)
    for place in range(4):
        held = claim(service, actor, f"r{place}")
        assert held is not None
        assert (held.job, held.attempt) == (made, 1)
        said = Complete(fencing_token=held.fencing_token, problem="runner-stopped", detail=f"runner r{place} went")
        with service.database.transaction() as session:
            jobs.complete(session, service, actor.project_id, made, said)
        assert state(service, actor, made) == ("pending", 0)
    assert lost(service, made) == [f"runner-stopped: runner r{place} went, again in 0" for place in range(4)]


def test_a_claim_names_what_traffic_goes_back_to_last_accepted_and_not_last_deployed(
    service: Service, actor: Actor
) -> None:
    target = factories.created_target(service, actor)
    policy = factories.registered_policy(service, actor).digest
    good, bad, new = (factories.registered_bundle(service, actor, name, name.encode()).digest for name in "abc")

    def accepted(bundle: str, release: UUID | None) -> str | None:
        with service.database.transaction() as session:
            of = {"release": release} if release else {"target": target}
            made = jobs.create(
                session, actor.project_id, JobKind.EVALUATE, bundle=bundle, policy=policy, runner_class="cpu",
                created_by="maria", now=db.now(session), **of,
            )  # fmt: skip
            held = jobs.claim(session, service, runner(session, actor))
            assert held is not None
            assert held.job == made.id
            return held.accepted

    assert accepted(good, None) is None
    first = phases.promoted(service, actor, good, policy)
    assert accepted(good, first) is None
    body = ReleaseCreate(target="chat@prod", bundle=bad, policy=policy, reason="a test")
    with service.database.transaction() as session:
        second = releases.create(session, service, actor, body).id
    phases.let_in(service, phases.pass_gates(service, second))
    restored = Traffic(
        desired=[SplitEntry(bundle=good, weight_bp=10_000)], revision="2", applied_ms=1.0, step=0,
        requested_at=datetime.now(UTC), applied_at=datetime.now(UTC),
    )  # fmt: skip
    factories.record_act(service, second, Kind.TRAFFIC_RESTORED, restored)
    with service.database.transaction() as session:
        third = releases.create(session, service, actor, body.model_copy(update={"bundle": new})).id
    assert accepted(new, third) == good
    assert accepted(new, None) == good


def test_a_runner_takes_only_jobs_of_its_class(service: Service, actor: Actor) -> None:
    job(service, actor)
    assert claim(service, actor, "gpu1", "h100") is None


def test_whoever_lost_the_lease_changes_nothing_any_more(service: Service, actor: Actor) -> None:
    made = job(service, actor)
    first = claim(service, actor, "r1")
    expire(service, made)
    second = claim(service, actor, "r2")
    assert first is not None
    assert second is not None
    with pytest.raises(LeaseLost):
        report(service, actor, first)
    with pytest.raises(LeaseLost), service.database.transaction() as session:
        jobs.renew(session, service, actor.project_id, made, Progress(fencing_token=first.fencing_token))
    said = Complete(fencing_token=first.fencing_token, problem="disk-full", detail="x")
    with pytest.raises(LeaseLost), service.database.transaction() as session:
        jobs.complete(session, service, actor.project_id, made, said)
    assert state(service, actor, made) == (JobState.CLAIMED, 2)
    assert report(service, actor, second)[1]


def test_a_lease_that_ran_out_but_was_not_taken_may_be_renewed(service: Service, actor: Actor) -> None:
    made = job(service, actor)
    first = claim(service, actor)
    assert first is not None
    expire(service, made)
    with service.database.transaction() as session:
        renewal = jobs.renew(session, service, actor.project_id, made, Progress(fencing_token=first.fencing_token))
    assert renewal.is_wanted
    assert claim(service, actor, "r2") is None


def test_a_report_said_twice_is_one_entry(service: Service, actor: Actor) -> None:
    job(service, actor)
    held = claim(service, actor)
    assert held is not None
    first, is_new = report(service, actor, held)
    again, is_new_again = report(service, actor, held)
    assert (is_new, is_new_again) == (True, False)
    assert first == again


@pytest.mark.parametrize("kind", ["promoted", "traffic_shifted", "gates_passed", "nonsense"])
def test_a_runner_reports_only_what_runners_see(service: Service, actor: Actor, kind: str) -> None:
    job(service, actor)
    held = claim(service, actor)
    assert held is not None
    with pytest.raises(InvalidDocument):
        report(service, actor, held, kind=kind)


def test_a_gate_that_the_job_does_not_run_is_refused(service: Service, actor: Actor) -> None:
    job(service, actor)
    held = claim(service, actor)
    assert held is not None
    body: dict[str, object] = {
        "gate": "golden",
        "definition": "sha256:" + "d" * 64,
        "verdict": "passed",
        "summary": "fine",
        "measurements": [],
        "findings": [],
        "duration_ms": 1,
        "source": "run",
    }
    said = Report(fencing_token=held.fencing_token, act="gate:golden", kind="gate_recorded", body=body)
    with pytest.raises(InvalidDocument), service.database.transaction() as session:
        jobs.report(session, service, actor.project_id, held.job, said)


def test_a_gate_that_failed_gets_no_other_result_in_its_job(service: Service, actor: Actor) -> None:
    made = job(service, actor)
    held = claim(service, actor)
    assert held is not None

    def said(act: str, verdict: str) -> str:
        body = {
            "gate": "integrity",
            "definition": "sha256:" + "d" * 64,
            "verdict": verdict,
            "summary": "as it is",
            "measurements": [],
            "findings": [],
            "duration_ms": 1,
            "source": "run",
        }
        told = Report(fencing_token=held.fencing_token, act=act, kind="gate_recorded", body=body)
        with service.database.transaction() as session:
            return jobs.report(session, service, actor.project_id, held.job, told)[0]

    said("gate:integrity:1", "errored")
    failed = said("gate:integrity:2", "failed")
    with pytest.raises(InvalidDocument, match="has failed"):
        said("gate:integrity:3", "passed")
    assert said("gate:integrity:2", "passed") == failed  # the same report once more changes nothing
    with service.database.transaction() as session:
        verdicts = [result.verdict for result in jobs.results(session, jobs.get(session, actor.project_id, made))]
    assert verdicts == ["errored", "failed"]


def test_a_problem_is_tried_again_later_and_ends_after_three_attempts(service: Service, actor: Actor) -> None:
    made = job(service, actor)
    for attempt in (1, 2, 3):
        held = claim(service, actor)
        assert held is not None
        assert held.attempt == attempt
        with service.database.transaction() as session:
            said = Complete(fencing_token=held.fencing_token, problem="disk-full", detail="no space left")
            jobs.complete(session, service, actor.project_id, made, said)
        assert claim(service, actor) is None
        with service.database.transaction() as session:
            session.execute(update(JobRow).where(JobRow.id == made).values(due_at=db.now(session)))
    assert state(service, actor, made) == (JobState.DONE, 3)
    with service.database.transaction() as session:
        assert jobs.outcome(session, jobs.get(session, actor.project_id, made)) == "undecided"


def test_a_job_whose_runners_keep_dying_ends_after_three_claims(service: Service, actor: Actor) -> None:
    made = job(service, actor)
    for _ in range(3):
        assert claim(service, actor) is not None
        expire(service, made)
    assert claim(service, actor) is None
    assert state(service, actor, made) == (JobState.DONE, 3)
    assert [told.rsplit(" ", 1)[-1] for told in lost(service, made)] == ["0", "0", "None"]


def test_live_traffic_goes_before_gates(service: Service, actor: Actor) -> None:
    job(service, actor, JobKind.EVALUATE, "one")
    serving = job(service, actor, JobKind.SERVE, "two")
    held = claim(service, actor)
    assert held is not None
    assert held.job == serving


def test_an_evaluation_with_no_verdict_has_not_passed(service: Service, actor: Actor) -> None:
    made = job(service, actor)
    held = claim(service, actor)
    assert held is not None
    with service.database.transaction() as session:
        jobs.complete(session, service, actor.project_id, made, Complete(fencing_token=held.fencing_token))
    with service.database.transaction() as session:
        assert jobs.outcome(session, jobs.get(session, actor.project_id, made)) == "undecided"


def test_a_replica_that_ends_unasked_is_booted_again_after_a_pause_by_the_same_job(
    service: Service, actor: Actor
) -> None:
    made = job(service, actor, JobKind.SERVE)
    held = claim(service, actor)
    assert held is not None
    with service.database.transaction() as session:
        jobs.complete(session, service, actor.project_id, made, Complete(fencing_token=held.fencing_token))
    assert state(service, actor, made) == (JobState.PENDING, 1)
    assert claim(service, actor) is None
    with service.database.transaction() as session:
        assert jobs.get(session, actor.project_id, made).due_at > db.now(session)


def slots(service: Service, actor: Actor, count: int | None) -> None:
    """Have r1 say how many jobs it holds at once."""
    body = {"name": "r1", "runner_class": "cpu", "fingerprint": FINGERPRINT, "engines": ["llamacpp"], "boot_id": "b"}
    with service.database.transaction() as session:
        runners.register(session, actor.project_id, RunnerRegistration.model_validate(body | {"slots": count}))


def take(service: Service, actor: Actor) -> Claim | None:
    with service.database.transaction() as session:
        row = session.query(RunnerRow).filter_by(name="r1").one()
        return jobs.claim(session, service, row)


def test_the_last_slot_of_a_runner_is_for_a_bundle_that_is_live_or_was(service: Service, actor: Actor) -> None:
    slots(service, actor, 2)
    first, second = job(service, actor, name="one"), job(service, actor, name="two")
    release = factories.started_release(service, actor)
    with service.database.transaction() as session:
        row = releases.get(session, actor.project_id, release)
        wanted = jobs.create(
            session,
            actor.project_id,
            JobKind.SERVE,
            bundle=row.bundle,
            runner_class="cpu",
            release=release,
            target=row.target_id,
            created_by="controller",
            now=db.now(session),
        ).id
    taken = take(service, actor)
    assert taken is not None
    # A candidate's replica waits as a gate does; one of a bundle that was live does not.
    assert taken.job == wanted
    assert take(service, actor) is None
    with service.database.transaction() as session:
        jobs.complete(session, service, actor.project_id, wanted, Complete(fencing_token=1, problem="x", detail="x"))
    again = take(service, actor)
    assert again is not None
    assert again.job == first
    with service.database.transaction() as session:
        session.execute(update(JobRow).where(JobRow.id == wanted).values(due_at=db.now(session)))
        session.execute(update(ReleaseRow).where(ReleaseRow.id == release).values({"phase": "superseded"}))
    back = take(service, actor)
    assert back is not None
    assert back.job == wanted
    slots(service, actor, None)
    unsaid = take(service, actor)
    assert unsaid is not None
    assert unsaid.job == second


def test_a_runner_with_one_slot_uses_it_for_anything(service: Service, actor: Actor) -> None:
    slots(service, actor, 1)
    job(service, actor)
    assert take(service, actor) is not None


def test_a_release_says_what_its_job_waits_for(service: Service, actor: Actor) -> None:
    release = factories.started_release(service, actor)

    def waits() -> str | None:
        with service.database.transaction() as session:
            return releases.wire(session, releases.get(session, actor.project_id, release)).waits

    def work(name: str) -> UUID:
        bundle = factories.registered_bundle(service, actor, name, name.encode())
        with service.database.transaction() as session:
            kind, now = JobKind.EVALUATE, db.now(session)
            made = jobs.create(
                session, actor.project_id, kind, bundle=bundle.digest, runner_class="cpu", created_by="x", now=now
            )
            made.release_id = release if name == "mine" else None
            return made.id

    assert waits() is None
    mine = work("mine")
    lone = str(waits())
    assert f"for a runner of class cpu: none of project {actor.project} has been heard of for 30 s" in lone
    assert lone.endswith(f"`sluicegate token create NAME --role runner --project {actor.project}`")
    slots(service, actor, 2)
    assert str(waits()).endswith("for a runner of class cpu to take it")
    with service.database.transaction() as session:
        session.get_one(JobRow, mine).due_at += timedelta(seconds=600)
    filler = work("filler")
    first = take(service, actor)
    assert first is not None
    assert first.job == filler
    with service.database.transaction() as session:
        session.get_one(JobRow, mine).due_at -= timedelta(seconds=600)
    assert str(waits()).endswith(
        "for a free slot: runners of class cpu hold 1 job in 2 slots; 1 is kept for what is live or was"
    )
    slots(service, actor, 3)
    second = take(service, actor)
    assert second is not None
    assert second.job == mine
    assert waits() is None

    def doing() -> str | None:
        with service.database.transaction() as session:
            return releases.detail(session, releases.get(session, actor.project_id, release)).doing

    assert doing() == "evaluate: claimed"
    with service.database.transaction() as session:
        said = Progress(fencing_token=second.fencing_token, progress="load 12/64, p99 TTFT 80 ms")
        jobs.renew(session, service, actor.project_id, mine, said)
    assert doing() == "evaluate: load 12/64, p99 TTFT 80 ms"
    with service.database.transaction() as session:
        jobs.complete(session, service, actor.project_id, mine, Complete(fencing_token=second.fencing_token))
    assert doing() is None


def test_failures_of_a_live_replica_are_counted_over_jobs_until_it_is_ready(service: Service, actor: Actor) -> None:
    release = factories.started_release(service, actor)
    with service.database.transaction() as session:
        row = releases.get(session, actor.project_id, release)
        bundle, target = row.bundle, row.target_id

    def attempt(count: int) -> tuple[float, float]:
        """Open a job, take it and have it fail so often. Returns bounds of the wait before the next try, in s."""
        with service.database.transaction() as session:
            made = jobs.create(
                session,
                actor.project_id,
                JobKind.SERVE,
                bundle=bundle,
                runner_class="cpu",
                release=release,
                target=target,
                created_by="controller",
                now=db.now(session),
            )
        bounds = 0.0, 0.0
        for _ in range(count):
            with service.database.transaction() as session:
                session.get_one(JobRow, made.id).due_at = db.now(session)
            claimed = claim(service, actor)
            assert claimed is not None
            with service.database.transaction() as session:
                said = Complete(fencing_token=claimed.fencing_token, problem="engine-failed", detail="as scripted")
                before = db.now(session)
                jobs.complete(session, service, actor.project_id, claimed.job, said)
                due = session.get_one(JobRow, made.id).due_at
                bounds = (due - db.now(session)).total_seconds(), (due - before).total_seconds()
        with service.database.transaction() as session:
            jobs.unwant(session, session.get_one(JobRow, made.id), now=db.now(session))
        return bounds

    def seen() -> tuple[int, str]:
        with service.database.transaction() as session:
            found = failures.history(releases.log(session, release))
            return found.failures, found.why

    assert seen() == (0, "")
    for count, wait in ((1, 5), (2, 20)):
        least, most = attempt(count)
        assert least <= wait <= most
    assert seen() == (3, "engine-failed: as scripted")
    assert [failures.backoff(count) for count in (0, 1, 3, 9)] == [0, 5, 20, 60]
    with service.database.transaction() as session:
        releases.pause(session, service, actor, release, Act(reason="lunch"))
    with service.database.transaction() as session:
        releases.resume(session, service, actor, release, Act(reason="a new driver is installed"))
    assert seen()[0] == 0


def test_a_run_whose_last_problem_has_many_words_comes_to_an_end_all_the_same(service: Service, actor: Actor) -> None:
    made = job(service, actor)
    for _ in range(3):
        held = claim(service, actor)
        assert held is not None
        said = Complete(fencing_token=held.fencing_token, problem="disk-full", detail="no room " * 100)
        with service.database.transaction() as session:
            jobs.complete(session, service, actor.project_id, made, said)
        with service.database.transaction() as session:
            session.execute(update(JobRow).where(JobRow.id == made).values(due_at=db.now(session)))
    assert state(service, actor, made) == (JobState.DONE, 3)


# ------------------------------------------------------------------------------------- what nobody wants any more


def told(service: Service, actor: Actor, held: Claim, state: str) -> None:
    """Report a replica of a serve job."""
    body = {"state": state, "cause": "it is", "address": "127.0.0.1:1", "pid": 1, "start_time": "1", "boot_id": "b"}
    with service.database.transaction() as session:
        said = Report(fencing_token=held.fencing_token, act=f"replica:{state}", kind="replica_changed", body={**body})
        jobs.report(session, service, actor.project_id, held.job, said)


def unwant(service: Service, job_id: UUID) -> None:
    with service.database.transaction() as session:
        jobs.unwant(session, session.get_one(JobRow, job_id), now=db.now(session))


def shown(service: Service, job_id: UUID) -> str | None:
    with service.database.transaction() as session:
        replica = jobs.wire(session, session.get_one(JobRow, job_id)).replica
        return replica.state if replica else None


@pytest.mark.parametrize("kind", [JobKind.SERVE, JobKind.EVALUATE])
@pytest.mark.parametrize("last", [None, "failed"])
def test_what_nobody_wants_any_more_and_no_engine_is_left_of_ends_instead_of_being_taken_again(
    service: Service, actor: Actor, kind: JobKind, last: str | None
) -> None:
    made = job(service, actor, kind)
    held = claim(service, actor)
    assert held is not None
    assert held.is_wanted
    if last is not None:
        told(service, actor, held, last)
    unwant(service, made)
    assert state(service, actor, made)[0] == JobState.CLAIMED
    assert claim(service, actor, "r2") is None
    assert state(service, actor, made)[0] == JobState.CLAIMED, "its holder has still to say how it ended"
    expire(service, made)
    assert claim(service, actor, "r2") is None
    assert state(service, actor, made)[0] in {JobState.CANCELLED, JobState.DONE}
    assert shown(service, made) == last


@pytest.mark.parametrize("last", ["loading", "ready", "draining"])
def test_a_replica_that_nobody_wants_any_more_and_that_may_still_run_is_taken_to_be_ended(
    service: Service, actor: Actor, last: str
) -> None:
    made = job(service, actor, JobKind.SERVE)
    held = claim(service, actor)
    assert held is not None
    told(service, actor, held, last)
    unwant(service, made)
    expire(service, made)
    again = claim(service, actor, "r2")
    assert again is not None
    assert (again.job, again.is_wanted) == (made, False)
    with service.database.transaction() as session:
        jobs.complete(session, service, actor.project_id, made, Complete(fencing_token=again.fencing_token))
    assert state(service, actor, made)[0] == JobState.CANCELLED
    # Whoever took it found no engine of it.
    assert shown(service, made) == "stopped"


def test_a_replica_that_fails_when_nobody_wants_it_any_more_is_not_tried_again(service: Service, actor: Actor) -> None:
    made = job(service, actor, JobKind.SERVE)
    held = claim(service, actor)
    assert held is not None
    unwant(service, made)
    with service.database.transaction() as session:
        said = Complete(fencing_token=held.fencing_token, problem="engine-failed", detail="it died as it drained")
        jobs.complete(session, service, actor.project_id, made, said)
        row = session.get_one(JobRow, made)
        assert (row.state, row.problem) == (JobState.CANCELLED, "engine-failed: it died as it drained")
