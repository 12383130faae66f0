"""Every refusal and every failure has one shape, names what is wrong, and stores nothing."""

import html
import http.client
import json
import re
import resource
import time
from urllib.parse import urlsplit
from uuid import UUID

import pytest
from sqlalchemy import func, select

from registry import auth
from registry.api.app import assemble
from registry.api.middleware import SECURITY_HEADERS
from registry.cli import program
from registry.tables import Base
from schemas.common import MAX_DOCUMENT_BYTES, sha256_digest
from schemas.problems import PROBLEMS, Problem, problem_from
from tests.support.factories import (
    WEIGHTS,
    bundle_body,
    canary_body,
    file_entry,
    policy_body,
    upload,
)

OPEN = {"/v1/version", "/healthz", "/readyz", "/problems/{kind}"}
PATHS = assemble().openapi()["paths"]
OPERATIONS = [(method, path, operation) for path, methods in PATHS.items() for method, operation in methods.items()]
IDS = [operation["operationId"] for _, _, operation in OPERATIONS]
DIGEST = sha256_digest(b"nothing")
FILLED = {
    "name": "chat@prod",
    "project": "default",
    "kind": "nothing",
    "digest": DIGEST,
    "bundle": DIGEST,
    "number": "1",
    **dict.fromkeys(("release", "run", "runner", "job", "token", "upload"), "01a22898-d199-7470-8203-0958ed552ee6"),
}


@pytest.fixture
def api(shared_api):
    return shared_api


def checked(response, kind=None):
    """The body of a problem, after everything that is true of each has been checked."""
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    problem = PROBLEMS[body["type"].removeprefix("http://sluicegate.test/problems/")]
    assert body["title"] == problem.title
    assert body["status"] == response.status_code == problem.status
    assert body["detail"]
    assert body["instance"] == f"urn:uuid:{body['request_id']}"
    assert response.headers["x-request-id"] == body["request_id"]
    assert UUID(body["request_id"]).version == 7
    assert type(problem_from(body, response.status_code)) is problem
    for place in body.get("errors", []):
        assert set(place) == {"pointer", "detail"}
        assert place["pointer"] == "" or place["pointer"].startswith("/")
    assert not re.search(r"Traceback|\.py\b|sqlalchemy|psycopg|SELECT ", response.text)
    if kind is not None:
        assert problem.kind == kind
    return body


def counted(service):
    with service.database.transaction() as session:
        return {
            table.name: session.scalar(select(func.count()).select_from(table)) for table in Base.metadata.sorted_tables
        }


def stored(service):
    return sorted(path for path in service.settings.storage_dir.rglob("*") if path.is_file())


def test_a_route_that_needs_a_token_refuses_without_one(api):
    needing = [(method, path) for method, path, _ in OPERATIONS if path not in OPEN]
    assert len(needing) > 30
    with api.client(None) as nobody, api.client(auth.new_secret()) as stranger:
        for method, path in needing:
            for client in (nobody, stranger):
                response = client.request(method, path.format(**FILLED), params={"fencing_token": 1})
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"
                if method != "head":
                    checked(response, "unauthenticated")


@pytest.mark.parametrize(
    "authorization", ["", "Basic YTpi", "Bearer", "slg_x", "bearer  slg_ä".encode().decode("latin1")]
)
def test_a_header_that_is_no_bearer_token_is_refused(api, authorization):
    with api.client(None) as nobody:
        checked(nobody.get("/v1/me", headers={"authorization": authorization.encode("latin1")}), "unauthenticated")


def status_of(client, method, url):
    """The status alone: one route's answer has no end."""
    with client.stream(method, url, params={"fencing_token": 1}) as answer:
        return answer.status_code


def test_a_runners_token_opens_nothing_but_what_runners_need(api):
    runner, engineer = api.clients["runner"], api.clients["engineer"]
    for method, path, _ in OPERATIONS:
        if path in OPEN or path == "/v1/me":
            continue
        url = path.format(**FILLED)
        statuses = [status_of(client, method, url) for client in (runner, engineer)]
        is_runners = path.startswith(("/v1/runners", "/v1/jobs")) and method != "get" and not path.endswith("/drains")
        # What it was given as damaged, it may have the service look at.
        is_fetched = (method in {"get", "head"} and path.endswith("{digest}")) or path == "/v1/blobs/{digest}/checks"
        assert (statuses[0] != 403) == (is_runners or is_fetched), (method, path)
        assert not is_runners or statuses[1] == 403, (method, path)


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS, ids=IDS)
def test_every_route_declares_its_problems(method, path, operation):
    declared = operation["responses"]
    refusals = {status: answer for status, answer in declared.items() if status >= "400"}
    assert {"500", "503"} <= set(refusals)
    assert path in OPEN or {"401", "403"} <= set(refusals)
    for answer in refusals.values():
        assert answer["content"] == {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    assert operation.get("security") == ([] if path in OPEN else None)
    assert operation["summary"]
    assert operation["description"]


def test_operations_have_names_of_their_own():
    assert len(set(IDS)) == len(IDS)
    assert all(re.fullmatch(r"[a-z]+([A-Z][a-z]+)*", name) for name in IDS)


def test_an_address_that_is_not_there_and_a_method_that_it_lacks(api):
    client = api.clients["engineer"]
    for path in ("/nothing", "/v1", "/v1/bundles/", "/v2/bundles", "/docs", "/v1/../etc/passwd"):
        checked(client.get(path), "not-found")
    refused = client.delete("/v1/bundles")
    checked(refused, "method-not-allowed")
    assert set(refused.headers["allow"].replace(" ", "").split(",")) <= {"GET", "POST"}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/bundles?limit=0", "query parameter limit"),
        ("/v1/bundles?limit=201", "query parameter limit"),
        ("/v1/bundles?limit=many", 'query parameter limit: is "many", and has to be a whole number'),
        ("/v1/bundles?cursor=%00", "query parameter cursor"),
        ("/v1/bundles?cursor=AAAA", "query parameter cursor"),
        ("/v1/bundles?name=%00", "query parameter name"),
        ("/v1/bundles/sha256:xyz", "path parameter digest"),
        ("/v1/bundles/abc", "path parameter digest"),
        ("/v1/blobs/abcdef0123", "path parameter digest"),
        ("/v1/releases/1", "path parameter release"),
        ("/v1/releases?phase=lost", 'query parameter phase.0: is "lost", which is none of candidate, '),
        ("/v1/releases?phase=canari", 'query parameter phase.0: is "canari", which is none of'),
        ("/v1/targets/chat", "path parameter name"),
        ("/v1/evidence?after=1200", "query parameter after"),
        ("/v1/evidence?stream=release/x&after=-1", "query parameter after"),
        ("/v1/evidence?stream=release/x&after=99999999999999999999", "query parameter after"),
        ("/v1/evidence?stream=release/x&after=AAAAAAAAAAAAAAAAAAAAAA", "query parameter after"),
        ("/v1/evidence?stream=a%00b", "query parameter stream"),
    ],
)
def test_a_parameter_that_is_wrong_is_named(api, path, said):
    body = checked(api.clients["engineer"].get(path), "invalid-document")
    assert body["errors"][0]["detail"].startswith(said)
    assert said in body["detail"]


@pytest.mark.parametrize(
    ("raw", "pointer", "said"),
    [
        (b"{", "", "is not JSON"),
        (b"", "", "is required"),
        (b"[]", "", "is a list, and has to be an object"),
        (b'{"name": "x", "role": "king"}', "/role", 'is "king", which is none of viewer, '),
        (b'{"name": "x"}', "/role", "is required: one of viewer, "),
        (b'{"name": "x", "role": "managr"}', "/role", "did you mean manager?"),
        (b'{"name": "x", "role": "admin", "colour": 1}', "/colour", "is no field here; the fields are name, role, "),
        (b'{"name": "x", "role": "admin", "expires": 1}', "/expires", "did you mean expires_at?"),
        (b'{"name": "\\u0000", "role": "admin"}', "/name", "has to be a name: 1 to 63 of"),
        (b'{"name": "x", "role": "admin", "expires_at": "2020-01-01T00:00:00Z"}', "/expires_at", "not in the future"),
        (b'{"name": "x", "role": "admin", "expires_at": "2090-01-01T00:00:00"}', "/expires_at", "time zone"),
    ],
)
def test_a_message_that_is_wrong_is_refused_at_its_field(api, raw, pointer, said):
    before = counted(api.service)
    response = api.clients["admin"].post("/v1/tokens", content=raw, headers={"content-type": "application/json"})
    places = {place["pointer"]: place["detail"] for place in checked(response, "invalid-document")["errors"]}
    assert said in places[pointer]
    assert counted(api.service) == before


STEP = canary_body()["steps"][0]
BAD = [
    ("bundles", bundle_body(colour="red"), "invalid-document", "/colour"),
    ("bundles", bundle_body(content=b"never uploaded"), "blobs-missing", "/files/0/sha256"),
    (
        "bundles",
        bundle_body(files=[file_entry("model.gguf", WEIGHTS, "weights") | {"sha256": DIGEST}]),
        "blobs-missing",
        "/files/0/sha256",
    ),
    (
        "bundles",
        bundle_body(files=[file_entry("model.gguf", WEIGHTS, "weights") | {"size": 1}]),
        "invalid-document",
        "/files/0/size",
    ),
    ("bundles", bundle_body(files=[file_entry("../x", WEIGHTS, "weights")]), "invalid-document", "/files/0/path"),
    ("policies", policy_body(gates=[*policy_body()["gates"], {"gate": "luck"}]), "invalid-document", "/gates/2/gate"),
    ("policies", policy_body(gates=[]), "invalid-document", "/gates"),
    ("policies", policy_body(gates=None), "invalid-document", "/gates"),
    ("policies", policy_body(canary=canary_body((5000, 5000, 10_000))), "invalid-document", "/canary/steps"),
    ("policies", policy_body(canary=canary_body((5000, 1000, 10_000))), "invalid-document", "/canary/steps"),
    (
        "policies",
        policy_body(canary=canary_body(steps=[STEP | {"weight_bp": 10_000, "min_requests": 1}])),
        "policy-too-weak",
        "/canary/steps/0/min_requests",
    ),
    ("suites", {"schema": "sluicegate.dev/suite/golden/v1"}, "invalid-document", "/name"),
]


def test_bad_documents_are_refused_at_their_field_and_nothing_is_stored(api):
    upload(api.service, api.actor(), WEIGHTS)
    before, files = counted(api.service), stored(api.service)
    for noun, document, kind, pointer in BAD:
        body = checked(api.clients["manager"].post(f"/v1/{noun}", json=document), kind)
        assert pointer in [place["pointer"] for place in body["errors"]], (kind, body["errors"])
        assert pointer in body["detail"] or kind == "blobs-missing"
    wrong = api.clients["manager"].put(f"/v1/blobs/{DIGEST}", content=b"something")
    assert checked(wrong, "digest-mismatch")["expected"] == DIGEST
    assert counted(api.service) == before
    assert stored(api.service) == files


def test_a_document_must_be_announced_as_json(api):
    client = api.clients["engineer"]
    for announced in ("text/plain", "application/yaml", "multipart/form-data; boundary=x"):
        refused = client.post("/v1/suites", content=b"{}", headers={"content-type": announced})
        checked(refused, "unsupported-media-type")
    checked(client.post("/v1/suites", content=b"{}"), "unsupported-media-type")


HUNDRED_MEGABYTES = 100 * 1024 * 1024
CHUNK = b" " * 65536


def sent_whole(api, method, path, chunks, headers):
    """Send as simple clients do: the whole body first, then the answer."""
    address = urlsplit(api.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    headers = {"authorization": f"Bearer {api.tokens['manager']}", "content-type": "application/json", **headers}
    try:
        connection.request(method, path, body=chunks, headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


POSTS = ["/v1/bundles", "/v1/policies", "/v1/suites", "/v1/tokens", "/v1/blobs/missing"]


@pytest.mark.parametrize(("method", "path"), [*(("POST", path) for path in POSTS), ("PUT", "/v1/aliases/live")])
@pytest.mark.parametrize("headers", [{"content-length": str(HUNDRED_MEGABYTES)}, {}])
def test_a_hundred_megabytes_are_refused_without_being_kept(api, method, path, headers):
    sent = 0

    def chunks():
        nonlocal sent
        while sent < HUNDRED_MEGABYTES:
            sent += len(CHUNK)
            yield CHUNK

    before, peak, started = counted(api.service), peak_bytes(), time.monotonic()
    status, body = sent_whole(api, method, path, chunks(), headers)
    assert status == 413
    assert body["type"] == "http://sluicegate.test/problems/too-large"
    is_told_at_once = method == "POST" and "content-length" in headers
    assert body["limit" if is_told_at_once else "detail"] in {
        MAX_DOCUMENT_BYTES,
        f"the body is larger than {MAX_DOCUMENT_BYTES} bytes",
    }
    assert peak_bytes() - peak < 64 * 1024 * 1024
    assert time.monotonic() - started < 30
    assert counted(api.service) == before


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_client_that_asks_first_sends_nothing_in_vain(api):
    """Expect: 100-continue; the answer comes at once, and the connection is not kept waiting for a body."""
    address = urlsplit(api.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=5)
    connection.putrequest("POST", "/v1/bundles")
    connection.putheader("content-length", str(HUNDRED_MEGABYTES))
    connection.putheader("expect", "100-continue")
    connection.endheaders()
    started = time.monotonic()
    assert connection.getresponse().status == 413
    assert time.monotonic() - started < 4
    connection.close()


def test_a_document_of_the_largest_size_is_read(api):
    padded = json.dumps(policy_body("largest")).encode()
    padded += b" " * (MAX_DOCUMENT_BYTES - len(padded))
    client = api.clients["manager"]
    headers = {"content-type": "application/json"}
    assert client.post("/v1/policies", content=padded, headers=headers).status_code == 201
    checked(client.post("/v1/policies", content=padded + b" ", headers=headers), "too-large")


def test_text_that_the_database_cannot_hold_is_refused(api):
    before = counted(api.service)
    fingerprint = {"cpu": "a\0b", "cpu_flags": "avx2", "cores": 2, "memory_bytes": 1, "accelerators": [], "kernel": "6"}
    runner = {"name": "r", "runner_class": "cpu", "fingerprint": fingerprint, "engines": [], "boot_id": "x"}
    refused = api.clients["runner"].post("/v1/runners", json=runner)
    assert checked(refused, "invalid-document")["detail"] == "a value cannot be stored"
    lone = json.dumps(runner).replace("\\u0000", "\\ud800").encode()
    refused = api.clients["runner"].post("/v1/runners", content=lone, headers={"content-type": "application/json"})
    assert checked(refused, "invalid-document")["errors"][0]["pointer"] == "/fingerprint/cpu"
    assert counted(api.service) == before


def test_every_answer_carries_the_security_headers(api):
    for path in ("/v1/me", "/v1/nothing", "/healthz", "/problems/not-found"):
        response = api.clients["engineer"].get(path)
        for name, value in SECURITY_HEADERS.items():
            if name == "content-security-policy" and path.startswith("/problems"):  # a page has a style
                assert response.headers[name].startswith("default-src 'none'; style-src 'self'"), path
            else:
                assert response.headers[name] == value, (path, name)
        assert "server" not in response.headers


@pytest.mark.parametrize("kind", PROBLEMS)
def test_a_problems_type_leads_to_its_description(api, kind):
    page = api.clients["engineer"].get(f"/problems/{kind}")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert PROBLEMS[kind].title in page.text
    assert str(PROBLEMS[kind].status) in page.text
    words = html.unescape(re.sub(r"<[^>]+>", "", page.text))
    assert " ".join(PROBLEMS[kind].__doc__.split()).replace("`", "") in words
    assert f"What to do. {PROBLEMS[kind].advice.replace('`', '')}" in words
    assert PROBLEMS[kind].advice.endswith(".")


def kinds_of(problem):
    """Every kind of problem that a service, its client or the command line can speak of."""
    for one in problem.__subclasses__():
        if not one.__module__.startswith("workers."):  # those stay inside, as reasons in words
            yield one.kind
            yield from kinds_of(one)


def test_every_problem_that_anybody_is_told_of_has_a_page():
    # Looking each up loads the command line and all that it reads, as the service is loaded.
    assert len(list(program.command_line().commands.values())) == len(program.COMMANDS)
    assert {"usage", "defect", "conflict"} <= set(kinds_of(Problem)) == set(PROBLEMS)


def test_an_unknown_kind_of_problem_is_not_found_and_not_repeated_as_html(api):
    refused = api.clients["engineer"].get("/problems/<script>")
    checked(refused, "not-found")


def test_the_service_tells_its_version_and_that_it_works(api):
    with api.client(None) as nobody:
        assert nobody.get("/v1/version").json()["name"] == "sluicegate"
        assert nobody.get("/healthz").json() == {"status": "alive"}
        assert nobody.get("/readyz").json() == {
            "status": "ready",
            "blobs": "reachable",
            "broker": "unreachable",  # there is none here
        }


def test_a_service_without_its_tables_is_not_ready(own_api):
    api = own_api
    with api.service.database.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE entries RENAME TO gone")
    with api.client(None) as nobody:
        assert "not migrated" in checked(nobody.get("/readyz"), "unavailable")["detail"]
        assert nobody.get("/healthz").status_code == 200
    with api.service.database.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE gone RENAME TO entries")


def test_a_database_that_is_gone_is_unavailable_and_says_when_to_come_back(own_api, postgres):
    api = own_api
    name = api.service.database.engine.url.database
    postgres.rename(name, f"{name}_gone")
    try:
        for path in ("/readyz", "/v1/me"):
            refused = api.clients["engineer"].get(path)
            checked(refused, "unavailable")
            assert int(refused.headers["retry-after"]) >= 1
        assert api.clients["engineer"].get("/healthz").status_code == 200
    finally:
        postgres.rename(f"{name}_gone", name)
    assert api.clients["engineer"].get("/v1/me").status_code == 200


def test_a_database_that_only_reads_just_now_keeps_nothing_and_says_when_to_come_back(own_api):
    engine, admin = own_api.service.database.engine, own_api.clients["admin"]
    body = {"name": "again@prod", "runner_class": "cpu", "gateway": "local"}
    key = {"idempotency-key": "once"}

    def let(*, read_only: bool) -> None:
        engine.dispose()  # what is decided here counts for new connections
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("SET default_transaction_read_only = off")
            connection.exec_driver_sql(
                f'ALTER DATABASE "{engine.url.database}" SET default_transaction_read_only = {read_only}'
            )
        engine.dispose()

    let(read_only=True)
    refused = admin.post("/v1/targets", json=body, headers=key)
    checked(refused, "unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    assert admin.get("/v1/targets").json()["items"] == []
    let(read_only=False)
    assert [admin.post("/v1/targets", json=body, headers=key).status_code for _ in range(2)] == [201, 201]
    assert [one["name"] for one in admin.get("/v1/targets").json()["items"]] == ["again@prod"]
