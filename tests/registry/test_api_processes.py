"""Several processes behind one address: who answers, what they count together, and what is left when one is killed."""

import contextlib
import errno
import json
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from gates.plain import NO_AUTHORITY
from registry.api import processes
from tests.registry.test_api_process import environment, free_port, start, wait_until_ready
from tests.support import stopping
from tests.support.api import make_tokens

SOCKETS = Path("/proc/net/tcp")


@pytest.fixture
def running(committed):
    """Yield (parent, its address, a token) of an API of two processes, and end it."""
    token = make_tokens(committed, "default")["viewer"]
    port = free_port()
    process = start(environment(committed), "--port", str(port), "--processes", "2")
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, url)
        yield process, url, token
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=30)


def until(condition):
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.02)
    return found


def caller(url, token):
    return httpx.Client(
        base_url=url, headers={"authorization": f"Bearer {token}"}, trust_env=False, timeout=30, verify=NO_AUTHORITY
    )


def established(child, port):
    found = psutil.Process(child).net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in found)


def children(process):
    return {one.pid for one in psutil.Process(process.pid).children() if one.status() != psutil.STATUS_ZOMBIE}


def counted(client):
    lines = client.get("/v1/metrics").text.splitlines()
    wanted = 'sluicegate_requests_total{method="GET",route="/v1/me",status="2xx"} '
    return next((int(line.removeprefix(wanted)) for line in lines if line.startswith(wanted)), 0)


def test_callers_are_spread_and_counted_together_and_a_killed_process_is_replaced(running):
    process, url, token = running
    port = httpx.URL(url).port
    before = until(lambda: len(found := children(process)) == 2 and found)
    with caller(url, token) as one, caller(url, token) as other:
        assert {client.get("/v1/me").status_code for client in (one, other)} == {200}
        assert sorted(established(child, port) for child in before) == [1, 1]
        assert [counted(client) for client in (one, other)] == [2, 2]
        killed = min(before)
        os.kill(killed, signal.SIGKILL)
        until(lambda: len(found := children(process)) == 2 and killed not in found)
    # Neither lost what the killed one had counted, nor lets a caller down.
    for number in range(4):
        with caller(url, token) as fresh:
            assert fresh.get("/v1/me").status_code == 200
            assert counted(fresh) == 3 + number


def until_all_answer(running):
    """Return the two processes once both have begun: connections go to them in turns."""
    process, url, token = running
    for _ in range(2):
        with caller(url, token) as fresh:
            assert fresh.get("/v1/me").status_code == 200
    found = children(process)
    until(lambda: not any(established(child, httpx.URL(url).port) for child in found))
    return found


def unread(port):
    """How many connections wait in the backlog of whoever listens."""
    lines = [line.split() for line in SOCKETS.read_text().splitlines()[1:]]
    return sum(int(line[4][9:], 16) for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}"))


def listens(port):
    return f":{port:04X} 00000000:0000 0A" in SOCKETS.read_text()


def asked(token):
    return f"GET /v1/me HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


def test_a_process_that_is_told_to_end_is_handed_nothing_more_and_the_others_answer(running):
    process, url, token = running
    port = httpx.URL(url).port
    before = until_all_answer(running)
    head = f"POST /v1/bundles HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 9\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
        slow.sendall(head.encode())
        assert slow.recv(65536).startswith(b"HTTP/1.1 4")
        (told,) = (child for child in before if established(child, port))
        pipes = len(psutil.Process(told).net_connections("unix"))
        os.kill(told, signal.SIGTERM)
        until(lambda: len(psutil.Process(told).net_connections("unix")) < pipes)
        for _ in range(4):
            with caller(url, token) as fresh:
                assert fresh.get("/v1/me").status_code == 200
        assert told in children(process)
    until(lambda: len(found := children(process)) == 2 and told not in found)


def test_what_the_processes_were_handed_before_their_parent_was_told_to_end_is_answered(running):
    process, url, token = running
    port = httpx.URL(url).port
    held = until_all_answer(running)
    for child in held:
        stopping.stand_still(child)
    connections = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(30)]
    for connection in connections:
        connection.sendall(asked(token))
    until(lambda: not unread(port))
    process.terminate()
    # It has closed its socket, and told its children.
    until(lambda: not listens(port))
    time.sleep(0.2)
    for child in held:
        stopping.go_on(child)
    for connection in connections:
        with connection:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert process.wait(30) == 0


@contextlib.contextmanager
def parent(serve, count=1, most_forks_failing=0):
    """Run a parent of processes that do `serve`, and yield its address and a connection made before it began."""
    listening = processes.listen("127.0.0.1", 0)
    address = listening.getsockname()
    with socket.create_connection(address, timeout=30) as first:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                first.close()
                processes.os.fork = failing(os.fork, most_forks_failing)
                status = processes.Parent(listening, count, serve, grace_seconds=1).run()
            finally:
                os._exit(status)
        listening.close()
        try:
            yield address, first
        finally:
            os.kill(pid, signal.SIGTERM)
            _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def failing(fork, times):
    """A fork that the system refuses some times."""
    left = [times]

    def refused():
        if left[0]:
            left[0] -= 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    return refused


def answer(channel):
    """Say one word to whoever has connected, until the parent ends."""
    while True:
        said, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not said:
            return 0
        with socket.socket(fileno=descriptors[0]) as connection:
            connection.sendall(b"here")


def test_a_parent_that_cannot_fork_tries_again_and_who_has_connected_waits():
    def serve(_place, channel):
        return answer(channel)

    with parent(serve, most_forks_failing=2) as (_, first):
        assert first.recv(10) == b"here"


def test_connections_wait_while_no_process_takes_any_and_go_to_the_next_one_that_does():
    told, tells = socket.socketpair()
    ended, ends = socket.socketpair()

    def serve(_place, channel):
        # The first one takes the first connection, then no more; its successor all.
        if ended.recv(1) == b"1":
            socket.recv_fds(channel, 1, 1)
            channel.close()
            tells.sendall(b"closed")
            return ended.recv(1) != b"2"
        return answer(channel)

    with told, tells, ended, ends:
        ends.sendall(b"1")
        with parent(serve) as (address, first):
            assert told.recv(10) == b"closed"
            with (
                socket.create_connection(address, timeout=30) as second,
                socket.create_connection(address, timeout=30) as third,
            ):
                # Taken when nobody was known to have gone, and left in the backlog since.
                until(lambda: unread(address[1]) == 1)
                ends.sendall(b"23")
                assert (second.recv(10), third.recv(10)) == (b"here", b"here")
            assert first.recv(10) == b""


def test_a_parent_looks_after_its_processes_between_two_turns_of_connections():
    listening = processes.listen("127.0.0.1", 0)
    mine, its = socket.socketpair()
    its.settimeout(0)
    with listening, mine, its, contextlib.ExitStack() as stack:
        one = processes.Parent(listening, 1, lambda *_: 0, grace_seconds=1)
        one._children[0].channel = mine
        for _ in range(70):
            stack.enter_context(socket.create_connection(listening.getsockname()))
        for expected in (processes.MOST_AT_ONCE, 70 - processes.MOST_AT_ONCE):
            one._take()
            handed = 0
            with contextlib.suppress(BlockingIOError):
                while descriptors := socket.recv_fds(its, 1, 1)[1]:
                    handed += 1
                    os.close(descriptors[0])
            assert handed == expected


def test_an_answer_under_way_is_finished_when_the_parent_is_told_to_end(running):
    process, url, token = running
    head = f"GET /v1/me HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=30) as connection:
        connection.sendall(head.encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    held = children(process)
    process.terminate()
    _, logged = process.communicate(timeout=30)
    assert process.returncode == 0
    assert not {pid for pid in held if psutil.pid_exists(pid)}
    events = [json.loads(line)["event"] for line in logged.splitlines()]
    assert events.count("request") == 1
    assert "process_failed" not in events


def test_nothing_is_left_of_a_parent_that_was_killed_and_its_port_is_free(running):
    process, url, _ = running
    held = until(lambda: len(found := children(process)) == 2 and found)
    process.kill()
    process.wait(30)
    until(lambda: not [pid for pid in held if psutil.pid_exists(pid)])
    with socket.create_server(("127.0.0.1", httpx.URL(url).port)):
        pass


def test_an_address_that_is_taken_is_told_in_one_line(committed):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(environment(committed), "--port", str(port), "--processes", "2")
        _, logged = process.communicate(timeout=60)
    assert process.returncode == 3
    assert logged == f"127.0.0.1:{port} cannot be listened on: Address already in use\n"
