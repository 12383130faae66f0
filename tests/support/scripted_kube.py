"""An API server of a cluster on loopback, as far as running engines needs one: real HTTP, objects checked strictly.

It knows pods, leader-worker sets and pods' logs. It wants the token, refuses fields that the API does not have, answers
a name that is taken with 409, and honours the preconditions of a delete. Unless it has a node, nothing is scheduled or
run: what becomes of a pod is what the test writes into its status.
"""

import copy
import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import parse_qs, urlsplit

from tests.support.kube_fields import faults

TOKEN = "token-of-the-service-account"
KINDS = {
    "pods": ("/api/v1", "Pod", "v1"),
    "networkpolicies": ("/apis/networking.k8s.io/v1", "NetworkPolicy", "networking.k8s.io/v1"),
    "leaderworkersets": (
        "/apis/leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        "leaderworkerset.x-k8s.io/v1",
    ),
}


class Node(Protocol):
    """What really runs the pods that are created."""

    def take(self, name: str) -> None:
        """Start a pod that was just created."""

    def release(self, name: str, grace_seconds: int) -> None:
        """End a pod and then remove it. Returns at once."""

    def log(self, name: str) -> str:
        """Return what a pod wrote."""


class ScriptedKube:
    """The server. `objects` is what there is, by collection and name; `asked` is every request.

    What is created is kept as `admission` makes it. So many creates get no answer as `answers_lost` says, and those
    after them the refusal in `refuses_after_loss`.
    """

    def __init__(self) -> None:
        self.node: Node | None = None
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.log = "loading\nready\n"
        self.refused_kinds: dict[str, tuple[int, str, str]] = {}
        self.refuses_creates: tuple[int, str, str] | None = None
        self.refusal: tuple[int, str, str] | None = None
        self.answers_lost = 0
        self.loses = ("/pods", "/leaderworkersets")
        self.refuses_after_loss: tuple[int, str, str] | None = None
        self.keeps = False
        self.admission: Callable[[dict[str, Any]], None] = lambda _: None
        self._uid = 0
        kube = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kube.handle(self)

            do_POST = do_GET  # noqa: N815 - http.server names them
            do_PATCH = do_GET  # noqa: N815 - as above
            do_DELETE = do_GET  # noqa: N815 - as above

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, collection: str, body: dict[str, Any], **status: Any) -> dict[str, Any]:
        """Put an object there, as a create or a controller would."""
        self._uid += 1
        metadata = {**body["metadata"], "uid": f"uid-{self._uid}", "creationTimestamp": "2026-11-30T04:00:00Z"}
        made = {**body, "metadata": metadata, "status": status}
        self.objects[collection, metadata["name"]] = made
        return made

    def become(self, name: str, **status: Any) -> None:
        """Give a pod a status."""
        self.objects["pods", name]["status"] = status

    def created_now(self, name: str) -> None:
        """Let a pod have been created at this moment."""
        self.objects["pods", name]["metadata"]["creationTimestamp"] = datetime.now(UTC).isoformat()

    def remove(self, name: str) -> None:
        """Let a pod be gone."""
        self._remove("pods", name)

    def _remove(self, collection: str, name: str) -> None:
        """Remove an object, and with it what has no other owner, as the cluster's garbage collection does."""
        gone = self.objects.pop((collection, name), None)
        for (kind, other), one in list(self.objects.items()):
            owners = [owner.get("uid") for owner in one["metadata"].get("ownerReferences") or []]
            if gone is not None and owners == [gone["metadata"]["uid"]]:
                self._remove(kind, other)

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        url = urlsplit(request.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        length = int(request.headers.get("content-length") or 0)
        body = json.loads(request.rfile.read(length)) if length else None
        self.asked.append((request.command, url.path, query, copy.deepcopy(body)))
        status, answer = self._answer(request, url.path, query, body)
        if self.answers_lost and request.command == "POST" and url.path.endswith(self.loses):
            self.answers_lost -= 1
            self.refuses_creates = self.refuses_after_loss
            request.close_connection = True
            request.connection.close()
            return
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("content-type", "text/plain" if isinstance(answer, str) else "application/json")
        request.send_header("content-length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _answer(self, request: BaseHTTPRequestHandler, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _refused(401, "Unauthorized", "Unauthorized")
        if self.refusal is not None:
            return _refused(*self.refusal)
        for collection, (base, kind, version) in KINDS.items():
            place = f"{base}/namespaces/engines/{collection}"
            for what in (collection, f"{request.command} {collection}"):
                if path.startswith(place) and what in self.refused_kinds:
                    return _refused(*self.refused_kinds[what])
            if path == place and request.command == "POST":
                return self._create(collection, kind, version, query, body)
            if path == place:
                wanted = dict(one.split("=", 1) for one in query.get("labelSelector", "").split(",") if one)
                return 200, {"items": [one for one in self._all(collection) if wanted.items() <= _labels(one).items()]}
            if path.startswith(f"{place}/"):
                return self._one(request.command, collection, path.removeprefix(f"{place}/"), query, body)
        return _refused(404, "NotFound", "the server could not find the requested resource")

    def _all(self, collection: str) -> list[dict[str, Any]]:
        return [one for (kept, _), one in self.objects.items() if kept == collection]

    def _create(self, collection: str, kind: str, version: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if self.refuses_creates is not None:
            return _refused(*self.refuses_creates)
        if query != {"fieldManager": "sluicegate", "fieldValidation": "Strict"}:
            return _refused(400, "BadRequest", f"not asked as it should be: {query}")
        found = faults(body, kind)
        if found or (body["kind"], body["apiVersion"]) != (kind, version):
            return _refused(400, "BadRequest", f"strict decoding error: {', '.join(found) or 'another kind'}")
        name = body["metadata"]["name"]
        if (collection, name) in self.objects:
            return _refused(409, "AlreadyExists", f'{collection} "{name}" already exists')
        if collection != "networkpolicies":
            self.admission(body)
        made = self.add(collection, body, phase="Pending")
        if self.node is not None and collection == "pods":
            self.node.take(name)
        return 201, made

    def _one(self, method: str, collection: str, rest: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        name, _, sub = rest.partition("/")
        found = self.objects.get((collection, name))
        if found is None:
            return _refused(404, "NotFound", f'{collection} "{name}" not found')
        if sub == "log":
            log = self.log if self.node is None else self.node.log(name)
            return 200, "".join(log.splitlines(keepends=True)[-int(query["tailLines"]) :])
        if method == "PATCH":
            found["metadata"] |= body["metadata"]
        if method == "DELETE":
            if wrong := faults(body, "DeleteOptions"):
                return _refused(400, "BadRequest", f"strict decoding error: {', '.join(wrong)}")
            if body["preconditions"]["uid"] != found["metadata"]["uid"]:
                return _refused(409, "Conflict", "the UID in the precondition does not match")
            grace_seconds = body["gracePeriodSeconds"]
            if self.node is not None and collection == "pods" and grace_seconds == 0:
                # Forced: what its node still runs is forgotten.
                self._remove(collection, name)
            elif self.keeps or (self.node is not None and collection == "pods"):
                found["metadata"] |= {"deletionTimestamp": "2026-11-30T05:00:00Z"}
                if self.node is not None and not self.keeps:
                    self.node.release(name, grace_seconds)
            else:
                self._remove(collection, name)
        return 200, found


def _labels(found: dict[str, Any]) -> dict[str, str]:
    return dict(found["metadata"].get("labels") or {})


def _refused(status: int, reason: str, message: str) -> tuple[int, Any]:
    return status, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message}
