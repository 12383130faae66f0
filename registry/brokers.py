"""How a broker is spoken to, by the scheme of its address, and whether it can be had."""

import ssl
import threading
import time
from pathlib import Path
from typing import Any, Final

import structlog
from kombu.connection import Connection
from kombu.exceptions import OperationalError

SILENCE_SECONDS: Final = 5
"""Longest wait for an answer of RabbitMQ: one that stands still, as when its disk is full, holds nobody up."""
LOOK_SECONDS: Final = 2
"""Longest wait of a look whether a broker can be had, in seconds."""
HURRIED: Final = {
    "read_timeout": LOOK_SECONDS,
    "write_timeout": LOOK_SECONDS,
    "socket_connect_timeout": LOOK_SECONDS,
    "socket_timeout": LOOK_SECONDS,
}
"""What a client library is told for such a look."""
KNOWN_SECONDS: Final = 10.0
"""How long such a look is believed: RabbitMQ writes three lines for each."""

log = structlog.get_logger("registry.brokers")


def transport_options(url: str) -> dict[str, Any]:
    """Return what a broker's client library is told."""
    # Whoever rings tries a broker that is away once more, soon, and leaves it to the next sweep.
    told: dict[str, Any] = {"max_retries": 1, "interval_start": 0.2, "interval_step": 0.0, "interval_max": 0.2}
    if url.startswith("redis"):
        return told | {"visibility_timeout": 120}  # how long a worker is silent before another gets what it took
    # RabbitMQ takes what is sent and may then refuse it: only a confirmation tells.
    return told | {"confirm_publish": True, "read_timeout": SILENCE_SECONDS, "write_timeout": SILENCE_SECONDS}


def tls_options(url: str, authorities: Path | None) -> dict[str, Any] | None:
    """Return how the broker's certificate is checked, against its name too; None where there is no TLS.

    Args:
        url: address of the broker.
        authorities: PEM file of the certificates that are trusted; none for the system's.
    """
    files = {} if authorities is None else {"ca_certs": str(authorities)}
    if url.startswith("amqps:"):
        return files | {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None}  # kombu puts the address's host there
    if url.startswith("rediss:"):
        told = {f"ssl_{name}": value for name, value in files.items()}
        return told | {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}
    return None


def errors_of(connection: Connection) -> tuple[type[Exception], ...]:
    """Return what a client library raises when its broker is away or refuses."""
    return (OperationalError, *connection.connection_errors, *connection.channel_errors)


class Look:
    """Whether a broker lets us in, as a look of the last ten seconds says. Safe in several threads."""

    def __init__(self, url: str, authorities: Path | None = None) -> None:
        """Remember the address, and who vouches for its certificate. Nothing is connected yet."""
        self._url, self._authorities = url, authorities
        self._looking = threading.Lock()
        self._known: bool | None = None
        self._since = 0.0

    def is_reachable(self) -> bool:
        """Tell, after a look of at most a few seconds where none is known."""
        with self._looking:
            if self._known is None or time.monotonic() - self._since > KNOWN_SECONDS:
                self._known = self._look()
                self._since = time.monotonic()
            return self._known

    def _look(self) -> bool:
        made = Connection(  # type: ignore[no-untyped-call] # kombu's
            self._url,
            ssl=tls_options(self._url, self._authorities),
            connect_timeout=LOOK_SECONDS,
            transport_options=HURRIED,
        )
        with made as connection:
            try:
                connection.ensure_connection(max_retries=1, interval_start=0, timeout=LOOK_SECONDS)
            except errors_of(connection) as error:
                log.warning("broker_unreachable", error=type(error).__name__)
                return False
        return True
