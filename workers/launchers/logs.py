"""What an engine writes, kept by size and by time while it goes on writing.

The engine writes to its file itself, since a pipe would break when the worker is lost. So a full file is not renamed
but copied and emptied: it is open for append, and the engine's next line is its first.
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

LOG_CAP_BYTES = 16 * 1024 * 1024
TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
_LINE_CHARACTERS = 2000


@dataclass(frozen=True)
class Keeping:
    """How much of an engine's log is kept: what it writes to now, and so many earlier pieces, NAME.1 the latest.

    `cap_bytes` ends a piece by size and keeps the newer half of it, `age_seconds` by time and keeps all of it; pieces
    older than `keep_seconds` are removed. Looked at every `look_seconds`. At most `cap_bytes` × (1 + pieces), and what
    is written between two looks.
    """

    cap_bytes: int = LOG_CAP_BYTES
    age_seconds: float = 86_400.0
    keep_seconds: float = 7 * 86_400.0
    pieces: int = 4
    look_seconds: float = 1.0


KEEPING = Keeping()


def tail(log_path: Path, lines: int = TAIL_LINES) -> list[str]:
    """Return the last lines of a log, without control characters, each at most 2000 characters long."""
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - _TAIL_BYTES))
            text = file.read()
    except FileNotFoundError:
        return []
    return cleaned(text.decode("utf-8", errors="replace"), lines)


def cleaned(text: str, lines: int) -> list[str]:
    """Return the last lines of a text that somebody else wrote, fit to be shown and stored."""
    clean = ("".join(c for c in line if c.isprintable() or c == "\t") for line in text.splitlines())
    return [line[:_LINE_CHARACTERS] for line in clean if line.strip()][-lines:]


def trim(log_path: Path, cap_bytes: int = LOG_CAP_BYTES) -> None:
    """Keep a log below its cap: move the newer half to `NAME.1` and empty the file, which is open for append.

    Lines written between the copy and the emptying are lost; nothing decides by them.
    """
    rotate(log_path, Keeping(cap_bytes=cap_bytes), age_seconds=0.0)


def rotate(log_path: Path, keeping: Keeping, *, age_seconds: float) -> bool:
    """End a piece of a log that is full or old, and remove pieces that are too many or too old.

    Args:
        log_path: the file that is written to.
        keeping: how much is kept.
        age_seconds: since when this piece is written to.

    Returns:
        Whether a new piece has begun.
    """
    _remove_old(log_path, keeping)
    try:
        size = log_path.stat().st_size
    except FileNotFoundError:
        return False
    if size <= keeping.cap_bytes and (size == 0 or age_seconds < keeping.age_seconds):
        return False
    for number in range(keeping.pieces - 1, 0, -1):
        if (earlier := _piece(log_path, number)).exists():
            earlier.replace(_piece(log_path, number + 1))
    kept = size if size <= keeping.cap_bytes else keeping.cap_bytes // 2
    with log_path.open("r+b") as file:
        file.seek(size - kept)
        try:
            _piece(log_path, 1).write_bytes(file.read(kept))
        except OSError:
            _piece(log_path, 1).unlink(missing_ok=True)
            if size <= keeping.cap_bytes:
                raise
            # Where there is no room for a copy, its end is better lost than a disk that it goes on to fill.
        file.truncate(0)
    return True


def _piece(log_path: Path, number: int) -> Path:
    return log_path.with_name(f"{log_path.name}.{number}")


def _remove_old(log_path: Path, keeping: Keeping) -> None:
    oldest = time.time() - keeping.keep_seconds
    for number in range(1, keeping.pieces + 1):
        piece = _piece(log_path, number)
        try:
            if piece.stat().st_mtime < oldest:
                piece.unlink()
        except FileNotFoundError:
            continue


class Keeper:
    """Keeps the logs of running engines in a thread of its own, which ends when there is none left to look after."""

    def __init__(self, keeping: Keeping = KEEPING) -> None:
        """Keep logs in this way."""
        self._keeping = keeping
        self._begun: dict[Path, float] = {}
        self._lock = threading.Lock()
        self._is_running = False
        self._bell = threading.Event()

    def watch(self, log_path: Path) -> None:
        """Look after a log from now on."""
        with self._lock:
            self._begun[log_path] = time.monotonic()
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="logs", daemon=True).start()

    def leave(self, log_path: Path) -> None:
        """Look after a log no more."""
        with self._lock:
            self._begun.pop(log_path, None)

    def look(self) -> None:
        """Look at every log once. A log that cannot be rotated, as on a full disk, is left for the next look."""
        with self._lock:
            begun = dict(self._begun)
        for path, since in begun.items():
            try:
                is_new = rotate(path, self._keeping, age_seconds=time.monotonic() - since)
            except OSError:
                continue
            with self._lock:
                if is_new and path in self._begun:
                    self._begun[path] = time.monotonic()

    def _run(self) -> None:
        while True:
            self._bell.wait(self._keeping.look_seconds)
            with self._lock:
                if not self._begun:
                    self._is_running = False
                    return
            self.look()
