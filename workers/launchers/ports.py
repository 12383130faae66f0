"""Ports for engines that have to be told one, kept from everybody else until the engine listens."""

import socket
import threading

_HOST = "127.0.0.1"


class Ports:
    """Ports chosen by the system and held until they are handed over.

    A port is held by a socket that is bound and does not listen, with SO_REUSEADDR. The system gives such a port to
    nobody who asks for any; whoever names it and sets SO_REUSEADDR, as servers do, may bind it. That the one who then
    listens is the engine is for the launcher to see.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    def hold(self) -> int:
        """Return a free port of the loopback address, held from now on. Raises OSError when there is none."""
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((_HOST, 0))
        except OSError:
            held.close()
            raise
        port = int(held.getsockname()[1])
        with self._lock:
            self._held[port] = held
        return port

    def release(self, port: int) -> None:
        """Hold a port no more. Repeating is harmless."""
        with self._lock:
            held = self._held.pop(port, None)
        if held is not None:
            held.close()
