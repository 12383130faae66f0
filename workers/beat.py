"""The clock: `celery -A workers.beat beat` asks for a sweep every second, and for tidying every minute.

It loads nothing of what these do.
"""

from celery import Celery

from registry.settings import Settings
from workers.broker import CONTROL_QUEUE, configure

SWEEP_SECONDS = 1.0
TIDY_SECONDS = 60.0

settings = Settings()  # the process is this application; nothing imports it for anything else
app = Celery("sluicegate-beat", broker=settings.broker_url.get_secret_value())
configure(app, queue=CONTROL_QUEUE)
app.conf.beat_schedule = {
    "sweep": {"task": "workers.tasks.sweep", "schedule": SWEEP_SECONDS, "options": {"expires": 5}},
    "tidy": {"task": "workers.tasks.tidy", "schedule": TIDY_SECONDS, "options": {"expires": TIDY_SECONDS}},
}
app.conf.beat_scheduler = "celery.beat:Scheduler"  # what is due so often needs no file of what was done when
