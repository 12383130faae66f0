"""The evaluate job: stage, boot once, run the gates in order, hash again, stop.

What is the candidate's fault becomes the result of a gate, which is final. What is not becomes a problem of the
job, which the service has tried again. The engine outlives neither this process nor the lease.
"""

import time
from dataclasses import dataclass, field

from gates import catalog, compatibility, integrity, rollback
from gates.gate import GateContext, Records
from gates.placement import gate as placement
from gates.static import gate as static
from schemas.bundle import Bundle
from schemas.evidence import Kind
from schemas.failures import Cause, is_transient
from schemas.policy import CompatibilityRule, GoldenRule, Policy, SuiteRule
from schemas.problems import EngineFailed, InvalidDocument
from schemas.reference import Reference
from schemas.result import GateResult, Verdict
from schemas.suite import AnySuite
from workers import rehearsal
from workers.attending import Attendant
from workers.boot import (
    booted,
    endpoint_of,
    gate_replica,
    require_engine,
    require_integrity,
    require_untouched,
    start_and_wait,
)
from workers.lease import Lease
from workers.serving import Ready, Replica
from workers.site import Site
from workers.staging import Place

INTEGRITY, COMPATIBILITY, ROLLBACK = (one.GATE.name for one in (integrity, compatibility, rollback))
BEFORE_BOOT = (static.GATE.name, placement.GATE.name)
"""Gates that need the files and no engine, in the order in which they run."""


def evaluate(site: Site, lease: Lease) -> None:
    """Run the gates that the claim names, and report each result.

    Raises:
        JobEnded: the lease was lost, the job is no longer wanted, or this runner stops.
        Problem, OSError: something failed that says nothing about the candidate; to be tried again.
    """
    if not lease.claim.gates:
        return
    policy = site.policy(lease)
    if policy is None:
        raise InvalidDocument(f"job {lease.job} names no policy to judge by", errors=[])
    bundle = site.bundle(lease)
    require_engine(bundle, site.launcher)
    place = site.stage(lease, bundle)
    lease.report(Kind.STAGED, lease.act("staged", 1), place.facts)
    _Evaluation(site, lease, policy, bundle, place).run()


@dataclass(slots=True)
class _Evaluation:
    site: Site
    lease: Lease
    policy: Policy
    bundle: Bundle
    place: Place
    hashed: Records | None = None
    """Files that its engine loads, where the gate that hashes them again afterwards is not asked for."""
    suites: dict[str, AnySuite] = field(default_factory=dict)
    references: dict[str, Reference] = field(default_factory=dict)

    def run(self) -> None:
        gates = self.lease.claim.gates
        before: Records | None = None
        if INTEGRITY in gates:
            before = self._hash_before_boot()
            if before is None:
                return
        if not all(self._passes_unstarted(gate) for gate in BEFORE_BOOT if gate in gates):
            self._hash_after_gates(before)
            return
        engine_gates = [gate for gate in gates if gate not in {INTEGRITY, *BEFORE_BOOT}]
        if engine_gates:
            self._load_documents(engine_gates)
            if before is None:
                # Nothing is booted from bytes that were not read a moment ago.
                self.hashed = require_integrity(self.site, self.lease, self.bundle, self.place)
            with gate_replica(self.site, self.lease, self.bundle, self.place) as replica:
                self._boot_and_run(replica, engine_gates)
                self._hash_after_gates(before)
        else:
            self._hash_after_gates(before)

    # ------------------------------------------------------------------------------------------ integrity

    def _hash_before_boot(self) -> Records | None:
        """Hash every file; None when that already decides, and nothing must be booted from these files."""
        context = self._context(INTEGRITY)
        started = time.monotonic()
        seen = integrity.observe(self.bundle, self.place.root, self.lease.step)
        duration_ms = round((time.monotonic() - started) * 1000)
        result, raw = catalog.conclude(INTEGRITY, context, {"passes": [seen]}, duration_ms=duration_ms)
        if result.verdict not in {Verdict.FAILED, Verdict.ERRORED}:
            return seen
        self.site.staging.discard(self.bundle)
        self._record(result, raw)
        return None

    def _passes_unstarted(self, gate: str) -> bool:
        """Check the composition while nothing runs; False when that already decides, and no engine need start."""
        self.lease.step(f"gate {gate}")
        result, raw = catalog.run(gate, self._context(gate))
        self._record(result, raw)
        return result.verdict is not Verdict.FAILED

    def _hash_after_gates(self, before: Records | None) -> None:
        if before is not None:
            self._record(*catalog.run(INTEGRITY, self._context(INTEGRITY, before_boot=before)))

    # ------------------------------------------------------------------------------------- boot and gates

    def _boot_and_run(self, replica: Replica, gates: list[str]) -> None:
        """Boot, and run gates until one fails: what comes after it could change nothing."""
        boot_seconds = float(self._rule_of_boot().boot_seconds)
        try:
            ready = start_and_wait(self.lease, replica, boot_seconds)
        except EngineFailed as failure:
            if is_transient(failure.members["cause"]):
                raise
            self._record_failed_boot(gates, failure)
            return
        if self.hashed is not None:
            require_untouched(self.site, self.bundle, self.place, self.hashed)
        booted(self.site, self.lease, ready, self.place)
        for place, gate in enumerate(gates, start=1):
            self.lease.step(f"gate {gate}, {place} of {len(gates)}")
            context = self._context(gate, replica=replica, ready=ready)
            if gate == ROLLBACK:
                self._record(*rehearsal.run(self.site, self.lease, context, replica, boot_seconds=boot_seconds))
                return  # it has ended the engine
            result, raw = self._attended(gate, context, replica)
            self._record(result, raw)
            if result.verdict is Verdict.FAILED:
                return

    def _attended(self, gate: str, context: GateContext, replica: Replica) -> tuple[GateResult, bytes]:
        """Run a gate, and return its result unless the engine was lost: what was measured of a dead one says nothing.

        The compatibility gate sends what may kill an engine and asks after each, so what it found itself stands.

        Raises:
            EngineFailed: somebody ended the engine or a part of it, or it generates no more.
        """
        is_hostile = gate == COMPATIBILITY
        try:
            with Attendant(replica, ends=not is_hostile) as attendant:
                result, raw = catalog.run(gate, context)
            self.lease.check()
            is_failed = result.verdict is Verdict.FAILED
            lost = attendant.failure
            is_its_own = is_failed and is_hostile and lost is not None and lost.members["cause"] == Cause.RANK_LOST
            if lost is not None and not is_its_own:
                raise lost
            if is_failed and lost is None and replica.was_killed():
                # As at a boot: the machine may have been full, and the candidate had no part in it.
                raise EngineFailed("the engine was killed", cause=str(Cause.KILLED))
            if not is_failed:
                attendant.require_answer()
        except EngineFailed as failure:
            self.lease.check()
            raise EngineFailed(f"during the gate {gate}: {failure.detail}", **failure.members) from failure
        return result, raw

    def _record_failed_boot(self, gates: list[str], failure: EngineFailed) -> None:
        """A candidate that does not boot fails compatibility. Where that is not asked, nothing can be measured."""
        if COMPATIBILITY in gates:
            records = compatibility.boot_failed(
                failure.members["cause"],
                failure.detail,
                failure.members.get("log_tail") or [],
                failure.members.get("findings") or [],
            )
            self._record(*catalog.conclude(COMPATIBILITY, self._context(COMPATIBILITY), records, duration_ms=0))
            return
        reason = f"The engine did not boot ({failure.detail}), so there was nothing to measure."
        self._record(*catalog.conclude(gates[0], self._context(gates[0]), {"instrument": reason}, duration_ms=0))

    def _record(self, result: GateResult, raw: bytes) -> None:
        # An engine that was killed because the job is over says nothing about the candidate.
        self.lease.check()
        digest = result.records
        if digest is not None:
            self.lease.patiently(
                lambda token: self.site.client.jobs.put_records(self.lease.job, digest, raw, fencing_token=token)
            )
        self.lease.report(Kind.GATE_RECORDED, f"gate:{result.gate}", result)

    # ------------------------------------------------------------------------------------------ documents

    def _rule_of_boot(self) -> CompatibilityRule:
        for rule in self.policy.gates:
            if isinstance(rule, CompatibilityRule):
                return rule
        raise InvalidDocument(f"policy {self.policy.name} has no rule for {COMPATIBILITY}", errors=[])

    def _load_documents(self, gates: list[str]) -> None:
        for rule in self.policy.gates:
            if rule.gate in gates and isinstance(rule, SuiteRule):
                self.suites[rule.suite] = self.site.suite(self.lease, rule.suite)
                reference = self.lease.claim.references.get(rule.suite)
                if isinstance(rule, GoldenRule) and reference is not None:
                    self.references[rule.suite] = self.site.reference(self.lease, reference)

    def _context(
        self,
        gate: str,
        *,
        replica: Replica | None = None,
        ready: Ready | None = None,
        before_boot: Records | None = None,
    ) -> GateContext:
        rules = [rule for rule in self.policy.gates if rule.gate == gate]
        if not rules:
            raise InvalidDocument(f"policy {self.policy.name} has no rule for {gate}", errors=[])
        suite = rules[0].suite if isinstance(rules[0], SuiteRule) else ""
        return GateContext(
            bundle=self.bundle,
            root=self.place.root,
            rule=rules[0],
            suite=self.suites.get(suite),
            reference=self.references.get(suite),
            endpoint=endpoint_of(replica) if replica is not None else None,
            engine=ready.identity if ready is not None else None,
            process_id=replica.process_id if replica is not None else lambda: None,
            ready_ms=ready.ready_ms if ready is not None else None,
            progress=self.lease.progress,
            before_boot=before_boot,
            fingerprint=self.site.fingerprint,
        )
