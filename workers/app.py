"""The control workers' Celery application. What is to be done is in the database; the broker only rings."""

import threading
from typing import Any

from celery import Celery
from celery.signals import worker_shutdown

from registry.service import Service
from registry.settings import Settings
from workers import broker
from workers.broker import CONTROL_QUEUE, configure
from workers.control import Control
from workers.hearing import Hearing

settings = Settings()  # the process is this application; nothing imports it for anything else
app = Celery("sluicegate", broker=settings.broker_url.get_secret_value(), include=["workers.tasks"])
configure(app, queue=CONTROL_QUEUE, authorities=settings.broker_ca)
Hearing.silence_seconds = settings.control_silence_seconds
app.steps["worker"].add(Hearing)

_control: Control | None = None
_building = threading.Lock()


def control() -> Control:
    """Return this process's control parts, built at the first call."""
    global _control  # noqa: PLW0603 - one a process, as Celery's tasks are functions of a module
    # The first tasks come at once, in several threads; two of these would be two ideas of what was read of a log.
    with _building:
        if _control is None:
            _control = Control.build(Service.build(settings), ring)
        return _control


def ring(runner_class: str) -> None:
    """Wake the runners of a class. A broker that is away loses the ring, and the next sweep rings again."""
    broker.ring(app, "workers.runner.ring", queue=f"runner.{runner_class}")


@worker_shutdown.connect
def _close(**_: Any) -> None:
    if _control is not None:
        _control.service.close()
