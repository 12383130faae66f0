import os
import shutil
import signal
from dataclasses import replace

import pytest

from registry import doubts
from registry.storage.local import LocalBlobs
from schemas.problems import BundleQuarantined, NoRunnerFits
from tests.support.disk import small_disk
from tests.support.family import FAMILY
from tests.support.outage import door
from tests.support.runners import QUICK_GATES, is_running, result, until
from tests.support.split_engine import split
from workers.agent import Agent
from workers.engines.llamacpp import LLAMACPP
from workers.engines.table import DRIVERS
from workers.fingerprint import fingerprint
from workers.vitals import ranks


def booted(bench, run) -> int:
    """Wait until the engine of a run is ready, and return its pid."""
    until(lambda: bench.replica(run).get("state") == "ready", what="a ready engine")
    return bench.replica(run)["pid"]


def gates_of(bench, run) -> list[str]:
    return [entry.body["gate"] for entry in bench.entries(run) if entry.kind == "gate_recorded"]


def damage(bench, bundle, folder=None) -> str:
    """Alter one byte of a bundle's weights in the store, or in another folder that has its blobs."""
    path = bundle.weights()[0].path
    blob = LocalBlobs(folder or bench.service.settings.storage_dir).path(bundle.weights()[0].sha256)
    content = bytearray(blob.read_bytes())
    content[1000] ^= 1
    blob.unlink()
    blob.write_bytes(content)
    return path


def test_a_good_bundle_passes_every_gate_with_records_and_ends_without_an_engine(bench):
    run = bench.evaluate(bench.bundle(), bench.policy())
    bench.start()
    pid = booted(bench, run)
    done = bench.done(run)
    assert done.outcome == "passed", done
    assert [one["gate"] for one in done.results] == ["compatibility", "integrity"]
    kinds = [entry.kind for entry in bench.entries(run) if entry.kind != "replica_changed"]
    assert kinds == ["run_asked", "staged", "engine_booted", "gate_recorded", "gate_recorded", "run_ended"]
    assert bench.states(run) == ["loading", "warming", "ready", "draining", "stopped"]
    store = LocalBlobs(bench.service.settings.storage_dir)
    assert all(store.exists(one["records"]) for one in done.results)
    assert not is_running(pid)
    client = bench.client()
    assert client.evidence.verify(stream=f"run/{run}").verified
    again = [client.evidence.recompute(one.entry_digest) for one in bench.entries(run) if one.kind == "gate_recorded"]
    assert [(one.gate, one.outcome, one.faults) for one in again] == [
        ("compatibility", "same", []),
        ("integrity", "same", []),
    ]


def test_what_booted_is_told_as_it_was_read_back(bench):
    bundle = bench.bundle()
    run = bench.evaluate(bundle, bench.policy())
    bench.start()
    bench.done(run)
    (entry,) = [entry for entry in bench.entries(run) if entry.kind == "engine_booted"]
    told = entry.body["engine"]
    assert told["environment"] == bundle.engine.environment
    assert told["model_ids"] == ["chain"]
    assert told["context_tokens"] == bundle.runtime.context_tokens
    assert "--no-warmup" in told["arguments"]
    assert entry.body["fingerprint"]["cores"] == os.cpu_count()
    assert entry.body["runner"] == "r1"
    took = entry.body
    assert took["ready_ms"] == took["loading_ms"] + took["warming_ms"] > 0
    assert (took["warm_requests"], took["warm_failed"], took["was_staged"]) == (1, 0, False)
    assert took["page_cache_percent"] == 100  # it was hashed a moment before
    (boot,) = bench.client().bundles.boots(bundle.digest)
    gates = sum(one["duration_ms"] for one in bench.run(run).results)
    assert (boot.entry, boot.is_cold, boot.gates_ms) == (entry.entry_digest, False, gates)


def test_a_runner_without_the_store_fetches_the_bytes(bench):
    run = bench.evaluate(bench.bundle(), bench.policy())
    agent = bench.start(store=False)
    assert bench.done(run).outcome == "passed"
    staged = bench.settings(store=False).data_dir / "staged"
    assert {path.stat().st_nlink for path in staged.glob("*/*.gguf")} == {2}
    bench.stop(agent)


def test_a_damaged_blob_in_the_store_fails_integrity_before_anything_boots(bench):
    bundle = bench.bundle()
    path = damage(bench, bundle)
    run = bench.evaluate(bundle, bench.policy())
    bench.start()
    done = bench.done(run)
    assert done.outcome == "failed"
    assert result(done, "integrity")["verdict"] == "failed"
    assert path in result(done, "integrity")["summary"]
    assert [entry.kind for entry in bench.entries(run)] == ["run_asked", "staged", "gate_recorded", "run_ended"]
    # Its bytes are not what was registered, so nothing begins with it any more.
    (ground,) = bench.client().bundles.get(bundle.digest).quarantine.grounds
    assert (ground.cause, ground.by, path in ground.reason) == ("integrity_gate", "service", True)
    # Other bundles may have it too, so the service reads its own.
    assert doubts.settle(bench.service) == 1
    *_, ground = bench.client().bundles.get(bundle.digest).quarantine.grounds
    assert (ground.cause, bundle.weights()[0].sha256 in ground.reason) == ("blob_damaged", True)
    with pytest.raises(BundleQuarantined, match="integrity failed"):
        bench.evaluate(bundle, bench.policy())


def test_a_damaged_blob_is_not_taken_from_the_service(bench):
    bundle = bench.bundle()
    damage(bench, bundle)
    run = bench.evaluate(bundle, bench.policy())
    bench.start(store=False)
    # The service met it on the way out and read its own blob again: the bundle is quarantined, and the run ends.
    assert bench.done(run).problem == "bundle-quarantined"
    assert {entry.kind for entry in bench.entries(run)} <= {"run_asked", "attempt_errored", "run_ended"}
    (ground,) = bench.client().bundles.get(bundle.digest).quarantine.grounds
    assert (ground.cause, ground.by, ground.reason.endswith("; runner met it")) == ("blob_damaged", "service", True)


def test_a_runner_whose_own_copy_is_damaged_lets_the_service_look_and_nothing_is_quarantined(bench, tmp_path):
    bundle = bench.bundle()
    with small_disk(tmp_path / "disk", "64m") as disk:  # no link leads there: the bytes are copied, and hashed
        copy = disk.path / "blobs"
        shutil.copytree(bench.service.settings.storage_dir, copy)
        damage(bench, bundle, copy)
        run = bench.evaluate(bundle, bench.policy())
        agent = Agent(bench.settings().model_copy(update={"store_dir": copy}), bench.client("runner"))
        bench.agents.append(agent)
        agent.start()
        row = until(lambda: row if (row := bench.row(run)).problem else None)
        bench.stop(agent)
    assert row.problem.startswith("digest-mismatch")
    told = bench.api.clients["viewer"].get("/v1/metrics").text
    assert 'sluicegate_requests_total{method="POST",route="/v1/blobs/{digest}/checks",status="2xx"} ' in told
    assert bench.client().bundles.get(bundle.digest).quarantine is None


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"truncated_bytes": 900_000}, "boot-weights-unreadable"),
        ({"template": "{% for %}"}, "boot-template-unreadable"),
        ({"arguments": ["--no-such-argument"]}, "boot-unsupported"),
    ],
    ids=["weights cut short", "a template with an error", "an unknown argument"],
)
def test_a_candidate_that_does_not_boot_fails_compatibility_with_cause_and_log(bench, changes, code):
    run = bench.evaluate(bench.bundle("bad", **changes), bench.policy())
    bench.start()
    done = bench.done(run)
    assert done.outcome == "failed"
    failed = result(done, "compatibility")
    assert failed["verdict"] == "failed"
    assert [finding["code"] for finding in failed["findings"]] == [code]
    assert code == "boot-unsupported" or failed["findings"][0]["found"]
    assert result(done, "integrity")["verdict"] == "passed"
    assert bench.states(run)[-1] == "failed"


def test_a_candidate_that_boots_too_slowly_fails_compatibility(bench):
    slow = {"gate": "compatibility", "boot_seconds": "0.01", "answer_seconds": "10"}
    run = bench.evaluate(bench.bundle(), bench.policy([{"gate": "integrity"}, slow]))
    bench.start()
    failed = result(bench.done(run), "compatibility")
    assert failed["verdict"] == "failed"
    # Whether it was still booting when its time was over, or was seen ready too late, depends on who looked first.
    assert failed["findings"][0]["code"] in {"boot-timeout", "boot-slow"}


def test_another_engine_than_the_bundle_names_is_told_with_both_before_and_after_a_run_is_made(bench):
    other, policy = "sha256:" + "1" * 64, bench.policy()
    bundle = bench.bundle(environment=other)
    run = bench.evaluate(bundle, policy)
    bench.start()
    waits = until(lambda: (said := bench.run(run).waits) and "r1: its llamacpp is" in said and said)
    assert other in waits
    assert LLAMACPP.identity().digest in waits
    assert bench.row(run).state == "pending"
    assert [entry.kind for entry in bench.entries(run)] == ["run_asked"]
    with pytest.raises(NoRunnerFits) as refused:
        bench.evaluate(bundle, policy)
    assert LLAMACPP.identity().digest in refused.value.detail
    assert [one["runner"] for one in refused.value.members["runners"]] == ["r1"]


def test_an_engine_that_was_replaced_under_its_runner_is_a_problem_that_names_both_and_boots_nothing(bench):
    other = "sha256:" + "1" * 64
    run = bench.evaluate(bench.bundle(environment=other), bench.policy(), gates=["integrity"])
    bench.start()
    row = until(lambda: row if (row := bench.row(run)).problem else None)
    assert row.state == "pending"
    assert row.problem.startswith("engine-mismatch")
    assert other in row.problem
    assert LLAMACPP.identity().digest in row.problem
    assert [entry.kind for entry in bench.entries(run)] == ["run_asked", "attempt_errored"]


def test_integrity_alone_boots_nothing(bench):
    run = bench.evaluate(bench.bundle(), bench.policy(), gates=["integrity"])
    bench.start()
    assert bench.done(run).outcome == "passed"
    assert [entry.kind for entry in bench.entries(run)] == ["run_asked", "staged", "gate_recorded", "run_ended"]


PLACED = {"gate": "placement", "activation_bytes": 1_000_000}
CHECKED_FIRST = [{"gate": "integrity"}, {"gate": "static"}, PLACED, QUICK_GATES[-1]]


def test_what_does_not_fit_is_told_before_an_engine_is_started(bench):
    run = bench.evaluate(bench.bundle("bad", template="{% for %}"), bench.policy(CHECKED_FIRST))
    bench.start()
    done = bench.done(run)
    assert done.outcome == "failed"
    assert [finding["code"] for finding in result(done, "static")["findings"]] == ["template-fails"]
    assert gates_of(bench, run) == ["static", "integrity"]
    assert "engine_booted" not in {entry.kind for entry in bench.entries(run)}
    (entry,) = [one for one in bench.entries(run) if one.kind == "gate_recorded" and one.body["gate"] == "static"]
    assert bench.client().evidence.recompute(entry.entry_digest).outcome == "same"


def test_what_fits_passes_without_an_engine_where_no_gate_needs_one(bench):
    run = bench.evaluate(bench.bundle(), bench.policy(CHECKED_FIRST), gates=["integrity", "static", "placement"])
    bench.start()
    done = bench.done(run)
    assert done.outcome == "passed"
    assert gates_of(bench, run) == ["static", "placement", "integrity"]
    device = next(one for one in result(done, "placement")["measurements"] if one["name"] == "device")
    assert device["value"] == fingerprint().memory_bytes


def test_c069_what_boots_with_less_context_than_promised_fails_and_integrity_is_told_last(bench):
    # The model has 2048 positions, so that a request gets no more context.
    run = bench.evaluate(bench.bundle(runtime={"context_tokens": 4096, "max_sequences": 2}), bench.policy())
    bench.start()
    done = bench.done(run)
    assert done.outcome == "failed"
    assert gates_of(bench, run) == ["compatibility", "integrity"]
    assert result(done, "integrity")["verdict"] == "passed"
    short = [one for one in result(done, "compatibility")["findings"] if one["severity"] == "block"]
    assert "context-differs" in {one["code"] for one in short}, short


def test_b26_a_first_boot_with_a_smaller_cache_is_recorded_beside_the_next_and_gates_ask_what_was_warmed(
    bench, monkeypatch
):
    bundle, policy = bench.bundle(runtime={"context_tokens": 512, "max_sequences": 20}), bench.policy()
    bench.start()
    told = []
    for number, slots in enumerate((19, 20)):
        # Until its cache is filled, what an engine needs to compile is missing from what it has for sequences.
        props = {"default_generation_settings": {"n_ctx": 512}, "total_slots": slots}
        compiled = (f"compiling took {2.5 if number == 0 else 0.1} s",)
        monkeypatch.setitem(DRIVERS, LLAMACPP.name, split(props=props, lines=compiled))
        run = bench.evaluate(bundle, policy)
        told += until(lambda run=run: [one.body for one in bench.entries(run) if one.kind == "engine_booted"])
        bench.unwant(run)
        bench.done(run)
    values = [next(row["found"] for row in body["compared"] if row["item"] == "kv_tokens") for body in told]
    assert values == ["9728", "10240"]
    assert [sorted(one["code"] for one in body.get("findings") or []) for body in told] == [
        ["kv-tokens-below-plan", "slots-differ"],
        [],
    ]
    assert [body["compile_ms"] for body in told] == [2500, 100]
    assert {(body["warm_requests"], body["warm_failed"]) for body in told} == {(1, 0)}
    assert sorted(boot.compile_ms for boot in bench.client().bundles.boots(bundle.digest)) == [100, 2500]


def test_an_engine_killed_during_a_gate_never_passes_it(bench):
    run = bench.evaluate(bench.bundle(), bench.policy())
    bench.start()
    os.kill(booted(bench, run), signal.SIGKILL)
    until(lambda: bench.row(run).state == "done" or bench.row(run).problem, what="an end of the attempt")
    assert [one["verdict"] for one in bench.run(run).results if one["gate"] == "compatibility"] != ["passed"]
    # Nobody knows who killed it: the attempt is over, and says so.
    problem = bench.row(run).problem
    assert problem is None or "during the gate compatibility: " in problem
    assert problem is None or "killed" in problem or "signal 9" in problem
    assert problem is not None or bench.row(run).state == "done"


def test_b18_an_engine_that_lost_a_part_during_a_gate_passes_nothing_though_it_answers(bench, monkeypatch):
    monkeypatch.setitem(DRIVERS, FAMILY.name, replace(FAMILY, rank_pattern="trap"))
    run = bench.evaluate(bench.bundle(), bench.policy())
    bench.start()
    front = booted(bench, run)
    (rank,) = ranks(front, "trap")
    os.kill(rank.pid, signal.SIGKILL)
    done = bench.done(run)
    assert (done.outcome, done.results) == ("undecided", [])
    assert "during the gate compatibility: rank_lost: " in done.problem
    (errored,) = [entry.body for entry in bench.entries(run) if entry.kind == "attempt_errored"]
    assert errored["cause"] == "rank_lost"
    assert str(rank.pid) in errored["detail"]
    assert not is_running(front)


def test_after_a_lost_lease_the_engine_is_gone_and_nothing_more_is_told(bench):
    run = bench.evaluate(bench.bundle(), bench.policy())
    agent = bench.start()
    until(lambda: bench.replica(run).get("state") == "loading", what="a loading engine")
    pid = bench.replica(run)["pid"]
    bench.steal(run)
    told = len(bench.entries(run))
    until(lambda: not agent.held(), what="letting go")
    until(lambda: not is_running(pid), what="the end of the engine")
    assert len(bench.entries(run)) <= told + 1
    assert not gates_of(bench, run)
    assert bench.row(run).state == "claimed"


def test_a_run_that_is_no_longer_wanted_ends_before_its_gates_have(bench):
    run = bench.evaluate(bench.bundle(), bench.policy())
    bench.start()
    until(lambda: bench.replica(run).get("state") == "loading", what="a loading engine")
    bench.unwant(run)
    done = bench.done(run)
    assert not is_running(bench.replica(run)["pid"])
    assert "integrity" not in gates_of(bench, run)
    assert done.outcome == "undecided"


def test_a_runner_that_stops_kills_its_gate_engines_and_gives_the_job_back(bench):
    run = bench.evaluate(bench.bundle(), bench.policy())
    agent = bench.start()
    until(lambda: bench.replica(run).get("state") == "loading", what="a loading engine")
    pid = bench.replica(run)["pid"]
    bench.stop(agent)
    assert not is_running(pid)
    row = bench.row(run)
    assert row.state == "pending"
    assert row.problem.startswith("runner-stopped")
    bench.start()
    done = bench.done(run)
    assert (done.outcome, done.attempt) == ("passed", 1)


def test_an_outage_longer_than_the_lease_neither_ends_nor_doubles_a_run(bench):
    run = bench.evaluate(bench.bundle(), bench.policy())
    with door(bench.api.url) as way:
        agent = bench.start(url=way.url)
        booted(bench, run)
        way.shut()
        until(lambda: bench.is_lease_over(run), what="the end of the lease")
        way.open()
        done = bench.done(run)
        bench.stop(agent)
    assert done.outcome == "passed"
    assert gates_of(bench, run) == ["compatibility", "integrity"]
    assert bench.states(run).count("loading") == 1
