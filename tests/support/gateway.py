"""A real Envoy on a free loopback port, driven by the product's own code, and a client that reads streams whole."""

import asyncio
import contextlib
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from gates.router import Arm, Split
from tests.support.streams import StreamEngine
from workers.traffic import envoy_process
from workers.traffic.envoy import EnvoyGateway

TARGET = "chat@prod"
CHAT = {"model": "chain", "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": "ping"}]}


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class RunningGateway:
    """A gateway with its Envoy."""

    gateway: EnvoyGateway
    binary: Path
    process: "subprocess.Popen[bytes]"

    def url(self, target: str = TARGET, path: str = "/v1/chat/completions") -> str:
        return f"http://127.0.0.1:{self.gateway.port}/{target}{path}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.process = envoy_process.start(self.gateway, self.binary)
        envoy_process.wait_ready(self.gateway, self.process)


@contextlib.contextmanager
def running_gateway(directory: Path, *, pins: bool = False, deadline_seconds: float = 10.0) -> Iterator[RunningGateway]:
    """Run an Envoy that serves nothing yet."""
    gateway = EnvoyGateway(directory, port=free_port(), pins=pins, deadline_seconds=deadline_seconds)
    binary = envoy_process.find_envoy()
    running = RunningGateway(gateway, binary, envoy_process.start(gateway, binary))
    try:
        envoy_process.wait_ready(gateway, running.process)
        yield running
    finally:
        running.kill()


def arm(name: str, address: str, weight_bp: int, *, target: str = TARGET, bundle: str = "a") -> Arm:
    """Return an arm whose cluster is named after its engine's port."""
    return Arm(name, f"{target}/{bundle * 12}/r{address.rpartition(':')[2]}", address, weight_bp)


def shares(stable: StreamEngine, candidate: StreamEngine, candidate_bp: int) -> tuple[Arm, Arm]:
    """Return both arms, the candidate with a share."""
    return (
        arm("stable", stable.address, 10_000 - candidate_bp),
        arm("candidate", candidate.address, candidate_bp, bundle="b"),
    )


def split(revision: int, *arms: Arm, target: str = TARGET) -> Split:
    return Split(target, revision, arms)


@dataclass
class Answers:
    """What clients got: engines by name, revisions, statuses, and streams that did not end with [DONE]."""

    engines: Counter[str] = field(default_factory=Counter)
    revisions: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    broken: int = 0
    ttft_ms: list[float] = field(default_factory=list)

    @property
    def whole(self) -> int:
        """Streams that came to their end."""
        return self.statuses[200] - self.broken


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    answers: Answers,
    *,
    headers: dict[str, str] | None = None,
    opened: asyncio.Event | None = None,
) -> None:
    """Send one request and read its stream to the end; `opened` is set once its status has come."""
    began, data = time.perf_counter(), b""
    try:
        async with session.post(url, json=CHAT, headers=headers) as answer:
            if opened:
                opened.set()
            answers.statuses[answer.status] += 1
            answers.engines[answer.headers.get("x-engine", "")] += 1
            answers.revisions[answer.headers.get("x-release-rev", "")] += 1
            async for chunk in answer.content.iter_any():
                if not data:
                    answers.ttft_ms.append((time.perf_counter() - began) * 1000)
                data += chunk
    except aiohttp.ClientError:
        answers.broken += 1
        return
    if answer.status == 200 and not data.endswith(b"data: [DONE]\n\n"):
        answers.broken += 1


def ask_many(url: str, count: int, *, concurrency: int = 16, headers: dict[str, str] | None = None) -> Answers:
    """Send `count` requests, some at a time, and return what came back."""
    answers = Answers()

    async def run() -> None:
        gate = asyncio.Semaphore(concurrency)

        async def one() -> None:
            async with gate:
                await ask(session, url, answers, headers=headers)

        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(one() for _ in range(count)))

    asyncio.run(run())
    return answers


def during_streams(url: str, count: int, act: Callable[[], None]) -> Answers:
    """Open `count` streams at once, call `act` in a thread while they run, and return what came back."""
    answers = Answers()

    async def run() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            events = [asyncio.Event() for _ in range(count)]
            streams = [asyncio.create_task(ask(session, url, answers, opened=event)) for event in events]
            async with asyncio.timeout(30):
                await asyncio.gather(*(event.wait() for event in events))
            await asyncio.to_thread(act)
            await asyncio.gather(*streams)

    asyncio.run(run())
    return answers


def wait_until(condition: Callable[[], bool], *, timeout_seconds: float = 10.0) -> None:
    """Return when a condition holds; fail when it does not come true in time."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not true after {timeout_seconds:g} s")
        time.sleep(0.02)
