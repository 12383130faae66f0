"""The service with its blobs in a bucket of a real S3 server: the whole way, and what happens while that is away."""

import random
from dataclasses import replace
from datetime import timedelta

import pytest
from pydantic import ValidationError
from sqlalchemy import update

from gates.bucket import Address, Bucket
from registry import blobs, collection, housekeeping
from registry.client import Client
from registry.client.uploads import Uploader
from registry.storage import opened
from registry.storage.local import LocalBlobs
from registry.storage.s3 import S3Blobs
from registry.tables import RecordRow
from schemas.bundle import Bundle
from schemas.common import sha256_digest
from schemas.problems import Unavailable
from tests.support.api import Api
from tests.support.factories import bundle_body, file_entry
from tests.support.holdings import age, project_holds
from tests.support.outage import door
from tests.support.uploads import begin, incoming, patch

WEIGHTS = random.Random(5).randbytes(11 << 20)
README = b"about these weights\n"


@pytest.fixture(scope="module")
def away(s3_server):
    """A door before the server, which can be shut."""
    with door(s3_server.url) as made:
        yield made


@pytest.fixture(scope="module")
def bucket(s3_server, away):
    made = Bucket(s3_server.bucket, endpoint=away.url)
    yield made
    made.close()


@pytest.fixture
def root(s3_server):
    return s3_server.place()


@pytest.fixture
def service(committed, bucket, root):
    return replace(committed, blobs=S3Blobs(bucket, f"{root}/", committed.settings.storage_dir))


@pytest.fixture
def api(service):
    with Api(service) as running:
        yield running


def readiness(api):
    with api.client(None) as nobody:
        return nobody.get("/readyz").json()


def test_a_bundle_is_sent_in_pieces_registered_fetched_deleted_and_cleared_up(api, service, s3_server, root, tmp_path):
    names = {"model.gguf": WEIGHTS, "README.md": README}
    for name, raw in names.items():
        (tmp_path / name).write_bytes(raw)
    with Client(api.url, api.tokens["engineer"]) as engineer:
        uploader = Uploader(engineer._transport, in_pieces_from=1 << 20, piece=4 << 20)
        for name, raw in names.items():
            sent = engineer.blobs.upload(sha256_digest(raw), tmp_path / name, uploader=uploader)
            assert (sent.size, sent.sent) == (len(raw), len(raw))
        files = [file_entry("README.md", README, "documentation"), file_entry("model.gguf", WEIGHTS, "weights")]
        bundle, is_new = engineer.bundles.register(Bundle.model_validate(bundle_body(files=files)))
        assert is_new
    keys = sorted(service.blobs.key(sha256_digest(raw)) for raw in names.values())
    assert s3_server.keys(root) == keys
    assert (incoming(service.settings.storage_dir), s3_server.uploads(root)) == ([], [])
    with Client(api.url, api.tokens["runner"]) as runner:
        for raw in names.values():
            assert runner.blobs.download(sha256_digest(raw), tmp_path / "back") == len(raw)
            assert (tmp_path / "back").read_bytes() == raw
    age(service, days=2)
    assert collection.collect(service, is_dry_run=False).blobs == 0
    s3_server.client.put_object(Bucket=s3_server.bucket, Key=keys[0], Body=b"other bytes")
    (lost,) = [digest for digest in map(sha256_digest, names.values()) if service.blobs.key(digest) == keys[1]]
    service.blobs.remove(lost)
    with Client(api.url, api.tokens["admin"]) as admin:
        told = admin.blobs.collect(is_dry_run=True)
        assert (told.missing, told.missing_count) == ([lost], 1)
        admin.bundles.delete(bundle.digest, "never used")
        age(service, days=2)
        found = admin.blobs.collect(is_dry_run=False)
    assert (found.blobs, found.bytes) == (2, len(WEIGHTS) + len(README))
    assert s3_server.keys(root) == []


def test_settings_name_the_bucket(committed, s3_server, root):
    named = {"storage": f"s3://{s3_server.bucket}/{root}/", "storage_endpoint": s3_server.url}
    store = opened(committed.settings.model_copy(update=named))
    store.put([README], sha256_digest(README), limit=1000)
    assert s3_server.keys(root) == [f"{root}/sha256/{sha256_digest(README)[7:9]}/{sha256_digest(README)[7:]}"]
    store.close()
    assert isinstance(opened(committed.settings), LocalBlobs)


def test_bytes_with_another_digest_reach_no_bucket(api, s3_server, root):
    engineer = api.clients["engineer"]
    refused = engineer.put(f"/v1/blobs/{sha256_digest(README)}", content=README[:-1])
    assert (refused.status_code, refused.json()["received"]) == (422, sha256_digest(README[:-1]))
    made = begin(engineer, WEIGHTS)
    patch(engineer, made["id"], 0, WEIGHTS[:100])
    assert patch(engineer, made["id"], 100, WEIGHTS[100:-1] + b"?").status_code == 422
    assert (s3_server.keys(root), s3_server.uploads(root)) == ([], [])


def test_a_store_that_is_away_is_a_problem_and_what_was_sent_goes_on_afterwards(api, service, away, s3_server, root):
    engineer, digest = api.clients["engineer"], sha256_digest(WEIGHTS)
    assert readiness(api)["blobs"] == "reachable"
    made = begin(engineer, WEIGHTS)
    half = len(WEIGHTS) // 2
    patch(engineer, made["id"], 0, WEIGHTS[:half])
    away.shut()
    refused = patch(engineer, made["id"], half, WEIGHTS[half:])
    small = engineer.put(f"/v1/blobs/{sha256_digest(README)}", content=README)
    for answer in (refused, small):
        assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (503, "unavailable")
        assert int(answer.headers["retry-after"]) >= 1
        assert away.url.removeprefix("http://") not in answer.text
    assert readiness(api) == {"status": "ready", "blobs": "unreachable", "broker": "unreachable"}
    assert engineer.get("/v1/me").status_code == 200
    assert engineer.head(f"/v1/blobs/{digest}").status_code == 404
    away.open()
    assert s3_server.keys(root) == []
    assert begin(engineer, WEIGHTS)["offset"] == len(WEIGHTS)
    assert patch(engineer, made["id"], len(WEIGHTS), b"").json()["is_complete"]
    assert engineer.get(f"/v1/blobs/{digest}").content == WEIGHTS
    away.shut()
    assert engineer.get(f"/v1/blobs/{digest}").status_code == 503
    away.open()
    assert incoming(service.settings.storage_dir) == []


def test_reading_goes_on_where_the_connection_was_cut_and_never_in_other_bytes(service, away, s3_server):
    raw = bytes(range(256)) * (1 << 17)  # more than all buffers on the way hold
    place = {"Bucket": s3_server.bucket, "Key": service.blobs.key(sha256_digest(raw))}
    s3_server.client.put_object(**place, Body=raw)

    def cut():
        away.shut()
        away.open()

    with service.blobs.open(sha256_digest(raw), is_verified=True) as file:
        first = file.read(1 << 20)
        cut()
        assert first + file.read() == raw
    with service.blobs.open(sha256_digest(raw)) as file:
        file.read(1 << 20)
        s3_server.client.put_object(**place, Body=bytes(len(raw)))
        cut()
        with pytest.raises(Unavailable):
            file.read()


def test_erased_records_are_gone_from_a_bucket_that_keeps_versions(committed, actor, s3_server, tmp_path):
    versioned = f"{s3_server.bucket}-versioned"
    s3_server.client.create_bucket(Bucket=versioned)
    bucket = Bucket(versioned, endpoint=s3_server.url)
    # What lay there before versions were kept, and what never was more than that.
    bucket.put("early", b"first")
    bucket.put("never", b"only")
    bucket.remove("never")
    assert s3_server.client.list_objects_v2(Bucket=versioned)["KeyCount"] == 1
    s3_server.client.put_bucket_versioning(Bucket=versioned, VersioningConfiguration={"Status": "Enabled"})
    bucket.remove("early")
    assert list(bucket.versions("early")) == []
    service = replace(committed, blobs=S3Blobs(bucket, "", tmp_path / "arriving"))
    raw = b"what somebody asked, and what was answered"
    digest = sha256_digest(raw)
    bucket.put(service.blobs.key(digest), b"damaged, and replaced by the next")
    with service.blobs.stage() as staged:
        staged.write(raw, limit=1000)
        blobs.keep(service, actor.project_id, digest, staged, is_record=True)
    assert len(list(bucket.versions(service.blobs.key(digest)))) == 2
    with service.database.transaction() as session:
        session.execute(update(RecordRow).values(recorded_at=RecordRow.recorded_at - timedelta(days=1000)))
    assert housekeeping.tidy(service)["records_erased"] == 1
    assert project_holds(service, actor, raw) == [False]
    assert list(bucket.versions(service.blobs.key(digest))) == []
    bucket.close()


@pytest.mark.parametrize("wrong", ["bucket", "key"])
def test_a_store_that_lets_nobody_in_is_unavailable_and_loses_nothing(service, s3_server, root, monkeypatch, wrong):
    service.blobs.put([README], sha256_digest(README), limit=1000)
    if wrong == "key":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    name = f"{s3_server.bucket}-nobody-made" if wrong == "bucket" else s3_server.bucket
    store = S3Blobs(Bucket(name, endpoint=s3_server.url), f"{root}/", service.settings.storage_dir)
    digest = sha256_digest(README)
    said = "NoSuchBucket" if wrong == "bucket" else "SignatureDoesNotMatch"
    calls = [lambda: store.exists(digest), lambda: store.open(digest), lambda: store.lost([digest]), store.check]
    for call in calls:
        with pytest.raises(Unavailable, match=said):
            call()
    assert service.blobs.is_intact(digest)
    store.close()


def test_a_server_that_confirms_no_digest_is_read_back(service, s3_server, monkeypatch):
    """Some servers ignore the checksum that comes with the bytes."""
    put, part = Bucket.put, Bucket.part
    monkeypatch.setattr(Bucket, "put", lambda *arguments: put(*arguments) and False)
    monkeypatch.setattr(Bucket, "part", lambda *arguments: replace(part(*arguments), is_confirmed=False))
    for raw in (README, WEIGHTS):
        service.blobs.put([raw], sha256_digest(raw), limit=len(raw))
        assert service.blobs.is_intact(sha256_digest(raw))
        service.blobs.remove(sha256_digest(raw))
    # And one that keeps something else.
    monkeypatch.setattr(Bucket, "put", lambda self, key, raw: put(self, key, raw[:-1]) and False)
    with pytest.raises(Unavailable, match="did not keep"):
        service.blobs.put([README], sha256_digest(README), limit=1000)
    assert not service.blobs.exists(sha256_digest(README))


def test_an_address_names_a_bucket_and_a_prefix():
    for address in ("s3://models", "s3://models/"):
        assert Address.parse(address) == Address("models", "")
    for address in ("s3://models/team-a/v1", "s3://models/team-a/v1/"):
        assert Address.parse(address) == Address("models", "team-a/v1/")


NOWHERE = ("models", "s3://", "s3:/models", "s3://Models", "s3://m", "s3://models/../x", "s3://models//x")
AND_MORE = ("s3://models/a b", "s3://models/a?versionId=1", "s3://key:secret@models/a", "s3://models/a\n")


def test_what_is_no_address_is_refused_before_anything_is_asked(committed):
    for address in (*NOWHERE, *AND_MORE):
        with pytest.raises(ValueError, match="must be s3://"):
            Address.parse(address)
        with pytest.raises(ValidationError, match="storage"):
            type(committed.settings)(**{**committed.settings.model_dump(), "storage": address})
