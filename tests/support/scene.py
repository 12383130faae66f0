"""A service whose other parts a test plays, with a person at the command line."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from registry import releases
from registry.client import Client
from schemas.api import Complete
from schemas.evidence import Approved, Decision, EngineBooted, Kind, SplitEntry, Staged, Traffic
from schemas.result import Finding, GateResult, Severity, Verdict
from schemas.runner import EngineIdentity, Fingerprint, Report, RunnerRegistration
from tests.support.factories import registered_bundle, registered_policy, remember

FINGERPRINT = Fingerprint(cpu="Test CPU", cpu_flags="avx2", cores=4, memory_bytes=2**33, accelerators=[], kernel="6")


class Scene:
    """A service with a bundle, a policy, a target and a runner, whose other parts the test plays."""

    def __init__(self, stack: Any, command: Any) -> None:
        self.api, self.service, self.command = stack, stack.service, command
        actor = stack.actor("manager")
        self.bundle = registered_bundle(self.service, actor)
        self.policy = registered_policy(self.service, actor)
        self.runner = Client(stack.url, stack.tokens["runner"])
        registration = RunnerRegistration(
            name="runner-1", runner_class="cpu", fingerprint=FINGERPRINT, engines=["llamacpp"], boot_id="b"
        )
        self.runner_id = self.runner.runners.register(registration).id
        command.be("manager", stack)

    def target(self) -> None:
        self.command.ok("target", "create", "chat@prod")

    def release(self, *options: object) -> dict[str, Any]:
        made: dict[str, Any] = self.command.ok(
            "release",
            "create",
            "-t",
            "chat@prod",
            "-b",
            self.bundle.digest[7:19],
            "-p",
            self.policy.digest,
            *options,
            "--json",
        ).json
        return made

    def act(self, release: str, name: str, kind: Kind, body: Any) -> None:
        with self.service.database.transaction() as session:
            row = releases.get(session, self.api.project_id, UUID(release))
            row = releases.act(session, self.service, row, name, "controller", kind, body)
            if isinstance(body, Traffic):
                remember(session, row, body)

    def result(self, gate: str, verdict: Verdict) -> GateResult:
        finding = Finding(
            code="first-divergence",
            severity=Severity.BLOCK,
            message=f"{gate} found something",
            pointer="p7",
            found="token 5",
            expected="token 9",
            advice="compare the templates",
        )
        return GateResult(
            gate=gate,
            definition="sha256:" + "d" * 64,
            verdict=verdict,
            summary=f"{gate} said {verdict}",
            measurements=[],
            findings=[] if verdict is Verdict.PASSED else [finding],
            duration_ms=1500,
            source="run",
        )

    def evaluate(self, **verdicts: Verdict) -> None:
        """Play a runner: claim the job that waits, report each gate, end it."""
        claim = None
        while claim is None:
            claim = self.runner.runners.claim(self.runner_id)
        for gate in claim.gates:
            body = self.result(gate, verdicts.get(gate, Verdict.PASSED)).model_dump(mode="json", exclude_none=True)
            report = Report(fencing_token=claim.fencing_token, act=f"gate:{gate}", kind="gate_recorded", body=body)
            self.runner.jobs.report(claim.job, report)
        self.runner.jobs.complete(claim.job, Complete(fencing_token=claim.fencing_token))

    def to_canary(self, release: str) -> None:
        """Take a release to its canary by the entries that the other parts would write."""
        digest = "sha256:" + "1" * 64
        self.act(release, "staged", Kind.STAGED, STAGED)
        self.act(release, "booted", Kind.ENGINE_BOOTED, BOOTED)
        self.act(release, "gates", Kind.GATES_PASSED, Decision(gates={"integrity": digest}))
        self.act(release, "approved", Kind.APPROVED, Approved(approvals=[], required=0))
        self.shift(release, 1000)

    def shift(self, release: str, weight: int) -> None:
        self.act(release, f"shift:{weight}", Kind.TRAFFIC_SHIFTED, traffic(self.bundle.digest, weight))


def traffic(bundle: str, weight: int, **changes: Any) -> Traffic:
    now = datetime(2026, 11, 29, 10, tzinfo=UTC)
    return Traffic(
        desired=[SplitEntry(bundle=bundle, weight_bp=weight)],
        revision="1",
        applied_ms=12.5,
        requested_at=now,
        applied_at=now,
        **({"step": 0} | changes),
    )


ENGINE = EngineIdentity(name="llamacpp", version="1", arguments=[], model_ids=["chat"], context_tokens=512)
STAGED = Staged(files=1, size=10, duration_ms=5)
BOOTED = EngineBooted(engine=ENGINE, fingerprint=FINGERPRINT, runner="runner-1", ready_ms=20)
