"""Dead, busy or alive: an engine of two processes, whose web process answers whatever becomes of the one behind."""

import os
import re
import signal
import threading
import time
from dataclasses import replace

import pytest

from gates.dialects.base import MetricNames
from schemas.problems import EngineFailed
from schemas.runner import ReplicaState
from tests.support import chain, stopping
from tests.support.runners import until
from tests.support.split_engine import split
from workers import attending, vitals
from workers.attending import Attendant
from workers.diagnosis import compile_ms
from workers.engines.base import Launch
from workers.engines.llamacpp import LLAMACPP
from workers.engines.table import DRIVERS
from workers.launchers.proc import start_time
from workers.launchers.process import ProcessLauncher
from workers.serving import Replica
from workers.vitals import Watcher, family


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """Boot such an engine; in the end none of its processes is left."""
    made = []

    def boot(**changes):
        monkeypatch.setitem(DRIVERS, LLAMACPP.name, split(**changes))
        root = chain.write_bundle_directory(tmp_path / f"bundle{len(made)}")
        bundle = chain.describe(root, environment=LLAMACPP.identity().digest)
        workdir = tmp_path / f"run{len(made)}"
        launch = Launch(root=root, port_file=workdir / "port.json")
        told = []
        replica = Replica(bundle, launch, workdir=workdir, launcher=ProcessLauncher(), on_progress=told.append)
        made.append(replica)
        replica.start()
        replica.wait_ready(30)
        return replica, told

    yield boot
    for replica in made:
        replica.stop(grace_seconds=0.0)


def look_until_failed(watcher, seconds=20.0):
    """Look once a tenth of a second until the engine is found dead. Returns the problem and what was said before."""
    lines, ends = [], time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            if (line := watcher.look()) is not None:
                lines.append(line)
        except EngineFailed as problem:
            return problem, lines
        time.sleep(0.1)
    raise AssertionError(f"it was not found dead within {seconds:g} s: {lines}")


def test_the_processes_of_an_engine_are_known_by_descent_and_title(ready):
    replica, _ = ready()
    (rank,) = replica.ranks
    members = family(replica.launched.pid)
    assert [one.pid for one in members] == [replica.launched.pid, rank.pid]
    assert start_time(rank.pid) == rank.start_time
    assert "scripted-engine-core" in str(rank)
    assert family(2**30) == []


def test_b18_a_lost_rank_takes_the_whole_replica_out_at_once(ready):
    replica, _ = ready()
    watcher = Watcher(replica)
    assert watcher.look() is None
    os.kill(replica.ranks[0].pid, signal.SIGKILL)
    until(lambda: replica.lost_rank() is not None)
    problem, _ = look_until_failed(watcher)
    assert problem.members["cause"] == "rank_lost"
    assert "scripted-engine-core" in problem.detail
    assert (replica.state, replica.process_id()) == (ReplicaState.FAILED, None)
    assert replica.report("gone").failure == "rank_lost"


def test_an_engine_that_ends_by_itself_after_its_rank_has_failed_whatever_its_status(ready):
    replica, _ = ready(exits=0.0)
    os.kill(replica.ranks[0].pid, signal.SIGKILL)
    until(lambda: replica.process_id() is None)
    with pytest.raises(EngineFailed, match="exited: the engine exited with status 0"):
        Watcher(replica).look()


def test_c121_a_hung_engine_behind_a_lively_front_is_found_dead_within_ten_seconds(ready):
    replica, _ = ready()
    watcher = Watcher(replica)
    watcher.look()
    stopping.stand_still(replica.ranks[0].pid)
    problem, lines = look_until_failed(watcher, seconds=10.0)
    assert problem.members["cause"] == "engine_dead"
    assert f"(pid {replica.ranks[0].pid}) is stopped" in problem.detail
    assert not [line for line in lines if "a completion took" in line]
    assert family(replica.ranks[0].pid) == []


def test_an_engine_that_works_for_others_is_not_even_asked(ready, monkeypatch):
    monkeypatch.setattr(vitals, "PROBE_SECONDS", 0.3)
    replica, _ = ready(token_seconds=0.02)
    others = threading.Thread(target=replica.ask, args=(30.0,), kwargs={"max_tokens": 90})
    others.start()
    until(lambda: replica.progress(1.0) > 20)
    watcher = Watcher(replica, dead_seconds=1.0)
    ends, lines = time.monotonic() + 0.8, []
    while time.monotonic() < ends:
        lines.append(watcher.look())
        time.sleep(0.05)
    assert set(lines) == {None}
    others.join(30)
    # Silent again, it is asked, and answers.
    assert until(watcher.look).startswith("ready; a completion took")


def test_c122_an_engine_that_is_slow_to_answer_is_busy_while_its_counter_moves(ready, monkeypatch):
    monkeypatch.setattr(vitals, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(vitals, "ANSWER_SECONDS", 0.5)
    replica, _ = ready(token_seconds=0.1)
    monkeypatch.setattr(replica, "ask", lambda seconds: type(replica).ask(replica, seconds, max_tokens=20))
    watcher = Watcher(replica, dead_seconds=1.0)
    lines = []
    until(lambda: lines.append(watcher.look()) or "ready; it is busy" in lines)
    assert replica.state is ReplicaState.READY


def test_c122_an_engine_of_which_nobody_sees_whether_it_works_gets_the_time_of_one_that_does(ready, monkeypatch):
    for name, seconds in {"PROBE_SECONDS": 0.1, "ANSWER_SECONDS": 0.1, "STALLED_SECONDS": 1.5}.items():
        monkeypatch.setattr(vitals, name, seconds)
    replica, _ = ready(token_seconds=0.05)
    monkeypatch.setattr(replica, "ask", lambda seconds: type(replica).ask(replica, seconds, max_tokens=90))
    # As of one behind an endpoint elsewhere: it counts nothing, and what runs here is not what works.
    replica.dialect = replace(replica.dialect, metrics=MetricNames())
    replica.driver = replace(replica.driver, admits=lambda _bundle: [])
    problem, lines = look_until_failed(Watcher(replica, dead_seconds=0.2))
    assert problem.members["cause"] == "engine_dead"
    assert float(re.search(r"no progress for ([0-9.]+) s", problem.detail)[1]) >= 1.5
    assert all(line.startswith("no answer and no progress for") for line in lines)


def test_a_watcher_that_stood_still_itself_blames_nobody(ready, monkeypatch):
    replica, _ = ready()
    watcher = Watcher(replica, dead_seconds=0.2)
    time.sleep(0.5)
    assert watcher.look().startswith("ready; a completion took")


# -------------------------------------------------------------------------------------------- while a gate measures


def test_b18_a_rank_that_is_lost_during_a_gate_ends_the_engine_under_it_with_its_cause(ready):
    replica, _ = ready()
    with Attendant(replica) as attendant:
        os.kill(replica.ranks[0].pid, signal.SIGKILL)
        failure = until(lambda: attendant.failure)
    assert failure.members["cause"] == "rank_lost"
    assert (replica.state, replica.process_id()) == (ReplicaState.FAILED, None)


def test_b18_a_gate_that_may_kill_an_engine_itself_goes_on_asking_what_is_left_of_it(ready):
    replica, _ = ready()
    with Attendant(replica, ends=False) as attendant:
        os.kill(replica.ranks[0].pid, signal.SIGKILL)
        until(lambda: replica.lost_rank() is not None)
    assert attendant.failure.members["cause"] == "rank_lost"
    assert replica.process_id() is not None
    with pytest.raises(EngineFailed, match=r"engine_dead: no completion once the gate was over: http_5xx"):
        attendant.require_answer()
    assert replica.process_id() is None


def test_c121_an_engine_that_stands_still_during_a_gate_is_dead_whatever_its_front_answers(ready):
    replica, _ = ready()
    with Attendant(replica, dead_seconds=1.5) as attendant:
        stopping.stand_still(replica.ranks[0].pid)
        failure = until(lambda: attendant.failure)
    assert failure.members["cause"] == "engine_dead"
    assert f"(pid {replica.ranks[0].pid}) is stopped" in failure.detail
    assert replica.process_id() is None


def test_an_engine_that_is_well_is_asked_nothing_before_its_gate_is_over(ready):
    replica, _ = ready()
    before = replica.progress(1.0)
    with Attendant(replica) as attendant:
        time.sleep(1.2)
        assert replica.progress(1.0) == before
    attendant.require_answer()
    assert attendant.failure is None
    assert replica.progress(1.0) > before


def test_c121_an_engine_that_hangs_once_its_gate_has_passed_has_not_passed(ready, monkeypatch):
    monkeypatch.setattr(attending, "ANSWER_SECONDS", 0.4)
    replica, _ = ready()
    with Attendant(replica) as attendant:
        stopping.stand_still(replica.ranks[0].pid)
    with pytest.raises(EngineFailed, match="engine_dead: no completion once the gate was over: timeout"):
        attendant.require_answer()
    assert (replica.failure, replica.process_id()) == ("engine_dead", None)


def test_how_far_it_has_loaded_is_told(ready):
    replica, told = ready(lines=("shards:  40%", "compiling took 1.5 s", "shards:  80%"))
    assert "loading: 80 %" in told
    assert told[-1] == "warming: request 1"
    assert compile_ms(replica.log_path, replica.driver.compile_pattern) == 1500
