"""What every job that boots an engine does: the right engine, the right bytes, one replica whose changes are told."""

import contextlib
import os
import shutil
from collections.abc import Iterator

from gates import integrity
from gates.dialects.table import dialect_of
from gates.endpoint import Endpoint
from gates.environment import OWN_ENVIRONMENTS, EnvironmentAltered, NotInstalled, engine_environment
from gates.gate import JudgeInput, Records
from schemas.bundle import Bundle
from schemas.evidence import EngineBooted, Kind
from schemas.policy import IntegrityRule
from schemas.problems import EngineFailed, Problem
from schemas.result import Verdict
from schemas.runner import ReplicaState
from workers.engines.table import DRIVERS
from workers.launchers.base import Launcher
from workers.lease import JobEnded, Lease, log
from workers.serving import NotWanted, Ready, Replica
from workers.site import Site
from workers.staging import Place

DRAIN_SECONDS = 2.0
"""What running requests get when the engine of a gate is ended: there should be none."""
STOP_SECONDS = 5.0


class EngineMismatch(Problem):
    """The engine installed on this runner is not the one that the bundle names, so nothing may be served with it."""

    kind, title, status = "engine-mismatch", "Engine mismatch", 409


class IntegrityFailed(Problem):
    """The staged files are not the ones that the bundle names; nothing was booted from them."""

    kind, title, status = "integrity-failed", "Integrity failed", 409


def installed_engines(launcher: Launcher | None = None) -> dict[str, str | None]:
    """Return the engines that a runner can start, sorted, each with the digest of the environment it is installed in.

    An image brings its engine with it, so of those there is no digest before a bundle names one.
    """
    if launcher is not None and launcher.runs_images:
        return {name: None for name, driver in sorted(DRIVERS.items()) if driver.admits is None}
    found: dict[str, str | None] = {}
    for name, driver in sorted(DRIVERS.items()):
        with contextlib.suppress(EnvironmentAltered, NotInstalled):
            # Gigabytes of an environment of its own are looked at where something is booted.
            is_own = name in OWN_ENVIRONMENTS
            found[name] = (engine_environment(name, is_certain=False) if is_own else driver.identity()).digest
    return found


def _has() -> str:
    return ", ".join(installed_engines()) or "no engine"


def require_engine(bundle: Bundle, launcher: Launcher) -> None:
    """Return when this runner can start the very engine that a bundle names. Raises EngineMismatch naming both.

    An image is named by its digest, so whether it can be had is seen when it is pulled.
    """
    engine = bundle.engine
    driver = DRIVERS.get(engine.name)
    wanted = engine.image or engine.environment or "an endpoint"
    wanted = f"{engine.name} {engine.version} in {wanted}"
    if driver is None:
        raise EngineMismatch(f"the bundle is served by {wanted}; this runner has {_has()}")
    if launcher.runs_images:
        if engine.image is None:
            raise EngineMismatch(f"the bundle is served by {wanted}; this runner starts engines from images alone")
        return
    if driver.admits is not None:
        if refused := driver.admits(bundle):
            raise EngineMismatch(f"this runner does not speak to that endpoint: {'; '.join(refused)}")
        return
    if engine.environment is None:
        raise EngineMismatch(f"the bundle is served by {wanted}; this runner has {_has()}, and starts processes alone")
    try:
        installed = driver.identity()
    except (EnvironmentAltered, NotInstalled) as error:
        raise EngineMismatch(
            f"the bundle names {engine.name} {engine.version} in the environment {engine.environment}; "
            f"what is installed on this runner cannot be named: {error}; it has {_has()}"
        ) from error
    if installed.digest != engine.environment:
        raise EngineMismatch(
            f"the bundle names {engine.name} {engine.version} in the environment {engine.environment}; "
            f"installed on this runner is {installed.version} in {installed.digest}"
        )


def require_integrity(site: Site, lease: Lease, bundle: Bundle, place: Place) -> Records:
    """Hash every staged file, and return the pass. Raises IntegrityFailed; the files are then staged anew next time.

    What is linked from the store is the store's own file, so the service reads again what has other bytes here.
    """
    seen = integrity.observe(bundle, place.root, lease.step)
    judged = integrity.judge(JudgeInput(IntegrityRule(gate="integrity"), {"passes": [seen]}, bundle))
    if judged.verdict in {Verdict.FAILED, Verdict.ERRORED}:
        site.staging.discard(bundle)
        for blob in sorted({str(one.expected) for one in judged.findings if one.code == integrity.DIFFERS}):
            site.doubt(blob)
        raise IntegrityFailed(judged.summary)
    return seen


def require_untouched(site: Site, bundle: Bundle, place: Place, seen: Records) -> None:
    """Return when an engine that is ready has loaded the files that were hashed. Raises IntegrityFailed."""
    if not (paths := integrity.touched(seen, place.root)):
        return
    site.staging.discard(bundle)
    for blob in sorted({file.sha256 for file in bundle.files if file.path in paths}):
        site.doubt(blob)
    more = f", and {len(paths) - 1} more," if len(paths) > 1 else ""
    raise IntegrityFailed(f"{paths[0]}{more} was replaced or written to after it was hashed, while the engine loaded")


class Transitions:
    """Reports each change of a replica's state, as one act each.

    Nothing leaves it: a change that cannot be told must not keep an engine from being stopped. Whether the job is
    over is asked where the job goes on.
    """

    def __init__(self, lease: Lease) -> None:
        """Report under this lease."""
        self.replica: Replica | None = None
        self._lease = lease
        self._number = 0

    def __call__(self, state: ReplicaState, cause: str) -> None:
        """Report one change."""
        if self.replica is None:
            return
        self._number += 1
        self._lease.progress(f"replica {state}: {cause}")
        try:
            self._lease.report(
                Kind.REPLICA_CHANGED, self._lease.act("replica", self._number), self.replica.report(cause)
            )
        except JobEnded as ended:
            log.info("replica_change_not_reported", job=str(self._lease.job), state=state, why=ended.ending)
        except Problem as problem:
            log.warning("replica_change_refused", job=str(self._lease.job), state=state, detail=problem.detail)


def endpoint_of(replica: Replica) -> Endpoint:
    """Return the way to speak to a replica that listens."""
    bundle = replica.bundle
    return Endpoint(replica.base_url, bundle.serving.served_name, dialect_of(bundle.engine))


def start_and_wait(lease: Lease, replica: Replica, boot_seconds: float) -> Ready:
    """Start an engine and wait until it is ready.

    Raises:
        EngineFailed: it did not become ready; it is ended.
        JobEnded: the job was over before.
    """
    lease.check()
    try:
        replica.start()
        return replica.wait_ready(boot_seconds, is_wanted=lambda: not lease.ended.is_set())
    except (EngineFailed, NotWanted):
        # An engine that was killed because the job is over has not failed.
        lease.check()
        raise


def booted(site: Site, lease: Lease, ready: Ready, place: Place) -> None:
    """Put what really booted, where, and what each part of it took into evidence."""
    body = EngineBooted(
        engine=ready.identity,
        fingerprint=site.fingerprint,
        runner=site.name,
        ready_ms=ready.ready_ms or 0,
        stage_ms=place.facts.duration_ms,
        was_staged=place.was_there,
        page_cache_percent=ready.page_cache_percent,
        # A boot has a folder of its own, and with it a cache that nothing was compiled into before.
        kernel_cache="empty" if ready.compile_ms is not None else None,
        loading_ms=ready.loading_ms,
        compile_ms=ready.compile_ms,
        warming_ms=ready.warming_ms,
        warm_requests=ready.warm_requests,
        warm_failed=ready.warm_failed,
        compared=list(ready.compared),
        findings=list(ready.findings) or None,
    )
    lease.report(Kind.ENGINE_BOOTED, lease.act("booted", 1), body)


@contextlib.contextmanager
def gate_replica(
    site: Site, lease: Lease, bundle: Bundle, place: Place, *, beside: str | None = None, own: Bundle | None = None
) -> Iterator[Replica]:
    """Yield a replica that ends with the context, with the job and with this process, whichever comes first.

    Args:
        site: this runner.
        lease: of the job.
        bundle: what is booted.
        place: where its files are staged.
        beside: name of a second replica of the job. What the log says of replicas is about the job's bundle, so the
            changes of this one go to the job's progress alone.
        own: the job's bundle, whose replica has accelerators of its own, where this is a second one.
    """
    workdir = site.data_dir / "engines" / (str(lease.job) if beside is None else f"{lease.job}-{beside}")
    shutil.rmtree(workdir, ignore_errors=True)
    order = site.order(lease, bundle, place.root, own)
    launch = site.launcher.place(order, workdir, drain_seconds=DRAIN_SECONDS, parent_pid=os.getpid())
    transitions = Transitions(lease)

    def tell(state: ReplicaState, cause: str) -> None:
        if beside is None:
            transitions(state, cause)
        else:
            lease.progress(f"{beside} replica {state}: {cause}")

    replica = Replica(
        bundle,
        launch,
        workdir=workdir,
        launcher=site.launcher,
        order=order,
        on_transition=tell,
        on_progress=lease.progress,
    )
    transitions.replica = replica
    try:
        with lease.on_end(lambda: _kill(replica)):
            yield replica
    finally:
        replica.stop(grace_seconds=STOP_SECONDS)
        shutil.rmtree(workdir, ignore_errors=True)


def _kill(replica: Replica) -> None:
    replica.stop(grace_seconds=0.0)
