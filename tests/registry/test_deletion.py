"""Bundles that are deleted, blobs that are cleared up, and limits on what a project holds."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from urllib.parse import urlsplit

import pytest
from sqlalchemy import select, text

from registry import blobs, collection, deletion, evidence, housekeeping, quotas, runs, verification
from registry.client import Client
from registry.client.transport import Transport
from registry.quotas import Added
from registry.tables import ProjectRow, ProjectUsageRow, ReleaseRow
from registry.targets import way_back
from schemas.api import Act, ReleaseCreate, RunCreate
from schemas.common import sha256_digest, strict_json
from schemas.evidence import Kind
from schemas.problems import Conflict, NotFound, NotPermitted, Problem, QuotaExceeded
from tests.support.api import make_tokens
from tests.support.factories import created_target, registered_policy, upload
from tests.support.holdings import (
    SHARED,
    age,
    held,
    live,
    project_holds,
    register,
    sent,
    settings,
    started,
    there,
    weights,
)
from tests.support.together import together
from tests.support.uploads import begin, patch


@pytest.fixture
def manager(api):
    with Client(api.url, api.tokens["manager"]) as client:
        yield client


@pytest.fixture
def author(api):
    return api.actor("manager")


def verified(service, actor):
    with service.database.transaction() as session:
        found = verification.verify(session, actor.project_id)
    assert found.verified, found.faults
    return found


def test_a_deleted_bundle_is_found_no_more_and_its_evidence_stays(api, manager, author):
    bundle = held(api.service, author, "c")
    gone = manager.bundles.delete(bundle.digest[7:19], "never used")
    assert (gone.digest, gone.name, gone.blobs) == (bundle.digest, "c", 2)
    for named in (bundle.digest, bundle.digest[7:19]):
        for deed in (manager.bundles.get, lambda one: manager.bundles.delete(one, "again")):
            with pytest.raises(NotFound, match=f"c {bundle.digest} was deleted by manager at .*Z: never used") as told:
                deed(named)
            assert (told.value.members["digest"], told.value.members["deleted_by"]) == (bundle.digest, "manager")
    assert list(manager.bundles.list()) == []
    log = list(manager.evidence.list(stream=f"documents/{author.project_id}/{bundle.digest}"))
    assert [(one.kind, one.actor) for one in log] == [
        (Kind.BUNDLE_REGISTERED, "manager"),
        (Kind.BUNDLE_DELETED, "manager"),
    ]
    assert log[1].body == {"digest": bundle.digest, "name": "c", "reason": "never used"}
    assert datetime.fromisoformat(told.value.members["deleted_at"]) == log[1].recorded_at
    verified(api.service, author)


def test_a_deleted_bundle_is_registered_again_by_its_bytes(api, manager, author):
    bundle = held(api.service, author, "c")
    manager.bundles.delete(bundle.digest, "never used")
    assert register(api.service, author, bundle)
    assert manager.bundles.get(bundle.digest).name == "c"
    manager.bundles.delete(bundle.digest, "once more")
    age(api.service, days=2)
    assert collection.collect(api.service, is_dry_run=False).blobs == 2
    assert there(api.service, SHARED, weights("c")) == [False, False]
    with pytest.raises(Problem, match="have not been uploaded"):
        register(api.service, author, bundle)
    assert register(api.service, author, sent(api.service, author, "c"))
    log = list(manager.evidence.list(stream=f"documents/{author.project_id}/{bundle.digest}"))
    assert [one.kind for one in log] == [Kind.BUNDLE_REGISTERED, Kind.BUNDLE_DELETED] * 2 + [Kind.BUNDLE_REGISTERED]
    verified(api.service, author)


def test_what_is_under_way_or_in_a_job_is_refused_until_it_has_ended(api, manager, author):
    service = api.service
    created_target(service, author)
    released, run = held(service, author, "a"), held(service, author, "b")
    release = started(service, author, released)
    policy = registered_policy(service, author)
    with service.database.transaction() as session:
        wanted = RunCreate(bundle=run.digest, policy=policy.digest, runner_class="cpu")
        job = runs.create(session, service, author, wanted).id
    for bundle, holder in ((released, release), (run, job)):
        with pytest.raises(Conflict) as refused:
            manager.bundles.delete(bundle.digest, "x")
        assert refused.value.members["holder"] == str(holder)
    manager.releases.reject(release, "wrong weights")
    assert manager.bundles.delete(released.digest, "rejected").name == "a"
    shown = api.clients["viewer"].get(f"/v1/releases/{release}").json()
    assert shown["bundle"] == released.digest


def test_a_release_and_a_deletion_at_once_are_one_of_them(api, manager, author):
    service = api.service
    policy = registered_policy(service, author).digest
    seen = set()
    for round_ in range(8):
        target = f"chat{round_}@prod"
        created_target(service, author, target)
        bundle = held(service, author, f"b{round_}")
        body = ReleaseCreate(target=target, bundle=bundle.digest, policy=policy)
        acts = [
            lambda b=body: manager.releases.create(b),
            lambda b=bundle: manager.bundles.delete(b.digest, "never used"),
        ]
        released, deleted = together(*acts) if round_ % 2 else reversed(together(*reversed(acts)))
        if isinstance(released, Problem):
            assert isinstance(released, NotFound)
            assert deleted.digest == bundle.digest
        else:
            assert isinstance(deleted, Conflict)
            assert deleted.members["holder"] == str(released.id)
            assert manager.bundles.get(bundle.digest)
        seen.add(type(released))
    verified(service, author)
    assert seen


def test_a_deletion_and_a_registration_of_one_bundle_at_once_leave_it_whole_or_gone(api, manager, author):
    service = api.service
    for round_ in range(6):
        bundle = held(service, author, f"b{round_}")
        registered, deleted = together(
            lambda b=bundle: manager.bundles.register(b), lambda b=bundle: manager.bundles.delete(b.digest, "x")
        )
        assert deleted.digest == bundle.digest
        age(service, days=2)
        collection.collect(service, is_dry_run=False)
        try:
            manager.bundles.get(bundle.digest)
        except NotFound:
            assert registered[1] is False
            assert there(service, weights(f"b{round_}")) == [False]
        else:
            assert registered[1] is True
            assert there(service, weights(f"b{round_}"), SHARED) == [True, True]
    verified(service, author)


def test_of_two_who_delete_one_does(api, manager, author):
    bundle = held(api.service, author, "c")
    outcomes = together(*[lambda: manager.bundles.delete(bundle.digest, "x")] * 3)
    assert sorted(type(one).__name__ for one in outcomes) == ["BundleDeleted", "NotFound", "NotFound"]


def test_who_only_proposes_or_is_limited_to_targets_deletes_nothing(api, author):
    bundle = held(api.service, author, "c")
    for role in ("engineer", "ci", "auditor", "viewer"):
        answer = api.clients[role].post(f"/v1/bundles/{bundle.digest}/deletions", json={"reason": "x"})
        assert answer.status_code == 403
    limited = type(author)(author.project_id, "default", "kim", "manager", targets=frozenset({"chat@prod"}))
    with api.service.database.transaction() as session, pytest.raises(NotPermitted):
        deletion.delete_bundle(session, api.service, limited, bundle.digest, Act(reason="x"))


# ----------------------------------------------------------------------------------------------- clearing up


def test_a_dry_run_tells_and_takes_nothing_and_grace_begins_when_it_was_last_needed(api, manager, author):
    service = api.service
    held(service, author, "kept")
    bundle = held(service, author, "c")
    age(service, days=2)
    manager.bundles.delete(bundle.digest, "never used")
    assert collection.collect(service, is_dry_run=False).blobs == 0
    age(service, days=2)
    found = collection.collect(service, is_dry_run=True)
    assert (found.is_dry_run, found.blobs, found.bytes) == (True, 1, len(weights("c")))
    assert there(service, weights("c")) == [True]
    # Whoever asks what is missing has a whole time of grace from then on.
    assert manager.blobs.missing([sha256_digest(weights("c"))]) == []
    assert collection.collect(service, is_dry_run=False).blobs == 0
    age(service, days=2)
    assert housekeeping.tidy(service)["blobs_collected"] == 1
    assert there(service, weights("c"), weights("kept"), SHARED) == [False, True, True]


def test_bytes_that_two_projects_have_go_with_the_last(api, author):
    service = api.service
    make_tokens(service, "team-b")
    with service.database.transaction() as session:
        other = session.scalars(select(ProjectRow).where(ProjectRow.name == "team-b")).one()
        theirs = type(author)(other.id, "team-b", "bo", "manager")
    upload(service, author, b"both")
    held(service, theirs, "b")
    upload(service, theirs, b"both")
    age(service, days=2)
    with service.database.transaction() as session:
        blobs.missing(session, theirs.project_id, [sha256_digest(b"both")])
    assert collection.collect(service, is_dry_run=False).blobs == 1
    assert (project_holds(service, author, b"both"), project_holds(service, theirs, b"both")) == ([False], [True])
    assert there(service, b"both") == [True]
    age(service, days=2)
    collection.collect(service, is_dry_run=False)
    assert there(service, b"both", SHARED) == [False, True]


def test_a_file_that_nobody_recorded_goes_once_it_is_old(api, author):
    service = api.service
    held(service, author, "kept")
    for content in (b"stray", b"new"):
        with service.blobs.stage() as staged:
            staged.write(content, limit=100)
            staged.seal(sha256_digest(content))
            staged.place()
    old = time.time() - 2 * collection.STRAY_SECONDS
    for content in (b"stray", weights("kept")):
        os.utime(service.blobs.path(sha256_digest(content)), (old, old))
    assert collection.collect(service, is_dry_run=True).strays == 1
    assert there(service, b"stray") == [True]
    assert collection.collect(service, is_dry_run=False).strays == 1
    assert there(service, b"stray", b"new", weights("kept")) == [False, True, True]


def test_clearing_up_is_for_those_who_administer_the_installation(api, command, author):
    held(api.service, author, "kept")
    service = api.service
    secret = make_tokens(service, "team-b")["admin"]
    with api.client(secret) as theirs:
        assert theirs.post("/v1/blobs/collections", json={"is_dry_run": True}).status_code == 403
    command.be("admin", api)
    assert command.ok("blob", "gc", "--dry-run", "--json").json["blobs"] == 0
    service.blobs.path(sha256_digest(SHARED)).unlink()
    ran = command("blob", "gc")
    assert (ran.status, sha256_digest(SHARED) in ran.out) == (1, True)


def test_the_command_deletes_and_says_who_needs_it(api, command, author):
    created_target(api.service, author)
    bundle, unused = held(api.service, author, "a"), held(api.service, author, "c")
    release = live(api.service, author, bundle)
    command.be("manager", api)
    refused = command("bundle", "delete", bundle.digest[7:19], "--reason", "x")
    assert (refused.status, str(release) in refused.err, "live on chat@prod" in refused.err) == (4, True, True)
    gone = command.ok("bundle", "delete", unused.digest[7:19], "--reason", "never used", "--json").json
    assert (gone["digest"], gone["blobs"]) == (unused.digest, 1)


def test_a_way_back_whose_bundle_was_deleted_is_none(service, actor):
    """B was rolled back to A; the one before A was deleted meanwhile: a stop then means no traffic."""

    created_target(service, actor)
    old, a, b = (held(service, actor, name) for name in ("old", "a", "b"))
    first = live(service, actor, old)
    second = live(service, actor, a, over=first)
    third = live(service, actor, b, over=second)
    with service.database.transaction() as session:
        deletion.delete_bundle(session, service, actor, old.digest, Act(reason="two releases ago"))
    with service.database.transaction() as session:
        assert way_back(session, session.get_one(ReleaseRow, third)).id == second
        assert way_back(session, session.get_one(ReleaseRow, second)) is None


def test_a_way_back_passes_a_deleted_bundle_by_for_an_accepted_one_before_it(api, manager, author):
    """The one in the middle is quarantined, so passed by, so not needed: it may go, and the first may not."""
    service = api.service
    created_target(service, author)
    old, bad, new = (held(service, author, name) for name in ("old", "bad", "new"))
    first = live(service, author, old)
    second = live(service, author, bad, over=first)
    third = live(service, author, new, over=second)
    manager.bundles.quarantine(bad.digest, "its publisher withdrew it")
    manager.bundles.delete(bad.digest, "clearing up")
    with service.database.transaction() as session:
        assert way_back(session, session.get_one(ReleaseRow, third)).id == first
        session.execute(text("UPDATE releases SET phase_since = phase_since - interval '30 days'"))
    with pytest.raises(Conflict, match="rollback target"):
        manager.bundles.delete(old.digest, "x")
    manager.releases.roll_back(third, "it answers in another language")
    with service.database.transaction() as session:
        asked = evidence.latest(session, evidence.release_stream(third))
        assert evidence.claim_of(asked.envelope)["body"] == {"reason": "it answers in another language"}


# -------------------------------------------------------------------------------------------------- limits


def usage(service, actor):
    with service.database.transaction() as session:
        parts = session.scalars(select(ProjectUsageRow).where(ProjectUsageRow.project_id == actor.project_id)).all()
        return sum(part.bytes for part in parts), sum(part.documents for part in parts)


def test_what_a_project_holds_is_counted_once_and_given_back(api, manager, author):
    service = api.service
    before = usage(service, author)[1]
    bundle = held(service, author, "c")
    upload(service, author, SHARED)
    assert usage(service, author) == (len(SHARED) + len(weights("c")), before + 1)
    register(service, author, bundle)
    manager.bundles.delete(bundle.digest, "x")
    assert usage(service, author) == (len(SHARED) + len(weights("c")), before)
    age(service, days=2)
    collection.collect(service, is_dry_run=False)
    assert usage(service, author) == (0, before)


def test_more_bytes_than_a_project_may_hold_are_refused_and_nothing_is_lost(api, author):
    engineer = api.clients["engineer"]
    with settings(api.service, project_bytes=1000):
        assert engineer.put(f"/v1/blobs/{sha256_digest(b'a' * 600)}", content=b"a" * 600).status_code == 201
        made = begin(engineer, b"b" * 300)
        refused = engineer.put(f"/v1/blobs/{sha256_digest(b'c' * 200)}", content=b"c" * 200)
        assert refused.status_code == 409
        told = refused.json()
        assert told["type"].endswith("/quota-exceeded")
        assert (told["resource"], told["used"], told["limit"], told["added"]) == ("bytes", 900, 1000, 200)
        assert "bundle delete" in told["detail"]
        assert there(api.service, b"c" * 200) == [False]
        assert engineer.post("/v1/uploads", json={"digest": sha256_digest(b"d"), "size": 101}).status_code == 409
        assert engineer.put(f"/v1/blobs/{sha256_digest(b'a' * 600)}", content=b"a" * 600).status_code == 200
        assert patch(engineer, made["id"], 0, b"b" * 300).json()["is_complete"]
        assert engineer.put(f"/v1/blobs/{sha256_digest(b'e' * 100)}", content=b"e" * 100).status_code == 201
    assert usage(api.service, author)[0] == 1000
    # A gate's records are evidence: counted, never refused.
    with settings(api.service, project_bytes=1000), api.service.blobs.stage() as staged:
        staged.write(b"records", limit=100)
        blobs.keep(api.service, author.project_id, sha256_digest(b"records"), staged, is_record=True)
    assert usage(api.service, author)[0] == 1007


def test_uploads_and_documents_have_limits_too(api, author):
    engineer = api.clients["engineer"]
    with settings(api.service, project_uploads=2, project_documents=usage(api.service, author)[1] + 1):
        first = begin(engineer, b"a" * 10)
        begin(engineer, b"b" * 10)
        assert begin(engineer, b"a" * 10)["id"] == first["id"]
        refused = engineer.post("/v1/uploads", json={"digest": sha256_digest(b"c"), "size": 1})
        assert (refused.status_code, refused.json()["resource"], refused.json()["used"]) == (409, "uploads", 2)
        engineer.delete(f"/v1/uploads/{first['id']}")
        begin(engineer, b"c" * 10)
        held(api.service, author, "one")
        with pytest.raises(QuotaExceeded) as told:
            held(api.service, author, "two")
        assert told.value.members["resource"] == "documents"


def test_two_at_once_do_not_exceed_a_limit_together(api, author):
    def put(content):
        with api.client(api.tokens["engineer"]) as client:
            return client.put(f"/v1/blobs/{sha256_digest(content)}", content=content).status_code

    def ask(content):
        with api.client(api.tokens["engineer"]) as client:
            body = {"digest": sha256_digest(content), "size": len(content)}
            return client.post("/v1/uploads", json=body).status_code

    with settings(api.service, project_bytes=1000, project_uploads=3):
        statuses = together(*[lambda c=c: put(bytes([c]) * 300) for c in range(8)])
        assert sorted(statuses) == [201] * 3 + [409] * 5
        assert there(api.service, *[bytes([c]) * 300 for c in range(8)]) == [status == 201 for status in statuses]
        assert usage(api.service, author)[0] == 900
        statuses = together(*[lambda c=c: ask(bytes([c]) * 20) for c in range(8)])
        assert sorted(statuses) == [201] * 3 + [409] * 5


def test_a_file_whose_room_another_upload_took_meanwhile_does_not_stay(api, author):
    kept, late = b"a" * 600, b"b" * 600
    service = api.service

    def admit(session, staged, content):
        staged.write(content, limit=600)
        staged.seal(sha256_digest(content))
        return blobs.admit(session, service, author.project_id, sha256_digest(content), staged)

    def put():
        with service.database.transaction() as session, service.blobs.stage() as staged:
            return admit(session, staged, late)

    with settings(service, project_bytes=1000), ThreadPoolExecutor() as threads:
        with service.database.transaction() as session, service.blobs.stage() as staged:
            assert admit(session, staged, kept)
            refused = threads.submit(put)
            while not there(service, late)[0]:
                assert not refused.done()
                time.sleep(0.005)
        with pytest.raises(QuotaExceeded):
            refused.result(30)
    assert there(service, kept, late) == [True, False]


def test_an_upload_that_cannot_fit_is_refused_before_its_body_comes(api):
    secret, digest = api.tokens["engineer"], sha256_digest(b"x" * 2000)
    head = (
        f"PUT /v1/blobs/{digest} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\nContent-Length: 2000\r\n\r\n"
    )
    received = b""
    address = ("127.0.0.1", urlsplit(api.url).port)
    with settings(api.service, project_bytes=1000), socket.create_connection(address, timeout=30) as connection:
        connection.sendall(head.encode())
        while b"quota-exceeded" not in received:
            received += connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 409 ")


def test_an_upload_that_announces_nothing_is_refused_as_soon_as_it_does_not_fit(api):
    secret, storage = api.tokens["engineer"], api.service.settings.storage_dir
    head = f"PUT /v1/blobs/{sha256_digest(b'never whole')} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n"
    received, piece = b"", bytes(1 << 20)
    address = ("127.0.0.1", urlsplit(api.url).port)
    with settings(api.service, project_bytes=1000), socket.create_connection(address, timeout=30) as connection:
        connection.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"100000\r\n" + piece + b"\r\n")  # and more would come
        while b"quota-exceeded" not in received:
            received += connection.recv(65536)
        assert list((storage / "incoming").iterdir()) == []
    assert received.startswith(b"HTTP/1.1 409 ")
    with settings(api.service, project_bytes=3 << 20):
        fits = api.clients["engineer"].put(f"/v1/blobs/{sha256_digest(piece)}", content=iter([piece]))
        assert fits.status_code == 201
        again = api.clients["engineer"].put(f"/v1/blobs/{sha256_digest(piece)}", content=iter([piece]))
        assert again.status_code == 200
        other = api.clients["engineer"].put(f"/v1/blobs/{sha256_digest(3 * piece)}", content=iter([piece] * 3))
        assert (other.status_code, other.json()["used"], other.json()["limit"]) == (409, 1 << 20, 3 << 20)
    # What the project has already takes no room, and no limit refuses it.
    with settings(api.service, project_bytes=1000):
        again = api.clients["engineer"].put(f"/v1/blobs/{sha256_digest(piece)}", content=iter([piece]))
        assert again.status_code == 200


def test_an_administrator_sets_a_projects_limits_and_everybody_sees_them(api, command, author):
    held(api.service, author, "c")
    make_tokens(api.service, "team-b")
    command.be("admin", api)
    shown = command.ok("project", "limit", "default", "--bytes", "2kB", "--uploads", "3", "--json").json
    assert (shown["limits"]["bytes"], shown["limits"]["uploads"]) == (2000, 3)
    own = {"bytes": 2000, "uploads": 3, "documents": None, "jobs": None, "runner_seconds": None}
    assert shown["own_limits"] == own
    command.ok("project", "limit", "default", "--uploads", "default", "--jobs", "4", "--runner-hours", "1.5")
    command.be("viewer", api)
    shown = command.ok("project", "show", "--json").json
    assert shown["own_limits"] == own | {"uploads": None, "jobs": 4, "runner_seconds": 5400}
    assert (shown["limits"]["jobs"], shown["jobs"], shown["runner_seconds"]) == (4, 0, 0)
    assert shown["bytes"] == len(SHARED) + len(weights("c"))
    out = command.ok("project", "show").out
    assert out.startswith("project default\n")
    assert "2.0 kB" in out
    assert f"generation {shown['generation']}" in out
    assert command("project", "show", "team-b").status == 2
    assert command("project", "limit", "default", "--bytes", "0").status == 4
    command.be("admin", api)
    assert {one["name"] for one in command.ok("project", "list", "--json").json["items"]} == {"default", "team-b"}
    stale = command("project", "limit", "default", "--jobs", "5", "--if-match", str(shown["generation"] - 1))
    assert (stale.status, "the latest change is project_set by" in stale.err) == (4, True)
    command.ok("project", "limit", "default", "--jobs", "5", "--if-match", str(shown["generation"]))
    assert command.ok("project", "create", "team-c", "--json").json["name"] == "team-c"
    assert command.ok("project", "show", "team-c", "--json").json["bytes"] == 0
    for wrong in (("--bytes", "lots"), ("--uploads", "3GB"), ("--runner-hours", "-1"), ("--jobs", "1.5"), ()):
        assert command("project", "limit", "default", *wrong).status == 2


def test_two_who_set_different_limits_do_not_undo_each_other(api, command, monkeypatch):
    """What is not named is not sent, so that it is not what it was when the first of them looked."""
    sent = []
    post = Transport.post

    def posting(self, model, path, body, **options):
        sent.append(strict_json(body))
        return post(self, model, path, body, **options)

    monkeypatch.setattr(Transport, "post", posting)
    command.be("admin", api)
    command.ok("project", "limit", "default", "--bytes", "2kB")
    command.ok("project", "limit", "default", "--jobs", "4", "--runner-hours", "default")
    assert sent == [{"bytes": 2000}, {"jobs": 4, "runner_seconds": None}]


def test_what_is_counted_is_what_is_there(api, manager, author):
    """Whatever was done, in whatever order, the counters are the sums that they stand for."""
    bundles = [held(api.service, author, name) for name in "abc"]
    together(*[lambda b=b: manager.bundles.delete(b.digest, "x") for b in bundles[:2]])
    age(api.service, days=2)
    together(*[lambda: collection.collect(api.service, is_dry_run=False)] * 3)
    with api.service.database.transaction() as session:
        project = session.get_one(ProjectRow, author.project_id)
        shown = quotas.shown(session, api.service.settings, project)
        quotas.count(session, api.service.settings, author.project_id, Added(bytes=0), is_bound=True)
    assert shown.bytes == len(SHARED) + len(weights("c"))
    assert shown.documents == 1
