"""What the demonstration has shown, as numbers, and whether that is what it says. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from gates.served import Served
from schemas.common import format_instant
from schemas.evidence import Entry, Kind, Restored, Traffic
from schemas.release import ReleaseDetail
from workers.demo.traffic import Account

PHASES: Final = ("superseded", "promoted", "rejected", "rolled_back")
"""Of the four releases, in order, once everything is over."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """How long it took to take traffic back, in seconds from the end of the request that decided."""

    to_first_change_seconds: float | None = None
    to_restored_seconds: float | None = None


@dataclass(slots=True)
class Outcome:
    """Everything that the demonstration found."""

    releases: list[ReleaseDetail] = field(default_factory=list)
    rollback: Rollback = field(default_factory=Rollback)
    streams: Account = field(default_factory=Account)
    entries: int = 0
    verified: bool = False
    served: list[Served] = field(default_factory=list)
    engine: str = ""
    model_sha256: str = ""
    busy: str | None = None
    """How busy the machine was at the beginning or at the end, where that was more than it can bear."""

    def document(self) -> dict[str, Any]:
        """Return what `--json` writes."""
        different = differences(self)
        return {
            "is_as_it_should_be": not different,
            "differences": different,
            "busy": self.busy,
            "releases": [
                {"name": one.bundle_name, "bundle": one.bundle, "phase": str(one.phase), "reason": one.reason}
                for one in self.releases
            ],
            "rollback": {
                "breach_to_first_change_seconds": self.rollback.to_first_change_seconds,
                "breach_to_restored_seconds": self.rollback.to_restored_seconds,
            },
            "streams": {"total": self.streams.sent, "broken": len(self.streams.broken)},
            "evidence": {"entries": self.entries, "verified": self.verified},
            "served_at": [_served(one) for one in self.served],
            "engine": self.engine,
            "model_sha256": self.model_sha256,
        }


def _served(one: Served) -> dict[str, Any]:
    split = [{"bundle": arm.bundle, "weight_bp": arm.weight_bp} for arm in one.split]
    return {"at": format_instant(one.at), "split": split, "evidence": one.entry}


def rollback_of(log: Sequence[Entry]) -> Rollback:
    """Return how long a release's traffic took to go back, by its log; None where the log does not tell."""
    change = restored = None
    for entry in log:
        if entry.kind is Kind.TRAFFIC_RESTORED:
            traffic = Traffic.model_validate(entry.body)
            if traffic.breach_at is not None:
                change = (traffic.applied_at - traffic.breach_at).total_seconds()
        elif entry.kind is Kind.RESTORE_OBSERVED:
            restored = Restored.model_validate(entry.body).seconds
    return Rollback(change, restored)


def engine_of(log: Sequence[Entry]) -> str:
    """Return name and version of the engine that a release's gates ran on."""
    booted = [entry.body["engine"] for entry in log if entry.kind is Kind.ENGINE_BOOTED]
    return f"{booted[0]['name']} {booted[0]['version']}" if booted else ""


def changes(log: Sequence[Entry]) -> list[datetime]:
    """Return when a release's changes of weights were acknowledged, oldest first."""
    kinds = {Kind.TRAFFIC_SHIFTED, Kind.TRAFFIC_RESTORED}
    return [Traffic.model_validate(entry.body).applied_at for entry in log if entry.kind in kinds]


def instants(releases: Sequence[ReleaseDetail], account: Account) -> list[datetime]:
    """Return when three requests arrived: before the second release had traffic, in its first step, in the last one's.

    Each is the request sent nearest to the middle of its span; a span that is not there has none.
    """
    if len(releases) < len(PHASES):
        return []
    before, middle, last = (changes(releases[place].log) for place in (0, 1, 3))
    spans = [(before[:1], middle[:1]), (middle[:1], middle[1:2]), (last[:1], last[1:2])]
    found = []
    for start, end in spans:
        if start and end:
            centre = start[0] + (end[0] - start[0]) / 2
            found += [min((one.sent_at for one in account.ends), key=lambda at: abs(at - centre), default=centre)]
    return found


def differences(outcome: Outcome) -> list[str]:
    """Return what is not as the demonstration says, one sentence each, or nothing."""
    found = []
    phases = [str(one.phase) for one in outcome.releases]
    if phases != list(PHASES):
        found.append(f"the releases are {', '.join(phases) or 'none'}, not {', '.join(PHASES)}")
    else:
        found += _reasons_differ(outcome)
    if outcome.streams.sent == 0:
        found.append("no stream was sent")
    if outcome.streams.broken:
        found.append(f"{len(outcome.streams.broken)} streams broke: {'; '.join(outcome.streams.reasons())}")
    if not outcome.streams.is_settled:
        found.append(f"{outcome.streams.sent - len(outcome.streams.ends)} streams have not ended")
    if not outcome.verified:
        found.append("the evidence does not verify")
    return found


def _reasons_differ(outcome: Outcome) -> list[str]:
    found = []
    rejected, rolled_back = outcome.releases[2:]
    if not any(gate.gate == "golden" and gate.verdict == "failed" for gate in rejected.gates):
        found.append(f"{rejected.bundle_name} was rejected, but not by its golden gate: {rejected.reason}")
    if not any(entry.kind is Kind.STOP_CONDITION_FIRED for entry in rolled_back.log):
        found.append(f"{rolled_back.bundle_name} was rolled back, but by no stop condition: {rolled_back.reason}")
    if outcome.rollback.to_restored_seconds is None:
        found.append("no request was seen on the restored bundle")
    return found
