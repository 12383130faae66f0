"""What Envoy does with the documents: routes, errors, failover, and what its log tells."""

import contextlib
import http.client
import json
import socket
import subprocess

import pytest

from gates.router import Arm, Split
from tests.support.gateway import TARGET, arm, ask_many, shares, split, wait_until
from tests.support.streams import Script, stream_engine
from workers.traffic import envoy_config
from workers.traffic.envoy import EnvoyGateway


def records(running, count):
    """Return the log's `split` records once there are as many."""
    found = []

    def read():
        found[:] = [each for each in running.gateway.log.read("").records if each.route == "split"]
        return len(found) >= count

    wait_until(read)
    return found


def get(running, path):
    connection = http.client.HTTPConnection("127.0.0.1", running.gateway.port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_an_unknown_target_is_404_in_the_openai_form(running):
    answer, body = get(running, "/nobody@prod/v1/models")
    assert answer.status == 404
    assert answer.getheader("content-type") == "application/json"
    error = json.loads(body)["error"]
    assert (error["code"], error["type"], error["param"]) == ("target_not_found", "invalid_request_error", None)


@pytest.mark.parametrize(
    "path",
    ["lora-adapters", "update_weights_from_disk", "", "v1", "v1x", "v1/../slots", "v1/%2e%2e/slots", "v1/..%2fslots"],
)
def test_nothing_of_an_engine_is_reached_but_its_api(running, stable, path):
    running.gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    answer, _ = get(running, f"/{TARGET}/{path}")
    assert answer.status in {400, 404}
    assert answer.getheader("x-release-rev") is None


def test_a_target_without_arms_is_503_in_the_openai_form(running):
    running.gateway.apply(split(1))
    answer, body = get(running, f"/{TARGET}/v1/models")
    assert answer.status == 503
    assert answer.getheader("retry-after") == "5"
    assert answer.getheader("x-release-rev") == "1"
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == ("target_not_serving", "server_error")
    assert TARGET in error["message"]


def test_the_prefix_is_stripped_and_the_revision_is_in_the_answer(running, stable):
    applied = running.gateway.apply(split(3, arm("stable", stable.address, 10_000)))
    assert applied.split.revision == 3
    assert 0 < applied.acknowledged_seconds <= applied.probed_seconds < 2
    for spelling in (TARGET, TARGET.replace("@", "%40")):
        answer, _ = get(running, f"/{spelling}/v1/models?after=x")
        assert (answer.status, answer.getheader("x-release-rev")) == (200, "3")
        assert answer.getheader("x-release-arm") == "stable"
    assert stable.paths == ["/v1/models", "/v1/models"]


def test_dots_in_a_path_do_not_leave_its_target(running, stable, candidate):
    running.gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    other = arm("stable", candidate.address, 10_000, target="other@prod")
    running.gateway.apply(split(1, other, target="other@prod"))
    answer, _ = get(running, f"/{TARGET}/../other@prod/v1/models")
    assert answer.getheader("x-engine") == "candidate"
    answer, _ = get(running, f"/{TARGET}/../../v1/models")
    assert answer.status == 404


def test_a_ghost_cluster_is_refused_before_it_is_published():
    only = Arm("stable", "c", "127.0.0.1:9", 10_000)
    routes = envoy_config.routes("r1", [Split(TARGET, 1, (only,))], pins=False)
    with pytest.raises(ValueError, match="do not exist"):
        envoy_config.check(envoy_config.clusters("r1", []), routes)


def test_every_document_is_valid_to_envoy(running, tmp_path, stable, candidate):
    splits = [
        split(1, *shares(stable, candidate, 500)),
        split(1, target="idle@prod"),
        split(7, arm("candidate", stable.address, 10_000, target="chat.v1@dev"), target="chat.v1@dev"),
    ]
    document = envoy_config.flattened(
        envoy_config.bootstrap("127.0.0.1", 0),
        envoy_config.clusters("r1", envoy_config.arms_of(splits)),
        envoy_config.routes("r1", splits, pins=True),
    )
    path = tmp_path / "flat.json"
    path.write_text(json.dumps(document))

    def validate():
        command = [running.binary, "--mode", "validate", "--reject-unknown-dynamic-fields", "--config-path", path]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert validate().returncode == 0, validate().stderr
    del document["static_resources"]["clusters"][0]
    path.write_text(json.dumps(document))
    assert validate().returncode != 0


def test_a_client_cannot_turn_on_retries_or_timeouts(running, engines):
    broken = engines("broken", Script(fault="reset"))
    running.gateway.apply(split(1, arm("stable", broken.address, 10_000)))
    headers = {
        "x-envoy-retry-on": "5xx,reset,connect-failure,refused-stream",
        "x-envoy-max-retries": "5",
        "x-envoy-retry-grpc-on": "unavailable",
        "x-forwarded-for": "127.0.0.1",
    }
    answers = ask_many(running.url(), 3, concurrency=1, headers=headers)
    assert answers.statuses == {503: 3}
    assert len(broken.paths) == 3
    broken.script = Script(ttft_ms=300)
    slow = ask_many(running.url(), 2, headers={"x-envoy-upstream-rq-timeout-ms": "50", "x-forwarded-for": "10.0.0.1"})
    assert slow.statuses == {200: 2}
    assert not [name for each in broken.headers for name in each if name.startswith("x-envoy")]


@pytest.mark.parametrize("headers_at_once", [True, False])
def test_the_log_tells_time_to_first_token_and_not_to_the_headers(running, engines, headers_at_once):
    engine = engines("stable", Script(ttft_ms=250, tokens=4, interval_ms=20, headers_at_once=headers_at_once))
    running.gateway.apply(split(1, arm("stable", engine.address, 10_000)))
    answers = ask_many(running.url(), 5, concurrency=1)
    found = records(running, 5)
    for record, client_ms in zip(found, answers.ttft_ms, strict=True):
        assert record.is_event_stream
        assert 249 < record.ttft_ms < client_ms + 1  # between what the engine does and what the client sees
        assert record.duration_ms > record.ttft_ms + 50


def test_the_log_tells_a_cut_stream_from_a_client_that_left(running, engines):
    engine = engines("stable", Script(fault="cut", interval_ms=10))
    running.gateway.apply(split(1, arm("stable", engine.address, 10_000)))
    assert ask_many(running.url(), 3).broken == 3
    engine.script = Script(tokens=500, interval_ms=20)
    leaving = socket.create_connection(("127.0.0.1", running.gateway.port))
    request = f"POST /{TARGET}/v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    leaving.sendall(request.encode())
    assert b"200 OK" in leaving.recv(1_000)
    leaving.close()
    wait_until(lambda: engine.cancelled == 1)
    flags = sorted(",".join(sorted(record.flags)) for record in records(running, 4))
    assert flags == ["DC", "UPE", "UPE", "UPE"]
    assert {record.code for record in records(running, 4)} == {200}


def test_hostile_bytes_do_not_garble_the_log(running, stable):
    running.gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    for request in (
        b'GET /chat@prod/\xff\xfe"\\x HTTP/1.1\r\nhost: a\r\n\r\n',
        b'GET /chat@prod/a HTTP/1.1\r\nhost: a\r\nx-request-id: \xff\xc3("\\\r\n\r\n',
        b'GET /chat@prod/%00%0a%22 HTTP/1.1\r\nhost: "\\\r\n\r\n',
        b"nothing like HTTP\r\n\r\n",
        b"POST /chat@prod/" + b"a" * 30_000 + b" HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", running.gateway.port)) as connection:
            connection.sendall(request)
            connection.settimeout(5)
            assert connection.recv(12).startswith(b"HTTP/1.1 ")
    wait_until(lambda: len(running.gateway.log.read("").records) >= 6)
    assert running.gateway.log.read("").garbled == 0


def test_a_dead_candidate_costs_no_request_and_is_seen_in_the_log(running, engines, stable):
    with contextlib.ExitStack() as life:
        candidate = life.enter_context(stream_engine("candidate"))
        running.gateway.apply(split(1, *shares(stable, candidate, 5_000)))
        life.close()
        answers = ask_many(running.url(), 200)
    assert answers.statuses == {200: 200}
    assert answers.engines == {"stable": 200}
    assigned = [each for each in records(running, 200) if each.assigned != shares(stable, candidate, 0)[0].cluster]
    assert 60 < len(assigned) < 140
    assert all(each.served == stable.address for each in assigned)


def test_a_candidate_that_fails_every_request_is_left_after_five(running, stable, candidate):
    running.gateway.apply(split(1, *shares(stable, candidate, 5_000)))
    candidate.script = Script(fault="503")
    answers = ask_many(running.url(), 100, concurrency=1)
    # The thread that counts tells the others, one of which may have the next request by then.
    assert answers.statuses[503] in {5, 6}
    assert answers.statuses[200] == 100 - answers.statuses[503]


def test_stable_alone_is_tried_even_when_its_health_check_fails(running, stable):
    running.gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    stable.script = Script(is_healthy=False)
    cluster = arm("stable", stable.address, 0).cluster
    wait_until(lambda: cluster not in running.gateway.admin.healthy())
    assert ask_many(running.url(), 20).engines == {"stable": 20}


def test_pins_reach_the_candidate_only_where_they_are_enabled(tmp_path, running, stable, candidate):
    running.gateway.apply(split(1, *shares(stable, candidate, 0)))
    pin = {"x-release-pin": "candidate"}
    assert ask_many(running.url(), 5, headers=pin).engines == {"stable": 5}
    pinned = EnvoyGateway(running.gateway.directory, port=running.gateway.port, pins=True)
    pinned.apply(split(2, *shares(stable, candidate, 0)))
    assert ask_many(running.url(), 5, headers=pin).engines == {"candidate": 5}
    assert ask_many(running.url(), 5).engines == {"stable": 5}
