"""Takes traffic back when the controller is gone. Runs in the process that owns Envoy, and plans nothing."""

import contextlib
import json
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from schemas.common import format_instant
from workers.traffic.desired import EVERY_TARGET, locked, write_atomically
from workers.traffic.envoy import EnvoyGateway
from workers.traffic.problems import GatewayBusy

REASON: Final = "controller_lost"
_LOCK_SECONDS: Final = 2.0
_CONFIRM_SECONDS: Final = 2.0


class DeadManSwitch:
    """Watches the controller's heartbeats and puts every prepared rollback in force when one of them stops.

    Each target that has a way back has a heartbeat of its own: that others are looked at keeps none of them alive. They
    go back together, since each document in force holds the weights of all.

    Silence is counted on this process's own monotonic clock from the last *change* of a heartbeat, so that a
    clock that jumps neither fires the switch nor delays it. A switch that starts anew counts from its start.

    Args:
        gateway: whose heartbeats and prepared documents to watch.
        monotonic: seconds on the monotonic clock at the start.
    """

    def __init__(self, gateway: EnvoyGateway, *, monotonic: float) -> None:
        self.gateway = gateway
        self._seen: dict[str, tuple[int | None, float]] = {}
        """Target with a way back → time of its heartbeat, and since when it has been that."""
        self._owed: dict[str, Any] | None = None
        """A notice that found no room on the disk."""
        self._heard: dict[str, int | None] = {}
        """Target → time of its heartbeat when that was."""
        self._look(gateway.silences(), monotonic)

    def check(self, *, monotonic: float, now: datetime) -> dict[str, Any] | None:
        """Look once; call it about every second.

        The notice is written before the document is renamed: a switch that dies between the two goes on at the next
        look, and a controller that comes back meanwhile finds the gateway held. Where there is no room for the notice,
        traffic goes back all the same, and it is written once there is.

        Args:
            monotonic: seconds on the monotonic clock.
            now: for the notice.

        Returns:
            The notice when the switch fired at this look, else None.
        """
        self._catch_up()
        allowed = self.gateway.silences()
        silent = self._look(allowed, monotonic)
        if not self.gateway.is_prepared(EVERY_TARGET):
            return None
        if not self.gateway.notice.exists():
            over = [seconds for target, seconds in silent.items() if seconds >= allowed[target]]
            if not over:
                return None
            notice = {
                "reason": REASON,
                "at": format_instant(now),
                "silent_seconds": round(max(over), 3),
                "targets": list(allowed),
            }
            self._tell(notice)
        return self._fire()

    def _tell(self, notice: dict[str, Any]) -> None:
        """Write a notice, or owe it where there is no room."""
        self._owed = notice
        with contextlib.suppress(OSError):
            write_atomically(self.gateway.notice, _bytes(notice))
            self._owed = None

    def _catch_up(self) -> None:
        """Write the notice that is owed. A controller that has looked since has found what it says, and needs none."""
        if self._owed is None:
            return
        if any(self._beat(target) != stamp for target, stamp in self._heard.items()):
            self._owed = None
        else:
            self._tell(self._owed)

    def _fire(self) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            # A controller that hangs may hold the lock for ever. A rename is whole without it.
            with contextlib.suppress(GatewayBusy):
                stack.enter_context(locked(self.gateway.lock, timeout_seconds=_LOCK_SECONDS))
            began = time.monotonic()
            with contextlib.suppress(FileNotFoundError):
                self.gateway.put_in_force(EVERY_TARGET)
            acknowledged = None
            while acknowledged is None and time.monotonic() - began < _CONFIRM_SECONDS:
                if self.gateway.is_in_force():
                    acknowledged = round(time.monotonic() - began, 4)
                else:
                    time.sleep(0.01)
        notice = self._owed or dict(json.loads(self.gateway.notice.read_bytes()))
        notice["acknowledged_seconds"] = acknowledged
        self._heard = {target: self._beat(target) for target in notice["targets"]}
        self._tell(notice)
        return notice

    def _look(self, targets: Iterable[str], monotonic: float) -> dict[str, float]:
        """Return for how many seconds each of these targets has not been looked at."""
        seen = {}
        for target in targets:
            stamp = self._beat(target)
            before = self._seen.get(target)
            seen[target] = before if before is not None and before[0] == stamp else (stamp, monotonic)
        self._seen = seen
        return {target: monotonic - since for target, (_, since) in seen.items()}

    def _beat(self, target: str) -> int | None:
        try:
            return self.gateway.heartbeat(target).stat().st_mtime_ns
        except FileNotFoundError:
            return None


def _bytes(notice: dict[str, Any]) -> bytes:
    return json.dumps(notice, indent=1).encode() + b"\n"
