"""The stage of a rollback drill: candidate and accepted bundle as two engines behind an Envoy of its own on loopback.

It is driven by the very code that drives live gateways (`workers.traffic`), in a folder that ends with the drill.
"""

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

from gates.errors import InstrumentError
from gates.router import CANDIDATE, STABLE, WHOLE_BP, Arm, Split, cluster_name
from gates.stage import NotTakenBack, Overtaken, Side
from gates.tally import LogRecord
from schemas.problems import Problem
from workers.traffic import envoy_process
from workers.traffic.envoy import EnvoyGateway
from workers.traffic.problems import ArmNotHealthy, NotAcknowledged, NothingPrepared, Rejected, StaleRevision

TARGET: Final = "drill@private"
"""What the private gateway knows the target under; nobody else asks it."""
SILENCE_SECONDS: Final = 3600.0
"""No dead-man switch watches this gateway."""


class Engines(Protocol):
    """Who starts and ends the engines of both sides."""

    def kill_candidate(self) -> None:
        """End the candidate's engine without warning, and return when it is gone."""
        ...

    def stop_accepted(self) -> None:
        """End the accepted bundle's engine; no request is open on it."""
        ...

    def boot_accepted(self) -> Side:
        """Boot the accepted bundle anew. Raises NotTakenBack when it does not boot, InstrumentError."""
        ...


class EnvoyStage:
    """Implements `gates.stage.Stage`. See `stage`, which makes and ends one."""

    def __init__(
        self,
        gateway: EnvoyGateway,
        process: "subprocess.Popen[bytes]",
        *,
        candidate: Side,
        accepted: Side | None,
        engines: Engines,
    ) -> None:
        """Use a gateway that runs."""
        self.candidate = candidate
        self.accepted = accepted
        self.public_url = f"http://{gateway.host}:{gateway.port}/{TARGET}"
        self.gateway = gateway
        self._process = process
        self._engines = engines
        self._position = gateway.log.end()

    def settle(self) -> None:
        """Give all traffic to what is accepted, and prepare the way back there."""
        back = self._arms(0)
        with _broken("The private router could not be set up"):
            self.gateway.apply(Split(TARGET, self.next_revision(), back))
            self.gateway.prepare_rollback(TARGET, back, silence_seconds=SILENCE_SECONDS)

    def next_revision(self) -> int:
        """Return the revision that a shift which begins now would have."""
        split = self.gateway.desired(TARGET)
        return 1 if split is None else split.revision + 1

    def shift(self, candidate_bp: int, revision: int) -> Split:
        """Give the candidate a share, acknowledged on return. Raises Overtaken, InstrumentError."""
        split = Split(TARGET, revision, self._arms(candidate_bp))
        with _broken("The private router did not move traffic to the candidate"):
            try:
                return self.gateway.apply(split).split
            except StaleRevision as problem:
                raise Overtaken(problem.detail) from problem

    def restore(self) -> int:
        """Put the way back in force, as a release does: the prepared one, else one that is made now.

        Raises:
            NotTakenBack, InstrumentError.
        """
        with _broken("The private router is gone"):
            try:
                with contextlib.suppress(NothingPrepared):
                    return self.gateway.restore(TARGET).split.revision
                current, back = self.gateway.desired(TARGET), self._arms(0)
                is_back = current is not None and current.arms == back
                split = current if current is not None and is_back else Split(TARGET, self.next_revision(), back)
                return self.gateway.apply(split).split.revision
            except (ArmNotHealthy, NotAcknowledged) as problem:
                raise NotTakenBack(problem.detail, is_late=True) from problem
            except Rejected as problem:
                raise NotTakenBack(problem.detail, is_late=False) from problem

    def cool(self) -> Split:
        """Give all traffic to the candidate, forget the way back, and end what is accepted. Raises InstrumentError."""
        alone = (_arm(CANDIDATE, self.candidate, WHOLE_BP),)
        with _broken("The private router did not give the candidate all traffic"):
            self.gateway.discard_rollback(TARGET)
            split = self.gateway.apply(Split(TARGET, self.next_revision(), alone)).split
        self._engines.stop_accepted()
        return split

    def warm(self) -> None:
        """Boot the accepted bundle anew. Raises NotTakenBack, InstrumentError."""
        self.accepted = self._engines.boot_accepted()

    def log(self) -> Sequence[LogRecord]:
        """Return what the router logged since the last call. Raises InstrumentError for lines that are none."""
        found: list[LogRecord] = []
        is_more = True
        while is_more:
            batch = self.gateway.log.read(self._position)
            self._position, is_more = batch.until, batch.is_more
            if batch.garbled or batch.is_lost:
                raise InstrumentError("The private router's log cannot be read; run the gate again.")
            found += batch.records
        return found

    def kill_candidate(self) -> None:
        """End the candidate's engine at once, and return when it is gone."""
        self._engines.kill_candidate()

    def process_ids(self) -> Sequence[int]:
        """Return the router's process."""
        return (self._process.pid,)

    def check(self) -> None:
        """Return while the router runs. Raises InstrumentError."""
        code = self._process.poll()
        if code is not None:
            raise InstrumentError(f"The private router ended during the drill (status {code}); run the gate again.")

    def end(self) -> None:
        """End the router at once, since the job that drills is over."""
        self._process.kill()

    def _arms(self, candidate_bp: int) -> tuple[Arm, ...]:
        """Return the arms at a share of the candidate; none where nothing is accepted and it has no share."""
        arm = _arm(CANDIDATE, self.candidate, candidate_bp)
        if self.accepted is None:
            return (arm,) if candidate_bp else ()
        return (_arm(STABLE, self.accepted, WHOLE_BP - candidate_bp), arm)


def _arm(name: str, side: Side, weight_bp: int) -> Arm:
    return Arm(
        name, cluster_name(TARGET, side.bundle, f"{name}-{side.address.rpartition(':')[2]}"), side.address, weight_bp
    )


@contextlib.contextmanager
def _broken(what: str) -> Iterator[None]:
    """Turn a problem of the gateway into one of the instrument."""
    try:
        yield
    except Problem as problem:
        raise InstrumentError(f"{what}: {problem.detail}; run the gate again.") from problem


@contextlib.contextmanager
def stage(directory: Path, *, candidate: Side, accepted: Side | None, engines: Engines) -> Iterator[EnvoyStage]:
    """Run a private Envoy before both sides; in the end it is gone, with its folder.

    It ends with this context or with the thread that entered it, whichever comes first: a runner that is killed leaves
    none behind.

    Args:
        directory: of the gateway; made anew.
        candidate: a running engine.
        accepted: another one, or None where the target has accepted nothing.
        engines: ends the engines of both, and boots what is accepted anew.

    Raises:
        InstrumentError: there is no Envoy on this runner, or it did not start.
    """
    shutil.rmtree(directory, ignore_errors=True)
    gateway = EnvoyGateway(directory, port=_free_port())
    process: subprocess.Popen[bytes] | None = None
    try:
        try:
            process = envoy_process.start(gateway, envoy_process.find_envoy(), is_tied=True)
            envoy_process.wait_ready(gateway, process)
        except (OSError, Problem) as error:
            raise InstrumentError(f"The private router did not start on this runner: {error}") from error
        yield EnvoyStage(gateway, process, candidate=candidate, accepted=accepted, engines=engines)
    finally:
        if process is not None:
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
