"""The runner's Celery application: `celery -A workers.runner worker -Q runner.CLASS --pool threads`.

The broker only rings. The agent is a step of the worker, started before the worker looks for its broker: a runner
serves, claims and reports while the broker is away.
"""

from typing import Any

import structlog
from celery import Celery, bootsteps

from registry.client import Client
from registry.settings import RunnerSettings
from workers.agent import Agent
from workers.broker import configure
from workers.launchers.process import become_subreaper

TIMEOUT_SECONDS = 10.0
"""Longest silence of the service in one request: well below a lease."""

log = structlog.get_logger("workers.runner")
settings = RunnerSettings()  # the process is this application; nothing imports it for anything else
app = Celery("sluicegate-runner", broker=settings.broker_url.get_secret_value())
configure(app, queue=f"runner.{settings.runner_class}", authorities=settings.broker_ca)
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


@app.task(name="workers.runner.ring")
def ring() -> None:
    """Look for jobs now."""
    log.info("runner_rung")
    agent.ring()
