"""A real Envoy, real streams and scripted engines: traffic moves as it is told, and nothing breaks on the way."""

import contextlib
import json
import shutil
import socketserver
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from scipy.stats import binomtest

from gates.router import Arm, Router
from tests.support import stopping
from tests.support.gateway import TARGET, arm, ask_many, during_streams, shares, split, wait_until
from tests.support.streams import Script
from workers.traffic import envoy_config, waiting
from workers.traffic.desired import locked
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


def test_the_gateway_is_a_router(running):
    assert isinstance(running.gateway, Router)


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
        seen.append(running.gateway.admin.active([cluster])[cluster])

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
    assert told_of(gateway) == {arm("stable", stable.address, 0).cluster}
    wait_until(gateway.is_in_force)
    assert ask_many(running.url(), 20).engines == {"stable": 20}


def test_other_targets_move_while_one_waits_for_a_replica_to_be_reached(running, engines, stable):
    ill, other = engines("ill", Script(is_healthy=False)), engines("other")
    gateway = running.gateway
    gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(gateway.apply, split(2, *shares(stable, ill, 5_000)))
        wait_until(lambda: shares(stable, ill, 5_000)[1].cluster in gateway.admin.clusters())
        for revision in range(1, 4):
            moved = split(revision, arm("stable", other.address, 10_000, target="other@prod"), target="other@prod")
            gateway.apply(moved)
            assert shares(stable, ill, 5_000)[1].cluster in told_of(gateway)
        gateway.prepare_rollback("other@prod", moved.arms)
        gateway.restore("other@prod")
        assert not waits.done()
        assert gateway.desired(TARGET) == split(1, arm("stable", stable.address, 10_000))
        ill.script.is_healthy = True
        assert waits.result().split == split(2, *shares(stable, ill, 5_000))
    assert ask_many(running.url("other@prod"), 5).engines == {"other": 5}
    assert set(ask_many(running.url(), 40).engines) == {"stable", "ill"}


def told_of(gateway):
    return envoy_config.cluster_names(gateway.clusters.document())


def test_what_somebody_waits_for_stays_known_for_as_long_as_he_does(running, engines, stable, candidate):
    gateway, other = running.gateway, engines("other")
    arms = envoy_config.arms_of([split(1, *shares(stable, candidate, 5_000))])
    waited_for = envoy_config.cluster_names(envoy_config.clusters("", arms))
    assert len(waited_for) == 3
    waits = gateway.clusters.waits

    def moved(revision):
        """Return what is known once another target serves from another engine, and the one before is retired."""
        one = (stable, other)[revision % 2]
        only = arm("stable", one.address, 10_000, target="other@prod")
        gateway.apply(split(revision, only, target="other@prod"))
        return told_of(gateway)

    with waiting.waiting(waits, taken_seconds=60.0, reached_seconds=60.0) as wait:
        with locked(gateway.lock):
            assert gateway.clusters.add(7, arms, wait)
            wait.keep(waited_for)
        assert waited_for <= moved(1)
        assert waited_for <= moved(2)
        (file,) = waits.iterdir()
        left = file.read_bytes()
    assert list(waits.iterdir()) == []
    # One that was killed in its wait leaves its file behind, and holds it no more.
    (waits / "left.json").write_bytes(left)
    assert not waited_for & moved(3)
    assert list(waits.iterdir()) == []


def test_while_envoy_is_silent_whoever_waits_for_it_does_not_hold_the_lock(running, stable, candidate):
    gateway = running.gateway
    gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    gateway.prepare_rollback(TARGET, split(1, arm("stable", stable.address, 10_000)).arms)
    stopping.stand_still(running.process.pid)
    try:
        with ThreadPoolExecutor() as pool:
            waits = pool.submit(gateway.apply, split(2, *shares(stable, candidate, 10_000)))
            wait_until(lambda: list(gateway.clusters.waits.iterdir()))
            # Somebody else's change of what nobody has to confirm.
            gateway.discard_rollback(TARGET)
            assert not waits.done()
            stopping.go_on(running.process.pid)
            assert waits.result().split == split(2, *shares(stable, candidate, 10_000))
    finally:
        stopping.go_on(running.process.pid)
    assert ask_many(running.url(), 10).engines == {"candidate": 10}


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


def test_without_an_acknowledgement_a_shift_is_taken_back(running, stable, candidate):
    running.gateway.apply(split(1, *shares(stable, candidate, 0)))
    gateway = EnvoyGateway(running.gateway.directory, port=running.gateway.port, deadline_seconds=0.5)
    stopping.stand_still(running.process.pid)
    try:
        with pytest.raises((NotAcknowledged, GatewayDown)):
            gateway.apply(split(2, *shares(stable, candidate, 10_000)))
    finally:
        stopping.go_on(running.process.pid)
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
    arms = envoy_config.arms_of([split(2, *shares(stable, candidate, 10_000))])
    known = envoy_config.clusters(gateway.clusters.document()["version_info"], arms)
    gateway.clusters.path.write_text(json.dumps(known))  # in place: no event
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


def test_the_log_is_rotated_without_losing_a_line(running, stable):
    running.gateway.apply(split(1, arm("stable", stable.address, 10_000)))
    since = running.gateway.log.end()
    ask_many(running.url(), 50)
    assert not running.gateway.rotate_log()  # it is small
    assert running.gateway.rotate_log(max_bytes=1)
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
    for _ in range(3):
        running.gateway.probe(TARGET)
        wait_until(lambda: running.gateway.rotate_log(max_bytes=1, keep=2))
    assert len(running.gateway.log.rotated()) == 2


def test_time_to_move_traffic_is_measured(running, stable, candidate):
    """Not a benchmark: only that the numbers are those of the acknowledgement, and small."""
    gateway = running.gateway
    gateway.apply(split(1, *shares(stable, candidate, 0)))
    began = time.monotonic()
    applied = gateway.apply(split(2, *shares(stable, candidate, 10_000)))
    assert applied.acknowledged_seconds <= applied.probed_seconds <= time.monotonic() - began
    assert applied.acknowledged_seconds < 0.5


class _OneAnswerAConnection(socketserver.StreamRequestHandler):
    """Streams one answer that lets the connection live on, and hangs up on whoever asks again on it."""

    def handle(self):
        head = b""
        while (line := self.rfile.readline()).strip():
            head += line.lower()
        length = next((int(each[15:]) for each in head.splitlines() if each.startswith(b"content-length:")), 0)
        self.rfile.read(length)
        body = b"data: [DONE]\n\n"
        self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        self.wfile.write(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
        self.connection.settimeout(1)
        with contextlib.suppress(OSError):
            self.rfile.readline()


def test_an_engine_that_hangs_up_after_its_stream_costs_nobody_an_answer(running):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _OneAnswerAConnection) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            running.gateway.apply(split(1, arm("stable", f"127.0.0.1:{server.server_address[1]}", 10_000)))
            answers = ask_many(running.url(), 20, concurrency=1)
        finally:
            server.shutdown()
            thread.join()
    assert answers.statuses == {200: 20}
    assert answers.broken == 0
