"""How a bundle's sources were resolved is kept beside it: in its record and its evidence, and not in its digest."""

import json
from dataclasses import replace

import pytest
from sqlalchemy import text

from registry import deletion, documents, evidence, verification
from schemas.api import Act
from schemas.bundle import Bundle
from schemas.problems import InvalidDocument
from tests.support.factories import WEIGHTS, bundle_body, upload

SOURCE = {"kind": "huggingface", "location": "org/base", "revision": "c" * 40}
LOCK = {
    "part": "base",
    "kind": "huggingface",
    "asked": "hf:org/base@main",
    "location": "org/base",
    "revision": "c" * 40,
    "resolved_at": "2024-02-29T01:02:03.000004Z",
}


@pytest.fixture
def service(scratch):
    return scratch


def posted(*locks, **changes):
    return {"bundle": bundle_body(sources=[SOURCE], **changes), "locks": list(locks)}


def register(service, actor, body):
    with service.database.transaction() as session:
        return documents.register(session, service, actor, "bundle", json.dumps(body).encode())


def test_locks_are_kept_in_the_record_and_the_evidence_and_not_in_the_bundle(service, actor):
    upload(service, actor, WEIGHTS)
    stored, is_new = register(service, actor, posted(LOCK))
    assert is_new
    assert stored.digest == Bundle.model_validate(bundle_body(sources=[SOURCE])).digest
    assert [lock.model_dump(mode="json") for lock in stored.locks] == [LOCK]
    with service.database.transaction() as session:
        assert documents.get(session, actor.project_id, "bundle", stored.digest) == stored
        (entry,) = evidence.read(session, documents.stream(actor.project_id, stored.digest))
        (listed,) = documents.browse(session, actor.project_id, "bundle", names=[], after=None, limit=5)
        assert evidence.wire(entry).body["locks"] == [LOCK]
    assert listed[1].locks is None
    # Whoever registers it again, by another branch or without a word, is answered as the first one was.
    again = register(service, actor, posted({**LOCK, "asked": "hf:org/base@v1"}))
    alone = register(service, actor, bundle_body(sources=[SOURCE]))
    assert again == alone == (stored, False)


def test_a_bundle_without_locks_has_none(service, actor):
    upload(service, actor, WEIGHTS)
    stored, _ = register(service, actor, bundle_body())
    assert stored.locks is None


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        (posted(), "/locks"),
        (posted({**LOCK, "revision": "d" * 40}), "/locks/0"),
        (posted({**LOCK, "location": "org/other"}), "/locks/0"),
        (posted(LOCK, LOCK), "/locks/1/part"),
        (posted({**LOCK, "part": "tokenizer"}), "/locks"),
        (posted({**LOCK, "part": "brain"}), "/locks/0/part"),
        (posted({**LOCK, "resolved_at": "yesterday"}), "/locks/0/resolved_at"),
        (posted({**LOCK, "resolved_at": "2014-12-31T23:59:59Z"}), "/locks/0/resolved_at"),
        (posted({**LOCK, "resolved_at": "2199-01-01T00:00:00Z"}), "/locks/0/resolved_at"),
        (posted({**LOCK, "resolved_at": "0001-01-01T00:00:00Z"}), "/locks/0/resolved_at"),
        *((posted({**LOCK, "asked": f"hf:org/base@{mark}"}), "/locks/0/asked") for mark in "\n\x1b\x9b\u202e"),
        (posted({**LOCK, "asked": "hf:org/other@main"}), "/locks/0/asked"),
        (posted({**LOCK, "asked": "hf:org/base-2"}), "/locks/0/asked"),
        (posted({**LOCK, "asked": f"hf:org/base@{'d' * 40}"}), "/locks/0/asked"),
        (posted({**LOCK, "token": "hf_secret"}), "/locks/0/token"),
        (posted(LOCK, name="No Name"), "/bundle/name"),
        (posted(LOCK) | {"more": 1}, "/more"),
        (
            {"bundle": bundle_body(sources=[SOURCE, {**SOURCE, "revision": "d" * 40}]), "locks": [LOCK]},
            "/bundle/sources/1",
        ),
    ],
)
def test_locks_that_contradict_the_bundle_are_refused_at_their_place(body, pointer):
    with pytest.raises(InvalidDocument) as refused:
        documents.posted("bundle", json.dumps(body).encode())
    assert pointer in {error["pointer"] for error in refused.value.members["errors"]}


@pytest.mark.parametrize(
    ("asked", "is_sound"),
    [
        ("https://host/m.gguf#sha256=" + "a" * 64, True),
        ("https://host/a@b/m.gguf", True),
        ("https://host/m.gguf?signature=x", False),
        ("https://me:secret@host/m.gguf", False),
    ],
)
def test_what_was_asked_of_a_server_holds_no_password_and_no_query(asked, is_sound):
    source = {"kind": "https", "location": "https://host/m.gguf", "revision": "sha256:" + "a" * 64}
    body = {"bundle": bundle_body(sources=[source]), "locks": [{**LOCK, **source, "asked": asked}]}
    if is_sound:
        assert documents.posted("bundle", json.dumps(body).encode())[1]
        return
    with pytest.raises(InvalidDocument) as refused:
        documents.posted("bundle", json.dumps(body).encode())
    assert [error["pointer"] for error in refused.value.members["errors"]] == ["/locks/0/asked"]


def test_a_bundle_that_was_registered_again_shows_who_did_and_what_they_said(service, actor):
    upload(service, actor, WEIGHTS)
    first, _ = register(service, actor, posted(LOCK))
    with service.database.transaction() as session:
        deletion.delete_bundle(session, service, actor, first.digest, Act(reason="never used"))
    other = replace(actor, name="somebody else")
    second, is_new = register(service, other, posted({**LOCK, "asked": "hf:org/base@v1"}))
    assert is_new
    assert (second.created_by, second.locks[0].asked) == ("somebody else", "hf:org/base@v1")
    assert second.created_at > first.created_at


def test_locks_other_than_those_that_were_registered_last_are_a_fault(service, actor):
    upload(service, actor, WEIGHTS)
    digest = register(service, actor, posted(LOCK))[0].digest
    unlocked = register(service, actor, bundle_body("unlocked"))[0].digest

    def faults():
        with service.database.transaction() as session:
            return {(one.stream, one.problem) for one in verification.verify(session, actor.project_id).faults}

    assert faults() == set()
    for value in ("jsonb_set(locks, '{0,asked}', '\"hf:other/base@main\"')", "'\"none\"'", "NULL"):
        with service.database.transaction() as session:
            session.execute(text(f"UPDATE project_documents SET locks = {value} WHERE digest = '{digest}'"))
        problem = "its sources were not resolved as its log says"
        assert faults() == {(documents.stream(actor.project_id, digest), problem)}
    with service.database.transaction() as session:
        deletion.delete_bundle(session, service, actor, digest, Act(reason="by another branch"))
    register(service, actor, posted({**LOCK, "asked": "hf:org/base@v1"}))
    assert faults() == set()
    with service.database.transaction() as session:
        session.execute(text(f"UPDATE project_documents SET locks = '[1]' WHERE digest = '{unlocked}'"))
    assert faults() == {(documents.stream(actor.project_id, unlocked), problem)}
