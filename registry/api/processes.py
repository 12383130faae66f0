"""Several processes behind one address: a parent takes connections and hands them out in turns, children answer.

Only the parent holds the listening socket, so the port is free as soon as the parent has ended, however it did. A child
knows that by the end of the channel between them, and ends at once, as its parent did. A child that ends is replaced;
the others take its turns meanwhile, and while there is none, connections wait.
"""

import gc
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Final, Never

import structlog

BACKLOG: Final = 2048
MOST_AT_ONCE: Final = 64
"""Connections taken in one turn: children are looked after between two."""
MOST: Final = 4
"""Processes that are started when nobody says how many."""
FIRST_PAUSE_SECONDS: Final = 0.1
MOST_PAUSE_SECONDS: Final = 5.0
STEADY_SECONDS: Final = 10.0
"""A child that has lived so long did not end because of how it began."""
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

log = structlog.get_logger("registry.api")


def usual() -> int:
    """Return how many processes there are when nobody says: one a processor, of few."""
    return max(1, min(MOST, len(os.sched_getaffinity(0))))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP: otherwise asyncio leaves Nagle's algorithm on, and each answer waits 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    listening.settimeout(0)
    return listening


@dataclass(slots=True)
class _Child:
    place: int
    pid: int = 0
    channel: socket.socket | None = None
    began: float = 0.0
    pause: float = FIRST_PAUSE_SECONDS
    due: float = 0.0
    """When it is started again, after it has ended."""


class Parent:
    """Runs children until it is told to end.

    `serve` is what a child does: it gets its place, from 0, and the channel over which connections come, and returns
    its exit status. It is called after a fork, so this process must have one thread and no connections.
    """

    def __init__(
        self, listening: socket.socket, count: int, serve: Callable[[int, socket.socket], int], *, grace_seconds: float
    ) -> None:
        """Prepare `count` children. They get `grace_seconds` to end when they are told to."""
        self._listening, self._serve, self._grace = listening, serve, grace_seconds
        self._children = [_Child(place) for place in range(count)]
        self._selector = selectors.DefaultSelector()
        self._turn = 0
        self._is_listening = False
        self._waiting: socket.socket | None = None
        """A connection that was taken when the last child had just gone."""
        self._is_ending = False

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT. Returns the exit status."""
        gc.collect()
        # What was loaded before the fork stays shared: collecting would touch, and so copy, all of it.
        gc.freeze()
        inner, outer = socket.socketpair()
        inner.settimeout(0)
        outer.settimeout(0)
        signal.set_wakeup_fd(outer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._ask)
        signal.signal(signal.SIGCHLD, _nothing)
        self._closed_in_children = (inner, outer)
        self._selector.register(inner, selectors.EVENT_READ)
        while not self._is_ending:
            self._start_due()
            self._listen()
            ready = {key.fileobj for key, _ in self._selector.select(self._timeout())}
            if inner in ready:
                inner.recv(4096)
            self._bury()
            if self._listening in ready:
                self._take()
        return self._end()

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self._is_ending = True

    def _timeout(self) -> float | None:
        waits = [child.due - time.monotonic() for child in self._children if not child.pid]
        return max(0.0, min(waits)) if waits else None

    def _start_due(self) -> None:
        for child in self._children:
            if not child.pid and child.due <= time.monotonic():
                self._start(child)

    def _start(self, child: _Child) -> None:
        opened: tuple[socket.socket, ...] = ()
        try:
            opened = mine, its = socket.socketpair()
            pid = os.fork()
        except OSError as error:
            for end in opened:
                end.close()
            log.warning("process_not_started", detail=str(error), again_in=child.pause)
            _postpone(child)
            return
        if pid == 0:
            self._become(child.place, its, mine)
        its.close()
        mine.settimeout(0)
        child.pid, child.channel, child.began = pid, mine, time.monotonic()

    def _become(self, place: int, channel: socket.socket, mine: socket.socket) -> Never:
        """Be a child, and end as one: nothing of the parent's is run on the way out."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (*SIGNALS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            self._selector.close()
            others = [one.channel for one in self._children if one.channel is not None]
            if self._waiting is not None:
                others.append(self._waiting)
            for inherited in (self._listening, mine, *self._closed_in_children, *others):
                inherited.close()
            status = self._serve(place, channel)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        except BaseException as error:  # edge: whatever ended a child is in its log, and its parent goes on
            log.exception("process_failed", error=repr(error))
        finally:
            os._exit(status)

    @property
    def _is_served(self) -> bool:
        """Whether a child takes connections, as far as is known."""
        return any(child.channel is not None for child in self._children)

    def _listen(self) -> None:
        """Look for connections only while a child takes them: else they wait where nobody turns them away."""
        if self._is_served and self._waiting is not None:
            connection, self._waiting = self._waiting, None
            self._pass_on(connection)
        if self._is_served is not self._is_listening:
            self._is_listening = not self._is_listening
            if self._is_listening:
                self._selector.register(self._listening, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listening)

    def _take(self) -> None:
        """Take some of what has connected."""
        for _ in range(MOST_AT_ONCE):
            if not self._is_served:
                return
            try:
                connection, _ = self._listening.accept()
            except OSError:  # none left, or the caller has gone
                return
            self._pass_on(connection)

    def _pass_on(self, connection: socket.socket) -> None:
        """Hand a connection to the next child; to another where that one takes nothing now."""
        for _ in self._children:
            child = self._children[self._turn % len(self._children)]
            self._turn += 1
            if _hand(child, connection):
                break
        else:
            if not self._is_served:
                self._waiting = connection
                return
            log.error("connection_refused", detail="no process takes connections")
        connection.close()

    def _bury(self) -> None:
        for child in self._children:
            if not child.pid:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                if time.monotonic() - child.began >= STEADY_SECONDS:
                    child.pause = FIRST_PAUSE_SECONDS
                log.error("process_ended", process=pid, status=os.waitstatus_to_exitcode(status), again_in=child.pause)
                _close(child)
                child.pid = 0
                _postpone(child)

    def _end(self) -> int:
        """Take no more connections, and let the children finish their answers."""
        self._listening.close()
        if self._waiting is not None:
            self._waiting.close()
        running = [child for child in self._children if child.pid]
        for child in running:
            os.kill(child.pid, signal.SIGTERM)
        ends = time.monotonic() + self._grace
        while running and time.monotonic() < ends:
            running = [child for child in running if not os.waitpid(child.pid, os.WNOHANG)[0]]
            if running:
                time.sleep(0.02)
        for child in running:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        return 0


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Only the wake-up counts: without a handler there would be none."""


def _hand(child: _Child, connection: socket.socket) -> bool:
    if child.channel is None:
        return False
    try:
        return socket.send_fds(child.channel, [b"c"], [connection.fileno()]) == 1
    except ConnectionError:  # it has ended, or is about to
        _close(child)
        return False
    except OSError:  # it takes nothing for a while
        return False


def _close(child: _Child) -> None:
    if child.channel is not None:
        child.channel.close()
    child.channel = None


def _postpone(child: _Child) -> None:
    child.due = time.monotonic() + child.pause
    child.pause = min(2 * child.pause, MOST_PAUSE_SECONDS)
