"""A streaming engine whose every fault is scripted: what no healthy engine shows, on a real socket."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Script:
    """How the engine behaves from the next request on.

    `fault` is one of: "" (none), "503", "reset" (closed before a header), "cut" (closed after two tokens).
    """

    ttft_ms: float = 0.0
    tokens: int = 3
    interval_ms: float = 0.0
    headers_at_once: bool = True
    is_healthy: bool = True
    fault: str = ""


@dataclass
class StreamEngine:
    """A running engine. `paths` are the paths it was asked for, `cancelled` the streams whose client left."""

    name: str
    script: Script = field(default_factory=Script)
    port: int = 0
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    completed: int = 0
    cancelled: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.script.is_healthy else 503)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        script = self.script
        self.paths.append(request.path)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        await request.read()
        if script.fault == "503":
            return web.json_response({"error": {"message": "no"}}, status=503)
        if script.fault == "reset":
            _abort(request)
            return web.Response()
        stream = web.StreamResponse(headers={"content-type": "text/event-stream", "x-engine": self.name})
        try:
            if script.headers_at_once:
                await stream.prepare(request)
            await asyncio.sleep(script.ttft_ms / 1000)
            if not script.headers_at_once:
                await stream.prepare(request)
            for token in range(script.tokens):
                if token:
                    await asyncio.sleep(script.interval_ms / 1000)
                if script.fault == "cut" and token == 2:
                    _abort(request)
                    return stream
                await stream.write(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
            await stream.write(b"data: [DONE]\n\n")
            await stream.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled += 1
            raise
        self.completed += 1
        return stream


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


@contextlib.contextmanager
def stream_engine(name: str, script: Script | None = None) -> Iterator[StreamEngine]:
    """Run an engine on a free loopback port in a thread of its own."""
    engine = StreamEngine(name, script or Script())
    loop, started = asyncio.new_event_loop(), threading.Event()
    stopping = asyncio.Event()

    async def serve() -> None:
        application = web.Application()
        application.router.add_get("/health", engine.health)
        application.router.add_route("*", "/{path:.*}", engine.answer)
        # Uvicorn's handlers are cancelled when a client leaves, so these are too.
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        engine.port = runner.addresses[0][1]
        started.set()
        await stopping.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name=f"engine-{name}")
    thread.start()
    try:
        if not started.wait(10):
            raise RuntimeError("the engine did not start")
        yield engine
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(10)
        loop.close()
