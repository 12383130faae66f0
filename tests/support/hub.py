"""A hub on loopback that speaks the Hugging Face Hub's API and brings large files from a second server, as it does.

It is honest until a test lets it lie: a hook sees each request, and may answer it in any bytes, at any pace.
"""

import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import unquote

Lie = Callable[["Request"], "bytes | Iterable[bytes] | None"]


class Request(NamedTuple):
    """One request as it arrived."""

    server: str
    path: str
    headers: dict[str, str]


def answer(status: int, body: bytes = b"", headers: dict[str, object] | None = None) -> bytes:
    """Return the bytes of an answer; a header that is None is left out."""
    head: dict[str, object] = {"content-length": len(body), "connection": "close"} | (headers or {})
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items() if value is not None)
    return f"HTTP/1.1 {status} Said\r\n{lines}\r\n".encode() + body


def git_blob(body: bytes) -> str:
    """Return git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


@dataclass
class Repository:
    """Files of one commit; those of `lfs` are brought from the second server."""

    files: dict[str, bytes]
    lfs: set[str] = field(default_factory=set)
    name: str = ""
    gated: bool = False
    commit: str = ""

    def __post_init__(self) -> None:
        """Name the commit after its files."""
        listed = json.dumps({path: git_blob(body) for path, body in self.files.items()}, sort_keys=True)
        self.commit = self.commit or hashlib.sha1(listed.encode(), usedforsecurity=False).hexdigest()

    def tree(self) -> list[dict[str, Any]]:
        """Return the tree as the API lists it."""
        entries: list[dict[str, Any]] = []
        for path, body in self.files.items():
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(body), "oid": git_blob(body)}
            if path in self.lfs:
                digest = hashlib.sha256(body).hexdigest()
                entry |= {"lfs": {"oid": digest, "size": len(body), "pointerSize": 134}}
            entries.append(entry)
        return entries


class Hub:
    """Two servers, `hub` and `cdn`; `asked` has every request in order. `with` starts and stops them.

    A lie is a function of a request for one of: `info`, `tree`, `resolve`, `cdn`. It returns the raw bytes of the
    answer, or pieces of them, or None for the honest answer.
    """

    def __init__(self, repositories: dict[str, Repository], *, token: str | None = None) -> None:
        """Listen on two free ports."""
        self.repositories, self.token = repositories, token
        self.lies: dict[str, Lie] = {}
        self.asked: list[Request] = []
        self._sockets = {name: socket.create_server(("127.0.0.1", 0), backlog=64) for name in ("hub", "cdn")}
        self._threads = [threading.Thread(target=self._serve, args=one) for one in self._sockets.items()]
        self._over = threading.Event()
        self._talks: list[threading.Thread] = []
        for name, one in repositories.items():
            one.name = one.name or name

    def url(self, server: str = "hub") -> str:
        """Return the address of one of the servers."""
        return f"http://127.0.0.1:{self._sockets[server].getsockname()[1]}"

    def __enter__(self) -> Self:
        for one in self._threads:
            one.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        for one in self._sockets.values():
            one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in [*self._threads, *self._talks]:
            thread.join(timeout=20)

    def waited(self, seconds: float) -> None:
        """Wait in the middle of an answer, no longer than the servers run."""
        self._over.wait(seconds)

    def _serve(self, server: str, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            talk = threading.Thread(target=self._talk, args=(server, connection))
            self._talks.append(talk)
            talk.start()

    def _talk(self, server: str, connection: socket.socket) -> None:
        with connection:
            request = _read(server, connection)
            if request is None:
                return
            self.asked.append(request)
            try:
                for piece in self._pieces(request):
                    if self._over.is_set():
                        return
                    connection.sendall(piece)
                # Whatever the client sent meanwhile must not turn the end into a reset.
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                return  # the client has heard enough

    def _pieces(self, request: Request) -> Iterator[bytes]:
        kind, honest = self._route(request)
        lie = self.lies.get(kind)
        said = lie(request) if lie is not None else None
        if said is None:
            yield honest()
        elif isinstance(said, bytes):
            yield said
        else:
            yield from said

    def _route(self, request: Request) -> tuple[str, Callable[[], bytes]]:
        path = unquote(request.path.partition("?")[0])
        if request.server == "cdn":
            return "cdn", lambda: self._cdn(request, path.removeprefix("/"))
        if match := re.fullmatch(r"/api/models/(.+?)/revision/(.+)", path):
            return "info", lambda: self._info(request, match[1], match[2])
        if match := re.fullmatch(r"/api/models/(.+?)/tree/(.+)", path):
            return "tree", lambda: self._tree(request, match[1], match[2])
        if match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            return "resolve", lambda: self._resolve(request, match[1], match[2], match[3])
        return "other", lambda: answer(404)

    def _known(self, request: Request, name: str, revision: str) -> "Repository | bytes":
        found = self.repositories.get(name)
        if found is None:
            return answer(401, b'{"error": "Repository not found"}', {"x-error-code": "RepoNotFound"})
        if found.gated and request.headers.get("authorization") != f"Bearer {self.token}":
            return answer(403, b'{"error": "gated"}', {"x-error-code": "GatedRepo"})
        if revision not in {"main", found.commit}:
            return answer(404, b'{"error": "no revision"}', {"x-error-code": "RevisionNotFound"})
        return found

    def _info(self, request: Request, name: str, revision: str) -> bytes:
        found = self._known(request, name, revision)
        if isinstance(found, bytes):
            return found
        return answer(200, json.dumps({"id": found.name, "sha": found.commit, "siblings": []}).encode())

    def _tree(self, request: Request, name: str, revision: str) -> bytes:
        found = self._known(request, name, revision)
        return found if isinstance(found, bytes) else answer(200, json.dumps(found.tree()).encode())

    def _resolve(self, request: Request, name: str, revision: str, path: str) -> bytes:
        found = self._known(request, name, revision)
        if isinstance(found, bytes):
            return found
        body = found.files.get(path)
        if body is None:
            return answer(404, headers={"x-error-code": "EntryNotFound"})
        headers: dict[str, object] = {"x-repo-commit": found.commit, "x-linked-size": len(body)}
        if path in found.lfs:
            digest = hashlib.sha256(body).hexdigest()
            return answer(302, headers={**headers, "location": f"{self.url('cdn')}/{digest}?signature=secret"})
        return ranged(request, body, f'"{git_blob(body)}"', headers)

    def _cdn(self, request: Request, digest: str) -> bytes:
        for one in self.repositories.values():
            for body in one.files.values():
                if hashlib.sha256(body).hexdigest() == digest:
                    return ranged(request, body, f'"{digest}"')
        return answer(404)


def ranged(request: Request, body: bytes, tag: str, headers: dict[str, object] | None = None) -> bytes:
    """Return the bytes that a request asks for, by its range and the condition on it."""
    match = re.fullmatch(r"bytes=([0-9]+)-", request.headers.get("range", ""))
    if match is None or request.headers.get("if-range", tag) != tag:
        return answer(200, body, {**(headers or {}), "etag": tag})
    start = int(match[1])
    if start >= len(body):
        return answer(416, headers={"content-range": f"bytes */{len(body)}"})
    span = f"bytes {start}-{len(body) - 1}/{len(body)}"
    return answer(206, body[start:], {**(headers or {}), "etag": tag, "content-range": span})


def _read(server: str, connection: socket.socket) -> Request | None:
    with connection.makefile("rb") as stream:
        line = stream.readline().decode().split(" ")
        if len(line) != 3:
            return None
        headers = {}
        while (text := stream.readline().strip()) != b"":
            name, _, value = text.decode().partition(":")
            headers[name.lower()] = value.strip()
        return Request(server, line[1], headers)
