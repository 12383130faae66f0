"""The controller is killed anywhere inside its changes: what is desired stays readable, and the next change works."""

import multiprocessing
import random
import time
from itertools import count

import pytest

from gates.router import Split
from tests.support.gateway import TARGET, arm, ask_many, shares, split, wait_until
from workers.traffic.envoy import EnvoyGateway


def _churn(directory, port, back, forth, ready):
    """Go through canaries for ever: prepare, shift, restore or discard."""
    gateway = EnvoyGateway(directory, port=port)
    present = gateway.desired(TARGET)
    ready.set()
    for turn in count():
        gateway.prepare_rollback(TARGET, back)
        present = gateway.apply(Split(TARGET, present.revision + 1, forth)).split
        if turn % 2:
            present = gateway.restore(TARGET).split
        else:
            gateway.discard_rollback(TARGET)
            present = gateway.apply(Split(TARGET, present.revision + 1, back)).split


@pytest.mark.parametrize("seed", [1])
def test_a_controller_killed_anywhere_leaves_a_gateway_that_goes_on(running, engines, stable, candidate, seed):
    rng, gateway = random.Random(seed), running.gateway
    bystander = engines("bystander")
    gateway.apply(split(1, arm("stable", bystander.address, 10_000, target="other@prod"), target="other@prod"))
    gateway.apply(split(1, *shares(stable, candidate, 0)))
    context = multiprocessing.get_context("forkserver")  # imports once, and forks without our threads
    context.set_forkserver_preload(["workers.traffic.envoy", __name__])
    for _ in range(12):
        ready = context.Event()
        back, forth = shares(stable, candidate, 0), shares(stable, candidate, 10_000)
        arguments = (gateway.directory, gateway.port, back, forth, ready)
        controller = context.Process(target=_churn, args=arguments, daemon=True)
        controller.start()
        assert ready.wait(60)
        time.sleep(rng.uniform(0, 0.06))
        controller.kill()
        controller.join()
        # 1. What is desired can be read, and is one of the two splits that were ever meant.
        found = gateway.desired(TARGET)
        assert found.arms in {back, forth}
        # 2. Applying it again, as a redelivered task does, ends with it in force.
        gateway.apply(found)
        engine = "candidate" if found.arms == forth else "stable"
        answers = ask_many(running.url(), 10)
        assert (dict(answers.engines), dict(answers.revisions)) == ({engine: 10}, {str(found.revision): 10})
        # 3. The way back is prepared again and works.
        gateway.prepare_rollback(TARGET, back)
        restored = gateway.restore(TARGET).split
        assert restored.revision == found.revision + 1
        assert ask_many(running.url(), 10).engines == {"stable": 10}
        # 4. Nobody else noticed.
        assert ask_many(running.url("other@prod"), 10).engines == {"bystander": 10}
    # 5. It starts again from what is on disk.
    running.kill()
    running.restart()
    wait_until(gateway.is_in_force)
    assert ask_many(running.url(), 10).engines == {"stable": 10}
