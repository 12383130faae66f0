"""RabbitMQ as the broker: what rings, what must not pile up, and what its failures change, which is nothing."""

import json
from collections.abc import Iterator

import pytest
from celery import Celery
from structlog.testing import capture_logs

from tests.support import rabbit
from tests.support.broker import free_port
from tests.support.rabbit import Rabbit
from workers import broker
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


def application(url: str) -> Celery:
    """Return an application as ours are."""
    app = Celery("a-test", broker=url)
    configure(app, queue=CONTROL_QUEUE)
    app.conf.beat_schedule = SCHEDULE
    return app


@pytest.fixture
def app(server: Rabbit) -> Iterator[Celery]:
    """An application on queues that are not there yet."""
    with application(server.url) as made:
        remove(made, CONTROL_QUEUE, RUNNERS)
        yield made


def remove(app: Celery, *queues: str) -> None:
    """Take queues away, with all that waits in them."""
    with app.connection_for_write() as connection:
        for queue in queues:
            connection.default_channel.queue_delete(queue)


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
    monkeypatch.setattr(broker, "SILENCE_SECONDS", 1)
    addresses = {
        "nobody there": f"amqp://gate:{server.password}@127.0.0.1:{free_port()}//",
        "another password": f"amqp://gate:{server.password[::-1]}@127.0.0.1:{server.port}//",
        "an unknown host": f"amqp://gate:{server.password}@127.0.0.1:{server.port}/unknown",
    }
    with capture_logs() as said:
        for address in addresses.values():
            with application(address) as lost:
                assert waiting(lost, RUNNERS) == 0
                assert not ring(lost, RING, queue=RUNNERS)
        with application(server.url) as held:
            assert ring(held, RING, queue=RUNNERS)
            assert not ring(held, RING, queue="another")  # the account may not have it
            server.freeze()
            try:
                assert waiting(held, RUNNERS) == 0
            finally:
                server.thaw()
            assert waiting(held, RUNNERS) == 1
    assert [one["event"] for one in said] == ["ring_lost"] * (len(addresses) + 1)
    text = json.dumps(said)
    assert server.password not in text
    assert server.password[::-1] not in text


def test_a_broker_that_comes_back_is_rung_again_on_the_connections_of_before(server: Rabbit, app: Celery) -> None:
    assert ring(app, RING, queue=RUNNERS)
    server.stop()
    server.start()
    assert ring(app, RING, queue=RUNNERS)
    assert waiting(app, RUNNERS) == 1  # what waited was of no worth
