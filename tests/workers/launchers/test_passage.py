"""The way into a container that has no network: real processes, real sockets, and what passes through them."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.container_program import free_port
from tests.support.runners import until
from workers.launchers import passage, passages, proc
from workers.launchers.passages import Passages

ENGINE = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    while True:
        client, _ = server.accept()
        {what}
"""
ECHO = """[client.sendall(data) for data in iter(lambda: client.recv(65536), b"")]
        client.sendall(b"over")
        client.close()"""


@contextmanager
def inside(workdir, what=ECHO, *, program=None):
    """Run what a container would run, and yield its process."""
    Passages().prepare(workdir)
    port = str(free_port())
    words = program or [sys.executable, "-c", ENGINE.format(what=what), port]
    place = str(passages.folder(workdir) / passages.NAME)
    with (workdir / "log").open("wb") as log:
        argv = [sys.executable, "-I", "-S", passage.__file__, "inside", place, port, *words]
        child = subprocess.Popen(argv, cwd="/", stderr=log, start_new_session=True)
    try:
        yield child
    finally:
        for each in proc.processes():
            if each.group == child.pid:
                os.kill(each.pid, signal.SIGKILL)
        child.wait()


@pytest.fixture
def through(tmp_path):
    """Return the port that leads to a container whose folder is too long for a socket's address."""
    ways = Passages()
    workdir = tmp_path / ("x" * 60) / "engines"
    told = []

    def port(parent_pid=None):
        told.append(until(lambda: ways.port("c1", workdir, parent_pid=parent_pid), what="a port"))
        return told[-1]

    yield workdir, port, ways
    ways.close("c1", workdir)


def connected(port):
    """Return a connection once the engine answers to it."""

    def attempt():
        client = None
        try:
            client = socket.create_connection(("127.0.0.1", port), timeout=30)
            client.sendall(b"?")
            if client.recv(1) == b"?":
                return client
        except ConnectionResetError:
            pass
        if client is not None:
            client.close()
        return None

    return until(attempt, what="an echo")


def asked(port):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        return client.recv(1)


def test_bytes_pass_both_ways_and_an_end_is_passed_on_in_its_direction(through):
    workdir, port, _ = through
    with inside(workdir), connected(port()) as client:
        sent = os.urandom(4_000_000)
        sending = threading.Thread(target=lambda: (client.sendall(sent), client.shutdown(socket.SHUT_WR)))
        sending.start()
        received = b"".join(iter(lambda: client.recv(1 << 16), b""))
        sending.join()
    assert received == sent + b"over"


def test_many_pass_at_once_and_none_waits_for_another(through):
    workdir, port, _ = through
    echo = "[c.sendall(data) for data in iter(lambda: c.recv(65536), b'')]"
    threaded = f"import threading; threading.Thread(target=lambda c: {echo}, args=(client,), daemon=True).start()"
    with inside(workdir, threaded):
        first = connected(port())
        others = [socket.create_connection(first.getpeername(), timeout=30) for _ in range(50)]
        for number, client in enumerate(others):
            client.sendall(bytes([number]))
        assert [client.recv(1)[0] for client in reversed(others)] == list(reversed(range(50)))
        for client in (first, *others):
            client.close()


def test_a_port_that_leads_nowhere_is_cut_as_one_that_nobody_listens_on(through):
    workdir, port, ways = through
    ways.prepare(workdir)
    with pytest.raises(ConnectionResetError):
        asked(port())


def test_a_link_that_a_container_puts_in_its_socket_s_place_leads_nowhere(through, tmp_path, monkeypatch):
    workdir, port, ways = through
    ways.prepare(workdir)
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as of_the_machine:
        of_the_machine.bind("of-the-machine")
        of_the_machine.listen()
        (passages.folder(workdir) / passages.NAME).symlink_to(tmp_path / "of-the-machine")
        with pytest.raises(ConnectionResetError):
            asked(port())
        of_the_machine.setblocking(False)
        with pytest.raises(BlockingIOError):
            of_the_machine.accept()


def test_nobody_else_of_the_machine_can_put_a_socket_there(tmp_path):
    Passages().prepare(tmp_path / "w")
    assert (tmp_path / "w").stat().st_mode & 0o777 == 0o700
    assert passages.folder(tmp_path / "w").stat().st_mode & 0o777 == 0o777


def test_once_the_way_is_there_nothing_more_is_written_where_it_leads(through):
    workdir, port, _ = through
    with inside(workdir):
        connected(port()).close()
        again = port()  # the first look may have been before the socket was there
        assert passages.folder(workdir).stat().st_mode & 0o777 == 0o711
        connected(again).close()


def test_a_number_that_another_process_got_is_not_ended_in_its_place(through, monkeypatch):
    workdir, port, ways = through
    with inside(workdir), subprocess.Popen(["/bin/sleep", "60"]) as other:
        port()
        monkeypatch.setattr(passages, "_read", lambda _: {"pid": other.pid, "port": 1})
        monkeypatch.setattr(passages, "_told", lambda _: 1)
        ways.close("another", workdir)
        assert other.poll() is None
        monkeypatch.undo()
        other.kill()


def test_the_program_is_the_first_process_and_its_end_is_the_container_s(tmp_path):
    with inside(tmp_path / "a", program=[sys.executable, "-c", "raise SystemExit(7)"]) as child:
        assert child.wait(30) == 7
    with inside(tmp_path / "b", program=["/no/such/engine"]) as child:
        assert child.wait(30) == 1
        assert "/no/such/engine: No such file or directory" in (tmp_path / "b" / "log").read_text()
    with inside(tmp_path / "c", program=[sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(30) == -signal.SIGTERM


def test_what_passes_on_is_taken_over_by_the_next_runner_and_ends_with_the_folder(through):
    workdir, port, ways = through
    ways.prepare(workdir)
    first = port()
    assert Passages().port("c1", workdir, parent_pid=None) == first
    passages.folder(workdir).rmdir()
    until(lambda: not proc.strays(workdir), what="its end")


def test_what_passes_on_for_a_gate_ends_with_the_runner(tmp_path):
    workdir = tmp_path / "w"
    Passages().prepare(workdir)
    code = (
        "import os, sys, time; from pathlib import Path; from workers.launchers.passages import Passages\n"
        "ways, place = Passages(), Path(sys.argv[1])\n"
        "while ways.port('c1', place, parent_pid=os.getpid()) is None: time.sleep(0.02)\n"
        "os.kill(os.getpid(), 9)"
    )
    runner = subprocess.run([sys.executable, "-c", code, str(workdir)], cwd=Path(__file__).parents[3], check=False)
    assert runner.returncode == -signal.SIGKILL
    until(lambda: not proc.strays(workdir), what="its end")


def test_a_port_is_believed_only_of_the_process_that_told_it_for_this_replica(through):
    workdir, port, ways = through
    ways.prepare(workdir)
    first = port()
    told = workdir / "passage.json"
    pid = json.loads(told.read_text())["pid"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        told.write_text(f'{{"pid": {os.getpid()}, "port": {other.getsockname()[1]}}}')
        assert ways.port("c1", workdir, parent_pid=None) is None
    told.write_text(told.read_text().replace(str(os.getpid()), "999999999"))
    assert ways.port("c1", workdir, parent_pid=None) is None
    told.write_text(f'{{"pid": {pid}, "port": {first}}}')
    assert ways.port("c1", workdir, parent_pid=None) == first


def test_closing_ends_what_passes_on_whoever_started_it(through):
    workdir, port, ways = through
    ways.prepare(workdir)
    port()
    Passages().close("c1", workdir)
    ways.close("c1", workdir)
    assert proc.strays(workdir) == []
    ways.close("c1", workdir)
