import signal
import time

import pytest
from celery import Celery

from tests.support.broker import broker
from tests.support.runners import CLASS, is_running, runner_process, until


@pytest.fixture
def ringing(tmp_path):
    with broker(tmp_path / "broker") as url:
        yield url


def registered(bench):
    return until(lambda: list(bench.client().runners.list()), seconds=60, what="the registration")


def listening(bench, broker_url):
    """Wait until the worker takes messages, and return what sends them."""
    app = Celery(broker=broker_url)
    until(lambda: b"ready." in (bench.folder / "runner.log").read_bytes(), seconds=60, what="a worker that listens")
    return app


def test_a_ring_of_the_broker_makes_a_runner_look_at_once(bench, ringing):
    with runner_process(bench, ringing) as child:
        registered(bench)
        run = bench.evaluate(bench.bundle(), bench.policy())
        with listening(bench, ringing) as app:
            app.send_task("workers.runner.ring", queue=f"runner.{CLASS}", expires=10, retry=False)
        assert bench.done(run).outcome == "passed"
        log = bench.folder / "runner.log"
        until(lambda: b"runner_rung" in log.read_bytes(), what="the ring")
        child.terminate()
        assert child.wait(timeout=30) == 0


def test_a_runner_works_while_its_broker_is_away(bench):
    with runner_process(bench, "redis://127.0.0.1:1/0") as child:
        run = bench.evaluate(bench.bundle(), bench.policy())
        assert bench.done(run).outcome == "passed"
        child.terminate()
        assert child.wait(timeout=30) is not None


def test_a_killed_runner_leaves_the_live_replica_to_the_next_and_no_engine_of_a_gate(bench, ringing):
    bundle = bench.bundle()
    job = bench.serve(bundle)
    with runner_process(bench, ringing) as child:
        first = bench.ready(job, seconds=60)
        run = bench.evaluate(bundle, bench.policy())
        until(lambda: bench.replica(run).get("state") == "loading", what="the engine of a gate")
        gate_engine = bench.replica(run)["pid"]
        child.kill()
        child.wait()
    until(lambda: not is_running(gate_engine), seconds=5, what="the end of the gate's engine")
    assert is_running(first["pid"])
    with runner_process(bench, ringing) as child:
        until(lambda: bench.states(job).count("ready") == 2, seconds=60, what="the adoption")
        second = bench.replica(job)
        assert (second["pid"], second["address"]) == (first["pid"], first["address"])
        done = bench.done(run)
        assert (done.outcome, done.attempt) == ("passed", 2)
        bench.unwant(job)
        assert bench.done(job).state == "cancelled"
        assert not is_running(first["pid"])


def test_a_terminated_runner_gives_its_run_back_and_leaves_the_live_replica(bench, ringing):
    bundle = bench.bundle()
    job = bench.serve(bundle)
    with runner_process(bench, ringing) as child:
        first = bench.ready(job, seconds=60)
        run = bench.evaluate(bundle, bench.policy())
        until(lambda: bench.replica(run).get("state") == "loading", what="the engine of a gate")
        started = time.monotonic()
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=30) == 0
        assert time.monotonic() - started < 15
    assert bench.row(run).problem.startswith("runner-stopped")
    assert not is_running(bench.replica(run)["pid"])
    assert is_running(first["pid"])
