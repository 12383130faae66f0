"""Who served a target at an instant, by its evidence. Pure.

Every change of weights is an entry of the release that caused it: `traffic_shifted` or `traffic_restored`, with the
split that was wanted, the revision that the gateway acknowledged, and the instants of beginning and acknowledgement.
What counts is when a request arrived, not when its answer ended: a stream goes on where it began.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from schemas.evidence import Entry, Kind, SplitEntry, Traffic

_CHANGES = frozenset({Kind.TRAFFIC_SHIFTED, Kind.TRAFFIC_RESTORED})


@dataclass(frozen=True, slots=True)
class Served:
    """The split in force at an instant.

    `split` is empty when nothing was served. `since` and `entry` name the change that put it in force; both are None
    before the first one, and so is `revision`. `becoming` holds the split of a change that had begun and was not yet
    acknowledged at that instant: a request of that moment went by either.
    """

    at: datetime
    split: tuple[SplitEntry, ...]
    revision: str | None
    since: datetime | None
    entry: str | None
    becoming: tuple[SplitEntry, ...] | None

    def weight_bp(self, bundle: str) -> int:
        """Return a bundle's share in basis points."""
        return sum(arm.weight_bp for arm in self.split if arm.bundle == bundle)


def served_at(entries: Iterable[Entry], at: datetime) -> Served:
    """Return which bundles served a target at an instant, with which weights.

    Args:
        entries: of all releases of one target, in any order; other kinds than changes of traffic are passed over.
        at: when the request arrived.

    Raises:
        ValueError: an entry that changed traffic does not say how.
    """
    changes = [(Traffic.model_validate(entry.body), entry) for entry in entries if entry.kind in _CHANGES]
    changes.sort(key=lambda change: (change[0].applied_at, change[1].sequence))
    before = [change for change in changes if change[0].applied_at <= at]
    begun = [change for change in changes if change[0].requested_at <= at < change[0].applied_at]
    becoming = tuple(begun[-1][0].desired) if begun else None
    if not before:
        return Served(at, (), None, None, None, becoming)
    traffic, entry = before[-1]
    split = tuple(arm for arm in traffic.desired if arm.weight_bp > 0)
    return Served(at, split, traffic.revision, traffic.applied_at, entry.entry_digest, becoming)
