import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest

from registry.tables import RunnerRow
from schemas.evidence import Kind
from schemas.result import GateResult, Verdict
from schemas.runner import Claim, JobKind
from tests.support.outage import door
from tests.support.runners import LEASE_SECONDS, is_running, until
from workers import agent as agents
from workers import lease as leases
from workers.engines.llamacpp import LLAMACPP
from workers.lease import Ending, JobEnded, Lease

DIGEST = "sha256:" + "d" * 64


def rows(bench):
    return list(bench.client().runners.list())


def test_a_runner_says_who_it_is_and_that_it_lives(bench, monkeypatch):
    monkeypatch.setattr(agents, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(agents, "LOOK_SECONDS", 0.1)
    bench.start()
    (runner,) = until(lambda: rows(bench), what="the registration")
    assert (runner.name, runner.runner_class, sorted(runner.environments)) == ("r1", "cpu", runner.engines)
    # Others too, where their environments are.
    assert runner.environments["llamacpp"] == LLAMACPP.identity().digest
    assert runner.disk_free_bytes > 0
    assert runner.fingerprint.cores == os.cpu_count()
    seen = runner.last_seen_at
    until(lambda: rows(bench)[0].last_seen_at > seen + timedelta(seconds=0.2), what="a heartbeat")


def test_a_runner_that_the_service_has_forgotten_registers_again(bench):
    bench.start()
    until(lambda: rows(bench), what="the registration")
    with bench.service.database.transaction() as session:
        session.delete(session.query(RunnerRow).one())
    until(lambda: rows(bench), what="the second registration")


def test_a_runner_starts_while_the_service_is_away_and_registers_when_it_is_back(bench):
    with door(bench.api.url) as way:
        way.shut()
        agent = bench.start(url=way.url)
        time.sleep(0.5)
        assert not rows(bench)
        way.open()
        until(lambda: rows(bench), what="the registration")
        bench.stop(agent)


def test_a_ring_is_answered_at_once_and_a_lost_one_after_a_look(bench, monkeypatch):
    bundle, policy = bench.bundle(), bench.policy()
    monkeypatch.setattr(agents, "LOOK_SECONDS", 600.0)
    agent = bench.start()
    until(lambda: rows(bench), what="the registration")
    time.sleep(1.0)
    run = bench.evaluate(bundle, policy)
    time.sleep(0.5)
    assert bench.row(run).state == "pending"
    agent.ring()
    until(lambda: bench.row(run).state == "claimed", what="the claim")
    assert bench.done(run).outcome == "passed"
    bench.stop(agent)
    monkeypatch.setattr(agents, "LOOK_SECONDS", 0.2)
    run = bench.evaluate(bundle, policy)
    bench.start()
    assert bench.done(run).outcome == "passed"


def test_no_more_jobs_are_held_than_there_are_slots(bench):
    bundle, policy = bench.bundle(), bench.policy()
    agent = bench.start(slots=1)
    runs = [bench.evaluate(bundle, policy) for _ in range(3)]
    most = 0
    while any(bench.row(run).state != "done" for run in runs):
        most = max(most, len(agent.held()))
        time.sleep(0.02)
    assert most == 1
    assert {bench.run(run).outcome for run in runs} == {"passed"}


def test_several_jobs_run_at_once_where_slots_allow(bench):
    bundle, policy = bench.bundle(), bench.policy()
    runs = [bench.evaluate(bundle, policy) for _ in range(2)]
    agent = bench.start(slots=3)  # one of several is kept
    until(lambda: len(agent.held()) == 2, what="holding both")
    assert {bench.done(run).outcome for run in runs} == {"passed"}


def test_a_job_that_no_code_expected_to_fail_ends_as_its_problem_without_a_traceback(bench, monkeypatch):
    def broken(site, lease):
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(agents, "JOBS", dict.fromkeys(JobKind, broken))
    run = bench.evaluate(bench.bundle(), bench.policy())
    agent = bench.start()
    row = until(lambda: row if (row := bench.row(run)).problem else None, what="the problem")
    assert row.problem == "internal-error: ZeroDivisionError: of the test"
    until(lambda: not agent.held(), what="the runner to let go of the job")


def test_one_runner_at_a_time_uses_a_data_folder(bench):
    folder = bench.settings().data_dir
    folder.mkdir(parents=True)
    handle = os.open(folder / "runner.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    bench.start()
    time.sleep(1.0)
    assert not rows(bench)
    os.close(handle)
    until(lambda: rows(bench), what="the registration")


def test_a_runner_that_waits_for_its_folder_can_be_stopped(bench):
    first = bench.start()
    until(lambda: rows(bench), what="the registration")
    second = bench.start()
    started = time.monotonic()
    bench.stop(second)
    assert time.monotonic() - started < 5
    bench.stop(first)


def test_engines_of_gates_that_a_dead_runner_left_are_ended_at_the_start_and_others_are_not(bench, tmp_path):
    left, other = bench.settings().data_dir / "engines/some-job", tmp_path / "engines/other"
    for folder in (left, other):
        folder.mkdir(parents=True)
    code = [sys.executable, "-c", "import time; time.sleep(120)"]
    home = {**os.environ, "HOME": str(left)}
    with subprocess.Popen(code, cwd=other, env=home) as engine, subprocess.Popen(code, cwd=left) as bystander:
        try:
            bench.start()
            until(lambda: not is_running(engine.pid), what="the end of the engine")
            until(lambda: not left.exists())
            assert is_running(bystander.pid)
        finally:
            for process in (engine, bystander):
                process.kill()
    shutil.rmtree(other)


# ------------------------------------------------------------------------------------------------ leases


@pytest.fixture
def claim(bench) -> Claim:
    bench.evaluate(bench.bundle(), bench.policy())
    return claimed(bench)


def claimed(bench) -> Claim:
    agent = agents.Agent(bench.settings(), bench.client("runner"))
    runner = agent._register(agent._site())
    return bench.client("runner").runners.claim(runner)


def test_a_lease_is_kept_for_as_long_as_it_is_held(bench, claim):
    lease = Lease(bench.client("runner"), claim)
    lease.keep()
    lease.progress("thinking")
    ends = time.monotonic() + 2 * LEASE_SECONDS
    while time.monotonic() < ends:
        assert not bench.is_lease_over(claim.job)
        time.sleep(0.1)
    assert bench.run(claim.job).progress == "thinking"
    lease.release()
    until(lambda: bench.is_lease_over(claim.job), what="the end of the lease")


def test_what_a_job_does_is_told_long_before_its_lease_has_to_be_renewed(bench, claim, monkeypatch):
    monkeypatch.setattr(leases, "PROGRESS_SECONDS", 0.1)
    lease = Lease(bench.client("runner"), claim.model_copy(update={"lease_seconds": 3600.0}))
    lease.keep()
    for line in ("load 1/64", "load 2/64"):
        lease.progress(line)
        until(lambda line=line: bench.run(claim.job).progress == line, what=line)
    lease.release()


class Slow:
    """Jobs of a service that a renewal reaches late: only once `arrives` is set."""

    def __init__(self, jobs) -> None:
        self.jobs, self.heard = jobs, []
        self.began, self.arrives = threading.Event(), threading.Event()

    def renew(self, job, body):
        self.began.set()
        assert self.arrives.wait(30)
        self.heard.append(body.progress)
        return self.jobs.renew(job, body)

    def report(self, job, body):
        self.heard.append(body.kind)
        return self.jobs.report(job, body)


def test_no_line_of_a_gate_arrives_after_its_result(bench, claim, monkeypatch):
    client = bench.client("runner")
    slow = Slow(client.jobs)
    monkeypatch.setattr(client, "jobs", slow)
    lease = Lease(client, claim)
    lease.progress("load 63/64")
    renewing = threading.Thread(target=lease.renew)
    renewing.start()
    assert slow.began.wait(30)
    result = GateResult(
        gate=claim.gates[0], definition=DIGEST, verdict=Verdict.INCONCLUSIVE, summary="Too few.", measurements=[],
        findings=[], duration_ms=1, source="run",
    )  # fmt: skip
    reporting = threading.Thread(target=lease.report, args=(Kind.GATE_RECORDED, f"gate:{result.gate}", result))
    reporting.start()
    reporting.join(0.5)
    assert slow.heard == []
    slow.arrives.set()
    for thread in (renewing, reporting):
        thread.join(30)
    assert slow.heard == ["load 63/64", Kind.GATE_RECORDED]
    # Who looks now sees the result and no line, and no later renewal brings one back.
    assert [one["gate"] for one in bench.run(claim.job).results] == [result.gate]
    assert bench.run(claim.job).progress is None
    lease.renew()
    assert (slow.heard[-1], bench.run(claim.job).progress) == (None, None)


def test_a_runner_that_stops_does_not_wait_for_a_line_on_its_way(bench, claim):
    lease = Lease(bench.client("runner"), claim)
    lease.end(Ending.STOPPING)
    result = GateResult.model_construct(gate=claim.gates[0])
    with lease._speech, pytest.raises(JobEnded) as ended:
        lease.report(Kind.GATE_RECORDED, "gate", result)
    assert ended.value.ending is Ending.STOPPING


def test_a_lost_lease_calls_what_cannot_wait_and_refuses_every_word(bench, claim):
    lease, killed = Lease(bench.client("runner"), claim), []
    lease.keep()
    with lease.on_end(lambda: killed.append("engine")):
        bench.steal(claim.job)
        until(lambda: lease.is_lost, what="the loss")
        until(lambda: killed, what="the kill")
    for word in (lease.check, lease.complete, lambda: lease.step("on")):
        with pytest.raises(JobEnded) as ended:
            word()
        assert ended.value.ending is Ending.LOST
    assert bench.row(claim.job).state == "claimed"


def test_what_cannot_wait_is_called_at_once_when_the_job_is_over_already(bench, claim):
    lease, killed = Lease(bench.client("runner"), claim), []
    lease.end(Ending.STOPPING)
    with lease.on_end(lambda: killed.append("engine")):
        assert killed == ["engine"]
    lease.end(Ending.LOST)
    assert killed == ["engine"]
    assert lease.is_lost


def test_a_job_claimed_again_by_its_own_runner_goes_on_under_the_new_token(bench, claim):
    lease = Lease(bench.client("runner"), claim)
    until(lambda: bench.is_lease_over(claim.job), what="the end of the lease")
    again = claimed(bench)
    assert (again.job, again.fencing_token) == (claim.job, claim.fencing_token + 1)
    lease.take_over(again)
    lease.complete()
    assert bench.row(claim.job).state == "done"


def test_a_runner_takes_nothing_while_what_it_lost_still_ends_on_its_accelerators(bench, claim):
    agent = agents.Agent(bench.settings(), bench.client("runner"))
    site, runner = agent._site(), rows(bench)[0].id
    lease = Lease(bench.client("runner"), claim.model_copy(update={"devices": [0]}))
    lease._renewed -= 60.0  # it stood still, and does not know yet that another has the job
    agent._held[claim.job] = lease
    bench.steal(claim.job)
    waiting = bench.evaluate(bench.bundle(), bench.policy())
    agent._claim_all(site, runner)
    assert lease.is_lost
    assert bench.row(waiting).state == "pending"


def test_a_word_spoken_while_the_service_is_away_is_heard_when_it_is_back(bench, claim):
    with door(bench.api.url) as way:
        lease = Lease(bench.client("runner", way.url), claim)
        way.shut()
        timer = agents.threading.Timer(1.0, way.open)
        timer.start()
        lease.complete("some-problem", "the detail")
        timer.join()
    assert bench.row(claim.job).problem == "some-problem: the detail"


def test_a_runner_that_stops_waits_for_no_service(bench, claim):
    with door(bench.api.url) as way:
        lease = Lease(bench.client("runner", way.url), claim)
        way.shut()
        lease.end(Ending.STOPPING)
        with pytest.raises(JobEnded):
            lease.complete("runner-stopped", "now")
