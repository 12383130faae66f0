"""Runners on a real service, and CHAIN bundles for them to boot: everything is real but the size."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from pydantic import SecretStr

from registry import db, documents, jobs
from registry.client import Client
from registry.service import Service
from registry.settings import RunnerSettings
from registry.tables import JobRow
from schemas.api import Run, RunCreate
from schemas.bundle import Bundle
from schemas.evidence import Entry
from schemas.policy import Policy
from schemas.runner import JobKind
from tests.support import chain, factories
from tests.support.api import Api
from workers import live
from workers.agent import Agent
from workers.engines.llamacpp import LLAMACPP
from workers.launchers.process import ProcessLauncher, start_time

ROOT = Path(__file__).parents[2]
PREFIX = "SLUICEGATE_RUNNER__"
CLASS = "cpu"
LEASE_SECONDS = 2.0
QUICK_GATES: tuple[dict[str, Any], ...] = (
    {"gate": "integrity"},
    {"gate": "compatibility", "boot_seconds": "60", "answer_seconds": "10"},
)


def with_short_leases(service: Service, lease_seconds: float = LEASE_SECONDS) -> Service:
    """Return the service with leases so short that a test can wait for their end."""
    settings = service.settings.model_copy(update={"lease_seconds": lease_seconds})
    return Service(settings, service.database, service.signer, service.blobs)


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    return start_time(pid) is not None


def until(condition: Callable[[], Any], *, seconds: float = 30.0, what: str = "it") -> Any:
    """Wait until something is true, and return what it is."""
    ends = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > ends:
            raise AssertionError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.02)
    return found


@dataclass
class Bench:
    """A service with its interface, a folder for runners, and what a test asks of them."""

    service: Service
    api: Api
    folder: Path
    agents: list[Agent] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    def client(self, role: str = "engineer", url: str | None = None) -> Client:
        """Return a client with a role's token."""
        made = Client(url or self.api.url, self.api.tokens[role], timeout_seconds=10)  # type: ignore[index]
        self.clients.append(made)
        return made

    # ---------------------------------------------------------------------------------------- documents

    def bundle(self, name: str = "good", *, environment: str | None = None, **changes: Any) -> Bundle:
        """Register a CHAIN variant with its bytes.

        Args:
            name: of the folder; a folder is written once.
            environment: of the engine; the installed one unless given.
            changes: `extra`, `template`, `headless`, `truncated_bytes` change the files, others the document.
        """
        files = {
            key: changes.pop(key) for key in ("extra", "template", "headless", "truncated_bytes") if key in changes
        }
        directory = chain.write_bundle_directory(self.folder / "sources" / name, **files)
        bundle = chain.describe(directory, environment=environment or LLAMACPP.identity().digest, **changes)
        factories.upload(self.service, self.api.actor(), *(path.read_bytes() for path in sorted(directory.iterdir())))
        with self.service.database.transaction() as session:
            documents.register(session, self.service, self.api.actor(), "bundle", bundle.canonical())
        return bundle

    def policy(self, gates: Sequence[dict[str, Any]] = QUICK_GATES, name: str = "quick") -> Policy:
        """Register a policy with these gates."""
        return factories.registered_policy(self.service, self.api.actor("manager"), name, gates=list(gates))

    # --------------------------------------------------------------------------------------------- jobs

    def evaluate(self, bundle: Bundle, policy: Policy, **changes: Any) -> UUID:
        """Ask for an evaluation."""
        body = RunCreate(bundle=bundle.digest, policy=policy.digest, runner_class=CLASS, **changes)
        return self.client().runs.create(body).id

    def serve(self, bundle: Bundle) -> UUID:
        """Ask for a live replica, as the control worker does."""
        with self.service.database.transaction() as session:
            now = db.now(session)
            made = jobs.create(
                session,
                self.api.project_id,
                JobKind.SERVE,
                bundle=bundle.digest,
                runner_class=CLASS,
                created_by="control",
                now=now,
            )
            return made.id

    def unwant(self, job: UUID) -> None:
        """Ask for the end of a live replica."""
        with self.service.database.transaction() as session:
            jobs.unwant(session, session.get_one(JobRow, job), now=db.now(session))

    def steal(self, job: UUID) -> None:
        """Give a job to somebody else, as when its lease had run out."""
        with self.service.database.transaction() as session:
            row = session.get_one(JobRow, job)
            row.fencing_token += 1
            row.lease_until = db.now(session) + timedelta(seconds=600)

    def run(self, job: UUID) -> Run:
        """Return a job as the service shows it."""
        return self.client().runs.get(job)

    def row(self, job: UUID) -> JobRow:
        """Return a job's row."""
        with self.service.database.transaction() as session:
            return session.get_one(JobRow, job)

    def replica(self, job: UUID) -> dict[str, Any]:
        """Return what was last reported of a job's replica; empty when nothing was."""
        return self.row(job).replica or {}

    def done(self, job: UUID, *, seconds: float = 60.0) -> Run:
        """Wait for the end of a job."""
        until(lambda: self.row(job).state in {"done", "cancelled"}, seconds=seconds, what="the end of the job")
        return self.run(job)

    def due(self, job: UUID) -> None:
        """Let a job that waits for its next try be due now."""
        with self.service.database.transaction() as session:
            session.get_one(JobRow, job).due_at = db.now(session)

    def expire(self, job: UUID) -> None:
        """Let a job's lease have run out a moment ago."""
        with self.service.database.transaction() as session:
            session.get_one(JobRow, job).lease_until = db.now(session) - timedelta(milliseconds=1)

    def is_lease_over(self, job: UUID) -> bool:
        """Whether a job's lease has run out."""
        with self.service.database.transaction() as session:
            row = session.get_one(JobRow, job)
            return row.lease_until is not None and row.lease_until < db.now(session)

    def ready(self, job: UUID, *, seconds: float = 30.0) -> dict[str, Any]:
        """Wait for a ready replica, and return its last report."""
        until(lambda: self.replica(job).get("state") == "ready", seconds=seconds, what="a ready replica")
        return self.replica(job)

    def entries(self, job: UUID) -> list[Entry]:
        """Return what a job without a release put in evidence, oldest first."""
        return list(self.client().evidence.list(stream=f"run/{job}"))

    def states(self, job: UUID) -> list[str]:
        """Return the states of a job's replica in the order reported."""
        return [entry.body["replica"]["state"] for entry in self.entries(job) if entry.kind == "replica_changed"]

    # ------------------------------------------------------------------------------------------- runners

    def settings(
        self, name: str = "r1", *, url: str | None = None, slots: int = 4, store: bool = True, **changes: Any
    ) -> RunnerSettings:
        """Return settings of a runner with a folder of its own."""
        return RunnerSettings(
            name=name,
            runner_class=CLASS,
            api_url=url or self.api.url,
            token=SecretStr(self.api.tokens["runner"]),
            broker_url=SecretStr("redis://127.0.0.1:1/0"),
            data_dir=self.folder / "runners" / name,
            store_dir=self.service.settings.storage_dir if store else None,
            slots=slots,
            **changes,
        )

    def start(
        self, name: str = "r1", *, url: str | None = None, slots: int = 4, store: bool = True, **changes: Any
    ) -> Agent:
        """Start a runner in this process; `changes` are further settings."""
        settings = self.settings(name, url=url, slots=slots, store=store, **changes)
        agent = Agent(settings, self.client("runner", settings.api_url))
        self.agents.append(agent)
        agent.start()
        return agent

    def stop(self, agent: Agent) -> None:
        """Stop a runner."""
        agent.stop()


@contextlib.contextmanager
def started(settings: RunnerSettings, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a runner as a process of its own, as `sluicegate up` starts it; at the end it is killed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        f"{PREFIX}NAME": settings.name,
        f"{PREFIX}RUNNER_CLASS": settings.runner_class,
        f"{PREFIX}API_URL": settings.api_url,
        f"{PREFIX}TOKEN": settings.token.get_secret_value(),
        f"{PREFIX}BROKER_URL": settings.broker_url.get_secret_value(),
        f"{PREFIX}DATA_DIR": str(settings.data_dir),
        f"{PREFIX}STORE_DIR": str(settings.store_dir),
    }
    options = ["-Q", f"runner.{CLASS}", "--pool", "threads", "--concurrency", "2", "--without-gossip"]
    command = [sys.executable, "-m", "celery", "-A", "workers.runner", "worker", *options]
    with (
        log.open("ab") as file,
        subprocess.Popen(command, env=environment, stdout=file, stderr=file, cwd=log.parent) as child,
    ):
        try:
            yield child
        finally:
            child.kill()


def runner_process(
    bench: Bench, broker_url: str = "redis://127.0.0.1:1/0"
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """Run a runner of a bench as a process of its own, with its log in the bench's folder."""
    settings = bench.settings().model_copy(update={"broker_url": SecretStr(broker_url)})
    return started(settings, bench.folder / "runner.log")


@contextlib.contextmanager
def bench(service: Service, folder: Path, lease_seconds: float = LEASE_SECONDS) -> Iterator[Bench]:
    """Run a service with short leases; in the end no runner and no live engine of it is left."""
    mine = with_short_leases(service, lease_seconds)
    with Api(mine) as api:
        made = Bench(mine, api, folder)
        try:
            yield made
        finally:
            for agent in made.agents:
                agent.stop()
            for data_dir in (folder / "runners").glob("*"):
                end_all(data_dir)
            for agent in made.agents:
                # Engines that were left running are children of this process, which did not end.
                for launcher in agent._launchers:
                    if isinstance(launcher, ProcessLauncher):
                        for child in launcher._children.values():
                            child.wait(timeout=10)
            for client in made.clients:
                client.close()


def end_all(data_dir: Path) -> None:
    """End every live replica of a runner that has stopped, at once."""
    kept = live.shelf(data_dir)
    for job in kept.jobs():
        left = kept.read(job)
        if left is not None:
            kept.write(job, left.model_copy(update={"drain_seconds": 0.0}))
        kept.end(job, [ProcessLauncher()])


def result(run: Run, gate: str) -> dict[str, Any]:
    """Return a gate's result in a run."""
    found = [one for one in run.results if one["gate"] == gate]
    assert len(found) == 1, json.dumps(run.results)[:2000]
    return dict(found[0])
