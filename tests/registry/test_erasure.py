"""Raw records that are erased: the bytes go, the evidence that was judged from them stays and says so."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select, update

from registry import blobs, evidence, housekeeping, verification
from registry.client import Client, stored
from registry.tables import EntryRow, RecordRow
from schemas.common import sha256_digest
from schemas.evidence import Agreement, Kind
from schemas.problems import Conflict, InvalidDocument, NotFound
from schemas.result import GateResult
from tests.support.api import make_tokens
from tests.support.factories import created_target
from tests.support.holdings import age, held, project_holds, settings, weights

RAW = b"what somebody asked, and what was answered"
DIGEST = sha256_digest(RAW)


@pytest.fixture
def author(api):
    return api.actor("manager")


@pytest.fixture
def manager(api):
    with Client(api.url, api.tokens["manager"]) as client:
        yield client


def store(service, actor, raw=RAW):
    with service.blobs.stage() as staged:
        staged.write(raw, limit=10**6)
        blobs.keep(service, actor.project_id, sha256_digest(raw), staged, is_record=True)


def measured(service, actor, raw=RAW, name="one"):
    """A gate's result with its records. Returns the digest of its entry."""
    store(service, actor, raw)
    result = GateResult.model_validate(
        {
            "gate": "load",
            "definition": "sha256:" + "d" * 64,
            "verdict": "passed",
            "summary": "it passed",
            "measurements": [],
            "findings": [],
            "records": sha256_digest(raw),
            "duration_ms": 5,
            "source": "run",
        }
    )
    stream, subjects = f"run/{name}", {"bundle": "sha256:" + "b" * 64}
    signed = evidence.state(
        service.signer,
        stream,
        "gate",
        "runner/r1",
        Kind.GATE_RECORDED,
        result,
        subjects=subjects,
        now=datetime.now(UTC),
    )
    with service.database.transaction() as session:
        return evidence.append(session, actor.project_id, signed)[0].entry_digest


def test_a_person_erases_records_and_evidence_says_who_when_and_why(api, manager, author):
    entry = measured(api.service, author)
    told = manager.evidence.erase(entry, "the customer asked for it")
    assert (told.kind, told.actor) == (Kind.RECORDS_ERASED, "manager")
    assert told.body == {"records": DIGEST, "cause": "person", "reason": "the customer asked for it"}
    assert not api.service.blobs.exists(DIGEST)
    assert project_holds(api.service, author, RAW) == [False]
    assert api.clients["viewer"].get(f"/v1/blobs/{DIGEST}").status_code == 404
    found = manager.evidence.verify()
    assert (found.verified, found.erased) == (True, 1)
    again = manager.evidence.recompute(entry)
    assert (again.outcome, str(again.recorded), again.recomputed) == (Agreement.ERASED, "passed", None)
    assert "erased by manager at" in again.faults[0]
    assert "the customer asked for it" in again.faults[0]
    assert manager.evidence.erase(entry, "twice").id == told.id


def test_records_that_are_gone_without_an_erasure_are_not_called_erased(api, manager, author):
    entry = measured(api.service, author)
    api.service.blobs.path(DIGEST).unlink()
    with api.service.database.transaction() as session:  # as somebody with the database would cover it up
        session.execute(update(RecordRow).values(erased_at=datetime.now(UTC)))
    assert manager.evidence.recompute(entry).outcome is Agreement.IMPOSSIBLE


def test_an_altered_entry_stays_a_fault_although_its_records_were_erased(api, manager, author):
    entry = measured(api.service, author)
    manager.evidence.erase(entry, "asked for")
    with api.service.database.transaction() as session:
        session.connection().exec_driver_sql("ALTER TABLE entries DISABLE TRIGGER USER")
        session.execute(update(EntryRow).where(EntryRow.entry_digest == entry).values(actor="somebody"))
        session.connection().exec_driver_sql("ALTER TABLE entries ENABLE TRIGGER USER")
    assert manager.evidence.recompute(entry).outcome is Agreement.DIFFERENT


def test_bytes_that_a_bundle_is_made_of_are_not_erased(api, manager, author):
    bundle = held(api.service, author, "a")
    entry = measured(api.service, author, weights("a"))
    with pytest.raises(Conflict) as refused:
        manager.evidence.erase(entry, "asked for")
    assert refused.value.members["holder"] == bundle.digest
    with api.service.database.transaction() as session:
        session.execute(update(RecordRow).values(recorded_at=RecordRow.recorded_at - timedelta(days=1000)))
    assert housekeeping.tidy(api.service)["records_erased"] == 0
    assert api.service.blobs.exists(sha256_digest(weights("a")))


def test_records_are_erased_when_their_time_is_over_and_kept_before_and_for_ever_when_so_set(api, manager, author):
    old, new = measured(api.service, author), measured(api.service, author, b"new", "two")
    age(api.service, days=1000)  # no bundle is made of them, and they are kept all the same
    with api.service.database.transaction() as session:
        before = RecordRow.recorded_at - timedelta(days=91)
        session.execute(update(RecordRow).where(RecordRow.digest == DIGEST).values(recorded_at=before))
    with settings(api.service, record_days=0.0):
        assert housekeeping.tidy(api.service)["records_erased"] == 0
    assert housekeeping.tidy(api.service) == {
        "uploads_expired": 0,
        "files_discarded": 0,
        "records_erased": 1,
        "blobs_collected": 0,
        "doubts_settled": 0,
    }
    assert [manager.evidence.recompute(one).outcome for one in (old, new)] == [Agreement.ERASED, Agreement.DIFFERENT]
    with api.service.database.transaction() as session:
        told = session.scalars(select(EntryRow).where(EntryRow.kind == Kind.RECORDS_ERASED)).one()
        body = evidence.claim_of(told.envelope)["body"]
        assert verification.verify(session, author.project_id).verified
    assert (told.actor, body["cause"], body["reason"]) == ("controller", "retention", "records are kept for 90 days")


def test_records_that_are_sent_again_are_there_again_and_may_be_erased_again(api, manager, author):
    entry = measured(api.service, author)
    first = manager.evidence.erase(entry, "asked for")
    store(api.service, author)
    assert manager.evidence.recompute(entry).outcome is not Agreement.ERASED
    second = manager.evidence.erase(entry, "asked for again")
    assert (first.position, second.position) == (1, 2)
    assert not api.service.blobs.exists(DIGEST)


def test_another_projects_copy_stays(api, manager, author):
    make_tokens(api.service, "team-b")
    entry = measured(api.service, author)
    with api.service.database.transaction() as session:
        other = session.scalar(select(EntryRow.project_id).where(EntryRow.project_id != author.project_id).limit(1))
    theirs = type(author)(other, "team-b", "bo", "manager")
    store(api.service, theirs)
    manager.evidence.erase(entry, "asked for")
    assert (project_holds(api.service, author, RAW), project_holds(api.service, theirs, RAW)) == ([False], [True])
    assert api.service.blobs.exists(DIGEST)


def test_only_a_result_with_records_is_erased_and_not_by_everybody(api, manager, author):
    created_target(api.service, author)
    made = next(one for one in manager.evidence.list() if one.kind is Kind.TARGET_CREATED)
    with pytest.raises(InvalidDocument):
        manager.evidence.erase(made.entry_digest, "x")
    with pytest.raises(NotFound):
        manager.evidence.erase("sha256:" + "0" * 64, "x")
    entry = measured(api.service, author)
    for role in ("engineer", "ci", "auditor", "viewer", "runner"):
        answer = api.clients[role].post("/v1/evidence/erasures", json={"entry": entry, "reason": "x"})
        assert answer.status_code == 403
    assert api.service.blobs.exists(DIGEST)


def test_the_command_erases_and_verification_says_so(api, command, author):
    entry = measured(api.service, author)
    command.be("manager", api)
    assert "erased" in command.ok("evidence", "erase", entry, "--reason", "asked for").out
    ran = command("evidence", "verify", "--recompute")
    assert (ran.status, "1 record erased on purpose" in ran.out, "erased by manager" in ran.out) == (3, True, True)


def test_records_that_were_erased_are_not_missed_when_all_is_read_again(api, manager, author):
    """Their erasure is told in a stream of its own, which nobody reads who asks for a release's alone."""
    entry = measured(api.service, author)
    stream = next(one.stream for one in manager.evidence.list() if one.entry_digest == entry)
    path = api.service.blobs.path(DIGEST)
    path.rename(path.with_name("aside"))
    for asked in (stream, None):
        (reading,) = manager.read_again(stream=asked)
        assert [(one.stream, one.problem) for one in reading.faults] == [(stream, f"its blob {DIGEST} is missing")]
    path.with_name("aside").rename(path)
    wanted = stored.needed(manager.evidence, manager.bundles)
    manager.evidence.erase(entry, "asked for")
    (reading,) = manager.read_again(stream=stream)
    assert (reading.read, reading.faults) == (1, [])
    assert list(manager.read_again()) == []
    # Nor where it was there when the list was made.
    (reading,) = stored.read_again(manager.blobs, wanted)
    assert (reading.read, reading.faults) == (1, [])
