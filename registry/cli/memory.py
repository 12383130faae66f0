"""Remembers what files were read, in the person's cache folder, so that unchanged ones are not read again."""

import sqlite3
import time
from pathlib import Path
from types import TracebackType
from typing import Self

FORGET_SECONDS = 180 * 86_400
_TABLE = "CREATE TABLE IF NOT EXISTS readings (key TEXT PRIMARY KEY, value TEXT NOT NULL, used_at INTEGER NOT NULL)"


class HashMemory:
    """A small database of readings. When it cannot be used, everything is simply read again.

    `trouble` then says why.
    """

    def __init__(self, path: Path) -> None:
        self.trouble: str | None = None
        self._path = path
        self._connection: sqlite3.Connection | None = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._connection = self._open()
        except (OSError, sqlite3.Error) as error:
            self.trouble = f"{path} cannot be used ({error}); every file is read"

    def _open(self) -> sqlite3.Connection:
        try:
            return _prepared(self._path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            self._path.unlink()  # damaged: nothing in it cannot be made again
            return _prepared(self._path)

    def get(self, key: str) -> str | None:
        """Return what was read under this key, or None."""
        if self._connection is None:
            return None
        try:
            row = self._connection.execute("SELECT value FROM readings WHERE key = ?", (key,)).fetchone()
            if row is not None:
                self._connection.execute("UPDATE readings SET used_at = ? WHERE key = ?", (int(time.time()), key))
        except sqlite3.Error as error:
            self._give_up(error)
            return None
        return None if row is None else str(row[0])

    def put(self, key: str, value: str) -> None:
        """Remember a reading."""
        if self._connection is None:
            return
        try:
            self._connection.execute("INSERT OR REPLACE INTO readings VALUES (?, ?, ?)", (key, value, int(time.time())))
        except sqlite3.Error as error:
            self._give_up(error)

    def _give_up(self, error: sqlite3.Error) -> None:
        self.trouble = f"{self._path} cannot be used ({error}); every file is read"
        self.close()

    def close(self) -> None:
        """Give the file back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        """Return the memory."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the file back."""
        self.close()


def _prepared(path: Path) -> sqlite3.Connection:
    # Each statement is its own transaction; a lost write costs one reading, so nothing is flushed to the disk.
    connection = sqlite3.connect(path, timeout=2, isolation_level=None)
    try:
        path.chmod(0o600)
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(_TABLE)
        connection.execute("DELETE FROM readings WHERE used_at < ?", (int(time.time()) - FORGET_SECONDS,))
    except sqlite3.Error:
        connection.close()
        raise
    return connection
