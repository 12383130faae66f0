"""What is no HTTP at all: answered with a problem like everything else, and the connection ends."""

import json
import socket
from urllib.parse import urlsplit

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
        (b"nonsense\r\n\r\n", "illegal request line"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "request line"),
        (b"GET /v1/version HTTP/1.1\r\n\r\n", "Host"),
        (b"GET /v1/version HTTP/1.1\r\n" + HOST + b"no colon\r\n\r\n", "illegal header line"),
        (b"POST /v1/suites HTTP/1.1\r\n" + HOST + b"Content-Length: many\r\n\r\n", "Content-Length"),
        (b"POST /v1/suites HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", "Content-Length"),
        (b"GET /" + b"x" * 70_000, "may have 65536 bytes"),
        (b"GET /v1/version HTTP/1.1\r\n" + HOST + b"X-Long: " + b"x" * 70_000, "may have 65536 bytes"),
    ],
    ids=["line", "tls", "no-host", "header", "length", "two-lengths", "url", "headers"],
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


def test_the_service_goes_on_afterwards(api):
    answered(api, b"\x00\x01\x02\r\n\r\n")
    assert api.clients["engineer"].get("/v1/me").status_code == 200
