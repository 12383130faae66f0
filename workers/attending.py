"""Looks at the processes of an engine while a gate measures it, and asks the engine nothing.

Whatever a gate counts, such as requests that run, tokens and cache hits, has to be the gate's own: so what a live
replica is asked, a gate's is not. What can be seen from outside is whether one of the engine's processes has ended or
stands still while its web process answers on. Whether it still generates is asked once the gate has its result.
"""

import threading
import time
from types import TracebackType
from typing import Self

from schemas.failures import Cause
from schemas.problems import EngineFailed
from workers.launchers.proc import is_stopped
from workers.serving import Replica
from workers.vitals import DEAD_SECONDS, Member, family

LOOK_SECONDS = 0.5
ANSWER_SECONDS = 10.0
"""Longest wait for the completion by which an engine proves itself after a gate."""


class Attendant:
    """Attends one ready replica while the context lasts; then `failure` says what became of it, None when it is well.

    Methods are for the thread that made it.
    """

    def __init__(self, replica: Replica, *, ends: bool = True, dead_seconds: float = DEAD_SECONDS) -> None:
        """Attend a replica.

        Args:
            replica: it.
            ends: end the engine when it is lost, so that nobody waits for answers that will not come.
            dead_seconds: how long one of its processes stands still before the engine is dead.
        """
        self.failure: EngineFailed | None = None
        self.replica = replica
        self._ends = ends
        self._dead_seconds = dead_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attendant", daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        """Look once more, and end."""
        if self._is_over.is_set():
            return
        self.leave()
        if self.failure is None and self.replica.process_id() is not None:
            self._look_for_ranks()

    def leave(self) -> None:
        """Look no more: the replica is about to end as it should."""
        self._is_over.set()
        self._thread.join()

    def require_answer(self) -> None:
        """Return when the engine generates, as one that other requests keep busy does. Raises EngineFailed."""
        probe = self.replica.probe(ANSWER_SECONDS)
        if probe.is_alive:
            return
        if self.replica.failure is not None:
            raise EngineFailed(probe.detail, cause=str(self.replica.failure))
        raise self.replica.fail(Cause.ENGINE_DEAD, f"no completion once the gate was over: {probe.detail}")

    def _run(self) -> None:
        since: float | None = None
        seen = time.monotonic()
        while self.failure is None and not self._is_over.wait(LOOK_SECONDS):
            if (pid := self.replica.process_id()) is None:
                return  # the gate's own requests tell
            self._look_for_ranks()
            now = time.monotonic()
            stands = next((one for one in (pid, *(rank.pid for rank in self.replica.ranks)) if is_stopped(one)), None)
            # Of the time in which this process stood still itself nothing is known.
            since = None if stands is None else now if since is None or now - seen > self._dead_seconds else since
            seen = now
            if stands is not None and since is not None and now - since >= self._dead_seconds:
                told: Member | None = next((one for one in family(pid) if one.pid == stands), None)
                self._lose(Cause.ENGINE_DEAD, f"{told or 'a process of it'} is stopped for {now - since:.0f} s")

    def _look_for_ranks(self) -> None:
        if (gone := self.replica.lost_rank()) is not None:
            cause = Cause.OUT_OF_MEMORY if self.replica.ran_short_of_memory() else Cause.RANK_LOST
            self._lose(cause, f"{gone} ended while the engine ran on")

    def _lose(self, cause: Cause, detail: str) -> None:
        if self._ends:
            self.failure = self.replica.fail(cause, detail)
        else:
            self.failure = EngineFailed(f"{cause}: {detail}", cause=str(cause))
