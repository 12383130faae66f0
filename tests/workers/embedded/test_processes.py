import json
import os
import signal
import subprocess

import pytest

from tests.support.embedded import runs, until
from workers.embedded import processes
from workers.launchers.process import Launched, boot_id, start_time, strays


@pytest.fixture
def sleeper():
    """A process that ends when asked."""
    process = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def identity(process, **changes):
    found = {"pid": process.pid, "start_time": start_time(process.pid), "boot_id": boot_id()}
    return {**found, **changes}


def test_a_recorded_process_is_ended_at_the_next_start_and_its_record_goes(tmp_path, sleeper):
    path, said = tmp_path / "processes.json", []
    processes.record(path, [("api", Launched(**identity(sleeper)))])
    processes.end_leftovers(path, said.append)
    assert sleeper.wait(5) == -signal.SIGTERM
    assert said[0].startswith(f"ended api (pid {sleeper.pid}), left by an earlier start")
    assert not path.exists()
    processes.end_leftovers(path, said.append)
    assert len(said) == 1


def test_a_runner_is_ended_without_the_live_engines_that_it_started(tmp_path):
    script = "setsid sleep 60 & echo $! > engine; wait"
    runner = subprocess.Popen(["sh", "-c", script], cwd=tmp_path, start_new_session=True)
    until(lambda: (tmp_path / "engine").exists() and (tmp_path / "engine").read_text().endswith("\n"))
    engine = int((tmp_path / "engine").read_text())
    until(lambda: os.getsid(engine) == engine)
    try:
        path = tmp_path / "processes.json"
        processes.record(path, [("runner", Launched(**identity(runner)))])
        processes.end_leftovers(path, lambda _: None)
        assert runner.wait(5) == -signal.SIGTERM
        assert runs(engine)
    finally:
        os.kill(engine, signal.SIGKILL)


@pytest.mark.parametrize("changes", [{"start_time": "1"}, {"boot_id": "another"}, {"pid": "1"}, {"start_time": None}])
def test_a_process_that_is_not_provably_the_recorded_one_is_left_alone(tmp_path, sleeper, changes):
    path = tmp_path / "processes.json"
    path.write_text(json.dumps([{"name": "api", **identity(sleeper, **changes)}]))
    processes.end_leftovers(path, lambda _: None)
    (tmp_path / "replicas").mkdir()
    (tmp_path / "replicas" / "one.json").write_text(json.dumps(identity(sleeper, **changes)))
    processes.end_engines(tmp_path, lambda _: None)
    assert runs(sleeper.pid)


@pytest.mark.parametrize("text", ["", "{", "[1, {}]", "7"])
def test_a_damaged_record_stops_nobody(tmp_path, text):
    path = tmp_path / "processes.json"
    path.write_text(text)
    processes.end_leftovers(path, lambda _: None)
    (tmp_path / "replicas").mkdir()
    (tmp_path / "replicas" / "one.json").write_text(text)
    processes.end_engines(tmp_path, lambda _: None)


def test_engines_that_outlived_the_runner_are_ended_together(tmp_path, sleeper):
    script = "trap '' TERM; while :; do sleep 0.1; done"
    replicas = tmp_path / "replicas"
    replicas.mkdir()
    stubborn = subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)
    for number, process in enumerate((sleeper, stubborn)):
        (replicas / f"{number}.json").write_text(json.dumps(identity(process)))
    said = []
    try:
        processes.end_engines(tmp_path, said.append, grace_seconds=0.3)
        assert sleeper.wait(5) == -signal.SIGTERM
        assert stubborn.wait(5) == -signal.SIGKILL
    finally:
        stubborn.kill()
    assert len(said) == 2
    assert len(list(replicas.iterdir())) == 2  # the runner boots them again


@pytest.mark.parametrize("kind", ["replicas", "engines"])
def test_an_engine_that_nobody_wrote_down_is_found_by_its_folder(tmp_path, kind):
    folder = tmp_path / kind / "0190"
    folder.mkdir(parents=True)
    engine = subprocess.Popen(["/bin/sleep", "600"], env={"HOME": str(folder)}, start_new_session=True)
    try:
        until(lambda: strays(folder))
        processes.end_engines(tmp_path, lambda _: None)
        assert engine.wait(5) < 0
    finally:
        engine.kill()
