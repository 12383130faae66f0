import hashlib
import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import certifi
import pytest

from registry.client import Client, transport
from schemas import problems
from schemas.api import ProjectCreate, TokenCreate
from schemas.bundle import Bundle
from schemas.common import sha256_digest
from schemas.evidence import Kind
from schemas.policy import Policy
from schemas.problems import PROBLEMS
from schemas.suite import GoldenSuite
from tests.support.certificates import certify
from tests.support.factories import WEIGHTS, bundle_body, golden_body, policy_body
from tests.support.scripted_http import ScriptedHttp, answer
from tests.support.secured import secured

VERSION = json.dumps({"name": "sluicegate", "version": "0.1.0", "interface": "v1"}).encode()


@contextmanager
def scripted(script, **options):
    """A client, and the server that answers it as a test wrote."""
    with ScriptedHttp(script) as http, Client(http.url, "token", **options) as client:
        yield client, http


def closed_port() -> str:
    with ScriptedHttp(lambda asked: None) as gone:
        return gone.url


# ------------------------------------------------------------------------------------------------------ TLS


def test_with_tls_the_known_authorities_are_believed_and_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "RETRY_PAUSES_SECONDS", ())
    certificate, key = certify(tmp_path, "127.0.0.1")
    with (
        ScriptedHttp(lambda asked: answer(200, VERSION)) as http,
        secured(certificate, key, int(http.url.rpartition(":")[2])) as port,
    ):
        url = f"https://127.0.0.1:{port}"
        with Client(url, "token") as client, pytest.raises(problems.Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
            client.version()
        assert http.asked == []
        monkeypatch.setattr(certifi, "where", lambda: str(certificate))
        with Client(url, "token") as client:
            assert client.version().name == "sluicegate"


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("kind", PROBLEMS, ids=str)
def test_a_refusal_is_raised_as_the_class_that_the_service_named(kind):
    problem = PROBLEMS[kind]("because", errors=[{"pointer": "/name", "detail": "is wrong"}])
    raw = json.dumps(problem.body("http://there") | {"request_id": "1"}).encode()
    said = answer(problem.status, raw, kind="application/problem+json")
    with scripted(lambda asked: said) as (client, _), pytest.raises(type(problem)) as raised:
        client.me()
    assert type(raised.value) is type(problem)
    assert raised.value.detail == "because"
    assert raised.value.members == {"errors": [{"pointer": "/name", "detail": "is wrong"}], "request_id": "1"}


@pytest.mark.parametrize(
    ("status", "raised"),
    [
        (301, problems.InternalError),
        (400, problems.InternalError),
        (401, problems.Unauthenticated),
        (403, problems.NotPermitted),
        (404, problems.NotFound),
        (413, problems.TooLarge),
        (500, problems.InternalError),
        (502, problems.Unavailable),
        (503, problems.Unavailable),
    ],
)
@pytest.mark.parametrize("raw", [b"<html>", b"[]", b'{"type": "about:blank"}', b""])
def test_a_refusal_in_other_words_is_told_by_its_status(status, raised, raw):
    said = f"GET /v1/version was answered with {status}"
    with scripted(lambda asked: answer(status, raw)) as (client, _), pytest.raises(raised, match=said) as told:
        client.version()
    assert ("the gateway's address" in str(told.value)) == (status == 404)


@pytest.mark.parametrize("raw", [b"<html>hello</html>", b"{}", b'{"name": 1}', b"", b"\xff"])
def test_an_answer_that_is_not_ours_is_not_believed(raw):
    said = "Is the address right"
    with scripted(lambda asked: answer(200, raw)) as (client, _), pytest.raises(problems.Unavailable, match=said):
        client.version()


def test_a_newer_service_may_say_more():
    raw = json.dumps(json.loads(VERSION) | {"more": True}).encode()
    with scripted(lambda asked: answer(200, raw)) as (client, _):
        assert client.version().interface == "v1"


# ---------------------------------------------------------------------------------------------- connections


def test_a_service_that_is_not_there_is_unavailable_after_a_few_tries():
    with Client(closed_port(), None) as client, pytest.raises(problems.Unavailable, match="cannot be reached"):
        client.version()


def test_reading_is_tried_again_when_the_connection_breaks():
    answers = iter([None, answer(200, VERSION, length=10_000), answer(200, VERSION)])
    with scripted(lambda asked: next(answers)) as (client, http):
        assert client.version().name == "sluicegate"
        assert len(http.asked) == 3


def test_doing_is_not_repeated_once_it_may_have_arrived():
    with scripted(lambda asked: None) as (client, http):
        with pytest.raises(problems.Unavailable, match="Whether it did what was asked is not known"):
            client.releases.pause(uuid4(), "because")
        assert len(http.asked) == 1


def test_a_refusal_is_not_tried_again():
    with scripted(lambda asked: answer(503)) as (client, http):
        with pytest.raises(problems.Unavailable):
            client.version()
        assert len(http.asked) == 1


def test_silence_ends_after_the_time_given():
    hurried = scripted(lambda asked: time.sleep(0.5), timeout_seconds=0.1)
    with hurried as (client, _), pytest.raises(problems.Unavailable, match="no answer in time"):
        client.releases.pause(uuid4(), "because")


def test_the_token_and_the_version_are_sent_and_no_proxy_is_asked(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with ScriptedHttp(lambda asked: answer(200, VERSION)) as http, Client(http.url + "/", "slg_secret") as client:
        client.version()
    assert http.asked[0].headers["authorization"] == "Bearer slg_secret"
    assert http.asked[0].headers["user-agent"].startswith("sluicegate/")
    assert http.asked[0].path == "/v1/version"


def test_an_answer_that_cannot_be_unpacked_is_unavailable():
    packed = answer(200, b"not gzip").replace(b"connection:", b"content-encoding: gzip\r\nconnection:")
    with scripted(lambda asked: packed) as (client, _), pytest.raises(problems.Unavailable, match="broke off"):
        client.version()


@pytest.mark.parametrize(
    ("url", "is_in_clear"),
    [
        ("http://127.0.0.1:1", False),
        ("http://[::1]:1", False),
        ("http://localhost:1", False),
        ("https://sluicegate.example", False),
        ("http://sluicegate.example", True),
        ("http://127.0.0.1.example", True),
    ],
)
def test_the_client_knows_when_others_can_read_the_token(url, is_in_clear):
    with Client(url, "token") as client:
        assert client.is_in_clear is is_in_clear


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://host", "http://", "http://[::1"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ValueError, match="is not a URL"):
        Client(url, None)


@pytest.mark.parametrize("token", ["", "a b", "a\r\nx: y", "ü"])
def test_what_is_no_token_is_refused_before_it_becomes_a_header(token):
    with pytest.raises(ValueError, match="token"):
        Client("http://127.0.0.1:1", token)


# ------------------------------------------------------------------------------------------------------ bytes


def test_a_broken_download_leaves_nothing_behind(tmp_path):
    digest = sha256_digest(b"abc")
    cut = scripted(lambda asked: answer(200, b"ab", length=3))
    with cut as (client, _), pytest.raises(problems.Unavailable, match="in the middle of an answer"):
        client.blobs.download(digest, tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_bytes_with_another_digest_are_never_put_in_place(tmp_path):
    (tmp_path / "file").write_text("before")
    with scripted(lambda asked: answer(200, b"other")) as (client, _):
        with pytest.raises(problems.DigestMismatch):
            client.blobs.download(sha256_digest(b"abc"), tmp_path / "file")
        with pytest.raises(problems.DigestMismatch):
            client.blobs.read(sha256_digest(b"abc"), limit=10)
        with pytest.raises(problems.DigestMismatch, match="larger than"):
            client.blobs.read(sha256_digest(b"other"), limit=4)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "before"


def test_a_link_is_not_sent(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with Client("http://127.0.0.1:1", "token") as client, pytest.raises(OSError, match="symbolic link"):
        client.blobs.upload(sha256_digest(b"secret"), tmp_path / "link")


# -------------------------------------------------------------------------------------------- the real service


@pytest.fixture
def engineer(api):
    with Client(api.url, api.tokens["engineer"]) as client:
        yield client


@pytest.fixture
def manager(api):
    with Client(api.url, api.tokens["manager"]) as client:
        yield client


def test_the_client_knows_who_it_is(engineer, api):
    assert (engineer.me().project, engineer.me().role) == ("default", "engineer")
    assert engineer.version().name == "sluicegate"
    with Client(api.url, "slg_wrong") as stranger, pytest.raises(problems.Unauthenticated):
        stranger.me()


def test_blobs_go_there_and_back(engineer, tmp_path):
    raw = bytes(range(256)) * 20_000
    digest = sha256_digest(raw)
    (tmp_path / "there").write_bytes(raw)
    sent, received = [], []

    assert engineer.blobs.missing([digest, digest]) == [digest]
    assert engineer.blobs.size(digest) is None
    assert engineer.blobs.upload(digest, tmp_path / "there", progress=sent.append).size == len(raw)
    assert engineer.blobs.missing([digest]) == []
    assert engineer.blobs.size(digest) == len(raw)
    assert engineer.blobs.download(digest, tmp_path / "back", progress=received.append) == len(raw)

    assert hashlib.sha256((tmp_path / "back").read_bytes()).hexdigest() == digest[7:]
    assert sum(sent) == sum(received) == len(raw)
    assert engineer.blobs.read(digest, limit=len(raw)) == raw


def test_an_empty_blob_is_a_blob(engineer, tmp_path):
    (tmp_path / "empty").touch()
    engineer.blobs.upload(sha256_digest(b""), tmp_path / "empty")
    assert engineer.blobs.read(sha256_digest(b""), limit=0) == b""


def test_a_file_that_changed_since_it_was_hashed_is_not_stored(engineer, tmp_path):
    (tmp_path / "file").write_bytes(b"changed")
    with pytest.raises(problems.DigestMismatch):
        engineer.blobs.upload(sha256_digest(b"before"), tmp_path / "file")
    assert engineer.blobs.size(sha256_digest(b"before")) is None
    assert engineer.blobs.size(sha256_digest(b"changed")) is None


def test_a_large_upload_that_is_refused_early_hears_why(api, tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(64 * 1024 * 1024)
    with Client(api.url, "slg_wrong") as client, pytest.raises(problems.Unauthenticated):
        client.blobs.upload(sha256_digest(b""), tmp_path / "large")


def test_documents_are_registered_once_and_found_by_digest_and_prefix(engineer, tmp_path):
    (tmp_path / "weights").write_bytes(WEIGHTS)
    engineer.blobs.upload(sha256_digest(WEIGHTS), tmp_path / "weights")
    bundle = Bundle.model_validate(bundle_body())

    first, is_new = engineer.bundles.register(bundle)
    again, is_new_again = engineer.bundles.register(json.dumps(bundle_body(), indent=2).encode())

    assert (is_new, is_new_again) == (True, False)
    assert again == first
    assert first.digest == bundle.digest
    assert engineer.bundles.get(bundle.digest[7:17]).digest == bundle.digest
    assert [one.digest for one in engineer.bundles.list(name="chat")] == [bundle.digest]
    assert list(engineer.bundles.list(name="other")) == []


def test_what_is_wrong_with_a_document_is_raised_with_its_places(engineer, manager):
    with pytest.raises(problems.BlobsMissing) as missing:
        engineer.bundles.create(Bundle.model_validate(bundle_body()))
    assert missing.value.members["missing"]
    with pytest.raises(problems.InvalidDocument) as invalid:
        manager.policies.create(json.dumps(policy_body() | {"extra": 1}).encode())
    assert [error["pointer"] for error in invalid.value.members["errors"]] == ["/extra"]
    with pytest.raises(problems.NotPermitted):
        engineer.policies.create(Policy.model_validate(policy_body()))
    with pytest.raises(problems.NotFound):
        engineer.suites.get("sha256:" + "0" * 64)


def test_lists_go_on_past_one_page(engineer, api, monkeypatch):
    monkeypatch.setattr(transport, "PAGE_SIZE", 3)
    count = 10
    for number in range(count):
        engineer.suites.create(GoldenSuite.model_validate(golden_body(name=f"suite-{number}")))
    names = [suite.name for suite in engineer.suites.list()]
    assert names == [f"suite-{number}" for number in reversed(range(count))]
    sequences = [entry.sequence for entry in engineer.evidence.list()]
    assert sequences == sorted(set(sequences))
    assert len(sequences) >= count
    backwards = [entry.sequence for entry in engineer.evidence.list(newest_first=True)]
    assert backwards == sequences[::-1]
    stream = f"project/{api.project_id}"
    there = [entry.id for entry in engineer.evidence.list(stream=stream)]
    assert [entry.id for entry in engineer.evidence.list(stream=stream, newest_first=True)] == there[::-1]


def test_a_stream_is_read_on_from_a_sequence(engineer, api):
    everything = list(engineer.evidence.list(stream=f"project/{api.project_id}"))
    assert len(everything) >= 4
    rest = engineer.evidence.list(stream=f"project/{api.project_id}", after=everything[-2].sequence)
    assert [entry.id for entry in rest] == [everything[-1].id]


def test_evidence_is_read_and_verified(engineer):
    registered = engineer.suites.create(GoldenSuite.model_validate(golden_body()))
    (entry,) = [one for one in engineer.evidence.list(envelopes=True) if one.kind is Kind.SUITE_REGISTERED]
    assert entry.body["digest"] == registered.digest
    assert [one.id for one in engineer.evidence.list(stream=entry.stream)] == [entry.id]
    assert entry.envelope
    assert entry.key_id in {key.key_id for key in engineer.evidence.public_keys()}
    assert engineer.evidence.verify().verified
    assert engineer.evidence.verify(stream=entry.stream).entries == 1


def test_an_administrator_makes_projects_and_tokens(api):
    with Client(api.url, api.tokens["admin"]) as admin:
        admin.projects.create(ProjectCreate(name="other"))
        assert {project.name for project in admin.projects.list()} >= {"default", "other"}
        made = admin.tokens.create(TokenCreate(name="pipeline", role="engineer", expires_at=None, project="other"))
    with Client(api.url, made.secret) as client:
        assert client.me().project == "other"


def test_the_client_needs_nothing_of_the_service():
    code = (
        "import sys, registry.client\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))\n"
        "print(sorted(name for name in sys.modules if name.startswith('registry.')))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    packages, ours = ran.stdout.splitlines()
    for heavy in ("sqlalchemy", "celery", "fastapi", "starlette", "psycopg", "redis", "scipy", "numpy", "aiohttp"):
        assert f"'{heavy}'" not in packages
    assert "registry.db" not in ours
