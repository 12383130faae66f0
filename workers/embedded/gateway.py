"""Envoy as a part of the stack, and what its owner owes it: draining, a dead-man switch, a bounded access log."""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from workers.embedded.layout import DataRefused, Layout
from workers.embedded.part import Part
from workers.embedded.ports import HOST
from workers.traffic import envoy_process
from workers.traffic.envoy import EnvoyGateway
from workers.traffic.guard import DeadManSwitch
from workers.traffic.problems import GatewayDown

NAME: Final = "local"
"""The gateway's name in the settings, and so in a target."""
LOOK_SECONDS: Final = 1.0
_LAST_REQUESTS_SECONDS: Final = 2.0

Say = Callable[[str], None]


def gateway(layout: Layout, port: int) -> EnvoyGateway:
    """Return the gateway of a data directory, with its documents in place."""
    made = EnvoyGateway(layout.gateway, host=HOST, port=port)
    made.initialise()
    return made


def part(made: EnvoyGateway, environment: dict[str, str], *, drain_seconds: float) -> Part:
    """Return Envoy as a part of the stack.

    Raises:
        DataRefused: the package is not installed.
    """
    try:
        binary = envoy_process.find_envoy()
    except FileNotFoundError as error:
        raise DataRefused(str(error), status=4) from error
    arguments: tuple[str, ...] = envoy_process.ARGUMENTS
    # Its own log goes where the other parts' go: through the pipe, with a bound.
    arguments = arguments[: arguments.index("--log-path")]
    return Part(
        name="envoy",
        argv=(str(binary), *arguments),
        workdir=made.directory,
        environment=environment,
        ready=made.is_in_force,
        stop_rank=1,
        before_stop=lambda: drain(made, drain_seconds=drain_seconds),
    )


def drain(made: EnvoyGateway, *, drain_seconds: float) -> None:
    """Let open streams end, then accept nothing more and let the last requests end: SIGTERM would cut them."""
    with contextlib.suppress(GatewayDown):
        envoy_process.drain(made, timeout_seconds=drain_seconds)
        made.admin.call("/drain_listeners", method="POST")
        deadline = time.monotonic() + _LAST_REQUESTS_SECONDS
        while time.monotonic() < deadline and int(made.admin.stats("http.gw.").get("downstream_rq_active", 0)):
            time.sleep(0.05)


def watch(made: EnvoyGateway, stopping: threading.Event, say: Say) -> None:
    """Look after the gateway until the stack stops: traffic goes back when the controller is gone."""
    switch = DeadManSwitch(made, monotonic=time.monotonic())
    while not stopping.wait(LOOK_SECONDS):
        try:
            notice = switch.check(monotonic=time.monotonic(), now=datetime.now(UTC))
            if notice is not None:
                say(f"the control worker was silent for {notice['silent_seconds']} s: traffic was taken back")
            with contextlib.suppress(GatewayDown):  # it is starting, and the log can wait
                made.rotate_log()
        except Exception as error:  # edge: the switch must be looked at again, whatever this look ran into
            say(f"looking after the gateway failed: {error!r}")
