"""A proxy before the real engine that puts one fault into its answers, for faults that no healthy engine shows."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Exchanged:
    """What was asked, and what the engine answered."""

    path: str
    request: bytes
    status: int
    content_type: str
    body: bytes


Fault = Callable[[Exchanged], tuple[int, str, bytes] | None]
"""Returns what the client gets instead: status, content type and body, or None for a connection that just ends."""

HANG_SECONDS = 4.0


def hang() -> None:
    """Let a client wait for longer than it will."""
    time.sleep(HANG_SECONDS)


@contextmanager
def faulty(base_url: str, fault: Fault) -> Iterator[str]:
    """Run the proxy; yields its base URL."""
    upstream = urlsplit(base_url)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.relay()

        def do_POST(self) -> None:
            self.relay()

        def relay(self) -> None:
            self.close_connection = True
            announced = int(self.headers.get("Content-Length", "0"))
            request = self.rfile.read(announced)
            if len(request) < announced:
                return  # the client hung up
            connection = HTTPConnection(upstream.hostname or "", upstream.port, timeout=30)
            try:
                headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
                connection.request(self.command, self.path, body=request or None, headers=headers)
                response = connection.getresponse()
                kind = response.headers.get("Content-Type", "")
                answer = fault(Exchanged(self.path, request, response.status, kind, response.read()))
                if answer is not None:
                    self.answer(*answer)
            except OSError:
                pass  # the engine or the client is gone; the client sees a connection that ends
            finally:
                connection.close()

        def answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
