"""Releases on a real database and a real Envoy. The runner's side is played through the functions behind its API,
and engines are real sockets with scripted faults, so that a test decides what live traffic meets."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import UUID

from gates.router import CANDIDATE
from registry import jobs, releases, runners, targets
from registry.auth import Actor
from registry.service import Service
from registry.settings import Gateway
from registry.tables import JobRow
from schemas.api import Complete, Progress, ReleaseCreate, TargetCreate
from schemas.bundle import Bundle
from schemas.failures import Cause
from schemas.policy import Policy
from schemas.release import Phase, ReleaseDetail
from schemas.runner import Claim, Report, RunnerRegistration
from tests.support import factories
from tests.support.gateway import TARGET, Answers, RunningGateway, ask_many, running_gateway
from tests.support.streams import StreamEngine
from workers.control import Control
from workers.reconcile import reconcile
from workers.sweep import sweep

FINGERPRINT: dict[str, Any] = {
    "cpu": "test",
    "cpu_flags": "avx2",
    "cores": 2,
    "memory_bytes": 2**30,
    "accelerators": [],
    "kernel": "6",
}
QUICK_CANARY: dict[str, Any] = {
    "steps": [
        {"weight_bp": weight, "hold_seconds": "0.2", "min_requests": 29, "max_seconds": "60"}
        for weight in (5000, 10_000)
    ],
    "stop_conditions": [
        {"metric": "error_ratio", "max_ratio": "0.1"},
        {"metric": "ttft", "percentile": "0.9", "max_ms": 300},
    ],
    "soak_seconds": "0.5",
    "dead_man_seconds": "60",
    "drain_seconds": "2",
}


@dataclass
class World:
    """A service, its gateway, and a runner whose words the test chooses."""

    service: Service
    actor: Actor
    control: Control
    envoy: RunningGateway
    runner: UUID
    rung: list[str] = field(default_factory=list)
    warned: dict[str, list[str]] = field(default_factory=dict)
    """Gate → codes of the `warn` findings that its results carry."""
    name: str = TARGET
    """The target that everything below is about."""

    def beside(self, name: str) -> "World":
        """Return the same world, about another target that is made for it."""
        with self.service.database.transaction() as session:
            wanted = TargetCreate(name=name, runner_class="cpu", gateway="local")
            targets.create(session, self.service, self.actor, wanted)
        return replace(self, name=name)

    def policy(self, name: str = "quick", **changes: Any) -> Policy:
        return factories.registered_policy(self.service, self.actor, name, **({"canary": QUICK_CANARY} | changes))

    def bundle(self, name: str, content: bytes) -> Bundle:
        return factories.registered_bundle(self.service, self.actor, name, content)

    def release(self, bundle: Bundle, policy: Policy, reason: str | None = None) -> UUID:
        body = ReleaseCreate(target=self.name, bundle=bundle.digest, policy=policy.digest, reason=reason)
        with self.service.database.transaction() as session:
            return releases.create(session, self.service, self.actor, body).id

    def show(self, release: UUID) -> ReleaseDetail:
        with self.service.database.transaction() as session:
            return releases.detail(session, releases.get(session, self.actor.project_id, release))

    def turn(self) -> None:
        """Do what the sweep hands out, once."""
        found: list[UUID] = []
        sweep(self.control, found.append)
        for release in found:
            reconcile(self.control, release, turn_seconds=0.3)

    def until(self, condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
        """Take turns until something holds."""
        ends = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < ends, "it did not happen in time"
            self.turn()
            time.sleep(0.05)

    def until_phase(self, release: UUID, phase: Phase, *, seconds: float = 30.0) -> ReleaseDetail:
        try:
            self.until(lambda: self.show(release).phase is phase, seconds=seconds)
        except AssertionError:
            found = self.show(release)
            said = [(one.kind.value, one.body) for one in found.log[-4:]]
            raise AssertionError(f"it is {found.phase}, not {phase}: {found.reason}; {found.held}; {said}") from None
        return self.show(release)

    # ------------------------------------------------------------------------------------- the runner's side

    def claim(self) -> Claim:
        """Claim the job that waits; the test fails when none does."""
        claims: list[Claim] = []

        def claimed() -> bool:
            with self.service.database.transaction() as session:
                row = runners.get(session, self.actor.project_id, self.runner)
                found = jobs.claim(session, self.service, row)
            if found is not None:
                claims.append(found)
            return bool(claims)

        self.until(claimed, seconds=10)
        return claims[0]

    def is_wanted(self, claim: Claim) -> bool:
        """Renew a claim's lease, and tell whether its job is still wanted."""
        with self.service.database.transaction() as session:
            said = Progress(fencing_token=claim.fencing_token)
            return jobs.renew(session, self.service, self.actor.project_id, claim.job, said).is_wanted

    def report(self, claim: Claim, act: str, kind: str, body: dict[str, Any]) -> None:
        said = Report(fencing_token=claim.fencing_token, act=act, kind=kind, body=body)
        with self.service.database.transaction() as session:
            jobs.report(session, self.service, self.actor.project_id, claim.job, said)

    def complete(self, claim: Claim, problem: str | None = None, *, cause: Cause | None = None) -> None:
        detail = "as scripted" if problem else None
        said = Complete(fencing_token=claim.fencing_token, problem=problem, detail=detail, cause=cause)
        with self.service.database.transaction() as session:
            jobs.complete(session, self.service, self.actor.project_id, claim.job, said)

    def verdict(self, claim: Claim, gate: str, verdict: str) -> None:
        body = {
            "gate": gate,
            "definition": "sha256:" + "d" * 64,
            "verdict": verdict,
            "summary": f"{gate} said {verdict}",
            "measurements": [],
            "findings": [
                {"code": code, "severity": "warn", "message": f"{code} was seen."} for code in self.warned.get(gate, [])
            ],
            "duration_ms": 5,
            "source": "run",
        }
        self.report(claim, f"gate:{gate}", "gate_recorded", body)

    def evaluate(self, **verdicts: str) -> Claim:
        """Play an evaluation: every gate passes unless said otherwise."""
        claim = self.claim()
        assert claim.kind == "evaluate"
        self.report(claim, f"staged:{claim.attempt}", "staged", {"files": 1, "size": 10, "duration_ms": 1})
        booted = {
            "engine": {
                "name": "llamacpp",
                "version": "t",
                "arguments": [],
                "model_ids": ["chat"],
                "context_tokens": 512,
            },
            "fingerprint": FINGERPRINT,
            "runner": "r1",
            "ready_ms": 10,
        }
        self.report(claim, f"engine_booted:{claim.attempt}", "engine_booted", booted)
        for gate in claim.gates:
            self.verdict(claim, gate, verdicts.get(gate, "passed"))
        self.complete(claim)
        return claim

    def serve(self, engine: StreamEngine, *, pid: int = 1000) -> Claim:
        """Play a replica that gets ready at an engine's address."""
        claim = self.claim()
        assert claim.kind == "serve"
        self.replica(claim, "ready", engine, pid=pid)
        return claim

    def replica(self, claim: Claim, state: str, engine: StreamEngine, *, pid: int = 1000) -> None:
        body = {
            "state": state,
            "cause": f"it is {state}",
            "address": engine.address,
            "pid": pid,
            "start_time": "1",
            "boot_id": "b",
        }
        self.report(claim, f"replica:{claim.attempt}:{state}:{pid}", "replica_changed", body)

    def replica_by_token(self, job: UUID, token: int, state: str, engine: StreamEngine, *, pid: int) -> None:
        """Report a replica of a job that an earlier claim holds."""
        body = {
            "state": state,
            "cause": state,
            "address": engine.address,
            "pid": pid,
            "start_time": "1",
            "boot_id": "b",
        }
        said = Report(fencing_token=token, act=f"replica:{pid}:{state}", kind="replica_changed", body=body)
        with self.service.database.transaction() as session:
            jobs.report(session, self.service, self.actor.project_id, job, said)

    def complete_by_token(self, job: UUID, token: int) -> None:
        """End a job that an earlier claim holds."""
        with self.service.database.transaction() as session:
            jobs.complete(session, self.service, self.actor.project_id, job, Complete(fencing_token=token))

    def live(self, bundle: Bundle, policy: Policy, engine: StreamEngine) -> UUID:
        """Take a bundle live as the stable one, with traffic, and let its soak end."""
        release = self.release(bundle, policy)
        self.evaluate()
        self.serve(engine)
        with self.traffic():
            self.until_phase(release, Phase.PROMOTED)
        self.until(self.is_settled)
        return release

    def is_settled(self) -> bool:
        split = self.envoy.gateway.desired(self.name)
        return split is not None and split.arm(CANDIDATE) is None

    def target(self) -> Any:
        with self.service.database.transaction() as session:
            row = targets.get(session, self.actor.project_id, self.name)
            return targets.wire(session, self.service, row)

    def serving_jobs(self) -> list[JobRow]:
        with self.service.database.transaction() as session:
            row = targets.get(session, self.actor.project_id, self.name)
            return jobs.serving(session, row.id)

    @contextlib.contextmanager
    def traffic(self, *, seconds: float = 40.0) -> Iterator[list[Answers]]:
        """Ask for streams all the time, a few at once, until the block ends."""
        stop, answers = threading.Event(), []

        def ask() -> None:
            ends = time.monotonic() + seconds
            while not stop.is_set() and time.monotonic() < ends:
                answers.append(ask_many(self.envoy.url(self.name), 8, concurrency=4))
                stop.wait(0.05)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield answers
        finally:
            stop.set()
            thread.join()


@contextlib.contextmanager
def world(service: Service, actor: Actor, folder: Path) -> Iterator[World]:
    """Run a world with one target, `chat@prod`, and one registered runner."""
    with running_gateway(folder / "gateway") as envoy:
        url = f"http://127.0.0.1:{envoy.gateway.port}"
        gateways = {"local": Gateway(directory=envoy.gateway.directory, url=url)}
        settings = service.settings.model_copy(update={"gateways": gateways})
        mine = Service(settings, service.database, service.signer, service.blobs)
        rung: list[str] = []
        registration = RunnerRegistration.model_validate(
            {"name": "r1", "runner_class": "cpu", "fingerprint": FINGERPRINT, "engines": ["llamacpp"], "boot_id": "b"}
        )
        with mine.database.transaction() as session:
            targets.create(session, mine, actor, TargetCreate(name=TARGET, runner_class="cpu", gateway="local"))
            runner = runners.register(session, actor.project_id, registration).id
        yield World(mine, actor, Control.build(mine, rung.append), envoy, runner, rung)
