import threading
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError

from registry import db, evidence, lifecycle, projects, verification
from registry.tables import DocumentRow, EntryRow, ReleaseRow
from schemas.common import sha256_digest, strict_json
from schemas.evidence import (
    GENESIS,
    TEST_RESULT,
    Envelope,
    Kind,
    Note,
    Reasoned,
    Staged,
    Statement,
    TargetCreated,
)
from schemas.problems import NotFound, TransitionRefused
from schemas.release import Phase
from schemas.result import GateResult, Verdict
from tests.support.factories import record_act, registered_bundle, started_release, state_act

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
STREAM = "target/test"
BODY = TargetCreated(name="chat@prod", runner_class="cpu", gateway="local")
STAGED = Staged(files=1, size=19, duration_ms=3)


def signed(service, act="created", stream=STREAM, kind=Kind.TARGET_CREATED, body=BODY):
    return evidence.state(
        service.signer, stream, act, "maria", kind, body, subjects={"target": evidence.name_digest("x")}, now=NOW
    )


@pytest.fixture
def project(session, shared_service) -> UUID:
    return projects.create(session, shared_service, "default", by="test").id


def test_an_act_that_is_in_the_log_already_changes_nothing(session, shared_service, project):
    first, is_new = evidence.append(session, project, signed(shared_service))
    again, is_new_again = evidence.append(session, project, signed(shared_service))
    assert (is_new, is_new_again) == (True, False)
    assert again.id == first.id
    assert len(evidence.read(session, STREAM)) == 1


def test_each_entry_links_to_the_one_before_it_in_its_stream(session, shared_service, project):
    for act in ("a", "b", "c"):
        evidence.append(session, project, signed(shared_service, act))
        evidence.append(session, project, signed(shared_service, act, stream="target/other"))
    log = evidence.read(session, STREAM)
    assert [row.position for row in log] == [1, 2, 3]
    assert [row.previous for row in log] == [GENESIS, log[0].entry_digest, log[1].entry_digest]
    assert [evidence.link(row) for row in log] == [row.entry_digest for row in log]
    assert [row.act for row in evidence.read(session, STREAM, after=1, limit=1)] == ["b"]


def test_an_envelope_holds_a_statement_of_what_the_row_says(session, shared_service, project):
    row, _ = evidence.append(session, project, signed(shared_service))
    envelope = Envelope.model_validate(strict_json(row.envelope))
    statement = Statement.model_validate(strict_json(envelope.payload_bytes()))
    assert statement.predicate_type == "https://sluicegate.dev/evidence/target_created/v1"
    assert statement.predicate == {
        "stream": STREAM,
        "act": "created",
        "kind": "target_created",
        "actor": "maria",
        "stated_at": "2026-01-01T12:00:00.000000Z",
        "body": {"name": "chat@prod", "runner_class": "cpu", "gateway": "local"},
    }
    wired = evidence.wire(row, with_envelope=True)
    assert wired.body == statement.predicate["body"]
    assert wired.envelope == envelope
    assert evidence.wire(row).envelope is None


@pytest.mark.parametrize(
    ("verdict", "result"), [(Verdict.PASSED, "PASSED"), (Verdict.FAILED, "FAILED"), (Verdict.ERRORED, None)]
)
def test_a_decided_gate_result_is_an_in_toto_test_result_and_an_undecided_one_is_not(shared_service, verdict, result):
    body = GateResult(
        gate="golden",
        definition=sha256_digest(b"rule"),
        verdict=verdict,
        summary="it did",
        measurements=[],
        findings=[],
        duration_ms=1,
        source="run",
    )
    made = signed(shared_service, kind=Kind.GATE_RECORDED, body=body)
    statement = Statement.model_validate(
        strict_json(Envelope.model_validate(strict_json(made.envelope)).payload_bytes())
    )
    assert (statement.predicate_type == TEST_RESULT) == (result is not None)
    assert statement.predicate.get("result") == result
    assert evidence.claim_of(made.envelope)["body"]["verdict"] == verdict


def test_a_body_of_another_kind_is_a_mistake_of_the_caller(shared_service):
    with pytest.raises(TypeError, match="a body of staged is a Staged, not a Note"):
        signed(shared_service, kind=Kind.STAGED, body=Note(reason="x"))


def test_recording_moves_the_release_as_the_table_says(service, actor):
    release = started_release(service, actor)
    assert record_act(service, release, Kind.STAGED, STAGED) == Phase.STAGED
    assert record_act(service, release, Kind.HELD, Reasoned(reasons=["why"])) == Phase.STAGED
    with service.database.transaction() as session:
        row = session.get_one(ReleaseRow, release)
        assert row.held == ["why"]
        assert row.due_at is not None
        folded = lifecycle.fold(evidence.bodies(evidence.read(session, evidence.release_stream(release))))
        assert (folded.phase, folded.phase_since, folded.held) == (row.phase, row.phase_since, tuple(row.held))


def test_an_entry_may_quote_what_the_database_cannot_keep_beside_it(service, actor):
    release = started_release(service, actor)
    record_act(service, release, Kind.HELD, Reasoned(reasons=["the model said a\0b"]))
    with service.database.transaction() as session:
        assert session.get_one(ReleaseRow, release).held == ["the model said a\ufffdb"]
        entry = evidence.read(session, evidence.release_stream(release))[-1]
        assert evidence.wire(entry).body["reasons"] == ["the model said a\0b"]
        assert verification.verify(session, actor.project_id).verified


def test_recording_an_act_twice_changes_nothing(service, actor):
    release = started_release(service, actor)
    record_act(service, release, Kind.STAGED, STAGED, "job:1:staged")
    with service.database.transaction() as session:
        _, is_new = evidence.record(session, state_act(service, release, Kind.STAGED, STAGED, "job:1:staged"))
    assert not is_new


def test_a_refused_entry_leaves_nothing_behind(service, actor):
    release = started_release(service, actor)
    with pytest.raises(TransitionRefused, match="promoted has no place on a candidate release"):
        record_act(service, release, Kind.PROMOTED, Note(reason="please"))
    with service.database.transaction() as session:
        assert len(evidence.read(session, evidence.release_stream(release))) == 1


def test_there_is_no_log_without_a_release(service, actor):
    with pytest.raises(NotFound):
        record_act(service, uuid4(), Kind.STAGED, STAGED)


def test_two_connections_that_append_at_once_keep_one_chain(service, actor):
    appended, failed = 20, []
    begin = threading.Barrier(2)

    def write(name):
        begin.wait()
        for number in range(appended):
            try:
                with service.database.transaction() as session:
                    evidence.append(session, actor.project_id, signed(service, f"{name}:{number}"))
            except DBAPIError as error:
                failed.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    with service.database.transaction() as session:
        log = evidence.read(session, STREAM)
        assert [row.position for row in log] == list(range(1, 2 * appended + 1))
        assert {row.act[0] for row in log[:appended]} == {"a", "b"}, "they did not run at once"
        assert verification.verify(session, actor.project_id).verified


def test_of_two_connections_that_state_one_act_at_once_one_writes_it(service, actor):
    release = started_release(service, actor)
    begin, wrote = threading.Barrier(2), []

    def write():
        made = state_act(service, release, Kind.STAGED, STAGED, "job:1:staged")
        begin.wait()
        with service.database.transaction() as session:
            wrote.append(evidence.record(session, made)[1])

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(wrote) == [False, True]


@pytest.mark.parametrize("table", ["entries", "documents"])
@pytest.mark.parametrize("statement", ["UPDATE {} SET {} = 'x'", "DELETE FROM {}", "TRUNCATE {} CASCADE"])
def test_the_database_refuses_to_change_what_is_written(service, actor, table, statement):
    registered_bundle(service, actor)
    column = {"entries": "actor", "documents": "schema_id"}[table]
    with (
        pytest.raises(DBAPIError, match=f"{table} is append-only: {statement.split()[0]} is refused"),
        service.database.transaction() as session,
    ):
        session.execute(text(statement.format(table, column)))
    with service.database.transaction() as session:
        assert session.scalars(select(EntryRow)).all()
        assert session.scalars(select(DocumentRow)).all()


def test_bells_ring_after_the_commit_and_never_after_a_rollback(database):
    rung = []
    with database.transaction() as session:
        db.after_commit(session, lambda: rung.append("committed"))
        assert not rung
    assert rung == ["committed"]

    def break_off():
        with database.transaction() as session:
            db.after_commit(session, lambda: rung.append("never"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_off()
    assert rung == ["committed"]
