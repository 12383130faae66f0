"""What stands before llama.cpp so that adapters have names; the server behind it is scripted."""

import json
import socket
import threading

import pytest

from tests.support.scripted_http import Asked, ScriptedHttp, answer
from workers.engines.llamacpp_names import MAX_HEAD_BYTES, Names

QUOTED = r"it said \"model\":\"chain\""
ANSWER = f'{{"model":"chain","said":"{QUOTED}"}}'
EVENTS = [f'data: {{"model":"chain","n":{place},"said":"{QUOTED}"}}\n\n' for place in range(3)] + ["data: [DONE]\n\n"]
STREAM = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LISTED = {"models": [], "data": [{"id": "chain", "aliases": ["chain"], "meta": {"n_ctx": 512}}]}


def chunked(text, size):
    pieces = [text[place : place + size].encode() for place in range(0, len(text), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces)


def script(asked: Asked):
    if asked.path.startswith("/v1/models"):
        return answer(200, json.dumps(LISTED).encode())
    if b"stream" in asked.body:
        return STREAM.encode() + chunked("".join(EVENTS), 7) + (b"" if b"cut" in asked.body else b"0\r\n\r\n")
    return answer(200, ANSWER.encode())


@pytest.fixture
def front():
    with ScriptedHttp(script) as server:
        names = Names("chain", ("loud", "mute"), "127.0.0.1", 0)
        names.serve("127.0.0.1", int(server.url.rpartition(":")[2]))
        yield names, server
        names.stop()


def send(front, raw):
    """Return all that comes back for some bytes, until the connection is closed."""
    with socket.create_connection(("127.0.0.1", front[0].port), timeout=20) as client:
        client.sendall(raw)
        found = b""
        while piece := client.recv(65536):
            found += piece
        return found


def post(front, body, path="/v1/chat/completions", headers=()):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(raw)}", *headers]
    head, _, rest = send(front, "\r\n".join([*lines, "", ""]).encode() + raw).partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), rest


@pytest.mark.parametrize(("name", "place"), [("loud", 0), ("mute", 1)])
def test_an_adapter_s_name_becomes_its_place_and_comes_back(front, name, place):
    status, body = post(front, {"model": name, "x": 1.5})
    assert (status, body.decode()) == (200, ANSWER.replace('"model":"chain",', f'"model":"{name}",', 1))
    (asked,) = front[1].asked
    assert json.loads(asked.body) == {"model": "chain", "x": 1.5, "lora": [{"id": place, "scale": 1.0}]}


@pytest.mark.parametrize(
    "body", [b'{ "model":"chain"}', b'{"model": "" }', b'{"model":null}', b"{}", b"[]", b"null", b""]
)
def test_what_asks_for_the_base_goes_through_byte_by_byte(front, body):
    assert post(front, body) == (200, ANSWER.encode())
    assert [one.body for one in front[1].asked] == [body]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "no-such"}, 404, "served are chain, loud, mute"),
        ({"model": 5}, 404, "The model 5"),
        ({"model": ["loud"]}, 404, "is not served"),
        ({"model": "chain", "lora": [{"id": 0, "scale": 2}]}, 400, "not by lora"),
        (b"ping", 400, "not JSON"),
        (b'{"model": "loud", "x": "\xff"}', 400, "not JSON"),
        (b'{"model": "loud", "x": ' + b"[" * 9999 + b"]" * 9999 + b"}", 400, "not JSON"),
    ],
)
def test_a_name_that_nobody_serves_is_refused_and_the_engine_not_asked(front, body, status, says):
    found, error = post(front, body)
    assert (found, json.loads(error)["error"]["code"]) == (status, status)
    assert says in json.loads(error)["error"]["message"]
    assert front[1].asked == []


@pytest.mark.parametrize("path", ["/lora-adapters", "/lora%2Dadapters", "/lora-adapters?x=1"])
def test_nobody_changes_the_answers_of_all(front, path):
    assert post(front, [{"id": 0, "scale": 1}], path=path)[0] == 403
    assert front[1].asked == []


def test_a_stream_has_the_adapter_s_name_in_each_event_wherever_it_is_cut(front):
    status, raw = post(front, {"model": "loud", "stream": True})
    text, rest = "", raw
    while not rest.startswith(b"0\r\n"):
        size, _, rest = rest.partition(b"\r\n")
        text, rest = text + rest[: int(size, 16)].decode(), rest[int(size, 16) + 2 :]
    assert (status, rest) == (200, b"0\r\n\r\n")
    assert text == "".join(EVENTS).replace('{"model":"chain"', '{"model":"loud"')


@pytest.mark.parametrize("model", ["loud", "chain"])
def test_a_stream_that_breaks_off_is_not_ended_for_it(front, model):
    _, raw = post(front, {"model": model, "stream": True, "how": "cut"})
    assert b"data: " in raw
    assert not raw.endswith(b"0\r\n\r\n")


def test_the_list_has_the_adapters_after_their_base(front):
    raw = send(front, b"GET /v1/models HTTP/1.1\r\n\r\n")
    meta = {"meta": {"n_ctx": 512}}
    assert json.loads(raw.partition(b"\r\n\r\n")[2])["data"] == [
        LISTED["data"][0],
        {"id": "loud", "parent": "chain"} | meta,
        {"id": "mute", "parent": "chain"} | meta,
    ]


def test_a_body_in_chunks_is_read_and_a_second_request_behind_the_first_is_not(front):
    body = chunked(json.dumps({"model": "loud"}), 5) + b"0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    found = send(front, head + body + b"POST /lora-adapters HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]")
    assert found.startswith(b"HTTP/1.1 200")
    assert [(one.path, json.loads(one.body)["model"]) for one in front[1].asked] == [("/v1/completions", "chain")]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST /v1/x HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3", 400),
        ("POST /v1/x HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked", 400),
        ("POST /v1/x HTTP/1.1\r\nTransfer-Encoding: gzip, chunked", 400),
        ("POST /v1/x HTTP/1.1\r\nContent-Length: +2", 400),
        ("POST /v1/x HTTP/1.1\r\nContent-Length : 2", 400),
        ("POST /v1/x HTTP/1.1\r\n folded: 2", 400),
        ("POST http://x/lora-adapters HTTP/1.1\r\nContent-Length: 2", 400),
        ("POST /v1/x HTTP/1.1\r\nContent-Length: 99999999999", 413),
        ("POST /v1/x", 400),
        ("HTTP/1.1 200 OK", 400),
        ("GET / HTTP/1.1\r\nx: " + "y" * MAX_HEAD_BYTES, 431),
    ],
)
def test_what_two_could_read_in_two_ways_is_refused(front, head, status):
    assert int(send(front, f"{head}\r\n\r\n[]".encode()).split(b" ")[1]) == status
    assert front[1].asked == []


def test_who_hangs_up_is_not_waited_for():
    waits = socket.create_server(("127.0.0.1", 0))
    names = Names("chain", ("loud",), "127.0.0.1", 0)
    names.serve(*waits.getsockname())
    client = socket.create_connection(("127.0.0.1", names.port))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
    with waits, waits.accept()[0] as engine:
        engine.settimeout(20)
        assert engine.recv(65536)
        assert names.active == 1
        client.close()
        assert engine.recv(65536) == b""
    names.stop()
    assert names.active == 0


def test_an_engine_that_is_gone_is_said_and_a_port_that_is_taken_too():
    names = Names("chain", ("loud",), "127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = free.getsockname()
    names.serve(*place)
    with pytest.raises(OSError, match="in use"):
        Names("chain", ("loud",), "127.0.0.1", names.port)
    assert post((names,), {})[0] == 502
    port = names.port
    names.stop()
    first, second = Names("chain", (), "127.0.0.1", port), Names("chain", (), "127.0.0.1", port)
    first.serve(*place)
    with pytest.raises(OSError, match="in use"):
        second.serve(*place)
    first.stop()
    second.stop()
    assert "names" not in {one.name for one in threading.enumerate()}
