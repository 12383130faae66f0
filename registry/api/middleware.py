"""The outermost edge of a request: its id, its log line, its headers, and how much body it may carry."""

import re
import time
from collections.abc import Mapping
from typing import Any

import anyio
import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uuid6 import uuid7

from registry.api import problems
from registry.settings import Settings
from schemas.common import MAX_DOCUMENT_BYTES
from schemas.problems import TooLarge

DRAIN_BYTES = 256 * 1024 * 1024
DRAIN_SECONDS = 10.0
CLOSED_STATUS = 499
"""Logged and counted for a request whose caller went away before all of it had come, whatever was answered then."""
IS_CUT = "is_cut"
BODY = "body_of_the_request"
MAY_BE_RAW = frozenset({"PUT", "PATCH"})
QUIET = frozenset({"/healthz", "/readyz"})
"""Asked every few seconds by whatever watches the process: not worth a log line."""

SECURITY_HEADERS: Mapping[str, str] = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
"""Unless the answer says otherwise."""

_NAMED = re.compile(r"(/v1)?/(?P<noun>release|run|job|runner)s/(?P<id>[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})(/|$)")

log = structlog.get_logger("registry.api")


class Edge:
    """Gives a request its id, turns what nobody caught into a problem, and logs one line."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identity = uuid7()
        scope.setdefault("state", {})["request_id"] = identity
        started, status, made = time.monotonic(), 0, ""

        async def sending(message: Message) -> None:
            nonlocal status, made
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                made = headers.get("location", "")
                headers["x-request-id"] = str(identity)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=str(identity), **_about(scope["path"])):
            try:
                await self._app(scope, receive, sending)
            except Exception as error:  # edge: whatever an endpoint did not expect becomes one logged problem
                if status:
                    log.exception("answer_cut_short", error=repr(error))
                    raise
                await problems.answer(Request(scope), problems.unexpected(error))(scope, receive, sending)
            if scope["state"].get(IS_CUT):
                status = CLOSED_STATUS
            seconds = time.monotonic() - started
            scope["app"].state.requests.add(scope, status, seconds)
            if scope["path"] not in QUIET:
                log.info(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    duration_ms=round(seconds * 1000, 1),
                    actor=scope["state"].get("actor"),
                    **_about(made),
                )


def _about(path: str) -> dict[str, str]:
    """Return which release, run, job or runner an address names, for whoever searches the log by it."""
    named = _NAMED.match(path)
    return {named["noun"]: named["id"]} if named else {}


class BodyLimit:
    """Refuses bodies larger than a document before they are read, and lets callers hear an early refusal.

    PUT and PATCH may carry raw bytes, which their endpoints stream under a limit of their own (`unbounded`); the others
    are refused when their bodies are read. No body may be silent for long, or come so slowly that it keeps its place
    for ever.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Wrap an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        patience = Patience.of(scope["app"].state.service.settings)
        body = _Body(receive, patience, scope["state"])
        headers = Headers(scope=scope)

        async def sending(message: Message) -> None:
            ends = message["type"] == "http.response.body" and not message.get("more_body", False)
            if ends and body.is_left(headers):
                # A caller that is still sending reads no answer, and closing on it would destroy the answer.
                await send({**message, "more_body": True})
                await body.drain()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        declared = headers.get("content-length", "")
        is_larger = declared.isdecimal() and int(declared) > MAX_DOCUMENT_BYTES
        if is_larger and scope["method"] not in MAY_BE_RAW:
            await problems.answer(Request(scope), _too_large())(scope, receive, sending)
            return
        await self._app(scope, body.receive, sending)


def unbounded(request: Request) -> None:
    """Let the body of a request have any size: whoever reads it piece by piece has a limit of its own."""
    body: _Body = request.scope["state"][BODY]
    body.is_bounded = False


class Patience:
    """How long a body is waited for: `seconds` of waiting, of which each byte that comes gives some back.

    Only waiting counts, not what is done with the bytes.
    """

    def __init__(self, seconds: float, bytes_per_second: float) -> None:
        """Begin with all of it."""
        self.left = self._most = seconds
        self._rate = bytes_per_second

    @classmethod
    def of(cls, settings: Settings) -> "Patience":
        """Return the patience that the settings say."""
        return cls(settings.body_silence_seconds, settings.body_bytes_per_second)

    def waited(self, seconds: float, received: int) -> None:
        """Count a wait and the bytes that ended it."""
        self.left = min(self._most, self.left - seconds + received / self._rate)


class _Body:
    def __init__(self, receive: Receive, patience: Patience, state: dict[str, Any]) -> None:
        self.is_bounded = True
        self._state = state
        state[BODY] = self
        self._patience = patience
        self._receive = receive
        self._seen = 0
        self._is_over = False

    async def receive(self) -> Message:
        if self._is_over:
            return await self._receive()
        began = time.monotonic()
        try:
            with anyio.fail_after(max(0.0, self._patience.left)):
                message = await self._next()
        except TimeoutError:
            raise HTTPException(408, f"{self._seen} bytes came, and then too few for too long") from None
        self._patience.waited(time.monotonic() - began, len(message.get("body", b"")))
        if self.is_bounded and self._seen > MAX_DOCUMENT_BYTES:
            raise HTTPException(413, _too_large().detail)
        return message

    async def _next(self) -> Message:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if message["type"] == "http.disconnect" and not self._is_over:
            self._state[IS_CUT] = True
        self._is_over = self._is_over or message["type"] != "http.request" or not message.get("more_body", False)
        return message

    def is_left(self, headers: Headers) -> bool:
        """Tell whether the caller may still be sending a body that nobody read."""
        announced = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        return announced and not self._is_over and "expect" not in headers

    async def drain(self) -> None:
        with anyio.move_on_after(DRAIN_SECONDS):
            while not self._is_over and self._seen <= DRAIN_BYTES:
                await self._next()


def _too_large() -> TooLarge:
    return TooLarge(f"the body is larger than {MAX_DOCUMENT_BYTES} bytes", limit=MAX_DOCUMENT_BYTES)
