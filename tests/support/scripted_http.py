"""A real HTTP server on loopback whose answers a test writes, down to the bytes and the cuts."""

import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self


class Asked(NamedTuple):
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def answer(status: int, body: bytes = b"", *, kind: str = "application/json", length: int | None = None) -> bytes:
    """Return the bytes of an answer; `length` may promise more than there is."""
    promised = len(body) if length is None else length
    head = f"HTTP/1.1 {status} Said\r\ncontent-type: {kind}\r\ncontent-length: {promised}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


class ScriptedHttp:
    """Answers each request with what `script` returns for it; None or b"" closes the connection without an answer.

    `asked` has every request, in order.
    """

    def __init__(self, script: Callable[[Asked], bytes | None]) -> None:
        """Listen on a free port; `with` starts and stops the server."""
        self.script, self.asked = script, list[Asked]()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=10)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                asked = read_request(connection)
                self.asked.append(asked)
                connection.sendall(self.script(asked) or b"")


def read_request(connection: socket.socket) -> Asked:
    """Read one request. Raises ValueError when it has no whole first line."""
    with connection.makefile("rb") as stream:
        method, path, _ = stream.readline().decode().split(" ", 2)
        headers = {}
        while (line := stream.readline().strip()) != b"":
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return Asked(method, path, headers, stream.read(int(headers.get("content-length", "0"))))
