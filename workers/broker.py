"""What our Celery applications of the service have in common. The broker is a doorbell: it carries no facts.

A lost message costs a second, the time to the next sweep; a doubled one changes nothing. So there are no chains,
no countdowns and no results.
"""

import logging
from typing import Any

from celery import Celery
from celery.signals import setup_logging

from registry import logs

CONTROL_QUEUE = "control"
_CHATTY = ("celery.worker.strategy", "celery.app.trace", "celery.beat")
"""They write lines for every sweep, of which there is one a second. Errors stay."""


def configure(app: Celery, *, queue: str) -> None:
    """Give a Celery application the rules that all of ours keep, and its process our form of logs."""
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
        worker_redirect_stdouts=False,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={"visibility_timeout": 120},
        timezone="UTC",
    )
    setup_logging.connect(_set_up_logging)


def _set_up_logging(**_: Any) -> None:
    logs.configure()
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
