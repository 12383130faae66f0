"""Whatever is sent, by whatever role: the answer is one that the OpenAPI document declares, and no fault of ours."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from schemas.problems import PROBLEMS
from tests.support.api import ROLES
from tests.support.factories import created_target, registered_bundle, registered_golden, registered_policy
from tests.support.fuzz import Call, Fuzz
from tests.support.phases import gated
from tests.support.world import FINGERPRINT

DOCUMENT = json.loads((Path(__file__).parents[2] / "schemas/generated/openapi.json").read_text("utf-8"))
OPERATIONS = [
    (method, path, operation) for path, methods in DOCUMENT["paths"].items() for method, operation in methods.items()
]
IDS = [operation["operationId"] for _, _, operation in OPERATIONS]
EXAMPLES = 5
MARK = "fuzzed"


@pytest.fixture(scope="module")
def filled(shared_api):
    """What exists, by the names under which requests name it."""
    service, actor, runner = shared_api.service, shared_api.actor("manager"), shared_api.clients["runner"]
    release = str(gated(service, actor, f"{MARK}@prod", approval={"required": 9}))
    bundle = registered_bundle(service, actor, MARK).digest
    policy = registered_policy(service, actor, MARK).digest
    suite = registered_golden(service, actor, MARK).digest
    created_target(service, actor, f"{MARK}@staging")
    registration = {
        "name": MARK,
        "runner_class": MARK,
        "fingerprint": FINGERPRINT,
        "engines": ["llamacpp"],
        "boot_id": "b",
    }
    body = {"bundle": bundle, "policy": policy, "runner_class": MARK}
    run = shared_api.clients["engineer"].post("/v1/runs", json=body).json()["id"]
    registered = runner.post("/v1/runners", json=registration).json()["id"]
    claim = runner.post(f"/v1/runners/{registered}/claims").json()
    shared_api.clients["admin"].post("/v1/projects", json={"name": MARK})
    token = shared_api.clients["admin"].post("/v1/tokens", json={"name": MARK, "role": "viewer"}).json()["id"]
    return {
        "release": [release],
        "run": [run],
        "job": [run],
        "runner": [registered],
        "token": [token],
        "digest": [bundle, policy, suite],
        "bundle": [bundle],
        "policy": [policy],
        "suite": [suite],
        "path:name": [f"{MARK}@prod"],
        "target": [f"{MARK}@prod", f"{MARK}@staging"],
        "query:fencing_token": [str(claim["fencing_token"])],
        "runner_class": [MARK],
        "gateway": ["local"],
        "kind": ["staged", "gate_recorded", "replica_changed", "not-found"],
        "project": ["default"],
        "path:project": [MARK],
        "If-Match": ["*", '"gated:6"', '"1"'],
        "Idempotency-Key": ["same"],
        "stream": [f"release/{release}"],
    }


def send(client, call: Call):
    """Send a request. Of an answer that goes on for ever only the beginning is read."""
    request = client.build_request(
        call.method, call.path, params=list(call.query), headers=dict(call.headers), content=call.content
    )
    answer = client.send(request, stream=True)
    try:
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            answer.read()
        return answer
    finally:
        answer.close()


def check(operation, call, role, answer):
    """The answer is one that the document declares, in the shape that it declares."""
    said = f"{role}: {call} was answered with {answer.status_code}"
    assert answer.status_code < 500, said
    declared = operation["responses"].get(str(answer.status_code))
    assert declared is not None, f"{said}, which is not declared"
    announced = answer.headers.get("content-type", "").split(";")[0]
    if answer.status_code < 400:
        kinds = declared.get("content", {})
        assert announced in kinds or (not kinds and not announced) or call.method == "head", f"{said} as {announced}"
    elif call.method != "head":
        assert announced == "application/problem+json", said
        body = answer.json()
        kind = PROBLEMS[body["type"].rsplit("/", 1)[1]]
        assert kind.status == body["status"] == answer.status_code, said


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS, ids=IDS)
def test_every_operation_answers_as_declared_whatever_is_sent_by_whom(shared_api, filled, method, path, operation):
    calls = Fuzz(DOCUMENT, filled).calls(method, path, operation)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.large_base_example],
    )
    @given(call=calls)
    def answered(call):
        for role in ROLES:
            answer = send(shared_api.clients[role], call)
            check(operation, call, role, answer)

    answered()


def test_the_check_sees_a_status_that_is_not_declared_and_a_fault(shared_api):
    client, call = shared_api.clients["viewer"], Call("get", "/v1/releases/nothing", (), {}, None)
    answer = send(client, call)
    with pytest.raises(AssertionError, match="not declared"):
        check({"responses": {"200": {}}}, call, "viewer", answer)
    check(DOCUMENT["paths"]["/v1/releases/{release}"]["get"], call, "viewer", answer)
    answer.status_code = 500
    with pytest.raises(AssertionError, match="answered with 500"):
        check({"responses": {"500": {}}}, call, "viewer", answer)


def test_every_role_is_let_in_somewhere_by_what_exists(shared_api, filled):
    """Otherwise nothing but refusals would have been tried."""
    release, run = filled["release"][0], filled["run"][0]
    for role in set(ROLES) - {"runner"}:
        for path in (f"/v1/releases/{release}", f"/v1/runs/{run}", "/v1/targets", "/v1/evidence"):
            assert shared_api.clients[role].get(path).status_code == 200, (role, path)
    assert shared_api.clients["runner"].get(f"/v1/bundles/{filled['bundle'][0]}").status_code == 200
