"""What beat asks for and how often, and how many of its messages may wait while nobody takes them.

No message carries an expiry. Celery writes one as an instant of beat's clock, and a worker compares it with its own:
one whose clock runs ahead would drop every sweep. So messages last, and beat asks for nothing while as many wait as a
worker that comes back works off in a moment.
"""

from typing import Any, Final

from celery import beat

from workers.broker import CONTROL_QUEUE, MOST_WAITING, waiting

SWEEP_SECONDS: Final = 1.0
TIDY_SECONDS: Final = 60.0

SCHEDULE: Final = {
    "sweep": {"task": "workers.tasks.sweep", "schedule": SWEEP_SECONDS},
    "tidy": {"task": "workers.tasks.tidy", "schedule": TIDY_SECONDS},
}


class Scheduler(beat.Scheduler):  # type: ignore[misc] # Celery ships no types
    """Sends what is due, unless enough of it waits already."""

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send one message that is due."""
        if waiting(self.app, CONTROL_QUEUE) < MOST_WAITING:
            super().apply_entry(entry, producer)
