import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from gates.evidence import entry_problems
from registry import auth, db, deletion, documents, evidence, keys, projects, targets, verification
from registry.keys import Signer
from registry.tables import EntryRow
from schemas.api import Act
from schemas.common import canonical_json
from schemas.evidence import Kind, Reasoned, Staged
from tests.support.factories import (
    created_target,
    record_act,
    reference_body,
    registered_bundle,
    registered_golden,
    registered_policy,
    started_release,
)


@pytest.fixture
def service(scratch):
    return scratch


@pytest.fixture
def story(service, actor) -> str:
    """A release with three entries, whose stream this is, among the entries of other streams."""
    release = started_release(service, actor)
    record_act(service, release, Kind.STAGED, Staged(files=1, size=19, duration_ms=3))
    record_act(service, release, Kind.HELD, Reasoned(reasons=["the runner is gone"]))
    return evidence.release_stream(release)


def verify(service, actor, stream=None):
    with service.database.transaction() as session:
        return verification.verify(session, actor.project_id, stream=stream)


@contextmanager
def tampering(service) -> Iterator[Session]:
    """A superuser who switched the triggers off."""
    with service.database.transaction() as session:
        session.execute(text("SET LOCAL session_replication_role = replica"))
        yield session
        session.execute(text("SET LOCAL session_replication_role = origin"))


def alter(service, statement, **values):
    with tampering(service) as session:
        assert session.execute(text(statement), values).rowcount == 1


def faults(service, actor, stream=None):
    found = verify(service, actor, stream)
    assert not found.verified
    return {(fault.stream, fault.position, fault.problem) for fault in found.faults}


def test_what_nobody_touched_is_verified(service, actor, story):
    found = verify(service, actor)
    assert found.faults == []
    assert found.verified
    assert (found.entries, found.streams) == (7, 5)
    assert verify(service, actor, story).entries == 3


def test_nothing_is_not_verified(service, actor):
    assert verify(service, actor).verified
    with service.database.transaction() as session:
        assert not verification.verify(session, UUID(int=7)).verified
    assert not verify(service, actor, "release/none").verified


def test_any_altered_byte_of_an_envelope_is_found(service, actor, story):
    """Every byte, each in another way: the checks are pure, so the row need not be written back."""
    with service.database.transaction() as session:
        record = evidence.as_record(evidence.read(session, story)[1])
        key = next(key for key in keys.known(session) if key.key_id == record.key_id)
    original = record.envelope
    assert not list(entry_problems(record, record.position, record.previous, key))
    for place in range(len(original)):
        for change in (0x01, 0x20, 0x80):
            altered = bytearray(original)
            altered[place] ^= change
            other = replace(record, envelope=bytes(altered))
            problems = list(entry_problems(other, record.position, record.previous, key))
            assert "its digest is not that of its row: a column or the envelope was altered" in problems, place


def test_an_envelope_altered_in_the_database_is_found_and_named(service, actor, story):
    alter(
        service,
        "UPDATE entries SET envelope = set_byte(envelope, 40, get_byte(envelope, 40) # 1) "
        "WHERE stream = :stream AND position = 2",
        stream=story,
    )
    found = faults(service, actor)
    assert (story, 2, "its digest is not that of its row: a column or the envelope was altered") in found
    elsewhere = {(problem.split(" ")[1], position) for stream, position, problem in found if stream != story}
    assert elsewhere == {("generation", 0)}  # what the target counts is in the log that cannot be read
    assert {position for stream, position, _ in found if stream == story} <= {2, 0}


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("id", "'00000000-0000-7000-8000-000000000000'", "its digest is not that of its row"),
        ("act", "act || 'x'", "its act is not the one that was signed"),
        ("kind", "'engine_booted'", "its kind is not the one that was signed"),
        ("actor", "actor || 'x'", "its actor is not the one that was signed"),
        ("recorded_at", "recorded_at + interval '1 microsecond'", "its digest is not that of its row"),
        ("previous", "overwrite(previous)", "its link does not name the entry before it"),
        ("entry_digest", "overwrite(entry_digest)", "its digest is not that of its row"),
        ("key_id", "overwrite(key_id)", "it was signed by a key that is not known"),
        ("position", "position + 7", "position 2 is missing"),
        ("sequence", "-1", "its sequence is not above the one before"),
    ],
)
def test_an_altered_column_is_found_and_named(service, actor, story, column, value, said):
    with service.database.transaction() as session:
        session.execute(
            text(
                "CREATE FUNCTION overwrite(hexadecimal text) RETURNS text LANGUAGE sql "
                "RETURN left(hexadecimal, -1) || CASE right(hexadecimal, 1) WHEN '0' THEN '1' ELSE '0' END"
            )
        )
        session.execute(text("ALTER TABLE entries ALTER sequence SET GENERATED BY DEFAULT"))
    alter(service, f"UPDATE entries SET {column} = {value} WHERE stream = :stream AND position = 2", stream=story)
    named = [(position, problem) for stream, position, problem in faults(service, actor) if stream == story]
    assert any(problem.startswith(said) for _, problem in named), named
    # Moving an entry leaves a gap where it was; anything else is named where it stands.
    assert min(position for position, _ in named if position) == (3 if column == "position" else 2)


def test_an_entry_moved_to_another_stream_is_missed_in_one_and_found_in_the_other(service, actor, story):
    alter(service, "UPDATE entries SET stream = 'target/x' WHERE stream = :stream AND position = 2", stream=story)
    found = faults(service, actor)
    assert (story, 3, "position 2 is missing") in found
    assert ("target/x", 2, "its stream is not the one that was signed") in found


def test_an_entry_moved_to_another_project_is_missed_in_one_and_found_in_the_other(service, actor, story):
    with service.database.transaction() as session:
        other = projects.create(session, service, "other", by="root").id
    alter(
        service,
        "UPDATE entries SET project_id = :other WHERE stream = :stream AND position = 3",
        other=other,
        stream=story,
    )
    assert (story, 0, "held is ['the runner is gone'], but its log says []") in faults(service, actor)
    with service.database.transaction() as session:
        elsewhere = verification.verify(session, other)
    assert "its digest is not that of its row: a column or the envelope was altered" in {
        fault.problem for fault in elsewhere.faults
    }


def test_a_removed_entry_leaves_a_gap(service, actor, story):
    alter(service, "DELETE FROM entries WHERE stream = :stream AND position = 2", stream=story)
    assert (story, 3, "position 2 is missing") in faults(service, actor)


def test_a_log_cut_at_its_end_no_longer_folds_to_what_the_release_shows(service, actor, story):
    alter(service, "DELETE FROM entries WHERE stream = :stream AND position = 3", stream=story)
    assert faults(service, actor) == {
        (story, 0, "held is ['the runner is gone'], but its log says []"),
        (story, 0, "reason is 'the runner is gone', but its log says None"),
        (story, 0, "entries is 3, but its log says 2"),
    }


def test_two_entries_that_changed_places_are_found(service, actor, story):
    for before, after in ((2, 99), (3, 2), (99, 3)):
        alter(
            service,
            "UPDATE entries SET position = :after WHERE stream = :stream AND position = :before",
            after=after,
            stream=story,
            before=before,
        )
    found = {(position, problem) for stream, position, problem in faults(service, actor) if stream == story}
    assert (2, "its link does not name the entry before it") in found
    assert (3, "its link does not name the entry before it") in found
    assert (3, "its sequence is not above the one before") in found


@pytest.mark.parametrize(
    ("assignment", "position", "said"),
    [
        ("phase = 'promoted'", 0, "phase is 'promoted', but its log says <Phase.STAGED: 'staged'>"),
        ("is_paused = true", 0, "is_paused is True, but its log says False"),
        ("held = '[]'", 0, "held is [], but its log says ['the runner is gone']"),
        ("reason = 'all is well'", 0, "reason is 'all is well', but its log says 'the runner is gone'"),
        ("weight_bp = 10000", 0, "weight_bp is 10000, but its log says None"),
        ("step = 1", 0, "step is 1, but its log says None"),
        ("phase_since = phase_since + interval '1 second'", 0, "phase_since is "),
        ("created_by = 'nobody'", 1, "created_by is not the one that was signed"),
        ('"references" = \'{"a": "b"}\'', 1, "references is not the one that was signed"),
        ("policy = 'sha256:x'", 1, "policy is not the one that was signed"),
        ("bundle = 'sha256:x'", 1, "bundle is not the one that was signed"),
        ("created_at = created_at - interval '1 day'", 1, "created_at is not the one that was signed"),
        ("target_id = '00000000-0000-7000-8000-000000000000'", 1, "target is not the one that was signed"),
    ],
)
def test_a_release_that_shows_other_than_its_log_is_found(service, actor, story, assignment, position, said):
    alter(service, f"UPDATE releases SET {assignment} WHERE id = :release", release=story.removeprefix("release/"))
    found = faults(service, actor, story)
    assert len(found) == 1
    ((stream, where, problem),) = found
    assert (stream, where) == (story, position)
    assert problem.startswith(said)


@pytest.mark.parametrize(
    ("table", "assignment", "said"),
    [
        ("tokens", "role = 'admin'", "another role"),
        ("tokens", "name = 'nora'", "another name"),
        ("tokens", "targets = NULL", "another targets"),
        ("tokens", "expires_at = expires_at + interval '1 day'", "another expires_at"),
        ("tokens", "revoked_at = clock_timestamp()", "another end"),
        ("targets", "name = 'chat@staging'", "its name is not the one that was signed"),
        ("targets", "runner_class = 'other'", "its runner_class is not the one that was signed"),
        ("targets", "gateway = 'other'", "its gateway is not the one that was signed"),
        ("targets", "created_at = created_at - interval '1 day'", "its created_at is not the one that was signed"),
        ("targets", """applied = '[{"bundle": "sha256:x", "weight_bp": 10000}]'""", "its split is not"),
        ("project_documents", "name = 'x'", "its name is not as signed"),
        ("project_documents", "created_by = 'x'", "its created_by is not as signed"),
        ("project_documents", "created_at = created_at - interval '1 day'", "its created_at is not as signed"),
        ("project_documents", "deleted_at = clock_timestamp()", "it is not deleted as its log says"),
        ("project_documents", "kind = 'suite'", "another kind of document than it is"),
        ("documents", "schema_id = 'x'", "another kind of document than it is"),
        ("documents", "serving_digest = 'x'", "its serving_digest is not as signed"),
        ("documents", "components = '{}'", "its components is not as signed"),
    ],
)
def test_what_is_kept_beside_the_log_otherwise_than_it_says_is_found(service, actor, story, table, assignment, said):
    with service.database.transaction() as session:
        project, ends = projects.named(session, "default"), db.now(session) + timedelta(days=1)
        options = {"by": "root", "now": db.now(session), "expires_at": ends, "targets": ["chat@prod"]}
        auth.create_token(session, service, project, "maria", "engineer", **options)
    assert verify(service, actor).verified
    where = " WHERE kind = 'bundle'" if table.endswith("documents") else ""
    alter(service, f"UPDATE {table} SET {assignment}{where}")
    assert any(said in problem for _, _, problem in faults(service, actor))


def test_a_token_or_a_target_without_its_entry_and_an_entry_without_it_are_found(service, actor, story):
    with service.database.transaction() as session:
        project = projects.named(session, "default")
        made = auth.create_token(session, service, project, "maria", "viewer", by="root", now=db.now(session))
        (target,) = targets.browse(session, actor.project_id, after=None, limit=2)
    other = "00000000-0000-7000-8000-000000000000"
    alter(service, f"UPDATE tokens SET id = '{other}'")
    alter(service, f"UPDATE targets SET id = '{other}'")
    found = faults(service, actor)
    of = f"project/{actor.project_id}"
    assert found >= {
        (of, 0, f"the token {made.id} is missing"),
        (of, 0, f"the token {other} (maria) has no entry"),
        (targets.stream(target.id), 0, "its target is missing"),
        (f"target/{other}", 0, "the target has no entry"),
    }


def test_a_document_that_is_gone_is_found_and_so_is_one_that_the_project_has_no_more(service, actor, story):
    digests = [registered_policy(service, actor, name).digest for name in ("one", "two")]
    alter(service, "DELETE FROM documents WHERE digest = :digest", digest=digests[0])
    alter(service, "DELETE FROM project_documents WHERE digest = :digest", digest=digests[1])
    said = ("the policy is missing", "what was registered is missing")
    of = [f"documents/{actor.project_id}/{digest}" for digest in digests]
    counted = (f"project/{actor.project_id}", 0, "the project is counted with 4 documents, and holds 3")
    assert faults(service, actor) == {counted, *((stream, 0, told) for stream, told in zip(of, said, strict=True))}


def test_a_bundle_that_was_deleted_and_comes_back_without_a_word_is_found(service, actor):
    bundle = registered_bundle(service, actor)
    with service.database.transaction() as session:
        deletion.delete_bundle(session, service, actor, bundle.digest, Act(reason="never used"))
    assert verify(service, actor).verified
    alter(service, "UPDATE project_documents SET deleted_at = NULL")
    said = "it is not deleted as its log says"
    of = f"documents/{actor.project_id}/{bundle.digest}"
    assert faults(service, actor) == {
        (of, 0, said),
        (of, 0, f"its blob {bundle.files[0].sha256} is not kept for it"),
        (f"project/{actor.project_id}", 0, "the project is counted with 0 documents, and holds 1"),
    }
    registered_bundle(service, actor)
    alter(service, "UPDATE project_documents SET deleted_at = clock_timestamp()")
    registered_bundle(service, actor)
    assert verify(service, actor).verified


def test_a_release_and_its_log_miss_each_other(service, actor, story):
    alter(service, "UPDATE releases SET id = '00000000-0000-7000-8000-000000000000'")
    other = "release/00000000-0000-7000-8000-000000000000"
    found = {(stream, problem) for stream, _, problem in faults(service, actor) if not stream.startswith("target/")}
    assert found == {(story, "its release is missing"), (other, "the release has no log")}


def test_an_entry_signed_by_a_key_that_is_not_enrolled_is_found(service, actor, story, tmp_path):
    stranger = Signer.load(tmp_path / "stranger.pem")
    with service.database.transaction() as session:
        claim = evidence.claim_of(evidence.read(session, story)[2].envelope)
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "bundle", "digest": {"sha256": "0" * 64}}],
        "predicateType": "https://sluicegate.dev/evidence/held/v1",
        "predicate": claim,
    }
    forged = canonical_json(stranger.sign(canonical_json(statement)).model_dump(mode="json", by_alias=True))
    alter(
        service,
        "UPDATE entries SET envelope = :forged WHERE stream = :stream AND position = 3",
        forged=forged,
        stream=story,
    )
    assert (story, 3, "it was signed by a key that is not known") in faults(service, actor)


def test_a_forged_statement_does_not_match_its_signature(service, actor, story):
    with service.database.transaction() as session:
        row = session.get_one(EntryRow, evidence.read(session, story)[2].sequence)
        envelope = json.loads(row.envelope)
    statement = json.loads(base64.b64decode(envelope["payload"]))
    statement["predicate"]["body"]["reasons"] = ["all is well"]
    envelope["payload"] = base64.b64encode(canonical_json(statement)).decode()
    row.envelope = canonical_json(envelope)
    # Whoever can write can also compute the digest anew: the signature is what stands.
    alter(
        service,
        "UPDATE entries SET envelope = :envelope, entry_digest = :digest WHERE stream = :stream AND position = 3",
        envelope=row.envelope,
        digest=evidence.link(row),
        stream=story,
    )
    assert (story, 3, "the signature does not match the statement") in faults(service, actor)


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("public_key_pem = overlay(public_key_pem placing 'A' from 60)", "the public key"),
        ("public_key_pem = public_key_pem || ' '", "the public key was altered: it is not written as keys are"),
        ("algorithm = 'rsa'", "its key is said to be for rsa"),
        ("valid_from = valid_from + interval '1 hour'", "it was signed outside its key's validity"),
        ("valid_until = valid_from", "it was signed outside its key's validity"),
    ],
)
def test_an_altered_key_condemns_what_it_signed(service, actor, story, assignment, said):
    alter(service, f"UPDATE signing_keys SET {assignment}")
    found = faults(service, actor)
    assert all(problem.startswith(said) for _, position, problem in found if position)
    assert len({(stream, position) for stream, position, problem in found if problem.startswith(said)}) == 7


def test_a_document_with_other_bytes_or_without_its_entry_is_found(service, actor, story):
    with service.database.transaction() as session:
        policy = session.scalar(text("SELECT digest FROM documents WHERE kind = 'policy'"))
        bundle = session.scalar(text("SELECT digest FROM documents WHERE kind = 'bundle'"))
    alter(service, "UPDATE documents SET body = body || ' ' WHERE kind = 'policy'")
    alter(service, "DELETE FROM entries WHERE kind = 'bundle_registered'")
    assert faults(service, actor) == {
        (f"documents/{actor.project_id}/{policy}", 0, "the policy's bytes do not have its digest"),
        (f"documents/{actor.project_id}/{bundle}", 0, "the bundle has no entry"),
    }


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE project_labels SET value = 'ads'",
        "DELETE FROM project_labels",
        """UPDATE documents SET labels = '{"team": "ads"}' WHERE kind = 'bundle'""",
        "UPDATE documents SET labels = NULL WHERE kind = 'bundle'",
    ],
)
def test_a_bundle_that_is_found_by_other_labels_than_it_has_is_found(service, actor, change):
    bundle = registered_bundle(service, actor, labels={"team": "search"})
    assert verify(service, actor).verified
    alter(service, change)
    said = "it is found by other labels than the bundle has"
    assert faults(service, actor) == {(f"documents/{actor.project_id}/{bundle.digest}", 0, said)}


def test_a_reference_that_was_put_in_force_without_an_entry_is_found(service, actor):
    target = created_target(service, actor)
    bundle, suite = registered_bundle(service, actor), registered_golden(service, actor)
    other = reference_body(suite, bundle.digest) | {"hardware": "another"}
    with service.database.transaction() as session:
        recorded, planted = (
            documents.register(session, service, actor, "reference", canonical_json(body))[0].digest
            for body in (reference_body(suite, bundle.digest), other)
        )
        targets.set_reference(
            session,
            service,
            targets.get(session, actor.project_id, "chat@prod"),
            suite=suite.digest,
            reference=recorded,
            bundle=bundle.digest,
            actor="maria",
            act="reference:1",
        )
    assert verify(service, actor).verified
    alter(service, "UPDATE target_references SET reference = :planted", planted=planted)
    assert faults(service, actor) == {(f"target/{target}", 0, "its references are not those that its log set last")}


def test_a_key_that_ends_without_an_entry_is_found_and_still_vouches_for_what_it_signed(service, actor, story):
    with service.database.transaction() as session:
        last = max(row.recorded_at for row in session.query(EntryRow))
    alter(service, "UPDATE signing_keys SET valid_until = :until", until=last + timedelta(seconds=1))
    key = service.signer.key_id
    ((_, _, problem),) = faults(service, actor)
    assert problem == f"key {key}, which signed here, ends, and no entry retired it"
