"""Clients over connections that they keep, and how long each answer took.

They ask as fast as they are answered, or at instants that were planned before: then an answer's time counts from the
instant at which its request was due, also when the client was still waiting for the one before.
"""

import math
import multiprocessing
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Asked:
    """One operation: what each client sends, one request after the other, and the status that it expects."""

    name: str
    requests: Sequence[Sequence[bytes]]
    """One list a client."""
    status: int = 200


@dataclass(frozen=True)
class Told:
    """How long answers took, in ms, and how many came in a second."""

    p50: float
    p99: float
    most: float
    rate: float
    count: int
    service_ms: float = 0.0
    """Processor time that the service spent on one request."""
    database_ms: float = 0.0
    """And PostgreSQL."""


def get(path: str, token: str) -> bytes:
    """Return a GET as bytes."""
    return f"GET {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


def post(path: str, token: str, body: bytes) -> bytes:
    """Return a POST as bytes."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def plan(asked: Asked, rate: float, seed: int) -> list[list[float]]:
    """Return for each client when each of its requests is due, in seconds from the beginning.

    `rate` is that of all clients together, a second; the pauses between are those of callers who know nothing of each
    other (exponential), the same for the same seed.
    """
    chance = random.Random(seed)
    each = rate / len(asked.requests)
    return [list(accumulate(chance.expovariate(each) for _ in requests)) for requests in asked.requests]


def measure(port: int, asked: Asked, due: Sequence[Sequence[float]] | None = None) -> Told:
    """Have every client send its requests, each client in a process of its own, and add up what they saw.

    `due` is a plan; without one each client asks as fast as it is answered.
    """
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(len(asked.requests)), context.SimpleQueue()
    clients = [
        context.Process(target=_client, args=(port, requests, due[place] if due else None, asked, barrier, results))
        for place, requests in enumerate(asked.requests)
    ]
    for client in clients:
        client.start()
    told = [results.get() for _ in clients]
    for client in clients:
        client.join()
    if problem := next((one for one in told if isinstance(one, str)), None):
        raise RuntimeError(f"{asked.name}: {problem}")
    took = sorted(seconds * 1000 for _, _, seconds_each in told for seconds in seconds_each)
    wall = max(ended for _, ended, _ in told) - min(began for began, _, _ in told)
    return Told(rank(took, 0.5), rank(took, 0.99), took[-1], len(took) / wall, len(took))


def rank(ordered: Sequence[float], percentile: float) -> float:
    """Return the nearest-rank percentile of sorted values."""
    return ordered[max(0, math.ceil(percentile * len(ordered)) - 1)]


def _client(port: int, requests, due: Sequence[float] | None, asked: Asked, barrier, results) -> None:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            barrier.wait(30)
            took, began = [], time.monotonic()
            for place, request in enumerate(requests):
                sent = time.monotonic()
                if due is not None:
                    time.sleep(max(0.0, began + due[place] - sent))
                    sent = began + due[place]
                connection.sendall(request)
                status, body = _answer(connection)
                took.append(time.monotonic() - sent)
                if status != asked.status:
                    raise RuntimeError(f"status {status}, not {asked.status}: {body[:500]!r}")
            results.put((began, time.monotonic(), took))
    except Exception as error:  # edge: the process that asked is told
        barrier.abort()
        results.put(repr(error))


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        received += _some(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    pieces = [body]
    left = length - len(body)
    while left > 0:
        pieces.append(_some(connection))
        left -= len(pieces[-1])
    return int(head.split(b" ", 2)[1]), b"".join(pieces)


def _some(connection: socket.socket) -> bytes:
    piece = connection.recv(262_144)
    if not piece:
        raise ConnectionError("the service hung up")
    return piece
