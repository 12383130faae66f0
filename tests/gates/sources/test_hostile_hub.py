"""A hub that lies: whatever it does, the fetch is refused with the reason, and no file is left."""

import hashlib
import itertools
import json
import os

import pytest

from gates.sources.connection import Patience
from gates.sources.fetch import Bounds
from gates.sources.hosts import Hosts
from gates.sources.hub import HubSource
from gates.sources.source import SourceRefused, SourceUnavailable
from gates.sources.web import Web
from tests.gates.sources.conftest import WEIGHTS, Fetching
from tests.support.hub import Repository, answer

SIZE = len(WEIGHTS)


def head(status, **headers):
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} Said\r\n{lines}\r\n".encode()


def redirect(location):
    return lambda request: answer(302, headers={"location": location})


def chunked(*pieces):
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


BODIES = {
    "wrong bytes of the right size": (lambda _: answer(200, os.urandom(SIZE)), "digest-mismatch"),
    "one bit": (lambda _: answer(200, WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1])), "digest-mismatch"),
    "announced too short": (lambda _: answer(200, WEIGHTS[:-1]), "size-mismatch"),
    "announced too long": (lambda _: answer(200, WEIGHTS + b"x"), "size-mismatch"),
    "short in chunks": (
        lambda _: head(200, transfer_encoding="chunked") + chunked(WEIGHTS[:-1]) + b"0\r\n\r\n",
        "body-too-short",
    ),
    "endless in chunks": (
        lambda _: itertools.chain([head(200, transfer_encoding="chunked")], itertools.repeat(chunked(WEIGHTS))),
        "body-too-long",
    ),
    "endless without a length": (lambda _: itertools.chain([head(200)], itertools.repeat(WEIGHTS)), "body-too-long"),
    "gzip": (lambda _: answer(200, WEIGHTS, {"content-encoding": "gzip"}), "encoding-not-asked"),
    "negative length": (lambda _: head(200, content_length=-1), "answer-malformed"),
    "length that is no number": (lambda _: head(200, content_length="1e3"), "answer-malformed"),
    "two lengths": (
        lambda _: b"HTTP/1.1 200 OK\r\ncontent-length: 300000\r\ncontent-length: 5\r\n\r\n" + WEIGHTS,
        "answer-malformed",
    ),
    "length and transfer encoding": (
        lambda _: head(200, content_length=SIZE, transfer_encoding="chunked") + chunked(WEIGHTS) + b"0\r\n\r\n",
        "answer-malformed",
    ),
    "huge headers": (lambda _: answer(200, WEIGHTS, {"x-large": "a" * 40_000}), "headers-too-large"),
    "endless headers": (lambda _: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"x: y\r\n" * 999)), None),
    "no http": (lambda _: b"220 mail.example ESMTP\r\n\r\n", "answer-malformed"),
    "not there": (lambda _: answer(404), "not-found"),
    "asks for a password": (lambda _: answer(401), "not-permitted"),
    "no content": (lambda _: answer(204, headers={"content-length": None}), "status-unexpected"),
    "part that nobody asked for": (
        lambda _: answer(206, WEIGHTS[5:], {"content-range": f"bytes 5-{SIZE - 1}/{SIZE}"}),
        "status-unexpected",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_bytes_that_are_not_the_listed_ones_are_refused_and_leave_no_file(fetching, name):
    lie, code = BODIES[name]
    fetching.hub.lies["cdn"] = lie
    with pytest.raises(SourceRefused) as refused:
        fetching.run(keep={"model.safetensors"})
    assert refused.value.code == (code or "answer-malformed")
    assert refused.value.file == "model.safetensors"
    assert fetching.files() == []


def test_a_file_that_is_in_the_commit_itself_is_held_against_git_s_name_of_it(fetching):
    fetching.hub.lies["resolve"] = lambda request: answer(200, b'{"model_type": "evil!"}')
    with pytest.raises(SourceRefused) as refused:
        fetching.run(keep={"config.json"})
    assert (refused.value.code, refused.value.file) == ("digest-mismatch", "config.json")
    assert refused.value.expected == fetching.hub.repositories["org/base"].tree()[0]["oid"]
    assert fetching.files() == []


REDIRECTS = {
    "metadata of a cloud": ("http://169.254.169.254/latest/meta-data/", "scheme-not-allowed"),
    "metadata of a cloud over https": ("https://169.254.169.254/latest/", "host-not-allowed"),
    "another port of this machine": ("http://127.0.0.1:1/x", "scheme-not-allowed"),
    "this machine over https": ("https://127.0.0.1/x", "host-not-allowed"),
    "this machine in IPv6": ("https://[::1]/x", "host-not-allowed"),
    "IPv4 in IPv6": ("https://[::ffff:7f00:1]/x", "host-not-allowed"),
    "decimal": ("https://2130706433/x", "address-malformed"),
    "hexadecimal": ("https://0x7f000001/x", "address-malformed"),
    "octal": ("https://0177.0.0.1/x", "address-malformed"),
    "short": ("https://127.1/x", "address-malformed"),
    "plain http": ("http://huggingface.co/x", "scheme-not-allowed"),
    "file": ("file:///etc/passwd", "scheme-not-allowed"),
    "ftp": ("ftp://huggingface.co/x", "scheme-not-allowed"),
    "another host": ("https://evil.example/x", "host-not-allowed"),
    "a host that ends alike": ("https://evilhf.co/x", "host-not-allowed"),
    "a host that begins alike": ("https://huggingface.co.evil.example/x", "host-not-allowed"),
    "another port": ("https://huggingface.co:8443/x", "host-not-allowed"),
    "a user": ("https://huggingface.co@evil.example/x", "address-malformed"),
    "backslash": ("https://huggingface.co\\@evil.example/x", "address-malformed"),
    "a name that leads to this machine": ("https://localhost/x", "address-not-allowed"),
    "no host": ("https:///x", "address-malformed"),
    "too long": ("https://huggingface.co/" + "a" * 9000, "address-malformed"),
    "port zero": ("https://huggingface.co:0/", "address-malformed"),
}


@pytest.mark.parametrize("name", REDIRECTS)
def test_a_redirect_is_not_followed_to_where_nobody_allowed(fetching, name):
    location, code = REDIRECTS[name]
    fetching.hub.lies["resolve"] = redirect(location)
    hosts = Hosts(["huggingface.co", "*.hf.co", "localhost"], [fetching.hub.url()])
    with pytest.raises(SourceRefused) as refused:
        fetching.run(keep={"model.safetensors"}, hosts=hosts)
    assert (refused.value.code, refused.value.file) == (code, "model.safetensors")
    assert fetching.files() == []
    assert [request.server for request in fetching.hub.asked] == ["hub"] * 3


def test_a_redirect_loop_ends(fetching):
    fetching.hub.lies["resolve"] = lambda request: redirect(f"{request.path}?again")(request)
    with pytest.raises(SourceRefused) as refused:
        fetching.run(keep={"model.safetensors"})
    assert refused.value.code == "redirect-loop"
    steps = itertools.count()
    fetching.hub.lies["resolve"] = lambda request: answer(
        302, headers={"location": f"/org/base/resolve/main/{next(steps)}"}
    )
    with pytest.raises(SourceRefused) as refused:
        fetching.run(keep={"model.safetensors"})
    assert refused.value.code == "redirect-loop"
    assert next(steps) == 6
    assert fetching.files() == []


def edited(**fields):
    def lie(fetching):
        tree = fetching.hub.repositories["org/base"].tree()
        tree[1] |= fields
        return answer(200, json.dumps(tree).encode())

    return lie


TREES = {
    "parent": (edited(path="../evil"), "name-path"),
    "parent inside": (edited(path="a/../../evil"), "name-path"),
    "absolute": (edited(path="/etc/cron.d/evil"), "name-path"),
    "drive": (edited(path="C:evil"), "name-path"),
    "backslashes": (edited(path="..\\evil"), "name-path"),
    "empty": (edited(path=""), "name-path"),
    "newline": (edited(path="a\nb.json"), "name-control"),
    "right to left": (edited(path="config\u202enosj.json"), "name-control"),
    "nul": (edited(path="a\0b"), "name-control"),
    "no text": (edited(path=7), "answer-malformed"),
    "negative size": (edited(size=-1), "answer-malformed"),
    "size in words": (edited(size="300000"), "answer-malformed"),
    "digest that is none": (edited(lfs={"oid": "../../evil", "size": SIZE, "pointerSize": 1}), "answer-malformed"),
    "two sizes": (edited(lfs={"oid": "0" * 64, "size": 5, "pointerSize": 1}), "answer-malformed"),
    "git name that is none": (edited(lfs=None, oid="../x"), "answer-malformed"),
    "lfs without a digest": (edited(lfs={"size": SIZE}), "answer-malformed"),
    "one name twice": (edited(path="config.json"), "answer-malformed"),
    "no list": (lambda _: answer(200, b'"evil"'), "answer-malformed"),
    "no json": (lambda _: answer(200, b"<html>"), "answer-malformed"),
    "deep": (lambda _: answer(200, b"[" * 100_000), "answer-malformed"),
    "too many": (
        lambda _: answer(200, json.dumps([{"type": "directory", "path": "a", "oid": "b"}] * 50_001).encode()),
        "too-many-files",
    ),
    "endless": (lambda _: itertools.chain([head(200)], itertools.repeat(b" " * 1_000_000)), "answer-too-large"),
    "next page elsewhere": (
        lambda _: answer(200, b"[]", {"link": '<https://evil.example/api/models/x>; rel="next"'}),
        "host-not-allowed",
    ),
    "next page on the same server, outside of the API": (
        lambda fetching: answer(200, b"[]", {"link": f'<{fetching.hub.url()}/login>; rel="next"'}),
        "host-not-allowed",
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_that_cannot_be_trusted_is_refused_before_a_byte_is_fetched(fetching, name):
    lie, code = TREES[name]
    fetching.hub.lies["tree"] = lambda request: lie(fetching)
    with pytest.raises(SourceRefused) as refused:
        fetching.run()
    assert refused.value.code == code
    assert len(fetching.hub.asked) == 2
    assert fetching.files() == []


def test_a_tree_of_pages_without_an_end_is_given_up(fetching, monkeypatch):
    hub, pages = fetching.hub, itertools.count()
    hub.lies["tree"] = lambda request: answer(
        200,
        b" " * 1000 + b"[]",
        {"link": f'<{hub.url()}{request.path.partition("?")[0]}?cursor={next(pages)}>; rel="next"'},
    )
    for bound, value, requests in (("MAX_PAGES", 5, 5), ("MAX_LIST_BYTES", 3500, 4)):
        with monkeypatch.context() as bounded:
            bounded.setattr(f"gates.sources.hub.{bound}", value)
            hub.asked.clear()
            with pytest.raises(SourceRefused) as refused:
                fetching.run()
        assert refused.value.code == "answer-too-large"
        assert len([request for request in hub.asked if "/tree/" in request.path]) == requests


INFOS = {
    "another commit than asked for": ({"id": "org/base", "sha": "f" * 40}, "commit-mismatch"),
    "a branch instead of a commit": ({"id": "org/base", "sha": "main"}, "answer-malformed"),
    "a way out": ({"id": "org/base", "sha": "../../../x"}, "answer-malformed"),
    "no commit": ({"id": "org/base"}, "answer-malformed"),
    "another repository": ({"id": "evil/base", "sha": None}, "repository-moved"),
}


@pytest.mark.parametrize("name", INFOS)
def test_a_commit_is_the_one_that_was_asked_for(fetching, name):
    said, code = INFOS[name]
    commit = fetching.hub.repositories["org/base"].commit
    if code == "repository-moved":
        said = said | {"sha": commit}
    fetching.hub.lies["info"] = lambda request: answer(200, json.dumps(said).encode())
    with pytest.raises(SourceRefused) as refused:
        fetching.run(f"hf:org/base@{commit}")
    assert refused.value.code == code
    assert fetching.files() == []


def test_a_file_of_another_commit_is_refused_though_its_bytes_were_right(fetching):
    body = fetching.hub.repositories["org/base"].files["config.json"]
    fetching.hub.lies["resolve"] = lambda request: answer(200, body, {"x-repo-commit": "f" * 40})
    with pytest.raises(SourceRefused) as refused:
        fetching.run(keep={"config.json"})
    assert (refused.value.code, refused.value.found) == ("commit-mismatch", "f" * 40)
    assert fetching.files() == []


def test_a_token_goes_to_the_hub_and_to_no_other_server(fetching):
    fetching.hub.token = "hf_secret"
    fetching.run()
    told = {(request.server, request.headers.get("authorization")) for request in fetching.hub.asked}
    assert told == {("hub", "Bearer hf_secret"), ("cdn", None)}
    # Not on the next page of a list either, where the library itself would send it.
    fetching.hub.asked.clear()
    next_page = f'<{fetching.hub.url("cdn")}/api/models/x>; rel="next"'
    fetching.hub.lies["tree"] = lambda request: answer(200, b"[]", {"link": next_page})
    with pytest.raises(SourceRefused):
        fetching.run()
    assert {request.server for request in fetching.hub.asked} == {"hub"}


def test_a_token_is_not_sent_where_another_server_leads_to_the_hub(fetching):
    hub = fetching.hub
    hub.token = "hf_secret"
    hub.repositories["org/private"] = Repository({"config.json": b"private"}, name="org/private", gated=True)
    address = f"{hub.url()}/org/private/resolve/main/config.json"
    hub.lies["cdn"] = lambda request: answer(302, headers={"location": address})
    with Web(Hosts(named=[hub.url(), hub.url("cdn")]), tokens={hub.url(): hub.token}) as web:
        with web.get(f"{hub.url('cdn')}/x") as led:
            assert led.status == 403
        with web.get(address) as asked:
            assert asked.read(100) == b"private"
    assert [request.headers.get("authorization") for request in hub.asked] == [None, None, "Bearer hf_secret"]


@pytest.mark.parametrize("spell", [lambda url: url.replace("http", "HTTP"), lambda url: url + "/"])
def test_a_mirror_is_the_same_however_its_address_is_spelled(fetching, spell):
    url = fetching.hub.url()
    with Web(Hosts(named=[url])) as web:
        resolved = HubSource("hf:org/base", web, spell(url)).resolve()
    assert resolved.revision == fetching.hub.repositories["org/base"].commit


def test_a_drip_and_a_silence_are_given_up(fetching):
    slow, silent = Patience(window=0.5, rate=100_000), Patience(silence=0.3)
    hub = fetching.hub

    def drip(request):
        yield head(200, content_length=SIZE)
        for place in range(SIZE):
            hub.waited(0.05)
            yield WEIGHTS[place : place + 1]

    def silence(request):
        yield head(200, content_length=SIZE)
        hub.waited(60)

    def dripping_head(request):
        for letter in itertools.cycle(b"HTTP/1.1 200 OK\r\nx: "):
            hub.waited(0.05)
            yield bytes([letter])

    for lie, patience, code in (
        (drip, slow, "server-slow"),
        (silence, silent, "server-silent"),
        (dripping_head, slow, "server-slow"),
    ):
        hub.lies["cdn"] = lie
        with pytest.raises(SourceUnavailable) as problem:
            fetching.run(keep={"model.safetensors"}, bounds=Bounds(pauses=()), patience=patience)
        assert (problem.value.code, problem.value.file) == (code, "model.safetensors")


HINT = b"HTTP/1.1 103 Early Hints\r\nlink: </style.css>\r\n\r\n"
WRAPPED = b"1;" + b"x" * 1000 + b"\r\n" + b"y\r\n"


@pytest.mark.parametrize(
    ("kind", "before", "endless"), [("info", b"", HINT), ("cdn", b"", HINT), ("cdn", b"H", WRAPPED)]
)
def test_an_answer_that_is_all_wrapping_is_given_up(fetching, kind, before, endless):
    begin = head(200, transfer_encoding="chunked") if before else b""
    fetching.hub.lies[kind] = lambda request: itertools.chain([begin], itertools.repeat(endless * 20))
    with pytest.raises(SourceRefused) as refused:
        fetching.run(keep={"model.safetensors"})
    assert refused.value.code == "answer-malformed"
    assert fetching.files() == []


def test_a_few_hints_and_a_body_in_small_pieces_are_taken(fetching):
    pieces = chunked(*(WEIGHTS[place : place + 1] for place in range(SIZE)))
    whole = HINT * 20 + head(200, transfer_encoding="chunked") + pieces + b"0\r\n\r\n"
    fetching.hub.lies["cdn"] = lambda request: whole
    _, found = fetching.run(keep={"model.safetensors"})
    assert found["model.safetensors"].place.read_bytes() == WEIGHTS


def test_nobody_answers(fetching):
    fetching.hub.lies["info"] = lambda request: b""
    with pytest.raises(SourceUnavailable) as problem:
        fetching.run()
    assert problem.value.code == "connection-broken"


def test_what_the_hub_says_of_a_repository_is_told_to_a_person(fetching):
    hub = fetching.hub
    with pytest.raises(SourceRefused) as refused:
        fetching.run("hf:org/nothing")
    assert refused.value.code == "repository-unknown"
    assert "HF_TOKEN" in refused.value.advice
    with pytest.raises(SourceRefused) as refused:
        fetching.run("hf:org/base@nowhere")
    assert (refused.value.code, refused.value.found) == ("revision-unknown", "nowhere")
    hub.repositories["org/gated"] = Repository({"config.json": b"{}"}, name="org/gated", gated=True)
    with pytest.raises(SourceRefused) as refused:
        fetching.run("hf:org/gated")
    assert refused.value.code == "repository-gated"
    assert "HF_TOKEN" in refused.value.advice
    for text in ("hf:", "hf:a/b/c", "hf:../x", "hf:a/b@", "hf:a/b@x..y", "hf:a b/c"):
        with pytest.raises(SourceRefused) as refused:
            fetching.run(text)
        assert refused.value.code == "source-malformed"


def test_a_file_that_the_hub_keeps_in_xet_arrives_over_its_bridge_and_is_held_to_the_commit_s_digest(fetching):
    hub, commit = fetching.hub, fetching.hub.repositories["org/base"].commit
    tree = hub.repositories["org/base"].tree()
    listed = json.dumps([one | ({"xetHash": "a" * 64} if "lfs" in one else {}) for one in tree]).encode()
    hub.lies["tree"] = lambda request: answer(200, listed)
    told = {
        "x-repo-commit": commit,
        "x-linked-size": SIZE,
        "x-linked-etag": '"of-the-file"',
        "x-xet-hash": "a" * 64,
        "x-xet-refresh-route": f"{hub.url()}/api/models/org/base/xet-read-token/{commit}",
        "link": f'<{hub.url()}/xet-auth>; rel="xet-auth", <{hub.url()}/reconstruction>; rel="xet-reconstruction-info"',
        "location": f"{hub.url('cdn')}/{hashlib.sha256(WEIGHTS).hexdigest()}?X-Xet-Signed-Range=bytes%3D0-",
    }
    hub.lies["resolve"] = lambda request: answer(302, headers=told) if "safetensors" in request.path else None
    _, found = fetching.run()
    assert found["model.safetensors"].item.sha256 == f"sha256:{hashlib.sha256(WEIGHTS).hexdigest()}"
    asked = [request.path.partition("?")[0] for request in hub.asked]
    assert not [path for path in asked if "xet" in path or "reconstruction" in path]
    # What its chunks would be is nobody's word: other bytes under the same hash are refused.
    hub.lies["cdn"] = lambda request: answer(200, b"x" * SIZE)
    other = Fetching(hub, fetching.root.with_name("other"))
    with pytest.raises(SourceRefused) as refused:
        other.run()
    assert refused.value.code == "digest-mismatch"
