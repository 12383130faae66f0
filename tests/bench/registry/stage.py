"""The stage of the bench: a database that grows, the service on it, and what is asked of it."""

import base64
import contextlib
import json
import logging
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import UUID

import psutil
import structlog
from pydantic import SecretStr
from sqlalchemy import Text, cast, func, literal, select, text
from sqlalchemy.orm import Session
from uuid6 import uuid7

from gates.evidence import Verifier
from registry import auth, checkpoints, db, evidence, keys, lifecycle, projects, targets, verification
from registry.auth import Actor
from registry.service import Service
from registry.settings import Settings
from registry.tables import EntryRow, ProjectDocumentRow, ReleaseRow, TargetRow
from schemas.api import TargetCreate
from schemas.evidence import Kind
from schemas.release import Phase
from tests.bench.registry import fill, models
from tests.bench.registry.clients import Asked, Told, get, measure, plan, post, rank
from tests.support.postgres import Postgres
from workers.control import Control
from workers.sweep import sweep

ROOT = Path(__file__).parents[3]
TARGETS = 200
"""Most targets that the ended releases were on; one for each 100 entries where these are few."""
WORKERS = 2
WARM_UPS = 10
SEED = 7
"""Of everything that is drawn."""
SAMPLED = 500


class Stage:
    """Everything that the bench runs on. `with` starts and ends it."""

    def __init__(self, *, entries: int, approvals: int, sweeps: int, is_durable: bool = True) -> None:
        """Take the largest size in `entries`, and at each size how many releases wait for one and sweeps are timed.

        `is_durable`: a commit is on the disk before it is answered, as where the product is used.
        """
        self._is_durable = is_durable
        self._target_count = max(1, min(TARGETS, entries // 100))
        self._approvals, self._sweeps = approvals, sweeps
        self._ends = contextlib.ExitStack()
        self._bundles = 0
        self._served = 0
        self._random = random.Random(SEED)

    def __enter__(self) -> Self:
        folder = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="sluicegate-bench-")))
        self._postgres = Postgres(is_durable=self._is_durable)
        self._ends.callback(self._postgres.stop)
        self.url = self._postgres.url(self._postgres.create())
        self._settings = {
            "SLUICEGATE_ENVIRONMENT": "development",
            "SLUICEGATE_DATABASE_URL": self.url,
            "SLUICEGATE_BROKER_URL": "redis://127.0.0.1:1/0",
            "SLUICEGATE_STORAGE_DIR": str(folder / "blobs"),
            "SLUICEGATE_SIGNING_KEY": str(folder / "signing.pem"),
            "SLUICEGATE_GATEWAYS__local__DIRECTORY": str(folder / "gateway"),
            "SLUICEGATE_GATEWAYS__local__URL": "http://127.0.0.1:1",
            "SLUICEGATE_REQUESTS_PER_SECOND": "0",
        }
        self._log = folder / "api.log"
        settings = Settings.model_validate(
            {
                "environment": "development",
                "database_url": SecretStr(self.url),
                "broker_url": SecretStr("redis://127.0.0.1:1/0"),
                "storage_dir": folder / "blobs",
                "signing_key": folder / "signing.pem",
                "gateways": {"local": {"directory": folder / "gateway", "url": "http://127.0.0.1:1"}},
            }
        )
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        self.service = Service.build(settings)
        self._ends.callback(self.service.close)
        with self.service.database.transaction() as session:
            project, _ = projects.ensure(session, self.service, "default", by="bench")
            self.author = Actor(project.id, "default", "bench", "admin")
            made = {
                role: auth.create_token(
                    session, self.service, project, f"{role}-of-bench", role, by="bench", now=db.now(session)
                ).secret
                for role in ("viewer", "engineer", "manager")
            }
        self.viewer, self.engineer, self.manager = made.values()
        self._place = fill.Place(self.url, folder / "signing.pem", project.id)
        self._models = models.make(self.service, self.author)
        self._targets = [self._target(f"ended-{place}@bench") for place in range(self._target_count)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.close()

    def _target(self, name: str) -> tuple[UUID, str]:
        with self.service.database.transaction() as session:
            wanted = TargetCreate(name=name, runner_class="cpu", gateway="local")
            return targets.create(session, self.service, self.author, wanted).id, name

    # ------------------------------------------------------------------------------------------------- filling

    def fill(self, bundles: int, entries: int) -> None:
        """Let the database grow to so many bundles and entries, and have all of it sealed."""
        began = time.monotonic()
        with ProcessPoolExecutor(WORKERS) as pool:
            missing = range(self._bundles + 1, bundles)
            tasks: list[tuple[Any, ...]] = [
                (fill.bundles, self._place, self._models.bundle, range(first, min(first + 1000, missing.stop)))
                for first in range(missing.start, missing.stop, 1000)
            ]
            fill.spread(pool, tasks)
            self._bundles = bundles - 1
            known = models.digests(self.service, self._place.project, 5000)
            ended = (entries - self._entries()) // len(self._models.ended.entries)
            rows = [self._release(self._random.choice(self._targets), known) for _ in range(max(0, ended))]
            waiting = [
                self._release(self._target(f"waiting-{self._served + place}@bench"), known)
                for place in range(self._approvals)
            ]
            self._served += self._approvals
            shape = self._models.ended, self._models.ended_row
            tasks = [(fill.releases, self._place, *shape, part) for part in fill.chunks(rows, 1000)]
            tasks.append((fill.releases, self._place, self._models.waiting, self._models.waiting_row, waiting))
            fill.spread(pool, tasks)
        self._waiting = [row[0] for row in waiting]
        filled = time.monotonic()
        checkpoints.make(self.service, self._place.project, by="bench")
        with self.service.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))
            connection.execute(text("CHECKPOINT"))
        with self.service.database.transaction() as session:
            releases = session.scalar(select(func.count()).select_from(ReleaseRow))
        print(
            f"\n{bundles:,} bundles, {self._entries():,} entries, {releases:,} releases: "
            f"filled in {filled - began:.0f} s, sealed in {time.monotonic() - filled:.0f} s",
            flush=True,
        )

    def _release(self, target: tuple[UUID, str], known: list[str]) -> tuple[str, str, str, str]:
        return str(uuid7()), str(target[0]), target[1], self._random.choice(known)

    def entries_of(self, ended: int, bundles: int) -> int:
        """Return how many entries there are once there are so many bundles, and so many more releases that ended."""
        registered = max(0, bundles - self._bundles - 1)
        return self._entries() + registered + ended * len(self._models.ended.entries)

    def _entries(self) -> int:
        with self.service.database.transaction() as session:
            return session.scalar(select(func.count()).select_from(EntryRow)) or 0

    def check(self, *, is_whole: bool) -> None:
        """Verify what was filled in: all of it, or the entries of a sample of its streams. Raises RuntimeError."""
        began = time.monotonic()
        with self.service.database.transaction() as session:
            _remember_splits(session)
        with self.service.database.transaction() as session:
            if is_whole or self._entries() <= 50_000:
                told = verification.verify(session, self._place.project)
                faults, read = told.faults, told.entries
            else:
                verifier = Verifier(self._place.project, keys.known(session))
                sampled = select(EntryRow.stream).where(EntryRow.position == 1).order_by(func.random()).limit(SAMPLED)
                for stream in session.scalars(sampled).all():
                    for row in evidence.read(session, stream):
                        verifier.entry(evidence.as_record(row))
                faults, read = verifier.faults, verifier.entries
        if faults:
            raise RuntimeError(f"the log does not verify: {faults[:5]}")
        seconds, peak = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"  verified {read:,} entries in {seconds:.1f} s, {read / seconds:,.0f}/s; peak {peak:,.0f} MB", flush=True
        )

    # -------------------------------------------------------------------------------------------------- asking

    @contextlib.contextmanager
    def api(self) -> Iterator[int]:
        """Run the API as `sluicegate up` does. Yields its port."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        environment = os.environ | self._settings | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-P", "-m", "registry.api", "--host", "127.0.0.1", "--port", str(port)]
        with self._log.open("ab") as log, subprocess.Popen(command, env=environment, stderr=log) as process:
            try:
                self._await(port, process)
                self.pid = process.pid
                yield port
            finally:
                process.terminate()
                process.wait(30)

    def _await(self, port: int, process: subprocess.Popen[bytes]) -> None:
        ends = time.monotonic() + 30
        while time.monotonic() < ends:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return
            if process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"the API did not start: {self._log.read_text('utf-8')[-2000:]}")

    def measure(self, port: int, asked: Asked, rate: float = 0.0) -> Told:
        """Measure an operation, and what processor time it took; at a rate a second, or as fast as it is answered."""
        before = self._spent()
        told = measure(port, asked, plan(asked, rate, SEED) if rate else None)
        service, database = (1000 * (now - then) / told.count for now, then in zip(self._spent(), before, strict=True))
        return replace(told, service_ms=service, database_ms=database)

    def _spent(self) -> tuple[float, float]:
        """Return the processor seconds of the API's processes and of PostgreSQL's until now."""
        with self.service.database.look() as connection:
            postmaster = psutil.Process(connection.scalar(text("SELECT pg_backend_pid()"))).parent()
        sums = []
        for root in (psutil.Process(self.pid), postmaster):
            times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
            sums.append(sum(one.user + one.system for one in times))
        return sums[0], sums[1]

    def warm(self, port: int, asked: Asked) -> None:
        """Ask a little beforehand, where asking twice is harmless."""
        if asked.requests[0][0].startswith(b"GET"):
            measure(port, Asked(asked.name, [part[:WARM_UPS] for part in asked.requests], asked.status))

    def operations(self, clients: int, requests: int) -> Iterator[Asked]:
        """Yield what is measured, one after the other."""
        each = requests // clients
        with self.service.database.transaction() as session:
            member = ProjectDocumentRow
            query = select(member.id, member.digest).where(member.kind == "bundle").order_by(member.id.desc())
            rows = list(session.execute(query).all())

        def reads(name: str, path: Callable[[], str]) -> Asked:
            return Asked(name, [[get(path(), self.viewer) for _ in range(each)] for _ in range(clients)])

        def cursor(place: int) -> str:
            return base64.urlsafe_b64encode(rows[place].id.bytes).decode().rstrip("=")

        pick = self._random
        middle, last = cursor(len(rows) // 2), cursor(-51)
        yield reads("get", lambda: f"/v1/bundles/{pick.choice(rows).digest}")
        yield reads("list: first page", lambda: "/v1/bundles")
        yield reads("list: middle page", lambda: f"/v1/bundles?cursor={middle}")
        yield reads("list: last page", lambda: f"/v1/bundles?cursor={last}")
        yield reads("search: name", lambda: f"/v1/bundles?name={fill.name(pick.randrange(fill.FAMILIES))}&limit=20")
        yield reads("search: label", lambda: f"/v1/bundles?label=team=team-{pick.randrange(fill.TEAMS):02}&limit=20")
        both = "label=team=team-{:02}&label=stage=production&limit=20"
        yield reads("search: two labels", lambda: f"/v1/bundles?{both.format(2 * pick.randrange(25))}")
        yield Asked("create", [[self._create() for _ in range(each)] for _ in range(clients)], 201)
        yield self._reads_of_releases(clients, each)
        body = json.dumps({"reason": "answers read"}).encode()
        acts = [post(f"/v1/releases/{release}/approvals", self.manager, body) for release in self._waiting]
        share = len(acts) // clients
        yield Asked("approve", [acts[place * share : (place + 1) * share] for place in range(clients)])

    def _create(self) -> bytes:
        body = fill.body(self._random.randrange(fill.FAMILIES)) | {"description": f"posted {uuid7()}"}
        return post("/v1/bundles", self.engineer, json.dumps(body).encode())

    def _reads_of_releases(self, clients: int, each: int) -> Asked:
        with self.service.database.transaction() as session:
            query = select(ReleaseRow.id).where(ReleaseRow.phase == "superseded").limit(10_000)
            ids = list(session.scalars(query))
        paths = [[f"/v1/releases/{self._random.choice(ids)}" for _ in range(each)] for _ in range(clients)]
        return Asked("get a release with its log", [[get(path, self.viewer) for path in part] for part in paths])

    # ------------------------------------------------------------------------------------------------ sweeping

    def sweeps(self) -> dict[str, Told]:
        """Time the sweep of a control worker: at rest, and when there is something to seal."""
        control = Control.build(self.service, lambda _: None)
        settings = self.service.settings.model_copy(update={"checkpoint_seconds": 1e-6})
        sealing = Control(
            Service(settings, self.service.database, self.service.signer, self.service.blobs), lambda _: None
        )
        checkpoints.make(self.service, self._place.project, by="bench")
        self._rest()

        def something_new() -> None:
            self._target(f"sealed-{uuid7().hex[:24]}@bench")

        return {
            "sweep": self._timed(control, lambda: None),
            "sweep: with a checkpoint": self._timed(sealing, something_new),
        }

    def _rest(self) -> None:
        """Approved releases are due, and nobody takes them on here."""
        with self.service.database.transaction() as session:
            session.execute(text("UPDATE releases SET due_at = NULL WHERE due_at IS NOT NULL"))

    def _timed(self, control: Control, before: Callable[[], None]) -> Told:
        took = []
        for _ in range(self._sweeps):
            before()
            began = time.monotonic()
            assert sweep(control, lambda _: None) == 0
            took.append((time.monotonic() - began) * 1000)
        took.sort()
        return Told(rank(took, 0.5), rank(took, 0.99), took[-1], 1000 * len(took) / sum(took), len(took))


def _remember_splits(session: Session) -> None:
    """Keep beside each target the split of the last entry that moved its traffic, as the controller would have."""
    newest = (
        select(ReleaseRow.target_id, EntryRow.envelope)
        .join(EntryRow, EntryRow.stream == literal("release/") + cast(ReleaseRow.id, Text))
        .where(EntryRow.kind.in_(evidence.MOVES_TRAFFIC))
        .distinct(ReleaseRow.target_id)
        .order_by(ReleaseRow.target_id, EntryRow.sequence.desc())
    )
    for target, envelope in session.execute(newest).all():
        session.get_one(TargetRow, target).applied = evidence.claim_of(envelope)["body"]["desired"]
    for target, count in _counted(session).items():
        session.get_one(TargetRow, target).generation = 1 + count
    session.flush()
    session.execute(text("DELETE FROM project_usage"))
    session.execute(_USED)


def _counted(session: Session) -> Counter[UUID]:
    """Return target → how often the logs of its releases changed what it serves, or is about to."""
    logs = (
        select(ReleaseRow.target_id, EntryRow.position, EntryRow.kind)
        .join(EntryRow, EntryRow.stream == literal("release/") + cast(ReleaseRow.id, Text))
        .order_by(EntryRow.stream, EntryRow.position)
        .execution_options(yield_per=5000)
    )
    counted, phase = Counter[UUID](), Phase.CANDIDATE
    for target, position, kind in session.execute(logs):
        after = Phase.CANDIDATE if position == 1 else lifecycle.step(phase, Kind(kind))
        counted[target] += (position == 1 or after is not phase) + (kind in evidence.MOVES_TRAFFIC)
        phase = after
    return counted


_USED = text(
    "INSERT INTO project_usage (project_id, part, documents, bytes) SELECT id, 0, (SELECT count(*)"
    " FROM project_documents AS one WHERE one.project_id = projects.id AND deleted_at IS NULL),"
    " (SELECT coalesce(sum(size), 0) FROM project_blobs AS one JOIN blobs USING (digest)"
    " WHERE one.project_id = projects.id) FROM projects"
)
"""What the service would have counted with what was filled in."""
