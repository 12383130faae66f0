"""The server: what every process and test serves the application with."""

import asyncio
import json
import os
import socket
import sys
from typing import Any

import h11
import structlog
import uvicorn
from fastapi import FastAPI
from uuid6 import uuid7
from uvicorn.protocols.http.h11_impl import H11Protocol

from registry.api.middleware import SECURITY_HEADERS
from registry.api.problems import MEDIA_TYPE
from schemas.problems import MalformedRequest

MOST_HEADER_BYTES = 65_536
"""Of a request's first line and headers together."""

MOST_AT_ONCE = 64
"""Connections taken from the parent in one go."""

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
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
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


class Protocol(H11Protocol):
    """HTTP/1.1 over one connection, on which bytes that are no request are answered with a problem as well."""

    def send_400_response(self, msg: str) -> None:
        """Answer what could not be read, and close. Uvicorn calls it while it handles the parser's error."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._answer(_problem(sys.exception(), msg))
        # Otherwise another answer is on its way, and nothing can be said beside it.
        self.transport.close()

    def _answer(self, problem: MalformedRequest) -> None:
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
        log.warning("request_malformed", request_id=identity, detail=problem.detail)
        sent = [(name.encode(), value.encode()) for name, value in headers.items()]
        answer = h11.Response(status_code=problem.status, headers=sent, reason=b"Bad Request")
        for event in (answer, h11.Data(data=raw), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


def _problem(error: BaseException | None, said: str) -> MalformedRequest:
    if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
        return MalformedRequest(f"the first line and the headers of a request may have {MOST_HEADER_BYTES} bytes")
    return MalformedRequest(f"the bytes received are no HTTP/1.1 request: {error or said}")
