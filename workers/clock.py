"""What beat asks for and how often, and how many of its messages may wait while nobody takes them.

No message carries an expiry of Celery's. That is an instant of beat's clock, and a worker compares it with its own: one
whose clock runs ahead would drop every sweep. So messages last, or end by the broker's clock, and beat asks for nothing
while as many wait as a worker that comes back works off in a moment.
"""

from typing import Any, Final

from celery import beat

from workers.broker import CONTROL_QUEUE, ring

SWEEP_SECONDS: Final = 1.0
TIDY_SECONDS: Final = 60.0

SCHEDULE: Final = {
    "sweep": {"task": "workers.tasks.sweep", "schedule": SWEEP_SECONDS},
    "tidy": {"task": "workers.tasks.tidy", "schedule": TIDY_SECONDS},
}


class Scheduler(beat.Scheduler):  # type: ignore[misc] # Celery ships no types
    """Sends what is due, unless enough of it waits already or no broker can be had."""

    producer = None  # a connection of its own, which nothing here would use

    def apply_entry(self, entry: Any, producer: Any = None) -> None:  # noqa: ARG002 - as Celery calls it
        """Send one message that is due."""
        ring(self.app, entry.task, queue=CONTROL_QUEUE)
