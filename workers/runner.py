"""The runner's Celery application: `celery -A workers.runner worker -Q runner.CLASS --pool threads`.

The broker only rings. The agent is a step of the worker, started before the worker looks for its broker: a runner
serves, claims and reports while the broker is away.
"""

from typing import Any

import structlog
from celery import Celery, bootsteps
from celery.signals import setup_logging

from registry.client import Client
from registry.logs import configure
from registry.settings import RunnerSettings
from workers.agent import Agent
from workers.launchers.process import become_subreaper

TIMEOUT_SECONDS = 10.0
"""Longest silence of the service in one request: well below a lease."""

log = structlog.get_logger("workers.runner")
settings = RunnerSettings()  # the process is this application; nothing imports it for anything else
app = Celery("sluicegate-runner", broker=settings.broker_url.get_secret_value())
app.conf.update(
    task_serializer="json",
    accept_content=["json"],
    task_ignore_result=True,
    task_default_queue=f"runner.{settings.runner_class}",
    task_create_missing_queues=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    worker_redirect_stdouts=False,
    worker_enable_remote_control=False,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    timezone="UTC",
)
agent = Agent(settings, Client(settings.api_url, settings.token.get_secret_value(), timeout_seconds=TIMEOUT_SECONDS))


class AgentStep(bootsteps.StartStopStep):  # type: ignore[misc] # Celery ships no types
    """Starts the agent with the worker, and stops it with the worker."""

    def start(self, _parent: Any) -> None:
        """Start."""
        log.info("runner_starts", name=settings.name, runner_class=settings.runner_class, api=settings.api_url)
        become_subreaper()
        agent.start()

    def stop(self, _parent: Any) -> None:
        """Stop. Live replicas stay."""
        agent.stop()

    def terminate(self, _parent: Any) -> None:
        """Stop in a hurry: the same, since it takes no longer than a kill and a word to the service."""
        agent.stop()


app.steps["worker"].add(AgentStep)


@setup_logging.connect
def _set_up_logging(**_: Any) -> None:
    configure()


@app.task(name="workers.runner.ring")
def ring() -> None:
    """Look for jobs now."""
    agent.ring()
