"""Every row and every column of the database: verification finds what was done to it, or it stands here with a reason.

The columns are those of the tables themselves, so that a new one cannot be forgotten.
"""

from itertools import pairwise

import pytest
from sqlalchemy import text
from sqlalchemy.dialects.postgresql import JSONB

from registry import projects, verification
from registry.auth import Actor
from registry.service import Service
from registry.tables import Base, EntryRow
from tests.conftest import settings_for
from tests.support import everything

MOST = 4

REASONS = {
    "answers": "sealed with the caller's own token: an altered one opens for nobody, a removed one is done anew",
    "uploads": "bytes under way: they are a blob only once all have come and have the digest that was said",
    "blob_doubts": "a queue: which blob is read again, and when; only what is read there decides",
    "blobs.created_at": "nothing asks it",
    "blobs.damaged_at": "only what is read again decides: bytes are hashed whenever they are given out",
    "project_usage.part": "which part counts something: the sum of the parts is what counts",
    "project_blobs.created_at": "nothing asks it",
    "project_blobs.used_at": "when a blob that nothing needs is cleared up; the database keeps those that are needed",
    "records.recorded_at": "how long raw records are kept, which no verdict depends on",
    "project_documents.id": "the order of lists",
    "aliases.id": "the order of lists",
    "releases.due_at": "a queue: when the controller looks again; what it does then is an entry",
    "releases.lease_token": "who works on it just now; what that one does is an entry, held to the phase",
    "releases.lease_until": "as the token of its lease",
    "releases.progress": "what is shown while a step waits; the step's entry says what was measured",
}
"""Table, or table.column → why altering it changes nothing that is decided, shown as evidence, or permitted."""

SAID_BY_ITSELF = "what a runner says of itself at each start; what a result was measured on is in its own entry"
REASONS |= {
    f"runners.{name}": SAID_BY_ITSELF
    for name in ("runner_class", "fingerprint", "engines", "boot_id", "slots", "environments", "launcher")
}
REASONS |= {f"runners.{name}": SAID_BY_ITSELF for name in ("disk_free_bytes", "device_ids", "speaks")}
HEARD = "when it was heard of: it gets no job while that is long ago"
REASONS |= {"runners.name": SAID_BY_ITSELF, "runners.registered_at": HEARD, "runners.last_seen_at": HEARD}
QUEUED = "a queue: who does it, where, and when; what it is about, and what comes of it, is held to the log"
REASONS |= {
    f"jobs.{name}": QUEUED
    for name in (
        "needs", "queue", "devices", "claimed_at", "replaces", "preempted_for", "runner_id", "attempt",
        "due_at", "fencing_token", "lease_until", "progress", "problem", "avoids", "finished_at", "spent_ms",
    )
}  # fmt: skip

OTHER_VALUES = {
    "alias_patterns.movers": "CASE movers WHEN 'admin' THEN 'manager' ELSE 'admin' END",
    "documents.kind": "CASE kind WHEN 'suite' THEN 'policy' ELSE 'suite' END",
    "entries.kind": "CASE kind WHEN 'held' THEN 'paused' ELSE 'held' END",
    "entries.position": "position + 100",
    "entries.sequence": "-sequence",
    "entries.transaction_id": "'1099511627776'",
    "jobs.kind": "CASE kind WHEN 'serve' THEN 'record' ELSE 'serve' END",
    "jobs.state": "CASE state WHEN 'done' THEN 'cancelled' ELSE 'done' END",
    "releases.phase": "CASE phase WHEN 'approved' THEN 'gated' ELSE 'approved' END",
    "targets.generation": "generation + 1",
    "tokens.role": "CASE role WHEN 'admin' THEN 'viewer' ELSE 'admin' END",
}
"""Where the table permits only some values, or what matters is one direction."""

ROWS = {
    "jobs.created_at": ("release_id IS NULL", "of a release, it is when the service got to it"),
    "jobs.is_wanted": ("release_id IS NULL AND kind <> 'serve'", "of a release, its jobs follow from its log"),
    "jobs.reason": ("release_id IS NULL", "of a release, nobody gives one"),
    "jobs.state": ("release_id IS NULL", "of a release, what is not measured has not passed, whatever its job is"),
    "project_documents.created_at": ("kind <> 'reference'", "what put a reference in force says when"),
    "project_documents.created_by": ("kind <> 'reference'", "what put a reference in force says by whom"),
}
"""Column → of which rows it is held to the log, and why not of the others."""

BY_TYPE = {
    "TEXT": "coalesce({0}, '') || 'x'",
    "UUID": "overlay(coalesce({0}, '00000000-0000-7000-8000-000000000000')::text placing 'ffff' from 10)::uuid",
    "BIGINT": "coalesce({0}, 0) + 7",
    "INTEGER": "coalesce({0}, 0) + 7",
    "BOOLEAN": "NOT {0}",
    "DATETIME": "coalesce({0} + interval '1 second', clock_timestamp())",
    "BLOB": "set_byte({0}, length({0}) - 5, get_byte({0}, length({0}) - 5) # 1)",
    "JSONB": "CASE WHEN {0} IS NULL OR {0} <> '[]'::jsonb THEN '[]'::jsonb ELSE '[\"x\"]'::jsonb END",
}


def _expression(table, column):
    name = f"{table.name}.{column.name}"
    kind = "JSONB" if isinstance(column.type, JSONB) else column.type.__visit_name__.upper()
    kind = {"STRING": "TEXT", "LARGE_BINARY": "BLOB", "BIG_INTEGER": "BIGINT", "SMALL_INTEGER": "INTEGER"}.get(
        kind, kind
    )
    return OTHER_VALUES.get(name) or BY_TYPE[kind].format(f'"{column.name}"')


TABLES = sorted(Base.metadata.tables.values(), key=lambda table: table.name)
COLUMNS = [(table, column) for table in TABLES for column in table.columns]
HELD = [one for one in COLUMNS if one[0].name not in REASONS and f"{one[0].name}.{one[1].name}" not in REASONS]
FREE = [one for one in COLUMNS if one not in HELD]
KEPT = [table for table in TABLES if table.name not in REASONS]


def _name(one):
    return f"{one[0].name}.{one[1].name}" if isinstance(one, tuple) else one.name


class Whole:
    """The project in a database of its own, and what verification says of it once something was done to that."""

    def __init__(self, service, *, is_sealed):
        self.service = service
        with service.database.transaction() as session:
            project, _ = projects.ensure(session, service, "default", by="test")
            actor = Actor(project_id=project.id, project="default", name="maria", role="manager")
        self.project = project.id
        everything.fill(service, actor)
        self.kept = everything.seal(service, actor) if is_sealed else None

    def verify(self):
        with self.service.database.transaction() as session:
            return verification.verify(session, self.project, must_have=self.kept)

    def rows(self, table, where="true"):
        """Return a table's rows, each as the condition that names it."""
        keys = [column.name for column in table.primary_key]
        query = f"SELECT {', '.join(keys)} FROM {table.name} WHERE {where} ORDER BY {', '.join(keys)}"
        with self.service.database.transaction() as session:
            found = session.execute(text(query)).all()
        return [" AND ".join(f"{key} = '{value}'" for key, value in zip(keys, row, strict=True)) for row in found]

    def faults(self, *statements, changes=1):
        """Do what only the owner can, who switches the triggers off, verify, and leave all as it was."""
        with self.service.database.transaction() as session:
            session.execute(text("SET LOCAL session_replication_role = replica"))
            for statement in statements:
                done = session.execute(text(statement))
            assert done.rowcount == changes, statements
            found = verification.verify(session, self.project, must_have=self.kept)
            session.rollback()
        assert found.verified is not bool(found.faults)
        return found.faults


def made(postgres, folder, *, is_sealed):
    service = Service.build(settings_for(postgres.url(postgres.create()), folder))
    try:
        yield Whole(service, is_sealed=is_sealed)
    finally:
        service.close()


@pytest.fixture(scope="module")
def whole(postgres, tmp_path_factory):
    yield from made(postgres, tmp_path_factory.mktemp("whole"), is_sealed=True)


@pytest.fixture(scope="module")
def unsealed(postgres, tmp_path_factory):
    yield from made(postgres, tmp_path_factory.mktemp("unsealed"), is_sealed=False)


def some(rows):
    """Return a few of many rows: the first, the last, and some between."""
    return rows if len(rows) <= MOST else [rows[place * (len(rows) - 1) // (MOST - 1)] for place in range(MOST)]


def test_every_reason_is_of_a_column_that_there_is():
    names = {table.name for table in TABLES} | {_name(one) for one in COLUMNS}
    assert REASONS.keys() | OTHER_VALUES.keys() | ROWS.keys() <= names


def test_the_whole_has_rows_in_every_table_and_verifies(whole, unsealed):
    assert [table.name for table in TABLES if not whole.rows(table)] == []
    assert (whole.verify().faults, unsealed.verify().faults) == ([], [])


@pytest.mark.parametrize("one", HELD, ids=_name)
def test_an_altered_value_is_found_and_named(whole, one):
    table, column = one
    where, _ = ROWS.get(_name(one), ("true", ""))
    for row in some(whole.rows(table, where)):
        change = f'UPDATE {table.name} SET "{column.name}" = {_expression(table, column)} WHERE {row}'
        found = whole.faults(*(_unbound(table) if column.primary_key else []), change)
        assert found, row
        assert all(fault.stream and fault.problem for fault in found)


@pytest.mark.parametrize("one", FREE, ids=_name)
def test_what_has_a_reason_is_held_to_nothing(whole, one):
    """Otherwise the reason is not needed, and has to go."""
    table, column = one
    row = whole.rows(table)[0]
    statement = f'UPDATE {table.name} SET "{column.name}" = {_expression(table, column)} WHERE {row}'
    assert whole.faults(statement) == []


@pytest.mark.parametrize("table", KEPT, ids=_name)
def test_a_removed_row_is_found_and_named(whole, table):
    # A part in which nothing is counted counts for nothing.
    for row in whole.rows(table, "bytes <> 0 OR documents <> 0" if table.name == "project_usage" else "true"):
        assert whole.faults(f"DELETE FROM {table.name} WHERE {row}"), row


def test_a_removed_entry_is_found_before_any_checkpoint_too(unsealed):
    missed = [
        row for row in unsealed.rows(EntryRow.__table__) if not unsealed.faults(f"DELETE FROM entries WHERE {row}")
    ]
    assert missed == []


@pytest.mark.parametrize("table", KEPT, ids=_name)
def test_two_rows_that_changed_places_are_found_and_named(whole, table):
    keys = [column.name for column in table.primary_key]
    kept = [f'"{column.name}"' for column in table.columns if (table, column) in HELD and column.name not in keys]
    rows = whole.rows(table)
    for first, second in pairwise(rows) if kept else []:
        with whole.service.database.transaction() as session:
            of = f"SELECT {', '.join(kept)} FROM {table.name} WHERE {first} OR {second}"
            one, other = session.execute(text(of)).all()
        differing = set(first.split(" AND ")) ^ set(second.split(" AND "))
        is_told = any(
            part.startswith(f"{key.name} =") for part in differing for key in table.primary_key if (table, key) in HELD
        )
        if one == other or not is_told:
            continue  # what only a reason tells apart may change places
        sets = ", ".join(
            f"{key} = (SELECT {key} FROM {table.name} AS other WHERE CASE WHEN {_of('changed', first)} "
            f"THEN {_of('other', second)} ELSE {_of('other', first)} END)"
            for key in keys
        )
        swap = (
            f"UPDATE {table.name} AS changed SET {sets} WHERE ({_of('changed', first)}) OR ({_of('changed', second)})"
        )
        assert whole.faults(*_unbound(table), swap, changes=2), (first, second)


def _of(name, row):
    return " AND ".join(f"{name}.{part}" for part in row.split(" AND "))


def _unbound(table):
    """Return what lets two rows have one key for a moment, until all is rolled back."""
    return [
        f"""
        DO $$ DECLARE one record; BEGIN
            FOR one IN SELECT conname FROM pg_constraint
                WHERE conrelid = '{table.name}'::regclass AND contype IN ('p', 'u')
            LOOP EXECUTE format('ALTER TABLE {table.name} DROP CONSTRAINT %I CASCADE', one.conname); END LOOP;
        END $$
        """,
        f"ALTER TABLE {table.name} ALTER sequence DROP IDENTITY" if table.name == "entries" else "SELECT 1",
    ]
