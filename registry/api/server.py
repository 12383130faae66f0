"""The server: what every process and test serves the application with."""

import asyncio
import json
import os
import socket
from http import HTTPStatus
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI
from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser
from uuid6 import uuid7
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from registry.api.middleware import SECURITY_HEADERS
from registry.api.problems import MEDIA_TYPE
from schemas.problems import MalformedRequest, Problem, TooSlow

MOST_HEADER_BYTES = 65_536
"""Of a request's first line and headers together."""

MOST_AT_ONCE = 64
"""Connections taken from the parent in one go."""

LINGER_SECONDS = 2.0
"""How long a connection is read from after an answer that ends it: what comes is thrown away."""

READ_SECONDS = 0.1
"""From taking the last connections to ending: whoever has sent a request on one is answered."""

log = structlog.get_logger("registry.api")


class Server(uvicorn.Server):
    """Uvicorn, which waits for open answers when it is told to end; those that follow the log are told to end too."""

    def __init__(self, app: FastAPI, *, channel: socket.socket | None = None, **options: Any) -> None:
        """Serve an application of `create_app`. `options` are Uvicorn's.

        `channel` is where connections come from that another process has taken; see `registry.api.processes`.
        """
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            server_header=False,
            http=Protocol,
            ws="none",
            loop="uvloop",
            **options,
        )
        super().__init__(config)
        self._bell = app.state.bell
        self._channel = channel
        self._coming: set[asyncio.Task[Any]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        if self._channel is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self._channel.settimeout(0)
        asyncio.get_running_loop().add_reader(self._channel, self._receive)

    def _receive(self) -> None:
        """Take the connections that the parent has sent. When it has ended, so does this process."""
        if self._channel is not None and not self._take(self._channel):
            os._exit(1)

    def _take(self, channel: socket.socket) -> bool:
        """Take some of what is in the channel, and tell whether it has not ended."""
        try:
            said, descriptors, _, _ = socket.recv_fds(channel, MOST_AT_ONCE, MOST_AT_ONCE)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        for descriptor in descriptors:
            task = asyncio.create_task(self._connect(socket.socket(fileno=descriptor)))
            self._coming.add(task)
            task.add_done_callback(self._coming.discard)
        return bool(said)

    async def _connect(self, connection: socket.socket) -> None:
        connection.settimeout(0)

        def protocol() -> asyncio.Protocol:
            return Protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError:  # the caller has gone
            connection.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End streams, then wait for the other answers."""
        if self._channel is not None:
            await self._leave(self._channel)
        self._bell.close()
        await super().shutdown(sockets)

    async def _leave(self, channel: socket.socket) -> None:
        """Take what the parent has sent, and nothing more: it hands what comes next to another process."""
        asyncio.get_running_loop().remove_reader(channel)
        # From here on the parent cannot send, and what it has sent can still be read, up to an end.
        channel.shutdown(socket.SHUT_RD)
        while self._take(channel):
            pass
        channel.close()
        self._channel = None
        if self._coming:
            await asyncio.wait(self._coming)
            # An idle connection is closed without an answer: these have not been read from yet.
            await asyncio.sleep(READ_SECONDS)


class Protocol(HttpToolsProtocol):
    """HTTP/1.1 over one connection, on which bytes that are no request are answered with a problem as well.

    The parser takes more than a service should: here a request names its host once, its first line and headers have a
    limit, and what comes after a body adds nothing to the headers before it.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Begin with nothing read."""
        super().__init__(*arguments, **options)
        self._is_head = False
        self._head_bytes = 0
        self._hosts = 0
        self._is_put_off = False
        """Whether the request asks for another protocol, and is read once more without that."""
        self._unread = 0
        """Bytes that came since the parser last told a head, some of a body or an end."""
        self._is_over = False
        self._before: RequestResponseCycle | None = None
        """What came before the newest request."""
        self._awaiting: asyncio.TimerHandle | None = None
        """While no request is under way and none is whole: what ends the connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as Uvicorn's own
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        """Give the first line and headers of a request as long as a body may be silent, however they come."""
        app: Any = self.config.app
        if self._awaiting is None:
            self._awaiting = self.loop.call_later(app.state.service.settings.body_silence_seconds, self._give_up)

    def _stop_waiting(self) -> None:
        if self._awaiting is not None:
            self._awaiting.cancel()
            self._awaiting = None

    def _give_up(self) -> None:
        """End a connection on which no request came: whoever holds many of them would keep everybody out."""
        self._awaiting = None
        if self._is_over or self.transport.is_closing() or not self._is_idle:
            return
        self._is_over = True
        if self._is_head:
            self._answer(TooSlow("the first line and the headers of a request came too slowly"))
        self.transport.close()

    @property
    def _is_idle(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Read what has come."""
        self._unset_keepalive_if_required()
        if self._is_over:
            return
        if self._is_idle:
            self._await_head()
        try:
            for place in range(0, len(data), MOST_HEADER_BYTES):
                piece = data[place : place + MOST_HEADER_BYTES]
                self._unread += len(piece)
                self._feed(piece)
                if self._unread > MOST_HEADER_BYTES:
                    raise _TooLongError
        except (HttpParserError, _TooLongError) as error:
            self._refuse(_problem(error))

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as asked:
                data = self._as_asked_in_this_one(data[asked.args[0] :])
            else:
                return

    def _as_asked_in_this_one(self, rest: bytes) -> bytes:
        """Return a request that asks for another protocol without that, and what follows its head.

        The parser takes it to have no body: what follows would be in the other protocol. Nothing but HTTP/1.1 is spoken
        here, where a server goes on as if it had not been asked (RFC 9110, 7.8).
        """
        first = b" ".join((self.parser.get_method(), self.url, b"HTTP/" + self.parser.get_http_version().encode()))
        kept = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = HttpRequestParser(self)
        return b"\r\n".join((first, *kept, b"", b"")) + rest

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._is_head, self._head_bytes, self._hosts = True, 0, 0

    def on_url(self, url: bytes) -> None:
        """Take some of the address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; a trailer is read and left aside."""
        self._count(len(name) + len(value))
        if self._is_head:
            self._hosts += name.lower() == b"host"
            super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MOST_HEADER_BYTES:
            raise _TooLongError

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        if self._hosts != 1 and self.parser.get_http_version() not in {"0.9", "1.0"}:
            raise _HostError
        self._stop_waiting()
        self._is_head, self._unread = False, 0
        self._is_put_off = self.parser.should_upgrade()
        if not self._is_put_off:
            self._before = self.cycle
            super().on_headers_complete()
        elif self.parser.get_method() == b"CONNECT":
            raise _MethodError

    def on_body(self, body: bytes) -> None:
        """Take some of the body."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._unread = 0
        if not self._is_put_off:
            super().on_message_complete()

    def _refuse(self, problem: MalformedRequest) -> None:
        """Answer what could not be read, and close."""
        self._is_over = True
        cycle: RequestResponseCycle | None = self.cycle
        if self.pipeline and self._before is not None and cycle is not None and cycle.more_body:
            # Others are answered first, so nothing can be said of it: it was never begun.
            self.pipeline.popleft()
            self.cycle = cycle = self._before
        if cycle is None or cycle.response_complete:
            self._answer(problem)
        elif not cycle.more_body:
            # The request before is whole and is answered; nothing that came after it is.
            cycle.keep_alive = False
            return
        else:
            cycle.disconnected = True
            cycle.message_event.set()
            # Where another answer is on its way, nothing can be said beside it.
            if not cycle.response_started:
                self._answer(problem)
        # Who is still sending would lose the answer if the connection were closed at once.
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _answer(self, problem: Problem) -> None:
        app: Any = self.config.app
        identity = str(uuid7())
        body = problem.body(app.state.service.settings.public_url)
        raw = json.dumps(body | {"instance": f"urn:uuid:{identity}", "request_id": identity}).encode()
        headers = {
            "content-type": MEDIA_TYPE,
            "content-length": str(len(raw)),
            "connection": "close",
            "x-request-id": identity,
            **SECURITY_HEADERS,
        }
        log.warning("request_unread", request_id=identity, problem=problem.kind, detail=problem.detail)
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(
            f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\n{head}\r\n".encode() + raw
        )


class _TooLongError(Exception):
    """The head of a request is larger than any may be."""


class _HostError(Exception):
    """A request names no host, or several."""


class _MethodError(Exception):
    """A request asks for a tunnel."""


_SAID: dict[type[BaseException], str] = {
    _HostError: "it needs one Host header",
    _MethodError: "CONNECT asks for a tunnel, and there is none",
}


def _problem(error: Exception) -> MalformedRequest:
    # What a callback raised is behind the parser's own error.
    cause = error.__context__ if isinstance(error, HttpParserCallbackError) else error
    if isinstance(cause, _TooLongError):
        return MalformedRequest(f"the first line and the headers of a request may have {MOST_HEADER_BYTES} bytes")
    said = _SAID.get(type(cause or error), str(cause or error))
    return MalformedRequest(f"the bytes received are no HTTP/1.1 request: {said}")
