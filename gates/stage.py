"""A private place where traffic may be moved before anybody's does: two engines behind one router. No I/O.

What measures (`gates.rollback`) knows neither the router nor how engines are started; what owns them implements this.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from gates.endpoint import Endpoint
from gates.router import Split
from gates.tally import LogRecord


class NotTakenBack(Exception):
    """Traffic did not go back: the router did not acknowledge it, or there is no engine to go back to.

    The message says what happened instead. `is_late`: it was waited for in vain, and nobody refused.
    """

    def __init__(self, message: str, *, is_late: bool) -> None:
        """Make it."""
        super().__init__(message)
        self.is_late = is_late


class Overtaken(Exception):
    """A shift came to nothing, since traffic was taken back meanwhile."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two engines.

    Args:
        bundle: its digest.
        endpoint: the way to it past the router.
        address: `ip:port`, as the router's log names it.
        process_id: pid of the live engine, or None when it is dead.
    """

    bundle: str
    endpoint: Endpoint
    address: str
    process_id: Callable[[], int | None]


class Stage(Protocol):
    """Both sides and the router before them. Any method raises InstrumentError when the stage itself is broken.

    `accepted` is None where the target has accepted nothing yet: going back then means no traffic (503).
    `public_url` is the target's base URL at the router.
    """

    candidate: Side
    accepted: Side | None
    public_url: str

    def settle(self) -> None:
        """Give all traffic to what is accepted, and prepare the way back there."""
        ...

    def next_revision(self) -> int:
        """Return the revision that a shift which begins now would have."""
        ...

    def shift(self, candidate_bp: int, revision: int) -> Split:
        """Give the candidate a share, acknowledged on return.

        Args:
            candidate_bp: in basis points; 10,000 where nothing is accepted yet.
            revision: as `next_revision` returned it when the shift began.

        Raises:
            Overtaken: traffic was taken back meanwhile; nothing was changed.
        """
        ...

    def restore(self) -> int:
        """Put the prepared way back in force and return its revision; repeating it confirms and changes nothing.

        Raises:
            NotTakenBack.
        """
        ...

    def cool(self) -> Split:
        """Give all traffic to the candidate, forget the way back, and end the accepted bundle's engine.

        So it is once the soak of a release is over: what it replaced is not kept warm any more.
        """
        ...

    def warm(self) -> None:
        """Boot the accepted bundle anew, as a release does that goes back to it; `accepted` is the new engine then.

        Raises:
            NotTakenBack: it does not boot any more.
        """
        ...

    def log(self) -> Sequence[LogRecord]:
        """Return what the router logged since the last call: one record an ended request."""
        ...

    def kill_candidate(self) -> None:
        """End the candidate's engine at once, without any warning, and return when it is gone."""
        ...

    def process_ids(self) -> Collection[int]:
        """Return the processes that are the router's."""
        ...

    def check(self) -> None:
        """Return while the router runs."""
        ...
