"""The HTTP interface on a free port, served by the real server in a thread."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, get_args
from uuid import UUID

import httpx

from gates.plain import NO_AUTHORITY
from registry import auth, db, projects
from registry.api.app import create_app
from registry.api.server import Server
from registry.auth import Actor
from registry.service import Service
from schemas.api import RoleName

ROLES: tuple[RoleName, ...] = get_args(RoleName)


class Api:
    """A running interface with one token a role in the project `default`.

    `url` is its address, `tokens` maps a role to a bearer token, `clients` a role to an HTTP client that sends it.
    """

    def __init__(self, service: Service) -> None:
        """Make the tokens; `with` starts and stops the server."""
        self.service = service
        self.tokens = make_tokens(service, "default")
        with service.database.transaction() as session:
            self.project_id: UUID = projects.named(session, "default").id
        # Named as TCP: otherwise asyncio leaves Nagle's algorithm on, and each answer waits 40 ms.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._socket = listening
        self.app = create_app(service)
        self._server = Server(self.app)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.clients = {role: self.client(token) for role, token in self.tokens.items()}

    def client(self, token: str | None) -> httpx.Client:
        """Return an HTTP client that sends this token, or none."""
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=False, verify=NO_AUTHORITY)

    @contextmanager
    def visitor(self, role: RoleName) -> Iterator[httpx.Client]:
        """Give an HTTP client that has logged in to the pages, as a browser does."""
        with self.client(None) as client:
            client.post("/login", data={"token": self.tokens[role], "next": "/"})
            yield client

    def actor(self, role: RoleName = "engineer") -> Actor:
        """Return the holder of a role's token."""
        return Actor(project_id=self.project_id, project="default", name=role, role=role)

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(0.005)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for client in self.clients.values():
            client.close()
        self._server.should_exit = True
        self._thread.join(timeout=20)
        self._socket.close()
        if self._thread.is_alive():
            raise RuntimeError("the server did not stop")


def one_by_one(client: httpx.Client, path: str) -> list[dict[str, Any]]:
    """Return the items of a list, read in pages of one each."""
    found: list[dict[str, Any]] = []
    following: str | None = ""
    while following is not None:
        answer = client.get(path, params={"limit": 1, **({"cursor": following} if following else {})})
        assert answer.status_code == 200, answer.text
        found += answer.json()["items"]
        following = answer.json()["next"]
    return found


def make_tokens(service: Service, project: str) -> dict[RoleName, str]:
    """Make a project, if it is not there, and a token for each role. Returns role → bearer token."""
    made: dict[RoleName, str] = {}
    with service.database.transaction() as session:
        row, _ = projects.ensure(session, service, project, by="test")
        for role in ROLES:
            now = db.now(session)
            made[role] = auth.create_token(session, service, row, role, role, by="test", now=now).secret
    return made
