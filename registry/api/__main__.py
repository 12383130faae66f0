"""Serve the HTTP interface: `python -m registry.api --host 127.0.0.1 --port 8080`, settings from the environment.

`--openapi FILE` writes the OpenAPI document and ends; with `--check` it only compares, and exits 1 on a difference.
"""

import argparse
import gc
import json
import math
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError

from registry import db, logs
from registry.api import processes
from registry.api.app import assemble, create_app
from registry.api.metrics import Board
from registry.api.server import Server
from registry.service import Service
from registry.settings import MOST_PROCESSES, Settings, explain

GRACE_SECONDS = 10
LEAST_POOL = 5
"""Connections that a process keeps where the setting has so many. It opens as many again when it has to: for each of
the threads that verify blobs, and for a look at a caller beside them."""
COLLECT_AFTER = 10_000
"""Objects that are there more than before, after which the collector looks at them: a page of a list has a thousand."""
OPTIONS: dict[str, Any] = {"proxy_headers": False, "timeout_graceful_shutdown": GRACE_SECONDS}


def render() -> str:
    """Return the OpenAPI document as it is committed."""
    return json.dumps(assemble().openapi(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Serve, or write the OpenAPI document. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m registry.api", description="Serve the HTTP interface.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", default=8080, type=int, help="port to listen on")
    parser.add_argument(
        "--processes", default=0, type=_count, help="processes that answer; by default SLUICEGATE_API_PROCESSES"
    )
    parser.add_argument("--openapi", type=Path, metavar="FILE", help="write the OpenAPI document and end")
    parser.add_argument("--check", action="store_true", help="with --openapi: compare only")
    chosen = parser.parse_args(arguments)
    if chosen.openapi is not None:
        return _openapi(chosen.openapi, is_check=chosen.check)
    logs.configure()
    _open_more()
    try:
        settings = Settings()
        service = Service.build(settings)
    except ValidationError as error:
        sys.stderr.write(f"settings: {explain(error)}\n")
        return 2
    except DBAPIError as error:
        if not db.is_away(error):
            raise
        sys.stderr.write(f"the database does not answer: {str(error.orig).splitlines()[0]}\n")
        return 4
    count = chosen.processes or settings.api_processes or processes.usual()
    # The server ends in good order when it is told to, and then sends itself the signal again.
    signal.signal(signal.SIGTERM, _ended)
    if count == 1:
        server = Server(create_app(service), host=chosen.host, port=chosen.port, **OPTIONS)
        _settle()
        server.run()
        return 0 if server.started else 3
    # Children connect for themselves.
    service.close()
    return _several(settings, count, chosen.host, chosen.port)


def _several(settings: Settings, count: int, host: str, port: int) -> int:
    try:
        listening = processes.listen(host, port)
    except OSError as error:
        sys.stderr.write(f"{host}:{port} cannot be listened on: {error.strerror or error}\n")
        return 3
    board = Board(count)
    share = settings.model_copy(
        update={
            "database_pool": database_share(settings.database_pool, count),
            "body_places": max(2, math.ceil(settings.body_places / count)),
        }
    )

    def serve(place: int, channel: socket.socket) -> int:
        signal.signal(signal.SIGTERM, _ended)
        server = Server(create_app(Service.build(share), board=board, place=place), channel=channel, **OPTIONS)
        _settle()
        server.run()
        return 0 if server.started else 3

    return processes.Parent(listening, count, serve, grace_seconds=GRACE_SECONDS + 2).run()


def _open_more() -> None:
    """Let this process and its children have as many open files as they may: each connection is one.

    What a shell or systemd gives is often 1,024, and whoever connects beyond that is turned away without an answer.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # more than the kernel has for one process
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _settle() -> None:
    """Keep the collector of cycles from what stays for ever, and from looking whenever an answer made a few objects.

    A look at everything that was loaded takes as long as ten answers, and finds nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


def database_share(pool: int, count: int) -> int:
    """Return how many connections each of `count` processes keeps: an equal share, but no fewer than it needs."""
    return max(math.ceil(pool / count), min(pool, LEAST_POOL))


def _ended(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _count(text: str) -> int:
    count = int(text)
    if not 1 <= count <= MOST_PROCESSES:
        raise argparse.ArgumentTypeError(f"is not from 1 to {MOST_PROCESSES}")
    return count


def _openapi(path: Path, *, is_check: bool) -> int:
    text = render()
    is_stale = not path.exists() or path.read_text("utf-8") != text
    if is_check:
        if is_stale:
            sys.stderr.write(f"{path} is stale; run `make schemas`\n")
        return int(is_stale)
    if is_stale:
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
