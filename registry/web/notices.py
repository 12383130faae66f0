"""What a release's page says above everything else: all that holds it, or how it ended. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.evidence import Entry, Kind
from schemas.holds import CAUSES, Hold, holds, lines, may_be_agreed_to
from schemas.release import SERVES_ON, Phase, ReleaseDetail


@dataclass(frozen=True, slots=True)
class Notice:
    """One banner: its tone, its opening words and its sentences."""

    tone: str
    title: str
    lines: list[str]


TOLD_BY_ENTRY = CAUSES | {Hold.GATE_INCONCLUSIVE, Hold.UNKNOWN}
"""Reasons for which a release is held; each of the others has a banner of its own."""
_ENDS = {
    Phase.REJECTED: (Kind.REFUSED, "bad", "Rejected."),
    Phase.ROLLED_BACK: (Kind.TRAFFIC_RESTORED, "bad", "Rolled back."),
}
"""Phase → the entry that says why, the tone and the words."""


def notices(release: ReleaseDetail, *, required: int) -> list[Notice]:
    """Return the banners of a release, the most urgent first.

    Args:
        release: with its log.
        required: approvals that its policy asks for.
    """
    if release.phase in _ENDS:
        kind, tone, title = _ENDS[release.phase]
        return [Notice(tone, title, _reasons(_last(release.log, kind)) or _said(release))]
    found = _holding(release)
    if release.doing is not None:
        found.append(Notice("plain", "Under way.", [release.doing]))
    for kind, what in ((Kind.ROLLBACK_REQUESTED, "to take it back"), (Kind.PROMOTION_REQUESTED, "to skip the rest")):
        asked = _last(_since_it_came_back(release.log), kind)
        if asked is not None and release.phase in {Phase.CANARY, Phase.PROMOTED}:
            if kind is Kind.PROMOTION_REQUESTED and release.phase is Phase.PROMOTED:
                continue
            found.append(Notice("warn", f"{asked.actor} asked {what}.", [str(asked.body["reason"])]))
    if release.phase is Phase.GATED and required and may_be_agreed_to(release):
        people = "One person" if required == 1 else f"{required} people"
        said = (
            f"{people} other than {release.created_by} must agree: `sluicegate release approve {release.id} --reason …`"
        )
        found.append(Notice("plain", "Waits for approval.", [said]))
    if not found and release.reason:
        tone = "good" if release.phase is Phase.PROMOTED else "plain"
        found.append(Notice(tone, "", _said(release)))
    return found


def _holding(release: ReleaseDetail) -> list[Notice]:
    """Return a banner for each thing that holds a release, with what to do about it."""
    found = []
    all_holds = holds(release)

    def on(*of: Hold) -> list[str]:
        return lines([hold for hold in all_holds if hold in of], release)

    if release.is_paused and (paused := _last(release.log, Kind.PAUSED)) is not None:
        found.append(Notice("warn", f"Paused by {paused.actor}.", [str(paused.body["reason"]), *on(Hold.PAUSED)]))
    if release.quarantined:
        serves = ", and serves on" if release.phase is Phase.PROMOTED else ""
        title = f"The bundle is quarantined{serves}."
        found.append(Notice("bad", title, [*release.quarantined, *on(Hold.QUARANTINED)]))
    if release.held:
        found.append(Notice("warn", "Held.", [*release.held, *on(*TOLD_BY_ENTRY)]))
    if release.waits is not None:
        keeps_on = release.waits.startswith(SERVES_ON)
        title = "Moves." if keeps_on else "Waits."
        found.append(
            Notice("plain" if keeps_on else "warn", title, [release.waits, *on(Hold.NO_RUNNER, Hold.LIVE_GOES_BACK)])
        )
    return found


def _since_it_came_back(log: Sequence[Entry]) -> Sequence[Entry]:
    """Return the entries behind the one by which a release came back last: what was asked before is over."""
    return log[max((place for place, entry in enumerate(log, 1) if entry.kind is Kind.REINSTATED), default=0) :]


def _last(log: Sequence[Entry], kind: Kind) -> Entry | None:
    return next((entry for entry in reversed(log) if entry.kind is kind), None)


def _reasons(entry: Entry | None) -> list[str]:
    return [] if entry is None else [str(reason) for reason in entry.body.get("reasons") or ()]


def _said(release: ReleaseDetail) -> list[str]:
    return [release.reason] if release.reason else []
