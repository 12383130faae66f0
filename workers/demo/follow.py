"""Follows a release or a run by the client library, and tells each new entry of its log as it appears."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from registry.client import Client
from schemas.api import Run
from schemas.evidence import Entry, Kind
from schemas.release import Phase, ReleaseDetail
from schemas.stories import tell
from workers.demo.screen import Screen
from workers.demo.traffic import Account

LOOK_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 900.0
"""For one release. On a quiet machine the longest takes a tenth of it."""
MAX_RESUMES: Final = 3
"""Times that a release which holds is let go on: on a busy machine a gate may be unable to decide."""
_QUIET: Final = frozenset({Kind.REPLICA_CHANGED})


class Stuck(Exception):
    """A release or run does not come to its end. The text says where it stands."""


@dataclass(slots=True)
class Follower:
    """Looks again and again until something is decided.

    Args:
        client: of the service.
        screen: where it is told.
        check: raises when the stack has ended.
        streams: the account of live traffic, for the moving line.
        on_entry: called with each new entry.
        on_gated: called once when a release waits for approval.
        on_held: called when a release holds for a person.
    """

    client: Client
    screen: Screen
    check: Callable[[], None]
    streams: Account
    on_entry: Callable[[Entry], None]
    on_gated: Callable[[ReleaseDetail], None]
    on_held: Callable[[ReleaseDetail], None]
    _seen: int = 0
    _is_approved: bool = False
    _resumed: list[str] = field(default_factory=list)

    def release(self, release: UUID, *, until: Callable[[ReleaseDetail], bool]) -> ReleaseDetail:
        """Follow a release until something is true of it.

        Raises:
            Stuck: it does not come so far in time, or holds again and again.
        """
        deadline = time.monotonic() + LONGEST_SECONDS
        while True:
            self.check()
            found = self.client.releases.get(release)
            for entry in found.log:
                self._tell(entry)
            if until(found):
                return found
            if time.monotonic() > deadline:
                held = f"; it holds: {'; '.join(found.held)}" if found.held else ""
                raise Stuck(f"{found.bundle_name} is {found.phase} after {LONGEST_SECONDS:g} s{held}")
            self._let_on(found)
            self._say_now(found)
            time.sleep(LOOK_SECONDS)

    def run(self, run: UUID) -> Run:
        """Follow a run to its end. Raises Stuck."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while True:
            self.check()
            found = self.client.runs.get(run)
            if found.state in ("done", "cancelled"):
                return found
            if time.monotonic() > deadline:
                raise Stuck(f"run {run} is {found.state} after {LONGEST_SECONDS:g} s: {found.progress or ''}")
            self.screen.now(f"{found.kind}: {found.progress or found.state}")
            time.sleep(LOOK_SECONDS)

    def _tell(self, entry: Entry) -> None:
        if entry.sequence <= self._seen:
            return
        self._seen = entry.sequence
        if entry.kind not in _QUIET:
            tone, story = tell(entry)
            by = "" if entry.actor in ("controller", "policy") else f" by {entry.actor}"
            self.screen.line(f"{entry.kind}{by}: {story}", tone)
        self.on_entry(entry)

    def _let_on(self, found: ReleaseDetail) -> None:
        if found.phase is Phase.GATED and not self._is_approved:
            self._is_approved = True
            self.on_gated(found)
        elif found.held and not found.is_paused:
            if len(self._resumed) >= MAX_RESUMES:
                raise Stuck(f"{found.bundle_name} is {found.phase} and holds: {'; '.join(found.held)}")
            self._resumed += found.held[:1]
            self.on_held(found)

    def _say_now(self, found: ReleaseDetail) -> None:
        doing = f"{found.bundle_name} is {found.phase}"
        if found.phase in {Phase.CANDIDATE, Phase.STAGED, Phase.BOOTED}:
            runs = [run.progress for run in self.client.runs.list(release=found.id) if run.progress]
            doing += f": {runs[0]}" if runs else ""
        elif found.weight_bp is not None:
            doing += f" at {found.weight_bp / 100:g} %"
        if found.doing is not None:
            doing += f": {found.doing}"
        streams = self.streams
        if streams.sent:
            is_open = streams.sent - len(streams.ends)
            doing += f"; {streams.sent} streams sent, {is_open} open, {len(streams.broken)} broken"
        self.screen.now(doing)
