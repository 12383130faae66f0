"""The clock: `celery -A workers.beat beat` asks for a sweep every second, and for tidying every minute.

It loads nothing of what these do.
"""

from celery import Celery

from registry.settings import Settings
from workers.broker import CONTROL_QUEUE, configure
from workers.clock import SCHEDULE

settings = Settings()  # the process is this application; nothing imports it for anything else
app = Celery("sluicegate-beat", broker=settings.broker_url.get_secret_value())
configure(app, queue=CONTROL_QUEUE, authorities=settings.broker_ca)
app.conf.beat_schedule = SCHEDULE
# In memory: what is due so often needs no file of what was done when.
app.conf.beat_scheduler = "workers.clock:Scheduler"
