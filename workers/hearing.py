"""Looks whether RabbitMQ still knows that a worker listens, which a worker itself may believe for ever.

A queue that is taken away in the moment in which a worker begins to listen at it may be made anew by the next sender,
without anybody who listens: the broker has told nobody, and the worker waits at a queue that is no more. A control
worker that hears no sweep moves nothing, so it begins to listen anew.
"""

import threading
from typing import Any, Final

import structlog
from celery import bootsteps

from registry import brokers

LOOK_SECONDS: Final = 5.0
LOOKS: Final = 2
"""How many looks in a row find nobody before a worker begins anew: it may be about to."""

NOT_FOUND: Final = 404
"""AMQP's code of a queue that is not there."""

log = structlog.get_logger("workers.hearing")


class Hearing(bootsteps.StartStopStep):  # type: ignore[misc] # Celery ships no types
    """Looks beside a worker that listens at RabbitMQ, over a connection of its own. Valkey knows of no listeners."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **_: Any) -> None:
        """Begin with nothing to look at."""
        super().__init__(consumer)
        self._ended = threading.Event()

    def include_if(self, consumer: Any) -> bool:
        """Tell whether the broker is one that knows."""
        return str(consumer.app.conf.broker_read_url).startswith("amqp")

    def start(self, consumer: Any) -> None:
        """Look from now on: the worker has just begun to listen."""
        self._ended = threading.Event()
        threading.Thread(target=_watch, args=(consumer, self._ended), name="hearing", daemon=True).start()

    def stop(self, _consumer: Any) -> None:
        """Look no more."""
        self._ended.set()

    terminate = shutdown = stop


def _watch(consumer: Any, ended: threading.Event) -> None:
    queue, unheard = consumer.app.conf.task_default_queue, 0
    connection: Any = None
    while not ended.wait(LOOK_SECONDS):
        connection = connection or consumer.app.connection_for_read()
        try:
            found = connection.default_channel.queue_declare(queue, passive=True)
            count: int | None = found.consumer_count
        except brokers.errors_of(connection) as error:
            connection.collect()
            connection = None
            # Nobody listens at a queue that is not there. Of all else the worker's own connection tells.
            count = 0 if getattr(error, "code", None) == NOT_FOUND else None
        unheard = unheard + 1 if count == 0 else 0
        if unheard >= LOOKS and not ended.is_set():
            log.warning("not_heard", queue=queue)
            consumer.call_soon(_begin_anew)
            break
    if connection is not None:
        connection.collect()


def _begin_anew() -> None:
    """End the worker's loop as a broker does that goes away: it connects anew. Raises ConnectionResetError."""
    raise ConnectionResetError("the broker knows of nobody who listens")
