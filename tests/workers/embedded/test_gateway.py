import os
import signal
import threading

import pytest

from tests.support.gateway import arm, during_streams, free_port, split, wait_until
from tests.support.streams import Script, stream_engine
from workers.embedded import gateway
from workers.embedded.layout import Layout
from workers.embedded.supervisor import Ending, Supervisor


@pytest.fixture
def layout(tmp_path):
    made = Layout(tmp_path / "data")
    made.prepare()
    return made


def test_streams_run_to_their_end_while_the_stack_stops(layout):
    made = gateway.gateway(layout, free_port())
    part = gateway.part(made, {}, drain_seconds=20.0)
    said, found, ready = [], [], threading.Event()
    supervisor = Supervisor([part], logs=layout.logs, record=layout.processes, say=said.append)

    def act():
        ready.wait(20)
        made.apply(split(1, arm("stable", engine.address, 10_000)))
        url = f"http://127.0.0.1:{made.port}/chat@prod/v1/chat/completions"
        found.append(during_streams(url, 8, lambda: os.kill(os.getpid(), signal.SIGTERM)))

    with stream_engine("stable", Script(tokens=20, interval_ms=50)) as engine:
        actor = threading.Thread(target=act, daemon=True)
        actor.start()
        outcome = supervisor.run(ready.set, wait_seconds=20)
        actor.join(20)
    assert outcome.ending is Ending.ASKED
    assert (found[0].whole, found[0].broken) == (8, 0)
    assert not made.admin.is_live()


def test_the_guard_goes_on_looking_after_a_look_that_failed(layout):
    made = gateway.gateway(layout, free_port())
    prepared = layout.gateway / "rollback" / "all.rds.json"
    prepared.write_text("{}")
    made.notice.write_text("this is no JSON")
    stopping, said = threading.Event(), []
    guard = threading.Thread(target=gateway.watch, args=(made, stopping, said.append), daemon=True)
    guard.start()
    wait_until(lambda: len(said) == 1)
    prepared.write_text("{}")
    wait_until(lambda: len(said) == 2)
    stopping.set()
    guard.join(10)
    assert not guard.is_alive()
    assert all("looking after the gateway failed: JSONDecodeError" in text for text in said)
