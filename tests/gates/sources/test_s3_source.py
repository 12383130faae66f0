"""A bucket as a source, on a real S3 server: pinned by versions where it keeps some, else by what was received."""

import pytest

from gates.sources.fetch import fetch
from gates.sources.s3 import S3Source
from gates.sources.source import SourceRefused, SourceUnavailable
from gates.sources.store import FetchStore
from schemas.common import sha256_digest
from tests.gates.sources.conftest import QUICK
from tests.support.outage import door

FILES = {
    "config.json": b"{}\n",
    "model.safetensors": bytes(range(256)) * 1000,
    "adapters/de/adapter_config.json": b"[]",
}


@pytest.fixture
def prefix(s3_server):
    """A prefix with files, what consoles write for a folder, and a neighbour whose name begins alike."""
    prefix = s3_server.place()
    for path, raw in FILES.items():
        s3_server.client.put_object(Bucket=s3_server.bucket, Key=f"{prefix}/{path}", Body=raw)
    s3_server.client.put_object(Bucket=s3_server.bucket, Key=f"{prefix}-next/other.json", Body=b"{}")
    return prefix


@pytest.fixture(scope="module")
def versioned(s3_server):
    bucket = f"{s3_server.bucket}-sources"
    s3_server.client.create_bucket(Bucket=bucket)
    s3_server.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    return bucket


def fetched(source, store):
    resolved = source.resolve()
    found = fetch(source, resolved, source.list(resolved), store, bounds=QUICK)
    return resolved, {one.item.path: one for one in found}


def test_all_objects_under_a_prefix_arrive_verified_and_pin_a_bucket_without_versions(s3_server, prefix, tmp_path):
    store = FetchStore(tmp_path)
    resolved, found = fetched(S3Source(f"s3://{s3_server.bucket}/{prefix}", s3_server.url), store)
    assert {path: one.place.read_bytes() for path, one in found.items()} == FILES
    assert (resolved.kind, resolved.location, resolved.revision) == ("s3", f"{s3_server.bucket}/{prefix}", None)
    pinned = resolved.pinned([(path, one.sha256, one.size) for path, one in found.items()])
    assert (pinned.revision is not None, pinned.is_by_bytes) == (True, True)
    again = S3Source(f"s3://{s3_server.bucket}/{prefix}/", s3_server.url)
    assert again.resolve().location == resolved.location


def test_a_digest_that_the_server_keeps_is_held_against_the_bytes_and_saves_a_second_transfer(
    s3_bucket, s3_server, tmp_path
):
    prefix, raw, store = s3_server.place(), b"weights", FetchStore(tmp_path)
    for name in ("a.bin", "b.bin"):
        assert s3_bucket.put(f"{prefix}/{name}", raw)
    source = S3Source(f"s3://{s3_server.bucket}/{prefix}", s3_server.url)
    resolved = source.resolve()
    first, second = source.list(resolved)
    assert first.sha256 == second.sha256 == sha256_digest(raw)
    assert [one.received for one in fetch(source, resolved, [first], store, bounds=QUICK)] == [len(raw)]
    assert [one.received for one in fetch(source, resolved, [second], store, bounds=QUICK)] == [0]


def test_a_bucket_that_keeps_versions_is_pinned_by_them_whatever_is_written_later(s3_server, versioned, tmp_path):
    key = {"Bucket": versioned, "Key": "models/config.json"}
    s3_server.client.put_object(**key, Body=b"first")
    source = S3Source(f"s3://{versioned}/models", s3_server.url)
    resolved = source.resolve()
    s3_server.client.put_object(**key, Body=b"later")
    (found,) = fetch(source, resolved, source.list(resolved), FetchStore(tmp_path), bounds=QUICK)
    assert found.place.read_bytes() == b"first"
    assert resolved.revision is not None
    assert resolved.pinned([("config.json", found.sha256, found.size)]) == resolved
    moved = S3Source(f"s3://{versioned}/models", s3_server.url).resolve()
    assert moved.revision != resolved.revision
    s3_server.client.delete_object(**key)
    with pytest.raises(SourceRefused) as refused:
        S3Source(f"s3://{versioned}/models", s3_server.url).resolve()
    assert refused.value.code == "not-found"


def test_an_object_that_changes_after_it_was_listed_is_refused_and_leaves_nothing(s3_server, prefix, tmp_path):
    source = S3Source(f"s3://{s3_server.bucket}/{prefix}", s3_server.url)
    resolved = source.resolve()
    items = [item for item in source.list(resolved) if item.path == "config.json"]
    place = {"Bucket": s3_server.bucket, "Key": f"{prefix}/config.json"}
    s3_server.client.put_object(**place, Body=b"{}?")
    for _ in range(2):
        with pytest.raises(SourceRefused) as refused:
            fetch(source, resolved, items, FetchStore(tmp_path), bounds=QUICK)
        assert (refused.value.code, refused.value.file) == ("source-unstable", "config.json")
        s3_server.client.delete_object(**place)
    assert list((tmp_path / "parts").iterdir()) == []


def test_a_transfer_that_is_cut_goes_on_where_it_was(s3_server, tmp_path):
    raw, prefix = bytes(range(256)) * (1 << 17), s3_server.place()
    s3_server.client.put_object(Bucket=s3_server.bucket, Key=f"{prefix}/model.gguf", Body=raw)
    with door(s3_server.url) as away:
        source = S3Source(f"s3://{s3_server.bucket}/{prefix}", away.url)
        resolved = source.resolve()
        (item,) = source.list(resolved)
        starts = []
        inner = source.open

        def opened(*arguments, offset, tag):
            starts.append(offset)
            return inner(*arguments, offset=offset, tag=tag)

        def progress(count, _):
            if count == 1 << 20 and len(starts) == 1:
                away.shut()
                away.open()

        source.open = opened
        (found,) = fetch(source, resolved, [item], FetchStore(tmp_path), bounds=QUICK, progress=progress)
    assert found.sha256 == sha256_digest(raw)
    assert len(starts) > 1
    assert all(0 < start < len(raw) for start in starts[1:])


def test_names_that_lead_out_are_refused(s3_server, tmp_path):
    prefix = s3_server.place()
    s3_server.client.put_object(Bucket=s3_server.bucket, Key=f"{prefix}/a:b.json", Body=b"{}")
    with pytest.raises(SourceRefused) as refused:
        S3Source(f"s3://{s3_server.bucket}/{prefix}", s3_server.url).resolve()
    assert refused.value.code.startswith("name-")


def test_a_source_that_cannot_be_read_says_why(s3_server, monkeypatch):
    for asked in ("s3://", "s3://Upper/x", "s3://bucket/../x", "s3://key:secret@bucket/x"):
        with pytest.raises(SourceRefused) as refused:
            S3Source(asked)
        assert refused.value.code == "source-malformed"
    with pytest.raises(SourceRefused) as refused:
        S3Source(f"s3://{s3_server.bucket}-nobody-made/x", s3_server.url).resolve()
    assert refused.value.code == "not-found"
    with pytest.raises(SourceUnavailable):
        S3Source(f"s3://{s3_server.bucket}/x", "http://127.0.0.1:1").resolve()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(SourceRefused) as refused:
        S3Source(f"s3://{s3_server.bucket}/x", s3_server.url).resolve()
    assert refused.value.code == "not-permitted"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(SourceRefused) as refused:
        S3Source(f"s3://{s3_server.bucket}/x", s3_server.url).resolve()
    assert (refused.value.code, "AWS_ACCESS_KEY_ID" in str(refused.value.advice)) == ("not-permitted", True)
