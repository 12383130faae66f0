"""What an older version kept without an entry: recorded once, as it is found, and held to that from then on."""

from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import text
from uuid6 import uuid7

from registry import adoption, auth, blobs, collection, db, evidence, jobs, projects, runs, verification
from registry.auth import Actor
from registry.tables import ProjectBlobRow, ProjectRow, TokenRow
from schemas.api import RunCreate
from schemas.common import sha256_digest
from schemas.evidence import Kind, ProjectSet, TokenCreated, TokenRevoked
from schemas.problems import Unavailable
from schemas.runner import JobKind
from tests.support.factories import registered_bundle, registered_policy
from tests.support.together import together


@pytest.fixture
def old(committed):
    """A project as an older version left it: two tokens whose entries do not say which secret they have."""
    with committed.database.transaction() as session:
        made_at = db.now(session) - timedelta(days=1)
        project = ProjectRow(id=uuid7(), name="default", created_at=made_at, max_jobs=3)
        session.add(project)
        session.flush()
        for name, is_over in (("maria", False), ("nora", True)):
            token = row(project.id, name, made_at, revoked_at=made_at + timedelta(hours=1) if is_over else None)
            session.add(token)
            session.flush()
            said = TokenCreated(token=token.id, role="manager", name=name)
            auth.record_token(session, committed, token, f"token:{token.id}", "root", Kind.TOKEN_CREATED, said)
            if is_over:
                end = TokenRevoked(token=token.id, name=name, reason="she left")
                auth.record_token(session, committed, token, "revoked", "root", Kind.TOKEN_REVOKED, end)
        return project.id


def row(project, name, at, **changes):
    values = {"role": "manager", "targets": None, "expires_at": None, "revoked_at": None} | changes
    secret = auth.fingerprint(auth.new_secret())
    return TokenRow(id=uuid7(), project_id=project, name=name, secret_sha256=secret, created_at=at, **values)


def problems(service, project):
    with service.database.transaction() as session:
        return {fault.problem for fault in verification.verify(session, project).faults}


def log(service, project):
    with service.database.transaction() as session:
        entries = evidence.read(session, f"project/{project}")
        return [(entry.kind, entry.actor) for entry in entries], [evidence.wire(entry).body for entry in entries]


def test_what_is_found_is_recorded_once_and_then_held_to(committed, old):
    assert "the project has no entry" in problems(committed, old)
    for _ in range(2):
        adoption.adopt(committed)
    kinds, bodies = log(committed, old)
    assert kinds[3:] == [("project_set", "service"), ("token_found", "service"), ("token_found", "service")]
    assert (bodies[3]["name"], bodies[3]["max_jobs"], bodies[3]["was_found"]) == ("default", 3, True)
    assert ["revoked_at" in body for body in bodies[4:]] == [False, True]
    assert problems(committed, old) == set()
    for change, said in (
        ("tokens SET secret_sha256 = secret_sha256 || 'x' WHERE name = 'maria'", "another secret"),
        ("tokens SET created_at = now() WHERE name = 'maria'", "another created_at"),
        ("tokens SET revoked_at = now() WHERE name = 'nora'", "another end"),
        ("projects SET max_jobs = 0", "another max_jobs"),
    ):
        with committed.database.transaction() as session:
            session.execute(text(f"UPDATE {change}"))
            assert any(said in fault.problem for fault in verification.verify(session, old).faults), change
            session.rollback()


def test_a_token_that_nobody_s_entry_tells_of_is_never_taken_over(committed, old):
    with committed.database.transaction() as session:
        planted = row(old, "eve", db.now(session))
        session.add(planted)
    said = f"the token {planted.id} (eve) has no entry"
    adoption.adopt(committed)
    assert problems(committed, old) == {said}
    # Nor is a secret that was exchanged later.
    with committed.database.transaction() as session:
        session.execute(text("UPDATE tokens SET secret_sha256 = 'sha256:x' WHERE name = 'maria'"))
    adoption.adopt(committed)
    found = problems(committed, old) - {said}
    assert len(found) == 1
    assert found.pop().endswith("has another secret than its log says")
    assert len(log(committed, old)[0]) == 6


def test_a_service_that_starts_records_what_it_finds(committed, old):
    type(committed).build(committed.settings).close()
    assert problems(committed, old) == set()


def asked_without_entry(service, project):
    """A run as an older version kept it: nothing in the log says who asked for it."""
    actor = Actor(project, "default", "carla", "ci")
    bundle = registered_bundle(service, actor)
    with service.database.transaction() as session:
        made = jobs.create(
            session, project, JobKind.EVALUATE, bundle=bundle.digest, gates=["integrity"], runner_class="cpu",
            policy=registered_policy(service, actor).digest, created_by="carla", now=db.now(session),
        )  # fmt: skip
        return made.id


def run_log(service, run):
    with service.database.transaction() as session:
        return [(entry.kind, entry.actor, evidence.wire(entry).body) for entry in evidence.read(session, f"run/{run}")]


def left_by_an_older_version(service, name="default"):
    """A project as the version before left it: it has its entry, and its runs and blobs have none."""
    with service.database.transaction() as session:
        project = ProjectRow(id=uuid7(), name=name, created_at=db.now(session))
        session.add(project)
        session.flush()
        body = ProjectSet(**projects.facts(project))
        stream, about = projects.stream(project.id), {"project": evidence.name_digest(name)}
        signed = evidence.state(
            service.signer, stream, "project:1", "root", Kind.PROJECT_SET, body, subjects=about, now=db.now(session)
        )
        evidence.append(session, project.id, signed)
        return project.id


@pytest.fixture
def known(committed):
    return left_by_an_older_version(committed)


def test_runs_of_an_older_version_are_recorded_once_as_they_are_found(committed, known):
    run = asked_without_entry(committed, known)
    said = f"the job {run} was asked for by nobody: it has no entry"
    assert problems(committed, known) == {said}
    for _ in range(2):
        adoption.adopt(committed)
    assert problems(committed, known) == set()
    ((kind, actor, body),) = run_log(committed, run)
    assert (kind, actor, body["created_by"], body["was_found"]) == ("run_asked", "service", "carla", True)
    kinds, bodies = log(committed, known)
    assert kinds == [("project_set", "root"), ("project_set", "service")]
    assert (bodies[1]["adopted"], "was_found" in bodies[1]) == (2, False)
    # What comes later without an entry is never taken over.
    planted = asked_without_entry(committed, known)
    adoption.adopt(committed)
    assert problems(committed, known) == {f"the job {planted} was asked for by nobody: it has no entry"}


def test_a_project_whose_row_was_altered_meanwhile_is_held_to_its_entry(committed, known):
    with committed.database.transaction() as session:
        session.execute(text("UPDATE projects SET max_jobs = 9"))
    adoption.adopt(committed)
    assert problems(committed, known) == {"the project has another max_jobs than its log says"}


def test_a_project_whose_entries_were_away_for_a_while_is_named(committed, known):
    adoption.adopt(committed)
    with committed.database.transaction() as session:
        session.execute(text("SET LOCAL session_replication_role = replica"))
        session.execute(text("UPDATE entries SET kind = 'token_created' WHERE kind = 'project_set' AND position = 2"))
    planted = asked_without_entry(committed, known)
    adoption.adopt(committed)
    with committed.database.transaction() as session:
        session.execute(text("SET LOCAL session_replication_role = replica"))
        session.execute(text("UPDATE entries SET kind = 'project_set' WHERE position = 2 AND kind = 'token_created'"))
    assert [body["was_found"] for _, _, body in run_log(committed, planted)] == [True]
    assert problems(committed, known) == {"the project was taken over anew: its entries were away"}


def test_a_run_says_who_asked_for_what(committed, actor):
    bundle, policy = registered_bundle(committed, actor), registered_policy(committed, actor)
    wanted = RunCreate(bundle=bundle.digest, policy=policy.digest, runner_class="cpu", gates=["integrity"])
    with committed.database.transaction() as session:
        run = runs.create(session, committed, actor, wanted).id
    ((kind, who, body),) = run_log(committed, run)
    assert (kind, who, body["created_by"]) == ("run_asked", actor.name, actor.name)
    assert (body["bundle"], body["policy"], body["gates"]) == (bundle.digest, policy.digest, ["integrity"])
    assert problems(committed, actor.project_id) == set()
    for change in (
        "created_by = 'eve'",
        "gates = '[\"static\"]'",
        "runner_class = 'gpu'",
        "release_id = NULL, kind = 'serve'",
    ):
        with committed.database.transaction() as session:
            session.execute(text(f"UPDATE jobs SET {change} WHERE id = :run"), {"run": run})
            found = verification.verify(session, actor.project_id).faults
            assert any(
                fault.stream == f"run/{run}" and f"the job {run} has another" in fault.problem for fault in found
            )
            session.rollback()
    with committed.database.transaction() as session:
        session.execute(text("DELETE FROM jobs"))
        found = verification.verify(session, actor.project_id).faults
        assert [(fault.stream, fault.problem) for fault in found] == [(f"run/{run}", f"the job {run} is missing")]
        session.rollback()


def unsigned_blobs(service, project, count):
    """Blobs as an older version took them, which nobody has needed for a day."""
    contents = [f"{project} {number}".encode() for number in range(count)]
    for content in contents:
        blobs.store(service, project, sha256_digest(content), [content], limit=100)
    with service.database.transaction() as session:
        of = {"project": project}
        old = "proof = NULL, used_at = used_at - interval '1 day'"
        session.execute(text(f"UPDATE project_blobs SET {old} WHERE project_id = :project"), of)
    return contents


def unsigned(service, project):
    with service.database.transaction() as session:
        return session.query(ProjectBlobRow).filter_by(project_id=project, proof=None).count()


def test_blobs_of_an_older_version_are_signed_in_batches_and_whoever_is_killed_goes_on_there(
    committed, known, monkeypatch
):
    unsigned_blobs(committed, known, 10)
    assert len(problems(committed, known)) == 10
    monkeypatch.setattr(adoption, "BATCH", 4)
    proof, count = blobs.proof, iter(range(100))

    def killed(*told):
        if next(count) == 9:
            raise Unavailable("the key service is away")
        return proof(*told)

    with monkeypatch.context() as dying:
        dying.setattr(blobs, "proof", killed)
        with pytest.raises(Unavailable):
            adoption.adopt(committed)
    assert unsigned(committed, known) == 2
    adoption.adopt(committed)
    assert problems(committed, known) == set()
    assert unsigned(committed, known) == 0
    # What has no signature later is never taken over.
    unsigned_blobs(committed, known, 10)
    adoption.adopt(committed)
    assert unsigned(committed, known) == 10


def test_blobs_are_signed_while_others_are_cleared_up_sent_again_and_nobody_waits_in_a_ring(committed, monkeypatch):
    service = replace(committed, settings=committed.settings.model_copy(update={"blob_grace_seconds": 3600.0}))
    monkeypatch.setattr(adoption, "BATCH", 7)
    sent = b"sent by both"
    for round_ in range(8):
        projects_ = [left_by_an_older_version(service, f"project{round_}{name}") for name in "ab"]
        contents = {project: unsigned_blobs(service, project, 24) for project in projects_}
        for project in projects_:
            blobs.store(service, project, sha256_digest(sent), [sent], limit=100)

        def send_again(contents=contents):
            for project, mine in contents.items():
                for content in mine[::-2]:
                    blobs.store(service, project, sha256_digest(content), [content], limit=100)

        acts = [lambda: adoption.adopt(service), lambda: collection.collect(service, is_dry_run=False)] * 2
        outcomes = together(*acts, send_again)
        assert not [one for one in outcomes if isinstance(one, BaseException)], outcomes
        for project in projects_:
            assert (problems(service, project), unsigned(service, project)) == (set(), 0)
