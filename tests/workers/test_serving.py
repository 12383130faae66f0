import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from gates.dialects.llamacpp import LLAMACPP as DIALECT
from gates.endpoint import Endpoint
from schemas.problems import EngineFailed
from schemas.runner import ReplicaState
from schemas.short import took
from tests.support import chain, stopping
from tests.support.disk import small_disk
from workers.engines.base import Command, Launch
from workers.engines.llamacpp import LLAMACPP
from workers.engines.table import DRIVERS
from workers.launchers.base import Condition, Order, ProcessState
from workers.launchers.process import ProcessLauncher
from workers.serving import NEXT, NotWanted, Replica

ENVIRONMENT = LLAMACPP.identity().digest
S = ReplicaState


class Life:
    """One replica of CHAIN, with what it reported."""

    def __init__(self, place, *, environment=ENVIRONMENT, arguments=None, launcher=None, sections=None, **faults):
        self.root = chain.write_bundle_directory(place / "bundle", **faults)
        self.bundle = chain.describe(self.root, environment=environment, arguments=arguments, **(sections or {}))
        self.transitions = []
        self.replica = Replica(
            self.bundle,
            Launch(root=self.root, port_file=place / "run" / "port.json", parent_pid=None),
            workdir=place / "run",
            launcher=launcher or ProcessLauncher(),
            on_transition=lambda state, cause: self.transitions.append((state, cause)),
        )

    @property
    def states(self):
        return [state for state, _ in self.transitions]

    def ready(self, deadline_seconds=30):
        self.replica.start()
        return self.replica.wait_ready(deadline_seconds)


@pytest.fixture
def life(tmp_path):
    lives = []

    def make(**options):
        lives.append(Life(tmp_path / str(len(lives)), **options))
        return lives[-1]

    yield make
    for each in lives:
        each.replica.stop(grace_seconds=0.0)


def failure(life, deadline_seconds=30):
    with pytest.raises(EngineFailed) as caught:
        life.ready(deadline_seconds)
    assert life.states[-1] is S.FAILED
    assert life.replica.process_id() is None
    return caught.value


WORKER = """
import os, resource, sys
from pathlib import Path
from schemas.bundle import Bundle
from schemas.problems import EngineFailed
from workers.engines.base import Launch
from workers.launchers.process import ProcessLauncher
from workers.serving import Replica

root, run = Path(sys.argv[1]), Path(sys.argv[2])
bundle = Bundle.model_validate_json(sys.stdin.read())
replica = Replica(bundle, Launch(root=root, port_file=run / "port.json"), workdir=run, launcher=ProcessLauncher())
exec(sys.argv[3])
replica.start()
try:
    replica.wait_ready(30)
except EngineFailed as problem:
    sys.exit(problem.detail)
report = replica.report("ready")
print(report.pid, report.start_time, report.boot_id, report.address, flush=True)
os.kill(os.getpid(), 9)
"""


def in_a_worker(life, preparation):
    """Make the replica ready in a worker of its own that is then lost."""
    return subprocess.run(
        [sys.executable, "-c", WORKER, str(life.root), str(life.replica.workdir), preparation],
        input=life.bundle.model_dump_json(by_alias=True, exclude_none=True),
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_replica_becomes_ready_by_a_real_completion_and_drains(life):
    one = life()
    ready = one.ready()
    assert (ready.identity.model_ids, ready.identity.context_tokens) == (["chain"], 512)
    assert ready.identity.environment == ENVIRONMENT
    assert 0 < ready.loading_ms <= ready.ready_ms < 30_000
    assert ready.peak_memory_bytes > 10_000_000
    report = one.replica.report("a real completion ended")
    assert (report.state, report.pid) == (S.READY, one.replica.launched.pid)
    assert report.address == ready.address
    assert one.replica.stop().code == 0
    assert one.states == [S.LOADING, S.WARMING, S.READY, S.DRAINING, S.STOPPED]
    assert dict(one.transitions)[S.READY] == f"a real completion ended, ready after {took(ready.ready_ms)}"


def test_a_headless_model_becomes_ready_since_boot_proves_nothing(life):
    assert life(headless=True).ready()


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"truncated_bytes": 900_000}, "weights_unreadable"),
        ({"lfs_pointer": True}, "weights_unreadable"),
        ({"template": "{% for m in %}"}, "template_unreadable"),
        ({"arguments": ["--bogus"]}, "unsupported"),
        ({"environment": "sha256:" + "0" * 64}, "environment_differs"),
    ],
)
def test_a_start_that_fails_says_why_with_the_last_lines_of_the_log(life, options, cause):
    problem = failure(life(**options))
    assert problem.members["cause"] == cause
    is_started = cause not in {"unsupported", "environment_differs"}
    assert bool(problem.members["log_tail"]) is is_started
    assert len(problem.members["log_tail"]) <= 20


def test_an_engine_that_gets_too_little_memory_says_so(life):
    one = life(arguments=[], sections={"runtime": {"context_tokens": 200_000_000, "max_sequences": 1}})
    worker = in_a_worker(one, "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))")
    assert worker.returncode == 1
    assert worker.stderr.startswith("out_of_memory: the engine exited with status 1")


def test_an_engine_that_is_not_ready_in_time_is_stopped(life):
    assert failure(life(), deadline_seconds=0).members["cause"] == "timeout"


def test_an_engine_that_dies_while_loading_is_told_by_its_signal(life):
    one = life()
    launched = one.replica.start()
    os.kill(launched.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="killed: the engine ended by signal 9"):
        one.replica.wait_ready(30)


def test_an_engine_that_hangs_up_is_looked_at_until_it_can_be_told_that_it_ended(life, monkeypatch):
    """The kernel closes the sockets of a killed process before it says so: on a busy machine, well before."""
    one = life()
    one.ready()
    launcher, looks = one.replica._launcher, []
    really = launcher.state

    def late(launched):
        looks.append(launched)
        return ProcessState(Condition.RUNNING) if len(looks) < 4 else really(launched)

    os.kill(one.replica.launched.pid, signal.SIGKILL)
    while really(one.replica.launched).condition is Condition.RUNNING:
        time.sleep(0.01)
    monkeypatch.setattr(launcher, "state", late)
    assert one.replica.probe().detail == "the engine ended by signal 9"
    assert len(looks) >= 4


def test_a_killed_engine_is_found_by_the_next_probe(life):
    one = life()
    one.ready()
    assert one.replica.probe().is_alive
    os.kill(one.replica.launched.pid, signal.SIGKILL)
    probe = one.replica.probe()
    assert (probe.is_alive, probe.detail) == (False, "the engine ended by signal 9")
    assert one.transitions[-1] == (S.FAILED, "killed: the engine ended by signal 9")
    assert one.replica.report("killed").log_tail


def test_an_exit_with_status_0_that_nobody_asked_for_is_a_failure(life):
    one = life()
    one.ready()
    os.kill(one.replica.launched.pid, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while one.replica.process_id() is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not one.replica.probe().is_alive
    assert one.transitions[-1] == (S.FAILED, "exited: the engine exited with status 0")


def test_an_engine_that_hangs_does_not_pass_for_alive(life):
    one = life()
    one.ready()
    stopping.stand_still(one.replica.launched.pid)
    try:
        probe = one.replica.probe(timeout_seconds=0.3)
        assert (probe.is_alive, probe.is_busy) == (False, False)
        assert one.replica.state is S.READY
    finally:
        stopping.go_on(one.replica.launched.pid)
    assert one.replica.probe().is_alive


def test_an_engine_whose_slots_are_all_taken_is_busy_not_dead(life):
    runtime = {"context_tokens": 65_536, "max_sequences": 1}
    one = life(
        extra=chain.endless(),
        template=chain.SELECTING_TEMPLATE,
        context_length=65_536,
        sections={"runtime": runtime},
    )
    one.ready()

    async def probe_while_streaming():
        async with Endpoint(one.replica.base_url, "chain", DIALECT) as endpoint:
            stream = asyncio.create_task(
                endpoint.chat(chain.PROMPT, max_tokens=60_000, template_arguments={"sel": "E"})
            )
            while (await endpoint.metrics())[DIALECT.metrics.running] < 1:  # noqa: ASYNC110 - a test waits
                await asyncio.sleep(0.02)
            probe = await asyncio.to_thread(one.replica.probe, 0.5)
            stream.cancel()
            return probe

    probe = asyncio.run(probe_while_streaming())
    assert (probe.is_alive, probe.is_busy) == (True, True)


def test_an_engine_of_a_lost_worker_is_adopted_with_its_port(life, tmp_path):
    one = life()
    worker = in_a_worker(one, "pass")
    assert worker.returncode == -signal.SIGKILL, worker.stderr
    pid, start_time, boot_id, address = worker.stdout.split()
    assert not one.replica.adopt(int(pid), "1", boot_id, None)
    assert one.replica.state is S.STAGED
    assert one.replica.adopt(int(pid), start_time, boot_id, None)
    ready = one.replica.wait_ready(10)
    assert (ready.address, ready.ready_ms) == (address, None)
    assert one.states == [S.LOADING, S.WARMING, S.READY]
    one.replica.stop()
    assert one.transitions[-1] == (S.STOPPED, "the engine exited")


def test_an_engine_that_serves_another_name_is_refused(life):
    launcher = ProcessLauncher()
    one, other = life(launcher=launcher), life(launcher=launcher)
    one.ready()
    launched = one.replica.launched
    serving = other.bundle.serving.model_copy(update={"served_name": "other"})
    other.replica.bundle = other.bundle.model_copy(update={"serving": serving})
    assert other.replica.adopt(launched.pid, launched.start_time, launched.boot_id, launched.port)
    with pytest.raises(EngineFailed, match="wrong_model: it serves chain"):
        other.replica.wait_ready(10)


def test_waiting_ends_when_the_replica_is_no_longer_wanted(life):
    one = life()
    one.replica.start()
    with pytest.raises(NotWanted):
        one.replica.wait_ready(30, is_wanted=lambda: False)
    one.replica.stop(grace_seconds=5)
    assert one.states[-1] is S.STOPPED


def test_a_replica_stopped_while_it_is_awaited_ends_stopped_not_failed(life):
    one = life()
    launched = one.replica.start()
    stopping.stand_still(launched.pid)
    seen = []

    def wait():
        try:
            one.replica.wait_ready(30)
        except NotWanted as error:
            seen.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    one.replica.stop(grace_seconds=0.2)
    waiting.join(10)
    assert len(seen) == 1
    assert one.states == [S.LOADING, S.DRAINING, S.STOPPED]


def test_a_replica_that_was_never_started_stops_at_once(life):
    one = life()
    one.replica.stop()
    one.replica.stop()
    assert one.states == [S.STOPPED]


def test_every_state_is_reachable_and_the_last_two_are_final():
    reached = {state for following in NEXT.values() for state in following}
    assert reached == set(S) - {S.STAGED}
    assert [state for state, following in NEXT.items() if not following] == [S.STOPPED, S.FAILED]


def stranger_on(port):
    """Another program that listens on a port, as one does that was started in between."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen()
    return listening


def test_a_port_that_somebody_took_before_the_engine_could_is_told_as_such_and_the_next_one_is_free(
    tmp_path, monkeypatch
):
    def told(bundle, launch):
        words = list(LLAMACPP.command(bundle, launch).argv)
        place = words.index("--port-file")
        return Command(tuple(words[:place] + words[place + 2 :]))

    monkeypatch.setitem(DRIVERS, LLAMACPP.name, replace(LLAMACPP, takes_port=True, command=told))
    root = chain.write_bundle_directory(tmp_path / "bundle")
    bundle, launcher = chain.describe(root, environment=ENVIRONMENT), ProcessLauncher()

    def boot(is_taken):
        order, workdir = Order(bundle, root), tmp_path / "run"
        launch = launcher.place(order, workdir, drain_seconds=1.0, parent_pid=None)
        replica = Replica(bundle, launch, workdir=workdir, launcher=launcher, order=order)
        with stranger_on(launch.port) if is_taken else contextlib.nullcontext():
            try:
                replica.start()
                return replica.wait_ready(30)
            finally:
                replica.stop(grace_seconds=0.0)

    with pytest.raises(EngineFailed) as caught:
        boot(is_taken=True)
    assert caught.value.members["cause"] == "port_in_use"
    assert any("couldn't bind" in line for line in caught.value.members["log_tail"])
    assert boot(is_taken=False).ready_ms


def test_an_engine_that_finds_no_room_on_its_disk_says_so_though_it_cannot_write_it(tmp_path):
    root = chain.write_bundle_directory(tmp_path / "bundle")
    bundle = chain.describe(root, environment=ENVIRONMENT)

    def made(disk):
        workdir = disk.path / "run"
        launch = Launch(root=root, port_file=workdir / "port.json", parent_pid=None)
        return Replica(bundle, launch, workdir=workdir, launcher=ProcessLauncher())

    with small_disk(tmp_path / "disk", "1m") as disk:
        disk.fill()
        with pytest.raises(EngineFailed) as caught:
            made(disk).start()
        assert caught.value.members["cause"] == "disk_full"
        disk.make_room()
        late = made(disk)
        launched = late.start()
        stopping.stand_still(launched.pid)
        disk.fill()
        stopping.go_on(launched.pid)
        with pytest.raises(EngineFailed) as caught:
            late.wait_ready(30)
        assert caught.value.members["cause"] == "disk_full"
        assert late.process_id() is None
        disk.make_room()
        again = made(disk)
        again.start()
        assert again.wait_ready(30)
        again.stop(grace_seconds=0.0)
