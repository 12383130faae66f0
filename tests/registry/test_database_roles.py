"""The application's role in the database: it can do its work, and nothing that would change what is written."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, ProgrammingError

from migrations.__main__ import grant, grants
from migrations.__main__ import main as migrations
from registry import checkpoints, db, keys, verification
from registry.db import Database
from registry.keys import Signer
from registry.tables import APPEND_ONLY, Base
from schemas.evidence import Kind, Staged
from tests.support.factories import record_act, started_release

ROLE = "app_of_tests"


@pytest.fixture
def owner(committed):
    return committed


@pytest.fixture
def application(owner):
    """The same service, as a role that owns nothing."""
    url = owner.database.engine.url
    with owner.database.transaction() as session:
        known = session.scalar(text("SELECT true FROM pg_roles WHERE rolname = :role"), {"role": ROLE})
        if not known:
            session.execute(text(f"CREATE ROLE {ROLE} LOGIN"))
    grant(url.render_as_string(hide_password=False), ROLE)
    mine = url.set(username=ROLE).render_as_string(hide_password=False)
    settings = owner.settings.model_copy(update={"database_url": type(owner.settings.database_url)(mine)})
    made = Database(db.connect(settings))
    yield replace(owner, settings=settings, database=made)
    made.engine.dispose()


@pytest.fixture
def service(application):
    return application


def test_the_application_does_its_work(application, actor):
    release = started_release(application, actor)
    record_act(application, release, Kind.STAGED, Staged(files=1, size=1, duration_ms=1))
    checkpoints.make(application, actor.project_id, by="test")
    with application.database.transaction() as session:
        assert session.scalar(text("SELECT current_user")) == ROLE
        keys.enroll(session, application.signer, at=db.now(session))
        assert verification.verify(session, actor.project_id).verified


def test_a_clock_of_somebody_s_own_is_not_asked(owner, application):
    """Put before the server's for this role: by it, what has expired would count again."""
    with owner.database.transaction() as session:
        session.execute(text("CREATE SCHEMA own"))
        session.execute(text(f"GRANT USAGE ON SCHEMA own TO {ROLE}"))
        body = "SELECT TIMESTAMPTZ '2020-01-01'"
        session.execute(text(f"CREATE FUNCTION own.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $${body}$$"))
        session.execute(text(f"ALTER ROLE {ROLE} SET search_path = own, pg_catalog, public"))
    try:
        made = Database(db.connect(application.settings))
        with made.transaction() as session:
            assert session.scalar(text("SELECT own.clock_timestamp()")).year == 2020
            assert db.now(session).year > 2020
        made.engine.dispose()
    finally:
        with owner.database.transaction() as session:
            session.execute(text(f"ALTER ROLE {ROLE} RESET search_path"))
            session.execute(text("DROP SCHEMA own CASCADE"))


COLUMNS = {"entries": "actor", "documents": "schema_id", "checkpoints": "made_by", "signing_keys": "algorithm"}


def refused(service, statement, **values):
    with pytest.raises(DBAPIError) as raised, service.database.transaction() as session:
        session.execute(text(statement), values)
    return str(raised.value.orig)


@pytest.mark.parametrize("table", APPEND_ONLY)
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE {table} SET {column} = 'x'",
        "DELETE FROM {table}",
        "TRUNCATE {table} CASCADE",
        "ALTER TABLE {table} DISABLE TRIGGER ALL",
        "ALTER TABLE {table} ADD COLUMN x int",
        "DROP TABLE {table} CASCADE",
        "LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE",
        "DROP TRIGGER {table}_append_only ON {table}",
        "CREATE RULE x AS ON INSERT TO {table} DO INSTEAD NOTHING",
        "CREATE TRIGGER x BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION refuse_change()",
    ],
)
def test_the_application_cannot_change_what_is_written(application, actor, table, statement):
    started_release(application, actor)
    checkpoints.make(application, actor.project_id, by="test")
    said = refused(application, statement.format(table=table, column=COLUMNS[table]))
    assert "permission denied" in said or "must be owner" in said


@pytest.mark.parametrize(
    "statement",
    [
        "SET session_replication_role = replica",
        "CREATE TABLE x (a int)",
        "CREATE OR REPLACE FUNCTION refuse_change() RETURNS trigger LANGUAGE sql AS 'SELECT NULL'",
        "ALTER ROLE app_of_tests SUPERUSER",
        "SET ROLE postgres",
        "UPDATE signing_keys SET valid_until = now()",
    ],
)
def test_the_application_cannot_get_around_it(application, statement):
    said = refused(application, statement)
    assert "permission denied" in said or "must be owner" in said


@pytest.mark.parametrize("table", APPEND_ONLY)
@pytest.mark.parametrize(
    "statement", ["UPDATE {table} SET {column} = 'x'", "DELETE FROM {table}", "TRUNCATE {table} CASCADE"]
)
def test_not_even_the_owner_changes_it_by_mistake(owner, application, actor, table, statement):
    started_release(application, actor)
    checkpoints.make(application, actor.project_id, by="test")
    said = refused(owner, statement.format(table=table, column=COLUMNS[table]))
    # A truncation that cascades meets the first table that refuses.
    assert "is append-only: " in said


def test_the_owner_ends_a_key_once_and_changes_nothing_else_of_it(owner, tmp_path):
    now = datetime.now(UTC)
    signer = Signer.load(tmp_path / "another.pem")
    with owner.database.transaction() as session:
        keys.enroll(session, signer, at=now)
    change = "UPDATE signing_keys SET {} WHERE key_id = :key"
    assert "is append-only" in refused(owner, change.format("valid_from = now()"), key=signer.key_id)
    with owner.database.transaction() as session:
        session.execute(text(change.format("valid_until = :until")), {"key": signer.key_id, "until": now})
    later = {"key": signer.key_id, "until": now + timedelta(days=1)}
    assert "is append-only" in refused(owner, change.format("valid_until = :until"), **later)
    assert "is append-only" in refused(owner, change.format("valid_until = NULL"), key=signer.key_id)


def test_every_kind_of_entry_may_be_written(owner):
    with owner.database.transaction() as session:
        allowed = session.scalar(
            text("SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'ck_entries_kind'")
        )
    assert {kind for kind in Kind if f"'{kind}'" not in str(allowed)} == set()


def test_the_grants_are_printed_and_name_every_table(capsys):
    assert migrations(["grant", "service", "--print"]) == 0
    said = capsys.readouterr().out
    assert said == "".join(f"{statement};\n" for statement in grants("service"))
    for table in Base.metadata.tables:
        assert table in said


@pytest.mark.parametrize("role", ["", "a; DROP TABLE entries", "Role", 'a"b'])
def test_a_name_that_is_no_role_is_refused(role, capsys):
    assert migrations(["grant", role]) == 2
    assert "is no name of a role" in capsys.readouterr().err


def test_a_role_without_grants_cannot_even_read(owner, application):
    with owner.database.transaction() as session:
        session.execute(text(f"REVOKE SELECT ON entries FROM {ROLE}"))
    with pytest.raises(ProgrammingError), application.database.transaction() as session:
        session.execute(text("SELECT 1 FROM entries"))
