"""What is no HTTP at all: answered with a problem like everything else, and the connection ends."""

import json
import socket
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from schemas.problems import MalformedRequest, problem_from


@pytest.fixture
def api(shared_api):
    return shared_api


def answered(api, raw):
    """Send bytes, and return the status line, the headers and the body of what comes back until the end."""
    address = urlsplit(api.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(raw)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return status, headers, body


HOST = b"Host: sluicegate.test\r\n"
JSON = b"Content-Type: application/json\r\n"
CHUNKED = b"POST /v1/suites HTTP/1.1\r\n" + HOST + JSON + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"nonsense\r\n\r\n", "Invalid method"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "Invalid method"),
        (b"GET /v1/version HTTP/1.1\r\n\r\n", "Host"),
        (b"GET /v1/version HTTP/1.1\r\n" + HOST + b"no colon\r\n\r\n", "Invalid header token"),
        (b"POST /v1/suites HTTP/1.1\r\n" + HOST + b"Content-Length: many\r\n\r\n", "Content-Length"),
        (b"POST /v1/suites HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", "Content-Length"),
        (b"CONNECT a.test:443 HTTP/1.1\r\n" + HOST + b"\r\n", "CONNECT"),
        (b"GET /" + b"x" * 70_000, "may have 65536 bytes"),
        (b"GET /v1/version HTTP/1.1\r\n" + HOST + b"X-Long: " + b"x" * 70_000, "may have 65536 bytes"),
    ],
    ids=["line", "tls", "no-host", "header", "length", "two-lengths", "tunnel", "url", "headers"],
)
def test_bytes_that_are_no_request_are_answered_with_a_problem(api, raw, said):
    status, headers, body = answered(api, raw)
    assert status == "HTTP/1.1 400 Bad Request"
    assert headers["content-type"] == "application/problem+json"
    assert headers["x-content-type-options"] == "nosniff"
    assert int(headers["content-length"]) == len(body)
    told = json.loads(body)
    assert said in told["detail"]
    assert told["type"] == "http://sluicegate.test/problems/malformed-request"
    assert told["request_id"] == headers["x-request-id"]
    assert isinstance(problem_from(told, 400), MalformedRequest)


def test_a_body_whose_chunks_cannot_be_read_is_answered_once_whatever_waits_for_it(api):
    token = api.tokens["manager"].encode()
    head = CHUNKED.replace(b"Transfer-", b"Authorization: Bearer " + token + b"\r\nTransfer-")
    status, _, body = answered(api, head + b'5\r\n{"a"\r\nzz\r\n')
    assert status == "HTTP/1.1 400 Bad Request"
    assert "chunk" in json.loads(body)["detail"]
    assert body.count(b'"type"') == 1


def whole(api, *headers, body=b""):
    """Return a request that is answered, and ends its connection."""
    lines = [b"GET /v1/me HTTP/1.1", HOST.strip(), b"Authorization: Bearer " + api.tokens["viewer"].encode(), *headers]
    return b"\r\n".join(lines) + b"\r\nConnection: close\r\n\r\n" + body


def test_a_whole_request_is_answered_and_not_the_nonsense_after_it(api):
    status, headers, body = answered(api, whole(api).replace(b"Connection: close\r\n", b"") + b"nonsense\r\n\r\n")
    assert status == "HTTP/1.1 200 OK"
    assert json.loads(body)["name"] == "viewer"
    assert headers["connection"] == "close"


def test_a_trailer_is_no_header(api):
    chunked = whole(api, b"Transfer-Encoding: chunked").replace(b"GET /v1/me", b"POST /v1/nothing")
    without = chunked.replace(b"Authorization: Bearer " + api.tokens["viewer"].encode() + b"\r\n", b"")
    late = b"0\r\nAuthorization: Bearer " + api.tokens["viewer"].encode() + b"\r\n\r\n"
    on = b"POST /v1/projects"
    status, _, _ = answered(api, without.replace(b"POST /v1/nothing", on) + b"0\r\n\r\n")
    assert status.startswith("HTTP/1.1 401")
    status, _, _ = answered(api, without.replace(b"POST /v1/nothing", on) + late)
    assert status.startswith("HTTP/1.1 401")


@pytest.mark.parametrize(
    "endless", [b"0\r\nX-Late: " + b"x" * 400_000, b"1;" + b"x" * 400_000], ids=["trailer", "chunk"]
)
def test_what_comes_with_a_body_and_is_none_of_it_has_a_limit(api, endless):
    token = api.tokens["manager"].encode()
    head = CHUNKED.replace(b"Transfer-", b"Authorization: Bearer " + token + b"\r\nTransfer-")
    status, _, body = answered(api, head + endless)
    assert status == "HTTP/1.1 400 Bad Request"
    assert json.loads(body)["type"].endswith("/malformed-request")


def test_who_asks_for_another_protocol_is_answered_in_this_one(api):
    token = b"Authorization: Bearer " + api.tokens["manager"].encode() + b"\r\n"
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    head = b"POST /v1/suites HTTP/1.1\r\n" + HOST + JSON + token + upgrade + b"Content-Length: 2\r\n\r\n"
    status, _, body = answered(api, head + b"{}" + whole(api))
    assert status.startswith("HTTP/1.1 422 ")
    first, _, second = body.partition(b"HTTP/1.1 200 OK")
    assert b"invalid-document" in first
    assert b'"viewer"' in second


def test_the_service_goes_on_afterwards(api):
    answered(api, b"\x00\x01\x02\r\n\r\n")
    assert api.clients["engineer"].get("/v1/me").status_code == 200


def test_no_connection_is_kept_by_who_is_refused_or_asks_for_nothing_that_is_there(shared_api):
    pool = shared_api.service.database.engine.pool
    before = pool.checkedout()
    for role in ("viewer", "admin"):
        client = shared_api.clients[role]
        statuses = {client.get(path).status_code for path in ("/v1/tokens", f"/v1/releases/{uuid4()}", "/v1/bundles")}
        assert statuses == ({403, 404, 200} if role == "viewer" else {200, 404})
    assert pool.checkedout() == before


def test_what_comes_behind_a_request_that_is_still_answered_is_never_taken_for_its_answer(api):
    token = b"Authorization: Bearer " + api.tokens["manager"].encode() + b"\r\n"
    first = whole(api).replace(b"Connection: close\r\n", b"")
    status, headers, body = answered(api, first + CHUNKED.replace(b"Transfer-", token + b"Transfer-") + b"zz\r\n")
    assert status == "HTTP/1.1 200 OK"
    assert headers["connection"] == "close"
    assert json.loads(body)["name"] == "viewer"
