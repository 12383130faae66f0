"""Tells a dead engine from a busy one, and finds the processes that an engine is made of.

A web process may answer health routes for ever while the engine behind it is gone. So an engine proves itself by
making progress: its own counter moves, or a real completion ends. One that serves others is not asked at all; one
that is silent is asked, out of band, and is dead when it neither answers nor moves for `DEAD_SECONDS`. An engine
that computes all the while, as through one long prompt, gets `STALLED_SECONDS`, and so does one of which nobody here
could see that it does: without a counter, and in a pod or behind an endpoint.
"""

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gates.answers import FINISHED, Outcome
from schemas.failures import Cause
from workers.launchers.proc import PROC, start_time

if TYPE_CHECKING:
    from workers.serving import Replica

PROBE_SECONDS = 3.0
"""Silence after which an engine is asked for a completion."""
ANSWER_SECONDS = 3.0
DEAD_SECONDS = 6.0
STALLED_SECONDS = 30.0
READ_SECONDS = 1.0
"""Longest wait for a metrics page."""
BUSY_SHARE = 0.1
"""Of one processor: an engine that uses more of it is computing, one that only answers health routes uses less."""
_TICKS = 100.0
_STOPPED = frozenset("Tt")


@dataclass(frozen=True, slots=True)
class Member:
    """One process of an engine. `cpu_seconds` since its start; `title` is its command line, as it shows it now."""

    pid: int
    start_time: str
    title: str
    is_stopped: bool
    cpu_seconds: float

    def __str__(self) -> str:
        """Name it, by the end of a long title: what tells one from another stands there."""
        title = self.title if len(self.title) <= 80 else f"…{self.title[-79:]}"
        return f"{title or 'a process'} (pid {self.pid})"


def family(pid: int) -> list[Member]:
    """Return a process and all its descendants that run, itself first. Empty when it has ended."""
    stats: dict[int, list[str]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text("utf-8", errors="replace")
            except OSError:
                continue
            stats[int(entry.name)] = text[text.rindex(")") + 2 :].split()
    found: list[Member] = []
    wanted = [pid]
    while wanted:
        current = wanted.pop(0)
        fields = stats.get(current)
        if fields is None or fields[0] in "ZX":
            continue
        cpu_seconds = (int(fields[11]) + int(fields[12])) / _TICKS
        found.append(Member(current, fields[19], _title(current), fields[0] in _STOPPED, cpu_seconds))
        wanted += [child for child, stat in stats.items() if stat[1] == str(current)]
    return found


def _title(pid: int) -> str:
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    text = raw.replace(b"\0", b" ").decode("utf-8", errors="replace").strip()
    return "".join(one for one in text if one.isprintable())


def ranks(pid: int, pattern: str | None) -> list[Member]:
    """Return the descendants of an engine's process without which it cannot serve, by their titles."""
    if pattern is None:
        return []
    return [one for one in family(pid) if one.pid != pid and re.search(pattern, one.title)]


def lost(members: list[Member]) -> Member | None:
    """Return the first of these that runs no more."""
    return next((one for one in members if start_time(one.pid) != one.start_time), None)


class Watcher:
    """Watches one ready replica. `look` is called about once a second, from one thread."""

    def __init__(self, replica: "Replica", *, dead_seconds: float = DEAD_SECONDS) -> None:
        """Begin with an engine that has just proved itself."""
        self._replica = replica
        self._dead_seconds = dead_seconds
        self._proved = self._looked = time.monotonic()
        self._progress: float | None = None

    def look(self) -> str | None:
        """Look once, and return a line for people when there is news.

        Raises:
            EngineFailed: it ended, lost one of its processes, or is dead. All of it is ended then.
        """
        replica, now = self._replica, time.monotonic()
        if now - self._looked > self._dead_seconds:
            # This process stood still itself: what it did not see proves nothing.
            self._proved = now - PROBE_SECONDS
        self._looked = now
        replica.fail_when_ended()
        if (gone := replica.lost_rank()) is not None:
            raise replica.fail(Cause.RANK_LOST, f"{gone} ended while the engine ran on")
        if self._moved():
            self._proved = time.monotonic()
            return None
        if time.monotonic() - self._proved < min(PROBE_SECONDS, self._dead_seconds / 2):
            return None
        line = self._ask()
        self._looked = time.monotonic()
        return line

    def _moved(self) -> bool:
        """Tell whether the engine's counter moved since the last look."""
        before, self._progress = self._progress, self._replica.progress(READ_SECONDS)
        return before is not None and self._progress is not None and self._progress > before

    def _ask(self) -> str | None:
        replica, asked = self._replica, time.monotonic()
        before = self._cpu_seconds()
        answer = replica.ask(min(ANSWER_SECONDS, self._dead_seconds))
        waited = time.monotonic() - asked
        if answer.finish_reason in FINISHED or self._moved():
            self._proved = time.monotonic()
            took = f"a completion took {waited * 1000:.0f} ms" if answer.finish_reason in FINISHED else "it is busy"
            return f"ready; {took}"
        replica.fail_when_ended()
        after = self._cpu_seconds()
        computes = None not in (before, after) and (after or 0) - (before or 0) > BUSY_SHARE * max(waited, 0.1)
        silence = time.monotonic() - self._proved
        may_be_busy = computes or (answer.outcome is Outcome.TIMEOUT and not self._is_seen_working())
        if silence < (STALLED_SECONDS if may_be_busy else self._dead_seconds):
            return f"no answer and no progress for {silence:.0f} s"
        detail = f"no answer ({answer.outcome}: {answer.detail}) and no progress for {silence:.1f} s"
        stopped = [one for one in self._members() if one.is_stopped]
        raise replica.fail(Cause.ENGINE_DEAD, f"{detail}; {stopped[0]} is stopped" if stopped else detail)

    def _is_seen_working(self) -> bool:
        """Tell whether one would see it work: by its counter, or by what its processes on this machine use."""
        if self._replica.dialect.metrics.progress is not None:
            return True
        return self._replica.driver.admits is None and bool(self._members())

    def _members(self) -> list[Member]:
        pid = self._replica.process_id()
        return [] if pid is None else family(pid)

    def _cpu_seconds(self) -> float | None:
        """Return what the engine has used of processors; None where it cannot compute, since a part is stopped."""
        members = self._members()
        return None if any(one.is_stopped for one in members) else sum(one.cpu_seconds for one in members)
