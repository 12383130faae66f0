"""A damaged blob of the store: who meets it is not served it, and all that is made of it is quarantined."""

import threading
from dataclasses import replace

import httpx
import pytest

from registry import auth, damage, evidence
from registry.client import Client
from registry.tables import BlobRow
from schemas.common import sha256_digest
from schemas.problems import BlobsMissing, DigestMismatch, NotFound, Unavailable
from tests.support.api import make_tokens
from tests.support.factories import upload
from tests.support.holdings import SHARED, held, register, sent, weights

BLOB = sha256_digest(SHARED)
WRONG = SHARED[:-1] + b"?"


@pytest.fixture
def author(api):
    return api.actor("engineer")


@pytest.fixture
def engineer(api):
    with Client(api.url, api.tokens["engineer"]) as client:
        yield client


def spoil(api, raw=WRONG, blob=BLOB):
    path = api.service.blobs.path(blob)
    path.chmod(0o644)
    path.write_bytes(raw)


def grounds(client, bundle):
    found = client.bundles.get(bundle.digest).quarantine
    return [] if found is None else [(one.cause, one.by, one.reason) for one in found.grounds]


def said(api, project, bundle):
    with api.service.database.transaction() as session:
        last = evidence.latest(session, f"documents/{project}/{bundle.digest}")
    return {key: value for key, value in evidence.claim_of(last.envelope)["body"].items() if key != "reason"}


@pytest.mark.parametrize("wrong", [WRONG, SHARED[:-1], SHARED + b"!", b""], ids=["byte", "shorter", "longer", "empty"])
def test_what_is_damaged_is_not_served_whole_and_everything_made_of_it_is_quarantined(api, engineer, author, wrong):
    two = [held(api.service, author, name) for name in ("a", "b")]
    spoil(api, wrong)
    with pytest.raises(httpx.RemoteProtocolError):
        api.clients["runner"].get(f"/v1/blobs/{BLOB}")
    reason = f"the store has other bytes under {BLOB}: {sha256_digest(wrong)}; runner met it"
    for bundle in two:
        assert grounds(engineer, bundle) == [("blob_damaged", "service", reason)]
    assert said(api, api.project_id, two[0]) == {
        "digest": two[0].digest,
        "name": "a",
        "cause": "blob_damaged",
        "blob": BLOB,
        "found": sha256_digest(wrong),
        "seen_by": "runner",
    }
    # Who comes after that is told at once, and nothing more is recorded.
    with pytest.raises(DigestMismatch, match="send them again"):
        engineer.blobs.read(BLOB, limit=1000)
    assert engineer.blobs.check(BLOB).quarantined == sorted(bundle.digest for bundle in two)
    assert [len(grounds(engineer, bundle)) for bundle in two] == [1, 1]
    assert engineer.blobs.read(sha256_digest(weights("a")), limit=1000) == weights("a")


def test_a_second_damaged_blob_is_one_more_ground_and_nothing_else_is_quarantined(api, engineer, author, sound):
    bundle, other = held(api.service, author, "a"), held(api.service, author, "b")
    mine = sha256_digest(weights("a"))
    spoil(api, b"x", mine)
    assert engineer.blobs.check(mine).quarantined == [bundle.digest]
    assert grounds(engineer, other) == []
    spoil(api)
    assert engineer.blobs.check(BLOB).quarantined == sorted([bundle.digest, other.digest])
    assert [cause for cause, _, _ in grounds(engineer, bundle)] == ["blob_damaged"] * 2
    assert len(grounds(engineer, other)) == 1


def test_what_is_intact_or_lost_quarantines_nothing(api, engineer, author):
    bundle = held(api.service, author, "a")
    found = engineer.blobs.check(BLOB)
    assert (found.is_intact, found.found, found.quarantined) == (True, None, [])
    api.service.blobs.remove(BLOB)
    with pytest.raises(NotFound):
        engineer.blobs.check(BLOB)
    with pytest.raises(NotFound):
        engineer.blobs.check(sha256_digest(b"never sent"))
    assert grounds(engineer, bundle) == []


def test_other_projects_bundles_are_quarantined_without_a_word_about_who_saw_it(api, engineer, author):
    tokens = make_tokens(api.service, "other")
    with Client(api.url, tokens["engineer"]) as elsewhere:
        project = elsewhere.me().project
        actor = _actor_of(api, tokens["engineer"])
        theirs, mine = held(api.service, actor, "a"), held(api.service, author, "b")
        spoil(api)
        assert engineer.blobs.check(BLOB).quarantined == [mine.digest]
        ((cause, by, reason),) = grounds(elsewhere, theirs)
    assert (cause, by, project) == ("blob_damaged", "service", "other")
    assert "met it" not in reason
    assert "seen_by" not in said(api, actor.project_id, theirs)
    assert said(api, api.project_id, mine)["seen_by"] == "engineer"


def _actor_of(api, token):
    with api.service.database.transaction() as session:
        return auth.authenticate(session, token)


def test_the_right_bytes_sent_again_mend_it_and_a_person_lifts_the_quarantine(api, engineer, author, sound, tmp_path):
    bundle, new = held(api.service, author, "a"), sent(api.service, author, "new")
    spoil(api)
    engineer.blobs.check(BLOB)
    # Whoever has the bytes is asked for them, and nothing is registered on what is damaged.
    assert engineer.blobs.missing([BLOB, sha256_digest(weights("a"))]) == [BLOB]
    with pytest.raises(BlobsMissing):
        register(api.service, author, new)
    assert api.clients["engineer"].post("/v1/uploads", json={"digest": BLOB, "size": len(SHARED)}).status_code == 201
    file = tmp_path / "file"
    file.write_bytes(SHARED)
    assert engineer.blobs.upload(BLOB, file).sent == len(SHARED)
    assert engineer.blobs.missing([BLOB]) == []
    assert engineer.blobs.read(BLOB, limit=1000) == SHARED
    assert engineer.blobs.check(BLOB).is_intact
    assert register(api.service, author, new)
    assert len(grounds(engineer, bundle)) == 1
    with Client(api.url, api.tokens["manager"]) as manager:
        manager.bundles.lift(bundle.digest, "the disk was replaced, and the file sent again")
        # A quarantine that was lifted is none of the grounds for which it would be imposed again.
        spoil(api)
        manager.blobs.check(BLOB)
        assert len(grounds(manager, bundle)) == 1


@pytest.mark.parametrize("wrong", [WRONG, SHARED[:-1]], ids=["byte", "shorter"])
@pytest.mark.parametrize("way", ["whole", "pieces"])
def test_damage_that_nobody_knew_of_is_met_by_the_right_bytes_that_are_sent_again(api, engineer, author, way, wrong):
    bundle = held(api.service, author, "a")
    tokens = make_tokens(api.service, "other")  # who has not the blob is not told that it is there
    spoil(api, wrong)
    with httpx.Client(base_url=api.url, headers={"authorization": f"Bearer {tokens['engineer']}"}) as elsewhere:
        if way == "whole":
            assert elsewhere.put(f"/v1/blobs/{BLOB}", content=SHARED).status_code == 201
        else:
            begun = elsewhere.post("/v1/uploads", json={"digest": BLOB, "size": len(SHARED)}).json()
            kind = {"content-type": "application/offset+octet-stream", "upload-offset": "0"}
            sent_now = elsewhere.patch(f"/v1/uploads/{begun['id']}", content=SHARED, headers=kind)
            assert sent_now.json()["is_complete"] is True
    ((cause, by, reason),) = grounds(engineer, bundle)
    assert (cause, by, sha256_digest(wrong) in reason) == ("blob_damaged", "service", True)
    assert engineer.blobs.read(BLOB, limit=1000) == SHARED
    # Sent once more, it meets nothing.
    assert api.clients["engineer"].put(f"/v1/blobs/{BLOB}", content=SHARED).status_code == 200
    assert len(grounds(engineer, bundle)) == 1


def test_a_file_that_its_operator_put_right_counts_as_there_again(api, engineer, author):
    held(api.service, author, "a")
    spoil(api)
    engineer.blobs.check(BLOB)
    spoil(api, SHARED)
    with pytest.raises(DigestMismatch):
        engineer.blobs.read(BLOB, limit=1000)
    assert engineer.blobs.check(BLOB).is_intact
    assert engineer.blobs.read(BLOB, limit=1000) == SHARED


def test_the_command_says_what_is_damaged_and_what_is_quarantined_by_that(api, command, author):
    bundle = held(api.service, author, "a")
    command.be("viewer", api)
    assert "intact" in command.ok("blob", "check", BLOB).out
    spoil(api)
    ran = command("blob", "check", BLOB.removeprefix("sha256:"), "--json")
    assert (ran.status, ran.json["is_intact"], ran.json["quarantined"]) == (1, False, [bundle.digest])
    said_so = command("blob", "check", BLOB)
    assert (said_so.status, "DAMAGED" in said_so.out, bundle.digest[7:19] in said_so.out) == (1, True, True)
    assert command("blob", "check", "3c3aff2a").status == 2


def test_a_store_that_does_not_answer_is_no_damage(api, author):
    bundle = held(api.service, author, "a")

    class Away:
        def open(self, digest, *, is_verified=False):
            raise Unavailable("the bucket does not answer")

    with pytest.raises(Unavailable):
        damage.examine(replace(api.service, blobs=Away()), author, BLOB)
    with api.service.database.transaction() as session:
        assert session.get_one(BlobRow, BLOB).damaged_at is None
    with Client(api.url, api.tokens["engineer"]) as client:
        assert grounds(client, bundle) == []


def test_of_a_registration_and_a_check_at_once_one_sees_the_other(api, engineer, author):
    upload(api.service, author, SHARED)
    names = [f"bundle-{number}" for number in range(12)]
    new = [sent(api.service, author, name) for name in names]
    spoil(api)
    registered, begin = [], threading.Barrier(2)

    def all_of_them():
        begin.wait()
        for bundle in new:
            try:
                register(api.service, author, bundle)
            except BlobsMissing:
                return
            registered.append(bundle)

    thread = threading.Thread(target=all_of_them)
    thread.start()
    begin.wait()
    engineer.blobs.check(BLOB)
    thread.join()
    assert [len(grounds(engineer, bundle)) for bundle in registered] == [1] * len(registered)
