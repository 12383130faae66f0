"""Ends a control worker that takes none of the messages that wait for it, so that its supervisor starts it anew.

Whatever a worker stands still at, it hears no sweep then and moves nothing, and it cannot know that by itself: its loop
may be what stands still. So a thread beside it looks, which needs neither the loop nor the connections of its tasks.
A broker that cannot be had, or that keeps nothing for us, ends nobody: another start would hear no more.
"""

import json
import os
import sys
import threading
import time
import traceback
from datetime import UTC, datetime
from typing import Any, Final

from celery import bootsteps, signals
from celery.worker.state import active_requests

from workers.broker import has_waiting

LOOKS: Final = 6
"""How many looks find messages that wait, nothing heard between them, before a worker ends: it may take them yet."""
LEAVE_SECONDS: Final = 5.0
"""Longest time in which a worker that ends says why."""


class Hearing(bootsteps.StartStopStep):  # type: ignore[misc] # Celery ships no types
    """Looks beside a worker, from its start to its end, whether tasks begin or end in it."""

    silence_seconds = 30.0
    """How long messages may wait for a worker in which no task begins or ends."""

    def __init__(self, parent: Any, **_: Any) -> None:
        """Nothing is looked at yet."""
        super().__init__(parent)
        self._ended, self._heard = threading.Event(), threading.Event()

    def start(self, parent: Any) -> None:
        """Look from now on."""
        signals.task_prerun.connect(self._hear, weak=False)
        signals.task_postrun.connect(self._hear, weak=False)
        threading.Thread(target=self._watch, args=(parent.app,), name="hearing", daemon=True).start()

    def stop(self, _parent: Any) -> None:
        """Look no more: the worker ends."""
        self._ended.set()

    close = terminate = stop

    def _hear(self, **_: Any) -> None:
        self._heard.set()

    def _watch(self, app: Any) -> None:
        queue, unheard = app.conf.task_default_queue, 0
        while not self._ended.wait(self.silence_seconds / LOOKS):
            is_heard = self._heard.is_set()
            self._heard.clear()
            # While something is heard, the broker is not asked. Looks are counted, not time, in which we may have been
            # stopped ourselves. One that finds nothing takes none back: a busy RabbitMQ says so of a queue that it
            # cannot ask in time.
            if is_heard:
                unheard = 0
            elif _waits(app, queue):
                unheard += 1
            if unheard >= LOOKS and not self._heard.is_set():
                _end(queue, self.silence_seconds)


def _waits(app: Any, queue: str) -> bool:
    try:
        return has_waiting(app, queue)
    except Exception as error:  # edge: whatever it is, who looks goes on looking
        _say("look_failed", queue=queue, error=type(error).__name__)
        return False


def _end(queue: str, seconds: float) -> None:
    """End this process at once, whatever its other threads hold, and say what they are at."""
    threading.Thread(target=_leave, daemon=True).start()  # also where nobody reads what we say
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = {
        names.get(ident, str(ident)): [
            f"{one.f_code.co_filename}:{line} {one.f_code.co_name}" for one, line in traceback.walk_stack(frame)
        ]
        for ident, frame in sys._current_frames().items()  # noqa: SLF001 - there is no other way to see them
    }
    _say("not_heard", queue=queue, seconds=seconds, running=len(active_requests), threads=threads)
    os._exit(os.EX_TEMPFAIL)


def _leave() -> None:
    time.sleep(LEAVE_SECONDS)
    os._exit(os.EX_TEMPFAIL)


def _say(event: str, **facts: Any) -> None:
    """Write a line as our logs are, past their lock: a thread that stands still may hold it."""
    line = {**facts, "event": event, "level": "critical", "timestamp": datetime.now(UTC).isoformat()}
    os.write(2, (json.dumps(line) + "\n").encode())
