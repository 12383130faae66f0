"""The database restarts while a gate runs, once as an administrator restarts it and once as a crash does."""

import os
import signal
import time
from collections import Counter
from uuid import uuid4

import pytest

from schemas.api import RunCreate
from tests.support.ground import Ground, until


@pytest.mark.timeout(240)
def test_a_database_that_restarts_under_a_gate_costs_no_result_and_makes_no_second_engine(ground: Ground) -> None:
    bundle = ground.showing().stable_bundle
    assert bundle is not None
    for how in (signal.SIGINT, signal.SIGQUIT):  # what PostgreSQL calls fast and immediate
        body, key = RunCreate(bundle=bundle, policy=ground.policy, runner_class="cpu"), uuid4().hex
        run = ground.patiently(lambda body=body, key=key: ground.client.runs.create(body, key=key)).id  # type: ignore[misc] # bound
        engines: set[int] = set()

        def look(run: object = run, engines: set[int] = engines) -> bool:
            """Add the engine that runs for the job now; what it started itself has no session of its own."""
            for one in ground.engines("engines").get(str(run), []):
                try:
                    engines.update({one.pid} if os.getsid(one.pid) == one.pid else ())
                except ProcessLookupError:
                    continue
            return bool(engines)

        until(look, seconds=60, what="the engine of a gate")
        before = ground.parts()["postgres"]
        os.kill(before, how)
        until(lambda before=before: ground.parts().get("postgres") not in {None, before}, seconds=60, what="a restart")  # type: ignore[misc] # bound
        ends = time.monotonic() + 90
        while (shown := ground.patiently(lambda run=run: ground.client.runs.get(run))).state != "done":  # type: ignore[misc] # bound
            assert time.monotonic() < ends, shown
            look()
            time.sleep(0.1)
        assert (shown.outcome, shown.attempt, len(engines)) == ("passed", 1, 1)
        log = ground.patiently(lambda run=run: list(ground.client.evidence.list(stream=f"run/{run}")))  # type: ignore[misc] # bound
        gates = Counter(entry.body["gate"] for entry in log if entry.kind == "gate_recorded")
        assert set(gates.values()) == {1}
        assert set(gates) == {one["gate"] for one in shown.results}
        kinds = Counter(str(entry.kind) for entry in log)
        assert (kinds["engine_booted"], kinds["run_ended"], kinds["attempt_errored"]) == (1, 1, 0)
    ground.assert_sound()
