"""What a release stands on misbehaves while it goes on: clocks, the broker, connections to the database."""

import ast
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
import redis
from celery import Celery

from schemas.evidence import Kind
from schemas.release import Phase
from tests.support import fall
from tests.support.ground import Ground
from workers.broker import CONTROL_QUEUE, configure

ROOT = Path(__file__).parents[2]
HOUR = 3600.0

WALL_CLOCK = {
    "registry/storage/incoming.py": "how old an abandoned upload is, by the file system that says when it was written",
    "registry/storage/s3.py": "how old an abandoned upload to a bucket is, by the store that says when it was written",
    "registry/collection.py": "how old a file is that no row knows, by the file system that says when it was written",
    "registry/keys.py": "when a key that nobody knows signed, which is refused whatever the time",
    "registry/posted.py": "whether a lock says that it was resolved in the future, with minutes to spare",
    "registry/cli/tokens.py": "a person's --days",
    "registry/cli/memory.py": "when a remembered hash was last of use",
    "workers/embedded/gateway.py": "what the dead-man switch writes into its notice; it counts on the monotonic clock",
    "workers/embedded/__main__.py": "the supervisor's log",
    "workers/hearing.py": "the log of a control worker that ends",
    "workers/launchers/kube_state.py": "how long a cluster says that it does not find a place for a pod, by its clock",
    "workers/launchers/logs.py": "how old a piece of an engine's log is, by the file system that wrote it",
    "workers/traffic/envoy.py": "a name for a rotated log",
    "workers/demo/": "what the demonstration shows",
}
"""Who may read the wall clock of a machine, and for what. No lease, no order and no verdict of a release."""


def test_no_lease_and_no_record_hangs_on_the_wall_clock_of_a_machine() -> None:
    found = set()
    for package in ("registry", "workers"):
        for path in sorted((ROOT / package).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Attribute) and ast.unparse(node) in {
                    "time.time",
                    "time.time_ns",
                    "datetime.now",
                    "datetime.utcnow",
                    "date.today",
                }:
                    found.add("workers/demo/" if place.startswith("workers/demo/") else place)
    assert found == set(WALL_CLOCK)


@contextmanager
def all_the_while(act: Callable[[int], None], *, every_seconds: float, times: int) -> Iterator[threading.Thread]:
    """Do something again and again, until so many times or until the block ends."""
    ends = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            for number in range(times):
                if ends.wait(every_seconds):
                    return
                act(number)
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        ends.set()
        thread.join(30)
    assert not failed


@pytest.mark.timeout(300)
def test_a_release_goes_on_while_the_clock_is_set_hours_forth_and_back(ground: Ground) -> None:
    def step(number: int) -> None:
        fall.set_clock(ground.armed, (2 * HOUR, -3 * HOUR, 0.0)[number % 3])

    try:
        with ground.traffic(), all_the_while(step, every_seconds=1.0, times=60):
            release = ground.release()
            shown = ground.until_phase(release, Phase.PROMOTED)
    finally:
        fall.set_clock(ground.armed, 0.0)
    ground.assert_sound(release)
    # What was recorded has the database's time: no entry lies in the past of the one before.
    instants = [entry.recorded_at for entry in shown.log]
    assert instants == sorted(instants)
    assert (instants[-1] - instants[0]).total_seconds() < 300
    assert {entry.kind for entry in shown.log} & {Kind.ATTEMPT_ERRORED, Kind.HELD} <= {Kind.ATTEMPT_ERRORED}


def broker_of(ground: Ground) -> str:
    data = ground.home / "data"
    password = (data / "secrets" / "broker.password").read_text("ascii").strip()
    ports = json.loads((data / "ports.json").read_bytes())
    return f"redis://:{password}@127.0.0.1:{ports['broker']}/0"


@pytest.mark.timeout(300)
def test_a_broker_that_says_everything_many_times_in_any_order_or_forgets_it_changes_nothing(ground: Ground) -> None:
    chance, url = random.Random(7), broker_of(ground)
    with Celery(broker=url) as app, redis.Redis.from_url(url) as connection:
        configure(app, queue=CONTROL_QUEUE)
        others = [one.id for one in ground.client.releases.list()]

        def shake(number: int) -> None:
            if number % 3 == 2:
                connection.flushall()
                return
            told: list[UUID | None] = [release, None, *chance.sample(others, min(2, len(others)))] * 6
            chance.shuffle(told)
            for one in told:
                name, words = ("sweep", ()) if one is None else ("reconcile", (str(one),))
                app.send_task(f"workers.tasks.{name}", words, queue=CONTROL_QUEUE, retry=False)

        release = ground.release()
        with ground.traffic(), all_the_while(shake, every_seconds=0.5, times=40):
            ground.until_phase(release, Phase.PROMOTED)
    ground.assert_sound(release)


@pytest.mark.timeout(300)
def test_connections_that_are_cut_in_the_middle_of_transactions_lose_and_double_nothing(ground: Ground) -> None:
    cut = 0
    socket = f"host={ground.home / 'data' / 'run' / 'postgres'} user=postgres dbname=postgres"
    with psycopg.connect(socket, autocommit=True) as owner:

        def saw(_: int) -> None:
            nonlocal cut
            # In the middle of one where there is such a connection at this moment.
            for _ in range(20):
                found = owner.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'sluicegate' "
                    "AND backend_xid IS NOT NULL"
                ).fetchall()
                cut += len(found)
                if found:
                    return
                time.sleep(0.01)
            cut += len(
                owner.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'sluicegate'"
                ).fetchall()
            )

        with ground.traffic(), all_the_while(saw, every_seconds=0.4, times=60):
            release = ground.release()
            ground.until_phase(release, Phase.PROMOTED)
    assert cut >= 10
    ground.assert_sound(release)
