"""What lies where in a data directory, and that it is ours alone."""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from workers.traffic.desired import write_atomically

MARKER: Final = "sluicegate.json"
SCHEMA: Final = "sluicegate.dev/data/v1"
_LONGEST_FOLDER_BYTES: Final = 80
"""A socket's address has 107 bytes; PostgreSQL and a slash take up to 27 of them."""
_SECRET_BYTES: Final = 32


class DataRefused(Exception):
    """The data directory cannot be used. The text says why and what to do; `status` is the exit status."""

    def __init__(self, text: str, *, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Layout:
    """The paths of one data directory. `root` is absolute and resolved."""

    root: Path

    @property
    def postgres(self) -> Path:
        """Data of PostgreSQL; it belongs to the account that PostgreSQL runs under."""
        return self.root / "postgres"

    @property
    def valkey(self) -> Path:
        """Working folder and configuration of the broker."""
        return self.root / "valkey"

    @property
    def blobs(self) -> Path:
        """Content-addressed blobs."""
        return self.root / "blobs"

    @property
    def gateway(self) -> Path:
        """Envoy's documents and access log."""
        return self.root / "gateway"

    @property
    def runner(self) -> Path:
        """Staged files, engines' logs and replicas of the runner."""
        return self.root / "runner"

    @property
    def logs(self) -> Path:
        """One log a part."""
        return self.root / "logs"

    @property
    def secrets(self) -> Path:
        """Tokens, the broker's password and the signing key."""
        return self.root / "secrets"

    @property
    def signing_key(self) -> Path:
        """Key that signs evidence."""
        return self.secrets / "signing-key.pem"

    @property
    def processes(self) -> Path:
        """Which processes run now."""
        return self.root / "processes.json"

    @property
    def login(self) -> Path:
        """Address and token, in the form that the command line reads."""
        return self.root / "config.json"

    @cached_property
    def run(self) -> Path:
        """Folder of sockets: in the data directory, or one in /tmp where that path is too long for a socket."""
        inside = self.root / "run"
        text = os.fsencode(inside)
        # A comma would separate two folders in PostgreSQL's setting, and a quote would begin a quoted one.
        if len(text) <= _LONGEST_FOLDER_BYTES and not set(text) & set(b",\"'"):
            return inside
        name = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]
        # Not tempfile.gettempdir(): TMPDIR may be as long, and this must be found again by the next start.
        return Path("/tmp") / f"sluicegate-{os.getuid()}-{name}"  # noqa: S108 - made and checked by private_folder

    @property
    def sockets(self) -> Path:
        """Folder of PostgreSQL's socket."""
        return self.run / "postgres"

    def prepare(self) -> None:
        """Make the folders that are missing.

        Raises:
            DataRefused: the place is somebody else's, or holds something else.
        """
        try:
            _claim(self.root)
            for folder in (self.valkey, self.blobs, self.gateway, self.runner, self.logs, self.secrets, self.run):
                private_folder(folder)
        except OSError as error:
            text = f"the data directory {self.root} cannot be used: {error.strerror}"
            raise DataRefused(f"{text}; name another one with --data", status=4) from error

    def clear(self) -> None:
        """Remove the folder of sockets where it is not in the data directory. Nothing may run any more."""
        if self.run.parent != self.root:
            shutil.rmtree(self.run, ignore_errors=True)

    def secret(self, name: str, *, prefix: str = "") -> str:
        """Return a secret that is made once and then kept in a file of mode 0600."""
        path = self.secrets / name
        with contextlib.suppress(FileNotFoundError):
            return path.read_text("ascii").strip()
        write_private(path, f"{prefix}{secrets.token_urlsafe(_SECRET_BYTES)}\n")
        return path.read_text("ascii").strip()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the data directory for this process. The lock ends with the process, however that ends.

        Raises:
            DataRefused: another process holds it.
        """
        path = self.root / "lock"
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = file.read().strip() or "unknown"
                text = f"{self.root} is in use by the process {holder}; end that one, or name another one with --data"
                raise DataRefused(text, status=4) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            try:
                yield
            finally:
                file.seek(0)
                file.truncate(0)


def write_private(path: Path, text: str) -> None:
    """Replace a file by one of mode 0600, in one rename."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def private_folder(path: Path) -> None:
    """Make a folder that nobody else can enter, or check that an existing one is such.

    Raises:
        DataRefused: it is another user's or a link, so somebody may have put it in our way.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise DataRefused(f"{path} is not a folder of this user; remove it, or name another one with --data", status=4)
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)


def _claim(root: Path) -> None:
    """Make the data directory, or see that it is one: never fill a folder that holds something else."""
    marker = root / MARKER
    if root.exists() and not root.is_dir():
        raise DataRefused(f"{root} is not a folder; name another one with --data", status=2)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not marker.exists():
        foreign = [each for each in root.iterdir() if not each.name.startswith(f".{MARKER}")]
        if foreign and not marker.exists():  # asked again: another start may have come first
            text = f"{root} holds something else than Sluicegate's data"
            raise DataRefused(f"{text}; name an empty or new folder with --data", status=2)
        private_folder(root)
        write_atomically(marker, json.dumps({"schema": SCHEMA}).encode() + b"\n")
    try:
        document: Any = json.loads(marker.read_bytes())
        schema = document["schema"]
    except (ValueError, KeyError, TypeError):
        schema = None
    if schema != SCHEMA:
        raise DataRefused(f"{root} was written in another form ({schema}); this version reads {SCHEMA}", status=2)
    private_folder(root)
