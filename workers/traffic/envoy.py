"""One Envoy as a router: files in, acknowledgements out.

A directory holds a whole gateway::

    gateway.json         what is desired: every target's split, and where each would go back to
    gateway.lock         held for every change, so that two targets' changes never lose one another
    waiting/*.json       clusters that somebody waits for who does not hold the lock meanwhile; nobody takes them away
    bootstrap.json       written once; Envoy runs in this directory and all its paths are relative
    xds/cds.json         clusters; xds/rds.json: every weight, so that one rename(2) moves traffic
    rollback/*.rds.json  prepared documents: one a target, and `all`; putting one in force is one rename(2)
    admin.sock           0600; access.jsonl: one line a request
    beats/*              one a target, touched by the controller at every look at its traffic
    controller_lost.json written by the dead-man switch; nothing moves until it is taken notice of
"""

import contextlib
import copy
import http.client
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from gates.router import Applied, Arm, Observed, Split
from schemas.problems import Problem
from workers.traffic import envoy_config, waiting
from workers.traffic.access_log import AccessLog
from workers.traffic.desired import EVERY_TARGET, Desired, Rollback, locked, sync_folder, write_atomically
from workers.traffic.envoy_admin import TIMEOUT_SECONDS, EnvoyAdmin
from workers.traffic.envoy_clusters import REFUSALS, Clusters, as_bytes
from workers.traffic.problems import (
    ClusterRepointed,
    GatewayDown,
    GatewayHeld,
    NotAcknowledged,
    NothingPrepared,
    Rejected,
    StaleRevision,
)
from workers.traffic.waiting import Wait

T = TypeVar("T")

DEADLINE_SECONDS: Final = 10.0
BRIEF_SECONDS: Final = 1.0
"""Longest silence of Envoy that a look with the lock held sits out before the lock is free for others."""
SILENCE_SECONDS: Final = 60.0
MAX_LOG_BYTES: Final = 64 * 1024 * 1024
KEPT_LOGS: Final = 8
_ROUTES_STATS: Final = f"http.gw.rds.{envoy_config.ROUTES}."


class EnvoyGateway:
    """Moves the traffic of every target of one Envoy, and says when it has moved. Safe in any number of processes.

    Args:
        directory: of the gateway; a local file system, since Envoy is told of changes by inotify.
        host: IP address that Envoy listens on.
        port: TCP port that Envoy listens on.
        pins: whether `x-release-pin: candidate` reaches a candidate whatever its weight.
        deadline_seconds: longest wait for each acknowledgement.
    """

    def __init__(
        self,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        port: int,
        pins: bool = False,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self.directory = directory
        self.host = host
        self.port = port
        self.pins = pins
        self.deadline_seconds = deadline_seconds
        self.admin = EnvoyAdmin(
            directory / envoy_config.ADMIN_SOCKET, timeout_seconds=min(deadline_seconds, TIMEOUT_SECONDS)
        )
        self._brief = EnvoyAdmin(self.admin.path, timeout_seconds=min(deadline_seconds, BRIEF_SECONDS))
        xds, waits = directory / envoy_config.XDS_FOLDER, directory / "waiting"
        self.clusters = Clusters(xds / "cds.json", waits, self.admin, self._brief)
        self.log = AccessLog(directory / envoy_config.LOG_FILE)
        self.lock = directory / "gateway.lock"
        self.beats = directory / "beats"
        self.notice = directory / "controller_lost.json"
        self.require: Callable[[], None] = lambda: None
        self.reach_seconds = math.inf

    def under(self, require: Callable[[], None]) -> Self:
        """Return the same gateway for a caller whose right to change it may end.

        `require` raises when it has. It is asked last before each change, with the lock held: whoever waited, or stood
        still, changes nothing any more.
        """
        mine = copy.copy(self)
        mine.require = require
        return mine

    def within(self, seconds: float) -> Self:
        """Return the same gateway for a caller who waits only so long for a replica to be reached."""
        mine = copy.copy(self)
        mine.reach_seconds = seconds
        return mine

    def initialise(self) -> None:
        """Write whatever is missing, and documents that Envoy must not start with. What is good is left as it is."""
        for folder in (self.directory, self._xds, self._rollback, self.beats):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(self.lock):
            boot = envoy_config.bootstrap(self.host, self.port)
            write_atomically(self.directory / "bootstrap.json", as_bytes(boot))
            desired = self._load()
            if self._live_version() != desired.version or not self._is_whole():
                self._write_all(desired.changed())

    def desired(self, target: str) -> Split | None:
        """Return the split that a target should have, or None for a target that the gateway does not know."""
        return self._read().splits.get(target)

    def is_in_force(self) -> bool:
        """Tell whether Envoy runs on the routes that are in place now, and those are the desired ones."""
        try:
            version = self.admin.stats(_ROUTES_STATS).get("version_text")
        except GatewayDown:
            return False
        return version == self._read().version

    def apply(self, split: Split) -> Applied:
        """Put a split in force; return when Envoy has acknowledged it and answered under it.

        An arm that gains weight must pass Envoy's health check first. Until it does, and while Envoy takes clusters, or
        does not answer, others may change the gateway.
        Clusters are added before the routes that name them and removed after. Repeating the call confirms and changes
        nothing.

        Raises:
            StaleRevision: the target has a newer split, or another one of this revision.
            ClusterRepointed: an arm's cluster name is in use for another address.
            GatewayHeld: the dead-man switch has fired.
            ArmNotHealthy: nothing was changed.
            Rejected: Envoy refused; the split before is in force and back in place.
            NotAcknowledged: no answer in time; the split before is back in place, and Envoy takes it when it
                answers again.
            GatewayDown, GatewayBusy: as NotAcknowledged, or before anything was written.
        """
        return self._once_reached(partial(self._apply, split))

    def _apply(self, split: Split, wait: Wait) -> Applied | None:
        """Put a split in force, under the lock; None where Envoy is not there yet, and it is not the last try."""
        self._refuse_when_held()
        before = self._load()
        current = before.splits.get(split.target)
        if split == current and self._live_version() == before.version:
            is_there = self._is_reached([], before, before, split, wait)
            return self._confirm(before, split, since=time.monotonic()) if is_there else None
        if current is not None and split != current and split.revision <= current.revision:
            raise StaleRevision(f"{split.target} is at revision {current.revision}, not below {split.revision}")
        after = before.shifted(split)
        _refuse_repointing(before, after)
        had = {arm.cluster: arm.weight_bp for arm in current.arms} if current else {}
        # Another replica's arm gains all of its weight.
        gaining = [arm for arm in split.arms if arm.weight_bp > had.get(arm.cluster, 0)]
        if not self._is_reached(gaining, before, after, split, wait):
            return None
        try:
            applied = self._publish(after, split)
        except (Rejected, NotAcknowledged, GatewayDown):
            wait.end()
            self._write_all(before.changed(version=f"r{after.revision + 1}", revision=after.revision + 1))
            raise
        self._retire_clusters(after)
        return applied

    def prepare_rollback(self, target: str, arms: tuple[Arm, ...], *, silence_seconds: float = SILENCE_SECONDS) -> None:
        """Render where a target goes back to, and keep that current until it is restored or discarded.

        Args:
            target: `name@environment`.
            arms: with their weights; empty for a target that had nothing before, which then answers 503. Keep the
                candidate as an arm of weight 0 to see it drain.
            silence_seconds: of the controller, after which the dead-man switch restores.

        Raises:
            ArmNotHealthy: an arm that is none of the present split is not reached; what was prepared stays.
            ClusterRepointed, GatewayHeld, NotAcknowledged, Rejected, GatewayDown, GatewayBusy.
        """
        Split(target, 1, arms)  # refuses what is no split
        self._once_reached(partial(self._prepare_rollback, target, Rollback(arms, silence_seconds)))

    def _prepare_rollback(self, target: str, rollback: Rollback, wait: Wait) -> bool | None:
        """Keep a way back, under the lock; None where Envoy is not there yet, and it is not the last try."""
        self._refuse_when_held()
        self.require()
        before = self._load()
        if before.rollbacks.get(target) == rollback and self.is_prepared(target) and self.is_prepared(EVERY_TARGET):
            return True
        after = before.changed(version=before.version, rollbacks={**before.rollbacks, target: rollback})
        _refuse_repointing(before, after)
        current = before.splits.get(target)
        known = {arm.cluster for arm in current.arms} if current else set()
        # A way back is never pointed away from what serves to what nobody reaches.
        others = [arm for arm in rollback.arms if known and arm.weight_bp and arm.cluster not in known]
        if not self._is_reached(others, before, after, Split(target, 1, rollback.arms), wait):
            return None
        self._write_desired(after)
        return True

    def _once_reached(self, attempt: Callable[[Wait], T | None]) -> T:
        """Attempt something under the lock, again and again until it is done; between two tries the lock is free.

        An attempt returns None as long as Envoy has not taken its clusters, or does not reach an arm, or is silent.
        """
        reached_seconds = min(self.reach_seconds, self.deadline_seconds)
        with waiting.waiting(
            self.clusters.waits, taken_seconds=self.deadline_seconds, reached_seconds=reached_seconds
        ) as wait:
            while True:
                with locked(self.lock):
                    done = attempt(wait)
                if done is not None:
                    return done
                if wait.is_last:
                    raise RuntimeError("the last attempt neither ended nor failed")
                self.clusters.await_taken(wait)

    def discard_rollback(self, target: str) -> None:
        """Forget where a target would go back to, after its release was promoted for good. Repeating is harmless."""
        with locked(self.lock):
            self.require()
            before = self._load()
            if target in before.rollbacks:
                left = {other: each for other, each in before.rollbacks.items() if other != target}
                self._write_desired(before.changed(version=before.version, rollbacks=left))

    def is_prepared(self, target: str) -> bool:
        """Tell whether a rollback of the target could be put in force now."""
        return self._prepared(target).exists()

    def restore(self, target: str) -> Applied:
        """Put the prepared rollback in force: one rename, no planning. Repeating confirms and changes nothing.

        It works while the dead-man switch has fired, whatever the arms' health, and it is never written back.

        Raises:
            NothingPrepared: there is none, and none was put in force before.
            NotAcknowledged, Rejected, GatewayDown: the document is in place, but Envoy has not confirmed it.
            GatewayBusy: another process held the lock all the time; nothing was changed.
        """
        with locked(self.lock):
            since = time.monotonic()
            self.require()
            try:
                if not self._is_back_unwritten(target):
                    self.put_in_force(target)
            except FileNotFoundError:
                if target not in (desired := self._folded_in()).restored:
                    raise NothingPrepared(f"no rollback is prepared for {target}") from None
                return self._confirm(desired, desired.splits[target], since=since)
            try:
                desired = self._read()
                return self._confirm(desired, desired.splits[target], since=since)
            finally:  # traffic first, housekeeping after it, also when nobody confirms
                sync_folder(self._xds)
                self._folded_in()

    def _is_back_unwritten(self, target: str) -> bool:
        """Tell whether the document in force takes a target back, and that could not be written down yet.

        What was prepared for the target alone is as of before then, and would move others away from where they went.
        """
        written = self._written()
        folded = written.folded(self._live_version())
        return folded is not written and target in folded.restored and target not in folded.rollbacks

    def _folded_in(self) -> Desired:
        """Return what is desired, written down where the disk has room: until then each look folds it in anew."""
        try:
            return self._load()
        except OSError:
            return self._read()

    def is_restored(self, target: str) -> bool:
        """Tell whether a target's present split is a rollback that was put in force, confirmed or not."""
        return target in self._read().restored

    def put_in_force(self, which: str) -> None:
        """Rename a prepared document into place and nothing more: for `restore` and for the dead-man switch.

        Raises:
            FileNotFoundError: it is not prepared, or in place already.
        """
        self._prepared(which).rename(self._routes)

    def silences(self) -> dict[str, float]:
        """Return the targets with a prepared rollback, and how long the controller may be silent about each."""
        return {target: each.silence_seconds for target, each in sorted(self._read().rollbacks.items())}

    def drained(self, cluster: str) -> bool:
        """Tell whether no request is open on a cluster. Ask while it is an arm of weight 0: once retired it is unseen.

        Raises:
            GatewayDown: Envoy does not answer.
        """
        return not any(self.admin.active([cluster]).values())

    def open_requests(self, split: Split) -> dict[str, int]:
        """Return how many requests are open on each arm of a split, by the arm's name, whatever revision drew them.

        Raises:
            GatewayDown: Envoy does not answer.
        """
        active = self.admin.active([arm.cluster for arm in split.arms])
        return {arm.name: active[arm.cluster] for arm in split.arms}

    def started_at(self) -> datetime:
        """Return when the Envoy that serves now was started, by its machine's clock. Raises GatewayDown."""
        return self.admin.started_at()

    def observe(self, target: str, since: str) -> Observed:
        """Count a target's ended requests under its desired revision; see `gates.router.Router`."""
        split = self.desired(target)
        revision = split.revision if split else 0
        counts: dict[str, int] = {}
        is_more = True
        while is_more:
            batch = self.log.read(since)
            since, is_more = batch.until, batch.is_more
            for record in batch.records:
                if split and (record.target, record.revision, record.route) == (target, revision, "split"):
                    arm = split.assigned(record.assigned)
                    name = arm.name if arm else "unknown"
                    counts[name] = counts.get(name, 0) + 1
        return Observed(target, revision, counts, since)

    def probe(self, target: str) -> int | None:
        """Return the revision that the listener answers for a target; None when it knows no such target.

        No engine is asked. The probe leaves a line in the access log, so a log that stays silent after it is broken.

        Raises:
            GatewayDown: the listener does not answer.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.admin.timeout_seconds)
        try:
            connection.request("GET", f"/{target}{envoy_config.PROBE_PATH}")
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise GatewayDown(f"the gateway does not answer on {self.host}:{self.port}: {error}") from error
        finally:
            connection.close()
        value = answer.getheader(envoy_config.REVISION_HEADER)
        return int(value) if answer.status == 200 and value is not None else None

    def rotate_log(self, *, max_bytes: int = MAX_LOG_BYTES, keep: int = KEPT_LOGS) -> bool:
        """Start a new access log when the present one is large; readers go on in the old one first.

        Args:
            max_bytes: a smaller log is left alone.
            keep: how many old files stay.

        Raises:
            GatewayDown: Envoy does not answer; it goes on writing into the old file, and so do readers.
        """
        with contextlib.suppress(FileNotFoundError):  # renamed before, and Envoy was not told
            if self.log.path.stat().st_size < max_bytes:
                return False
            self.log.path.rename(self.log.path.with_name(f"{self.log.path.name}.{time.time_ns()}"))
        self.admin.call("/reopen_logs", method="POST")
        for old in self.log.rotated()[:-keep]:
            old.unlink(missing_ok=True)
        return True

    def take_notice(self) -> dict[str, Any] | None:
        """Return what the dead-man switch left, or None. Traffic may not move until `clear_notice`."""
        with locked(self.lock):
            self._folded_in()
            try:
                return dict(json.loads(self.notice.read_bytes()))
            except FileNotFoundError:
                return None

    def clear_notice(self) -> None:
        """Let traffic move again, after the notice was recorded."""
        self.notice.unlink(missing_ok=True)

    def beat(self, target: str) -> None:
        """Show that the controller looks at a target. Call it at every look, or the dead-man switch restores.

        One target's looks say nothing of another's: who looks at none of a canary's traffic must not be taken to.
        """
        try:
            self.heartbeat(target).touch()
        except FileNotFoundError:  # a directory from before there was one a target
            self.beats.mkdir(mode=0o700, exist_ok=True)
            self.heartbeat(target).touch()

    def heartbeat(self, target: str) -> Path:
        """Return the file whose time is that of the last look at a target."""
        return self.beats / target

    def _refuse_when_held(self) -> None:
        if self.notice.exists():
            raise GatewayHeld(f"the dead-man switch fired and {self.notice.name} was not taken notice of")

    @property
    def _xds(self) -> Path:
        return self.directory / envoy_config.XDS_FOLDER

    @property
    def _rollback(self) -> Path:
        return self.directory / "rollback"

    @property
    def _routes(self) -> Path:
        return self._xds / "rds.json"

    def _prepared(self, which: str) -> Path:
        return self._rollback / f"{which}.rds.json"

    def _read(self) -> Desired:
        """Return what is desired, with a rollback that was put in force behind it folded in."""
        return self._written().folded(self._live_version())

    def _load(self) -> Desired:
        """Return what is desired, and write down what was folded in. Under the lock only."""
        written, live = self._written(), self._live_version()
        folded = written.folded(live)
        if folded is not written:
            self._write_desired(replace(folded, was=live))
        return replace(folded, was=live)

    def _written(self) -> Desired:
        try:
            return Desired.from_json((self.directory / "gateway.json").read_bytes())
        except FileNotFoundError:
            return Desired()

    def _live_version(self) -> str:
        try:
            return str(json.loads(self._routes.read_bytes())["version_info"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return ""

    def _is_whole(self) -> bool:
        """Tell whether the documents on disk fit together: a torn one at start would leave Envoy answering 404."""
        try:
            envoy_config.check(self.clusters.document(), json.loads(self._routes.read_bytes()))
        except (FileNotFoundError, ValueError, KeyError, TypeError, IndexError):
            return False
        return True

    def _arms(self, desired: Desired) -> list[tuple[Arm, Arm | None]]:
        return envoy_config.arms_of(desired.every_split())

    def _render_routes(self, desired: Desired) -> dict[str, Any]:
        return envoy_config.routes(desired.version, desired.splits.values(), pins=self.pins)

    def _write_desired(self, desired: Desired) -> None:
        write_atomically(self.directory / "gateway.json", desired.to_json())
        self._prepare_documents(desired)

    def _prepare_documents(self, desired: Desired) -> None:
        """Render every rollback against the present state of the other targets, and remove what is not prepared."""
        wanted = [*desired.rollbacks, EVERY_TARGET] if desired.rollbacks else []
        for which in wanted:
            splits = desired.rolled_back(which).values()
            document = envoy_config.routes(desired.rollback_version(which), splits, pins=self.pins)
            write_atomically(self._prepared(which), as_bytes(document))
        for path in self._rollback.glob("*.rds.json"):
            if path.name.removesuffix(".rds.json") not in wanted:
                path.unlink(missing_ok=True)

    def _write_all(self, desired: Desired) -> None:
        """Write everything without waiting for anybody: at start, and back after a change that did not work."""
        clusters = envoy_config.clusters(desired.version, self._arms(desired))
        document = self._render_routes(desired)
        envoy_config.check(clusters, document)
        self.clusters.write(clusters)
        self._write_desired(desired)
        write_atomically(self._routes, as_bytes(document))

    def _is_reached(self, arms: Sequence[Arm], before: Desired, after: Desired, own: Split, wait: Wait) -> bool:
        """Tell whether Envoy has every cluster of the next state, and these arms pass its health check; under the lock.

        What it has not been told of, it is told of; as long as `wait` lasts, nobody takes the clusters of `own` away.
        The last time it raises, and what was added goes again.

        Raises:
            ArmNotHealthy, NotAcknowledged, Rejected, GatewayDown.
        """
        problem: Problem | None
        try:
            is_added = self.clusters.add(after.revision, [*self._arms(before), *self._arms(after)], wait)
            problem = self.clusters.obstacle(arms, wait, is_added=is_added)
        except GatewayDown as silence:
            problem = silence
        if problem is None:
            return True
        if wait.is_last or isinstance(problem, Rejected):
            wait.end()
            self._retire_clusters(before)
            raise problem
        wait.reached = frozenset(arm.cluster for arm in arms)
        wait.keep(envoy_config.cluster_names(envoy_config.clusters("", envoy_config.arms_of([own]))))
        return False

    def _retire_clusters(self, desired: Desired) -> None:
        self.clusters.retire(desired.version, self._arms(desired))

    def _publish(self, after: Desired, split: Split) -> Applied:
        document = self._render_routes(after)
        envoy_config.check(self.clusters.document(), document)
        baseline = self._brief.stats(_ROUTES_STATS)
        self._refuse_when_held()  # asked again: a controller that was paused in here may find the switch fired
        self.require()
        self._write_desired(after)
        since = time.monotonic()
        write_atomically(self._routes, as_bytes(document))
        return self._confirm(after, split, since=since, baseline=baseline)

    def _confirm(
        self, desired: Desired, split: Split, *, since: float, baseline: dict[str, str | int] | None = None
    ) -> Applied:
        """Wait for Envoy's acknowledgement of the routes in place, then for one answer that carries the revision."""
        self._acknowledge(_ROUTES_STATS, desired.version, baseline or {})
        acknowledged = time.monotonic() - since
        if not any(seen == split.revision for seen in self._looks(partial(self.probe, split.target))):
            raise NotAcknowledged(f"the gateway does not answer {split.target} at revision {split.revision}")
        return Applied(split, desired.version, acknowledged, time.monotonic() - since)

    def _acknowledge(self, prefix: str, version: str, baseline: dict[str, str | int]) -> None:
        for stats in self._looks(partial(self.admin.stats, prefix)):
            if stats.get("version_text") == version:
                return
            for name in REFUSALS if baseline else ():
                if int(stats.get(name, 0)) > int(baseline.get(name, 0)):
                    raise Rejected(f"Envoy refused {version} ({name}); its log says why")
        raise NotAcknowledged(f"Envoy did not take {version} within {self.deadline_seconds:g} s")

    def _looks(self, look: Callable[[], T]) -> Iterator[T]:
        """Yield a look's results until the deadline, ever more slowly. The last failure to look is raised."""
        deadline, pause = time.monotonic() + self.deadline_seconds, 0.001
        while True:
            failure: GatewayDown | None = None
            try:
                yield look()
            except GatewayDown as error:
                failure = error
            if time.monotonic() >= deadline:
                if failure:
                    raise failure
                return
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)


def _refuse_repointing(before: Desired, after: Desired) -> None:
    addresses: dict[str, str] = {}
    for desired in (before, after):
        for arm in (arm for split in desired.every_split() for arm in split.arms):
            known = addresses.setdefault(arm.cluster, arm.address)
            if known != arm.address:
                raise ClusterRepointed(f"{arm.cluster} is {known} and cannot become {arm.address}")
