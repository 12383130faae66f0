"""What the supervisor knows of one process that it keeps running."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Backoff:
    """How long to wait before a part that has ended starts again, and when to give up.

    Args:
        first_seconds: pause after the first end; each further one is three times as long.
        longest_seconds: longest pause.
        crashes: ends within the window that are one too many.
        window_seconds: ends before it are forgotten.
    """

    first_seconds: float = 0.1
    longest_seconds: float = 10.0
    crashes: int = 6
    window_seconds: float = 60.0

    def pause(self, recent: int) -> float | None:
        """Return the pause after so many ends within the window, in seconds; None to give up."""
        if recent >= self.crashes:
            return None
        return min(self.first_seconds * 3.0 ** (recent - 1), self.longest_seconds)


@dataclass(frozen=True)
class Part:
    """One program of the stack.

    Args:
        name: as people read it; its log is `NAME.log`.
        argv: absolute path of the program and its arguments.
        environment: its whole environment.
        workdir: where it runs; must exist.
        after: parts that must be ready before this one starts, and before it starts again.
        is_step: it ends by itself with status 0 and is then ready; anything else must not end.
        ready: asked until it says yes; it returns at once or within half a second, and raises OSError for no.
        ready_text: it is ready once its output has contained this.
        account: user that it runs under, if not this one.
        stop_rank: parts of the lowest rank are stopped first, those of one rank together.
        stop_signal: what asks it to end.
        stop_seconds: how long it may take to end before it is killed.
        before_stop: prepares its end, such as letting streams run out. It runs in a daemon thread of its own, which
            is not waited for once somebody is in a hurry.
    """

    name: str
    argv: tuple[str, ...]
    workdir: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    is_step: bool = False
    ready: Callable[[], bool] | None = None
    ready_text: str | None = None
    account: str | None = None
    stop_rank: int = 0
    stop_signal: signal.Signals = signal.SIGTERM
    stop_seconds: float = 10.0
    before_stop: Callable[[], None] | None = None
