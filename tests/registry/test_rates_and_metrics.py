"""No token keeps the others from being answered, what the service does can be watched, and its log searched."""

import json
import re
import socket
import time

import httpx
import pytest
import structlog

from gates.plain import NO_AUTHORITY
from registry.api.metrics import UNMATCHED, Board, Requests
from registry.api.rates import KEPT, Rates
from registry.client import Client, transport
from registry.service import Service
from schemas.common import sha256_digest
from schemas.problems import TooManyRequests
from schemas.release import Phase
from schemas.runner import JobState
from tests.support.api import Api
from tests.support.factories import created_target, registered_bundle, registered_policy, started_release
from tests.support.scripted_http import ScriptedHttp, answer
from tests.support.uploads import begin

NOBODY = "01a22898-d199-7470-8203-0958ed552ee6"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


# ------------------------------------------------------------------------------------------------ rates


def test_a_token_may_send_a_burst_and_then_as_many_as_the_rate_lets_it():
    clock = Clock()
    rates = Rates(2.0, 5, clock)
    assert [rates.take("kim") for _ in range(5)] == [0.0] * 5
    assert rates.take("kim") == pytest.approx(0.5)
    clock.now += 0.25
    assert rates.take("kim") == pytest.approx(0.25)
    assert rates.take("jo") == 0.0
    clock.now += 0.25
    assert rates.take("kim") == 0.0
    clock.now += 3600
    assert [rates.take("kim") for _ in range(6)] == [0.0] * 5 + [pytest.approx(0.5)]


def test_no_rate_lets_everything_through():
    rates = Rates(0, 1, Clock())
    assert {rates.take("kim") for _ in range(1000)} == {0.0}


def test_tokens_that_were_silent_longest_are_forgotten_first():
    rates = Rates(1.0, 1, Clock())
    for number in range(KEPT + 10):
        rates.take(f"t{number}")
        rates.take("busy")
    assert len(rates._buckets) == KEPT
    assert rates.take("busy") > 0
    assert rates.take("t0") == 0.0


@pytest.fixture
def narrow(committed):
    """The interface of a service that takes three requests of a token at once, and one in ten seconds."""
    settings = committed.settings.model_copy(update={"requests_per_second": 0.1, "requests_burst": 3})
    with Api(Service(settings, committed.database, committed.signer, committed.blobs)) as running:
        yield running


def test_who_sends_too_much_is_told_how_long_to_wait_and_others_are_not(narrow):
    engineer = narrow.clients["engineer"]
    assert [engineer.get("/v1/me").status_code for _ in range(4)] == [200, 200, 200, 429]
    refused = engineer.get("/v1/targets")
    assert refused.json()["type"].endswith("/too-many-requests")
    assert 1 <= int(refused.headers["retry-after"]) == refused.json()["retry_after_seconds"] <= 10
    assert narrow.clients["manager"].get("/v1/me").status_code == 200
    assert engineer.get("/healthz").status_code == 200


def test_guesses_of_a_token_are_limited_as_well(narrow):
    with narrow.client("slg_" + "A" * 43) as stranger:
        assert [stranger.get("/v1/me").status_code for _ in range(4)] == [401, 401, 401, 429]


def test_the_client_waits_as_long_as_it_is_told_and_then_asks_again(monkeypatch):
    busy = answer(429, json.dumps(TooManyRequests("busy").body("http://there")).encode())
    busy = busy.replace(b"content-type", b"retry-after: 3\r\ncontent-type")
    version = answer(200, json.dumps({"name": "sluicegate", "version": "0.1.0", "interface": "v1"}).encode())
    slept, said = [], [busy, busy, version]
    monkeypatch.setattr(transport.time, "sleep", slept.append)
    with ScriptedHttp(lambda asked: said.pop(0)) as http, Client(http.url, "token") as client:
        assert client.version().version == "0.1.0"
    assert slept == [3.0, 3.0]
    with ScriptedHttp(lambda asked: busy) as http, Client(http.url, "token") as client:
        with pytest.raises(TooManyRequests):
            client.version()
        assert len(http.asked) == transport.BUSY_TRIES


# ---------------------------------------------------------------------------------------------- metrics


def scraped(api, role="viewer"):
    told = api.clients[role].get("/v1/metrics")
    assert told.status_code == 200
    assert told.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = {}
    for line in told.text.splitlines():
        if not line.startswith("#"):
            assert re.fullmatch(r'[a-z_]+(\{[a-z]+="[^"\\]*"(,[a-z]+="[^"\\]*")*\})? [0-9.]+', line), line
            name, value = line.rsplit(" ", 1)
            assert name not in values
            values[name] = float(value)
    return values


def test_requests_are_counted_by_route_and_class_and_never_by_what_callers_choose(api):
    engineer = api.clients["engineer"]
    for path in (f"/v1/releases/{NOBODY}", "/v1/releases/1", "/v1/bundles?limit=0", "/v1/nothing/else", "/v1/targets"):
        engineer.get(path)
    engineer.request("BREW", "/v1/targets")
    values = scraped(api)

    def count(method, route, status):
        return values[f'sluicegate_requests_total{{method="{method}",route="{route}",status="{status}"}}']

    assert count("GET", "/v1/releases/{release}", "4xx") == 2
    assert count("GET", "/v1/bundles", "4xx") == 1
    assert count("GET", "/v1/targets", "2xx") == 1
    assert count("GET", UNMATCHED, "4xx") == 1
    assert not [name for name in values if NOBODY in name or "else" in name or "BREW" in name]


def test_a_caller_that_hangs_up_in_its_body_is_no_failure_of_the_service_and_no_refusal(api):
    head = "Host: x\r\nContent-Type: application/json\r\nContent-Length: 100"
    upload = begin(api.clients["manager"], bytes(100))["id"]
    asked = (
        ("POST", "/v1/bundles", "/v1/bundles"),
        ("POST", "/v1/releases", "/v1/releases"),
        ("PUT", f"/v1/blobs/{sha256_digest(b'x')}", "/v1/blobs/{digest}"),
        ("PATCH", f"/v1/uploads/{upload}", "/v1/uploads/{upload}"),
    )
    for method, path, _ in asked:
        with socket.create_connection(("127.0.0.1", httpx.URL(api.url).port)) as connection:
            token = f"Authorization: Bearer {api.tokens['manager']}\r\nUpload-Offset: 0"
            connection.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n{token}\r\n\r\n{{".encode())

    def counted():
        return {name for name in scraped(api) if "requests_total" in name and '"2xx"' not in name}

    deadline = time.monotonic() + 30
    while len(found := counted()) < len(asked):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    assert found == {
        f'sluicegate_requests_total{{method="{method}",route="{route}",status="closed"}}' for method, _, route in asked
    }


def test_labels_stay_few_whatever_is_asked():
    requests = Requests(["/v1/targets"], Board())
    for number in range(1000):
        requests.add({"method": f"M{number}"}, 404, 0.1)
    assert len(list(requests.lines())) == 6


def test_processes_add_up_and_one_that_takes_anothers_place_counts_on():
    board = Board(2)
    asked = {"method": "GET"}
    for place in (0, 1, 1):
        Requests([], board, place).add(asked, 200, 0.25)
    labels = f'{{method="GET",route="{UNMATCHED}",status="2xx"}}'
    assert f"sluicegate_requests_total{labels} 3" in list(Requests([], board).lines())
    assert f"sluicegate_request_seconds_total{labels} 0.750000" in list(Requests([], board, 1).lines())


def test_more_routes_than_a_board_has_room_for_are_refused():
    with pytest.raises(ValueError, match="no room"):
        Requests(map(str, range(1000)), Board())


def test_releases_jobs_entries_and_lag_are_told(api):
    before = scraped(api)
    assert {name for name in before if name.startswith("sluicegate_releases")} == {
        f'sluicegate_releases{{phase="{phase}"}}' for phase in Phase
    }
    assert {name for name in before if name.startswith("sluicegate_jobs")} == {
        f'sluicegate_jobs{{state="{state}"}}' for state in JobState
    }
    assert before["sluicegate_sweep_lag_seconds"] == 0
    actor = api.actor("manager")
    started_release(api.service, actor)
    run = {"bundle": registered_bundle(api.service, actor).digest, "runner_class": "cpu"}
    policy = registered_policy(api.service, actor, "other").digest
    api.clients["engineer"].post("/v1/runs", json=run | {"policy": policy})
    after = scraped(api)
    assert after['sluicegate_releases{phase="candidate"}'] == 1
    assert after['sluicegate_jobs{state="pending"}'] == 1
    assert after["sluicegate_entries"] > before["sluicegate_entries"]
    # Nobody sweeps here, and no runner asks.
    assert after["sluicegate_sweep_lag_seconds"] > 0
    assert after["sluicegate_job_wait_seconds"] > 0


def test_numbers_of_every_project_are_not_another_project_s_business(api):
    admin = api.clients["admin"]
    admin.post("/v1/projects", json={"name": "team-b"})
    secret = admin.post("/v1/tokens", json={"name": "bo", "role": "admin", "project": "team-b"}).json()["secret"]
    with api.client(secret) as bo:
        assert bo.get("/v1/metrics").status_code == 403
    assert api.clients["runner"].get("/v1/metrics").status_code == 403


# ------------------------------------------------------------------------------------- logs and browsers


def test_the_log_names_the_release_that_a_request_is_about_and_the_one_that_it_made(api):
    actor = api.actor("manager")
    created_target(api.service, actor)
    body = {
        "target": "chat@prod",
        "bundle": registered_bundle(api.service, actor).digest,
        "policy": registered_policy(api.service, actor).digest,
    }
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logged:
        made = api.clients["engineer"].post("/v1/releases", json=body)
        identity = made.json()["id"]
        shown = api.clients["viewer"].get(f"/v1/releases/{identity}")
        api.clients["viewer"].get("/v1/releases/nothing")
    assert made.headers["location"] == f"/v1/releases/{identity}"
    lines = [(line["request_id"], line.get("release")) for line in logged if line["event"] == "request"]
    assert lines[0] == (made.headers["x-request-id"], identity)
    assert lines[1] == (shown.headers["x-request-id"], identity)
    assert lines[2][1] is None


def test_other_sites_in_a_browser_get_no_leave_to_read(api):
    asking = {"origin": "https://elsewhere.test", "access-control-request-method": "POST"}
    engineer = api.clients["engineer"]
    answers = [
        engineer.options("/v1/releases", headers=asking),
        engineer.get("/v1/me", headers=asking),
        engineer.get("/v1/nothing", headers=asking),
        httpx.get(f"{api.url}/v1/version", headers=asking, trust_env=False, verify=NO_AUTHORITY),
    ]
    assert [one.status_code for one in answers] == [405, 200, 404, 200]
    for one in answers:
        assert not [name for name in one.headers if name.startswith("access-control-")]
