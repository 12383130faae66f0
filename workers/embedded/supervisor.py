"""Starts parts in their order, starts them again when they end, and stops them in the reverse order.

One thread and one selector: the parts' output, their ends and the signals to this process all wake the same loop,
so nothing is polled but readiness. Every part is started by this thread: the kernel tells a child of its parent's
death when the *thread* that started it is gone.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Final

from workers.embedded import launch, processes
from workers.embedded.logs import CappedLog
from workers.embedded.part import Backoff, Part
from workers.launchers.process import Launched, boot_id, start_time

READY_POLL_SECONDS: Final = 0.05
KILLED_SECONDS: Final = 5.0
HURRIED_SECONDS: Final = 3.0
ONE_ASKING_SECONDS: Final = 1.0
"""Within it, further signals are the same request: a terminal and a wrapper may both pass one on."""
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CHUNK_BYTES: Final = 65_536


class Ending(StrEnum):
    """Why a stack came to its end."""

    ASKED = "asked"
    CRASHING = "crashing"
    NOT_READY = "not_ready"


@dataclass(frozen=True)
class Outcome:
    """How it ended. `reason` is a sentence for people, `tail` the last log lines of the part at fault."""

    ending: Ending
    reason: str = ""
    tail: Sequence[str] = ()


@dataclass
class _Run:
    """One part and what became of it so far."""

    part: Part
    log: CappedLog
    process: "subprocess.Popen[bytes] | None" = None
    identity: Launched | None = None
    pidfd: int = -1
    is_ready: bool = False
    is_done: bool = False
    seen: str = ""
    last_end: str = ""
    not_before: float = 0.0
    ends: deque[float] = field(default_factory=deque)


class Supervisor:
    """Runs a set of parts until it is asked to stop or one of them cannot be kept up.

    Args:
        parts: what to run. A part may only come after parts that are listed before it.
        logs: folder of the log files.
        record: file that names the running processes, for the next start.
        say: prints one line for people.
        backoff: of parts that end.
    """

    def __init__(
        self,
        parts: Iterable[Part],
        *,
        logs: Path,
        record: Path,
        say: Callable[[str], None],
        backoff: Backoff | None = None,
    ) -> None:
        self.stopping = threading.Event()
        """Set as soon as the stack begins to stop, for whatever reason."""
        self._runs = {part.name: _Run(part, CappedLog(logs / f"{part.name}.log")) for part in parts}
        self._record = record
        self._say = say
        self._backoff = backoff or Backoff()
        self._selector = selectors.DefaultSelector()
        self._asked = 0
        self._asked_at = 0.0
        self._failure: Outcome | None = None
        self._boot_id = boot_id()

    def run(self, on_ready: Callable[[], None], *, wait_seconds: float) -> Outcome:
        """Start everything, call `on_ready` once when all parts are ready, and return when all have ended.

        SIGINT, SIGTERM and SIGHUP ask for the stop; a second one cuts the waiting short.

        Args:
            on_ready: called once.
            wait_seconds: longest time until everything is ready for the first time.
        """
        deadline = time.monotonic() + wait_seconds
        was_ready = False
        with self._signals():
            try:
                while not self._asked and self._failure is None:
                    self._start_due()
                    if not was_ready and all(run.is_ready for run in self._runs.values()):
                        was_ready = True
                        on_ready()
                    elif not was_ready and time.monotonic() >= deadline:
                        self._failure = self._late(wait_seconds)
                        break
                    self._turn(self._pause(None if was_ready else deadline))
            finally:
                self._stop()
        return self._failure or Outcome(Ending.ASKED)

    def running(self) -> dict[str, int]:
        """Return the process ids of the parts that run."""
        return {name: run.process.pid for name, run in self._runs.items() if run.process is not None}

    def _late(self, wait_seconds: float) -> Outcome:
        late = [run for run in self._runs.values() if not run.is_ready]
        names = ", ".join(run.part.name for run in late)
        return Outcome(Ending.NOT_READY, f"not ready after {wait_seconds:g} s: {names}", late[0].log.tail())

    # ------------------------------------------------------------------------------------------ the loop

    def _pause(self, deadline: float | None) -> float | None:
        """Return how long nothing can be due, in seconds; None for ever."""
        now = time.monotonic()
        moments = [] if deadline is None else [deadline]
        for run in self._runs.values():
            if run.process is not None and not run.is_ready:
                moments.append(now + READY_POLL_SECONDS)
            elif run.process is None and not run.is_done and self._may_start(run):
                moments.append(run.not_before)
        return max(0.0, min(moments) - now) if moments else None

    def _turn(self, timeout: float | None) -> None:
        """Wait for output, an end, a signal or the time-out, and deal with what came."""
        for key, _ in self._selector.select(timeout):
            handle: Callable[[], None] = key.data
            handle()
        for run in self._runs.values():
            if run.process is not None and not run.is_ready and not run.part.is_step and self._looks_ready(run):
                run.is_ready = True
                self._say(f"{run.part.name} is ready")

    def _looks_ready(self, run: _Run) -> bool:
        part = run.part
        if part.ready_text is not None and part.ready_text not in run.seen:
            return False
        try:
            return part.ready is None or part.ready()
        except OSError:
            return False

    def _may_start(self, run: _Run) -> bool:
        return all(self._runs[name].is_ready for name in run.part.after)

    def _start_due(self) -> None:
        now = time.monotonic()
        for run in self._runs.values():
            if run.process is None and not run.is_done and run.not_before <= now and self._may_start(run):
                self._start(run)

    def _start(self, run: _Run) -> None:
        part = run.part
        number = signal.SIGINT if part.stop_signal is signal.SIGINT else signal.SIGTERM
        try:
            process = subprocess.Popen(
                launch.command(part.argv, death_signal=number, account=part.account),
                cwd=part.workdir,
                env=dict(part.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for the supervisor alone
                umask=0o077,
            )
        except OSError as error:
            run.last_end = f"cannot be started: {error}"
            self._crashed(run)
            return
        assert process.stdout is not None  # noqa: S101 - asked for above
        run.process, run.is_ready, run.seen = process, False, ""
        run.identity = Launched(process.pid, start_time(process.pid) or "", self._boot_id)
        run.pidfd = os.pidfd_open(process.pid)
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, lambda: self._read(run))
        self._selector.register(run.pidfd, selectors.EVENT_READ, lambda: self._ended(run))
        self._write_record()

    def _read(self, run: _Run) -> None:
        """Move what a part wrote to its log."""
        stream = run.process.stdout if run.process is not None else None
        if stream is None:
            return
        while True:
            try:
                data = os.read(stream.fileno(), _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not data:  # it closed its output, and may yet live
                with contextlib.suppress(KeyError):
                    self._selector.unregister(stream)
                return
            run.log.write(data)
            if run.part.ready_text is not None and not run.is_ready:
                run.seen = (run.seen + data.decode("utf-8", errors="replace"))[-_CHUNK_BYTES:]

    def _ended(self, run: _Run) -> None:
        """Take note that a part has ended: a step that is done, or a crash."""
        process = run.process
        if process is None:
            return
        status = process.wait()
        self._read(run)
        self._selector.unregister(run.pidfd)
        os.close(run.pidfd)
        if process.stdout is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(process.stdout)
            process.stdout.close()
        run.process, run.identity, run.is_ready = None, None, False
        run.last_end = f"ended by signal {-status}" if status < 0 else f"exited with status {status}"
        self._write_record()
        if run.part.is_step and status == 0:
            run.is_ready = run.is_done = True
        elif not self._asked and self._failure is None:
            self._crashed(run)

    def _crashed(self, run: _Run) -> None:
        now, window = time.monotonic(), self._backoff.window_seconds
        run.ends.append(now)
        while now - run.ends[0] > window:
            run.ends.popleft()
        times = len(run.ends)
        pause = self._backoff.pause(times)
        if pause is None:
            reason = f"{run.part.name} {run.last_end}, {times} times within {window:g} s; see {run.log.path}"
            self._failure = Outcome(Ending.CRASHING, reason, run.log.tail())
            return
        run.not_before = now + pause
        self._say(f"{run.part.name} {run.last_end}; it starts again in {pause:g} s (see {run.log.path})")

    def _write_record(self) -> None:
        running = [(run.part, run.identity) for run in self._runs.values() if run.identity is not None]
        running.sort(key=lambda each: each[0].stop_rank)
        try:
            processes.record(self._record, [(part.name, identity) for part, identity in running])
        except OSError as error:
            # A full disk ends no part. Should this process be killed now, its parts still end with it.
            self._say(f"{self._record.name} cannot be written: {error.strerror}")

    # ------------------------------------------------------------------------------------------ the end

    def _stop(self) -> None:
        self._asked = max(self._asked, 1)
        self.stopping.set()
        for rank in sorted({run.part.stop_rank for run in self._runs.values()}):
            self._stop_together([run for run in self._runs.values() if run.part.stop_rank == rank])
        for run in self._runs.values():
            run.log.close()
        self._selector.close()
        self._record.unlink(missing_ok=True)

    def _stop_together(self, runs: Sequence[_Run]) -> None:
        self._prepare_stop([run for run in runs if run.process is not None])
        alive = [run for run in runs if run.process is not None]
        for run in alive:
            self._signal(run, run.part.stop_signal)
        self._await_end(alive, max((run.part.stop_seconds for run in alive), default=0.0))
        for run in alive:
            if run.process is not None:
                self._say(f"{run.part.name} did not end in time and is killed")
                self._signal(run, signal.SIGKILL)
        self._await_end(alive, KILLED_SECONDS)

    def _prepare_stop(self, runs: Sequence[_Run]) -> None:
        """Let parts prepare their end in threads, while their output is still read here."""
        threads = [
            threading.Thread(target=run.part.before_stop, name=f"stop-{run.part.name}", daemon=True)
            for run in runs
            if run.part.before_stop is not None
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not self._is_hurried():
            self._turn(READY_POLL_SECONDS)

    def _await_end(self, runs: Sequence[_Run], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(run.process is not None for run in runs):
            left = deadline - time.monotonic()
            if left <= 0 or (self._is_hurried() and left < seconds - HURRIED_SECONDS):
                return
            self._turn(min(left, 0.5))

    def _is_hurried(self) -> bool:
        """Tell whether the stop was asked for a second time."""
        return self._asked > 1

    def _signal(self, run: _Run, number: signal.Signals) -> None:
        # The process is our child and has not been waited for, so the pid is still its own.
        if run.process is not None:
            with contextlib.suppress(ProcessLookupError):
                if number is signal.SIGKILL:
                    os.killpg(run.process.pid, number)
                else:
                    run.process.send_signal(number)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Let signals ask for the stop, and wake the loop."""

        def ask(_number: int, _frame: FrameType | None) -> None:
            now = time.monotonic()
            if now - self._asked_at > ONE_ASKING_SECONDS:
                self._asked, self._asked_at = self._asked + 1, now

        inner, outer = socket.socketpair()
        inner.settimeout(0)
        outer.settimeout(0)
        self._selector.register(inner, selectors.EVENT_READ, lambda: _drop(inner))
        # Under nohup SIGHUP is ignored and stays so.
        heeded = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, ask) for number in heeded}
        wakeup = signal.set_wakeup_fd(outer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            inner.close()
            outer.close()


def _drop(inner: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        inner.recv(4096)
