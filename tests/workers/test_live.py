import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from uuid import uuid4

import httpx
import pytest

from gates.plain import NO_AUTHORITY
from registry.storage.local import LocalBlobs
from schemas.bundle import Bundle
from tests.support import stopping
from tests.support.factories import bundle_body
from tests.support.outage import door
from tests.support.runners import is_running, until
from tests.support.scripted_containers import ScriptedContainers
from workers import agent as agent_module
from workers import live
from workers.engines.base import Command
from workers.engines.llamacpp import LLAMACPP
from workers.engines.table import DRIVERS
from workers.launchers.base import Order
from workers.launchers.container_command import Containers, run
from workers.launchers.proc import arguments, mark
from workers.launchers.process import boot_id

IN_IMAGE = {
    "name": "llamacpp",
    "version": "test",
    "image": "registry.example/engine@sha256:" + "a" * 64,
    "arguments": [],
}


def answers(replica) -> bool:
    body = {"model": "chain", "messages": [{"role": "user", "content": "ping"}], "max_tokens": 8}
    try:
        reply = httpx.post(
            f"http://{replica['address']}/v1/chat/completions", json=body, trust_env=False, verify=NO_AUTHORITY
        )
    except httpx.HTTPError:
        return False
    return reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"] == "Hi"


def shelf(bench, name="r1"):
    return live.shelf(bench.settings(name).data_dir)


def serving(bench, **changes):
    job = bench.serve(bench.bundle(**changes))
    agent = bench.start()
    return job, agent, bench.ready(job)


def test_a_replica_gets_ready_answers_and_can_be_found_again(bench):
    job, _, replica = serving(bench)
    assert answers(replica)
    left = shelf(bench).read(job)
    assert (left.pid, left.start_time, left.boot_id) == (replica["pid"], replica["start_time"], boot_id())
    assert bench.states(job) == ["staged", "loading", "warming", "ready"]
    (entry,) = until(lambda: [one for one in bench.entries(job) if one.kind != "replica_changed"])
    assert entry.kind == "engine_booted"
    assert entry.body["engine"]["model_ids"] == ["chain"]
    assert os.getsid(replica["pid"]) == replica["pid"]


def test_a_replica_that_an_older_runner_kept_is_still_known(tmp_path):
    digest = "sha256:" + "a" * 64
    claim = {
        "job": str(uuid4()), "kind": "serve", "fencing_token": 1, "lease_seconds": 30, "release": None, "target": None,
        "bundle": digest, "policy": None, "suites": [], "references": {}, "gates": [], "attempt": 1, "replica": None,
    }  # fmt: skip
    kept = {"claim": claim, "bundle": digest, "pid": 7, "start_time": "1", "boot_id": "b", "drain_seconds": 1.0}
    shelf = live.shelf(tmp_path)
    shelf.folder.mkdir(parents=True)
    shelf.file("one").write_text(json.dumps(kept))
    left = shelf.read("one")
    assert left is not None
    assert left.claim.accepted is None


def test_a_replica_outlives_an_upgrade_after_which_engines_are_started_otherwise(bench, monkeypatch):
    job, agent, first = serving(bench)
    kept = shelf(bench)
    started = kept.read(job).command
    assert started.argv == tuple(arguments(first["pid"]))
    bench.stop(agent)

    def otherwise(*_):
        raise NotImplementedError("it would be started with other words, to which this bundle does not lend itself")

    monkeypatch.setitem(DRIVERS, LLAMACPP.name, replace(LLAMACPP, command=otherwise))
    # What a later version kept beyond what this one knows, as after the way back from an upgrade.
    kept.file(job).write_text(json.dumps(json.loads(kept.file(job).read_text()) | {"kept_later": 1}))
    agent = bench.start()
    until(lambda: bench.states(job).count("ready") == 2, what="the adoption")
    assert kept.read(job).command == started
    bench.stop(agent)
    # And what an earlier one did not keep.
    old = json.loads(kept.file(job).read_text())
    kept.file(job).write_text(json.dumps({key: old[key] for key in old if key not in {"arguments", "port_file"}}))
    bench.start()
    until(lambda: bench.states(job).count("ready") == 3, what="the adoption")
    assert kept.read(job).command == started
    assert bench.replica(job)["pid"] == first["pid"]
    assert answers(first)


def contained(engine, data_dir, workdir):
    """Let a container engine have made what a runner ordered for a folder, and return what it shows of it."""
    containers = Containers(runner="r1", folder=data_dir, user="1:1", mark=mark(data_dir), network="engines")
    order = Order(Bundle.model_validate(bundle_body(engine=IN_IMAGE)), data_dir / "staged", "job", 1)
    words = run(containers, Command(("engine",)), order, workdir)
    done = subprocess.run([str(engine.path), *words], check=True, capture_output=True, text=True)
    return engine.world()["containers"][done.stdout.strip()]


def as_container(bench, job, engine, replica):
    """Let a live replica's process be one that runs in a container, of which its runner has left word."""
    kept, port = shelf(bench), replica["address"].rpartition(":")[2]
    one = contained(engine, bench.settings().data_dir, kept.workdir(job))
    world = engine.world()
    world["containers"][one["Id"]]["NetworkSettings"]["Ports"]["8000/tcp"][0]["HostPort"] = port
    engine.set(**world)
    state = one["State"]
    told = {"pid": state["Pid"], "start_time": state["StartedAt"], "handle": one["Id"]}
    kept.write(job, kept.read(job).model_copy(update=told))


def test_what_is_live_is_taken_up_by_a_runner_that_starts_containers_now_and_what_comes_late_is_ended(
    bench, monkeypatch, tmp_path
):
    monkeypatch.setattr(agent_module, "SWEEP_SECONDS", 0.0)
    engine = ScriptedContainers(tmp_path)
    engine.set(images=[IN_IMAGE["image"]])
    job, agent, first = serving(bench)
    bench.stop(agent)
    agent = bench.start(launcher="container", container_program=str(engine.path))
    until(lambda: bench.states(job).count("ready") == 2, what="the adoption")
    assert bench.replica(job)["pid"] == first["pid"]
    late = contained(engine, bench.settings().data_dir, bench.settings().data_dir / "engines" / str(uuid4()))
    until(lambda: engine.world()["containers"] == {}, what=f"the end of {late['Name']}")
    assert answers(first)
    # As a container, of which nobody tells when its runner starts, and which is taken up once somebody does.
    bench.stop(agent)
    as_container(bench, job, engine, first)
    before = bench.states(job)
    engine.set(unreachable="Cannot connect to the Docker daemon")
    bench.start(launcher="container", container_program=str(engine.path))
    told = "whether its engine still runs is not told"
    until(lambda: told in str(bench.run(job).progress), what="that nobody tells")
    assert bench.states(job) == before
    engine.set(unreachable="")
    until(lambda: bench.states(job).count("ready") == 3, what="the adoption of the container")
    assert bench.states(job) == [*before, "ready"]
    assert answers(first)


def test_a_replica_outlives_its_runner_and_is_taken_up_again_by_the_next(bench):
    job, agent, first = serving(bench)
    bench.stop(agent)
    assert answers(first)
    assert bench.row(job).state == "claimed"
    bench.start()
    until(lambda: bench.states(job).count("ready") == 2, what="the adoption")
    second = bench.replica(job)
    assert (second["pid"], second["address"]) == (first["pid"], first["address"])
    assert bench.row(job).attempt == 1
    assert answers(second)
    # Live traffic is never told that a replica loads which serves all the time.
    assert bench.states(job) == ["staged", "loading", "warming", "ready", "ready"]


def test_a_replica_is_still_taken_up_when_the_lease_ran_out_meanwhile(bench):
    job, agent, first = serving(bench)
    bench.stop(agent)
    until(lambda: bench.is_lease_over(job), what="the end of the lease")
    bench.start()
    until(lambda: bench.states(job).count("ready") == 2, what="the adoption")
    assert bench.replica(job)["pid"] == first["pid"]


def test_a_replica_that_is_no_longer_wanted_is_drained_and_ended(bench):
    job, agent, replica = serving(bench)
    bench.unwant(job)
    assert bench.done(job).state == "cancelled"
    assert bench.states(job)[-2:] == ["draining", "stopped"]
    assert not is_running(replica["pid"])
    assert shelf(bench).jobs() == []
    until(lambda: not agent.held())


def test_a_replica_that_was_unwanted_while_its_runner_was_away_is_ended_by_the_next(bench):
    job, agent, replica = serving(bench)
    bench.stop(agent)
    bench.unwant(job)
    bench.start()
    assert bench.done(job).state == "cancelled"
    assert not is_running(replica["pid"])


def test_a_replica_that_was_unwanted_while_its_runner_was_away_is_booted_by_nobody_else(bench):
    job, agent, first = serving(bench)
    bench.stop(agent)
    bench.unwant(job)
    bench.expire(job)
    bench.start("r2")
    done = bench.done(job)
    assert (done.state, done.replica.state) == ("cancelled", "stopped")
    assert bench.states(job).count("loading") == 1
    assert bench.row(job).attempt == 2
    assert answers(first)
    bench.start()
    until(lambda: not is_running(first["pid"]), what="the end of the engine where it is")
    until(lambda: shelf(bench).jobs() == shelf(bench, "r2").jobs() == [])


def test_an_engine_that_dies_is_told_as_failed_and_booted_again(bench):
    job, _, first = serving(bench)
    os.kill(first["pid"], signal.SIGKILL)
    until(lambda: bench.replica(job)["state"] == "failed", what="the failure")
    row = until(lambda: row if (row := bench.row(job)).state == "pending" else None, what="giving the job back")
    assert row.problem.startswith("engine-failed")
    bench.due(job)
    second = bench.ready(job)
    assert second["pid"] != first["pid"]
    assert bench.row(job).attempt == 2
    assert answers(second)


def test_an_engine_that_runs_but_no_longer_answers_is_ended_and_told_as_failed(bench, monkeypatch):
    monkeypatch.setattr(live, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(live, "DEAD_SECONDS", 1.0)
    job, _, replica = serving(bench)
    stopping.stand_still(replica["pid"])
    until(lambda: bench.replica(job)["state"] == "failed", seconds=60, what="the failure")
    told = bench.replica(job)
    assert told["failure"] == "engine_dead"
    assert "no progress" in told["cause"]
    assert told["log_tail"]
    assert not is_running(replica["pid"])
    (errored,) = until(lambda: [one for one in bench.entries(job) if one.kind == "attempt_errored"])
    assert errored.body["cause"] == "engine_dead"
    shown = bench.run(job).replica
    assert (shown.state, shown.failure, shown.log_tail) == ("failed", "engine_dead", told["log_tail"])


def test_a_replica_serves_on_while_the_service_is_away_for_longer_than_a_lease(bench):
    job = bench.serve(bench.bundle())
    with door(bench.api.url) as way:
        agent = bench.start(url=way.url)
        first = bench.ready(job)
        told = bench.states(job)
        way.shut()
        until(lambda: bench.is_lease_over(job), what="the end of the lease")
        assert answers(first)
        way.open()
        until(lambda: not bench.is_lease_over(job), what="the lease to be kept again")
        assert answers(first)
        assert bench.states(job) == told
        assert agent.held() == [job]
        bench.unwant(job)
        assert bench.done(job).state == "cancelled"
        bench.stop(agent)


def test_a_runner_that_lost_its_lease_ends_its_replica_and_says_nothing_more(bench):
    job, agent, replica = serving(bench)
    told = bench.states(job)
    bench.steal(job)
    until(lambda: not agent.held(), what="letting go")
    assert not is_running(replica["pid"])
    assert bench.states(job) == told
    assert shelf(bench).jobs() == []


def test_a_replica_whose_job_another_took_meanwhile_is_ended_at_the_start(bench):
    job, agent, replica = serving(bench)
    bench.stop(agent)
    bench.steal(job)
    bench.start()
    until(lambda: not is_running(replica["pid"]), what="the end of the engine")
    until(lambda: shelf(bench).jobs() == [])


def test_another_runner_even_on_a_copy_of_its_folder_boots_its_own_only_when_the_first_is_gone_for_good(bench):
    job, agent, first = serving(bench)
    token, copy = bench.row(job).fencing_token, shelf(bench, "r2")
    # As from another machine, whose lease this one must not go on under.
    copy.write(job, shelf(bench).read(job).model_copy(update={"boot_id": "of another machine"}))
    other = bench.start("r2")
    until(lambda: not copy.jobs() and len(list(bench.client().runners.list())) == 2, what="the second runner")
    time.sleep(1.0)
    assert (other.held(), bench.row(job).fencing_token) == ([], token)
    assert answers(first)
    bench.stop(agent)
    until(lambda: bench.is_lease_over(job), what="the end of the lease")
    until(lambda: bench.states(job).count("ready") == 2, what="a second replica")
    assert bench.replica(job)["pid"] != first["pid"]
    bench.start("r1")
    until(lambda: not is_running(first["pid"]), what="the end of the first engine")
    second = bench.replica(job)
    assert answers(second)
    # It has to be empty now, and the first is there again.
    bench.client("manager").runners.drain("r2", "its cooling fails", force_in_seconds=0)
    until(lambda: bench.states(job).count("ready") == 3, what="a third replica")
    assert not is_running(second["pid"])
    assert answers(bench.replica(job))
    assert bench.row(job).attempt == 2
    assert [one.body["problem"] for one in bench.entries(job) if one.kind == "attempt_errored"] == ["runner-emptied"]


def test_a_replica_whose_file_cannot_be_read_is_ended_and_booted_again(bench):
    job, agent, first = serving(bench)
    bench.stop(agent)
    shelf(bench).file(job).write_text("{")
    bench.start()
    until(lambda: bench.states(job).count("ready") == 2, seconds=60, what="a second replica")
    assert bench.replica(job)["pid"] != first["pid"]
    assert not is_running(first["pid"])


def test_a_process_that_only_has_the_same_number_is_left_alone(bench):
    job, agent, first = serving(bench)
    bench.stop(agent)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    try:
        kept = shelf(bench)
        kept.write(job, kept.read(job).model_copy(update={"pid": bystander.pid}))
        bench.start()
        until(lambda: bench.states(job).count("ready") == 2, seconds=60, what="a second replica")
        assert bystander.poll() is None
        # The one that was left without a name is found by the folder it runs in.
        assert not is_running(first["pid"])
    finally:
        bystander.kill()
        bystander.wait()


def test_a_candidate_that_does_not_boot_is_told_as_failed_with_its_last_lines(bench):
    job = bench.serve(bench.bundle("bad", truncated_bytes=900_000))
    bench.start()
    row = until(lambda: row if (row := bench.row(job)).problem else None, what="giving the job back")
    assert row.problem.startswith("engine-failed")
    assert bench.replica(job)["state"] == "failed"
    assert bench.replica(job)["log_tail"]
    assert shelf(bench).jobs() == []


def test_damaged_files_are_not_served(bench):
    bundle = bench.bundle()
    blob = LocalBlobs(bench.service.settings.storage_dir).path(bundle.weights()[0].sha256)
    blob.chmod(0o644)
    with blob.open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff\x00\xff")
    job = bench.serve(bundle)
    bench.start()
    row = until(lambda: row if (row := bench.row(job)).problem else None, what="giving the job back")
    assert row.problem.startswith("integrity-failed")
    assert bench.states(job) == []
    # The file is the store's own, and other bundles may have it too.
    (ground,) = bench.client().bundles.get(bundle.digest).quarantine.grounds
    assert (ground.cause, ground.reason.endswith("; runner met it")) == ("blob_damaged", True)


def test_files_that_are_written_to_between_their_hash_and_the_boot_are_not_served(bench, monkeypatch):
    bundle, starts = bench.bundle(), live.start_and_wait

    def meanwhile(lease, replica, seconds):
        os.utime(replica._launch.root / "model.gguf", (1, 1))
        return starts(lease, replica, seconds)

    monkeypatch.setattr(live, "start_and_wait", meanwhile)
    job = bench.serve(bundle)
    bench.start()
    row = until(lambda: row if (row := bench.row(job)).problem else None, what="giving the job back")
    assert row.problem.startswith("integrity-failed: model.gguf was replaced or written to after it was hashed")
    assert "ready" not in bench.states(job)
    assert not is_running(bench.replica(job)["pid"])


def test_a_full_disk_ends_no_replica_and_what_nobody_watches_any_more_is_ended(bench, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def broken(*_):
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(live, "LOOK_SECONDS", 0.1)
    job, agent, first = serving(bench)
    monkeypatch.setattr(live, "trim", full)
    monkeypatch.setattr(live.Shelf, "write", full)
    bench.stop(agent)
    agent = bench.start()
    until(lambda: bench.states(job).count("ready") == 2, what="the adoption")
    until(lambda: "cannot be kept: No space left" in str(bench.run(job).progress), what="that it cannot be kept")
    assert (bench.row(job).state, bench.row(job).attempt, bench.replica(job)["pid"]) == ("claimed", 1, first["pid"])
    assert answers(first)
    monkeypatch.setattr(live.Watcher, "look", broken)
    row = until(lambda: row if (row := bench.row(job)).problem else None, what="giving the job back")
    assert row.problem.startswith("internal-error")
    assert not is_running(first["pid"])
    assert shelf(bench).jobs() == []


def test_a_file_that_could_not_be_written_whole_leaves_nothing_and_the_one_before(tmp_path, monkeypatch):
    claim = {
        "job": str(uuid4()), "kind": "serve", "fencing_token": 1, "lease_seconds": 30, "release": None, "target": None,
        "bundle": "sha256:" + "a" * 64, "policy": None, "suites": [], "references": {}, "gates": [], "attempt": 1,
        "replica": None,
    }  # fmt: skip
    said = {"claim": claim, "bundle": claim["bundle"], "pid": 7, "start_time": "1", "boot_id": "b", "drain_seconds": 1}
    kept, left = live.shelf(tmp_path), live.Left.model_validate(said)
    kept.write("one", left)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        kept.write("one", left.model_copy(update={"pid": 8}))
    assert [path.name for path in kept.folder.iterdir()] == ["one.json"]
    assert kept.read("one") == left


@pytest.mark.parametrize("text", ["", "{}", '{"pid": 1}', "\x00"])
def test_a_file_that_is_not_a_kept_replica_is_none(tmp_path, text):
    kept, job = live.shelf(tmp_path), uuid4()
    kept.folder.mkdir()
    kept.file(job).write_text(text)
    assert kept.read(job) is None
    assert kept.jobs() == [str(job)]
