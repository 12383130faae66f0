"""Rotation of the signing key: the old key introduces the new one, and nothing is signed outside a validity."""

import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from registry import adoption, checkpoints, db, evidence, hindsight, keys, projects, rotation, verification
from registry.auth import Actor
from registry.keys import Signer
from registry.tables import EntryRow, ProjectRow, ReleaseRow, SigningKeyRow
from schemas.evidence import KeyRotated, Kind, Note, TargetCreated
from schemas.problems import Conflict, Unavailable
from tests.support.api import Api
from tests.support.embedded import until
from tests.support.factories import record_act, started_release

BODY = TargetCreated(name="chat@prod", runner_class="cpu", gateway="local")


def sign(service, act, stream="target/a"):
    return evidence.state(
        service.signer, stream, act, "maria", Kind.TARGET_CREATED, BODY,
        subjects={"target": evidence.name_digest("x")}, now=service_now(service),
    )  # fmt: skip


def service_now(service):
    with service.database.transaction() as session:
        return db.now(session)


def add(service, actor, act, stream="target/a"):
    signed = sign(service, act, stream)
    with service.database.transaction() as session:
        return evidence.append(session, actor.project_id, signed)[0].key_id


def rotate(service, overlap_seconds=60.0):
    return rotation.rotate(
        service.database, service.settings.signing_key, reason="yearly", overlap_seconds=overlap_seconds
    )


def verify(service, actor, stream=None):
    with service.database.transaction() as session:
        return verification.verify(session, actor.project_id, signer=service.signer.key_id, stream=stream)


def untrusted(service, actor, stream=None):
    """Return the keys that verification names as nobody's."""
    said = [fault.problem.split(" ") for fault in verify(service, actor, stream).faults]
    return {words[1] for words in said if words[2:6] == ["signed", "here,", "and", "neither"]}


def planted(service, actor, tmp_path, body=None):
    """Whoever can write to the database puts a key of their own into it, and signs an entry with that."""
    mine = Signer.load(tmp_path / "planted.pem")
    kind, stream = (
        (Kind.TARGET_CREATED, "target/b") if body is None else (Kind.KEY_ROTATED, f"project/{actor.project_id}")
    )
    with service.database.transaction() as session:
        keys.enroll(session, mine, at=db.now(session) - timedelta(days=1))
        signed = evidence.state(
            mine, stream, "planted", "maria", kind, body or BODY,
            subjects={"target": evidence.name_digest("x")}, now=db.now(session),
        )  # fmt: skip
        evidence.append(session, actor.project_id, signed)
    return mine


def test_a_key_that_somebody_put_into_the_database_is_named(service, actor, tmp_path):
    add(service, actor, "1", "release/x")
    assert untrusted(service, actor) == set()
    mine = planted(service, actor, tmp_path)
    assert untrusted(service, actor) == {mine.key_id}
    assert untrusted(service, actor, "target/b") == {mine.key_id}
    assert untrusted(service, actor, "release/x") == set()


def test_a_planted_key_cannot_introduce_itself(service, actor, tmp_path):
    """It says that the service's key took its place; of that the service's own key says nothing."""
    now, signer = service_now(service), service.signer
    planting = Signer.load(tmp_path / "planted.pem")
    said = KeyRotated(
        key_id=signer.key_id, public_key_pem=signer.public_key_pem, valid_from=now, retired=planting.key_id,
        valid_until=now, reason="forged",
    )  # fmt: skip
    forged = said.model_copy(update={"countersigned": planting.sign(said.payload()).signatures[0].sig})
    mine = planted(service, actor, tmp_path, forged)
    assert mine.key_id in untrusted(service, actor)


def test_the_new_key_says_too_which_key_it_took_the_place_of(service, actor):
    add(service, actor, "1", "release/x")
    for _ in range(2):
        rotate(service)
        add(service, actor, f"{service.signer.key_id}", "release/x")
    assert untrusted(service, actor) == set()
    assert untrusted(service, actor, "release/x") == set()
    with service.database.transaction() as session:
        rows = session.query(EntryRow).filter_by(kind=Kind.KEY_ROTATED)
        assert all(evidence.wire(row).body["countersigned"] for row in rows)


def test_keys_from_before_countersignatures_are_vouched_for_once(service, actor, monkeypatch):
    """As an older version rotated; the project is taken over by what begins now."""
    old, path = service.signer.key_id, service.settings.signing_key
    add(service, actor, "1")
    new = Signer.load(path.with_name("new.pem"))
    with monkeypatch.context() as older, service.database.transaction() as session:
        older.setattr(KeyRotated, "payload", lambda _: b"nothing")
        rotation._record(session, Signer.load(path), new, reason="yearly", overlap_seconds=60)
    path.with_name("new.pem").replace(path)
    assert untrusted(service, actor) == {old}
    with service.database.transaction() as session:
        project = session.get_one(ProjectRow, actor.project_id)
        vouched = adoption._keys(session, service)
        assert vouched == {"keys": [old]}
        projects.record(session, service, project, by="root", said=projects.facts(project) | vouched)
    assert untrusted(service, actor) == set()
    assert untrusted(service, actor, "target/a") == set()


def test_the_old_key_introduces_the_new_one_and_running_processes_take_it(service, actor):
    old = service.signer.key_id
    add(service, actor, "1")
    new = rotate(service)
    assert service.signer.key_id == new != old
    assert add(service, actor, "2") == new
    with service.database.transaction() as session:
        (entry,) = session.query(EntryRow).filter_by(kind=Kind.KEY_ROTATED)
        body = evidence.wire(entry).body
        rows = {row.key_id: row for row in keys.history(session)}
    assert (entry.key_id, body["key_id"], body["retired"], body["reason"]) == (old, new, old, "yearly")
    assert rows[old].valid_until - rows[new].valid_from == timedelta(seconds=60)
    assert rows[new].valid_until is None
    assert verify(service, actor).faults == []


def test_rotating_again_and_again_keeps_the_history(service, actor):
    for number in range(3):
        add(service, actor, str(number))
        rotate(service)
    with service.database.transaction() as session:
        ended = [row.valid_until is not None for row in keys.history(session)]
    assert ended == [True, True, True, False]
    assert verify(service, actor).faults == []


def test_what_the_old_key_signs_after_its_end_is_not_recorded(service, actor):
    late = sign(service, "late")
    rotate(service, overlap_seconds=2)
    time.sleep(2.1)
    with pytest.raises(Unavailable, match="is not in force"), service.database.transaction() as session:
        evidence.append(session, actor.project_id, late)
    assert add(service, actor, "anew") == service.signer.key_id
    assert verify(service, actor).faults == []


def test_what_was_signed_before_is_recorded_within_the_overlap(service, actor):
    early = sign(service, "early")
    rotate(service)
    with service.database.transaction() as session:
        evidence.append(session, actor.project_id, early)
    assert verify(service, actor).faults == []


def test_writers_who_run_through_a_rotation_lose_nothing(service, actor):
    begin, failed = threading.Barrier(4), []

    def write(name):
        begin.wait()
        for number in range(20):
            try:
                add(service, actor, f"{name}{number}", f"target/{name}")
            except Exception as error:  # edge: told to the test
                failed.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in "xyz"]
    for thread in threads:
        thread.start()
    begin.wait()
    new = rotate(service)
    for thread in threads:
        thread.join()
    assert failed == []
    assert add(service, actor, "last") == new
    found = verify(service, actor)
    assert (found.faults, found.entries) == ([], 63)


def made(service, name="late"):
    with service.database.transaction() as session:
        return projects.create(session, service, name, by="root").id


def faults(service, project):
    with service.database.transaction() as session:
        return verification.verify(session, project, signer=service.signer.key_id).faults


def test_projects_that_are_made_all_through_rotations_are_sound(service, actor):
    stop, ids, refused = threading.Event(), [], []

    def make(name):
        number = 0
        while not stop.is_set():
            number += 1
            try:
                ids.append(made(service, f"{name}{number}"))
            except Unavailable as problem:
                refused.append(problem.detail)
                time.sleep(0.01)

    threads = [threading.Thread(target=make, args=(name,)) for name in "xy"]
    for thread in threads:
        thread.start()
    for _ in range(6):
        rotate(service)
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join()
    assert len(ids) > 6
    assert all("is being replaced" in detail for detail in refused)
    assert [found for project in ids if (found := faults(service, project))] == []


def test_a_project_is_not_made_by_a_key_that_has_been_retired_and_vouches_for_it_while_it_signs(service, actor):
    path = service.settings.signing_key
    old = Signer(Signer.load(path)._current.key)  # of a process that reads another copy of the file
    late = replace(service, signer=old)
    for _ in range(2):
        rotate(service)
    with pytest.raises(Unavailable, match="is being replaced"):
        made(late)
    project = made(service)
    signed = sign(late, "1", "target/late")
    with service.database.transaction() as session:
        evidence.append(session, project, signed)
    assert faults(service, project) == []
    # A key that nobody rotated is vouched for by none, also while it signs.
    with service.database.transaction() as session:
        planted_key = Signer.load(path.with_name("planted.pem"))
        keys.enroll(session, planted_key, at=db.now(session))
        ends = db.now(session) + timedelta(minutes=1)
        session.execute(text("SET LOCAL session_replication_role = replica"))
        session.query(SigningKeyRow).filter_by(key_id=planted_key.key_id).update({"valid_until": ends})
    other = made(service, "later")
    with service.database.transaction() as session:
        (entry,) = session.query(EntryRow).filter_by(stream=projects.stream(other))
        assert planted_key.key_id not in evidence.wire(entry).body["keys"]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_rotation_that_a_crash_left_half_done_is_finished_or_begun_anew(service, actor, is_recorded):
    path = service.settings.signing_key
    following = path.with_name(f"{path.name}.next")
    left = Signer.load(following)
    if is_recorded:
        with service.database.transaction() as session:
            rotation._record(session, Signer.load(path), left, reason="yearly", overlap_seconds=60)
    new = rotate(service)
    assert (new == left.key_id) is is_recorded
    assert not following.exists()
    assert add(service, actor, "1") == new
    assert verify(service, actor).faults == []


def test_of_two_rotations_at_once_one_is_refused_and_the_key_that_signs_is_the_one_that_was_recorded(
    service, actor, monkeypatch
):
    path = service.settings.signing_key
    following, record = path.with_name(f"{path.name}.next"), rotation._record
    others, refused = [], []

    def second():
        try:
            rotate(service)
        except (Conflict, ValueError) as error:
            refused.append(error)

    def recorded(*arguments, **named):
        record(*arguments, **named)
        if not others:
            mine = following.read_bytes()
            others.append(threading.Thread(target=second))
            others[0].start()
            until(lambda: refused or following.read_bytes() != mine, seconds=10)

    monkeypatch.setattr(rotation, "_record", recorded)
    new = rotate(service)
    others[0].join()
    assert [type(error) for error in refused] == [Conflict]
    assert add(service, actor, "1") == new
    assert verify(service, actor).faults == []
    assert rotate(service) != new


def test_a_new_key_outlives_a_loss_of_power_before_anything_says_that_it_signs(service, actor, monkeypatch):
    path, sync, record = service.settings.signing_key, os.fsync, rotation._record
    done = []

    def synced(handle):
        done.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        sync(handle)

    def recorded(*arguments, **named):
        done.append("recorded")
        record(*arguments, **named)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(rotation, "_record", recorded)
    rotate(service)
    folder = os.fspath(path.parent)
    assert folder in done[: done.index("recorded")]
    assert folder in done[done.index("recorded") :]


def test_a_project_is_made_under_a_key_that_lasts_or_waits_for_the_one_that_takes_its_place(service, actor):
    path = service.settings.signing_key
    following = path.with_name(f"{path.name}.next")
    with service.database.transaction() as session:
        rotation._record(session, Signer.load(path), Signer.load(following), reason="yearly", overlap_seconds=60)
    with pytest.raises(Unavailable, match="is being replaced"), service.database.transaction() as session:
        projects.create(session, service, "second", by="root")
    new = rotate(service)
    with service.database.transaction() as session:
        made = projects.create(session, service, "second", by="root")
        told = verification.verify(session, made.id, signer=new)
    assert (told.entries, told.faults) == (1, [])


def test_a_rotation_tells_a_project_that_was_being_made_when_it_began(service, actor):
    rotations = []
    with service.database.transaction() as session:
        made = projects.create(session, service, "second", by="root")
        rotations.append(threading.Thread(target=rotate, args=(service,)))
        rotations[0].start()
        rotations[0].join(1)
        assert rotations[0].is_alive()
    rotations[0].join()
    with service.database.transaction() as session:
        told = verification.verify(session, made.id, signer=service.signer.key_id)
        assert [row.kind for row in evidence.read(session, projects.stream(made.id))] == ["project_set", "key_rotated"]
    assert told.faults == []


def test_nothing_is_signed_outside_a_key_whose_beginning_the_clock_was_set_back_to_before(service):
    """What is recorded, and what seals it, has the key's first moment then."""
    with service.database.transaction() as session:
        session.execute(text("SET LOCAL session_replication_role = replica"))
        session.execute(text("UPDATE signing_keys SET valid_from = valid_from + interval '1 hour'"))
        project, _ = projects.ensure(session, service, "default", by="test")
    maria = Actor(project_id=project.id, project="default", name="maria", role="manager")
    release = started_release(service, maria)
    record_act(service, release, Kind.PAUSED, Note(reason="a look"))
    checkpoints.make(service, project.id, by="test")
    assert verify(service, maria).faults == []
    rotate(service)
    record_act(service, release, Kind.RESUMED, Note(reason="looked"))
    checkpoints.make(service, project.id, by="test")
    told = verify(service, maria)
    assert (told.faults, told.checkpoints) == ([], 2)
    with service.database.reading() as session:
        row, now = session.get_one(ReleaseRow, release), db.now(session)
        assert row.phase_since - now > timedelta(minutes=50)
        # Who is looked at next is told by the clock as it is.
        hindsight.bring_near(session, service.settings, now)
        assert session.get_one(ReleaseRow, release, populate_existing=True).due_at <= db.now(session)


def test_a_key_that_takes_over_while_a_checkpoint_is_made_seals_nothing_from_before(service, actor, monkeypatch):
    """The checkpoint says when it was made, and the new key did not sign then."""
    add(service, actor, "1")
    store, rotated = checkpoints._store, []

    def stored(*arguments):
        if not rotated:
            rotated.append(rotate(service))
        return store(*arguments)

    monkeypatch.setattr(checkpoints, "_store", stored)
    row, is_new = checkpoints.make(service, actor.project_id, by="test")
    assert (is_new, row.key_id) == (True, rotated[0])
    assert verify(service, actor).faults == []


def test_an_old_key_that_ends_before_its_last_word_is_recorded_ends_nothing(service, actor):
    before = service.signer.key_id
    with pytest.raises(ValueError, match="recording it took longer"):
        rotate(service, overlap_seconds=0)
    assert add(service, actor, "1") == before
    assert verify(service, actor).faults == []
    assert rotate(service) != before


def test_a_key_that_has_ended_rotates_no_more(service, actor, tmp_path):
    path = service.settings.signing_key
    old = path.read_bytes()
    rotate(service)
    path.write_bytes(old)
    with pytest.raises((ValueError, Unavailable)):
        rotate(service)
    with pytest.raises(FileNotFoundError):
        rotation.rotate(service.database, tmp_path / "none.pem", reason="x", overlap_seconds=1)


def test_a_rotation_that_says_other_than_the_keys_is_a_fault(service, actor):
    rotate(service)
    with service.database.transaction() as session:
        session.execute(text("SET LOCAL session_replication_role = replica"))
        session.execute(
            text("UPDATE signing_keys SET valid_until = valid_until + interval '1 hour' WHERE valid_until IS NOT NULL")
        )
    assert [fault.problem.split(" ", 2)[2] for fault in verify(service, actor).faults] == [
        "does not end when it was retired"
    ]


def test_the_command_and_the_history_over_http(committed, monkeypatch, capsys):
    url = committed.database.engine.url.render_as_string(hide_password=False)
    settings = {
        "DATABASE_URL": url,
        "BROKER_URL": "redis://127.0.0.1:1/0",
        "STORAGE_DIR": str(committed.settings.storage_dir),
        "SIGNING_KEY": str(committed.settings.signing_key),
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"SLUICEGATE_{name}", value)
    with Api(committed) as api:
        before = committed.signer.key_id
        assert keys.main(["rotate", "--reason", "yearly"]) == 0
        assert committed.signer.key_id in capsys.readouterr().out
        items = api.clients["engineer"].get("/v1/keys").json()["items"]
        assert [(item["key_id"], item["valid_until"] is None) for item in items] == [
            (before, False),
            (committed.signer.key_id, True),
        ]
        assert api.clients["engineer"].post("/v1/evidence/verifications").json()["verified"]
    committed.settings.signing_key.unlink()
    assert keys.main(["rotate", "--reason", "yearly"]) == 2
    assert "there is no signing key" in capsys.readouterr().err


def test_only_the_owner_of_the_tables_rotates(service, actor, monkeypatch, capsys):
    with service.database.transaction() as session:
        session.execute(text("CREATE ROLE rotating_app LOGIN"))
        session.execute(text("GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA public TO rotating_app"))
        before = session.query(SigningKeyRow).count()
    try:
        url = service.database.engine.url.set(username="rotating_app").render_as_string(hide_password=False)
        monkeypatch.setenv("SLUICEGATE_DATABASE_URL", url)
        monkeypatch.setenv("SLUICEGATE_BROKER_URL", "redis://127.0.0.1:1/0")
        monkeypatch.setenv("SLUICEGATE_STORAGE_DIR", str(service.settings.storage_dir))
        monkeypatch.setenv("SLUICEGATE_SIGNING_KEY", str(service.settings.signing_key))
        signer = service.signer.key_id
        assert keys.main(["rotate", "--reason", "mine now"]) == 4
        assert "is this its owner?" in capsys.readouterr().err
        assert service.signer.key_id == signer
        with service.database.transaction() as session:
            assert session.query(SigningKeyRow).count() == before
    finally:
        with service.database.transaction() as session:
            session.execute(text("DROP OWNED BY rotating_app"))
            session.execute(text("DROP ROLE rotating_app"))
