import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workers.engines import guarded

SCRIPT = str(Path(guarded.__file__).resolve())
SLEEP = "import time; time.sleep(60)"
NOTE = "import os, sys, time; from pathlib import Path; Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"


@pytest.fixture
def begin():
    begun = []

    def start(*command, parent=None):
        words = [sys.executable, "-I", "-S", SCRIPT, str(parent or os.getpid()), *command]
        child = subprocess.Popen(words, stderr=subprocess.PIPE, start_new_session=True)
        begun.append(child)
        return child

    yield start
    for child in begun:
        child.kill()
        child.wait()
        child.stderr.close()


def until(condition):
    deadline = time.monotonic() + 20
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def noted(place):
    return int(until(lambda: place.exists() and place.read_text("utf-8")))


def test_the_engine_takes_the_place_of_the_process_that_was_started(begin, tmp_path):
    child = begin(sys.executable, "-c", NOTE, str(tmp_path / "pid"))
    assert noted(tmp_path / "pid") == child.pid


def test_what_the_engine_started_ends_with_its_first_process(begin, tmp_path):
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {NOTE!r}, sys.argv[1]])"
    child = begin(sys.executable, "-c", code, str(tmp_path / "pid"))
    started = noted(tmp_path / "pid")
    assert alive(started)
    child.kill()
    child.wait()
    until(lambda: not alive(started))


def test_the_engine_ends_with_the_process_that_it_must_not_outlive(tmp_path):
    code = (
        "import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-I', '-S', sys.argv[1],"
        f" str(os.getpid()), sys.executable, '-c', {NOTE!r}, sys.argv[2]], start_new_session=True); time.sleep(60)"
    )
    worker = subprocess.Popen([sys.executable, "-c", code, SCRIPT, str(tmp_path / "pid")])
    try:
        engine = noted(tmp_path / "pid")
        assert alive(engine)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    until(lambda: not alive(engine))


def test_what_asks_the_engine_to_drain_does_not_end_its_guard(begin, tmp_path):
    code = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); exec({NOTE!r})"
    child = begin(sys.executable, "-c", code, str(tmp_path / "pid"))
    noted(tmp_path / "pid")
    os.killpg(child.pid, signal.SIGTERM)
    assert child.wait(20) == 7


@pytest.mark.parametrize("words", [[], ["12"], ["x", "y"], ["-1", "y"]])
def test_words_that_are_no_command_are_refused(words):
    done = subprocess.run([sys.executable, "-I", "-S", SCRIPT, *words], capture_output=True, check=False)
    assert done.returncode == guarded.EXIT_USAGE


def test_a_program_that_is_not_there_is_said(begin):
    child = begin("/no/such/python")
    assert child.wait(20) == guarded.EXIT_USAGE
    assert b"cannot run /no/such/python" in child.stderr.read()


@pytest.mark.parametrize("parent", [1, 2**22 - 1])
def test_an_engine_whose_parent_is_another_process_or_none_does_not_start(begin, parent):
    child = begin(sys.executable, "-c", SLEEP, parent=parent)
    assert child.wait(20) == guarded.EXIT_GONE
    assert b"not what started this one" in child.stderr.read()
