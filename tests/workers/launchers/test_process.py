"""What an engine's process may take and leave behind; tests/workers/test_launcher.py has who it is and how it ends."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.bundle import Bundle
from tests.support.factories import bundle_body
from workers.engines.base import Command
from workers.launchers import proc
from workers.launchers.base import Condition, Launched, LaunchFailed, Limits, Order
from workers.launchers.logs import Keeping, rotate, tail
from workers.launchers.ports import Ports
from workers.launchers.process import ProcessLauncher, boot_id, start_time, strays, told_port

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
LIMITS = (
    "import json, os, resource\n"
    "names = 'CORE', 'NOFILE', 'DATA', 'NPROC'\n"
    "told = {name: resource.getrlimit(getattr(resource, 'RLIMIT_' + name)) for name in names}\n"
    "told['nice'] = os.nice(0)\n"
    "told['oom'] = open('/proc/self/oom_score_adj').read().strip()\n"
    "print(json.dumps(told), flush=True)\n"
)
# A child that leaves the group, the session, the folder and the environment behind, and does not listen to SIGTERM.
ESCAPED = (
    "import os, signal, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid(); os.chdir('/'); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "    os.execve('/bin/sleep', ['sleep', '60'], {})\n"
    "time.sleep(0.2); print(open('/proc/thread-self/children').read(), flush=True); time.sleep(60)\n"
)
ADDRESS = ("127.0.0.1", 0)


@pytest.fixture
def start(tmp_path):
    started = []

    def run(code, *arguments, launcher=None, order=None, variables=None):
        launcher = launcher or ProcessLauncher()
        command = Command((sys.executable, "-c", code, *arguments), variables=variables or {})
        launched = launcher.start(command, workdir=tmp_path / "run", log_path=tmp_path / "log", order=order)
        started.append((launcher, launched))
        return launcher, launched

    yield run
    for launcher, launched in started:
        launcher.kill(launched)


def until(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def said(tmp_path):
    return until(lambda: tail(tmp_path / "log"))


# -------------------------------------------------------------------------------------------------- limits


def test_limits_hold_from_the_first_instruction_of_the_engine(start, tmp_path):
    limits = Limits(memory_bytes=300_000_000, files=123, processes=4096, nice=3)
    start(LIMITS, launcher=ProcessLauncher(limits))
    told = json.loads(said(tmp_path)[0])
    assert told["CORE"] == [1, 1]
    assert told["NOFILE"] == [123, 123]
    assert told["DATA"] == [300_000_000, 300_000_000]
    assert told["NPROC"][0] <= 4096
    assert told["nice"] == min(19, os.nice(0) + 3)
    assert told["oom"] == "500"


def test_an_engine_starts_where_the_runner_is_already_the_first_to_go(start, tmp_path):
    own = Path("/proc/self/oom_score_adj")
    before = own.read_text()
    try:
        own.write_text("700")
        start(LIMITS, launcher=ProcessLauncher())
        assert json.loads(said(tmp_path)[0])["oom"] == "700"
    finally:
        own.write_text(before)


def test_what_has_no_limit_is_as_the_system_sets_it_and_a_core_file_is_never_written(start, tmp_path):
    start(LIMITS, launcher=ProcessLauncher(Limits(files=None)))
    told = json.loads(said(tmp_path)[0])
    assert told["CORE"] == [1, 1]
    assert told["NOFILE"] == list(resource.getrlimit(resource.RLIMIT_NOFILE))
    assert told["DATA"] == list(resource.getrlimit(resource.RLIMIT_DATA))


def test_a_limit_above_the_system_s_is_the_system_s(start, tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    start(LIMITS, launcher=ProcessLauncher(Limits(files=2**30)))
    assert json.loads(said(tmp_path)[0])["NOFILE"] == [min(hard, 2**30)] * 2 if hard > 0 else [2**30] * 2


def test_an_engine_that_takes_more_memory_than_it_may_fails_by_itself(start, tmp_path):
    launcher, launched = start("b = bytearray(400_000_000)", launcher=ProcessLauncher(Limits(memory_bytes=200_000_000)))
    assert launcher.wait(launched, 15).code == 1
    assert said(tmp_path)[-1] == "MemoryError"


def test_an_engine_that_opens_more_files_than_it_may_fails_by_itself(start, tmp_path):
    code = "held = [open('/dev/null') for _ in range(100)]"
    launcher, launched = start(code, launcher=ProcessLauncher(Limits(files=64)))
    assert launcher.wait(launched, 15).code == 1
    assert "Too many open files" in said(tmp_path)[-1]


# ------------------------------------------------------------------------------------------ what it is given


@pytest.mark.parametrize("name", ["LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "BASH_ENV", "HOME"])
def test_a_variable_that_would_make_it_another_program_is_refused_by_name(start, name):
    with pytest.raises(LaunchFailed, match=f"no engine is given the variables {name}"):
        start(SLEEP, variables={name: "/tmp/x", "OMP_NUM_THREADS": "1"})


def test_a_file_that_is_no_program_cannot_be_launched_and_leaves_no_process(tmp_path):
    program = tmp_path / "engine"
    program.write_text("not a program")
    with pytest.raises(LaunchFailed, match=r"cannot start .*engine: Permission denied"):
        ProcessLauncher().start(Command((str(program),)), workdir=tmp_path / "run", log_path=tmp_path / "log")
    assert strays(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("hardware", "devices", "seen"),
    [
        ({"accelerator": "cpu", "count": 0}, (), ""),
        ({"accelerator": "NVIDIA H200", "count": 2}, ("GPU-a", "GPU-b"), "GPU-a,GPU-b"),
        ({"accelerator": "NVIDIA H200", "count": 2}, (), None),
    ],
)
def test_an_engine_sees_the_accelerators_reserved_for_it_whatever_the_bundle_says(
    start, tmp_path, hardware, devices, seen
):
    order = Order(Bundle.model_validate(bundle_body(hardware=hardware)), tmp_path, devices=devices)
    variables = {} if seen is None else {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    start(
        "import os, json; print(json.dumps([os.environ.get('CUDA_VISIBLE_DEVICES')]))", order=order, variables=variables
    )
    assert json.loads(said(tmp_path)[0]) == [seen]


# ------------------------------------------------------------------------------------------------ the tree


def test_stopping_ends_what_left_group_session_folder_and_environment(start, tmp_path):
    launcher, launched = start(ESCAPED)
    child = int(said(tmp_path)[0].split()[0])
    assert os.getsid(child) == child
    assert strays(tmp_path / "run") == [launched]
    launcher.kill(launched)
    assert until(lambda: start_time(child) is None)


@pytest.fixture
def bystander(tmp_path):
    """A person's shell that stands in the replica's folder and has nothing else to do with it."""
    (tmp_path / "run").mkdir()
    with subprocess.Popen(["/bin/sleep", "60"], cwd=tmp_path / "run", env={"PATH": "/bin"}) as child:
        yield child
        child.kill()


@pytest.mark.parametrize("is_marked", [True, False])
def test_who_merely_stands_in_the_folder_of_a_replica_is_left_alone(start, tmp_path, bystander, is_marked):
    order = Order(Bundle.model_validate(bundle_body()), tmp_path) if is_marked else None
    launcher, launched = start(SLEEP, order=order)
    assert (tmp_path / "run" / ".mark").exists() is is_marked
    assert launcher.strays(tmp_path / "run") == [launched]
    assert bystander.poll() is None


# A child that went elsewhere, with a HOME and a session of its own: only the mark is left.
MOVED = (
    "import os, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid(); os.chdir('/'); os.environ['HOME'] = '/'\n"
    "    os.execve('/bin/sleep', ['sleep', '60'], dict(os.environ))\n"
    "time.sleep(0.2); print(open('/proc/thread-self/children').read(), flush=True); time.sleep(60)\n"
)


def test_what_an_engine_started_is_known_by_the_mark_that_nobody_else_has(start, tmp_path):
    launcher, launched = start(MOVED, order=Order(Bundle.model_validate(bundle_body()), tmp_path))
    child = int(said(tmp_path)[0].split()[0])
    assert [one.pid for one in launcher.strays(tmp_path / "run")] == sorted([launched.pid, child])
    # As a runner finds it to which the same name is another place: its folder has a mark of its own.
    (tmp_path / "run" / ".mark").write_text("0" * 32)
    assert launcher.strays(tmp_path / "run") == []
    assert start_time(child) is not None


def test_nothing_is_taken_for_the_tree_of_a_process_whose_pid_was_given_away(start, tmp_path):
    _, launched = start(ESCAPED)
    said(tmp_path)
    assert len(proc.tree(launched)) == 1
    assert proc.tree(replace(launched, start_time="1")) == []
    assert proc.tree(replace(launched, boot_id="of another boot")) == []


SUBREAPER = (
    "import os, signal, sys, time; from pathlib import Path\n"
    "from workers.engines.base import Command\n"
    "from workers.launchers import proc\n"
    "from workers.launchers.process import ProcessLauncher, become_subreaper\n"
    "become_subreaper()\n"
    "place = Path(sys.argv[1]); launcher = ProcessLauncher()\n"
    "fork = 'import os, time\\nif os.fork() == 0:\\n    time.sleep(0.3); os._exit(0)\\ntime.sleep(60)'\n"
    "launched = launcher.start(Command((sys.executable, '-c', fork)), workdir=place / 'run', log_path=place / 'log')\n"
    "while not (children := proc.tree(launched)): time.sleep(0.01)\n"
    "launcher.crash(launched)\n"
    "def left(): return [s for s in proc.processes() if s.pid == children[0].pid]\n"
    "while not (found := left())[0].is_dead: time.sleep(0.01)\n"
    "print(found[0].parent == os.getpid())\n"
    "launcher.reap()\n"
    "print(left(), launcher.state(launched))\n"
)


# A process namespace of its own, as a container has: what is started there first is PID 1, and nobody above collects.
PID_1 = ["unshare", "--pid", "--fork", "--mount-proc"]


@pytest.mark.parametrize("within", [[], PID_1], ids=["subreaper", "pid 1"])
def test_what_an_ended_engine_leaves_is_collected_by_its_runner_as_by_pid_1(tmp_path, within):
    if within and subprocess.run([*within, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this account may make no process namespace")
    code = SUBREAPER if not within else SUBREAPER.replace("become_subreaper()\n", "assert os.getpid() == 1\n")
    done = subprocess.run(
        [*within, sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["True", "[] ended by signal 9"]


# --------------------------------------------------------------------------------------------------- ports

SERVER = (
    "import socket, sys, time\n"
    "held = socket.socket(); held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
    "held.bind(('127.0.0.1', int(sys.argv[2]))); held.listen(); print('listens', flush=True); time.sleep(60)\n"
)


def test_a_held_port_is_taken_by_the_engine_and_by_nobody_who_asks_for_any(start, tmp_path):
    ports = Ports()
    port = ports.hold()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    launcher, launched = start(SERVER, "--port", str(port))
    assert said(tmp_path) == ["listens"]
    assert until(lambda: launcher.listening(launched, None).port) == port
    # As a worker that comes later finds it.
    adopted = ProcessLauncher().adopt(launched.pid, launched.start_time, launched.boot_id)
    assert ProcessLauncher().listening(adopted, None).port == port
    ports.release(port)
    ports.release(port)


def test_a_port_on_which_somebody_else_listens_is_not_the_engine_s(start, tmp_path):
    with socket.socket() as stranger:
        stranger.bind(ADDRESS)
        stranger.listen()
        port = stranger.getsockname()[1]
        launcher, launched = start(SLEEP, "--port", str(port))
        said(tmp_path)
        assert proc.listens(port, [os.getpid()])
        assert launcher.listening(launched, None).port is None


def test_the_port_that_an_engine_is_told_is_read_from_its_command_line():
    assert told_port(["engine", "--port", "8000"]) == 8000
    assert told_port(["engine", "--port=8000", "--host", "0"]) == 8000
    assert told_port(["engine", "--port", "0"]) is None
    assert told_port(["engine", "--portal", "8000", "--port"]) is None


# ---------------------------------------------------------------------------------------------------- logs


def test_a_log_is_kept_below_its_bounds_while_the_engine_writes_and_nobody_asks(start, tmp_path):
    keeping = Keeping(cap_bytes=20_000, pieces=2, look_seconds=0.02)
    launcher, launched = start(
        "import time\nfor n in range(100000):\n    print(n, 'x' * 1000, flush=True); time.sleep(0.001)",
        launcher=ProcessLauncher(keeping=keeping),
    )
    log = tmp_path / "log"
    assert until(log.with_name("log.2").exists)
    before = tail(log)
    assert until(lambda: tail(log) != before)
    launcher.kill(launched)
    assert 0 < log.with_name("log.1").stat().st_size <= 20_000
    assert not log.with_name("log.3").exists()


def test_a_piece_ends_by_time_with_all_that_is_in_it(tmp_path):
    log = tmp_path / "log"
    log.write_text("first\n")
    assert not rotate(log, Keeping(), age_seconds=10)
    assert rotate(log, Keeping(), age_seconds=86_400)
    assert (log.read_text(), (tmp_path / "log.1").read_text()) == ("", "first\n")
    assert not rotate(log, Keeping(), age_seconds=86_400)


def test_pieces_move_on_and_those_too_many_or_too_old_are_removed(tmp_path):
    log, keeping = tmp_path / "log", Keeping(pieces=2, keep_seconds=1000)
    for number in range(4):
        log.write_text(f"{number}\n")
        rotate(log, keeping, age_seconds=86_400)
    assert [(tmp_path / f"log.{n}").read_text() for n in (1, 2)] == ["3\n", "2\n"]
    assert not (tmp_path / "log.3").exists()
    os.utime(tmp_path / "log.2", (1, 1))
    rotate(log, keeping, age_seconds=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]


def test_the_log_of_an_ended_engine_is_looked_after_no_more(start):
    launcher, launched = start(SLEEP)
    launcher.kill(launched)
    assert launcher._keeper._begun == {}


def test_a_handle_of_another_launcher_is_never_taken_for_a_process(start):
    launcher, launched = start(SLEEP)
    assert launcher.adopt(launched.pid, launched.start_time, launched.boot_id, "a container") is None
    state = launcher.state(Launched(0, "uid", boot_id(), handle="pods/a"))
    assert state.condition is Condition.EXITED
    launcher._signal(Launched(0, "uid", boot_id()), signal.SIGKILL)
