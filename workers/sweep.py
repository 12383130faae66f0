"""Sweep: what is due? Asked every second; costs a look at two small indexes, however many releases have ended."""

from collections.abc import Callable
from uuid import UUID

import structlog

from schemas.problems import Problem
from workers.control import Control

log = structlog.get_logger(__name__)


def sweep(control: Control, hand_out: Callable[[UUID], None]) -> int:
    """Hand out the releases that are due, ring for waiting jobs, and show the gateways that a controller lives.

    Returns:
        How many releases were handed out.
    """
    for name, gateway in control.gateways.items():
        try:
            gateway.beat()
        except OSError as error:
            log.warning("gateway_beat_failed", gateway=name, error=str(error))
    control.revive()
    due = control.due()
    for release in due:
        hand_out(release)
    for runner_class in control.waiting_classes():
        try:
            control.ring(runner_class)
        except (Problem, OSError) as error:
            log.warning("ring_failed", runner_class=runner_class, error=str(error))
    return len(due)
