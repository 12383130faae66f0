"""Becomes an engine that must not outlive another process, and that knows no way of its own to see to it.

    python -I -S guarded.py PID COMMAND WORD…

Run as a script by drivers; it imports nothing of ours. A child stays behind that kills the engine's process group when
process PID is gone, or when the engine's first process has ended and left others. A thread would not outlive exec, and
the kernel's own signal comes when the *thread* ends that forked us: workers start engines from pool threads.

Exit status: 1 when process PID is gone already, 2 when the command cannot be run; otherwise the engine's.
"""

import contextlib
import os
import select
import signal
import sys

EXIT_GONE, EXIT_USAGE = 1, 2


def _fail(status: int, text: str) -> int:
    sys.stderr.write(f"guarded: error: {text}\n")
    return status


def leave_guard(parent: int) -> None:
    """Leave a child that ends this process's group with `parent` or with this process. Raises ProcessLookupError."""
    of_parent, of_engine = os.pidfd_open(parent), os.pidfd_open(os.getpid())
    if os.getppid() != parent:  # it ended, and its number was given away, before we looked
        raise ProcessLookupError
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # what the guard kills must be the engine's alone
    if os.fork():
        os.close(of_parent)
        os.close(of_engine)
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what asks the engine to drain is not for its guard
    waiting = select.poll()
    waiting.register(of_parent, select.POLLIN)
    waiting.register(of_engine, select.POLLIN)
    waiting.poll()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)


def main(words: list[str]) -> int:
    """Leave the guard, become the command."""
    if len(words) < 2 or not words[0].isdecimal():
        return _fail(EXIT_USAGE, "guarded.py PID COMMAND WORD…")
    parent, command = int(words[0]), words[1:]
    try:
        leave_guard(parent)
    except ProcessLookupError:
        return _fail(EXIT_GONE, f"process {parent} is not there, or not what started this one")
    try:
        os.execv(command[0], command)  # noqa: S606 - there is no shell, on purpose
    except OSError as error:
        return _fail(EXIT_USAGE, f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
