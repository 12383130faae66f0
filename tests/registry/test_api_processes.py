"""Several processes behind one address: who answers, what they count together, and what is left when one is killed."""

import json
import os
import signal
import socket
import time

import httpx
import psutil
import pytest

from tests.registry.test_api_process import environment, free_port, start, wait_until_ready
from tests.support.api import make_tokens


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
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, trust_env=False, timeout=30)


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
