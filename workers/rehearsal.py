"""The rollback drill as a runner does it: the accepted bundle booted beside the candidate, and a stage for both.

What is wrong with the accepted bundle is a result: there is no way back. What this runner lacks, an Envoy, an engine
or memory for two of them, says nothing about either bundle, and the gate is errored.
"""

import contextlib
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from gates import catalog, rollback
from gates.errors import InstrumentError
from gates.gate import GateContext, Records
from gates.rollback_judgement import no_way_back
from gates.stage import NotTakenBack, Side
from schemas.bundle import Bundle
from schemas.failures import Cause, is_transient
from schemas.problems import DigestMismatch, EngineFailed, NotFound
from schemas.result import GateResult
from workers import drill
from workers.attending import Attendant
from workers.boot import (
    STOP_SECONDS,
    EngineMismatch,
    IntegrityFailed,
    endpoint_of,
    gate_replica,
    require_engine,
    require_integrity,
    require_untouched,
    start_and_wait,
)
from workers.lease import Lease
from workers.serving import Replica
from workers.site import Site

GATE = rollback.GATE.name
BESIDE = "accepted"
MEMORY = Path("/proc/meminfo")


class NoWayBack(Exception):
    """The accepted bundle cannot be served any more; `records` say why."""

    def __init__(self, records: Records) -> None:
        """Make it."""
        super().__init__(str(records))
        self.records = records


def run(
    site: Site, lease: Lease, context: GateContext, replica: Replica, *, boot_seconds: float
) -> tuple[GateResult, bytes]:
    """Run the gate, and return its result with its records. The candidate's engine may be gone afterwards.

    Args:
        site: this runner.
        lease: of the job, whose claim names the accepted bundle.
        context: of the gate, without a stage.
        replica: the candidate's, ready.
        boot_seconds: longest time for the accepted bundle to get ready.

    Raises:
        JobEnded: the job was over before.
        EngineFailed: a process of an engine was lost, or stood still, and nobody had asked for that.
        Problem, OSError: the service or the disk failed, which says nothing about a bundle.
    """
    stack = contextlib.ExitStack()
    engines = _Engines(site, lease, stack, replica, boot_seconds)
    result, raw = _run(context, engines, stack)
    if (lost := engines.lost()) is not None:
        # What was measured of a dead engine says nothing.
        lease.check()
        raise EngineFailed(f"during the gate {GATE}: {lost.detail}", **lost.members)
    return result, raw


def _run(context: GateContext, engines: "_Engines", stack: contextlib.ExitStack) -> tuple[GateResult, bytes]:
    started, site, lease = time.monotonic(), engines.site, engines.lease
    records: Records
    try:
        with stack:
            engines.attend(engines.candidate)
            made = stack.enter_context(
                drill.stage(
                    site.data_dir / "engines" / f"{lease.job}-gateway",
                    candidate=_side(engines.candidate),
                    accepted=engines.first(),
                    engines=engines,
                )
            )
            stack.enter_context(lease.on_end(made.end))
            return catalog.run(GATE, replace(context, stage=made))
    except NoWayBack as problem:
        records = problem.records
    except InstrumentError as error:
        records = {"instrument": str(error)}
    return catalog.conclude(GATE, context, records, duration_ms=round((time.monotonic() - started) * 1000))


def _side(replica: Replica) -> Side:
    return Side(replica.bundle.digest, endpoint_of(replica), replica.address, replica.process_id)


@dataclass(slots=True)
class _Engines:
    """The candidate's engine, which may be killed, and the accepted bundle's, which may be ended and booted anew."""

    site: Site
    lease: Lease
    stack: contextlib.ExitStack
    """Ends what was booted."""
    candidate: Replica
    boot_seconds: float
    accepted: Replica | None = None
    bundle: Bundle | None = None
    boots: int = 0
    attended: list[Attendant] = field(default_factory=list)

    def attend(self, replica: Replica) -> None:
        """Look at an engine's processes until it is ended, and end all of it when one of them is lost."""
        self.attended.append(self.stack.enter_context(Attendant(replica)))

    def lost(self) -> EngineFailed | None:
        """Return how the first engine failed that did so unasked; None when none has."""
        return next((one.failure for one in self.attended if one.failure is not None), None)

    def _leave(self, replica: Replica) -> None:
        """Look no more at an engine that is to end."""
        for one in self.attended:
            if one.replica is replica:
                one.leave()

    def first(self) -> Side | None:
        """Boot the accepted bundle; None when the target has accepted nothing yet. Raises NoWayBack."""
        digest = self.lease.claim.accepted
        if digest is None:
            return None
        self.lease.step("staging the accepted bundle")
        try:
            self.bundle = self.site.bundle(self.lease, digest)
        except NotFound as problem:
            raise NoWayBack(no_way_back("blobs", problem.detail, bundle=digest)) from problem
        except DigestMismatch as problem:
            raise NoWayBack(no_way_back("bytes", problem.detail, bundle=digest)) from problem
        return self._boot(self.bundle)

    def kill_candidate(self) -> None:
        self._leave(self.candidate)
        self.candidate.crash("ended by the rollback drill")

    def stop_accepted(self) -> None:
        if self.accepted is not None:
            self._leave(self.accepted)
            self.accepted.stop(grace_seconds=STOP_SECONDS)

    def boot_accepted(self) -> Side:
        """Boot what is accepted anew, from bytes that are hashed anew, without a word to the service."""
        if self.bundle is None:
            raise InstrumentError("There is no accepted bundle to boot; run the gate again.")
        try:
            return self._boot(self.bundle)
        except NoWayBack as problem:
            detail = str(problem.records["no_way_back"]["detail"])
            raise NotTakenBack(detail, is_late=detail.startswith(f"{Cause.TIMEOUT}:")) from problem

    def _boot(self, bundle: Bundle) -> Side:
        site, lease = self.site, self.lease
        try:
            require_engine(bundle, site.launcher)
            place = site.stage(lease, bundle)
            seen = require_integrity(site, lease, bundle, place)
        except EngineMismatch as problem:
            raise InstrumentError(f"This runner cannot boot the accepted bundle: {problem.detail}") from problem
        except NotFound as problem:
            raise NoWayBack(no_way_back("blobs", problem.detail, bundle=bundle.digest)) from problem
        except (DigestMismatch, IntegrityFailed) as problem:
            raise NoWayBack(no_way_back("bytes", problem.detail, bundle=bundle.digest)) from problem
        _require_memory(bundle)
        self.boots += 1
        beside = f"{BESIDE}-{self.boots}"
        own = self.candidate.bundle
        try:
            replica = self.stack.enter_context(gate_replica(site, lease, bundle, place, beside=beside, own=own))
        except IndexError as error:
            raise InstrumentError(f"This runner has no accelerators for the accepted bundle: {error}") from error
        try:
            start_and_wait(lease, replica, self.boot_seconds)
            require_untouched(site, bundle, place, seen)
        except IntegrityFailed as problem:
            raise NoWayBack(no_way_back("bytes", problem.detail, bundle=bundle.digest)) from problem
        except EngineFailed as failure:
            if is_transient(failure.members["cause"]):
                raise InstrumentError(
                    f"This runner could not hold the accepted bundle beside the candidate: {failure.detail}"
                ) from failure
            tail = failure.members.get("log_tail") or []
            raise NoWayBack(no_way_back("boot", failure.detail, bundle=bundle.digest, log_tail=tail)) from failure
        self.attend(replica)
        self.accepted = replica
        return _side(replica)


def _require_memory(bundle: Bundle) -> None:
    """Return when the weights of a second engine fit into what is free. Raises InstrumentError."""
    needed = sum(file.size for file in bundle.weights())
    lines = dict(line.split(":", 1) for line in MEMORY.read_text(encoding="ascii").splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    if bundle.hardware.count == 0 and needed > free:
        raise InstrumentError(
            f"This runner cannot hold two engines: the accepted bundle's weights take {needed / 1e9:.1f} GB beside the"
            f" candidate, and {free / 1e9:.1f} GB are free; use a runner with more memory."
        )
