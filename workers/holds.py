"""Why a release holds, and whether it still does: the reasons are kept true, and one of them ends by itself."""

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from sqlalchemy.orm import Session

from gates.canary import is_silence
from gates.tally import Tally
from registry import db, evidence, lifecycle, releases
from registry.logged import Logged
from registry.tables import ReleaseRow
from schemas.evidence import Kind, Reasoned
from schemas.holds import Hold

RENEWED_SECONDS: Final = 10.0
"""Between two entries of a step that is looked at all the time: reasons that take turns are no flood."""
_PASSING = re.compile(r" ?\([^()]*\)|\d+(\.\d+)?")
"""What makes no other reason: a number that counts on, and what is said in brackets."""


def is_other(reasons: Sequence[str], than: Sequence[str]) -> bool:
    """Tell whether a release holds for another reason than it says."""
    return _shape(reasons) != _shape(than)


def _shape(reasons: Sequence[str]) -> list[str]:
    return sorted(_PASSING.sub("", reason.replace("\0", "\ufffd")) for reason in reasons)


def standing(log: Sequence[Logged]) -> list[tuple[Logged, Reasoned]]:
    """Return the entries of a release's log that say why it holds since it began to; none when it does not hold."""
    found: list[tuple[Logged, Reasoned]] = []
    state: lifecycle.State | None = None
    for entry in log:
        kind, body = Kind(entry.kind), evidence.claim_of(entry.envelope)["body"]
        at = entry.recorded_at
        state = lifecycle.begin(at) if state is None else lifecycle.advance(state, kind, body, at)
        if kind is Kind.HELD:
            found.append((entry, Reasoned.model_validate(body)))
        elif not state.held:
            found = []
    return found


def is_renewable(session: Session, release: ReleaseRow) -> bool:
    """Tell whether a release holds because its step could not be judged, and has not said why a moment ago."""
    told = standing(releases.log(session, release.id))
    if not told or told[-1][1].cause != Hold.STEP_ERRORED:
        return False
    return db.now(session) - told[-1][0].recorded_at >= timedelta(seconds=RENEWED_SECONDS)


def is_blind(session: Session, release: ReleaseRow) -> bool:
    """Tell whether a release holds because a step could not be judged, whatever a worker sees that has just begun."""
    return any(body.cause == Hold.STEP_ERRORED for _, body in standing(releases.log(session, release.id)))


def has_gateway_back(session: Session, release: ReleaseRow, tally: Tally) -> bool:
    """Tell whether a release held for nothing but a gateway that did not answer, which answers again.

    The caller has found no fault at this look. The gateway must have said what is open, and have logged a request since
    the release began to hold: a worker that has only just begun to look would find no fault with a silent one either.
    """
    told = standing(releases.log(session, release.id))
    if not told or not all(body.cause == Hold.STEP_ERRORED and is_silence(body.reasons) for _, body in told):
        return False
    has_answered = tally.unseen_since is None and bool(tally.seen_open)
    return has_answered and tally.newest_at is not None and tally.newest_at > told[-1][0].recorded_at
