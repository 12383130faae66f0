"""What a control worker holds: the service, its gateways, and the claim on a release.

A release is reconciled under a lease with a fencing token on the database's clock: claim in a short transaction,
work outside any, record in a short transaction that checks the token.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeVar
from urllib.parse import urlsplit
from uuid import UUID

import structlog
from sqlalchemy import case, func, or_, select, update
from sqlalchemy.orm import Session

from gates.tally import Tally
from registry import acts, db, evidence, hindsight, releases
from registry.service import Service
from registry.tables import JobRow, ReleaseRow, TargetRow
from schemas.common import Closed
from schemas.evidence import Kind, Reasoned
from schemas.holds import Hold
from schemas.problems import LeaseLost, NotFound, Unavailable
from schemas.runner import JobState
from workers import holds
from workers.traffic.envoy import EnvoyGateway

log = structlog.get_logger(__name__)
ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class Held:
    """A release held under a fencing token, until a moment of this process's monotonic clock.

    The database refuses what is recorded under a stale token. A gateway knows no tokens, so it is not touched once the
    moment has passed: a worker that stood still may find that another one has moved the traffic elsewhere meanwhile.
    """

    id: UUID
    token: int
    until: float
    progress: str | None = None
    """What the last look at a canary step found; kept with the lease."""

    def require(self) -> None:
        """Return while nobody else can hold the release. Raises LeaseLost."""
        if time.monotonic() >= self.until:
            raise LeaseLost(f"the lease on release {self.id} ran out before traffic was moved")


@dataclass(slots=True)
class Watch:
    """The part of a gateway's access log that belongs to one split, added up."""

    tally: Tally
    position: str
    started_at: datetime | None = None
    """When the gateway that wrote it was started, as far as it could be asked."""
    is_behind: bool = False
    """Whether the clock was set back to before the step began: it proves nothing then, and may only stop one."""


@dataclass(slots=True)
class Control:
    """A control worker's parts. One a process; safe in several threads."""

    service: Service
    ring: Callable[[str], None]
    """Wakes the runners of a class: a hint that may be lost."""
    gateways: dict[str, EnvoyGateway] = field(default_factory=dict)
    watches: dict[UUID, "Watch"] = field(default_factory=dict)
    """What each live release's part of the access log adds up to. A cache: another worker reads the log again."""

    @classmethod
    def build(cls, service: Service, ring: Callable[[str], None]) -> "Control":
        """Open the gateways that the settings name."""
        gateways = {}
        for name, gateway in service.settings.gateways.items():
            address = urlsplit(gateway.url)
            gateways[name] = EnvoyGateway(
                gateway.directory, host=address.hostname or "127.0.0.1", port=address.port or 80
            )
        return cls(service, ring, gateways)

    def gateway(self, target: TargetRow) -> EnvoyGateway:
        """Return the gateway in front of a target. Raises Unavailable when this worker does not drive it."""
        try:
            return self.gateways[target.gateway]
        except KeyError:
            raise Unavailable(f"this worker does not drive the gateway {target.gateway}") from None

    @contextmanager
    def transaction(self, held: Held) -> Iterator[tuple[Session, ReleaseRow]]:
        """Yield a session and the release, locked. Raises LeaseLost when another worker holds it now."""
        with self.service.database.transaction() as session:
            yield session, self._locked(session, held)

    def perform(self, held: Held, work: Callable[[Session, ReleaseRow], ResultT]) -> ResultT:
        """Do acts on a release that is held, locked, in one transaction; see `registry.acts.perform`.

        Raises:
            LeaseLost: another worker holds it now.
        """

        def under_lease(session: Session) -> ResultT:
            return work(session, self._locked(session, held))

        return acts.perform(self.service, under_lease)

    def _locked(self, session: Session, held: Held) -> ReleaseRow:
        try:
            release = evidence.hold(session, held.id)
        except NotFound:
            release = None
        if release is None or release.lease_token != held.token:
            raise LeaseLost(f"release {held.id} is held by another worker")
        return release

    @property
    def _lease(self) -> float:
        return self.service.settings.release_lease_seconds

    def claim(self, release: UUID) -> Held | None:
        """Hold a release that is due; None when it is not, or another worker holds it."""
        asked = time.monotonic()
        with self.service.database.transaction() as session:
            at = db.now(session)
            token = session.scalar(
                update(ReleaseRow)
                .where(
                    ReleaseRow.id == release,
                    ReleaseRow.due_at <= at,
                    or_(ReleaseRow.lease_until.is_(None), ReleaseRow.lease_until < at),
                )
                .values(
                    lease_token=ReleaseRow.lease_token + 1,
                    lease_until=at + timedelta(seconds=self._lease),
                    due_at=None,
                )
                .returning(ReleaseRow.lease_token)
            )
        return None if token is None else Held(release, token, asked + self._lease)

    def renew(self, held: Held) -> None:
        """Extend the lease. Raises LeaseLost."""
        asked = time.monotonic()
        with self.transaction(held) as (session, release):
            release.lease_until = db.now(session) + timedelta(seconds=self._lease)
            release.progress = held.progress
        held.until = asked + self._lease

    def let_go(self, held: Held, *, due_in_seconds: float | None) -> None:
        """Give a release back, due again in so many seconds, or when something happens to it."""
        with self.service.database.transaction() as session:
            values: dict[str, object] = {"lease_until": None, "progress": held.progress}
            if due_in_seconds is not None:
                due = db.now(session) + timedelta(seconds=due_in_seconds)
                # What became due meanwhile stays due.
                values["due_at"] = case((ReleaseRow.due_at.is_(None), due), else_=func.least(ReleaseRow.due_at, due))
            session.execute(
                update(ReleaseRow)
                .where(ReleaseRow.id == held.id, ReleaseRow.lease_token == held.token)
                .values(**values)
            )

    def due(self, *, limit: int = 200) -> list[UUID]:
        """Return the releases that want attention, longest waiting first."""
        with self.service.database.transaction() as session:
            at = db.now(session)
            return list(
                session.scalars(
                    select(ReleaseRow.id)
                    .where(
                        ReleaseRow.due_at <= at,
                        or_(ReleaseRow.lease_until.is_(None), ReleaseRow.lease_until < at),
                    )
                    .order_by(ReleaseRow.due_at)
                    .limit(limit)
                )
            )

    def revive(self) -> int:
        """Make releases due again whose worker died holding them. Returns how many."""
        with self.service.database.transaction() as session:
            at = db.now(session)
            hindsight.bring_near(session, self.service.settings, at)
            revived = session.scalars(
                update(ReleaseRow)
                .where(ReleaseRow.lease_until < at)
                .values(lease_until=None, due_at=at)
                .returning(ReleaseRow.id)
            ).all()
        return len(revived)

    def waiting_classes(self) -> list[str]:
        """Return the runner classes for which a job waits or has been left by its holder."""
        with self.service.database.transaction() as session:
            at = db.now(session)
            return list(
                session.scalars(
                    select(JobRow.runner_class)
                    .where(
                        or_(
                            (JobRow.state == JobState.PENDING) & (JobRow.due_at <= at),
                            (JobRow.state == JobState.CLAIMED) & (JobRow.lease_until < at),
                        )
                    )
                    .distinct()
                )
            )

    def act(self, session: Session, release: ReleaseRow, name: str, kind: Kind, body: Closed) -> ReleaseRow:
        """Append one act of the controller to a release's log."""
        return releases.act(session, self.service, release, name, "controller", kind, body)

    def hold(self, session: Session, release: ReleaseRow, name: str, reasons: list[str], cause: Hold) -> None:
        """Record that a release holds, and why: once a situation, and anew when it holds for another reason."""
        body = Reasoned(reasons=[reason[:4000] for reason in reasons], cause=str(cause))
        if release.held:
            if not holds.is_other(body.reasons, release.held):
                return
            name = f"{name}:{releases.log(session, release.id)[-1].position}"
        if evidence.find(session, evidence.release_stream(release.id), name) is None:
            self.act(session, release, name, Kind.HELD, body)

    def now(self) -> datetime:
        """Return the database's clock."""
        with self.service.database.transaction() as session:
            return db.now(session)
