"""The runner's loop: it registers, says that it lives, claims jobs while it has slots, and runs each in a thread.

The broker only rings. A lost ring costs seconds, since the loop looks by itself every few seconds.

One process uses a data folder at a time, by a lock that the kernel drops when the process dies. So whatever still
runs out of the folder when the lock is taken belonged to a predecessor that is gone: engines of gates are ended,
replicas that serve live traffic are taken up again under their old lease, where the service still knows it.
"""

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import UUID

from gates.environment import place_engines
from registry.client import Client
from registry.settings import RunnerSettings
from schemas.problems import Conflict, NotFound, Problem, TransitionRefused
from schemas.runner import SPEAKS, Claim, JobKind, RunnerRegistration
from workers import evaluation, fingerprint, live, nvml, recording
from workers.boot import installed_engines
from workers.engines import external
from workers.engines.external import EXTERNAL, Admission
from workers.engines.table import DRIVERS
from workers.launchers import earlier
from workers.launchers.base import Launcher, LaunchFailed, NotTold
from workers.launchers.choice import launcher_of
from workers.launchers.proc import boot_id
from workers.lease import Ending, JobEnded, Lease, log
from workers.site import Site
from workers.staging import Staging

HEARTBEAT_SECONDS = 5.0
LOOK_SECONDS = 2.0
RETRY_SECONDS = 1.0
FAILED_SECONDS = 5.0
SWEEP_SECONDS = 10.0
"""Between two looks for what runs and is nobody's."""
STOP_SECONDS = 20.0
"""How long `stop` waits for jobs to end: engines of gates are killed, and the service is told."""

JOBS: Mapping[JobKind, Callable[[Site, Lease], None]] = {
    JobKind.EVALUATE: evaluation.evaluate,
    JobKind.SERVE: live.serve,
    JobKind.RECORD: recording.record,
}


class Agent:
    """One runner. `start` returns at once; `ring` makes it look for jobs now; `stop` ends it."""

    def __init__(self, settings: RunnerSettings, client: Client) -> None:
        """Use these settings. Nothing is read, started or claimed before `start`."""
        place_engines(settings.engines)
        self._settings = settings
        self._client = client
        # The process is one runner: what its operator allows of engines that run elsewhere holds for all of its jobs.
        DRIVERS[EXTERNAL.name] = external.driver(Admission(settings.external_hosts or "", settings.external_tokens))
        self._launchers: tuple[Launcher, ...] = ()
        self._staging: Staging | None = None
        self._sweeping: threading.Thread | None = None
        self._swept = time.monotonic()
        self._bell = threading.Event()
        self._stopping = threading.Event()
        self._held: dict[UUID, Lease] = {}
        self._threads: dict[UUID, threading.Thread] = {}
        self._lock = threading.Lock()
        self._folder: int | None = None
        self._main = threading.Thread(target=self._run, name="agent", daemon=True)

    def start(self) -> None:
        """Start the loop in a thread of its own."""
        self._main.start()

    def ring(self) -> None:
        """Look for jobs now."""
        self._bell.set()

    def held(self) -> list[UUID]:
        """Return the jobs held now."""
        with self._lock:
            return list(self._held)

    def stop(self) -> None:
        """Stop: kill engines of gates and give their jobs back, leave live replicas running, drop the data folder."""
        self._stopping.set()
        self._bell.set()
        self._end_all()
        if self._main.ident is not None:
            self._main.join(STOP_SECONDS)
        # What was claimed in the last moment.
        threads = self._end_all()
        deadline = time.monotonic() + STOP_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._folder is not None and not any(thread.is_alive() for thread in (*threads, self._main)):
            os.close(self._folder)
            self._folder = None

    def _end_all(self) -> list[threading.Thread]:
        with self._lock:
            leases, threads = list(self._held.values()), list(self._threads.values())
        for lease in leases:
            lease.end(Ending.STOPPING)
        return threads

    # ------------------------------------------------------------------------------------------- the loop

    def _run(self) -> None:
        self._settings.data_dir.mkdir(parents=True, exist_ok=True)
        path = self._settings.data_dir / "runner.lock"
        # Open until the process ends, or every job of this runner has: until then the folder is in use.
        self._folder = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not self._alone(self._folder):
            return
        while not self._stopping.is_set():
            try:
                self._live()
            except earlier.Unreachable as error:
                log.error("left_under_another_launcher", detail=str(error))
                self._stopping.wait(FAILED_SECONDS)
            except LaunchFailed as error:
                log.error("launcher_cannot_be_used", detail=str(error))
                self._stopping.wait(FAILED_SECONDS)
            except Exception:  # edge: a runner that gave up would look alive to whoever watches its process
                log.exception("agent_failed")
                self._stopping.wait(FAILED_SECONDS)

    def _live(self) -> None:
        site = self._site()
        with self._lock:
            is_first = not self._held
        if is_first:
            end_left_engines(site.data_dir, site.launchers)
            site.staging.tidy()
        runner = self._register(site)
        if is_first and runner is not None:
            self._take_up(site)
        beat = time.monotonic()
        while runner is not None and not self._stopping.is_set():
            try:
                if time.monotonic() - beat >= HEARTBEAT_SECONDS:
                    self._client.runners.heartbeat(runner, disk_free_bytes=self._disk_left(), boot_id=boot_id())
                    beat = time.monotonic()
                self._claim_all(site, runner)
                for launcher in site.launchers:
                    launcher.reap()
                self._sweep(site)
            except (NotFound, Conflict) as problem:
                # The service has forgotten this runner, since its database was replaced; or another machine has its
                # name, and what this one holds goes on while it waits for that one to be gone.
                log.warning("not_registered_any_more", detail=problem.detail)
                runner = self._register(site)
            except Problem as problem:
                log.warning("service_does_not_answer", detail=problem.detail)
            self._bell.wait(LOOK_SECONDS)
            self._bell.clear()

    def _alone(self, handle: int) -> bool:
        """Wait until no other process uses the data folder. False when this runner stops before."""
        is_told = False
        while not self._stopping.is_set():
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if not is_told:
                    log.warning("data_folder_in_use", folder=str(self._settings.data_dir))
                is_told = True
                self._stopping.wait(0.2)
        return False

    def _site(self) -> Site:
        settings, found = self._settings, nvml.read()
        # The same for as long as this runs: they know the engines that they started and took up, and what jobs hold.
        if self._staging is None:
            self._staging = Staging(settings.data_dir, settings.store_dir, kept_bytes=settings.kept_bytes)
        if not self._launchers:
            own = launcher_of(settings)
            ways = earlier.others(settings, live.shelf(settings.data_dir).handles())
            self._launchers = earlier.all_of(own, ways.values())
        return Site(
            name=settings.name,
            data_dir=settings.data_dir,
            fingerprint=fingerprint.told(settings.hardware) or fingerprint.fingerprint(found),
            identifiers=found.identifiers,
            hardware=settings.runner_class,
            staging=self._staging,
            launcher=self._launchers[0],
            others=self._launchers[1:],
            client=self._client,
        )

    def _register(self, site: Site) -> UUID | None:
        """Say who this runner is, however long the service needs to answer. None when this runner stops before."""
        engines = installed_engines(site.launcher)
        body = RunnerRegistration(
            name=site.name,
            runner_class=self._settings.runner_class,
            fingerprint=site.fingerprint,
            engines=list(engines),
            environments={name: digest for name, digest in engines.items() if digest},
            launcher=site.launcher.name,
            boot_id=boot_id(),
            slots=self._settings.slots,
            disk_free_bytes=self._disk_left(),
            # Where hardware is told by a file, the driver of this machine knows nothing of it.
            device_ids=list(site.identifiers) if self._settings.hardware is None else None,
            # A service that does not know this yet refuses it, so that nothing is claimed that this cannot read.
            speaks=SPEAKS,
        )
        while not self._stopping.is_set():
            try:
                runner = self._client.runners.register(body)
            except Problem as problem:
                log.warning("not_registered", detail=problem.detail)
                self._stopping.wait(RETRY_SECONDS)
            else:
                log.info("registered", runner=str(runner.id), name=runner.name, runner_class=runner.runner_class)
                return runner.id
        return None

    def _disk_left(self) -> int:
        return shutil.disk_usage(self._settings.data_dir).free

    def _claim_all(self, site: Site, runner: UUID) -> None:
        """Claim until there is nothing to do or no slot is free."""
        while not self._stopping.is_set():
            with self._lock:
                leases = list(self._held.values())
            if len(leases) >= self._settings.slots:
                return
            # After an outage our own leases come first: else we would claim our own jobs from ourselves.
            if not all(lease.renew() for lease in leases if lease.is_overdue and not lease.is_lost):
                return
            if any(lease.is_lost and lease.claim.devices for lease in leases):
                return  # the service takes their accelerators for free, and an engine of ours still ends on them
            claim = self._client.runners.claim(runner, boot_id=boot_id())
            if claim is None:
                return
            self._hold(site, claim)

    def _hold(self, site: Site, claim: Claim, lease: Lease | None = None) -> None:
        with self._lock:
            mine = self._held.get(claim.job)
            if mine is not None and not mine.is_lost:
                log.warning("own_job_claimed_again", job=str(claim.job), attempt=claim.attempt)
                mine.take_over(claim)
                return
        log.info("job_claimed", job=str(claim.job), kind=claim.kind, attempt=claim.attempt, bundle=claim.bundle)
        site.staging.hold(claim.bundle, str(claim.job))
        held = lease or Lease(self._client, claim)
        with self._lock:
            previous = self._threads.get(claim.job)
            thread = threading.Thread(
                target=self._work, args=(site, held, previous), name=f"{claim.kind}-{claim.job}", daemon=True
            )
            self._held[claim.job], self._threads[claim.job] = held, thread
        held.keep()
        thread.start()

    def _sweep(self, site: Site) -> None:
        """End what runs and is nobody's, in a thread of its own: who is asked may take its time to answer."""
        is_due = time.monotonic() - self._swept >= SWEEP_SECONDS
        if not is_due or (self._sweeping is not None and self._sweeping.is_alive()):
            return
        self._swept = time.monotonic()
        self._sweeping = threading.Thread(target=self._end_nobody_s, args=(site,), name="sweep", daemon=True)
        self._sweeping.start()

    def _end_nobody_s(self, site: Site) -> None:
        shelf = live.shelf(site.data_dir)

        def is_wanted(folder: str) -> bool:
            with self._lock:
                jobs = {*map(str, self._held), *shelf.jobs()}
            # Asked last: a job that this runner lets go of because it stops is gone from those only then.
            return any(folder == job or folder.startswith(f"{job}-") for job in jobs) or self._stopping.is_set()

        for launcher in site.launchers:
            for name in launcher.sweep(is_wanted):
                log.warning("late_engine_ended", engine=name, launcher=launcher.name)

    # -------------------------------------------------------------------------------------- one job's edge

    def _work(self, site: Site, lease: Lease, previous: threading.Thread | None) -> None:
        started = time.monotonic()
        try:
            if previous is not None:
                # Our own lost attempt at this job is still ending its engine.
                previous.join()
            self._do(site, lease)
        finally:
            lease.release()
            with self._lock:
                is_over = self._held.get(lease.job) is lease
                if is_over:
                    del self._held[lease.job]
                    del self._threads[lease.job]
            if is_over:
                site.staging.release(str(lease.job))
            seconds = round(time.monotonic() - started, 2)
            log.info("job_left", job=str(lease.job), kind=lease.claim.kind, seconds=seconds, ending=lease.ending)
            self._bell.set()

    def _do(self, site: Site, lease: Lease) -> None:
        problem: str | None = None
        detail: str | None = None
        cause: str | None = None
        try:
            JOBS[lease.claim.kind](site, lease)
        except JobEnded:
            if lease.ending is Ending.STOPPING:
                problem, detail = "runner-stopped", f"runner {site.name} was stopped"
        except TransitionRefused as refused:
            # The release has gone another way meanwhile, such as rejected: nobody waits for this job.
            log.warning("report_refused", job=str(lease.job), detail=refused.detail)
        except Problem as failed:
            problem, detail, cause = failed.kind, failed.detail, failed.members.get("cause")
        except OSError as failed:
            problem, detail = "runner-failed", f"{type(failed).__name__}: {failed}"
            log.exception("job_failed", job=str(lease.job))
        except Exception as failed:  # edge: whatever a job did not expect ends as its problem, to be tried again
            problem, detail = "internal-error", f"{type(failed).__name__}: {failed}"
            log.exception("job_failed", job=str(lease.job))
        if lease.is_lost or (lease.ending is Ending.STOPPING and lease.claim.kind is JobKind.SERVE):
            return
        if problem is not None:
            log.warning("job_ended_with_problem", job=str(lease.job), problem=problem, detail=detail)
        try:
            lease.complete(problem, detail, cause=cause)
        except JobEnded as ended:
            log.warning("job_not_completed", job=str(lease.job), why=ended.ending)
        except Problem as refused:
            log.error("job_not_completed", job=str(lease.job), detail=refused.detail)

    # ------------------------------------------------------------------------------------------- at the start

    def _take_up(self, site: Site) -> None:
        """Take up the live replicas that a predecessor left, under the leases that it held.

        The predecessor is gone, since we have its lock; so its token is ours. Where the service does not know the
        lease any more, another has the job or nobody wants it, and the engine is ended. A folder that was copied from
        another machine has the token of a runner that may live: what was started in another boot is not taken up, and
        its job is taken anew once its lease has run out.
        """
        kept = live.shelf(site.data_dir)
        for job in kept.jobs():
            left = kept.read(job)
            if left is None:
                kept.end(job, site.launchers)
                continue
            if left.is_elsewhere:
                log.warning("replica_of_another_boot", job=job, boot_id=left.boot_id)
                kept.end(job, site.launchers)
                continue
            lease = Lease(self._client, left.claim)
            while not lease.renew() and not self._stopping.is_set():
                self._stopping.wait(RETRY_SECONDS)
            if self._stopping.is_set():
                return
            if lease.is_lost:
                log.warning("replica_not_ours_any_more", job=job)
                kept.end(job, site.launchers)
            else:
                self._hold(site, left.claim, lease)


def end_left_engines(data_dir: Path, launchers: Sequence[Launcher]) -> None:
    """End the engines of gates that a dead predecessor left, and remove the folders that they were started for.

    What it ordered and never heard of may have no folder any more; replicas that serve have theirs on the shelf, and
    are left to be taken up. What cannot be looked for now, the sweep finds.
    """
    for workdir in sorted((data_dir / "engines").glob("*")):
        for one in launchers:
            for stray in one.strays(workdir):
                log.warning("left_engine_ended", engine=str(stray), folder=workdir.name)
                one.kill(stray)
        shutil.rmtree(workdir, ignore_errors=True)
    for one in launchers:
        try:
            for stray in one.left(live.shelf(data_dir).jobs()):
                log.warning("left_engine_ended", engine=str(stray), folder=None)
                one.kill(stray)
        except NotTold as error:
            log.warning("left_engines_not_told", launcher=one.name, why=str(error))
