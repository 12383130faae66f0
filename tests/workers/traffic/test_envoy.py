"""A real Envoy, real streams and scripted engines: traffic moves as it is told, and nothing breaks on the way."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest
from scipy.stats import binomtest

from gates.router import Arm, Router, Split
from tests.support.gateway import TARGET, arm, ask_many, during_streams, split, wait_until
from tests.support.streams import Script
from workers.traffic import envoy_config, envoy_process
from workers.traffic.envoy import EnvoyGateway
from workers.traffic.problems import (
    ArmNotHealthy,
    ClusterRepointed,
    GatewayDown,
    NotAcknowledged,
    NothingPrepared,
    Rejected,
    StaleRevision,
)


@pytest.fixture
def stable(engines):
    return engines("stable")


@pytest.fixture
def candidate(engines):
    return engines("candidate")


def shares(stable, candidate, candidate_bp):
    return (
        arm("stable", stable.address, 10_000 - candidate_bp),
        arm("candidate", candidate.address, candidate_bp, bundle="b"),
    )


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


def test_the_gateway_is_a_router(running):
    assert isinstance(running.gateway, Router)


def test_an_unknown_target_is_404_in_the_openai_form(running):
    answer, body = get(running, "/nobody@prod/v1/models")
    assert answer.status == 404
    assert answer.getheader("content-type") == "application/json"
    error = json.loads(body)["error"]
    assert (error["code"], error["type"], error["param"]) == ("target_not_found", "invalid_request_error", None)


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


@pytest.mark.parametrize("candidate_bp", [0, 500, 2_500, 10_000])
def test_the_observed_split_is_the_desired_one(running, stable, candidate, candidate_bp):
    running.gateway.apply(split(1, *shares(stable, candidate, candidate_bp)))
    answers = ask_many(running.url(), 600)
    assert answers.statuses == {200: 600}
    assert answers.revisions == {"1": 600}
    assert binomtest(answers.engines["candidate"], 600, candidate_bp / 10_000).pvalue > 1e-6
    seen = {}
    since = ""

    def count():
        nonlocal since
        observed = running.gateway.observe(TARGET, since)
        since = observed.until
        for name, number in observed.requests.items():
            seen[name] = seen.get(name, 0) + number
        return sum(seen.values()) >= 600

    wait_until(count)
    assert {name: seen[name] for name in seen} == {
        name: answers.engines[name] for name in ("stable", "candidate") if answers.engines[name]
    }


def test_no_stream_breaks_while_weights_go_up_and_down(running, engines):
    slow = Script(tokens=30, interval_ms=50)
    stable, candidate = engines("stable", slow), engines("candidate", Script(tokens=30, interval_ms=50))
    running.gateway.apply(split(1, *shares(stable, candidate, 5_000)))
    later = []

    def shift():
        for revision, candidate_bp in ((2, 0), (3, 10_000), (4, 0)):
            running.gateway.apply(split(revision, *shares(stable, candidate, candidate_bp)))
        stable.script = Script()
        later.append(ask_many(running.url(), 50))

    answers = during_streams(running.url(), 60, shift)
    assert (answers.whole, answers.broken) == (60, 0)
    assert answers.engines["candidate"] > 0
    assert later[0].engines == {"stable": 50}


def test_a_retired_candidate_finishes_its_streams(running, engines):
    stable, candidate = engines("stable"), engines("candidate", Script(tokens=20, interval_ms=50))
    running.gateway.apply(split(1, *shares(stable, candidate, 10_000)))
    cluster = shares(stable, candidate, 0)[1].cluster

    def retire():
        assert not running.gateway.drained(cluster)
        running.gateway.apply(split(2, arm("stable", stable.address, 10_000)))
        wait_until(lambda: cluster not in running.gateway.admin.clusters())

    answers = during_streams(running.url(), 20, retire)
    assert (answers.whole, answers.broken) == (20, 0)


def test_drained_is_true_when_the_last_stream_has_ended(running, engines):
    stable, candidate = engines("stable"), engines("candidate", Script(tokens=20, interval_ms=50))
    running.gateway.apply(split(1, *shares(stable, candidate, 10_000)))
    cluster = shares(stable, candidate, 0)[1].cluster
    seen = []

    def drain():
        running.gateway.apply(split(2, *shares(stable, candidate, 0)))
        seen.append(running.gateway.admin.active(cluster))

    during_streams(running.url(), 20, drain)
    assert seen == [20]
    assert running.gateway.drained(cluster)


def test_a_rollback_is_one_rename_and_acknowledged_at_once(running, stable, candidate):
    gateway = running.gateway
    gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    gateway.prepare_rollback(TARGET, shares(stable, candidate, 0))
    gateway.apply(split(2, *shares(stable, candidate, 5_000)))
    assert gateway.is_prepared(TARGET)
    times = [gateway.restore(TARGET).probed_seconds]
    assert ask_many(running.url(), 100).engines == {"stable": 100}
    for step in range(9):
        gateway.prepare_rollback(TARGET, shares(stable, candidate, 0))
        gateway.apply(split(4 + 2 * step, *shares(stable, candidate, 5_000)))
        times.append(gateway.restore(TARGET).probed_seconds)
    assert sorted(times)[4] < 0.1
    assert gateway.desired(TARGET) == split(21, *shares(stable, candidate, 0))


def test_a_restore_may_be_repeated_but_not_invented(running, stable, candidate):
    gateway = running.gateway
    gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    with pytest.raises(NothingPrepared):
        gateway.restore(TARGET)
    gateway.prepare_rollback(TARGET, shares(stable, candidate, 0))
    gateway.apply(split(2, *shares(stable, candidate, 5_000)))
    first = gateway.restore(TARGET)
    gateway.apply(split(1, target="other@prod"))  # another target's change lies between
    again = gateway.restore(TARGET)
    assert again.split == first.split
    gateway.apply(split(4, *shares(stable, candidate, 5_000)))
    with pytest.raises(NothingPrepared):
        gateway.restore(TARGET)


def test_a_discarded_rollback_cannot_be_put_in_force(running, stable, candidate):
    gateway = running.gateway
    gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    gateway.prepare_rollback(TARGET, shares(stable, candidate, 0))
    gateway.discard_rollback(TARGET)
    gateway.discard_rollback(TARGET)
    assert not gateway.is_prepared(TARGET)
    assert not gateway.is_prepared("all")


def test_the_first_release_of_a_target_goes_back_to_503(running, candidate):
    gateway = running.gateway
    gateway.prepare_rollback(TARGET, ())
    gateway.apply(split(1, arm("candidate", candidate.address, 10_000)))
    assert ask_many(running.url(), 5).engines == {"candidate": 5}
    gateway.restore(TARGET)
    assert ask_many(running.url(), 5).statuses == {503: 5}


def test_a_rollback_keeps_what_another_target_did_meanwhile(running, engines, stable, candidate):
    gateway, other = running.gateway, engines("other")
    gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    gateway.prepare_rollback(TARGET, shares(stable, candidate, 0))
    gateway.apply(split(2, *shares(stable, candidate, 10_000)))
    gateway.apply(split(1, arm("stable", other.address, 10_000, target="other@prod"), target="other@prod"))
    gateway.restore(TARGET)
    assert ask_many(running.url(), 10).engines == {"stable": 10}
    assert ask_many(running.url("other@prod"), 10).engines == {"other": 10}


def test_two_targets_that_change_at_once_lose_nothing(running, engines):
    targets = [f"t{number}@prod" for number in range(4)]
    found = {target: engines(target) for target in targets}
    failures = []

    def shift(target):
        gateway = EnvoyGateway(running.gateway.directory, port=running.gateway.port)
        try:
            for revision in range(1, 11):
                only = arm("stable", found[target].address, 10_000, target=target)
                gateway.apply(split(revision, only, target=target))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=shift, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for target in targets:
        answers = ask_many(running.url(target), 5)
        assert answers.engines == {target: 5}
        assert answers.revisions == {"10": 5}


def test_repeating_a_split_confirms_it_and_an_older_one_is_refused(running, stable, candidate):
    gateway = running.gateway
    gateway.apply(split(5, *shares(stable, candidate, 500)))
    version = gateway.apply(split(5, *shares(stable, candidate, 500))).version
    assert version == gateway.apply(split(5, *shares(stable, candidate, 500))).version
    for revision in (4, 5):
        with pytest.raises(StaleRevision):
            gateway.apply(split(revision, *shares(stable, candidate, 9_000)))
    assert gateway.desired(TARGET) == split(5, *shares(stable, candidate, 500))


def test_a_cluster_name_is_never_pointed_elsewhere(running, stable, candidate):
    running.gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    moved = Arm("stable", arm("stable", stable.address, 0).cluster, candidate.address, 10_000)
    with pytest.raises(ClusterRepointed):
        running.gateway.apply(split(2, moved))
    with pytest.raises(ClusterRepointed):
        running.gateway.prepare_rollback(TARGET, (moved,))


def test_an_ill_arm_gets_no_traffic(tmp_path, engines, running, stable):
    ill = engines("ill", Script(is_healthy=False))
    gateway = EnvoyGateway(running.gateway.directory, port=running.gateway.port, deadline_seconds=1.0)
    gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    with pytest.raises(ArmNotHealthy):
        gateway.apply(split(2, *shares(stable, ill, 5_000)))
    assert gateway.desired(TARGET) == split(1, arm("stable", stable.address, 10_000))
    wait_until(gateway.is_in_force)
    assert ask_many(running.url(), 20).engines == {"stable": 20}


def test_a_ghost_cluster_is_refused_before_it_is_published():
    only = Arm("stable", "c", "127.0.0.1:9", 10_000)
    routes = envoy_config.routes("r1", [Split(TARGET, 1, (only,))], pins=False)
    with pytest.raises(ValueError, match="do not exist"):
        envoy_config.check(envoy_config.clusters("r1", []), routes)


def test_envoy_itself_refuses_a_ghost_cluster_and_keeps_what_it_has(running, stable):
    running.gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    routes = running.gateway.directory / "xds" / "rds.json"
    ghost = routes.read_text().replace(arm("stable", stable.address, 0).cluster, "ghost")
    _replace(routes, ghost.replace('"version_info": "r2"', '"version_info": "r3"'))
    wait_until(lambda: running.gateway.admin.stats("http.gw.rds.release.")["update_rejected"] == 1)
    assert ask_many(running.url(), 10).engines == {"stable": 10}


def test_a_malformed_document_leaves_the_old_one_in_force_and_the_next_change_heals_it(running, stable, candidate):
    running.gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    routes = running.gateway.directory / "xds" / "rds.json"
    _replace(routes, routes.read_text()[:200])
    wait_until(lambda: running.gateway.admin.stats("http.gw.rds.release.")["update_failure"] == 1)
    assert ask_many(running.url(), 10).engines == {"stable": 10}
    running.gateway.apply(split(2, *shares(stable, candidate, 10_000)))
    assert ask_many(running.url(), 10).engines == {"candidate": 10}


def _replace(path, text):
    beside = path.with_name(".by-hand")
    beside.write_text(text)
    beside.rename(path)


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


def test_killed_and_started_again_it_serves_the_same_revision(running, stable, candidate):
    running.gateway.apply(split(1, *shares(stable, candidate, 10_000)))
    running.kill()
    with pytest.raises(GatewayDown):
        running.gateway.probe(TARGET)
    running.restart()
    answers = ask_many(running.url(), 20)
    assert answers.engines == {"candidate": 20}
    assert answers.revisions == {"1": 20}


def test_a_torn_document_at_start_is_written_anew(running, stable):
    running.gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    running.kill()
    routes = running.gateway.directory / "xds" / "rds.json"
    routes.write_text(routes.read_text()[:100])
    running.restart()
    assert ask_many(running.url(), 5).engines == {"stable": 5}


def test_a_second_envoy_on_the_directory_is_refused(running):
    with pytest.raises(FileExistsError):
        envoy_process.start(running.gateway, running.binary)


def test_a_second_envoy_on_the_port_does_not_start(running, tmp_path):
    twin = EnvoyGateway(tmp_path / "twin", port=running.gateway.port)
    process = envoy_process.start(twin, running.binary)
    try:
        with pytest.raises(GatewayDown, match=r"(?i)address"):
            envoy_process.wait_ready(twin, process)
    finally:
        process.kill()
        process.wait()


def test_without_an_acknowledgement_a_shift_is_taken_back(running, stable, candidate):
    running.gateway.apply(split(1, *shares(stable, candidate, 0)))
    gateway = EnvoyGateway(running.gateway.directory, port=running.gateway.port, deadline_seconds=0.5)
    os.kill(running.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises((NotAcknowledged, GatewayDown)):
            gateway.apply(split(2, *shares(stable, candidate, 10_000)))
    finally:
        os.kill(running.process.pid, signal.SIGCONT)
    assert gateway.desired(TARGET) == split(1, *shares(stable, candidate, 0))
    wait_until(gateway.is_in_force)
    assert ask_many(running.url(), 20).engines == {"stable": 20}
    gateway.apply(split(2, *shares(stable, candidate, 10_000)))
    assert ask_many(running.url(), 20).engines == {"candidate": 20}


def test_an_envoy_that_sees_no_change_does_not_count_as_moved(running, stable, candidate):
    running.gateway.apply(split(1, *shares(stable, candidate, 0)))
    gateway = EnvoyGateway(running.gateway.directory, port=running.gateway.port, deadline_seconds=0.3)
    xds = gateway.directory / "xds"
    xds.rename(gateway.directory / "watched")  # Envoy goes on watching this folder
    shutil.copytree(gateway.directory / "watched", xds)
    with pytest.raises(NotAcknowledged, match="r3"):
        gateway.apply(split(2, *shares(stable, candidate, 10_000)))
    assert gateway.desired(TARGET) == split(1, *shares(stable, candidate, 0))
    assert ask_many(running.url(), 20).engines == {"stable": 20}


def test_a_document_that_envoy_refuses_is_taken_back(running, stable, candidate):
    """The file on disk lists a cluster that Envoy never heard of, so the routes to it are refused."""
    gateway = running.gateway
    alone = split(1, arm("candidate", candidate.address, 10_000, bundle="b"))
    gateway.apply(alone)
    known = envoy_config.clusters("r2", envoy_config.arms_of([split(2, *shares(stable, candidate, 10_000))]))
    (gateway.directory / "xds" / "cds.json").write_text(json.dumps(known))  # in place: no event
    with pytest.raises(Rejected, match="update_rejected"):
        gateway.apply(split(2, *shares(stable, candidate, 10_000)))
    assert gateway.desired(TARGET) == alone
    wait_until(gateway.is_in_force)
    assert ask_many(running.url(), 20).engines == {"candidate": 20}
    gateway.apply(split(2, *shares(stable, candidate, 0)))
    assert ask_many(running.url(), 20).engines == {"stable": 20}


def test_without_an_acknowledgement_a_restore_stays_in_place(running, stable, candidate):
    gateway = EnvoyGateway(running.gateway.directory, port=running.gateway.port, deadline_seconds=0.5)
    gateway.prepare_rollback(TARGET, shares(stable, candidate, 0))
    gateway.apply(split(1, *shares(stable, candidate, 10_000)))
    running.kill()
    with pytest.raises(GatewayDown):
        gateway.restore(TARGET)
    running.restart()
    assert ask_many(running.url(), 20).engines == {"stable": 20}
    assert gateway.restore(TARGET).split == split(2, *shares(stable, candidate, 0))


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
    import contextlib  # beside the engine that is stopped early

    from tests.support.streams import stream_engine

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
    assert answers.statuses[503] == 5
    assert answers.statuses[200] == 95


def test_stable_alone_is_tried_even_when_its_health_check_fails(running, stable):
    running.gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    stable.script = Script(is_healthy=False)
    cluster = arm("stable", stable.address, 0).cluster
    wait_until(lambda: not running.gateway.admin.is_healthy(cluster))
    assert ask_many(running.url(), 20).engines == {"stable": 20}


def test_pins_reach_the_candidate_only_where_they_are_enabled(tmp_path, running, stable, candidate):
    running.gateway.apply(split(1, *shares(stable, candidate, 0)))
    pin = {"x-release-pin": "candidate"}
    assert ask_many(running.url(), 5, headers=pin).engines == {"stable": 5}
    pinned = EnvoyGateway(running.gateway.directory, port=running.gateway.port, pins=True)
    pinned.apply(split(2, *shares(stable, candidate, 0)))
    assert ask_many(running.url(), 5, headers=pin).engines == {"candidate": 5}
    assert ask_many(running.url(), 5).engines == {"stable": 5}


def test_the_log_is_rotated_without_losing_a_line(running, stable):
    running.gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    since = running.gateway.log.end()
    ask_many(running.url(), 50)
    running.gateway.rotate_log()
    ask_many(running.url(), 50)
    seen = []

    def read():
        nonlocal since
        batch = running.gateway.log.read(since)
        since = batch.until
        assert not batch.is_lost
        assert batch.garbled == 0
        seen.extend(each for each in batch.records if each.route == "split")
        return len(seen) >= 100

    wait_until(read)
    assert len(seen) == 100


def test_a_drained_gateway_finishes_its_streams(running, engines):
    engine = engines("stable", Script(tokens=20, interval_ms=50))
    running.gateway.apply(split(1, arm("stable", engine.address, 10_000)))
    done = []
    answers = during_streams(
        running.url(), 20, lambda: done.append(envoy_process.drain(running.gateway, timeout_seconds=20))
    )
    assert done == [True]
    assert (answers.whole, answers.broken) == (20, 0)


def test_a_long_directory_is_no_obstacle(tmp_path, engines):
    from tests.support.gateway import running_gateway  # beside the fixture that uses it with a short one

    engine = engines("stable")
    with running_gateway(tmp_path / ("d" * 120)) as running:
        running.gateway.apply(split(1, arm("stable", engine.address, 10_000)))
        assert ask_many(running.url(), 5).engines == {"stable": 5}


def test_the_admin_socket_is_the_owners_alone(running):
    mode = (running.gateway.directory / "admin.sock").stat().st_mode & 0o777
    assert mode == 0o600


def test_a_missing_binary_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        envoy_process.find_envoy(tmp_path / "nowhere")


def test_time_to_move_traffic_is_measured(running, stable, candidate):
    """Not a benchmark: only that the numbers are those of the acknowledgement, and small."""
    gateway = running.gateway
    gateway.apply(split(1, *shares(stable, candidate, 0)))
    began = time.monotonic()
    applied = gateway.apply(split(2, *shares(stable, candidate, 10_000)))
    assert applied.acknowledged_seconds <= applied.probed_seconds <= time.monotonic() - began
    assert applied.acknowledged_seconds < 0.5
