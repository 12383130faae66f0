import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from workers.embedded.part import Backoff, Part
from workers.embedded.supervisor import Ending, Outcome, Supervisor
from workers.launchers.process import start_time

ROOT = Path(__file__).parents[3]
QUICK = Backoff(first_seconds=0.05, longest_seconds=0.2, crashes=3)


class Stage:
    """Runs parts in this process and acts on them from another thread, since signals come to the main one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.ready = threading.Event()

    def part(self, name: str, script: str, **more) -> Part:
        return Part(name, ("/bin/sh", "-c", script), self.folder, {"PATH": os.environ["PATH"]}, **more)

    def service(self, name: str, **more) -> Part:
        """A part that says when it is ready, and writes its name into a file that all share when asked to end."""
        script = f"trap 'echo {name} >> ended; kill $!; exit 0' TERM; echo up; sleep 600 & wait"
        return self.part(name, script, **{"ready_text": "up", **more})

    def run(self, parts: list[Part], act, *, wait_seconds: float = 20.0) -> Outcome:
        supervisor = Supervisor(
            parts, logs=self.folder, record=self.folder / "processes.json", say=self.said.append, backoff=QUICK
        )
        actor = threading.Thread(target=act, args=(supervisor,), daemon=True)
        actor.start()
        outcome = supervisor.run(self.ready.set, wait_seconds=wait_seconds)
        actor.join(5)
        return outcome

    def stop(self, supervisor: Supervisor | None = None) -> None:
        self.ready.wait(10)
        os.kill(os.getpid(), signal.SIGTERM)

    def record(self) -> list[dict]:
        return json.loads((self.folder / "processes.json").read_bytes())


@pytest.fixture
def stage(tmp_path):
    # A shell that starts tests in the background has SIGINT ignored, and the supervisor heeds that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield Stage(tmp_path)
    signal.signal(signal.SIGINT, before)


def until(claim, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def test_a_part_starts_when_what_it_stands_on_is_ready(stage):
    first = stage.part("first", "sleep 0.3; echo first >> order; echo up; exec sleep 600", ready_text="up")
    step = stage.part("step", "echo step >> order", is_step=True, after=("first",))
    last = stage.part("last", "echo last >> order; echo up; exec sleep 600", ready_text="up", after=("step",))
    outcome = stage.run([last, step, first], stage.stop)
    assert outcome.ending is Ending.ASKED
    assert (stage.folder / "order").read_text().split() == ["first", "step", "last"]


def test_a_killed_part_starts_again_and_is_ready_again(stage):
    pids = []

    def act(supervisor):
        stage.ready.wait(10)
        pids.append(supervisor.running()["web"])
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: supervisor.running().get("web", pids[0]) != pids[0])
        pids.append(supervisor.running()["web"])
        until(lambda: stage.said.count("web is ready") == 2)
        stage.stop()

    outcome = stage.run([stage.service("web")], act)
    assert outcome.ending is Ending.ASKED
    assert "web ended by signal 9; it starts again in 0.05 s" in "\n".join(stage.said)
    assert [start_time(pid) for pid in pids] == [None, None]


def test_a_part_that_ends_again_and_again_is_given_up_with_its_last_words(stage):
    bad = stage.part("bad", "echo it is broken; exit 7", after=("good",))
    began = time.monotonic()
    outcome = stage.run([stage.service("good"), bad], lambda _: None)
    assert outcome.ending is Ending.CRASHING
    assert "bad exited with status 7, 3 times" in outcome.reason
    assert outcome.tail[-1] == "it is broken"
    assert time.monotonic() - began >= QUICK.pause(1) + QUICK.pause(2)
    assert (stage.folder / "ended").read_text() == "good\n"


def test_a_step_that_fails_is_tried_again(stage):
    step = stage.part("step", "test -e second || { touch second; exit 1; }", is_step=True)
    assert stage.run([step], stage.stop).ending is Ending.ASKED
    assert stage.said == [f"step exited with status 1; it starts again in 0.05 s (see {stage.folder / 'step.log'})"]


def test_a_program_that_is_not_there_is_given_up_and_named(stage):
    missing = Part("missing", ("/nonexistent/program",), stage.folder)
    outcome = stage.run([missing], lambda _: None)
    assert outcome.ending is Ending.CRASHING
    assert "/nonexistent/program" in "\n".join(outcome.tail)


@pytest.mark.parametrize(("recent", "pause"), [(1, 0.1), (2, 0.3), (4, 2.7), (5, 8.1), (6, None)])
def test_pauses_grow_until_a_part_is_given_up(recent, pause):
    assert Backoff().pause(recent) == (pause if pause is None else pytest.approx(pause))


def test_pauses_stay_below_the_longest_one():
    assert Backoff(crashes=100).pause(50) == Backoff().longest_seconds


def test_parts_stop_by_rank_and_those_of_one_rank_together(stage):
    parts = [stage.service("base", stop_rank=3), stage.service("a", stop_rank=1), stage.service("b", stop_rank=1)]
    stage.run([*parts, stage.service("door", stop_rank=0)], stage.stop)
    ended = (stage.folder / "ended").read_text().split()
    assert ended[0] == "door"
    assert sorted(ended[1:3]) == ["a", "b"]
    assert ended[3] == "base"


def test_what_comes_before_an_end_is_waited_for_and_output_is_read_meanwhile(stage):
    alive = []
    log = stage.folder / "flood.log"

    def drain():
        size = log.stat().st_size
        # More than a pipe holds: the part only gets on when somebody reads.
        until(lambda: log.stat().st_size > size + 200_000)
        alive.append(start_time(stage.record()[0]["pid"]))

    script = "echo up; while :; do echo 0123456789; done"
    stage.run([stage.part("flood", script, ready_text="up", before_stop=drain)], stage.stop)
    assert alive[0] is not None


def test_a_second_request_cuts_the_waiting_short(stage):
    def act(_):
        stage.stop()
        time.sleep(1.1)  # within a second it would be the same request
        os.kill(os.getpid(), signal.SIGINT)

    began = time.monotonic()
    outcome = stage.run([stage.service("web", before_stop=lambda: time.sleep(60))], act)
    assert outcome.ending is Ending.ASKED
    assert time.monotonic() - began < 10


def test_a_part_that_will_not_end_is_killed(stage):
    script = "trap '' TERM; echo up; while :; do sleep 0.1; done"
    stage.run([stage.part("stubborn", script, ready_text="up", stop_seconds=0.3)], stage.stop)
    assert "stubborn did not end in time and is killed" in stage.said


def test_a_stack_that_is_not_ready_in_time_says_which_part_is_late(stage):
    late = stage.part("late", "echo still thinking; exec sleep 600", ready=lambda: False)
    outcome = stage.run([stage.service("fine"), late], lambda _: None, wait_seconds=0.5)
    assert outcome.ending is Ending.NOT_READY
    assert "late" in outcome.reason
    assert "fine" not in outcome.reason
    assert outcome.tail == ["still thinking"]


def test_the_record_names_the_running_processes_and_goes_with_them(stage):
    seen = []

    def act(_):
        stage.ready.wait(10)
        seen.extend(stage.record())
        stage.stop()

    stage.run([stage.service("base", stop_rank=5), stage.service("door")], act)
    assert [each["name"] for each in seen] == ["door", "base"]
    assert all(start_time(each["pid"]) is None for each in seen)
    assert not (stage.folder / "processes.json").exists()


def test_a_part_is_told_to_end_when_its_supervisor_is_killed(stage):
    script = """
import os, signal, subprocess, time
from workers.embedded import launch
argv = ["/bin/sh", "-c", "trap 'echo > told; exit' TERM; echo > up; while :; do sleep 0.05; done"]
subprocess.Popen(launch.command(argv, death_signal=signal.SIGTERM), start_new_session=True)
while not os.path.exists("up"):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", script], cwd=stage.folder, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    until((stage.folder / "told").exists)


def test_a_part_whose_supervisor_is_gone_already_does_not_start(stage):
    from workers.embedded import launch  # beside what it is about

    command = launch.command(["/bin/sh", "-c", "echo > started"], death_signal=signal.SIGTERM)
    command[4] = "1"
    assert subprocess.run(command, cwd=stage.folder, check=False).returncode == 1
    assert not (stage.folder / "started").exists()


def test_a_part_that_was_asked_to_end_early_ends_before_it_is_ready(stage):
    slow = stage.part("slow", "echo > begun; exec sleep 600", ready=lambda: False)

    def act(_):
        until((stage.folder / "begun").exists)
        os.kill(os.getpid(), signal.SIGINT)

    outcome = stage.run([slow, replace(slow, name="never", after=("slow",))], act)
    assert outcome.ending is Ending.ASKED
    assert not stage.ready.is_set()
