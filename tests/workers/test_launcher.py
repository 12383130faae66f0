import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from workers.engines.base import Command
from workers.launchers.logs import Keeping, rotate
from workers.launchers.process import (
    Condition,
    Launched,
    LaunchFailed,
    ProcessLauncher,
    ProcessState,
    boot_id,
    start_time,
    strays,
    tail,
    trim,
)

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
POLITE = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); " + SLEEP
FORKING = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "print(child.pid, flush=True); import time; time.sleep(60)"
)


@pytest.fixture
def launcher():
    return ProcessLauncher()


@pytest.fixture
def start(launcher, tmp_path):
    started = []

    def run(code, *, variables=None, session=True):
        command = Command((sys.executable, "-c", code), variables=variables or {})
        launched = launcher.start(command, workdir=tmp_path / "run", log_path=tmp_path / "log", session=session)
        started.append(launched)
        return launched

    yield run
    for launched in started:
        launcher.kill(launched)


def wait_for_log(tmp_path, lines=1):
    deadline = time.monotonic() + 10
    while len(tail(tmp_path / "log")) < lines and time.monotonic() < deadline:
        time.sleep(0.01)
    return tail(tmp_path / "log")


def test_an_engine_gets_nothing_of_the_workers_environment(start, tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICEGATE_TOKEN", "secret")
    start("import json, os; print(json.dumps(dict(os.environ)))", variables={"OMP_NUM_THREADS": "1"})
    environment = json.loads(wait_for_log(tmp_path)[0])
    environment.pop("LC_CTYPE", None)  # the interpreter's own doing
    run = str(tmp_path / "run")
    assert environment.keys() == {"PATH", "LANG", "HOME", "TMPDIR", "OMP_NUM_THREADS"}
    assert (environment["HOME"], environment["TMPDIR"]) == (run, run)


def test_a_started_process_has_its_own_group_session_and_directory(start, tmp_path):
    launched = start(SLEEP)
    assert os.getpgid(launched.pid) == os.getsid(launched.pid) == launched.pid
    assert strays(tmp_path / "run") == [launched]
    assert strays(tmp_path) == []


def test_without_a_session_the_group_is_still_its_own(start):
    launched = start(SLEEP, session=False)
    assert os.getpgid(launched.pid) == launched.pid
    assert os.getsid(launched.pid) == os.getsid(0)


def test_a_program_that_is_missing_cannot_be_launched(launcher, tmp_path):
    with pytest.raises(LaunchFailed, match="/no/such/engine"):
        launcher.start(Command(("/no/such/engine",)), workdir=tmp_path / "run", log_path=tmp_path / "log")


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("pass", 0, "exited with status 0"),
        ("raise SystemExit(7)", 7, "exited with status 7"),
        ("import os; os.abort()", -signal.SIGABRT, "ended by signal 6"),
    ],
)
def test_the_exit_status_is_known(start, launcher, code, status, words):
    state = launcher.wait(start(code), 10)
    assert state == ProcessState(Condition.EXITED, status)
    assert str(state) == words


def test_stopping_lets_a_process_end_by_itself(start, launcher, tmp_path):
    launched = start(POLITE)
    wait_for_log(tmp_path)
    assert launcher.stop(launched, grace_seconds=10) == ProcessState(Condition.EXITED, 5)


def test_stopping_kills_what_does_not_end_in_time(start, launcher, tmp_path):
    launched = start(STUBBORN)
    wait_for_log(tmp_path)
    begun = time.monotonic()
    assert launcher.stop(launched, grace_seconds=0.3) == ProcessState(Condition.EXITED, -signal.SIGKILL)
    assert 0.3 <= time.monotonic() - begun < 5


def test_stopping_ends_the_children_too_even_when_the_process_is_gone(start, launcher, tmp_path):
    launched = start(FORKING)
    child = int(wait_for_log(tmp_path)[0])
    os.kill(launched.pid, signal.SIGKILL)
    launcher.wait(launched, 10)
    assert start_time(child) is not None
    launcher.stop(launched, grace_seconds=1)
    deadline = time.monotonic() + 5
    while start_time(child) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert start_time(child) is None


def test_stopping_twice_changes_nothing(start, launcher):
    launched = start(SLEEP)
    first = launcher.stop(launched, grace_seconds=5)
    assert launcher.stop(launched, grace_seconds=5) == first


def test_a_process_is_adopted_by_another_worker_and_stopped(start, tmp_path):
    launched = start(POLITE)
    wait_for_log(tmp_path)
    other = ProcessLauncher()
    adopted = other.adopt(launched.pid, launched.start_time, launched.boot_id)
    assert adopted == launched
    assert other.state(adopted) == ProcessState(Condition.RUNNING)
    other.stop(adopted, grace_seconds=10)
    # The exit status goes to the parent alone.
    assert other.state(adopted) == ProcessState(Condition.EXITED, None)


def test_a_process_that_outlived_its_worker_is_found_in_its_directory_and_adopted(tmp_path):
    script = (
        "import os, sys; from pathlib import Path\n"
        "from workers.engines.base import Command\n"
        "from workers.launchers.process import ProcessLauncher\n"
        "place = Path(sys.argv[1])\n"
        f"command = Command((sys.executable, '-c', {SLEEP!r}))\n"
        "launched = ProcessLauncher().start(command, workdir=place / 'run', log_path=place / 'log')\n"
        "print(launched.pid, launched.start_time, launched.boot_id, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    worker = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert worker.returncode == -signal.SIGKILL
    pid, ticks, boot = worker.stdout.split()
    launcher = ProcessLauncher()
    adopted = launcher.adopt(int(pid), ticks, boot)
    assert strays(tmp_path / "run") == [adopted]
    assert launcher.kill(adopted).condition is Condition.EXITED


def test_nothing_is_adopted_that_is_not_provably_the_same_process(start, launcher):
    launched = start(SLEEP)
    identity = launched.pid, launched.start_time, launched.boot_id
    assert launcher.adopt(identity[0], str(int(identity[1]) + 1), identity[2]) is None
    assert launcher.adopt(identity[0], identity[1], "00000000-0000-0000-0000-000000000000") is None
    launcher.kill(launched)
    assert launcher.adopt(*identity) is None
    assert launcher.adopt(2**22 + 1, "1", boot_id()) is None


def test_a_process_from_before_a_reboot_is_unknown_and_never_signalled(start, launcher):
    launched = start(SLEEP)
    stale = Launched(launched.pid, launched.start_time, "00000000-0000-0000-0000-000000000000")
    assert ProcessLauncher().state(stale).condition is Condition.UNKNOWN


def test_a_pid_that_was_given_away_is_never_signalled(start, launcher, tmp_path):
    launched = start(SLEEP)
    wait_for_log(tmp_path)
    former = replace(launched, start_time="1")
    ProcessLauncher()._signal(former, signal.SIGKILL)
    time.sleep(0.1)
    assert launcher.state(launched).condition is Condition.RUNNING


def test_a_port_file_of_another_process_is_not_believed(start, launcher, tmp_path):
    launched = start(SLEEP)
    port_file = tmp_path / "port.json"
    assert launcher.listening(launched, port_file).port is None
    port_file.write_text(json.dumps({"pid": launched.pid + 1, "port": 1}))
    assert launcher.listening(launched, port_file).port is None
    port_file.write_text(json.dumps({"pid": launched.pid, "port": 8080}))
    assert launcher.listening(launched, port_file).port == 8080


def test_a_log_is_kept_below_its_cap_while_it_is_written(start, tmp_path):
    start("import sys, time\nfor n in range(100000):\n    print(n, 'x' * 100, flush=True); time.sleep(0.0005)")
    log = tmp_path / "log"
    deadline = time.monotonic() + 20
    while not log.with_name("log.1").exists() and time.monotonic() < deadline:
        trim(log, cap_bytes=20_000)
        time.sleep(0.01)
    assert log.stat().st_size < 20_000
    assert log.with_name("log.1").stat().st_size == 10_000
    wait_for_log(tmp_path)
    assert not log.read_bytes().startswith(b"\0")


def test_a_log_below_its_cap_is_left_alone(tmp_path):
    log = tmp_path / "log"
    log.write_text("a\n")
    trim(log, cap_bytes=2)
    trim(tmp_path / "absent", cap_bytes=2)
    assert log.read_text() == "a\n"


def test_where_there_is_no_room_for_a_copy_a_full_log_is_emptied_all_the_same(tmp_path, monkeypatch):
    def full(path, _):
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = tmp_path / "log"
    log.write_bytes(b"x" * 30)
    monkeypatch.setattr(Path, "write_bytes", full)
    trim(log, cap_bytes=20)
    assert log.stat().st_size == 0
    assert not log.with_name("log.1").exists()
    log.write_text("x")
    with pytest.raises(OSError, match="No space"):
        rotate(log, Keeping(), age_seconds=86_400)  # what is merely old stays where it is
    assert log.read_text() == "x"


def test_the_tail_of_a_log_has_no_control_characters_and_no_endless_lines(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"first\n\n\x1b[31mred\x1b[0m\x00\xff\n" + b"y" * 5000 + b"\n")
    assert tail(log, 2) == ["[31mred[0m\ufffd", "y" * 2000]
    assert tail(tmp_path / "absent") == []
