"""Sweep: what is due? Asked every second; costs a look at two small indexes, however many releases have ended."""

from collections.abc import Callable
from uuid import UUID

from workers.control import Control


def sweep(control: Control, hand_out: Callable[[UUID], None]) -> int:
    """Hand out the releases that are due, and ring for waiting jobs.

    It does not show the gateways that a controller lives: only whoever looks at live traffic does (`rollout`), so that
    traffic which nobody judges goes back by itself.

    Returns:
        How many releases were handed out.
    """
    control.revive()
    due = control.due()
    for release in due:
        hand_out(release)
    for runner_class in control.waiting_classes():
        control.ring(runner_class)
    return len(due)
