"""Asks a running Envoy what it does, through its admin socket."""

import http.client
import json
import os
import socket
import urllib.parse
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from workers.traffic.problems import GatewayDown

_LONGEST_SOCKET_PATH: Final = 100
TIMEOUT_SECONDS: Final = 5.0


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket, also where the path is too long for a socket address."""

    def __init__(self, path: Path, *, timeout_seconds: float) -> None:
        super().__init__("envoy", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        if len(os.fsencode(self._path)) <= _LONGEST_SOCKET_PATH:
            self.sock.connect(str(self._path))
            return
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.sock.connect(f"/proc/self/fd/{folder}/{self._path.name}")
        finally:
            os.close(folder)


class EnvoyAdmin:
    """Client of one Envoy's admin interface.

    Args:
        path: of the unix socket.
        timeout_seconds: longest wait for one answer.
    """

    def __init__(self, path: Path, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.path = path
        self.timeout_seconds = timeout_seconds

    def call(self, target: str, *, method: str = "GET") -> tuple[int, bytes]:
        """Return status and body of one request. Raises GatewayDown."""
        connection = _UnixConnection(self.path, timeout_seconds=self.timeout_seconds)
        try:
            connection.request(method, target)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise GatewayDown(f"Envoy does not answer on {self.path}: {error}") from error
        finally:
            connection.close()

    def _json(self, target: str) -> Any:
        status, body = self.call(target)
        try:
            return json.loads(body)
        except ValueError as error:
            raise GatewayDown(f"Envoy answered {status} to {target} without JSON") from error

    def is_live(self) -> bool:
        """Tell whether Envoy runs and has taken its first documents."""
        try:
            return self.call("/ready")[0] == 200
        except GatewayDown:
            return False

    def stats(self, prefix: str) -> dict[str, str | int]:
        """Return counters, gauges and texts by name without the prefix. Raises GatewayDown."""
        expression = urllib.parse.quote("^" + prefix.replace(".", r"\."))
        found = self._json(f"/stats?format=json&filter={expression}")["stats"]
        return {each["name"].removeprefix(prefix): each["value"] for each in found if "name" in each}

    def clusters(self) -> dict[str, dict[str, Any]]:
        """Return the hosts' states by cluster name. Raises GatewayDown."""
        found = self._json("/clusters?format=json").get("cluster_statuses", [])
        return {each["name"]: each for each in found}

    def healthy(self) -> frozenset[str]:
        """Return the clusters of which a host passes the health check. Raises GatewayDown."""
        return frozenset(
            cluster
            for cluster, status in self.clusters().items()
            if any(_is_healthy(host["health_status"]) for host in status.get("host_statuses", []))
        )

    def active(self, clusters: Collection[str]) -> dict[str, int]:
        """Return how many requests are open on each cluster's hosts; 0 on one that is gone. Raises GatewayDown."""
        found = self.clusters()
        return {cluster: _active(found.get(cluster, {})) for cluster in clusters}

    def started_at(self) -> datetime:
        """Return when the Envoy that owns the socket made it, by its own machine's clock. Raises GatewayDown.

        Every Envoy binds a socket of its own, so that not even one that was killed and started again within a second
        is taken for the one before. `touch` and the like can only make it seem younger.
        """
        try:
            status = self.path.stat()
        except OSError as error:
            raise GatewayDown(f"Envoy's admin socket {self.path} is not there: {error.strerror}") from error
        return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=status.st_ctime_ns // 1000)


def _active(status: dict[str, Any]) -> int:
    stats = (stat for host in status.get("host_statuses", []) for stat in host["stats"])
    return sum(int(stat.get("value", 0)) for stat in stats if stat["name"] == "rq_active")


def _is_healthy(status: dict[str, Any]) -> bool:
    failing = ("failed_active_health_check", "failed_outlier_check", "pending_active_hc", "pending_dynamic_removal")
    return not any(status.get(each) for each in failing)
