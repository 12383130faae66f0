"""Log files of bounded size, written from the pipes of the parts. A full disk costs lines of them, and nothing else."""

import contextlib
import os
from collections import deque
from pathlib import Path
from typing import Final

CAP_BYTES: Final = 16 * 1024 * 1024
KEPT: Final = 3
TAIL_LINES: Final = 20
_LINE_BYTES: Final = 2000


class CappedLog:
    """Appends to `NAME.log`; a full file becomes `NAME.log.1`, that one `NAME.log.2`, and the oldest goes.

    Args:
        path: of the newest file.
        cap_bytes: size at which a new file is begun.
        kept: how many older files stay.
    """

    def __init__(self, path: Path, *, cap_bytes: int = CAP_BYTES, kept: int = KEPT) -> None:
        self.path = path
        self._cap_bytes = cap_bytes
        self._kept = kept
        self._file = path.open("ab", buffering=0)  # what a full disk refuses is not kept to be refused again
        self._size = path.stat().st_size
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._rest = b""

    def write(self, data: bytes) -> None:
        """Append bytes. A file is only left at the end of a line, unless a line is longer than a whole file."""
        self._renew()
        while data:
            room = self._cap_bytes - self._size
            if len(data) <= room:
                self._append(data)
                return
            cut = data.rfind(b"\n", 0, max(room, 0)) + 1
            if cut == 0 and self._size == 0:
                cut = room
            self._append(data[:cut])
            data = data[cut:]
            self._rotate()

    def tail(self) -> list[str]:
        """Return the last lines written since the start, without control characters."""
        lines = [*self._lines, self._rest] if self._rest else list(self._lines)
        texts = (line[:_LINE_BYTES].decode("utf-8", errors="replace") for line in lines)
        clean = ("".join(c for c in text if c.isprintable() or c == "\t") for text in texts)
        return [text for text in clean if text.strip()][-TAIL_LINES:]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _renew(self) -> None:
        """Begin the file anew when somebody took it away, with its folder or alone: otherwise nobody reads the rest."""
        if os.fstat(self._file.fileno()).st_nlink:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            fresh = self.path.open("ab", buffering=0)
            self._file.close()
            self._file, self._size = fresh, 0

    def _append(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._size += self._file.write(data) or 0
        *lines, rest = (self._rest + data).split(b"\n")
        self._lines.extend(lines)
        self._rest = rest[: 2 * _LINE_BYTES]

    def _rotate(self) -> None:
        with contextlib.suppress(OSError):
            for number in range(self._kept, 0, -1):
                older = self._numbered(number - 1)
                if older.exists():
                    older.replace(self._numbered(number))
            fresh = self.path.open("wb", buffering=0)
            self._file.close()
            self._file = fresh
        self._size = 0

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path
