"""Connections of the fetcher: to an address that was checked, and no slower than they have to be.

A name is looked up once for each connection, and that connection goes to an address of that very answer, while TLS is
told the name. So the address that was checked is the one that is used, and the certificate is the name's.
"""

import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import httpcore
import httpx

from gates.sources.hosts import Hosts

MOST_WRAPPING: Final = 16
"""Bytes for one of a body. A piece of one byte takes six."""
MOST_WRAPPING_BYTES: Final = 1 << 20
"""What an answer may have besides: its heads, and what was read of its body and is not handed on yet."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server is waited for.

    Attributes:
        connect: seconds for a connection, and for its TLS.
        silence: seconds without a byte.
        window: seconds of waiting over which the rate is taken.
        rate: least bytes a second over the window.
    """

    connect: float = 15.0
    silence: float = 30.0
    window: float = 60.0
    rate: float = 4096.0


class TooSlow(httpcore.ReadTimeout):
    """Bytes arrive, but too few of them."""


class CheckedBackend(httpcore.NetworkBackend):
    """Connects to checked addresses only."""

    def __init__(self, hosts: Hosts, patience: Patience) -> None:
        self._hosts, self._patience, self._plain = hosts, patience, httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Look a host up, check all of its addresses, and connect to the first that answers.

        Raises:
            SourceRefused, SourceUnavailable, httpcore.ConnectError, httpcore.ConnectTimeout.
        """
        failed: httpcore.ConnectError | httpcore.ConnectTimeout = httpcore.ConnectError("it has no address")
        for address in self._hosts.addresses(host, port):
            try:
                stream = self._plain.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
            else:
                return Measured(stream, self._patience)
        raise failed


class Measured(httpcore.NetworkStream):
    """A stream that is given up when it brings too little for too long. Only the time spent waiting counts.

    And when it brings too much besides what it is asked for: an answer may be wrapped in any number of early hints,
    and each byte of its body in a piece of its own.
    """

    def __init__(self, stream: httpcore.NetworkStream, patience: Patience) -> None:
        self._stream, self._patience = stream, patience
        self._waited, self._count = 0.0, 0
        self._raw, self._taken = 0, 0

    def take(self, count: int) -> None:
        """Note how many bytes of what arrived were of the body."""
        self._taken += count

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return what arrives. Raises TooSlow, httpcore.ReadTimeout, httpcore.RemoteProtocolError."""
        patience = self._patience
        left = max(0.001, patience.window - self._waited)
        started = time.monotonic()
        try:
            read = self._stream.read(max_bytes, min(left, patience.silence, timeout or patience.silence))
        except httpcore.ReadTimeout:
            if left < patience.silence:
                self._judge(time.monotonic() - started, 0)
            raise
        self._judge(time.monotonic() - started, len(read))
        self._raw += len(read)
        if self._raw > MOST_WRAPPING_BYTES + MOST_WRAPPING * self._taken:
            raise httpcore.RemoteProtocolError(f"{self._raw} bytes for {self._taken} of a body")
        return read

    def _judge(self, waited: float, count: int) -> None:
        self._waited += waited
        self._count += count
        if self._waited >= self._patience.window:
            if self._count < self._patience.rate * self._patience.window:
                raise TooSlow(f"{self._count} bytes in {self._waited:.0f} s")
            self._waited, self._count = 0.0, 0

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Ask anew: what arrives is counted from here."""
        self._waited, self._count = 0.0, 0
        self._raw, self._taken = 0, 0
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        """Return the stream under TLS."""
        return Measured(self._stream.start_tls(ssl_context, server_hostname, timeout), self._patience)

    def get_extra_info(self, info: str) -> Any:
        """Return what the stream below says of itself."""
        return self._stream.get_extra_info(info)


def trusted() -> ssl.SSLContext:
    """Return the certificate authorities that the machine trusts; a machine that has no list gets Mozilla's.

    OpenSSL's own variables SSL_CERT_FILE and SSL_CERT_DIR name another list.
    """
    paths = ssl.get_default_verify_paths()
    if paths.cafile is None and paths.capath is None:
        return httpx.create_ssl_context(trust_env=False)
    return ssl.create_default_context()
