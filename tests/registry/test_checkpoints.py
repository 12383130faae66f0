"""Checkpoints over all streams: what is cut, removed, put in another order or chained anew behind one is found."""

import threading
from dataclasses import replace as changed
from datetime import UTC, datetime

import pytest
from sqlalchemy import select, text
from uuid6 import uuid7

from gates.evidence import sealed_in
from registry import checkpoints, evidence, keys, verification
from registry.tables import CheckpointRow, EntryRow
from schemas.checkpoint import MAX_SEALED
from schemas.common import canonical_json
from schemas.evidence import GENESIS, PREDICATE_BASE, STATEMENT_TYPE, Kind, Note, Reasoned, TargetCreated
from schemas.problems import NotFound, Unavailable
from tests.support.factories import record_act, started_release
from workers.control import Control
from workers.sweep import sweep

BODY = TargetCreated(name="chat@prod", runner_class="cpu", gateway="local")


def append(service, session, project, stream, act):
    signed = evidence.state(
        service.signer, stream, act, "maria", Kind.TARGET_CREATED, BODY,
        subjects={"target": evidence.name_digest("x")}, now=datetime.now(UTC),
    )  # fmt: skip
    evidence.append(session, project, signed)


def add(service, project, stream, act):
    with service.database.transaction() as session:
        append(service, session, project, stream, act)


def seal(service, actor):
    return checkpoints.make(service, actor.project_id, by="test")


def verify(service, actor, stream=None):
    with service.database.transaction() as session:
        return verification.verify(session, actor.project_id, stream=stream)


def faults(service, actor, stream=None):
    found = verify(service, actor, stream)
    assert not found.verified
    return {(fault.stream, fault.position, fault.problem) for fault in found.faults}


def alter(service, *statements, **values):
    """As a superuser who switched the triggers off."""
    with service.database.transaction() as session:
        session.execute(text("SET LOCAL session_replication_role = replica"))
        for statement in statements:
            assert session.execute(text(statement), values).rowcount > 0, statement


@pytest.fixture
def story(service, actor):
    """Streams a, b and c with three, two and one entries, in two checkpoints; one entry of b is not sealed."""
    for stream, act in (("target/a", "1"), ("target/b", "1"), ("target/a", "2")):
        add(service, actor.project_id, stream, act)
    seal(service, actor)
    for stream, act in (("target/c", "1"), ("target/a", "3")):
        add(service, actor.project_id, stream, act)
    seal(service, actor)
    add(service, actor.project_id, "target/b", "2")
    return service


@pytest.fixture
def names(actor):
    return f"checkpoints/{actor.project_id}"


def test_a_checkpoint_says_how_far_each_stream_had_grown(story, actor):
    with story.database.transaction() as session:
        first, second = checkpoints.every(session, actor.project_id)
        entries = list(session.scalars(select(EntryRow).order_by(EntryRow.sequence)))
    # The project's own entry is the first.
    assert (first.number, first.entries, first.streams, first.sequence) == (1, 4, 3, entries[3].sequence)
    assert (second.number, second.entries, second.streams, second.sequence) == (2, 6, 4, entries[5].sequence)
    assert (first.previous, second.previous) == (GENESIS, first.digest)
    found = verify(story, actor)
    assert found.faults == []
    assert (found.entries, found.checkpoints, found.sealed) == (7, 2, 6)
    apart = [verify(story, actor, stream=stream) for stream in sorted({entry.stream for entry in entries})]
    assert sum(one.sealed for one in apart) == 6
    assert all(one.sealed <= one.entries for one in apart)


def test_nothing_new_makes_no_checkpoint_and_an_empty_log_has_none(service, actor):
    with pytest.raises(NotFound):
        checkpoints.make(service, uuid7(), by="nobody")
    add(service, actor.project_id, "target/a", "1")
    first, is_new = seal(service, actor)
    again, is_new_again = seal(service, actor)
    assert (is_new, is_new_again, again.number) == (True, False, first.number)


def test_a_log_that_is_longer_than_one_checkpoint_takes_several(service, actor, monkeypatch):
    monkeypatch.setattr(checkpoints, "MAX_SEALED", 4)
    for number in range(10):
        add(service, actor.project_id, f"target/{number % 3}", str(number))
    last, _ = seal(service, actor)
    assert (last.number, last.entries, last.streams) == (3, 11, 4)
    assert verify(service, actor).verified
    assert MAX_SEALED >= 1000


# ------------------------------------------------------------------------------------- what is found, and named


def test_a_cut_tail_is_found(story, actor, names):
    alter(story, "DELETE FROM entries WHERE stream = 'target/a' AND position = 3")
    assert ("target/a", 0, "it was cut: it has 2 entries, and checkpoint 2 sealed 3") in faults(story, actor)
    assert ("target/a", 0, "it was cut: it has 2 entries, and checkpoint 2 sealed 3") in faults(
        story, actor, "target/a"
    )


def test_a_removed_stream_is_found(story, actor):
    alter(story, "DELETE FROM entries WHERE stream = 'target/c'")
    assert ("target/c", 0, "the stream was removed, and checkpoint 2 sealed 1") in faults(story, actor)


def test_everything_above_the_first_checkpoint_cut_together_is_found(story, actor, names):
    alter(story, "DELETE FROM entries WHERE sequence > (SELECT sequence FROM checkpoints WHERE number = 1)")
    found = faults(story, actor)
    assert {stream for stream, _, _ in found} == {"target/a", "target/c", names}


def rechain(service, stream, *, keep):
    """Write a stream anew from `keep` on, with the service's own key: what a thief of the key could do."""
    with service.database.transaction() as session:
        log = evidence.read(session, stream)
        session.execute(text("SET LOCAL session_replication_role = replica"))
        previous = log[keep - 1].entry_digest if keep else GENESIS
        for row in log[keep:]:
            signed = evidence.state(
                service.signer, stream, row.act, row.actor, Kind(row.kind), BODY.model_copy(update={"name": "x@prod"}),
                subjects={"target": evidence.name_digest("x")}, now=row.recorded_at,
            )  # fmt: skip
            record = changed(evidence.as_record(row), envelope=signed.envelope, previous=previous)
            previous = record.link()
            session.execute(
                text("UPDATE entries SET envelope = :e, previous = :p, entry_digest = :d WHERE id = :id"),
                {"e": record.envelope, "p": record.previous, "d": previous, "id": row.id},
            )


def test_a_stream_that_was_chained_anew_with_the_right_key_is_found(story, actor, names):
    rechain(story, "target/a", keep=1)
    assert faults(story, actor) == {
        ("target/a", 2, "it is not the entry that checkpoint 1 sealed"),
        ("target/a", 3, "it is not the entry that checkpoint 2 sealed"),
        (names, 1, faulty_root(story, 1)),
        (names, 2, faulty_root(story, 2)),
    }


def test_what_no_checkpoint_covers_can_be_chained_anew_and_that_is_what_they_are_for(story, actor):
    rechain(story, "target/b", keep=1)
    assert verify(story, actor).verified
    seal(story, actor)
    rechain(story, "target/b", keep=1)
    assert ("target/b", 2, "it is not the entry that checkpoint 3 sealed") in faults(story, actor)


def faulty_root(service, number):
    with service.database.transaction() as session:
        sequence = session.scalar(select(CheckpointRow.sequence).where(CheckpointRow.number == number))
    return f"the entries up to sequence {sequence} are not those that it sealed"


def test_two_entries_of_different_streams_that_changed_places_are_found(story, actor, names):
    with story.database.transaction() as session:
        session.execute(text("ALTER TABLE entries ALTER sequence SET GENERATED BY DEFAULT"))
        first, second = session.scalars(select(EntryRow.sequence).order_by(EntryRow.sequence).limit(2))
    alter(
        story,
        f"UPDATE entries SET sequence = -1 WHERE sequence = {first}",
        f"UPDATE entries SET sequence = {first} WHERE sequence = {second}",
        f"UPDATE entries SET sequence = {second} WHERE sequence = -1",
    )
    assert faults(story, actor) == {(names, 1, faulty_root(story, 1))}


def test_an_entry_that_was_slipped_in_below_a_checkpoint_is_found(story, actor, names):
    with story.database.transaction() as session:
        session.execute(text("ALTER TABLE entries ALTER sequence SET GENERATED BY DEFAULT"))
    alter(story, "UPDATE entries SET sequence = -5 WHERE stream = 'target/b' AND position = 2")
    found = faults(story, actor)
    assert ("target/b", 2, "it was slipped in below checkpoint 2") in found


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("envelope = set_byte(envelope, 40, get_byte(envelope, 40) # 1)", "its digest is not that of its envelope"),
        ("digest = 'sha256:' || repeat('0', 64)", "its digest is not that of its envelope"),
        ("sequence = sequence - 1", "its sequence is not the one that was signed"),
        ("entries = entries - 1", "its entries is not the one that was signed"),
        ("streams = streams + 1", "its streams is not the one that was signed"),
        ("made_by = 'x'", "its made_by is not the one that was signed"),
        ("made_at = made_at + interval '1 microsecond'", "its made_at is not the one that was signed"),
        ("previous = 'sha256:' || repeat('0', 64)", "its previous is not the one that was signed"),
        ("number = 7", "its number is not the one that was signed"),
        ("key_id = 'x'", "it was signed by a key that is not known"),
    ],
)
def test_an_altered_checkpoint_is_found_and_named(story, actor, names, assignment, said):
    alter(story, f"UPDATE checkpoints SET {assignment} WHERE number = 2")
    problems = {problem for stream, number, problem in faults(story, actor) if stream == names and number in {2, 7}}
    assert any(problem.startswith(said) or "cannot be read" in problem for problem in problems), problems


def test_a_removed_checkpoint_leaves_a_gap(story, actor, names):
    seal(story, actor)
    alter(story, "DELETE FROM checkpoints WHERE number = 2")
    found = faults(story, actor)
    assert (names, 3, "checkpoint 2 is missing") in found
    assert (names, 3, "it does not name the checkpoint before it") in found


def test_a_key_that_was_given_another_validity_since_is_found(story, actor, names):
    alter(story, "UPDATE signing_keys SET valid_from = valid_from - interval '1 hour'")
    key = story.signer.key_id
    assert (names, 1, f"key {key} had another validity when the checkpoint was made") in faults(story, actor)


def test_a_checkpoint_that_miscounts_is_found_although_it_is_signed(story, actor, names):
    with story.database.transaction() as session:
        row = checkpoints.last(session, actor.project_id)
        sealed, root = sealed_in(row.envelope)
    wrong = sealed.model_copy(update={"entries": sealed.entries + 1})
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": "evidence", "digest": {"sha256": root.removeprefix("sha256:")}}],
        "predicateType": f"{PREDICATE_BASE}checkpoint/v1",
        "predicate": wrong.model_dump(mode="json", exclude_none=True),
    }
    envelope = story.signer.sign(canonical_json(statement)).model_dump(mode="json", by_alias=True)
    alter(story, "UPDATE checkpoints SET envelope = :raw WHERE number = 2", raw=canonical_json(envelope))
    assert (names, 2, "it counts 7 entries, which its streams do not add up to") in faults(story, actor)


# ------------------------------------------------------------------------------------------------ writers


@pytest.mark.parametrize("is_older", [True, False])
def test_a_checkpoint_waits_for_a_writer_who_holds_a_lower_sequence(service, actor, is_older):
    """The entry below it lands after the one above: sealing too early would condemn an honest log.

    Who began first, and has the lower transaction number, says nothing about who has the lower sequence.
    """
    with service.database.transaction() as fast:
        if not is_older:
            fast.execute(text("SELECT pg_current_xact_id()"))
        slow = service.database.transaction()
        session = slow.__enter__()
        append(service, session, actor.project_id, "target/slow", "1")
        append(service, fast, actor.project_id, "target/fast", "1")
    threading.Timer(0.2, lambda: slow.__exit__(None, None, None)).start()
    made, _ = seal(service, actor)
    assert made.entries == 3
    assert verify(service, actor).faults == []


def test_a_writer_who_never_ends_makes_no_checkpoint_and_is_not_waited_for_long(service, actor, monkeypatch):
    monkeypatch.setattr(checkpoints, "PATIENCE_SECONDS", 0.1)
    add(service, actor.project_id, "target/a", "1")
    with service.database.transaction() as session:
        session.execute(text("SELECT pg_current_xact_id()"))
        with pytest.raises(Unavailable, match="under way for long"):
            seal(service, actor)


def test_many_who_write_and_seal_at_once_leave_one_chain(service, actor):
    begin, failed = threading.Barrier(5), []

    def run(work):
        begin.wait()
        try:
            for number in range(12):
                work(number)
        except Exception as error:  # edge: told to the test
            failed.append(error)

    def writing(name):
        return lambda number: add(service, actor.project_id, f"target/{name}{number % 3}", f"{name}{number}")

    add(service, actor.project_id, "target/a", "0")
    threads = [threading.Thread(target=run, args=(writing(name),)) for name in "xyz"]
    threads += [threading.Thread(target=run, args=(lambda _: seal(service, actor),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    last, _ = seal(service, actor)
    assert last.entries == 38
    found = verify(service, actor)
    assert found.faults == []
    assert found.sealed == 38


# -------------------------------------------------------------------------------------------------- sweep


def test_a_sweep_seals_what_has_waited_and_nothing_else(service, actor):
    control = Control.build(service, lambda _: None)
    add(service, actor.project_id, "target/a", "1")
    for _ in range(2):
        sweep(control, lambda _: None)
    add(service, actor.project_id, "target/a", "2")
    sweep(control, lambda _: None)
    with service.database.transaction() as session:
        assert [row.entries for row in checkpoints.every(session, actor.project_id)] == [2]
    eager = changed(service, settings=service.settings.model_copy(update={"checkpoint_seconds": 0.001}))
    sweep(Control.build(eager, lambda _: None), lambda _: None)
    with service.database.transaction() as session:
        rows = list(checkpoints.every(session, actor.project_id))
    assert [(row.entries, row.made_by) for row in rows] == [(2, "controller"), (3, "controller")]


def test_of_two_who_seal_the_same_one_makes_the_checkpoint(service, actor, monkeypatch):
    add(service, actor.project_id, "target/a", "1")
    begin, made, store = threading.Barrier(2), [], checkpoints._store

    def together(*arguments):
        begin.wait(10)
        return store(*arguments)

    monkeypatch.setattr(checkpoints, "_store", together)
    threads = [threading.Thread(target=lambda: made.append(seal(service, actor))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(is_new for _, is_new in made) == [False, True]
    assert made[0][0].digest == made[1][0].digest


def test_a_release_s_log_is_sealed_as_it_grows(service, actor):
    release = started_release(service, actor)
    seal(service, actor)
    record_act(service, release, Kind.PAUSED, Note(reason="wait"))
    record_act(service, release, Kind.HELD, Reasoned(reasons=["why"]))
    seal(service, actor)
    assert verify(service, actor).verified
    stream = evidence.release_stream(release)
    # The cached fold is made to agree: only the checkpoint remembers.
    alter(
        service,
        "DELETE FROM entries WHERE stream = :stream AND position = 3",
        "UPDATE releases SET held = '[]', reason = 'wait'",
        stream=stream,
    )
    assert (stream, 0, "it was cut: it has 2 entries, and checkpoint 2 sealed 3") in faults(service, actor)


# ---------------------------------------------------------------------------------------------------- API


def test_checkpoints_over_http(own_api):
    engineer, runner = own_api.clients["engineer"], own_api.clients["runner"]
    made = engineer.post("/v1/evidence/checkpoints")
    assert (made.status_code, made.json()["number"], made.json()["made_by"]) == (201, 1, "engineer")
    assert engineer.post("/v1/evidence/checkpoints").status_code == 200
    listed = engineer.get("/v1/evidence/checkpoints", params={"envelopes": "true"}).json()
    assert [item["digest"] for item in listed["items"]] == [made.json()["digest"]]
    assert listed["items"][0]["envelope"]["payloadType"] == "application/vnd.in-toto+json"
    assert engineer.get("/v1/evidence/checkpoints", params={"after": 1}).json() == {"items": [], "next": None}
    assert runner.post("/v1/evidence/checkpoints").status_code == 403
    found = engineer.post("/v1/evidence/verifications").json()
    assert (found["verified"], found["sealed"]) == (True, found["entries"])
    kept = {"checkpoint": made.json()["digest"]}
    assert engineer.post("/v1/evidence/verifications", params=kept).json()["verified"]
    lost = {"checkpoint": "sha256:" + "0" * 64}
    assert not engineer.post("/v1/evidence/verifications", params=lost).json()["verified"]


def test_the_key_history_is_in_every_checkpoint(story, actor):
    with story.database.transaction() as session:
        sealed, _ = sealed_in(checkpoints.last(session, actor.project_id).envelope)
        assert [key.key_id for key in sealed.keys] == sorted(key.key_id for key in keys.history(session))
