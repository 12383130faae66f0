"""A server that speaks S3 wrongly: no list of it goes on for ever, and none of its bytes are put in a wrong place."""

import itertools

import pytest

from gates.bucket import Bucket
from gates.sources.fetch import fetch
from gates.sources.s3 import S3Source
from gates.sources.source import SourceRefused
from gates.sources.store import FetchStore
from schemas.problems import Unavailable
from tests.gates.sources.conftest import QUICK
from tests.support.hub import Hub, answer
from tests.support.s3 import ENVIRONMENT

RAW = b"".join(b"%04d" % number for number in range(100))
DENIED = answer(403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")


def page(*keys, token=None):
    """A page of a list that says that more follow."""
    entries = "".join(
        f"<Contents><Key>{key}</Key><Size>{len(RAW)}</Size><ETag>&quot;e&quot;</ETag>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for key in keys
    )
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    is_truncated = "true" if token != "" else "false"
    body = f"<ListBucketResult><IsTruncated>{is_truncated}</IsTruncated>{more}{entries}</ListBucketResult>"
    return answer(200, body.encode(), {"content-type": "application/xml"})


@pytest.fixture
def server(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with Hub({}) as hub:
        yield hub


def test_a_list_without_an_end_is_given_up(server, monkeypatch):
    monkeypatch.setattr("gates.bucket.MOST_EMPTY_PAGES", 3)
    bucket, tokens = Bucket("bucket", endpoint=server.url("cdn")), itertools.count(1)
    for lie, requests in (
        (lambda _: page(token="same"), 2),
        (lambda _: page("p/a", token="same"), 2),
        (lambda _: page(token=next(tokens)), 4),
        (lambda _: page("p/a"), 1),
    ):
        server.lies["cdn"] = lie
        server.asked.clear()
        with pytest.raises(Unavailable, match="without an end"):
            list(bucket.list("p/"))
        assert len(server.asked) == requests
    bucket.close()


def test_a_list_with_too_many_objects_is_not_read_to_its_end(server, monkeypatch):
    monkeypatch.setattr("gates.sources.s3.MAX_ENTRIES", 5)
    numbers = itertools.count(1)

    def endless(request):
        if "versions" in request.path:
            return DENIED
        number = next(numbers)
        return page(f"p/{number}a/", f"p/{number}b", token=number)

    server.lies["cdn"] = endless
    with pytest.raises(SourceRefused) as refused:
        S3Source("s3://bucket/p", server.url("cdn")).resolve()
    assert refused.value.code == "too-many-files"
    assert next(numbers) == 4


def test_a_reading_that_is_cut_is_not_gone_on_with_from_another_place(server, tmp_path):
    cut = [answer(200, RAW, {"etag": '"e"'})[:-300]]

    def ignores_ranges(request):
        if "versions" in request.path:
            return DENIED
        if "list-type" in request.path:
            return page("p/model.gguf", token="")
        is_whole = "x-amz-checksum-mode" in request.headers or not cut
        return answer(200, RAW, {"etag": '"e"'}) if is_whole else cut.pop()

    server.lies["cdn"] = ignores_ranges
    bucket = Bucket("bucket", endpoint=server.url("cdn"))
    with pytest.raises(Unavailable, match="does not go on"), bucket.open("p/model.gguf") as file:
        file.read()
    bucket.close()
    cut.append(answer(200, RAW, {"etag": '"e"'})[:-300])
    source = S3Source("s3://bucket/p", server.url("cdn"))
    resolved = source.resolve()
    (found,) = fetch(source, resolved, source.list(resolved), FetchStore(tmp_path / "store"), bounds=QUICK)
    assert found.place.read_bytes() == RAW
    assert cut == []


def test_a_bucket_is_asked_through_no_proxy(server, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, server.url("hub"))
    server.lies["cdn"] = lambda _: page(token="")
    bucket = Bucket("bucket", endpoint=server.url("cdn"))
    bucket.check()
    bucket.close()
    assert {request.server for request in server.asked} == {"cdn"}
