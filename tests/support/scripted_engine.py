"""A scripted HTTP server for faults that no healthy engine shows: any status, any bytes, any delay, any cut.

A script is what is sent after the request was read. The server counts requests in flight and keeps a log of them.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Script:
    """One answer.

    `chunks` are sent one by one, `pause_seconds` after each. `ending` says what follows: "close" ends the
    connection properly, "cut" resets it without the end of the chunked body, "hang" leaves it open.
    """

    status: int = 200
    content_type: str = "text/event-stream"
    headers: Mapping[str, str] = field(default_factory=dict)
    chunks: Sequence[bytes] = ()
    delay_seconds: float = 0.0
    pause_seconds: float = 0.0
    ending: str = "close"

    @classmethod
    def json(cls, body: object, status: int = 200) -> "Script":
        """Return a script that answers with a JSON document."""
        return cls(status=status, content_type="application/json", chunks=[json.dumps(body).encode()])


@dataclass(frozen=True)
class Asked:
    """One request that the server got."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class ScriptedEngine:
    """A running server: set `scripts` by path; `default` answers every other path."""

    base_url: str = ""
    scripts: dict[str, Script] = field(default_factory=dict)
    default: Script = field(default_factory=lambda: Script.json({"error": {"message": "no such path"}}, 404))
    log: list[Asked] = field(default_factory=list)
    in_flight: int = 0
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection with one script."""
        self.in_flight += 1
        try:
            asked = await _read(reader)
            self.log.append(asked)
            await self._play(self.scripts.get(asked.path, self.default), writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away
        finally:
            self.in_flight -= 1
            writer.close()

    async def _play(self, script: Script, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(script.delay_seconds)
        headers = {"Content-Type": script.content_type, "Transfer-Encoding": "chunked", "Connection": "close"}
        lines = [f"{name}: {value}" for name, value in (headers | dict(script.headers)).items()]
        writer.write("\r\n".join([f"HTTP/1.1 {script.status} Scripted", *lines, "", ""]).encode())
        await writer.drain()
        for chunk in script.chunks:
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            await writer.drain()
            await asyncio.sleep(script.pause_seconds)
        if script.ending == "hang":
            await self._released.wait()
        elif script.ending == "close":
            writer.write(b"0\r\n\r\n")
            await writer.drain()

    async def reach(self, in_flight: int, timeout_seconds: float = 10.0) -> int:
        """Wait until exactly so many requests are in flight, at most so long, and return how many are."""
        deadline = time.monotonic() + timeout_seconds
        while self.in_flight != in_flight and time.monotonic() < deadline:  # noqa: ASYNC110 - a test waits
            await asyncio.sleep(0.01)
        return self.in_flight

    def release(self) -> None:
        """Let hanging connections end."""
        self._released.set()


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Asked(method, path, headers, body)


@asynccontextmanager
async def scripted_engine(scripts: Mapping[str, Script] | None = None) -> AsyncIterator[ScriptedEngine]:
    """Run a scripted server on a free loopback port."""
    engine = ScriptedEngine(scripts=dict(scripts or {}))
    server = await asyncio.start_server(engine.handle, "127.0.0.1", 0)
    engine.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        engine.release()
        server.close()
        await server.wait_closed()


def event(body: object) -> bytes:
    """Return one server-sent event with a JSON document."""
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def chat_event(content: str | None = None, finish_reason: str | None = None, **delta: object) -> bytes:
    """Return one chat event."""
    said = ({} if content is None else {"content": content}) | delta
    choice = {"index": 0, "delta": said, "finish_reason": finish_reason}
    return event({"object": "chat.completion.chunk", "model": "scripted", "choices": [choice]})


def usage_event(prompt_tokens: int = 23, completion_tokens: int = 3) -> bytes:
    """Return the closing event with the usage."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"object": "chat.completion.chunk", "model": "scripted", "choices": [], "usage": usage})


DONE = b"data: [DONE]\n\n"


def chat_stream(*texts: str) -> list[bytes]:
    """Return a healthy chat stream: role, one event a text, finish, usage, [DONE]."""
    events = [chat_event(role="assistant", content=None), *(chat_event(text) for text in texts)]
    return [*events, chat_event(finish_reason="stop"), usage_event(completion_tokens=len(texts) + 1), DONE]
