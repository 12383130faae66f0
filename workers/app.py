"""The control workers' Celery application. The broker is a doorbell: what is to be done is in the database.

A lost message costs a second, the time to the next sweep; a doubled one changes nothing. So there are no chains,
no countdowns and no results.
"""

import logging
from typing import Any

import structlog
from celery import Celery
from celery.signals import worker_process_shutdown, worker_shutdown

from registry.service import Service
from registry.settings import Settings
from workers.control import Control

SWEEP_SECONDS = 1.0
CONTROL_QUEUE = "control"

log = structlog.get_logger(__name__)


def configure(app: Celery, *, queue: str) -> None:
    """Give a Celery application the rules that all of ours keep."""
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_default_queue=queue,
        task_create_missing_queues=True,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"visibility_timeout": 120},
        timezone="UTC",
    )
    # Two lines for every sweep, of which there is one a second. Errors stay.
    for name in ("celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(name).setLevel(logging.WARNING)


settings = Settings()  # the process is this application; nothing imports it for anything else
app = Celery("sluicegate", broker=settings.broker_url.get_secret_value(), include=["workers.tasks"])
configure(app, queue=CONTROL_QUEUE)
app.conf.beat_schedule = {
    "sweep": {"task": "workers.tasks.sweep", "schedule": SWEEP_SECONDS, "options": {"expires": 5}},
}
app.conf.beat_scheduler = "celery.beat:Scheduler"  # what is due every second needs no file of what was done when

_control: Control | None = None


def control() -> Control:
    """Return this process's control parts, built at the first call."""
    global _control  # noqa: PLW0603 - one a process, as Celery's tasks are functions of a module
    if _control is None:
        _control = Control.build(Service.build(settings), ring)
    return _control


def ring(runner_class: str) -> None:
    """Wake the runners of a class. A broker that is away loses the ring, and the next sweep rings again."""
    app.send_task("workers.runner.ring", queue=f"runner.{runner_class}", expires=10, retry=False)


@worker_shutdown.connect
def _close(**_: Any) -> None:
    if _control is not None:
        _control.service.close()


__all__ = ["app", "configure", "control", "worker_process_shutdown"]
