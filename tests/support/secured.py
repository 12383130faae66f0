"""TLS in front of a server that speaks none, as a proxy does that somebody puts there."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def _serve(plain: socket.socket, context: ssl.SSLContext, port: int) -> None:
    with (
        contextlib.suppress(OSError),  # who does not believe the certificate breaks off
        context.wrap_socket(plain, server_side=True) as inner,
        socket.create_connection(("127.0.0.1", port)) as outer,
    ):
        back = threading.Thread(target=_pump, args=(outer, inner), daemon=True)
        back.start()
        _pump(inner, outer)
        back.join()


@contextlib.contextmanager
def secured(certificate: Path, key: Path, port: int) -> Iterator[int]:
    """Yield the port at which a port of loopback is reached through TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    plain, _ = listening.accept()
                    threading.Thread(target=_serve, args=(plain, context, port), daemon=True).start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield int(listening.getsockname()[1])
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            accepting.join(10)
