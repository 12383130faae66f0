"""Speaks to the byte path of a running interface: whole requests, and ones that are cut or trickle."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from schemas.common import sha256_digest


def begin(client: httpx.Client, content: bytes, digest: str | None = None) -> dict[str, Any]:
    """Begin an upload in pieces, or take it up."""
    body = {"digest": digest or sha256_digest(content), "size": len(content)}
    answer = client.post("/v1/uploads", json=body)
    assert answer.status_code in (200, 201), answer.text
    told: dict[str, Any] = answer.json()
    return told


def patch(client: httpx.Client, upload: str, offset: int, piece: Any) -> httpx.Response:
    """Send bytes at an offset."""
    return client.patch(f"/v1/uploads/{upload}", content=piece, headers={"upload-offset": str(offset)})


def offset(client: httpx.Client, upload: str) -> int:
    """Ask how far an upload is."""
    return int(client.head(f"/v1/uploads/{upload}").headers["upload-offset"])


def arrived(client: httpx.Client, upload: str, least: int) -> int:
    """Wait until so many bytes of an upload are there, and return how many are.

    Asking for the offset holds nothing: a request that would be refused holds the upload for a moment, and the one that
    is waited for may come just then.
    """
    ends = time.monotonic() + 10
    while (there := offset(client, upload)) < least:
        assert time.monotonic() < ends, f"{there} of {least} bytes arrived"
        time.sleep(0.01)
    return there


def settled(client: httpx.Client, upload: str, least: int) -> int:
    """Wait until so many bytes of an upload are there, and nobody writes to it. Returns how many are there."""
    there = arrived(client, upload, least)
    ends = time.monotonic() + 10
    while patch(client, upload, there + 10**6, b"").json().get("is_held"):
        assert time.monotonic() < ends, "it is still written to"
        time.sleep(0.01)
    return there


@contextmanager
def request(url: str, token: str, method: str, path: str, length: int, **headers: str) -> Iterator[socket.socket]:
    """Begin a request that announces a body of some length. What is sent of it, and when, is the caller's."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        said = {"host": "x", "authorization": f"Bearer {token}", "content-length": str(length), **headers}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in said.items())]
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
        yield connection


def status(connection: socket.socket) -> int:
    """Wait for the status of the answer to a request."""
    received = b""
    while b"\r\n" not in received:
        more = connection.recv(4096)
        assert more, "the connection was closed without an answer"
        received += more
    return int(received.split(b" ", 2)[1])


def incoming(storage: Path) -> list[str]:
    """Return the files of uploads that are under way, or that were left."""
    return sorted(path.name for path in (storage / "incoming").iterdir())


def stored(storage: Path) -> list[str]:
    """Return the digests of the blobs in a store."""
    return sorted(f"sha256:{path.name}" for path in (storage / "sha256").glob("*/*"))
