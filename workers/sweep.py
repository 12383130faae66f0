"""Sweep: what is due? Asked every second; costs a look at a few small indexes, however many releases have ended."""

from collections.abc import Callable
from uuid import UUID

import structlog

from registry import checkpoints
from schemas.problems import Problem
from workers import quarantines
from workers.control import Control

log = structlog.get_logger(__name__)


def sweep(control: Control, hand_out: Callable[[UUID], None]) -> int:
    """Hand out the releases that are due, seal evidence that waits, and ring for waiting jobs.

    It does not show the gateways that a controller lives: only whoever looks at live traffic does (`rollout`), so that
    traffic which nobody judges goes back by itself.

    Returns:
        How many releases were handed out.
    """
    control.revive()
    quarantines.wake(control)
    due = control.due()
    for release in due:
        hand_out(release)
    for runner_class in control.waiting_classes():
        control.ring(runner_class)
    _seal(control)  # last: it may wait for a writer
    return len(due)


def _seal(control: Control) -> None:
    """Seal what has waited for a checkpoint for long enough. What cannot be sealed now is due at the next sweep."""
    for project in checkpoints.due(control.service):
        try:
            made, is_new = checkpoints.make(control.service, project, by="controller")
            if is_new:
                log.info("checkpoint_made", project=str(project), number=made.number, digest=made.digest)
        except Problem as error:
            log.warning("checkpoint_failed", project=str(project), error=str(error))
