"""Ports of a stack: chosen once, then remembered, so that addresses stay the same."""

import errno
import json
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from workers.embedded.layout import DataRefused
from workers.traffic.desired import write_atomically

HOST: Final = "127.0.0.1"
FIRST: Final = 20_000
LAST: Final = 32_000
"""Below the range that Linux takes the ports of outgoing connections from: one of those would be taken at times."""
_TRIES: Final = 200


@dataclass(frozen=True)
class Ports:
    """TCP ports on loopback."""

    api: int
    gateway: int
    broker: int


def choose(path: Path, *, api: int | None = None, gateway: int | None = None) -> Ports:
    """Return the ports of a stack and write them down.

    Args:
        path: where they are remembered.
        api: port asked for; else the one before, else a free one.
        gateway: as for the API.

    Raises:
        DataRefused: somebody else listens on a port that people know. The broker just moves.
    """
    known = _read(path)
    taken = {port for port in (api, gateway, *known.values()) if port}
    chosen: dict[str, int] = {}
    for name, asked in (("api", api), ("gateway", gateway), ("broker", None)):
        port = asked or known.get(name)
        if port is not None and not is_free(port):
            if name != "broker":
                option = "--port" if name == "api" else "--gateway-port"
                text = f"the port {port} of the {name} is in use by another program"
                raise DataRefused(f"{text}; end that one, or name another port with {option}", status=4)
            port = None
        chosen[name] = port or _free(taken)
        taken.add(chosen[name])
    ports = Ports(**chosen)
    if len(set(chosen.values())) != len(chosen):
        raise DataRefused(f"two parts cannot share a port: {chosen}", status=2)
    write_atomically(path, json.dumps(asdict(ports)).encode() + b"\n")
    return ports


def is_free(port: int) -> bool:
    """Tell whether a server could listen on a port of the loopback address now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier start that linger are no reason to move.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError as error:
            if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                return False
            raise
    return True


def _free(taken: set[int]) -> int:
    for _ in range(_TRIES):
        port = FIRST + secrets.randbelow(LAST - FIRST)
        if port not in taken and is_free(port):
            return port
    raise DataRefused(f"no free port was found between {FIRST} and {LAST}", status=4)


def _read(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: port for name, port in found.items() if type(port) is int and 0 < port < 65_536}
