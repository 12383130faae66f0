"""A job that this runner holds: the lease that is kept up, and everything the runner says about the job.

What may end it is one of three things (`Ending`), seen by a thread that renews the lease. Whoever works on the
job asks `check` between two steps, and gives `on_end` what must not wait until then, such as killing an engine.
"""

import contextlib
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import TypeVar
from uuid import UUID

import structlog

from registry.client import Client
from schemas.api import Complete, Progress
from schemas.common import Closed
from schemas.evidence import Kind
from schemas.failures import Cause
from schemas.problems import EngineFailed, LeaseLost, NotFound, Problem
from schemas.runner import Claim, Report

RENEWALS_PER_LEASE = 3
PROGRESS_SECONDS = 2.0
"""Between two renewals while what the job does changes: whoever follows it sees it move."""
RETRY_SECONDS = (0.25, 10.0)
"""First and longest wait between two tries while the service does not answer."""
MAX_TEXT = 4096
MAX_PROGRESS = 200

ResultT = TypeVar("ResultT")
log = structlog.get_logger("workers.runner")


class Ending(StrEnum):
    """Why a job ends before its work is done."""

    LOST = "lost"
    """Another holds it, or it is no more. Nothing may be said about it."""
    UNWANTED = "unwanted"
    """The service asks to stop and complete."""
    STOPPING = "stopping"
    """This runner stops."""


class JobEnded(Exception):
    """The job is over; `ending` says why. Raised where a job asks, never across its thread."""

    def __init__(self, ending: Ending) -> None:
        """Make it."""
        super().__init__(f"the job is over: {ending}")
        self.ending = ending


class Lease:
    """One held job."""

    def __init__(self, client: Client, claim: Claim) -> None:
        """Hold a job as it was claimed. `keep` starts the renewals."""
        self.claim = claim
        self.ended = threading.Event()
        self._client = client
        self._token = claim.fencing_token
        self._nonce = secrets.token_hex(4)
        self._seconds = claim.lease_seconds
        self._renewed = time.monotonic()
        self._ending: Ending | None = None
        self._is_stopping = False
        self._progress: str | None = None
        self._speech = threading.Lock()
        """Held while a line is on its way, so that none arrives after the result that it led to."""
        self._on_end: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{claim.job}", daemon=True)

    @property
    def job(self) -> UUID:
        """The job's identity."""
        return self.claim.job

    @property
    def token(self) -> int:
        """The fencing token under which the job is held now."""
        return self._token

    def act(self, name: str, number: int) -> str:
        """Name an act that happens anew in every attempt, and in every process that takes an attempt up again."""
        return f"{name}:{self.claim.attempt}:{self._nonce}:{number}"

    @property
    def ending(self) -> Ending | None:
        """Why the job is over; None while it is not."""
        return self._ending

    @property
    def is_lost(self) -> bool:
        """Whether another holds the job, or it is no more."""
        return self._ending is Ending.LOST

    @property
    def is_overdue(self) -> bool:
        """Whether the lease has run out for lack of an answer: anybody may have taken the job, ourselves too."""
        return time.monotonic() - self._renewed > self._seconds * 0.8

    # ------------------------------------------------------------------------------------------- keeping it

    def keep(self) -> None:
        """Start to renew, until `release`."""
        self._thread.start()

    def release(self) -> None:
        """Stop renewing: the work is over."""
        self._released.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def take_over(self, claim: Claim) -> None:
        """Go on under a new token: this runner claimed its own job again, after an outage outlasted the lease."""
        with self._lock:
            self._token = claim.fencing_token
            self._seconds = claim.lease_seconds
            self._renewed = time.monotonic()

    def _keep(self) -> None:
        wait, told = self._seconds / RENEWALS_PER_LEASE, None
        due = time.monotonic() + wait
        while not self._released.wait(max(0.0, min(due - time.monotonic(), PROGRESS_SECONDS))):
            line = self._progress
            if time.monotonic() < due and line == told:
                continue
            is_answered = self.renew()
            told = line if is_answered else None
            wait = self._seconds / RENEWALS_PER_LEASE if is_answered else min(1.0, wait)
            due = time.monotonic() + wait
            if self.is_lost:
                return

    def renew(self) -> bool:
        """Renew once. Returns whether the service answered."""
        token, asked = self._token, time.monotonic()
        try:
            with self._speech:
                said = Progress(fencing_token=token, progress=self._progress)
                renewal = self._client.jobs.renew(self.job, said)
        except (LeaseLost, NotFound) as problem:
            self._refused(token, problem)
            return True
        except Problem as problem:
            log.warning("lease_not_renewed", job=str(self.job), detail=str(problem))
            return False
        with self._lock:
            if token == self._token:
                self._seconds, self._renewed = renewal.lease_seconds, asked
        if not renewal.is_wanted:
            self.end(Ending.UNWANTED)
        return True

    def _refused(self, token: int, problem: Problem) -> None:
        with self._lock:
            is_current = token == self._token
        if is_current:
            log.warning("lease_lost", job=str(self.job), detail=problem.detail)
            self.end(Ending.LOST)

    # ------------------------------------------------------------------------------------------- ending it

    def end(self, ending: Ending) -> None:
        """Say that the job is over. A lost lease outweighs what was said before; else the first word stands."""
        with self._lock:
            self._is_stopping = self._is_stopping or ending is Ending.STOPPING
            if self._ending is None or ending is Ending.LOST:
                self._ending = ending
            is_first = not self.ended.is_set()
            self.ended.set()
            callbacks = self._on_end if is_first else []
        for callback in callbacks:
            callback()

    @contextlib.contextmanager
    def on_end(self, callback: Callable[[], None]) -> Iterator[None]:
        """Have something done at the moment the job ends, from the thread that sees it, while the context lasts."""
        with self._lock:
            is_over = self.ended.is_set()
            if not is_over:
                self._on_end.append(callback)
        if is_over:
            callback()
        try:
            yield
        finally:
            with self._lock:
                if callback in self._on_end:
                    self._on_end.remove(callback)

    def check(self) -> None:
        """Return while the job goes on. Raises JobEnded."""
        if self._ending is not None:
            raise JobEnded(self._ending)

    # ----------------------------------------------------------------------------------------- speaking of it

    def progress(self, line: str) -> None:
        """Say in one line what the job does now; it goes out with the next renewal, within `PROGRESS_SECONDS`."""
        self._progress = line[:MAX_PROGRESS]

    def step(self, line: str) -> None:
        """Say what the job does now, unless it is over. Raises JobEnded."""
        self.check()
        self.progress(line)

    def report(self, kind: Kind, act: str, body: Closed) -> None:
        """Put something into evidence, however long the service needs to answer.

        Args:
            kind: what happened.
            act: its name in the job; repeating it changes nothing.
            body: as the kind's model.

        Raises:
            JobEnded: the lease was lost, or this runner stops before the service answered.
            Problem: the service refuses what was said.
        """
        said = body.model_dump(mode="json", exclude_none=True)
        if kind is Kind.GATE_RECORDED:
            self._fall_silent()
        self.patiently(
            lambda token: self._client.jobs.report(self.job, Report(fencing_token=token, act=act, kind=kind, body=said))
        )

    def _fall_silent(self) -> None:
        """Have no line arrive any more that was said until now: one on its way is waited for, as `report` waits."""
        while not self._speech.acquire(timeout=0.1):
            self._go_on()
        self._progress = None
        self._speech.release()

    def complete(self, problem: str | None = None, detail: str | None = None, *, cause: str | None = None) -> None:
        """End the job, or with a problem put it back for another try, as its `cause` allows. Raises as `report`."""
        text = None if detail is None else (detail or "no detail")[:MAX_TEXT]
        kind = None if problem is None else problem[:256]
        why = Cause(cause) if problem == EngineFailed.kind and cause is not None else None
        self.patiently(
            lambda token: self._client.jobs.complete(
                self.job, Complete(fencing_token=token, problem=kind, detail=text, cause=why)
            )
        )

    def patiently(self, call: Callable[[int], ResultT]) -> ResultT:
        """Ask the service, again and again while it does not answer. `call` takes the fencing token.

        Raises:
            JobEnded: the lease was lost, or this runner stops before the service answered.
            Problem: the service's answer, where trying again would not change it.
        """
        wait, longest = RETRY_SECONDS
        while True:
            if self.is_lost:
                raise JobEnded(Ending.LOST)
            token = self._token
            try:
                return call(token)
            except LeaseLost as problem:
                self._refused(token, problem)
                if self.is_lost:
                    raise JobEnded(Ending.LOST) from problem
            except Problem as problem:
                if not is_passing(problem):
                    raise
                log.warning("service_does_not_answer", job=str(self.job), detail=str(problem))
                self._pause(wait)
                wait = min(longest, wait * 2)

    def _pause(self, seconds: float) -> None:
        """Wait between two tries. What the service asked for (UNWANTED) is no reason to stop speaking to it."""
        deadline = time.monotonic() + seconds * random.uniform(0.75, 1.25)  # noqa: S311 - spreads callers
        while (left := deadline - time.monotonic()) > 0:
            self._go_on()
            time.sleep(min(left, 0.1))

    def _go_on(self) -> None:
        """Return while it makes sense to speak on. Raises JobEnded."""
        if self.is_lost:
            raise JobEnded(Ending.LOST)
        if self._is_stopping:
            raise JobEnded(Ending.STOPPING)


def is_passing(problem: Problem) -> bool:
    """Tell whether a problem is the service's own, and may be gone at the next try."""
    return problem.retryable or problem.status >= 500
