"""What is free on a runner: what it has, and what the jobs that it holds reserve of it.

What a job holds of a machine is said by its row, and counts while its lease lasts, on the database's clock. So a
reservation needs nobody to give it back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import structlog
from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from gates import fitting
from gates.fitting import Needs, Offer
from registry import runners
from registry.tables import JobRow, RunnerRow
from schemas.runner import Fingerprint, JobState

log = structlog.get_logger(__name__)


def offer(runner: RunnerRow) -> Offer:
    """Return what a runner has, as it said."""
    return Offer(
        Fingerprint.model_validate(runner.fingerprint),
        engines=tuple(runner.engines),
        environments=runner.environments or {},
        launcher=runners.launcher(runner),
        speaks=runner.speaks or 0,
    )


def read(needs: dict[str, Any]) -> Needs | None:
    """Return what a job takes, as it was kept; None where a later version kept it, which alone can tell what fits."""
    try:
        return Needs.model_validate(needs)
    except ValidationError as error:
        log.warning("needs_unreadable", needs=needs, error=str(error))
        return None


@dataclass(frozen=True, slots=True)
class Reserved:
    """What the jobs that a runner holds have reserved of it."""

    fingerprint: Fingerprint
    devices: frozenset[int]
    memory_bytes: int

    def room(self, needs: Needs) -> list[int] | None:
        """Return the accelerators that a replica gets, none of them on a processor; None when there is no room."""
        if not fitting.has_memory(needs, self.fingerprint, self.memory_bytes):
            return None
        return fitting.positions(needs, self.fingerprint, self.devices)

    def __str__(self) -> str:
        if self.fingerprint.accelerators:
            return f"{len(self.devices)} of {len(self.fingerprint.accelerators)} accelerators"
        return f"{self.memory_bytes / 1e9:,.1f} of {self.fingerprint.memory_bytes / 1e9:,.1f} GB"


def reserved(session: Session, runner: RunnerRow, at: datetime) -> Reserved:
    """Return what is reserved of a runner by jobs whose lease has not run out."""
    held = session.execute(
        select(JobRow.needs, JobRow.devices).where(
            JobRow.runner_id == runner.id, JobRow.state == JobState.CLAIMED, JobRow.lease_until >= at
        )
    ).all()
    return held_by(runner, [(needs, devices) for needs, devices in held])


def held_by(runner: RunnerRow, held: Sequence[tuple[dict[str, Any] | None, list[Any] | None]]) -> Reserved:
    """Return what jobs reserve of a runner, each given as its needs and its devices."""
    machine = Fingerprint.model_validate(runner.fingerprint)
    taken = [read(needs) for needs, _ in held if needs is not None]
    # What cannot be read may take all there is.
    memory = sum(machine.memory_bytes if one is None else one.machine_bytes for one in taken)
    devices = frozenset(place for _, places in held for place in places or ())
    return Reserved(machine, devices, memory)
