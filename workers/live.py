"""The serve job: keep one replica ready for live traffic, through a death of this runner and an absent service.

The engine has a session of its own. What it takes to find it again lies in `replicas/<job>.json` before anybody
hears of the engine. Who may end it, and when:

- The runner stops, or dies: nobody. The next process on the same data folder takes the job up again under the
  lease in the file, and the engine with it when pid, start time and boot id are still the same.
- The service does not answer: nobody. The engine serves on for as long as it takes.
- The service says that the job is no longer wanted: this runner, after running requests have ended. Where it was said
  while nobody held the job, whoever takes it ends what was left, and boots nothing.
- The lease was lost: this runner, in the same way. The new holder is never in this data folder, since one process
  at a time uses it; it boots a replica of its own, and two of them would leave one that nobody watches.
- The engine died, or does not answer any more: it is ended, told as failed, and the job given back to be tried
  again.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, Field, ValidationError, field_validator

from gates.gate import Records
from schemas.bundle import Bundle
from schemas.common import Closed, Digest, Integer, ShortText
from schemas.problems import EngineFailed, Problem
from schemas.runner import Claim, ReplicaState
from schemas.short import many
from workers.boot import Transitions, booted, require_engine, require_integrity, require_untouched, start_and_wait
from workers.engines.base import Command
from workers.launchers.base import Launched, Launcher, NotTold, Order
from workers.launchers.logs import trim
from workers.launchers.proc import boot_id
from workers.lease import Ending, JobEnded, Lease, log
from workers.serving import NotWanted, Replica
from workers.site import Site
from workers.staging import Place
from workers.vitals import DEAD_SECONDS, Watcher

BOOT_SECONDS = 600.0
ADOPT_SECONDS = 60.0
"""Longest wait for an adopted engine, which may be busy, to answer."""
DRAIN_SECONDS = 30.0
KILL_SECONDS = 5.0
"""Given on top of the drain before an engine is killed."""
LOOK_SECONDS = 1.0
"""Between two looks at an engine that serves; what is dead is found within `DEAD_SECONDS` and a few looks."""


class Left(Closed):
    """A replica as its file keeps it: the job's claim, which process it is, and what that was started with.

    Live engines outlive an upgrade, and the way back from one. So what a later version keeps beyond this is passed by.
    """

    model_config = ConfigDict(extra="ignore")

    claim: Claim = Field(description="The claim, with the fencing token that holds now.")
    bundle: Digest = Field(description="What it serves.")
    pid: Integer = Field(description="Process id; 0 where no process of this machine is the engine.")
    start_time: ShortText = Field(description="Start of the process in clock ticks since boot.")
    boot_id: ShortText = Field(description="The machine's boot.")
    handle: ShortText | None = Field(None, description="What a container engine or a cluster calls it.")
    drain_seconds: float = Field(description="Given to running requests when it is ended.", ge=0, allow_inf_nan=False)
    arguments: list[str] | None = Field(None, description="Words that it was started with; none in an old file.")
    port_file: str | None = Field(None, description="File in which it tells its port, when it does.")

    @field_validator("claim", mode="before")
    @classmethod
    def _of_before(cls, claim: object) -> object:
        """Read files that were written before claims named all that they name now: live engines outlive an upgrade."""
        return {"accepted": None, "devices": [], "is_wanted": True, **claim} if isinstance(claim, dict) else claim

    @property
    def is_elsewhere(self) -> bool:
        """Whether it was started on another machine, or before this one was started again. A cluster has no boots."""
        return self.pid != 0 and self.boot_id != boot_id()

    @property
    def launched(self) -> Launched:
        """The process."""
        return Launched(self.pid, self.start_time, self.boot_id, handle=self.handle)

    def launcher_among(self, launchers: Iterable[Launcher]) -> Launcher | None:
        """Return the launcher that knows it, as what it was started as; None when it is provably no one's any more.

        Raises NotTold where it may be one's that does not say.
        """
        silent: NotTold | None = None
        for one in launchers:
            try:
                if one.adopt(self.pid, self.start_time, self.boot_id, self.handle):
                    return one
            except NotTold as error:
                silent = error
        if silent is not None:
            raise silent
        return None

    @property
    def command(self) -> Command | None:
        """What it was started with; None when its file does not say."""
        if self.arguments is None:
            return None
        return Command(tuple(self.arguments), None if self.port_file is None else Path(self.port_file))


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where the replicas of one data folder are kept: a file and a working folder each."""

    folder: Path

    def file(self, job: object) -> Path:
        """Return the place of a replica's file."""
        return self.folder / f"{job}.json"

    def workdir(self, job: object) -> Path:
        """Return the working folder of a replica's engine."""
        return self.folder / str(job)

    def write(self, job: object, left: Left) -> None:
        """Keep a replica; the file is whole or the old one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".left-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(left.model_dump_json())
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self.file(job))
        except OSError:
            Path(name).unlink()
            raise

    def read(self, job: object) -> Left | None:
        """Return a replica that was kept; None when there is none, or its file cannot be understood."""
        try:
            return Left.model_validate_json(self.file(job).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            log.warning("replica_file_unreadable", job=str(job), error=str(error))
            return None

    def handles(self) -> list[str]:
        """Return what container engines and clusters call the replicas that are kept."""
        found = [self.read(job) for job in self.jobs()]
        return [one.handle for one in found if one is not None and one.handle is not None]

    def jobs(self) -> list[str]:
        """Return the jobs of which anything is kept."""
        if not self.folder.is_dir():
            return []
        return sorted({path.stem for path in self.folder.iterdir() if path.suffix == ".json" or path.is_dir()})

    def forget(self, job: object) -> None:
        """Remove what is kept of a replica that is ended."""
        self.file(job).unlink(missing_ok=True)
        shutil.rmtree(self.workdir(job), ignore_errors=True)

    def end(self, job: object, launchers: Iterable[Launcher]) -> None:
        """End what is provably the kept one, after its requests, and whatever else was started for its folder."""
        left = self.read(job)
        for one in launchers:
            # What cannot be ended since nobody tells of it now is nobody's from here on, and ended when it is seen.
            with suppress(NotTold):
                if left is not None and (found := one.adopt(left.pid, left.start_time, left.boot_id, left.handle)):
                    one.stop(found, grace_seconds=left.drain_seconds + KILL_SECONDS)
            for stray in one.strays(self.workdir(job)):
                one.kill(stray)
        self.forget(job)


def shelf(data_dir: Path) -> Shelf:
    """Return where a data folder keeps its replicas."""
    return Shelf(data_dir / "replicas")


def serve(site: Site, lease: Lease) -> None:
    """Keep one replica of the job's bundle ready until the job ends.

    Returns when it is no longer wanted, when the lease was lost, or when this runner stops. What was not wanted
    any more when the job was taken is ended where it is found, and not booted.

    Raises:
        JobEnded: the job ended before there was an engine.
        Problem, OSError: the replica failed or did not become ready; to be tried again.
    """
    try:
        _Live.prepare(site, lease).run()
    except JobEnded as ended:
        if ended.ending is not Ending.STOPPING:
            shelf(site.data_dir).end(lease.job, site.launchers)
        raise
    except BaseException:
        if lease.ending is not Ending.STOPPING:
            # The job is given back and booted anew, maybe elsewhere: an engine that nobody watches must not be left.
            shelf(site.data_dir).end(lease.job, site.launchers)
        raise


@dataclass(slots=True)
class _Live:
    site: Site
    lease: Lease
    bundle: Bundle
    drain_seconds: float
    transitions: Transitions
    kept: Shelf
    is_adopting: bool = False
    kept_under: int | None = None
    """Fencing token in the replica's file."""
    hashed: tuple[Place, Records] | None = None
    """Files that a new engine loads, as they were when they were hashed."""

    @classmethod
    def prepare(cls, site: Site, lease: Lease) -> "_Live":
        policy = site.policy(lease)
        drain = float(policy.canary.drain_seconds) if policy is not None else DRAIN_SECONDS
        return cls(site, lease, site.bundle(lease), drain, Transitions(lease), shelf(site.data_dir))

    @property
    def _grace(self) -> float:
        return self.drain_seconds + KILL_SECONDS

    def run(self) -> None:
        if not self.lease.claim.is_wanted:
            self.lease.end(Ending.UNWANTED)
        replica = self._adopt()
        if replica is None and self.lease.ending is Ending.UNWANTED:
            return
        replica = replica or self._boot()
        try:
            self._watch(replica)
        except EngineFailed:
            self.kept.forget(self.lease.job)
            raise
        if self.lease.ending is Ending.STOPPING:
            log.info("replica_left_running", job=str(self.lease.job), pid=replica.process_id())
            return
        replica.stop(grace_seconds=self._grace)
        self.kept.forget(self.lease.job)

    # ------------------------------------------------------------------------------------------- starting

    def _replica(self, launcher: Launcher, order: Order) -> Replica:
        workdir = self.kept.workdir(self.lease.job)
        # An engine that has to be told its port gets one that is held for it.
        launch = launcher.place(order, workdir, drain_seconds=self.drain_seconds, parent_pid=None)
        replica = Replica(
            self.bundle,
            launch,
            workdir=workdir,
            launcher=launcher,
            order=order,
            on_transition=lambda state, cause: self._changed(replica, state, cause),
            on_progress=self.lease.progress,
        )
        self.transitions.replica = replica
        return replica

    def _changed(self, replica: Replica, state: ReplicaState, cause: str) -> None:
        if state is ReplicaState.LOADING:
            # Before anybody hears of the engine: from here on it can be found again.
            if self.is_adopting:
                self._keep_serving(replica)
            else:
                self._keep(replica)
        if self.is_adopting and state in {ReplicaState.LOADING, ReplicaState.WARMING}:
            # It serves all the time: telling that it loads would take live traffic from it.
            return
        if state is ReplicaState.WARMING and self.hashed is not None:
            # Before anybody hears that it is ready.
            require_untouched(self.site, self.bundle, *self.hashed)
        self.transitions(state, cause)

    def _keep(self, replica: Replica) -> None:
        launched = replica.launched
        if launched is None:
            return
        claim = self.lease.claim.model_copy(update={"fencing_token": self.lease.token})
        command = replica.command
        left = Left(
            claim=claim,
            bundle=self.bundle.digest,
            pid=launched.pid,
            start_time=launched.start_time,
            boot_id=launched.boot_id,
            handle=launched.handle,
            drain_seconds=self.drain_seconds,
            arguments=None if command is None else list(command.argv),
            port_file=None if command is None or command.port_file is None else str(command.port_file),
        )
        self.kept.write(self.lease.job, left)
        self.kept_under = claim.fencing_token

    def _keep_serving(self, replica: Replica) -> None:
        """Keep a replica that serves already, where that can be written now.

        Where the disk is full its file stays as it was: who finds an older token in it is refused, and ends the engine.
        """
        try:
            self._keep(replica)
        except OSError as error:
            self.lease.progress(f"it serves, and what a next runner takes it up by cannot be kept: {error.strerror}")

    def _adopt(self) -> Replica | None:
        """Take up the engine that a predecessor left; who does not tell of it now is asked until it does.

        Raises JobEnded: the job was over before.
        """
        while True:
            with suppress(NotTold):
                return self._take_up()
            self.lease.ended.wait(LOOK_SECONDS)
            self.lease.check()

    def _take_up(self) -> Replica | None:
        """Take up the engine that a predecessor left, when it is provably that one and answers as it should."""
        left = self.kept.read(self.lease.job)
        launcher = None if left is None else self._owner(left)
        if left is not None and launcher is not None and left.bundle == self.bundle.digest:
            # It has its accelerators, whatever this runner is set to now.
            root = self.site.staging.root(self.bundle)
            replica = self._replica(launcher, Order(self.bundle, root, str(self.lease.job), self.lease.token))
            self.is_adopting = True
            try:
                if replica.adopt(left.pid, left.start_time, left.boot_id, None, left.handle, started=left.command):
                    replica.wait_ready(ADOPT_SECONDS, is_wanted=self._goes_on)
                    return replica
            except NotWanted:
                return replica
            except EngineFailed as failure:
                log.warning("replica_not_adopted", job=str(self.lease.job), detail=failure.detail)
            finally:
                self.is_adopting = False
        self.kept.end(self.lease.job, self.site.launchers)
        return None

    def _owner(self, left: Left) -> Launcher | None:
        """Return the launcher that knows what was left; who does not tell now is asked until it does.

        Raises JobEnded: the job was over before.
        """
        told = ""
        while True:
            try:
                return left.launcher_among(self.site.launchers)
            except NotTold as error:
                if str(error) != told:
                    told = str(error)
                    self.lease.progress(f"whether its engine still runs is not told: {told}")
            self.lease.ended.wait(LOOK_SECONDS)
            self.lease.check()

    def _boot(self) -> Replica:
        require_engine(self.bundle, self.site.launcher)
        place = self.site.stage(self.lease, self.bundle)
        self.hashed = (place, require_integrity(self.site, self.lease, self.bundle, place))
        order = self.site.order(self.lease, self.bundle, self.site.staging.root(self.bundle))
        replica = self._replica(self.site.launcher, order)
        facts = place.facts
        self.transitions(
            ReplicaState.STAGED, f"{many(facts.files, 'file')}, {facts.size} bytes, right where the engine reads them"
        )
        try:
            ready = start_and_wait(self.lease, replica, BOOT_SECONDS)
        except JobEnded:
            # What becomes of an engine that still loads is decided as for one that serves.
            return replica
        except BaseException:
            replica.stop(grace_seconds=0.0)
            self.kept.forget(self.lease.job)
            raise
        try:
            booted(self.site, self.lease, ready, place)
        except (JobEnded, Problem) as error:
            # It serves whether or not this could be told.
            log.warning("boot_not_reported", job=str(self.lease.job), error=str(error))
        return replica

    def _goes_on(self) -> bool:
        return not self.lease.ended.is_set()

    # ------------------------------------------------------------------------------------------- watching

    def _watch(self, replica: Replica) -> None:
        """Look until the job ends. Raises EngineFailed when the engine is dead."""
        watcher = Watcher(replica, dead_seconds=DEAD_SECONDS)
        while not self.lease.ended.wait(LOOK_SECONDS):
            if self.lease.token != self.kept_under:
                self._keep_serving(replica)
            if (line := watcher.look()) is not None:
                self.lease.progress(line)
            with suppress(OSError):  # a full disk is no reason to serve no more
                trim(replica.log_path)
