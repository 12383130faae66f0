"""Speaks to a cluster's API over HTTP: the few requests that running engines takes, and what they are refused with."""

import json
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from workers.launchers.base import NotTold
from workers.launchers.logs import cleaned

FIELD_MANAGER = "sluicegate"
ANSWER_SECONDS = 20.0
_MOST_LOG_BYTES = 4 * 1024 * 1024


class ClusterUnreachable(NotTold):
    """The cluster's API did not answer as it should: what runs there is not known here."""


class ClusterBusy(ClusterUnreachable):
    """The cluster's API said to come later: what was asked was neither refused nor done."""


class ClusterRefused(RuntimeError):
    """The cluster's API said no. `status` is HTTP's, `reason` is the API's word for it, such as AlreadyExists."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{reason or status}: {message}")
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class Cluster:
    """Where the cluster's API is, what we show it, and whom we believe that it is. Both files are replaced in time."""

    url: str
    namespace: str
    token_file: Path
    ca_file: Path | None = None


class KubeClient:
    """Objects of one namespace. Safe to call from several threads."""

    def __init__(self, cluster: Cluster) -> None:
        """Prepare; nothing is asked yet. Raises OSError when the certificate's file cannot be read."""
        self._cluster = cluster
        self._lock = threading.Lock()
        self._stamp = self._stamped()
        self._http = self._connected()
        self._before: httpx.Client | None = None

    @property
    def namespace(self) -> str:
        """The namespace."""
        return self._cluster.namespace

    def create(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Create an object, checked strictly: an unknown field is refused, not dropped."""
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        return self._document("POST", path, query, body)

    def get(self, path: str) -> dict[str, Any] | None:
        """Return an object, or None when there is none of that name."""
        try:
            return self._document("GET", path, {})
        except ClusterRefused as refused:
            if refused.status == httpx.codes.NOT_FOUND:
                return None
            raise

    def listed(self, path: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the objects that have these labels."""
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        items = self._document("GET", path, {"labelSelector": selector}).get("items")
        if not isinstance(items, list):
            raise ClusterUnreachable(f"{path} was answered without a list")
        return items

    def patch(self, path: str, change: Mapping[str, object]) -> dict[str, Any]:
        """Change fields of an object; lists are replaced."""
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        return self._document("PATCH", path, query, change)

    def delete(self, path: str, *, uid: str, grace_seconds: int) -> bool:
        """Ask for an object to be deleted if it is still that one. False when it is not there any more."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": grace_seconds,
            "preconditions": {"uid": uid},
            "propagationPolicy": "Foreground",
        }
        try:
            self._document("DELETE", path, {}, body)
        except ClusterRefused as refused:
            if refused.status in {httpx.codes.NOT_FOUND, httpx.codes.CONFLICT}:
                return False
            raise
        return True

    def logs(self, path: str, *, container: str, lines: int) -> list[str]:
        """Return the last lines that a container of a pod wrote; none when the cluster has none."""
        query = {"container": container, "tailLines": str(lines), "limitBytes": str(_MOST_LOG_BYTES)}
        response = self._send("GET", f"{path}/log", query)
        return cleaned(response.text, lines) if response.is_success else []

    def _stamped(self) -> tuple[int, int, int] | None:
        if self._cluster.ca_file is None:
            return None
        told = self._cluster.ca_file.stat()
        return told.st_ino, told.st_size, told.st_mtime_ns

    def _connected(self) -> httpx.Client:
        ca_file = self._cluster.ca_file
        trusted = ssl.create_default_context(cafile=ca_file) if ca_file is not None else True
        return httpx.Client(base_url=self._cluster.url, verify=trusted, timeout=ANSWER_SECONDS, trust_env=False)

    def _client(self) -> httpx.Client:
        """Return the connections; new ones when the certificates to believe were replaced. Raises OSError."""
        with self._lock:
            if (stamp := self._stamped()) != self._stamp:
                made = self._connected()
                if self._before is not None:
                    self._before.close()
                # Others may be in the middle of a request over the ones before.
                self._http, self._before, self._stamp = made, self._http, stamp
            return self._http

    def _document(
        self, method: str, path: str, query: Mapping[str, str], body: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        response = self._send(method, path, query, body)
        try:
            found = response.json()
        except ValueError:
            found = None
        if not response.is_success:
            told = found if isinstance(found, dict) else {}
            if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
                raise ClusterBusy(f"{method} {path}: {response.status_code} {response.text[:300]}")
            if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR or not told:
                raise ClusterUnreachable(f"{method} {path}: {response.status_code} {response.text[:300]}")
            raise ClusterRefused(
                response.status_code, str(told.get("reason") or ""), str(told.get("message") or "")[:1000]
            )
        if not isinstance(found, dict):
            raise ClusterUnreachable(f"{method} {path} was answered with what is no object")
        return found

    def _send(
        self, method: str, path: str, query: Mapping[str, str], body: Mapping[str, object] | None = None
    ) -> httpx.Response:
        try:
            token = self._cluster.token_file.read_text(encoding="ascii").strip()
            return self._client().request(
                method,
                path,
                params=query,
                content=None if body is None else json.dumps(body),
                headers={
                    "authorization": f"Bearer {token}",
                    "content-type": f"application/{'merge-patch+' if method == 'PATCH' else ''}json",
                    "accept": "application/json, */*",
                },
            )
        except (OSError, httpx.HTTPError) as error:
            raise ClusterUnreachable(f"{method} {path}: {str(error) or type(error).__name__}") from error
