"""A door before a service that can be shut and opened again: nobody is there, as when the service is away."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit


class Door:
    """Forwards TCP connections to one address while it is open. `url` stays the same."""

    def __init__(self, url: str) -> None:
        """Stand before a service, open."""
        parts = urlsplit(url)
        self._behind = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._is_open = True
        self._ends: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def shut(self) -> None:
        """Cut every connection, and cut new ones at once."""
        self._is_open = False
        with self._lock:
            ends = list(self._ends)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def open(self) -> None:
        """Let connections through again."""
        self._is_open = True

    def close(self) -> None:
        """Take the door away."""
        self.shut()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                front, _ = self._listening.accept()
            except OSError:
                return
            if not self._is_open:
                front.close()
                continue
            back = socket.create_connection(self._behind)
            ended: list[socket.socket] = []
            for one, other in ((front, back), (back, front)):
                threading.Thread(target=self._pump, args=(one, other, ended), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, ended: list[socket.socket]) -> None:
        with self._lock:
            self._ends.add(source)
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass
        finally:
            with self._lock:
                self._ends.discard(source)
                ended.append(source)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)
            if not self._is_open or len(ended) == 2:
                for end in (source, target):
                    end.close()


@contextlib.contextmanager
def door(url: str) -> Iterator[Door]:
    """Stand before a service while the context lasts."""
    made = Door(url)
    try:
        yield made
    finally:
        made.close()
