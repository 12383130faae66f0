"""SQL that is asked of the driver itself is one more statement of the session, and fails as any other does."""

import signal
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DataError, IntegrityError, OperationalError
from uuid6 import uuid7

from registry import appending, db, evidence
from registry.db import Sql
from registry.logged import Logged
from registry.tables import EntryRow, ProjectRow
from tests.registry.test_cursors import append


def new_project(name: str) -> ProjectRow:
    return ProjectRow(id=uuid7(), name=name, created_at=datetime(2026, 1, 1, tzinfo=UTC))


def test_parameters_have_names_and_casts_are_none():
    asked = Sql("SELECT CAST(:one AS text), :two, :one, now()::date, '12:30' WHERE a = ANY(CAST(:three AS text[]))")
    assert asked.names == ("one", "two", "three")
    assert asked.sql == (b"SELECT CAST($1 AS text), $2, $1, now()::date, '12:30' WHERE a = ANY(CAST($3 AS text[]))")


def test_a_parameter_without_a_value_is_told(session):
    with pytest.raises(KeyError, match="two"):
        db.ask(session, Sql("SELECT CAST(:one AS text), CAST(:two AS text)"), {"one": "x"})


def test_rows_have_the_values_that_objects_would_have(session):
    asked = Sql("SELECT CAST(:a AS uuid) AS a, CAST(:b AS timestamptz) AS b, CAST(:c AS jsonb) AS c, :d = ANY(:e) AS d")
    identity, at = uuid4(), datetime(2026, 3, 1, 12, tzinfo=UTC)
    row = db.ask_one(session, asked, {"a": identity, "b": at, "c": '{"x": [1, null]}', "d": "p", "e": ["p", "q"]})
    assert (row.a, row.b, row.c, row.d) == (identity, at, {"x": [1, None]}, True)
    assert isinstance(row.a, UUID)
    assert row.b.utcoffset() == at.utcoffset()


def test_more_rows_or_fewer_than_one_are_told(session):
    many, none = Sql("SELECT 1 FROM generate_series(1, 2)"), Sql("SELECT 1 WHERE false")
    assert [row[0] for row in db.ask(session, many)] == [1, 1]
    assert db.ask_any(session, none) is None
    for ask, statement in ((db.ask_one, many), (db.ask_one, none), (db.ask_any, many)):
        with pytest.raises(ValueError, match=r"values to unpack|one row was expected"):
            ask(session, statement)


def test_what_a_session_has_not_written_yet_is_written_before(session):
    session.add(new_project("pending"))
    assert db.ask_one(session, Sql("SELECT count(*) FROM projects WHERE name = :name"), {"name": "pending"})[0] == 1


def test_it_belongs_to_the_transaction(committed):
    count = Sql("SELECT count(*) FROM projects WHERE name = :name")

    def give_up() -> None:
        with committed.database.transaction() as session:
            made = Sql("INSERT INTO projects (id, name, created_at) VALUES (:id, :name, clock_timestamp())")
            assert db.ask(session, made, {"id": uuid7(), "name": "given up"}) == []
            assert db.ask_one(session, count, {"name": "given up"})[0] == 1
            with committed.database.look() as other:
                assert db.ask_one(other, count, {"name": "given up"})[0] == 0
            raise RuntimeError("given up")

    with pytest.raises(RuntimeError, match="given up"):
        give_up()
    with committed.database.look() as other:
        assert db.ask_one(other, count, {"name": "given up"})[0] == 0


def test_faults_are_those_of_any_statement(session):
    with pytest.raises(DataError), session.begin_nested():
        db.ask(session, Sql("SELECT CAST(:text AS integer)"), {"text": "no number"})
    session.add(new_project("twice"))
    with pytest.raises(IntegrityError), session.begin_nested():
        db.ask(session, Sql("INSERT INTO projects SELECT * FROM projects"))
    assert db.ask_one(session, Sql("SELECT 1"))[0] == 1  # the savepoint is rolled back, and the session goes on


def test_a_connection_that_the_server_ends_is_told_and_used_no_more(committed):
    def cut_off() -> None:
        with committed.database.transaction() as session:
            mine = db.ask_one(session, Sql("SELECT pg_backend_pid()"))[0]
            with committed.database.look() as other:
                other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": mine})
            db.ask(session, Sql("SELECT 1"))

    with pytest.raises(OperationalError) as caught:
        cut_off()
    assert caught.value.connection_invalidated
    for _ in range(3):
        with committed.database.transaction() as session:
            assert db.ask_one(session, Sql("SELECT 1"))[0] == 1


def test_a_connection_in_the_middle_of_an_answer_is_used_no_more(committed):
    """Whoever is told to end while the server answers leaves the rest of the answer in the connection."""
    mine = []

    def told_to_end(*_: object) -> None:
        raise SystemExit(0)

    def wait_long() -> None:
        with committed.database.transaction() as session:
            mine.append(db.ask_one(session, Sql("SELECT pg_backend_pid()"))[0])
            db.ask(session, Sql("SELECT pg_sleep(20)"))

    before = signal.signal(signal.SIGALRM, told_to_end)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(SystemExit):
            wait_long()
    finally:
        signal.signal(signal.SIGALRM, before)
    with committed.database.transaction() as session:
        assert db.ask_one(session, Sql("SELECT pg_backend_pid()"))[0] not in mine


def test_a_log_is_the_same_however_it_is_read(committed, actor):
    with committed.database.transaction() as session:
        written = [append(session, committed, actor.project_id, "target/one", f"act {place}") for place in range(3)]
    names = [name for name in vars(Logged) if isinstance(vars(Logged)[name], property)]
    assert set(names) == {column.name for column in EntryRow.__table__.columns}
    with committed.database.transaction() as session:
        objects = [session.get_one(EntryRow, row.sequence) for row in written]
        plain = evidence.read(session, "target/one")
        for one in zip(objects, plain, written, strict=True):
            told = [[getattr(row, name) for name in names] for row in one]
            assert told[0] == told[1] == told[2]
        assert [row.position for row in evidence.read(session, "target/one", after=1, limit=1)] == [2]
        assert [row.position for row in evidence.read(session, "target/one", after=1)] == [2, 3]


def test_statements_of_entries_name_every_column():
    assert {*appending.WRITTEN, "sequence"} == {column.name for column in EntryRow.__table__.columns}
