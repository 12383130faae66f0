"""What an older version kept without an entry: recorded once, as it is found, and held to that from then on."""

from datetime import timedelta

import pytest
from sqlalchemy import text
from uuid6 import uuid7

from registry import adoption, auth, db, evidence, verification
from registry.tables import ProjectRow, TokenRow
from schemas.evidence import Kind, TokenCreated, TokenRevoked


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
