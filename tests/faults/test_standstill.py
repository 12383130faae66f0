"""A control worker that stands still ends by itself, and the next one goes on with its releases."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from celery import Celery
from sqlalchemy import select

from registry.service import Service
from registry.tables import JobRow
from schemas.api import ReleaseCreate, TargetCreate
from tests.support import factories, programs
from tests.support.broker import broker, free_port
from tests.support.runners import CLASS, QUICK_GATES, bench, until
from workers.broker import CONTROL_QUEUE, configure, ring, waiting

SECONDS = 10
"""How long messages may wait here for a worker that takes none."""


@pytest.mark.timeout(240)
def test_a_control_worker_that_stands_still_ends_and_the_next_goes_on_but_not_while_the_broker_is_away(
    service: Service, tmp_path: Path
) -> None:
    port, log = free_port(), tmp_path / "control.log"
    words = [*programs.control_words(), "-I", "tests.support.standstill"]
    url = f"redis://127.0.0.1:{port}/0"
    with bench(service, tmp_path) as made, Celery("a-test", broker=url) as app:
        configure(app, queue=CONTROL_QUEUE)
        policy = factories.registered_policy(service, made.api.actor("manager"), "quick", gates=list(QUICK_GATES))
        made.client("manager").targets.create(TargetCreate(name="chat@prod", runner_class=CLASS, gateway="local"))
        wanted = ReleaseCreate(target="chat@prod", bundle=made.bundle().digest, policy=policy.digest)
        environment = programs.service_environment(made.service, url)
        environment["SLUICEGATE_CONTROL_SILENCE_SECONDS"] = str(SECONDS)
        with (
            programs.program(programs.beat_words(), environment, tmp_path / "beat.log"),
            programs.program(words, environment, log) as control,
        ):
            with broker(tmp_path / "first", port=port):
                until(lambda: b" ready." in log.read_bytes(), seconds=60, what="a control worker that listens")
            with pytest.raises(subprocess.TimeoutExpired):
                control.wait(SECONDS + 2)
            with broker(tmp_path / "second", port=port):
                until(lambda: log.read_bytes().count(b'"Connected to') == 2, what="a control worker that is back")
                until(lambda: ring(app, "workers.tasks.sweep", queue=CONTROL_QUEUE), what="a broker that is back")
                until(lambda: waiting(app, CONTROL_QUEUE) == 0, what="a control worker that takes what waits")
                control.send_signal(signal.SIGRTMIN)
                release = made.client().releases.create(wanted).id
                assert control.wait(6 * SECONDS) == os.EX_TEMPFAIL
                (told,) = [json.loads(line) for line in log.read_text("utf-8").splitlines() if '"not_heard"' in line]
                assert (told["queue"], told["seconds"]) == (CONTROL_QUEUE, SECONDS)
                assert any("standstill.py" in place for place in told["threads"]["MainThread"])
                job = select(JobRow.id).where(JobRow.release_id == release)
                with service.database.transaction() as session:
                    assert session.scalar(job) is None
                with programs.program(words, environment, log), service.database.transaction() as session:
                    until(lambda: session.scalar(job), what="a job of the release")
