"""A real Valkey on a free loopback port."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from workers.embedded import valkey


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def broker(folder: Path, *, port: int | None = None) -> Iterator[str]:
    """Run a broker while the context lasts, on a free port or on this one; yields its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    command = [valkey.binary(), "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
    with (folder / "valkey.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            ends = time.monotonic() + 20
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    if time.monotonic() > ends or server.poll() is not None:
                        raise
                    time.sleep(0.02)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
