"""The rollback drill as a runner does it, with the bundle that a target has accepted."""

import os
import signal

import pytest

from registry.storage.local import LocalBlobs
from schemas.problems import InvalidDocument
from tests.support import chain, factories, phases
from tests.support.outage import door
from tests.support.runners import QUICK_GATES, is_running, result, until
from tests.support.split_engine import split
from tests.support.split_server import TITLE
from workers import rehearsal
from workers.engines.llamacpp import LLAMACPP
from workers.engines.table import DRIVERS
from workers.launchers.proc import PROC
from workers.vitals import ranks

OTHER = {chain.token("H"): chain.token("e"), chain.token("e"): 4}
GATES = ["integrity", "rollback"]


@pytest.fixture
def policy(bench):
    suite = factories.registered_load(bench.service, bench.api.actor("manager"), requests=45, gap_us=25_000)
    return bench.policy([*QUICK_GATES, {"gate": "rollback", "suite": suite.digest}], "drilled")


def accept(bench, policy, bundle) -> None:
    """Make a target and have it accept a bundle."""
    actor = bench.api.actor("manager")
    factories.created_target(bench.service, actor)
    phases.promoted(bench.service, actor, bundle.digest, policy.digest)


def drill(bench, policy, url=None):
    run = bench.evaluate(bench.bundle("next", extra=OTHER), policy, target="chat@prod", gates=GATES)
    bench.start(url=url)
    return run


def test_both_bundles_are_booted_and_nothing_of_the_drill_is_left_though_the_service_is_away_meanwhile(bench, policy):
    accepted = bench.bundle("good")
    accept(bench, policy, accepted)
    with door(bench.api.url) as before:
        run = drill(bench, policy, before.url)
        engines = bench.settings().data_dir / "engines"
        until(lambda: list(engines.glob("*-gateway/envoy.log")), what="a private router")
        before.shut()  # the service, its database and its queue: going back asks none of them
        until(lambda: not is_running(bench.replica(run)["pid"]), seconds=60, what="the last cause")
        before.open()
        done = bench.done(run)
    assert done.outcome == "passed", done
    assert [one["gate"] for one in done.results] == ["rollback", "integrity"]
    assert accepted.digest[:19] in result(done, "rollback")["summary"]
    # The log speaks of the candidate's replica alone; how it ended is said.
    assert bench.states(run) == ["loading", "warming", "ready", "failed"]
    assert "ended by the rollback drill" in bench.replica(run)["cause"]
    assert not is_running(bench.replica(run)["pid"])
    assert list((bench.settings().data_dir / "engines").iterdir()) == []
    client = bench.client()
    again = [client.evidence.recompute(one.entry_digest) for one in bench.entries(run) if one.kind == "gate_recorded"]
    assert [(one.gate, one.outcome, one.faults) for one in again] == [
        ("rollback", "same", []),
        ("integrity", "same", []),
    ]


def test_an_accepted_bundle_that_does_not_boot_fails_with_its_log(bench, policy):
    accept(bench, policy, bench.bundle("bad", template="{% for %}"))
    done = bench.done(drill(bench, policy))
    failed = result(done, "rollback")
    assert done.outcome == failed["verdict"] == "failed"
    (found,) = failed["findings"]
    assert found["code"] == "no-way-back"
    assert "does not boot: template_unreadable" in failed["summary"]
    assert found["found"]
    assert result(done, "integrity")["verdict"] == "passed"


@pytest.mark.parametrize(
    ("damage", "words"), [("alter", "has other bytes than it names"), ("remove", "is not kept any more")]
)
def test_an_accepted_bundle_whose_bytes_are_wrong_or_gone_fails(bench, policy, damage, words):
    accepted = bench.bundle("good")
    accept(bench, policy, accepted)
    run = bench.evaluate(bench.bundle("next", extra=OTHER), policy, target="chat@prod", gates=GATES)
    blob = LocalBlobs(bench.service.settings.storage_dir).path(accepted.weights()[0].sha256)
    content = blob.read_bytes()
    blob.unlink()
    if damage == "alter":
        blob.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    bench.start()
    failed = result(bench.done(run), "rollback")
    assert failed["verdict"] == "failed"
    assert words in failed["summary"]


def test_a_runner_that_cannot_boot_what_is_accepted_says_nothing_about_it(bench, policy):
    accept(bench, policy, bench.bundle("good", environment="sha256:" + "1" * 64))
    done = bench.done(drill(bench, policy))
    assert done.outcome == "undecided"
    assert result(done, "rollback")["verdict"] == "errored"
    assert "This runner cannot boot the accepted bundle" in result(done, "rollback")["summary"]


def test_a_runner_without_memory_for_two_engines_says_so(bench, policy, tmp_path, monkeypatch):
    accept(bench, policy, bench.bundle("good"))
    full = tmp_path / "meminfo"
    full.write_text("MemTotal:  1000 kB\nMemAvailable:  10 kB\n")
    monkeypatch.setattr(rehearsal, "MEMORY", full)
    done = bench.done(drill(bench, policy))
    assert result(done, "rollback")["verdict"] == "errored"
    assert "cannot hold two engines" in result(done, "rollback")["summary"]


def test_a_drill_that_is_no_longer_wanted_ends_with_both_engines_and_the_router(bench, policy):
    accept(bench, policy, bench.bundle("good"))
    run = drill(bench, policy)
    engines = bench.settings().data_dir / "engines"
    until(lambda: list(engines.glob("*-gateway/envoy.log")), what="a private router")
    bench.unwant(run)
    done = bench.done(run)
    assert "rollback" not in [one["gate"] for one in done.results]
    assert not is_running(bench.replica(run)["pid"])
    assert list(engines.iterdir()) == []


def test_b18_a_rank_that_the_accepted_engine_loses_during_a_drill_ends_it_and_is_no_verdict(bench, policy, monkeypatch):
    monkeypatch.setitem(DRIVERS, LLAMACPP.name, split(token_seconds=0.01))
    accept(bench, policy, bench.bundle("good"))
    run = drill(bench, policy)
    until(lambda: list((bench.settings().data_dir / "engines").glob("*-gateway/envoy.log")), what="a private router")
    found = ranks(os.getpid(), TITLE)
    (lost,) = [one.pid for one in found if b"-accepted-" in (PROC / str(one.pid) / "environ").read_bytes()]
    os.kill(lost, signal.SIGKILL)

    def is_told():
        failed = [one.body["detail"] for one in bench.entries(run) if one.kind == "attempt_errored"]
        return any("during the gate rollback: rank_lost" in one for one in failed)

    until(is_told, what="the failure")
    bench.unwant(run)
    assert "rollback" not in [one["gate"] for one in bench.done(run).results]


def test_without_a_target_there_is_nothing_to_go_back_to(bench, policy):
    with pytest.raises(InvalidDocument, match="name the target") as refused:
        bench.evaluate(bench.bundle("next", extra=OTHER), policy, gates=["rollback"])
    assert refused.value.members["errors"][0]["pointer"] == "/target"
