"""Nothing that is committed late is skipped, and no stream is told out of order."""

import threading
from datetime import UTC, datetime
from uuid import UUID

import pytest
from sqlalchemy import text

from registry import cursors, evidence
from registry.cursors import START, Cursor
from registry.evidence import Selection
from schemas.common import MAX_INTEGER
from schemas.evidence import Kind, TargetCreated
from tests.support.api import ROLES, Api
from tests.support.factories import created_target, registered_bundle, registered_policy, started_release

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
BODY = TargetCreated(name="chat@prod", runner_class="cpu", gateway="local")


def append(session, service, project: UUID, stream: str, act: str = "created"):
    signed = evidence.state(
        service.signer,
        stream,
        act,
        "maria",
        Kind.TARGET_CREATED,
        BODY,
        subjects={"target": evidence.name_digest("x")},
        now=NOW,
    )
    return evidence.append(session, project, signed)[0]


class Reader:
    """Reads on from where it is, each time with a transaction of its own."""

    def __init__(self, service, project: UUID, selection: Selection | None = None, limit: int = 100) -> None:
        self.service, self.project, self.limit = service, project, limit
        self.selection = selection or Selection()
        self.cursor = START

    def read(self) -> list[str]:
        with self.service.database.transaction() as session:
            horizon = cursors.horizon(session)
            rows = evidence.browse(
                session, self.project, self.selection, after=self.cursor, before=horizon, limit=self.limit
            )
        if rows:
            self.cursor = Cursor.parse(str(evidence.cursor_of(rows[-1])))
        # The project's own entry was there before.
        return [f"{row.stream} {row.position}" for row in rows if not row.stream.startswith("project/")]


def test_a_slow_transaction_with_a_lower_sequence_is_not_skipped(committed, actor):
    reader = Reader(committed, actor.project_id)
    with committed.database.transaction() as slow:
        late = append(slow, committed, actor.project_id, "target/slow")
        with committed.database.transaction() as quick:
            early = append(quick, committed, actor.project_id, "target/quick")
        assert late.sequence < early.sequence
        # The quick one is committed, but its reader would go past the slow one.
        assert reader.read() == []
    assert reader.read() == ["target/slow 1", "target/quick 1"]
    assert reader.read() == []


def test_an_older_transaction_that_writes_last_is_not_skipped_either(committed, actor):
    reader = Reader(committed, actor.project_id)
    with committed.database.transaction() as old:
        old.execute(text("SELECT pg_current_xact_id()"))
        with committed.database.transaction() as young:
            append(young, committed, actor.project_id, "target/young")
        assert reader.read() == []
        append(old, committed, actor.project_id, "target/old")
    assert sorted(reader.read()) == ["target/old 1", "target/young 1"]


def test_a_stream_is_told_in_the_order_of_its_positions(committed, actor):
    """An older transaction that had to wait for the stream's lock comes after the younger one that held it."""
    with committed.database.transaction() as old:
        old.execute(text("SELECT pg_current_xact_id()"))
        with committed.database.transaction() as young:
            first = append(young, committed, actor.project_id, "target/one", "a")
        second = append(old, committed, actor.project_id, "target/one", "b")
        assert (first.position, second.position) == (1, 2)
        assert second.transaction_id == first.transaction_id
    assert Reader(committed, actor.project_id).read() == ["target/one 1", "target/one 2"]


def test_a_transaction_that_is_rolled_back_holds_nobody_up(committed, actor):
    reader = Reader(committed, actor.project_id)
    with committed.database.transaction() as broken:
        append(broken, committed, actor.project_id, "target/broken")
        with committed.database.transaction() as other:
            append(other, committed, actor.project_id, "target/other")
        broken.rollback()
    assert reader.read() == ["target/other 1"]


def test_many_writers_and_one_reader_agree_on_every_entry(committed, actor):
    """Whatever the order of numbers, locks and commits, a reader who never goes back sees each entry once."""
    seen: list[str] = []
    writers, each = 6, 15

    def write(number: int) -> None:
        for turn in range(each):
            with committed.database.transaction() as session:
                if turn % 2:
                    session.execute(text("SELECT pg_current_xact_id()"))
                append(session, committed, actor.project_id, f"target/{turn % 3}", f"{number}.{turn}")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    reader = Reader(committed, actor.project_id, limit=7)
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen += reader.read()
    while more := reader.read():
        seen += more
    assert len(seen) == writers * each
    for stream in range(3):
        mine = [entry for entry in seen if entry.startswith(f"target/{stream} ")]
        assert mine == [f"target/{stream} {position}" for position in range(1, len(mine) + 1)]


def test_entries_are_chosen_by_stream_target_and_kind(committed, actor):
    release = started_release(committed, actor)
    created_target(committed, actor, "other@prod")
    with committed.database.transaction() as session:
        target = session.execute(text("SELECT id FROM targets WHERE name = 'chat@prod'")).scalar_one()
    assert Reader(committed, actor.project_id, Selection(target=target)).read() == [
        f"target/{target} 1",
        f"release/{release} 1",
    ]
    assert Reader(committed, actor.project_id, Selection(stream=f"release/{release}")).read() == [
        f"release/{release} 1"
    ]
    assert len(Reader(committed, actor.project_id, Selection(kinds=("target_created", "created"))).read()) == 3
    assert Reader(committed, UUID(int=0)).read() == []


def test_entries_of_another_cluster_are_read_once_their_numbers_are_mended_as_the_readme_says(committed, actor):
    """A restored dump brings numbers that the new cluster's counter has not come to."""
    owner = committed.database.engine

    def number(value: str) -> None:
        with owner.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE entries DISABLE TRIGGER entries_append_only")
            connection.exec_driver_sql(f"UPDATE entries SET transaction_id = '{value}'")
            connection.exec_driver_sql("ALTER TABLE entries ENABLE TRIGGER entries_append_only")

    for stream in ("target/b", "target/a"):
        with committed.database.transaction() as session:
            append(session, committed, actor.project_id, stream)
    number(str(2**40))
    reader = Reader(committed, actor.project_id)
    assert reader.read() == []
    number("0")
    assert reader.read() == ["target/b 1", "target/a 1"]
    with committed.database.transaction() as session:
        append(session, committed, actor.project_id, "target/a", "later")
    assert reader.read() == ["target/a 2"]


@pytest.mark.parametrize("cursor", [START, Cursor(1, 1), Cursor(2**64 - 1, MAX_INTEGER), Cursor.ahead_of(7)])
def test_a_cursor_is_read_as_it_was_written(cursor):
    assert Cursor.parse(str(cursor)) == cursor


@pytest.mark.parametrize("text", ["", "0", "12", "A" * 21, "A" * 23, "A" * 21 + "é", "A" * 21 + "+", "_" * 22])
def test_what_is_not_a_cursor_is_refused(text):
    with pytest.raises(ValueError, match="not a cursor"):
        Cursor.parse(text)


def test_the_whole_log_is_listed_in_pages_over_http(committed, actor):
    registered_bundle(committed, actor)
    registered_policy(committed, actor)
    with Api(committed) as api:
        client = api.clients["engineer"]
        whole = client.get("/v1/evidence", params={"limit": 200}).json()
        assert whole["next"] is None
        seen, after = [], None
        while True:
            page = client.get("/v1/evidence", params={"limit": 2, **({"after": after} if after else {})}).json()
            seen += page["items"]
            after = page["next"]
            if after is None:
                break
    assert seen == whole["items"]
    assert len(seen) == 3 + len(ROLES)
