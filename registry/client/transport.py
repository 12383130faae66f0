"""How the client speaks HTTP: what is tried again, and what each kind of answer becomes."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any, TypeVar
from uuid import uuid4

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from gates.plain import NO_AUTHORITY
from schemas import VERSION
from schemas.api import Page
from schemas.problems import (
    InternalError,
    InvalidDocument,
    MethodNotAllowed,
    NotFound,
    NotPermitted,
    Problem,
    TooLarge,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
    problem_from,
)

RETRY_PAUSES_SECONDS = (0.1, 0.4, 1.0)
"""Pauses before each further try."""
LONG_ANSWER_SECONDS = 600.0
"""Longest silence while the service works through something large: a blob's last bytes, the whole log."""
BUSY_TRIES = 4
"""Times that a request is sent which the service refuses because the token has sent too many."""
LONGEST_WAIT_SECONDS = 10.0
PAGE_SIZE = 200

# What a refusal that is not in our words means: a proxy's, or another server's.
_BY_STATUS: dict[int, type[Problem]] = {
    401: Unauthenticated,
    403: NotPermitted,
    404: NotFound,
    405: MethodNotAllowed,
    413: TooLarge,
    429: TooManyRequests,
    422: InvalidDocument,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}

ModelT = TypeVar("ModelT", bound=BaseModel)
Parameters = Mapping[str, str | int | bool | list[str] | None]


def seen(if_match: str | None) -> dict[str, str]:
    """Return the header by which an act is done only when nothing has changed since the caller looked."""
    return {} if if_match is None else {"if-match": f'"{if_match}"'}


class Transport:
    """One service, one token, one pool of connections."""

    def __init__(self, url: str, token: str | None, *, timeout_seconds: float) -> None:
        self.url = url.rstrip("/")
        """Address, without a slash at the end."""
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{url!r} is not a URL: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"{url!r} is not a URL that starts with http:// or https://")
        headers = {"user-agent": f"sluicegate/{VERSION}", "accept": "application/json"}
        if token is not None:
            if not token or not token.isascii() or not token.isprintable() or " " in token:
                raise ValueError("the token has characters that no token has")
            headers["authorization"] = f"Bearer {token}"
        self.is_in_clear = parsed.scheme == "http" and not _is_loopback(parsed.host)
        """Whether the token can be read on the way."""
        self._is_closed = False
        self._streams: set[httpx.Response] = set()
        self._lock = threading.Lock()
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout_seconds),
            follow_redirects=False,
            # A proxy from the environment is not on the way to this machine itself.
            trust_env=not _is_loopback(parsed.host),
            verify=NO_AUTHORITY if parsed.scheme == "http" else True,
        )

    def is_closed(self) -> bool:
        """Tell whether the connections were given back."""
        return self._is_closed

    def close(self) -> None:
        """Give the connections back, also those that another thread still reads a stream from."""
        with self._lock:
            self._is_closed = True
            for answer in self._streams:
                shut(answer)
        self._http.close()

    def get(self, model: type[ModelT], path: str, parameters: Parameters | None = None) -> ModelT:
        """Read one thing. Tried again when the connection fails."""
        return self.parse(model, self.send("GET", path, parameters=parameters))

    def post(
        self,
        model: type[ModelT],
        path: str,
        body: BaseModel | bytes | None = None,
        *,
        is_slow: bool = False,
        if_match: str | None = None,
    ) -> ModelT:
        """Do one thing. Tried again only when it never reached the service."""
        return self.parse(model, self.send("POST", path, body=body, headers=seen(if_match), is_slow=is_slow))

    def create(
        self, model: type[ModelT], path: str, body: BaseModel, key: str | None = None, *, if_match: str | None = None
    ) -> ModelT:
        """Make one thing, once: under one Idempotency-Key it may be sent again when the connection fails."""
        headers = {"idempotency-key": key or uuid4().hex, **seen(if_match)}
        return self.parse(model, self.send("POST", path, body=body, headers=headers, is_once=True))

    def pages(
        self,
        model: type[ModelT],
        path: str,
        parameters: Parameters | None = None,
        *,
        cursor: str = "cursor",
        start: str | None = None,
    ) -> Iterator[ModelT]:
        """Read a list, page after page, as it is asked for. `cursor` is the parameter that `next` goes into."""
        page = TypeAdapter(Page[model])  # type: ignore[valid-type]  # a model at run time
        following = start
        while True:
            asked = {**(parameters or {}), "limit": PAGE_SIZE, cursor: following}
            answer = self._validated(page, self.send("GET", path, parameters=asked))
            yield from answer.items
            if answer.next is None or answer.next == following:
                return
            following = answer.next

    def send(
        self,
        method: str,
        path: str,
        *,
        parameters: Parameters | None = None,
        body: BaseModel | bytes | Iterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        is_slow: bool = False,
        is_once: bool = False,
    ) -> httpx.Response:
        """Send a request and return an answer that succeeded. `is_once`: repeating it is known to change nothing.

        Raises:
            Problem: what the service said; Unavailable when it did not say anything.
        """
        content, sent = _encoded(body)
        request = self._http.build_request(
            method,
            path,
            params={key: value for key, value in (parameters or {}).items() if value is not None},
            content=content,
            headers={**sent, **(headers or {})},
            timeout=httpx.Timeout(30.0, read=LONG_ANSWER_SECONDS) if is_slow else httpx.USE_CLIENT_DEFAULT,
        )
        is_safe = is_once or method in ("GET", "HEAD")
        can_repeat = not isinstance(body, Iterator)
        tries = BUSY_TRIES if can_repeat else 1
        while True:
            answer = self._tried(lambda: self._http.send(request), is_safe=is_safe, can_repeat=can_repeat)
            tries -= 1
            if answer.status_code != TooManyRequests.status or not tries:
                break
            # It was refused before anything was done.
            time.sleep(min(_retry_after(answer), LONGEST_WAIT_SECONDS))
        if not answer.is_success:
            raise _problem(answer)
        return answer

    @contextmanager
    def stream(
        self,
        path: str,
        *,
        parameters: Parameters | None = None,
        headers: Mapping[str, str] | None = None,
        silence_seconds: float | None = None,
    ) -> Iterator[httpx.Response]:
        """Read raw bytes as they arrive. What has arrived is not asked for again when the connection breaks."""
        request = self._http.build_request(
            "GET",
            path,
            params={key: value for key, value in (parameters or {}).items() if value is not None},
            headers={"accept": "application/octet-stream", **(headers or {})},
            timeout=httpx.USE_CLIENT_DEFAULT if silence_seconds is None else httpx.Timeout(silence_seconds),
        )
        answer = self._tried(lambda: self._http.send(request, stream=True), is_safe=True, can_repeat=True)
        try:
            if not answer.is_success:
                answer.read()
                raise _problem(answer)
            with self._lock:
                self._streams.add(answer)
            yield answer
        except httpx.RequestError as error:
            raise Unavailable(f"{self.url} broke off in the middle of an answer: {_why(error)}") from error
        finally:
            with self._lock:
                self._streams.discard(answer)
            answer.close()

    def parse(self, model: type[ModelT], answer: httpx.Response) -> ModelT:
        """Return a successful answer as a model. Raises Unavailable when it is something else."""
        parsed: ModelT = self._validated(TypeAdapter(model), answer)
        return parsed

    def _validated(self, adapter: TypeAdapter[Any], answer: httpx.Response) -> Any:
        try:
            return adapter.validate_json(answer.content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = "/".join(map(str, first["loc"]))
            raise Unavailable(
                f"{self.url} answered {answer.request.url.path} with something that is not Sluicegate's "
                f"({place or 'body'}: {first['msg']}). Is the address right, and the client as new as the service?"
            ) from None

    def _tried(self, attempt: Callable[[], httpx.Response], *, is_safe: bool, can_repeat: bool) -> httpx.Response:
        for pause in (*RETRY_PAUSES_SECONDS, None):
            try:
                return attempt()
            except httpx.RequestError as error:
                never_arrived = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
                safe = never_arrived or is_safe
                if pause is None or not safe or not can_repeat:
                    said = "cannot be reached" if never_arrived else "broke off before it had answered"
                    doubt = "" if safe else ". Whether it did what was asked is not known"
                    raise Unavailable(f"{self.url} {said}: {_why(error)}{doubt}") from error
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")


def shut(answer: httpx.Response) -> None:
    """End whoever waits for bytes of an answer, in whatever thread: closing alone would leave it waiting."""
    stream = answer.extensions.get("network_stream")
    connection = stream.get_extra_info("socket") if stream is not None else None
    if connection is not None:
        # It may have been closed by the other side already.
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _encoded(body: BaseModel | bytes | Iterator[bytes] | None) -> tuple[bytes | Iterator[bytes] | None, dict[str, str]]:
    if body is None:
        return None, {}
    if isinstance(body, BaseModel):
        body = body.model_dump_json(by_alias=True, exclude_none=True).encode()
    kind = "application/json" if isinstance(body, bytes) else "application/octet-stream"
    return body, {"content-type": kind}


def _problem(answer: httpx.Response) -> Problem:
    status = answer.status_code
    try:
        body = answer.json()
    except ValueError:
        body = None
    if isinstance(body, dict) and "/problems/" in str(body.get("type", "")):
        return problem_from(body, status)
    kind = _BY_STATUS.get(status, InternalError)
    where = f"{answer.request.method} {answer.request.url.path}"
    said = f"{where} was answered with {status} {answer.reason_phrase}, not in Sluicegate's words"
    # What stands before engines knows no path of ours: it is asked first by whoever mixes up the two addresses.
    asked = f". Is {answer.request.url.copy_with(path='/', query=None)} the gateway's address, and not the service's?"
    return kind(said + (asked if status == NotFound.status else ""))


def _retry_after(answer: httpx.Response) -> float:
    said = answer.headers.get("retry-after", "")
    return float(said) if said.isdecimal() else 1.0


def _why(error: httpx.RequestError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    return str(error) or type(error).__name__


def _is_loopback(host: str) -> bool:
    """Tell whether a host is this machine, by its name or number alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
