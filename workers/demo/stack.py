"""The stack under the demonstration: `sluicegate up` as a process of its own, in a directory of its own."""

import json
import os
import signal
import subprocess
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.embedded.launch import command

STOP_SECONDS: Final = 180.0
"""The stack lets streams, jobs and engines end before it ends itself."""
TAIL_LINES: Final = 15
_LINE_BYTES: Final = 4096


class StackFailed(Exception):
    """The stack did not start, or has ended. The text says what it said last."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a stack tells of itself once it is ready."""

    url: str
    token: str
    runner_class: str
    ready_seconds: float


class Stack:
    """One stack. Use `start`, then `stop`, whatever happens between them.

    Args:
        root: folder of the demonstration; the stack's data go into a folder of it.
        arguments: further arguments of `sluicegate up`.
    """

    def __init__(self, root: Path, *arguments: str) -> None:
        self.data = root / "stack"
        self.logs = self.data / "logs"
        self.said = root / "stack.log"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Facts:
        """Start it and wait until it is ready.

        Raises:
            StackFailed: it ended instead.
        """
        argv = [sys.executable, "-P", "-m", "workers.embedded", "--data", str(self.data), "--json", *self._arguments]
        with self.said.open("ab") as said:
            self._process = subprocess.Popen(
                # It gets SIGTERM when this process is killed, and stops in order then too.
                command(argv, death_signal=signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                env=python_environment(),
                start_new_session=True,  # Ctrl-C is for the demonstration, which stops the stack when it is ready to
            )
        out = self._process.stdout
        line = out.readline() if out is not None else b""
        try:
            told: dict[str, Any] = json.loads(line)
            return Facts(told["url"], told["token"], told["runner_class"], float(told["ready_seconds"]))
        except (ValueError, KeyError, TypeError) as error:
            # What it refuses is one object over several lines. It has ended, or is about to: then all is written.
            self._process.send_signal(signal.SIGTERM)
            refused = line + (out.read() if out is not None else b"")
            self.stop()
            raise StackFailed(f"the stack did not start: {_why(refused) or _last(self.said)}") from error

    def check(self) -> None:
        """Return while the stack runs. Raises StackFailed."""
        if self._process is None or self._process.poll() is not None:
            raise StackFailed(f"the stack has ended: {_last(self.said)}")

    def stop(self) -> None:
        """Stop it and wait for its end."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def last_words(self) -> str:
        """Return the last lines of the parts that move a release."""
        parts = [(part, self.logs / f"{part}.log") for part in ("control", "runner", "api")]
        return "\n".join(f"{part}.log:\n{last_lines(path)}" for part, path in parts if path.exists())


def python_environment() -> dict[str, str]:
    """Return this process's environment without settings of Sluicegate: none of a person's may leak in here."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLUICEGATE_")}


def _why(refused: bytes) -> str | None:
    """Return why a stack does not start, from the problem that it told; None where that is none."""
    try:
        return str(json.loads(refused)["detail"])
    except (ValueError, KeyError, TypeError):
        return None


def _last(said: Path) -> str:
    return f"it said last:\n{last_lines(said)}"


def last_lines(path: Path, count: int = TAIL_LINES) -> str:
    """Return the last lines of a log, without control characters; what cannot be read has none."""
    lines: deque[bytes] = deque(maxlen=count)
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - count * _LINE_BYTES))
        lines.extend(file.read().splitlines())
    texts = (line[:_LINE_BYTES].decode("utf-8", "replace") for line in lines)
    return "\n".join("  " + "".join(c if c.isprintable() else " " for c in text) for text in texts)
