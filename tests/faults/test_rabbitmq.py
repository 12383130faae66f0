"""RabbitMQ as the broker: what rings, what must not pile up, and what its failures change, which is nothing."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import pytest
from amqp.exceptions import InternalError
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.worker import loops
from sqlalchemy import select
from structlog.testing import capture_logs

from registry import brokers, logs
from registry.brokers import Look
from registry.service import Service
from registry.tables import JobRow
from schemas.api import ReleaseCreate, TargetCreate
from schemas.release import Phase
from tests.support import factories, programs, rabbit, stopping
from tests.support.broker import free_port
from tests.support.ground import assert_once
from tests.support.rabbit import Rabbit
from tests.support.runners import CLASS, QUICK_GATES, Bench, bench, until
from workers.broker import CONTROL_QUEUE, MOST_WAITING, RING_SECONDS, configure, ring, waiting
from workers.clock import SCHEDULE, Scheduler

pytestmark = pytest.mark.skipif(not rabbit.is_installed(), reason=rabbit.MISSING)

RING = "workers.runner.ring"
RUNNERS = "runner.cpu"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rabbit]:
    """One broker for all; what a test does to it, it sets right again."""
    with Rabbit(tmp_path_factory.mktemp("rabbit")) as made:
        yield made


def application(url: str, authorities: Path | None = None) -> Celery:
    """Return an application as ours are."""
    app = Celery("a-test", broker=url)
    configure(app, queue=CONTROL_QUEUE, authorities=authorities)
    app.conf.beat_schedule = SCHEDULE
    return app


@pytest.fixture
def app(server: Rabbit) -> Iterator[Celery]:
    """An application on queues that are not there yet."""
    with application(server.url) as made:
        remove(made, CONTROL_QUEUE, RUNNERS)
        yield made


@pytest.fixture
def quorate(server: Rabbit) -> Iterator[Celery]:
    """The same where queues are quorum queues."""
    with application(server.quorate_url) as made:
        remove(made, CONTROL_QUEUE, RUNNERS)
        yield made


def remove(app: Celery, *queues: str) -> None:
    """Take queues away, with all that waits in them."""
    with app.connection_for_write() as connection:
        for queue in queues:
            connection.default_channel.queue_delete(queue)


def send(app: Celery, task: str, arguments: Sequence[str] = (), *, queue: str) -> None:
    """Send a task. A quorum queue that was just taken away cannot be made anew for a moment: RabbitMQ says so."""

    def is_sent() -> bool:
        try:
            app.send_task(task, arguments, queue=queue)
        except InternalError:
            return False
        return True

    until(is_sent, what="a queue that is there again")


def test_beat_asks_while_few_of_its_messages_wait_and_makes_anew_what_somebody_took_away(app: Celery) -> None:
    scheduler = Scheduler(app)
    assert waiting(app, CONTROL_QUEUE) == 0
    for _ in range(MOST_WAITING + 5):
        scheduler.apply_entry(scheduler.schedule["sweep"])
    assert waiting(app, CONTROL_QUEUE) == MOST_WAITING
    # The sender believes that the queue is there: RabbitMQ drops what it sends, and says nothing.
    remove(app, CONTROL_QUEUE)
    scheduler.apply_entry(scheduler.schedule["sweep"])
    assert waiting(app, CONTROL_QUEUE) == 1


def test_a_ring_ends_by_the_brokers_clock_alone_and_rings_do_not_pile_up(app: Celery) -> None:
    assert [ring(app, RING, queue=RUNNERS) for _ in range(MOST_WAITING + 2)] == [True] * MOST_WAITING + [False] * 2
    with app.connection_for_read() as connection:
        message = app.amqp.queues[RUNNERS].bind(connection.default_channel).get()
        message.ack()
    assert message.headers["task"] == RING
    assert message.headers["expires"] is message.headers["eta"] is None
    assert message.properties["expiration"] == str(RING_SECONDS * 1000)
    assert message.properties["delivery_mode"] == 1  # nothing of it is written to a disk
    assert ring(app, RING, queue=RUNNERS)


def test_a_broker_that_is_away_refuses_us_or_stands_still_costs_a_ring_and_no_secret(
    server: Rabbit, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers, "SILENCE_SECONDS", 1)
    addresses = {
        "nobody there": f"amqp://gate:{server.password}@127.0.0.1:{free_port()}//",
        "another password": f"amqp://gate:{server.password[::-1]}@127.0.0.1:{server.port}//",
        "an unknown host": f"amqp://gate:{server.password}@127.0.0.1:{server.port}/unknown",
    }
    with capture_logs() as said:
        for address in addresses.values():
            assert not Look(address).is_reachable()
            with application(address) as lost:
                assert not ring(lost, RING, queue=RUNNERS)
        with application(server.url) as held:
            assert ring(held, RING, queue=RUNNERS)
            assert not ring(held, RING, queue="another")  # the account may not have it
            assert Look(server.url).is_reachable()
            server.freeze()
            try:
                assert not Look(server.url).is_reachable()
                assert not ring(held, RING, queue=RUNNERS)
            finally:
                server.thaw()
            assert waiting(held, RUNNERS) == 1
    events = [one["event"] for one in said]
    assert events == ["broker_unreachable", "ring_lost"] * 3 + ["ring_lost", "broker_unreachable", "ring_lost"]
    text = json.dumps(said)
    assert server.password not in text
    assert server.password[::-1] not in text


def test_a_broker_with_tls_is_believed_by_its_certificate_and_its_name_alone(server: Rabbit, app: Celery) -> None:
    address = f"amqps://gate:{server.password}@{{}}:{server.secured}//"
    good, elsewhere = address.format("127.0.0.1"), address.format("127.0.0.2")
    # Its own address in another word: connections are kept by address, whatever else they were opened with.
    for url, authorities in ((address.format("localhost"), None), (elsewhere, server.certificate)):
        with capture_logs() as said, application(url, authorities) as lost:
            assert not Look(url, authorities).is_reachable()
            assert not ring(lost, RING, queue=RUNNERS)
        assert {one["error"] for one in said} <= {"SSLCertVerificationError", "OperationalError"}
        assert server.password not in str(said)
    with application(good, server.certificate) as secured:
        assert Look(good, server.certificate).is_reachable()
        assert ring(secured, RING, queue=RUNNERS)
    assert waiting(app, RUNNERS) == 1


def test_a_worker_fetches_from_a_classic_queue(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is done with quorum queues, below."""
    monkeypatch.setattr(logs, "configure", lambda: None)  # the logs of this process are the tests'
    rung = threading.Event()
    app.task(name=RING)(rung.set)
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=20):
        assert ring(app, RING, queue=CONTROL_QUEUE)
        assert rung.wait(20)


def test_a_worker_whose_queue_is_taken_away_as_it_begins_to_listen_is_told(quorate: Celery) -> None:
    """It reads once more before its loop, and there Celery overlooks errors without a number."""
    with quorate.connection_for_read() as connection:
        queue = quorate.amqp.queues[CONTROL_QUEUE].bind(connection.default_channel)
        queue.declare()
        queue.consume("a-test", lambda _message: None)
        loops._quick_drain(connection)  # nothing to read is no error
        remove(quorate, CONTROL_QUEUE)
        with pytest.raises(ConnectionResetError, match=r"^\[Errno 104\] ConsumerCancelled"):
            loops._quick_drain(connection, timeout=20)


@contextmanager
def workers(bench: Bench, url: str) -> Iterator[dict[str, Path]]:
    """Run a control worker, the clock and a runner as processes of their own; yields their logs."""
    service, runner = programs.service_environment(bench.service, url), programs.runner_environment(bench, url)
    logs = {name: bench.folder / f"{name}.log" for name in ("control", "beat", "runner")}
    with (
        programs.program(programs.control_words(), service, logs["control"]),
        programs.program(programs.beat_words(), service, logs["beat"]),
        programs.program(programs.runner_words(), runner, logs["runner"]),
    ):
        for name in ("control", "runner"):
            until(lambda log=logs[name]: b" ready." in log.read_bytes(), seconds=60, what=f"a {name} that listens")
        yield logs


def release(bench: Bench) -> UUID:
    """Start a release that needs one approval."""
    policy = factories.registered_policy(
        bench.service, bench.api.actor("manager"), "quick", gates=list(QUICK_GATES), approval={"required": 1}
    )
    bench.client("manager").targets.create(TargetCreate(name="chat@prod", runner_class=CLASS, gateway="local"))
    body = ReleaseCreate(target="chat@prod", bundle=bench.bundle().digest, policy=policy.digest)
    return bench.client().releases.create(body).id


@pytest.fixture(name="bench")
def _bench(service: Service, tmp_path: Path) -> Iterator[Bench]:
    with bench(service, tmp_path) as made:
        yield made


@pytest.mark.timeout(240)
def test_a_release_is_gated_once_whatever_becomes_of_the_broker_meanwhile(
    server: Rabbit, quorate: Celery, bench: Bench
) -> None:
    assert ring(quorate, RING, queue=RUNNERS)  # a connection from before
    with workers(bench, server.quorate_url) as logs:
        made = release(bench)
        with bench.service.database.transaction() as session:
            job = until(lambda: session.scalar(select(JobRow.id)), what="a job")
        until(lambda: bench.replica(job).get("state") == "loading", what="the engine of a gate")
        engine = bench.replica(job)["pid"]
        stopping.stand_still(engine)  # a gate that goes on all the while
        try:
            until(lambda: b"runner_rung" in logs["runner"].read_bytes(), what="a ring")
            server.kill()
            held = bench.row(job).lease_until
            until(lambda: bench.row(job).lease_until > held, what="a renewal without a broker")
            server.start()
            # The connection of before is found to be gone, and costs no ring.
            assert ring(quorate, RING, queue=RUNNERS)
            until(lambda: waiting(quorate, RUNNERS) == 0, what="a runner that listens again")
            for _ in range(3):
                # Everything many times, in any order; then all of it is forgotten, with its queues.
                for told in [("sweep", ()), ("reconcile", (str(made),))] * 10:
                    send(quorate, f"workers.tasks.{told[0]}", told[1], queue=CONTROL_QUEUE)
                    send(quorate, RING, queue=RUNNERS)
                remove(quorate, CONTROL_QUEUE, RUNNERS)
        finally:
            stopping.go_on(engine)
        client = bench.client("manager")
        until(lambda: client.releases.get(made).phase is Phase.GATED, seconds=60, what="the end of the gates")
        client.releases.approve(made, "a test")
        until(lambda: waiting(quorate, CONTROL_QUEUE) == 0, what="a control worker that listens")
        shown = client.releases.get(made)
        assert shown.phase is Phase.APPROVED
        assert_once(shown)
        assert bench.row(job).attempt == 1
        assert [one.id for one in client.runs.list()] == [job]
        assert client.evidence.verify().verified
        for log in logs.values():
            assert server.password not in log.read_text("utf-8")
