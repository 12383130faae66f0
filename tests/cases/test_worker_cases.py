"""Incident cases about workers: orphans, two clocks, short work behind long work, and results that go away."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
import redis
from celery import Celery

from registry import db
from registry.tables import JobRow, ReleaseRow
from tests.support import factories, programs
from tests.support.broker import broker
from tests.support.family import FAMILY
from tests.support.runners import Bench, bench, is_running, until
from workers.broker import configure
from workers.engines.table import DRIVERS
from workers.launchers.process import strays


@pytest.fixture(name="bench")
def _bench(service, tmp_path):
    with bench(service, tmp_path) as made:
        yield made


@pytest.fixture
def ringing(tmp_path):
    with broker(tmp_path / "broker") as url:
        yield url


# ------------------------------------------------------------------------------------------------------- C147


def relatives(bench: Bench, run) -> tuple[list[int], int]:
    """The processes of a gate's engine, and the port that one of them listens on."""
    workdir = bench.settings().data_dir / "engines" / str(run)
    port = int(until(lambda: (workdir / "relative.port").exists() and (workdir / "relative.port").read_text()))
    found = until(lambda: len(found) >= 3 and found if (found := strays(workdir)) else None, what="the family")
    return [one.pid for one in found], port


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def assert_gone(pids: list[int], port: int) -> None:
    until(lambda: not any(map(is_running, pids)) and is_free(port), seconds=15, what="the end of every process")


def test_c147_a_cancelled_gate_leaves_no_process_however_far_it_went(bench, monkeypatch):
    monkeypatch.setitem(DRIVERS, FAMILY.name, FAMILY)
    bundle, policy = bench.bundle(), bench.policy()
    agent = bench.start()
    run = bench.evaluate(bundle, policy)
    pids, port = relatives(bench, run)
    bench.unwant(run)
    assert_gone(pids, port)
    bench.done(run)
    # Exit statuses were collected: no child of this process waits for that.
    until(lambda: not agent.held())
    children = [child.poll() for child in agent._launchers[0]._children.values()]
    assert None not in children
    again = bench.evaluate(bundle, policy)
    assert bench.done(again).outcome == "passed"


def test_c147_a_killed_gate_leaves_no_process_once_its_runner_is_back(bench, ringing):
    bundle, policy = bench.bundle(), bench.policy()
    run = bench.evaluate(bundle, policy)
    environment, log = programs.runner_environment(bench, ringing), bench.folder / "runner.log"
    family = ("tests.support.family",)
    with programs.program(programs.runner_words(), environment, log, module=family) as child:
        pids, port = relatives(bench, run)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    with programs.program(programs.runner_words(), environment, log):
        assert_gone(pids, port)
        assert bench.done(run).outcome == "passed"


# ------------------------------------------------------------------------------------------------------- C149

SLOTS = 6


def test_c149_two_clocks_make_no_slot_run_twice_and_one_of_them_may_die(committed, actor, ringing, tmp_path: Path):
    release = factories.started_release(committed, actor)
    environment = programs.service_environment(committed, ringing)

    def token() -> int:
        with committed.database.transaction() as session:
            return session.get_one(ReleaseRow, release).lease_token

    def slot() -> None:
        """Make the release due once, and see it taken on once."""
        before = token()
        with committed.database.transaction() as session:
            session.get_one(ReleaseRow, release).due_at = db.now(session)
        until(lambda: token() > before, seconds=4, what="the slot")
        time.sleep(0.3)
        assert token() == before + 1

    def run(words, name):
        return programs.program(words, environment, tmp_path / f"{name}.log")

    with (
        run(programs.control_words(), "control"),
        run(programs.beat_words(), "beat-1") as first,
        run(programs.beat_words(), "beat-2"),
    ):
        until(lambda: token() > 0, seconds=60, what="the first sweep")
        for number in range(SLOTS):
            if number == SLOTS // 2:
                os.kill(first.pid, signal.SIGKILL)
            slot()
    with committed.database.transaction() as session:
        assert session.query(JobRow).filter_by(release_id=release).count() == 1


# ------------------------------------------------------------------------------------------------------- C150


def test_c150_short_checks_do_not_wait_behind_a_long_gate(bench):
    bundle, policy = bench.bundle(), bench.policy()
    agents = [bench.start(name, slots=1) for name in ("r1", "r2")]
    long = bench.evaluate(bundle, policy)
    until(lambda: bench.replica(long).get("state") == "loading", what="a loading engine")
    stopped = bench.replica(long)["pid"]
    os.kill(stopped, signal.SIGSTOP)  # a gate that takes for ever
    try:
        runs = [bench.evaluate(bundle, policy, gates=["integrity"]) for _ in range(8)]
        for agent in agents:
            agent.ring()  # as the sweep does
        until(lambda: all(bench.row(run).state == "done" for run in runs), seconds=15, what="the short ones")
        assert {bench.run(run).outcome for run in runs} == {"passed"}
        assert bench.row(long).state == "claimed"  # it stands still all the while: nobody waited for its end
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert bench.done(long).outcome == "passed"


# ------------------------------------------------------------------------------------------------------- C151


def test_c151_a_verdict_is_read_from_our_own_log_whatever_becomes_of_the_broker(bench, tmp_path):
    run = bench.evaluate(bench.bundle(), bench.policy())
    with broker(tmp_path / "broker") as url:
        app = Celery("any", broker=url)
        configure(app, queue="control")
        # There is no place for results that could expire, nor one that callers would wait at.
        assert type(app.backend).__name__ == "DisabledBackend"
        environment, log = programs.runner_environment(bench, url), bench.folder / "runner.log"
        with programs.program(programs.runner_words(), environment, log):
            answers = [bench.done(run)]
        with redis.Redis.from_url(url) as connection:
            connection.flushall()
        answers.append(bench.run(run))
    answers.append(bench.run(run))
    assert {one.outcome for one in answers} == {"passed"}
    assert all(one == answers[0] for one in answers)
    results = [entry for entry in bench.entries(run) if entry.kind == "gate_recorded"]
    assert [entry.body["gate"] for entry in results] == ["compatibility", "integrity"]
