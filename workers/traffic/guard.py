"""Takes traffic back when the controller is gone. Runs in the process that owns Envoy, and plans nothing."""

import contextlib
import json
import time
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
    """Watches the controller's heartbeat and puts every prepared rollback in force when it stops.

    Silence is counted on this process's own monotonic clock from the last *change* of the heartbeat, so that a
    clock that jumps neither fires the switch nor delays it. A switch that starts anew counts from its start.

    Args:
        gateway: whose heartbeat and prepared documents to watch.
        monotonic: seconds on the monotonic clock at the start.
    """

    def __init__(self, gateway: EnvoyGateway, *, monotonic: float) -> None:
        self.gateway = gateway
        self._stamp = self._beat()
        self._changed_at = monotonic

    def check(self, *, monotonic: float, now: datetime) -> dict[str, Any] | None:
        """Look once; call it about every second.

        The notice is written before the document is renamed: a switch that dies between the two goes on at the next
        look, and a controller that comes back meanwhile finds the gateway held.

        Args:
            monotonic: seconds on the monotonic clock.
            now: for the notice.

        Returns:
            The notice when the switch fired at this look, else None.
        """
        stamp = self._beat()
        if stamp != self._stamp:
            self._stamp, self._changed_at = stamp, monotonic
        if not self.gateway.is_prepared(EVERY_TARGET):
            return None
        silent_seconds = monotonic - self._changed_at
        if not self.gateway.notice.exists():
            if silent_seconds < self.gateway.silence_seconds():
                return None
            notice = {
                "reason": REASON,
                "at": format_instant(now),
                "silent_seconds": round(silent_seconds, 3),
                "targets": self.gateway.prepared_targets(),
            }
            write_atomically(self.gateway.notice, _bytes(notice))
        return self._fire()

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
        notice = dict(json.loads(self.gateway.notice.read_bytes()))
        notice["acknowledged_seconds"] = acknowledged
        write_atomically(self.gateway.notice, _bytes(notice))
        return notice

    def _beat(self) -> int | None:
        try:
            return self.gateway.heartbeat.stat().st_mtime_ns
        except FileNotFoundError:
            return None


def _bytes(notice: dict[str, Any]) -> bytes:
    return json.dumps(notice, indent=1).encode() + b"\n"
