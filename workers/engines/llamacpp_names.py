"""Lets adapters be asked for by their names: a front of llama.cpp's server, for a bundle that has any.

llama.cpp takes an adapter by its place, in a field `lora` of the request, and answers under any name, and for a place
that there is not, with the base: a mistyped name would get another model's answer. Here an adapter's name is put into
the field, an unknown name is refused with 404, the answer has the name that was asked for, and what would change all
answers at once (POST /lora-adapters) is refused. All else goes through as it comes.

One request a connection, so that nothing goes through unseen behind it, and so that who hangs up is noticed. It imports
nothing of ours; see llamacpp_server.

Verified with xllamacpp 2026.10.11549.
"""

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 64 << 20
HEAD_SECONDS = 60.0
_READ_BYTES = 64 << 10
_BACKLOG = 1024
_MODELS = frozenset({"/v1/models", "/models"})
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(;.*)?\r\n")
# Of one connection, and so of none that a message is passed on by; and a name in a packed answer would not be found.
_OF_CONNECTION = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "upgrade", "expect"}
    | {"content-length", "transfer-encoding", "accept-encoding"}
)
_REASONS = {
    400: ("Bad Request", "invalid_request_error"),
    403: ("Forbidden", "permission_error"),
    404: ("Not Found", "not_found_error"),
    413: ("Content Too Large", "invalid_request_error"),
    431: ("Request Header Fields Too Large", "invalid_request_error"),
    502: ("Bad Gateway", "server_error"),
}

Headers = list[tuple[str, str]]


class Refused(Exception):
    """A request that is not passed on: its status, and a sentence for who asked."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status

    def answer(self) -> bytes:
        """Return the whole answer, with an error in the form of OpenAI's API."""
        reason, sort = _REASONS[self.status]
        error = {"error": {"code": self.status, "message": str(self), "type": sort}}
        line, kind = f"HTTP/1.1 {self.status} {reason}", ("Content-Type", "application/json")
        return _message(line, [kind], json.dumps(error).encode())


@dataclass(frozen=True)
class Head:
    """First line and headers of a message, and how long its body is; None when it comes in chunks or to the end."""

    line: str
    headers: Headers
    length: int | None
    is_chunked: bool

    @property
    def passed_on(self) -> Headers:
        """The headers that are the message's and not the connection's."""
        return [(name, value) for name, value in self.headers if name.lower() not in _OF_CONNECTION]

    def has(self, name: str, value: str) -> bool:
        """Tell whether a header has a value."""
        return any(one.lower() == name and told.lower() == value for one, told in self.headers)


class Names:
    """The front of one server."""

    def __init__(self, base: str, adapters: Sequence[str], host: str, port: int) -> None:
        """Take the port, without answering there yet.

        Args:
            base: name of the base.
            adapters: their names, in the order in which they were loaded.
            host: to listen at.
            port: 0 takes a free one.

        Raises:
            OSError: the port is taken.
        """
        self._base, self._places = base, {name: place for place, name in enumerate(adapters)}
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self._inner = ("", 0)
        self._thread: threading.Thread | None = None
        self.active = 0
        """Requests that have come and are not answered to their end."""

    @property
    def port(self) -> int:
        """The port that was taken."""
        return int(self._socket.getsockname()[1])

    def serve(self, host: str, port: int) -> None:
        """Answer from now on, on a thread of its own.

        Args:
            host: where the server listens.
            port: of the server.

        Raises:
            OSError: somebody else listens at the port by now.
        """
        self._inner = (host, port)
        self._socket.listen(_BACKLOG)
        started = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(started),), name="names", daemon=True)
        self._thread.start()
        started.wait()

    def stop(self) -> None:
        """Give the port back, and break off what is open."""
        if self._thread is None:
            self._socket.close()
            return
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    async def _run(self, started: threading.Event) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=MAX_HEAD_BYTES, backlog=_BACKLOG)
        async with server:
            started.set()
            await self._stopped.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await _head(reader)
        except (Refused, EOFError, OSError) as error:
            await _end(writer, error.answer() if isinstance(error, Refused) else b"")
            return
        self.active += 1
        try:
            await self._answer(head, reader, writer)
            await _end(writer)
        except Refused as refused:
            await _end(writer, refused.answer())
        except (EOFError, OSError):
            pass  # what breaks off there breaks off here
        finally:
            self.active -= 1
            if not writer.is_closing():
                writer.transport.abort()

    async def _answer(self, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head.has("expect", "100-continue"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await _body(head, reader)
        body, name = self._choose(head, body)
        try:
            answers, asking = await asyncio.open_connection(*self._inner, limit=MAX_HEAD_BYTES)
        except OSError as error:
            raise Refused(502, f"The engine cannot be reached: {error}.") from None
        try:
            asking.write(_message(head.line, head.passed_on, body))
            passing = asyncio.ensure_future(self._passed_back(head, name, answers, writer))
            waiting = asyncio.ensure_future(_hung_up(reader))
            done, _ = await asyncio.wait((passing, waiting), return_when=asyncio.FIRST_COMPLETED)
            for one in (passing, waiting):
                if one not in done:
                    one.cancel()
                    with suppress(asyncio.CancelledError, EOFError, OSError):
                        await one
            if passing not in done:
                raise ConnectionAbortedError("who asked is gone")
            passing.result()
        finally:
            # At once, so that the engine sees that nobody waits any more.
            asking.transport.abort()

    # ------------------------------------------------------------------------------------------------- requests

    def _choose(self, head: Head, body: bytes) -> tuple[bytes, str | None]:
        """Return the body for the engine, and the adapter's name that it is for. Raises Refused."""
        method, target, _ = head.line.split(" ")
        if not target.startswith("/"):
            raise Refused(400, "The target of a request has to be a path.")
        if method in ("GET", "HEAD", "OPTIONS"):
            return body, None
        if "lora-adapters" in unquote(target):
            raise Refused(403, "Adapters stay as they were loaded; ask for one by its name in model.")
        try:
            told = json.loads(body) if body.strip() else None
        except (ValueError, RecursionError):
            raise Refused(400, "The body is not JSON that can be read.") from None
        if not isinstance(told, dict):
            return body, None  # of which the engine says itself what is wrong with it
        if "lora" in told:
            raise Refused(400, "An adapter is asked for by its name in model, and not by lora.")
        name = told.get("model")
        if name is None or name in ("", self._base):
            return body, None
        if not isinstance(name, str) or name not in self._places:
            served = ", ".join((self._base, *self._places))
            raise Refused(404, f"The model {json.dumps(name)[:200]} is not served; served are {served}.")
        chosen = [{"id": self._places[name], "scale": 1.0}]
        return json.dumps(told | {"model": self._base, "lora": chosen}).encode(), name

    # -------------------------------------------------------------------------------------------------- answers

    async def _passed_back(
        self, asked: Head, name: str | None, answers: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            await self._pass_back(asked, name, answers, writer)
        except Refused as refused:  # half of it may be passed on already
            raise ConnectionAbortedError(str(refused)) from None

    async def _pass_back(
        self, asked: Head, name: str | None, answers: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = await _head(answers, is_answer=True)
        method, target, _ = asked.line.split(" ")
        is_list = method == "GET" and target.partition("?")[0] in _MODELS
        change = self._listed if is_list else None if name is None else self._renamed(name)
        if change is None:
            kept = [one for one in head.headers if one[0].lower() not in ("connection", "keep-alive")]
            writer.write(_head_bytes(head.line, kept))
            while piece := await answers.read(_READ_BYTES):
                await _sent(writer, piece)
            return
        if not head.is_chunked:
            if head.length is None:
                raise ConnectionAbortedError("an answer does not say how long it is")
            writer.write(_message(head.line, head.passed_on, change(await _body(head, answers))))
            await writer.drain()
            return
        writer.write(_head_bytes(head.line, [*head.passed_on, ("Transfer-Encoding", "chunked")]))
        rest = b""
        async for piece in _chunks(answers):
            whole, found, rest = (rest + piece).rpartition(b"\n")
            if found:
                await _sent(writer, _chunk(change(whole + found)))
        await _sent(writer, (_chunk(change(rest)) if rest else b"") + b"0\r\n\r\n")

    def _renamed(self, name: str) -> Callable[[bytes], bytes]:
        # In a text of JSON a quotation mark has a backslash before it, so that only the field itself is found.
        old, new = (f'"model":{json.dumps(one)}'.encode() for one in (self._base, name))
        return lambda body: body.replace(old, new)

    def _listed(self, body: bytes) -> bytes:
        """Return the list of models with the adapters after their base."""
        try:
            told: Any = json.loads(body)
            models = told["data"]
            base = next(one for one in models if one["id"] == self._base)
        except (ValueError, RecursionError, KeyError, TypeError, StopIteration):
            return body
        own = {key: value for key, value in base.items() if key not in ("aliases", "tags")}
        models += [own | {"id": name, "parent": self._base} for name in self._places]
        return json.dumps(told).encode()


# ------------------------------------------------------------------------------------------------------ messages


def _head_bytes(line: str, headers: Headers) -> bytes:
    told = [line, *(f"{name}: {value}" for name, value in headers), "Connection: close"]
    return ("\r\n".join(told) + "\r\n\r\n").encode("latin-1")


def _message(line: str, headers: Headers, body: bytes) -> bytes:
    return _head_bytes(line, [*headers, ("Content-Length", str(len(body)))]) + body


def _chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


async def _sent(writer: asyncio.StreamWriter, piece: bytes) -> None:
    writer.write(piece)
    await writer.drain()


async def _end(writer: asyncio.StreamWriter, last: bytes = b"") -> None:
    with suppress(OSError):
        writer.write(last)
        writer.close()
        await writer.wait_closed()


async def _hung_up(reader: asyncio.StreamReader) -> None:
    """Return when the other side is gone; what it sends instead is not asked for."""
    with suppress(OSError):
        while await reader.read(_READ_BYTES):
            pass


async def _head(reader: asyncio.StreamReader, *, is_answer: bool = False) -> Head:
    """Read first line and headers. Raises Refused, EOFError, OSError."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise Refused(431, f"The headers have more than {MAX_HEAD_BYTES} bytes.") from None
    line, *rest = raw[:-4].decode("latin-1").split("\r\n")
    headers: Headers = []
    for one in rest:
        name, found, value = one.partition(":")
        if not found or not name or name != name.strip() or "\n" in one or "\0" in one:
            raise Refused(400, "A header cannot be read.")
        headers.append((name, value.strip()))
    words = line.split(" ")
    if not is_answer and (len(words) != 3 or not words[2].startswith("HTTP/1.") or "\n" in line):
        raise Refused(400, "The request line cannot be read.")
    lengths = {value for name, value in headers if name.lower() == "content-length"}
    codings = [value.lower() for name, value in headers if name.lower() == "transfer-encoding"]
    # A length that two could read in two ways would let a second request through behind the first.
    if len(lengths) > 1 or (lengths and codings) or codings not in ([], ["chunked"]):
        raise Refused(400, "How long the body is cannot be read.")
    length = next(iter(lengths), None)
    if length is not None and not (length.isascii() and length.isdigit() and len(length) <= 18):
        raise Refused(400, "Content-Length has to be a whole number.")
    return Head(line, headers, None if length is None else int(length), bool(codings))


async def _body(head: Head, reader: asyncio.StreamReader) -> bytes:
    """Read a message's body. Raises Refused, EOFError, OSError."""
    if head.is_chunked:
        pieces, size = [], 0
        async for piece in _chunks(reader):
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise Refused(413, f"The body has more than {MAX_BODY_BYTES} bytes.")
            pieces.append(piece)
        return b"".join(pieces)
    if (head.length or 0) > MAX_BODY_BYTES:
        raise Refused(413, f"The body has more than {MAX_BODY_BYTES} bytes.")
    return await reader.readexactly(head.length or 0)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the pieces of a body in chunks. Raises Refused, EOFError, OSError."""
    while True:
        try:
            told = _SIZE.fullmatch(await reader.readuntil(b"\r\n"))
        except asyncio.LimitOverrunError:
            told = None
        if told is None:
            raise Refused(400, "A chunk of the body cannot be read.")
        size = int(told[1], 16)
        if size > MAX_BODY_BYTES:
            raise Refused(413, f"A chunk has more than {MAX_BODY_BYTES} bytes.")
        piece = await reader.readexactly(size + 2)
        if not piece.endswith(b"\r\n"):
            raise Refused(400, "A chunk of the body cannot be read.")
        if size == 0:
            return
        yield piece[:-2]
