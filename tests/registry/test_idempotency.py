"""A request under an Idempotency-Key is done once and answered alike, however often and by how many it is sent."""

import json
from datetime import timedelta

import pytest
from sqlalchemy import func, select, text, update

from registry import auth, db
from registry.client import Client
from registry.tables import AnswerRow, JobRow, ReleaseRow, TargetRow, TokenRow
from schemas.api import ReleaseCreate, TokenCreate
from schemas.problems import KeyReused
from tests.support.factories import created_target, registered_bundle, registered_golden, registered_policy
from tests.support.scripted_http import ScriptedHttp, answer
from tests.support.together import together

KEY = {"idempotency-key": "pipeline-17"}


@pytest.fixture
def documents(api):
    """What every kind of creation needs, in the project of the tokens."""
    actor = api.actor("manager")
    created_target(api.service, actor)
    return {
        "bundle": registered_bundle(api.service, actor).digest,
        "policy": registered_policy(api.service, actor).digest,
        "suite": registered_golden(api.service, actor).digest,
    }


def creations(documents):
    bundle, policy, suite = documents["bundle"], documents["policy"], documents["suite"]
    return {
        "releases": ({"target": "chat@prod", "bundle": bundle, "policy": policy}, ReleaseRow),
        "runs": ({"bundle": bundle, "policy": policy, "runner_class": "cpu"}, JobRow),
        "recordings": ({"suite": suite, "bundle": bundle, "target": "chat@prod", "reason": "read"}, JobRow),
        "targets": ({"name": "other@prod", "runner_class": "cpu", "gateway": "local"}, TargetRow),
        "tokens": ({"name": "bo", "role": "viewer"}, TokenRow),
    }


NOUNS = ("releases", "runs", "recordings", "targets", "tokens")


def count(api, table):
    with api.service.database.transaction() as session:
        return session.scalar(select(func.count()).select_from(table))


@pytest.mark.parametrize("noun", NOUNS)
def test_sent_again_under_its_key_a_request_is_answered_alike_and_done_once(api, documents, noun):
    body, table = creations(documents)[noun]
    admin, before = api.clients["admin"], count(api, table)
    first = admin.post(f"/v1/{noun}", json=body, headers=KEY)
    again = admin.post(f"/v1/{noun}", json=dict(reversed(body.items())), headers=KEY)
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.content == first.content
    assert (first.headers.get("idempotency-replayed"), again.headers.get("idempotency-replayed")) == (None, "true")
    assert count(api, table) == before + 1


@pytest.mark.parametrize("noun", NOUNS)
def test_two_at_once_under_one_key_make_one_row_and_get_one_answer(api, documents, noun):
    body, table = creations(documents)[noun]
    before = count(api, table)

    def send():
        with api.client(api.tokens["admin"]) as client:
            return client.post(f"/v1/{noun}", json=body, headers=KEY)

    answers = together(*[send] * 4)
    assert [one.status_code for one in answers] == [201] * 4
    assert len({one.content for one in answers}) == 1
    assert sorted(one.headers.get("idempotency-replayed", "") for one in answers) == ["", "true", "true", "true"]
    assert count(api, table) == before + 1


def test_another_body_under_the_same_key_is_refused_and_each_difference_named(api, documents):
    body, _ = creations(documents)["targets"]
    admin = api.clients["admin"]
    assert admin.post("/v1/targets", json=body, headers=KEY).status_code == 201
    refused = admin.post("/v1/targets", json=body | {"name": "third@prod", "runner_class": "gpu"}, headers=KEY)
    assert refused.status_code == 409
    assert refused.json()["type"].endswith("/key-reused")
    assert refused.json()["errors"] == [
        {"pointer": "/name", "detail": 'was "other@prod" under this key'},
        {"pointer": "/runner_class", "detail": 'was "cpu" under this key'},
    ]
    elsewhere = admin.post("/v1/tokens", json={"name": "bo", "role": "viewer"}, headers=KEY)
    assert elsewhere.status_code == 409
    assert elsewhere.json()["request"] == "POST /v1/targets"
    assert count(api, AnswerRow) == 1


def test_a_key_is_its_caller_s_own(api):
    body = {"name": "bo", "role": "viewer"}
    with Client(api.url, api.tokens["admin"]) as client:
        other = client.tokens.create(TokenCreate(name="root", role="admin"))
    assert api.clients["admin"].post("/v1/tokens", json=body, headers=KEY).status_code == 201
    with api.client(other.secret) as stranger:
        assert stranger.post("/v1/tokens", json=body, headers=KEY).json()["type"].endswith("/conflict")


def test_what_was_refused_may_be_tried_again_under_its_key(api, documents):
    body, _ = creations(documents)["releases"]
    wrong = body | {"target": "later@prod"}
    engineer = api.clients["engineer"]
    assert engineer.post("/v1/releases", json=wrong, headers=KEY).status_code == 404
    assert count(api, AnswerRow) == 0
    created_target(api.service, api.actor("manager"), "later@prod")
    assert engineer.post("/v1/releases", json=wrong, headers=KEY).status_code == 201


def test_a_new_token_s_secret_is_given_again_and_still_nowhere_in_the_database(api):
    body = {"name": "bo", "role": "viewer"}
    made = api.clients["admin"].post("/v1/tokens", json=body, headers=KEY).json()
    assert auth.is_secret(made["secret"])
    with api.service.database.transaction() as session:
        rows = session.execute(text("SELECT * FROM answers")).all()
    assert rows
    raw = repr(rows).encode() + b"".join(value for row in rows for value in row if isinstance(value, bytes))
    for word in (made["secret"], made["id"], KEY["idempotency-key"], api.tokens["admin"]):
        assert word.encode() not in raw


def test_an_answer_is_kept_for_a_while_and_then_cleared_away(api):
    admin = api.clients["admin"]
    for number in range(3):
        body = {"name": f"t{number}@prod", "runner_class": "cpu", "gateway": "local"}
        assert admin.post("/v1/targets", json=body, headers={"idempotency-key": f"k{number}"}).status_code == 201
    with api.service.database.transaction() as session:
        session.execute(update(AnswerRow).values(expires_at=db.now(session) - timedelta(seconds=1)))
    refused = admin.post("/v1/targets", json=body, headers={"idempotency-key": "k2"})
    assert refused.json()["type"].endswith("/conflict")
    admin.post("/v1/targets", json=body | {"name": "t3@prod"}, headers={"idempotency-key": "k3"})
    assert count(api, AnswerRow) == 1


@pytest.mark.parametrize("key", ["", "with space", "x" * 256, "ä"])
def test_a_key_that_is_none_is_refused(api, key):
    body = {"name": "bo", "role": "viewer"}
    refused = api.clients["admin"].post("/v1/tokens", json=body, headers={"idempotency-key": key.encode("latin1")})
    assert refused.status_code == 422
    assert "Idempotency-Key" in refused.json()["detail"]


# ------------------------------------------------------------------------------------------ the client


def test_the_client_sends_a_creation_again_under_one_key_when_the_connection_breaks():
    made = {"id": "01a22898-d199-7470-8203-0958ed552ee6", "name": "bo", "role": "viewer", "secret": "s"}
    said = answer(201, json.dumps(made | {"expires_at": None, "targets": None}).encode())
    asked = []

    def script(request):
        asked.append(request)
        return None if len(asked) < 3 else said

    with ScriptedHttp(script) as http, Client(http.url, "token") as client:
        assert client.tokens.create(TokenCreate(name="bo", role="viewer")).name == "bo"
        keys = [request.headers["idempotency-key"] for request in asked]
        assert len(keys) == 3
        assert len(set(keys)) == 1
        client.tokens.create(TokenCreate(name="bo", role="viewer"))
        client.tokens.create(TokenCreate(name="bo", role="viewer"), key="mine")
    assert asked[3].headers["idempotency-key"] != keys[0]
    assert asked[4].headers["idempotency-key"] == "mine"


def test_a_pipeline_that_runs_again_gets_its_release_by_its_key(api, documents, command):
    command.be("ci", api)
    words = ("release", "create", "-t", "chat@prod", "-b", documents["bundle"], "-p", documents["policy"])
    first = command.ok(*words, "--key", "build-17", "--json").json["id"]
    assert command.ok(*words, "--key", "build-17", "--json").json["id"] == first
    assert command(*words, "--key", "build-18").status == 4
    changed = command(*words, "--key", "build-17", "--reason", "another")
    assert changed.status == 4
    assert "/reason: was null under this key" in changed.err


def test_a_reused_key_is_raised_as_such(api, documents):
    with Client(api.url, api.tokens["engineer"]) as client:
        body = ReleaseCreate(target="chat@prod", bundle=documents["bundle"], policy=documents["policy"])
        client.releases.create(body, key="one")
        with pytest.raises(KeyReused):
            client.releases.create(body.model_copy(update={"reason": "other"}), key="one")
