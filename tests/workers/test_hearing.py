"""A control worker that stands still ends; one that has more to do than it can, or nothing, does not."""

import threading
import time

from celery import Celery
from celery.contrib.testing.worker import start_worker

from registry import logs
from tests.support.broker import broker
from workers import hearing
from workers.broker import CONTROL_QUEUE, configure, has_waiting, ring
from workers.hearing import Hearing


def test_a_worker_ends_when_it_takes_nothing_of_what_waits_and_not_before(tmp_path, monkeypatch):
    ended, blocked, goes_on = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(logs, "configure", lambda: None)  # the logs of this process are the tests'
    monkeypatch.setattr(hearing, "_end", lambda queue, _seconds: queue == CONTROL_QUEUE and ended.set())
    monkeypatch.setattr(Hearing, "silence_seconds", 1.2)
    with broker(tmp_path) as url, Celery("a-control", broker=url) as app:
        configure(app, queue=CONTROL_QUEUE)
        app.steps["worker"].add(Hearing)

        def sweep():
            time.sleep(0.02)
            if blocked.is_set():
                goes_on.wait(60)

        app.task(name="a.sweep", shared=False)(sweep)
        with start_worker(app, pool="threads", concurrency=1, perform_ping_check=False, shutdown_timeout=20):
            assert not ended.wait(3)  # nothing waits
            busy = time.monotonic() + 3
            while time.monotonic() < busy:  # more waits than it takes
                ring(app, "a.sweep", queue=CONTROL_QUEUE)
            assert has_waiting(app, CONTROL_QUEUE)
            assert not ended.is_set()
            blocked.set()
            assert ended.wait(20)
            goes_on.set()
