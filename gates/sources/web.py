"""GET over https, for bytes that nobody trusts: every hop is checked, every header bounded, no body decoded.

No proxy and no cookie is used, nothing is taken from the environment, and a token goes only to the origin that it was
given for. Answers that could be read in two ways are refused: their bytes could be another file's.
"""

import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urljoin

import httpcore

from gates.files.refusal import shown
from gates.sources.connection import CheckedBackend, Measured, Patience, TooSlow, trusted
from gates.sources.hosts import Hosts, Place
from gates.sources.source import SourceRefused, SourceUnavailable, bare

MAX_HOPS = 5
MAX_HEADER_BYTES = 32 * 1024
LONGEST_WAIT_SECONDS = 60.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
_ONCE = frozenset({"content-length", "content-range", "content-encoding", "transfer-encoding", "location", "etag"})
_NUMBER = re.compile(r"[0-9]{1,18}")
_USER_AGENT = b"sluicegate"


@dataclass(frozen=True, slots=True)
class Hop:
    """An answer that led elsewhere."""

    place: Place
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """The last answer of a request. `chunks` has the body as it was sent; a broken one raises SourceUnavailable."""

    place: Place
    status: int
    headers: Mapping[str, str]
    hops: tuple[Hop, ...]
    chunks: Iterator[bytes]

    @property
    def length(self) -> int | None:
        """The length that the answer announces, in bytes."""
        text = self.headers.get("content-length")
        return None if text is None else int(text)

    @property
    def has_end(self) -> bool:
        """Whether the answer tells its end; else a body that was cut on the way looks whole."""
        return "content-length" in self.headers or "transfer-encoding" in self.headers

    def read(self, limit: int) -> bytes:
        """Return a small body. Raises SourceRefused when it is larger than `limit` bytes."""
        raw = bytearray()
        for chunk in self.chunks:
            raw += chunk
            if len(raw) > limit:
                said = f"is answered with more than {limit} bytes at {self.place.shown}"
                raise SourceRefused("answer-too-large", said, expected=f"at most {limit} bytes")
        return bytes(raw)


class Web:
    """Speaks to the hosts that are allowed.

    Args:
        hosts: that may be spoken to.
        tokens: origin → bearer token, which no other origin is sent; nor is it sent where another origin leads to it.
        patience: with slow servers.
        tls: whom to trust; otherwise whom the machine trusts.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        tokens: Mapping[str, str] | None = None,
        patience: Patience | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.hosts, self._tokens, self._patience = hosts, dict(tokens or {}), patience or Patience()
        backend = CheckedBackend(hosts, self._patience)
        self._pool = httpcore.ConnectionPool(
            ssl_context=tls or trusted(),
            max_connections=32,
            max_keepalive_connections=16,
            keepalive_expiry=15.0,
            network_backend=backend,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.close()

    @contextmanager
    def get(self, url: str, headers: Mapping[str, str] | None = None) -> Iterator[Answer]:
        """Ask for an address, and follow where it leads, as far as each hop is allowed.

        Raises:
            SourceRefused: a hop is not allowed, there are too many, or an answer is malformed.
            SourceUnavailable: nobody answers, or a server says that it cannot now.
        """
        hops: list[Hop] = []
        seen: set[str] = set()
        while True:
            place = self.hosts.check(url)
            # Who sends us to an origin must not read there with our rights.
            is_led = any(hop.place.origin != place.origin for hop in hops)
            token = None if is_led else self._tokens.get(place.origin)
            if url in seen or len(hops) > MAX_HOPS:
                said = f"is redirected {len(hops)} times, and would be again, at {place.shown}"
                raise SourceRefused("redirect-loop", said, found=len(hops), expected=f"at most {MAX_HOPS} redirects")
            seen.add(url)
            with self._asked(place, headers or {}, token) as answer:
                location = answer.headers.get("location")
                if answer.status not in _REDIRECTS or location is None:
                    _refuse_busy(answer)
                    yield Answer(place, answer.status, answer.headers, tuple(hops), answer.chunks)
                    return
                hops.append(Hop(place, answer.headers))
                url = _joined(place, location)

    @contextmanager
    def _asked(self, place: Place, headers: Mapping[str, str], token: str | None) -> Iterator[Answer]:
        sent = [(b"host", _host_header(place)), (b"accept", b"*/*"), (b"accept-encoding", b"identity")]
        sent.append((b"user-agent", _USER_AGENT))
        sent += [(name.encode(), value.encode()) for name, value in headers.items()]
        if token is not None:
            sent.append((b"authorization", b"Bearer " + token.encode()))
        url = httpcore.URL(
            scheme=place.scheme.encode(), host=place.host.encode(), port=place.port, target=place.target.encode()
        )
        patience = self._patience
        timeout = {"connect": patience.connect, "read": patience.silence, "write": patience.silence, "pool": None}
        with _told(place), self._pool.stream("GET", url, headers=sent, extensions={"timeout": timeout}) as response:
            yield Answer(place, response.status, _headers(place, response), (), _body(place, response))


def _headers(place: Place, response: httpcore.Response) -> dict[str, str]:
    """Return the headers. Raises SourceRefused: too many, one twice, or the length of the body is not clear."""
    found: dict[str, str] = {}
    if sum(len(name) + len(value) for name, value in response.headers) > MAX_HEADER_BYTES:
        raise _malformed(place, "headers-too-large", "headers that are too large", expected=f"{MAX_HEADER_BYTES} bytes")
    for raw_name, raw_value in response.headers:
        name, value = raw_name.decode("ascii").lower(), raw_value.decode("latin-1")
        if found.setdefault(name, value) != value and name in _ONCE:
            raise _malformed(place, "answer-malformed", f"two headers {name}", found=f"{found[name]} and {value}")
    encoding = found.get("content-encoding", "identity").strip().lower()
    if encoding not in {"", "identity"}:
        raise _malformed(place, "encoding-not-asked", "an encoded body", found=encoding, expected="identity")
    if "content-length" in found and "transfer-encoding" in found:
        said = "a length and a transfer encoding, so that it could end at two places"
        raise _malformed(place, "answer-malformed", said, found=found["content-length"])
    if not _NUMBER.fullmatch(found.get("content-length", "0")):
        raise _malformed(place, "answer-malformed", "a length that is no number", found=found["content-length"])
    return found


def _body(place: Place, response: httpcore.Response) -> Iterator[bytes]:
    stream = response.extensions["network_stream"]
    with _told(place):
        for chunk in response.iter_stream():
            if isinstance(stream, Measured):
                stream.take(len(chunk))
            yield chunk


def _joined(place: Place, location: str) -> str:
    """Return where an answer leads. Raises SourceRefused: it is no address."""
    if re.search(r"[^!-~]|\\", location):
        raise _malformed(place, "address-malformed", "an address that has characters that no address has")
    try:
        return urljoin(f"{place.origin}{place.target}", location).partition("#")[0]
    except ValueError:
        # It begins with `//` where it has a host and no scheme.
        found = bare(f"{place.scheme}:{location}" if location.startswith("//") else location).partition("?")[0]
        raise _malformed(place, "address-malformed", "what is no address", found=found) from None


def _refuse_busy(answer: Answer) -> None:
    if answer.status not in _BUSY:
        return
    words = "says that too much is asked of it" if answer.status == 429 else "cannot answer now"
    said = f"{answer.place.host} {words} (status {answer.status})"
    problem = SourceUnavailable("server-busy", said, found=answer.status, advice="try again later")
    wait = answer.headers.get("retry-after", "")
    problem.wait_seconds = min(float(wait), LONGEST_WAIT_SECONDS) if _NUMBER.fullmatch(wait) else None
    raise problem


def _malformed(place: Place, code: str, what: str, *, found: object = None, expected: object = None) -> SourceRefused:
    return SourceRefused(code, f"is answered with {what} at {place.shown}", found=found, expected=expected)


@contextmanager
def _told(place: Place) -> Iterator[None]:
    """Tell errors of a connection as what they mean for a source."""
    where = shown(place.host)
    try:
        yield
    except TooSlow as error:
        said = f"{where} sends too slowly: {error}"
        raise SourceUnavailable("server-slow", said, advice="try again: it goes on where it stopped") from None
    except httpcore.TimeoutException:
        raise SourceUnavailable("server-silent", f"{where} does not answer", advice="try again later") from None
    except httpcore.RemoteProtocolError as error:
        # Said by h11 and httpcore when the connection ended too early; all else is no HTTP.
        if re.search(r"disconnected|peer (unexpectedly )?closed", str(error)):
            raise SourceUnavailable("connection-broken", f"{where} closed the connection too early") from None
        raise _malformed(place, "answer-malformed", f"what is no HTTP ({shown(str(error))})") from None
    except (httpcore.NetworkError, httpcore.UnsupportedProtocol, httpcore.LocalProtocolError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            said = f"{where} shows a certificate that is not trusted: {cause.verify_message}"
            advice = "name the authority that issued it with SSL_CERT_FILE, if you trust it"
            raise SourceRefused("certificate-untrusted", said, advice=advice) from None
        said = f"{where} cannot be reached: {shown(str(error) or type(error).__name__)}"
        advice = "check the network; from inside a closed one, name a mirror with HF_ENDPOINT"
        raise SourceUnavailable("unreachable", said, advice=advice) from None


def _host_header(place: Place) -> bytes:
    return place.origin.partition("://")[2].removesuffix(":443" if place.scheme == "https" else ":80").encode()
