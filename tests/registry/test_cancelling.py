"""A run that belongs to no release is cancelled, as a recorded act; what it measures afterwards counts no more."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import UUID

import pytest
from sqlalchemy import text

from registry import cancelling, db, jobs, runs, verification
from registry.tables import ReleaseRow
from schemas.api import Act, Complete, Progress
from schemas.common import canonical_json
from schemas.problems import LeaseLost, NotPermitted, TransitionRefused
from schemas.runner import JobKind, JobState, Report
from tests.registry.test_jobs import claim, expire
from tests.support.factories import (
    created_target,
    reference_body,
    registered_bundle,
    registered_golden,
    registered_policy,
    started_release,
)

WHY = {"reason": "no runner is of that class"}


def asked(api) -> str:
    actor = api.actor("manager")
    body = {"bundle": registered_bundle(api.service, actor).digest, "runner_class": "cpu"}
    body |= {"policy": registered_policy(api.service, actor, "other").digest, "gates": ["integrity"]}
    answer = api.clients["engineer"].post("/v1/runs", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def cancelled(api, run: str, role: str = "engineer"):
    return api.clients[role].post(f"/v1/runs/{run}/cancellations", json=WHY)


def kinds(api, run: str) -> list[str]:
    found = api.clients["engineer"].get("/v1/evidence", params={"stream": f"run/{run}"}).json()["items"]
    return [entry["kind"] for entry in found]


def complete(api, held) -> None:
    with api.service.database.transaction() as session:
        said = Complete(fencing_token=held.fencing_token)
        jobs.complete(session, api.service, api.actor("manager").project_id, held.job, said)


def test_a_run_that_nobody_holds_is_cancelled_at_once_and_asking_twice_changes_nothing(api):
    run = asked(api)
    for _ in range(2):
        answer = cancelled(api, run)
        assert answer.status_code == 200, answer.text
        assert answer.json()["state"] == "cancelled"
        assert WHY["reason"] in answer.json()["problem"]
    assert kinds(api, run) == ["run_asked", "run_cancelled"]
    assert claim(api.service, api.actor("manager")) is None


def test_a_run_that_is_held_takes_no_gate_any_more_and_ends_cancelled(api):
    run, actor = asked(api), api.actor("manager")
    held = claim(api.service, actor)
    assert cancelled(api, run).json()["state"] == "claimed"
    with api.service.database.transaction() as session:
        said = Progress(fencing_token=held.fencing_token)
        assert not jobs.renew(session, api.service, actor.project_id, held.job, said).is_wanted
    body = {"gate": "integrity", "definition": "sha256:" + "d" * 64, "verdict": "passed", "summary": "fine"}
    body |= {"measurements": [], "findings": [], "duration_ms": 1, "source": "run"}
    late = Report(fencing_token=held.fencing_token, act="gate:integrity", kind="gate_recorded", body=body)
    with pytest.raises(LeaseLost, match="was cancelled"), api.service.database.transaction() as session:
        jobs.report(session, api.service, actor.project_id, held.job, late)
    complete(api, held)
    found = api.clients["engineer"].get(f"/v1/runs/{run}").json()
    assert (found["state"], found["outcome"]) == ("cancelled", "undecided")
    assert WHY["reason"] in found["problem"]
    assert kinds(api, run) == ["run_asked", "run_cancelled"]


def test_a_run_whose_runner_is_lost_ends_at_once_also_when_it_is_lost_after_the_cancellation(api):
    first, second = asked(api), asked(api)
    actor = api.actor("manager")
    assert {str(claim(api.service, actor, name).job) for name in ("r1", "r2")} == {first, second}
    expire(api.service, UUID(first))
    assert cancelled(api, first).json()["state"] == "cancelled"
    assert cancelled(api, second).json()["state"] == "claimed"
    expire(api.service, UUID(second))
    assert cancelled(api, second).json()["state"] == "cancelled"
    assert kinds(api, first) == kinds(api, second) == ["run_asked", "run_cancelled"]
    with api.service.database.transaction() as session:
        assert verification.verify(session, actor.project_id).faults == []


def test_a_recording_that_is_cancelled_sets_no_reference(api):
    actor = api.actor("manager")
    created_target(api.service, actor, "chat@prod")
    suite, bundle = registered_golden(api.service, actor), registered_bundle(api.service, actor)
    body = {"suite": suite.digest, "bundle": bundle.digest, "target": "chat@prod", "reason": "the first"}
    run = api.clients["manager"].post("/v1/recordings", json=body).json()["id"]
    held = claim(api.service, actor)
    assert cancelled(api, run).status_code == 200
    raw = canonical_json(reference_body(suite, bundle.digest))
    with pytest.raises(LeaseLost, match="was cancelled"), api.service.database.transaction() as session:
        runs.store_reference(session, api.service, actor.project_id, held.job, held.fencing_token, raw)
    complete(api, held)
    assert api.clients["viewer"].get("/v1/targets/chat@prod").json()["references"] == {}
    with api.service.database.transaction() as session:
        assert verification.verify(session, actor.project_id).faults == []


def test_a_token_for_other_targets_cancels_no_run_of_this_one(api):
    actor = api.actor("manager")
    created_target(api.service, actor, "chat@prod")
    body = {"bundle": registered_bundle(api.service, actor).digest, "runner_class": "cpu", "target": "chat@prod"}
    body |= {"policy": registered_policy(api.service, actor).digest, "gates": ["integrity"]}
    run = api.clients["engineer"].post("/v1/runs", json=body).json()["id"]
    limited = replace(api.actor("ci"), targets=frozenset({"chat@staging"}))
    with pytest.raises(NotPermitted, match="chat@staging"), api.service.database.transaction() as session:
        cancelling.cancel(session, api.service, limited, UUID(run), Act(reason="not mine"))
    assert api.clients["viewer"].get(f"/v1/runs/{run}").json()["state"] == "pending"


def test_a_run_that_is_over_is_refused_with_what_came_of_it(api):
    run = asked(api)
    complete(api, claim(api.service, api.actor("manager")))
    answer = cancelled(api, run)
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (409, "transition-refused")
    assert "undecided" in answer.json()["detail"]
    assert kinds(api, run) == ["run_asked", "run_ended"]


@pytest.mark.parametrize(("role", "status"), [("ci", 200), ("manager", 200), ("viewer", 403), ("runner", 403)])
def test_who_may_ask_for_a_run_may_cancel_it(api, role, status):
    assert cancelled(api, asked(api), role).status_code == status


@pytest.mark.parametrize("_again", range(5))
def test_of_a_cancellation_and_an_end_one_wins(api, _again):
    run, actor = asked(api), api.actor("engineer")
    held = claim(api.service, api.actor("manager"))

    def cancel() -> bool:
        try:
            with api.service.database.transaction() as session:
                cancelling.cancel(session, api.service, actor, UUID(run), Act(reason="x"))
        except TransitionRefused:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        ended, won = pool.submit(complete, api, held), pool.submit(cancel)
        ended.result()
        has_won = won.result()
    assert kinds(api, run)[1:] == (["run_cancelled"] if has_won else ["run_ended"])
    state = api.clients["engineer"].get(f"/v1/runs/{run}").json()["state"]
    assert state == (JobState.CANCELLED if has_won else JobState.DONE)


def test_a_cancelled_run_is_held_to_the_log(api):
    run, other = asked(api), asked(api)
    cancelled(api, run)
    project = api.actor("manager").project_id

    def faults(change: str) -> list[str]:
        with api.service.database.transaction() as session:
            session.execute(text("SET LOCAL session_replication_role = replica"))
            session.execute(text(change))
            found = verification.verify(session, project).faults
            session.rollback()
        return [fault.problem for fault in found]

    told = "is cancelled, or is not, otherwise than its log says"
    assert faults("SELECT 1") == []
    assert f"the job {run} {told}" in faults(f"UPDATE jobs SET state = 'pending' WHERE id = '{run}'")
    assert f"the job {run} {told}" in faults(f"UPDATE jobs SET is_wanted = true WHERE id = '{run}'")
    assert f"the job {other} {told}" in faults(f"UPDATE jobs SET state = 'cancelled' WHERE id = '{other}'")
    assert f"the job {other} {told}" in faults(f"UPDATE jobs SET is_wanted = false WHERE id = '{other}'")
    assert faults(f"DELETE FROM entries WHERE stream = 'run/{run}' AND kind = 'run_cancelled'")


def test_a_run_of_a_release_says_to_reject_the_release(api):
    actor = api.actor("manager")
    release = started_release(api.service, actor)
    with api.service.database.transaction() as session:
        run = jobs.create(
            session,
            actor.project_id,
            JobKind.EVALUATE,
            bundle=session.get_one(ReleaseRow, release).bundle,
            gates=["integrity"],
            runner_class="cpu",
            created_by="controller",
            release=release,
            now=db.now(session),
        ).id
    answer = cancelled(api, str(run))
    assert answer.status_code == 409
    assert f"sluicegate release reject {release}" in answer.json()["detail"]
