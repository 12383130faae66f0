"""The interface as a process: settings from the environment, logs, a clean end; and many callers at once."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from sqlalchemy import text

from gates.plain import NO_AUTHORITY
from registry import evidence
from registry.api.__main__ import database_share
from registry.api.app import KEPT_FOR_READERS
from registry.api.middleware import QUIET
from registry.settings import MOST_PROCESSES, Gateway
from tests.support.api import Api, make_tokens
from tests.support.phases import gated


def environment(service, **changes):
    settings = service.settings
    values = {
        "DATABASE_URL": settings.database_url.get_secret_value(),
        "BROKER_URL": "redis://127.0.0.1:1/0",
        "STORAGE_DIR": str(settings.storage_dir),
        "SIGNING_KEY": str(settings.signing_key),
        **changes,
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLUICEGATE_")}
    return kept | {f"SLUICEGATE_{name}": value for name, value in values.items()}


def start(environ, *arguments):
    """Start it from a shell that lets it have few open files."""
    command = [sys.executable, "-m", "registry.api", *arguments]
    limited = ["sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh", *command]
    return subprocess.Popen(limited, env=environ, stderr=subprocess.PIPE, text=True)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def wait_until_ready(process, url):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/readyz", trust_env=False, verify=NO_AUTHORITY).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail("the process did not become ready")


def test_the_process_serves_logs_one_object_a_line_and_ends_when_told(committed):
    token = make_tokens(committed, "default")["engineer"]
    port = free_port()
    process = start(environment(committed), "--port", str(port))
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(process, url)
        answer = httpx.get(
            f"{url}/v1/me", headers={"authorization": f"Bearer {token}"}, trust_env=False, verify=NO_AUTHORITY
        )
        assert answer.json()["role"] == "engineer"
        soft, hard = psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard > 256
    finally:
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=30)
    assert process.returncode == 0
    events = [json.loads(line) for line in logged.splitlines()]
    (request,) = [event for event in events if event["event"] == "request"]
    assert (request["method"], request["path"], request["status"]) == ("GET", "/v1/me", 200)
    assert request["request_id"] == answer.headers["x-request-id"]
    assert request["actor"] == "default/engineer"
    assert not QUIET & {event.get("path") for event in events}
    assert token not in logged


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        (
            {"DATABASE_URL": "", "STORAGE_DIR": ""},
            2,
            "settings: SLUICEGATE_DATABASE_URL: Field required; SLUICEGATE_STORAGE",
        ),
        ({"MAX_BLOB_BYTES": "lots"}, 2, "settings: SLUICEGATE_MAX_BLOB_BYTES: Input should be a valid integer"),
        ({"DATABASE_URL": "postgresql+psycopg://u:hidden@127.0.0.1:1/x"}, 4, "the database does not answer"),
    ],
)
def test_a_process_that_cannot_start_says_why_in_one_line_without_secrets(committed, changes, status, said):
    process = start(environment(committed, **changes), "--port", "1")
    _, logged = process.communicate(timeout=60)
    assert process.returncode == status
    assert logged.startswith(said)
    assert "Traceback" not in logged
    assert "hidden" not in logged


def test_more_callers_than_connections_and_threads_are_all_answered(committed):
    """Nobody holds a connection while waiting for a thread that waits for a connection."""
    few = committed.settings.model_copy(update={"database_pool": 1})
    engine = type(committed).build(few)
    statuses = []
    with Api(engine) as api:

        def call():
            with api.client(api.tokens["engineer"]) as client:
                statuses.extend(client.get("/v1/evidence", timeout=60).status_code for _ in range(3))

        threads = [threading.Thread(target=call) for _ in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert statuses == [200] * 180


def test_requests_that_wait_for_one_lock_keep_no_reader_waiting(committed, tmp_path):
    """Not in the smallest process that several make, however many of them come."""
    pool = database_share(committed.settings.database_pool, MOST_PROCESSES)
    gateways = {"local": Gateway(directory=tmp_path / "gateway", url="http://127.0.0.1:1")}
    process = type(committed).build(committed.settings.model_copy(update={"database_pool": pool, "gateways": gateways}))
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    with Api(process) as api:
        release = gated(process, api.actor("engineer"))

        def count():
            with committed.database.look() as connection:
                return connection.scalar(waiting)

        def pause():
            with api.client(api.tokens["manager"]) as client:
                return client.post(f"/v1/releases/{release}/pauses", json={"reason": "x"}).status_code

        with ThreadPoolExecutor(2 * pool) as threads:
            with committed.database.transaction() as session:
                evidence.hold(session, release)
                waiters = [threads.submit(pause) for _ in range(2 * pool)]
                while count() < pool - KEPT_FOR_READERS:
                    assert not any(one.done() for one in waiters)
                for path in ("/readyz", "/v1/me", "/v1/targets", f"/v1/releases/{release}"):
                    assert api.clients["viewer"].get(path).status_code == 200
                assert not any(one.done() for one in waiters)
            assert {one.result(30) for one in waiters} <= {200, 409}


@pytest.mark.parametrize(("pool", "count", "share"), [(10, 1, 10), (10, 4, 5), (40, 4, 10), (41, 4, 11), (2, 4, 2)])
def test_processes_share_connections_and_none_has_too_few(pool, count, share):
    assert database_share(pool, count) == share


def test_an_error_that_nobody_expected_is_in_the_log_under_the_id_that_the_caller_got(committed, capsys):
    with Api(committed) as api:
        with committed.database.engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE entries RENAME COLUMN actor TO who")
        refused = api.clients["engineer"].get("/v1/evidence")
    assert refused.status_code == 500
    assert refused.json()["type"].endswith("/internal-error")
    assert "actor" not in refused.text
    logged = capsys.readouterr().out
    assert refused.json()["request_id"] in logged
    assert "UndefinedColumn" in logged
