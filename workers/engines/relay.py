"""Speaks for an engine that runs elsewhere: a process on this machine that passes requests on to one endpoint.

    python -I relay.py --endpoint URL --host H --port P --port-file FILE [--allow HOSTS] [--token-file FILE]
        [--drain-seconds S] [--die-with-parent PID]

So the token never leaves this process, every connection goes to an address that was checked, and everybody else sees an
engine like any other. Only ROUTES are passed on, bytes as they come, without redirects: the token may be allowed more
than a caller is. What breaks off there breaks off here. `/relay` says what the endpoint says of itself.

Exit status: 0 drained after SIGTERM, 1 it could not start, 3 stopped before all requests had ended.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

# -I leaves out where this file's own packages are.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gates.sources.hosts import Hosts, Place, external_hosts
from gates.sources.source import SourceRefused, SourceUnavailable
from workers.engines.llamacpp_server import die_with

EXIT_DRAINED, EXIT_NOT_STARTED, EXIT_CUT = 0, 1, 3
MAX_BODY_BYTES = 64 << 20
CONNECT_SECONDS = 15.0
ROUTES = {
    ("GET", "/v1/models"),
    *(("POST", f"/v1/{name}") for name in ("chat/completions", "completions", "embeddings", "responses")),
}
"""Methods and paths by which a model is asked, and none by which an account or what it keeps is."""
# Bytes go on as they come, so nothing may be packed that the caller did not ask to be.
_PLAIN = {"Accept-Encoding": "identity"}
_PASSED_ON = ("Content-Type", "Accept")
_PASSED_BACK = ("Content-Type", "Content-Encoding", "Retry-After")


class Checked(AbstractResolver):
    """Looks a host up and checks all of its addresses, for each connection anew."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: int = socket.AF_INET,  # noqa: ARG002 - both are checked
    ) -> list[ResolveResult]:
        """Return the addresses. Raises OSError when one of them is not allowed."""
        try:
            found = await asyncio.to_thread(self._hosts.addresses, host, port)
        except (SourceRefused, SourceUnavailable) as error:
            raise OSError(str(error)) from None
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in found
        ]

    async def close(self) -> None:
        """Nothing is kept."""


class Relay:
    """Passes requests on to one endpoint."""

    def __init__(self, place: Place, hosts: Hosts, token: str | None) -> None:
        self._origin, self._prefix = place.origin, place.target.rstrip("/").removesuffix("/v1")
        self._place, self._hosts = place, hosts
        self._headers = _PLAIN if token is None else _PLAIN | {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, resolver=Checked(self._hosts), use_dns_cache=False),
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
                trust_env=False,
                auto_decompress=False,
            )
        return self._session

    async def drained(self, seconds: float) -> int:
        """Wait until all requests have ended, at most so long, and return the exit status that says whether."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return EXIT_CUT
        return EXIT_DRAINED

    async def close(self) -> None:
        """Close connections that wait for the next request."""
        if self._session is not None:
            await self._session.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        if request.path == "/relay":
            return await self._facts()
        if (request.method, request.path) not in ROUTES:
            return _error(404, f"{request.method} {request.path} is not passed on")
        self._open += 1
        self._idle.clear()
        try:
            return await self._pass(request)
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers} | self._headers
        url = self._origin + self._prefix + request.path
        body = await request.read() if request.can_read_body else None
        answered: web.StreamResponse | None = None
        try:
            async with self._client.request(
                request.method, url, data=body, headers=headers, allow_redirects=False
            ) as response:
                said = {name: response.headers[name] for name in _PASSED_BACK if name in response.headers}
                answered = web.StreamResponse(status=response.status, headers=said)
                await answered.prepare(request)
                async for chunk in response.content.iter_any():
                    await answered.write(chunk)
                await answered.write_eof()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if answered is None:
                return _error(502, f"the endpoint does not answer: {str(error) or type(error).__name__}")
            # The end of the body must not look like one.
            if request.transport is not None:
                request.transport.abort()
        return answered

    async def _facts(self) -> web.Response:
        try:
            async with self._client.get(
                self._origin + self._prefix + "/v1/models", headers=self._headers, allow_redirects=False
            ) as response:
                server = response.headers.get("Server", "unnamed")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return _error(502, f"the endpoint does not answer: {str(error) or type(error).__name__}")
        return web.json_response({"endpoint": self._place.bare, "server": server[:200]})


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "relay_error"}}, status=status)


async def serve(relay: Relay, told: argparse.Namespace) -> int:
    """Listen, tell the port, and pass requests on until SIGTERM."""
    asked_to_end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked_to_end.set)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", relay.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, told.host, told.port)
    try:
        await site.start()
        port = runner.addresses[0][1]
        partial = told.port_file.with_name(told.port_file.name + ".partial")
        partial.write_text(json.dumps({"pid": os.getpid(), "port": port}), encoding="utf-8")
        partial.replace(told.port_file)
        await asked_to_end.wait()
        await site.stop()
        return await relay.drained(told.drain_seconds)
    finally:
        await relay.close()
        await runner.cleanup()


def _read(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="relay.py", allow_abbrev=False)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--port-file", required=True, type=Path)
    parser.add_argument("--allow", default="")
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--drain-seconds", default=30.0, type=float)
    parser.add_argument("--die-with-parent", type=int)
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Read the command line and serve."""
    told = _read(words)
    try:
        hosts = external_hosts(told.allow)
        place = hosts.check(told.endpoint)
        # An address in place of a name is never looked up again.
        hosts.addresses(place.host, place.port)
        token = told.token_file.read_text(encoding="utf-8").strip() if told.token_file is not None else None
        if told.die_with_parent is not None:
            die_with(told.die_with_parent)
        return asyncio.run(serve(Relay(place, hosts, token), told))
    except (SourceRefused, SourceUnavailable, OSError, ValueError) as error:
        sys.stderr.write(f"relay: error: {error}\n")
        return EXIT_NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
