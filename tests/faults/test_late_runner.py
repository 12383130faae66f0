"""A runner that stands still past its lease, then goes on: its word is refused, its engine ends, nothing is doubled."""

import pytest

from tests.support import programs, stopping
from tests.support.runners import bench, is_running, until

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture(name="bench")
def _bench(service, tmp_path):
    with bench(service, tmp_path) as made:
        yield made


def runner(bench, name):
    environment = programs.runner_environment(bench, NOWHERE, name)
    return programs.program(programs.runner_words(), environment, bench.folder / f"{name}.log")


@pytest.mark.timeout(240)
def test_a_runner_that_stood_still_past_its_leases_changes_nothing_when_it_wakes_up(bench):
    bundle, policy = bench.bundle(), bench.policy()
    job = bench.serve(bundle)
    with runner(bench, "r1") as late:
        first = bench.ready(job, seconds=60)
        run = bench.evaluate(bundle, policy)
        until(lambda: bench.replica(run).get("state") == "loading", what="the engine of a gate")
        gate = bench.replica(run)["pid"]
        stopping.stand_still(late.pid)
        until(lambda: bench.is_lease_over(job) and bench.is_lease_over(run), what="the end of its leases")
        with runner(bench, "r2"):
            # Another one takes both, and boots engines of its own.
            until(lambda: bench.replica(job).get("pid") != first["pid"], seconds=60, what="another replica")
            second = bench.ready(job, seconds=60)
            done = bench.done(run)
            told = [entry.entry_digest for entry in bench.entries(run)]
            assert is_running(first["pid"])  # and nobody could end the late one's
            stopping.go_on(late.pid)
            until(lambda: not is_running(first["pid"]) and not is_running(gate), what="the end of its engines")
            assert (done.outcome, done.attempt) == ("passed", 2)
            gates = [entry.body["gate"] for entry in bench.entries(run) if entry.kind == "gate_recorded"]
            assert sorted(gates) == ["compatibility", "integrity"]
            assert [entry.entry_digest for entry in bench.entries(run)] == told
            assert bench.replica(job)["pid"] == second["pid"]
            assert is_running(second["pid"])
            assert bench.row(job).state == "claimed"
            said = (bench.folder / "r1.log").read_text()
            until(lambda: "lease_lost" in (bench.folder / "r1.log").read_text(), what=said[-300:])
