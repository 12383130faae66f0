"""What a gateway's access log adds up to: how each request counts for the arm it was drawn for. Pure.

`gates.canary` judges it. The log's lines are counted one by one, each at the same cost however long a step is.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Final

from gates import stats
from gates.router import ARMS, Split

CLIENT_FLAGS: Final = frozenset({"DC", "DPE"})
"""Envoy's response flags for what the client did: disconnected, broke the protocol."""
UNWRITTEN_SECONDS: Final = 2.0
"""The gateway writes its log five times a second, and it is looked at about twice: so old may a count be of requests
that have ended since and are in no line that was read."""
REFUSAL_FLAGS: Final = frozenset({"NR", "IH", "RL", "UAEX"})
"""Flags of a request that the gateway itself refused with a 4xx."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One ended request as the gateway's access log tells it.

    Args:
        at: when its first byte arrived at the gateway.
        target: `name@environment`; None when no target matched.
        route: `split`, `pin`, `probe`, `idle` or `unknown`; None when the request was not even parsed.
        revision: of the split that took the request.
        method: HTTP method; None when the request was not even parsed.
        assigned: cluster that the split drew.
        served: `ip:port` of the engine that answered last.
        code: HTTP status sent to the client; 0 when the client left before one.
        flags: Envoy's response flags, such as UPE or DC.
        details: Envoy's reason in words.
        attempts: upstream attempts.
        ttft_ms: from the request's first byte to the answer's first body byte; None without a body byte.
        duration_ms: from the request's first byte to its end.
        is_event_stream: the answer's content type was `text/event-stream`.
        request_id: the client's, or the gateway's own.
    """

    at: datetime
    target: str | None
    route: str | None
    revision: int | None
    method: str | None
    assigned: str | None
    served: str | None
    code: int
    flags: frozenset[str]
    details: str
    attempts: int
    ttft_ms: float | None
    duration_ms: float
    is_event_stream: bool
    request_id: str | None = None

    @property
    def ended_at(self) -> datetime:
        """When the request ended."""
        return self.at + timedelta(milliseconds=self.duration_ms)


class Fate(StrEnum):
    """How one request counts for the arm it was assigned to."""

    GOOD = "good"
    SERVER_ERROR = "server_error"
    CUT = "cut"
    OTHER_ARM = "other_arm"
    RETRIED = "retried"
    CLIENT_LEFT = "client_left"
    REFUSED = "refused"


ERRORS: Final = (Fate.SERVER_ERROR, Fate.CUT, Fate.OTHER_ARM, Fate.RETRIED)


def fate(record: LogRecord, address: str) -> Fate:
    """Tell how a request counts against the arm it was assigned to.

    A 4xx answer counts neither way: it is the client's error, or a candidate that refuses what it should serve,
    and in both cases no proof of health.

    Args:
        record: the request.
        address: `ip:port` of the assigned arm's engine.

    Source: Envoy, response flags of the access log (UPE, UC, UF, UR, UT, UH, UO: upstream; DC, DPE: downstream).
    """
    upstream = record.flags - CLIENT_FLAGS - REFUSAL_FLAGS
    if record.code >= 500:
        return Fate.SERVER_ERROR
    if upstream:
        return Fate.CUT
    if record.served is not None and record.served != address:
        return Fate.OTHER_ARM
    if record.attempts > 1:
        return Fate.RETRIED
    if record.flags & CLIENT_FLAGS or record.code == 0:
        return Fate.CLIENT_LEFT
    if 400 <= record.code < 500:
        return Fate.REFUSED
    return Fate.GOOD


@dataclass(slots=True)
class ArmStats:
    """Requests of one arm.

    Args:
        fates: how many requests had each fate.
        ttft_ms: of streamed answers; infinite for failed requests.
        left_after_ms: how long clients waited who left before the first byte.
    """

    fates: Counter[Fate] = field(default_factory=Counter)
    ttft_ms: list[float] = field(default_factory=list)
    left_after_ms: list[float] = field(default_factory=list)

    @property
    def n(self) -> int:
        """Requests that say something about the arm: good and failed ones."""
        return self.fates[Fate.GOOD] + self.errors

    @property
    def errors(self) -> int:
        """Requests that count against the arm."""
        return sum(self.fates[each] for each in ERRORS)

    def add(self, record: LogRecord, address: str) -> None:
        """Count one request."""
        kind = fate(record, address)
        self.fates[kind] += 1
        if kind in ERRORS:
            self.ttft_ms.append(math.inf)
        elif record.ttft_ms is None and kind is Fate.CLIENT_LEFT:
            self.left_after_ms.append(record.duration_ms)
        elif record.ttft_ms is not None and record.is_event_stream and kind is not Fate.REFUSED:
            self.ttft_ms.append(record.ttft_ms)

    def over(self, max_ms: float) -> tuple[int, int]:
        """Return how many requests waited longer than a bound for their first token, and among how many.

        A client that left before the first byte is censored: it counts as over once it waited longer than the
        bound, and not at all before.
        """
        gave_up = sum(waited > max_ms for waited in self.left_after_ms)
        return sum(ttft > max_ms for ttft in self.ttft_ms) + gave_up, len(self.ttft_ms) + gave_up

    def percentile_ms(self, percentile: Decimal) -> float | None:
        """Return the nearest-rank percentile of TTFT in ms, infinite where failures reach it; None without data."""
        return stats.nearest_rank(self.ttft_ms, percentile) if self.ttft_ms else None


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a tally had come; as small as the number of arms and fates, however many requests were counted."""

    fates: Mapping[str, Counter[Fate]]
    lengths: Mapping[str, tuple[int, int]]
    assigned: Counter[str]
    garbled: int
    lost: bool
    newest_at: datetime | None
    unanswered_at: datetime | None


@dataclass(slots=True)
class Tally:
    """Everything that a step's log lines add up to. Fed in batches; each line costs the same however long the step.

    Errors and latencies of an arm count whatever the revision once the request ended after the step began: a
    stream that started before the last weight change and is cut now is cut by the same engine. The observed split
    counts requests of the step's own revision only.

    Args:
        split: the step's applied split.
        began_at: when it was applied, or when the gateway started if that was later.
    """

    split: Split
    began_at: datetime
    arms: dict[str, ArmStats] = field(default_factory=lambda: {name: ArmStats() for name in ARMS})
    assigned: Counter[str] = field(default_factory=Counter)
    garbled: int = 0
    lost: bool = False
    newest_at: datetime | None = None
    unanswered_at: datetime | None = None
    seen_open: list[tuple[datetime, Mapping[str, int]]] = field(default_factory=list)
    unseen_since: datetime | None = None
    unseen_why: str = ""

    def see(self, at: datetime, open_requests: Mapping[str, int]) -> None:
        """Note how many requests were open at an instant, by arm name."""
        recent = [each for each in self.seen_open if each[0] >= at - timedelta(seconds=UNWRITTEN_SECONDS)]
        self.seen_open = [*recent, (at, dict(open_requests))]
        self.unseen_since = None

    def miss(self, at: datetime, why: str) -> None:
        """Note that the gateway could not be asked, and why."""
        self.seen_open = []
        self.unseen_why = why
        if self.unseen_since is None:
            self.unseen_since = at

    def open(self, arm: str) -> int | None:
        """Return how many requests were open on an arm when the gateway was last asked; None when it is not known."""
        return self.seen_open[-1][1].get(arm, 0) if self.seen_open else None

    def unwritten(self, arm: str) -> int:
        """Return how many requests of an arm may be in no line yet: those that are open, or were a moment ago."""
        return max((each.get(arm, 0) for _, each in self.seen_open), default=0)

    def mark(self) -> Mark:
        """Return where the tally stands, for `at`."""
        return Mark(
            {name: arm.fates.copy() for name, arm in self.arms.items()},
            {name: (len(arm.ttft_ms), len(arm.left_after_ms)) for name, arm in self.arms.items()},
            self.assigned.copy(),
            self.garbled,
            self.lost,
            self.newest_at,
            self.unanswered_at,
        )

    def at(self, mark: Mark) -> "Tally":
        """Return the tally as it stood at a mark of its own, apart from this one; what is open stays as it is now."""
        arms = {
            name: ArmStats(
                mark.fates[name].copy(),
                arm.ttft_ms[: mark.lengths[name][0]],
                arm.left_after_ms[: mark.lengths[name][1]],
            )
            for name, arm in self.arms.items()
        }
        return replace(
            self,
            arms=arms,
            assigned=mark.assigned.copy(),
            garbled=mark.garbled,
            lost=mark.lost,
            newest_at=mark.newest_at,
            unanswered_at=mark.unanswered_at,
        )

    def expect(self, at: datetime) -> None:
        """Note that the gateway was probed, so that a line no older than this must come."""
        if self.unanswered_at is None:
            self.unanswered_at = at

    def add(self, records: Iterable[LogRecord], *, garbled: int = 0, lost: bool = False) -> None:
        """Count a batch.

        Args:
            records: of the whole gateway, in any order; other targets' lines only show that the log is alive.
            garbled: lines that could not be read.
            lost: True when lines are missing before this batch, after a truncation or an unknown rotation.
        """
        self.garbled += garbled
        self.lost = self.lost or lost
        for record in records:
            if self.newest_at is None or record.ended_at > self.newest_at:
                self.newest_at = record.ended_at
            if self.unanswered_at is not None and record.ended_at >= self.unanswered_at:
                self.unanswered_at = None
            if record.target == self.split.target and record.route in {"split", "pin"}:
                self._count(record)

    def _count(self, record: LogRecord) -> None:
        arm = self.split.assigned(record.assigned)
        if record.route == "split" and record.revision == self.split.revision:
            self.assigned[arm.name if arm else "unknown"] += 1
        if arm is not None and record.method == "POST" and record.ended_at >= self.began_at:
            self.arms[arm.name].add(record, arm.address)
