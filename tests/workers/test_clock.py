"""What beat asks for reaches a worker whatever its clock says, and does not pile up while there is none."""

import socket

import pytest
from celery import Celery
from structlog.testing import capture_logs

from registry import brokers
from registry.brokers import Look
from tests.support.broker import broker
from tests.support.certificates import certify
from tests.support.secured import secured
from workers.broker import CONTROL_QUEUE, MOST_WAITING, configure, has_waiting, ring, waiting
from workers.clock import SCHEDULE, Scheduler


@pytest.fixture
def app(tmp_path):
    with broker(tmp_path) as url, Celery("a-beat", broker=url) as made:
        configure(made, queue=CONTROL_QUEUE)
        made.conf.beat_schedule = SCHEDULE
        yield made


def take(app):
    """Take one message, as a worker does."""
    with app.connection_for_read() as connection:
        message = app.amqp.queues[CONTROL_QUEUE].bind(connection.default_channel).get()
        message.ack()
        return message


def test_no_message_of_beat_ends_by_somebodys_clock(app):
    scheduler = Scheduler(app)
    for name, entry in SCHEDULE.items():
        scheduler.apply_entry(scheduler.schedule[name])
        told = take(app).headers
        assert told["task"] == entry["task"]
        assert told["expires"] is told["eta"] is None
        assert told["timelimit"] == [None, None]


def test_a_runner_is_rung_through_an_empty_queue(app):
    assert ring(app, "workers.runner.ring", queue=CONTROL_QUEUE)
    assert waiting(app, CONTROL_QUEUE) == 1
    assert take(app).headers["expires"] is None
    assert ring(app, "workers.runner.ring", queue=CONTROL_QUEUE)


def test_what_waits_is_seen_by_whoever_looks_and_not_at_a_broker_that_is_away(app):
    assert has_waiting(app, CONTROL_QUEUE) is False
    assert ring(app, "workers.runner.ring", queue=CONTROL_QUEUE)
    assert has_waiting(app, CONTROL_QUEUE)
    take(app)
    assert has_waiting(app, CONTROL_QUEUE) is False
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        with Celery("a-look", broker=f"redis://127.0.0.1:{probe.getsockname()[1]}/0") as lost:
            configure(lost, queue=CONTROL_QUEUE)
            assert has_waiting(lost, CONTROL_QUEUE) is False


def test_while_nobody_takes_them_a_few_messages_wait_and_no_more(app):
    scheduler = Scheduler(app)
    assert waiting(app, CONTROL_QUEUE) == 0
    for _ in range(MOST_WAITING + 5):
        scheduler.apply_entry(scheduler.schedule["sweep"])
    assert waiting(app, CONTROL_QUEUE) == MOST_WAITING
    take(app)
    assert waiting(app, CONTROL_QUEUE) == MOST_WAITING - 1
    scheduler.apply_entry(scheduler.schedule["sweep"])
    assert waiting(app, CONTROL_QUEUE) == MOST_WAITING


def test_a_look_at_the_broker_is_believed_for_a_while(tmp_path, monkeypatch):
    with broker(tmp_path) as url:
        look = Look(url)
        assert look.is_reachable()
    with capture_logs() as said:
        assert look.is_reachable()
        monkeypatch.setattr(brokers, "KNOWN_SECONDS", 0.0)
        assert not look.is_reachable()
    assert [one["event"] for one in said] == ["broker_unreachable"]


def test_a_valkey_behind_tls_is_believed_by_its_certificate_and_its_name_alone(tmp_path):
    certificate, key = certify(tmp_path / "right", "127.0.0.1")
    wrong, wrong_key = certify(tmp_path / "wrong", "127.0.0.2")
    with broker(tmp_path) as url:
        plain = int(url.rpartition(":")[2].partition("/")[0])
        with secured(certificate, key, plain) as port, secured(wrong, wrong_key, plain) as elsewhere:
            good, bad = (f"rediss://127.0.0.1:{one}/0" for one in (port, elsewhere))
            assert not Look(good).is_reachable()
            assert not Look(bad, wrong).is_reachable()
            assert Look(good, certificate).is_reachable()
            with Celery("a-beat", broker=good) as app:
                configure(app, queue=CONTROL_QUEUE, authorities=certificate)
                assert ring(app, "workers.runner.ring", queue=CONTROL_QUEUE)
                assert waiting(app, CONTROL_QUEUE) == 1


def test_a_broker_that_is_away_is_told_in_a_line_and_asked_again():
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with Celery("a-beat", broker=f"redis://:hush@127.0.0.1:{port}/0") as app, capture_logs() as said:
        configure(app, queue=CONTROL_QUEUE)
        app.conf.beat_schedule = SCHEDULE
        scheduler = Scheduler(app)
        scheduler.apply_entry(scheduler.schedule["sweep"])
    assert [(one["event"], one["queue"]) for one in said] == [("ring_lost", CONTROL_QUEUE)]
    assert "hush" not in str(said)
