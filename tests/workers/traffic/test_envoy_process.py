"""Envoy as a process: it starts whole, alone, and ends without cutting streams."""

import pytest

from tests.support.gateway import TARGET, arm, ask_many, during_streams, running_gateway, shares, split
from tests.support.streams import Script
from workers.traffic import envoy_process
from workers.traffic.envoy import EnvoyGateway
from workers.traffic.problems import GatewayDown


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
