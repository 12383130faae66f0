"""What our Celery applications have in common, whatever broker rings for them. It is a doorbell: it carries no facts.

A lost message costs a second, the time to the next sweep; a doubled one changes nothing. So there are no chains,
no countdowns and no results, and no message has to outlive the broker.
"""

import errno
import logging
from pathlib import Path
from typing import Any, Final

import structlog
from celery import Celery
from celery.signals import setup_logging
from kombu.connection import Connection

from registry import brokers, logs

CONTROL_QUEUE = "control"
MOST_WAITING: Final = 20
"""Messages in a queue beyond which another would bring about nothing that theirs do not."""
RING_SECONDS: Final = 10
"""How long RabbitMQ keeps a ring that no runner takes, by its own clock. Valkey keeps it."""
RETRY_SECONDS: Final = 2
HEARTBEAT_SECONDS: Final = 10
"""A worker misses a RabbitMQ whose host is gone after twice as long."""
_CHATTY = ("celery.worker.strategy", "celery.app.trace", "celery.beat")
"""They write lines for every sweep, of which there is one a second. Errors stay."""

log = structlog.get_logger("workers.broker")


class Line(Connection):
    """A connection that is tried again at even intervals: kombu's grow to half a minute, in which nothing moves.

    What is fetched is limited for each consumer, of which a worker has one. RabbitMQ's limit for a whole channel, which
    Celery would set, is deprecated, and quorum queues refuse it.
    """

    @property
    def qos_semantics_matches_spec(self) -> bool:
        """Whether a limit without the word global is the one to set."""
        return True

    def ensure_connection(self, *words: Any, **named: Any) -> Any:
        """Connect, trying again and again."""
        even = {"interval_start": RETRY_SECONDS, "interval_step": 0, "interval_max": RETRY_SECONDS}
        return super().ensure_connection(*words, **even | named)  # type: ignore[no-untyped-call] # kombu's has none

    def drain_events(self, **named: Any) -> Any:
        """Read one event. Whatever ends the connection, its channel or what is listened to, has an error's number.

        A worker reads once more when it has begun to listen, and overlooks what has none. So it never knew when its
        queue had been taken away, or its connection closed, in that moment, and waited for ever at nothing.

        Raises:
            TimeoutError: there was nothing to read.
            OSError: it has ended.
        """
        try:
            return super().drain_events(**named)  # type: ignore[no-untyped-call] # kombu's has none
        except TimeoutError:
            raise
        except (*self.connection_errors, *self.channel_errors) as error:
            if getattr(error, "errno", None) is not None:
                raise
            raise ConnectionResetError(errno.ECONNRESET, f"{type(error).__name__}: {error}") from error


def configure(app: Celery, *, queue: str, authorities: Path | None = None) -> None:
    """Give a Celery application the rules that all of ours keep, and its process our form of logs.

    Args:
        app: with the broker's address.
        queue: where its tasks go.
        authorities: PEM file of those who vouch for the broker's certificate; none for the system's.
    """
    app.amqp.Connection = Line
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_default_queue=queue,
        task_create_missing_queues=True,
        # RabbitMQ writes nothing of a message to its disk; the queues are there after its restart, empty.
        task_default_delivery_mode="transient",
        worker_prefetch_multiplier=1,
        # After a lost connection Celery would set it from the tasks' threads, who then read each other's answers.
        worker_enable_prefetch_count_reduction=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        broker_heartbeat=HEARTBEAT_SECONDS,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # RabbitMQ refuses a password, or a queue that it does not let us have, by an error of the channel. A runner
        # that ended at it would take its engines along.
        broker_channel_error_retry=True,
        broker_transport_options=brokers.transport_options(app.conf.broker_write_url),
        broker_use_ssl=brokers.tls_options(app.conf.broker_write_url, authorities),
        timezone="UTC",
    )
    setup_logging.connect(_set_up_logging)


def waiting(app: Celery, queue: str) -> int:
    """Return how many messages wait in a queue, which is made where it is missing: RabbitMQ drops what is sent to none.

    Raises:
        one of `brokers.errors_of`: the broker is away or refuses.
    """
    with app.connection_or_acquire() as connection:
        is_old = connection.connected
        while True:
            try:
                bound = app.amqp.queues[queue].bind(connection.default_channel)
                bound.declare()
                return int(bound.queue_declare().message_count)  # not passively: to Valkey an empty queue is none
            except connection.connection_errors as error:
                connection.collect()  # not closed: that would wait for an answer again
                if not is_old or isinstance(error, TimeoutError):
                    raise
                is_old = False  # the broker may have been started again since


def has_waiting(app: Celery, queue: str) -> bool:
    """Tell whether a broker that can be had keeps messages that nobody has taken. It is asked over a new connection."""
    told = {"connect_timeout": brokers.LOOK_SECONDS, "transport_options": brokers.HURRIED}
    connection = app.connection_for_read(**told)
    try:
        with connection:
            return int(connection.default_channel.queue_declare(queue, passive=True).message_count) > 0
    except brokers.errors_of(connection):
        return False


def ring(app: Celery, task: str, *, queue: str) -> bool:
    """Say that there is work, unless enough messages say so already. A broker that is away loses it.

    Returns:
        Whether the message was sent.
    """
    try:
        if waiting(app, queue) >= MOST_WAITING:
            return False
        # An expiry of Celery's would be an instant of our clock, which a worker compares with its own.
        app.send_task(
            task, queue=queue, expiration=RING_SECONDS, retry=True, retry_policy={"max_retries": 1, "interval_start": 0}
        )
    except brokers.errors_of(app.connection_for_write()) as error:  # it connects when it is used, which it is not
        log.warning("ring_lost", queue=queue, error=type(error).__name__)
        return False
    return True


def _set_up_logging(**_: Any) -> None:
    logs.configure()
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
