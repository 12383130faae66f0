"""The drill against two real engines behind a real Envoy, and what must not pass it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

import pytest

from gates import catalog, crowding, rollback_judgement
from gates.dialects.llamacpp import LLAMACPP
from gates.endpoint import Endpoint
from gates.gate import GateContext
from gates.rollback_judgement import CAUSES, COLD_START, CRASH, MANUAL
from gates.stage import NotTakenBack, Side
from schemas.bundle import Bundle
from schemas.common import canonical_json
from schemas.policy import RollbackRule
from schemas.result import GateResult, Verdict
from schemas.suite import LoadSuite
from tests.support import chain, factories
from tests.support.engine import RunningEngine, boot, chain_engine
from tests.support.faulty import Exchanged, faulty, hang
from workers import drill
from workers.launchers.process import Condition

SUITE = LoadSuite.model_validate(factories.load_body(requests=45, gap_us=25_000))
ACCEPTED, CANDIDATE = "sha256:" + "a" * 64, "sha256:" + "b" * 64
OTHER = {chain.token("H"): chain.token("e"), chain.token("e"): 4}
"""A candidate that answers "He" where what is accepted answers "Hi"."""


@pytest.fixture(scope="module")
def accepted(tmp_path_factory) -> Iterator[RunningEngine]:
    """The accepted bundle's engine, which a drill that is not passed leaves as it was."""
    with chain_engine(tmp_path_factory.mktemp("accepted")) as running:
        yield running


@pytest.fixture
def candidate(tmp_path) -> Iterator[RunningEngine]:
    with chain_engine(tmp_path / "candidate", extra=OTHER) as running:
        yield running


def side(running: RunningEngine, bundle: str, base_url: str | None = None) -> Side:
    url = base_url or running.base_url
    endpoint = Endpoint(url, running.model, LLAMACPP)

    def process_id() -> int | None:
        return running.pid if running.launcher.state(running.launched).condition is Condition.RUNNING else None

    return Side(bundle, endpoint, url.removeprefix("http://"), process_id)


@dataclass
class Drilled:
    result: GateResult
    raw: bytes
    suite: LoadSuite
    bundle: Bundle

    @property
    def codes(self) -> set[str]:
        return {found.code for found in self.result.findings}

    @property
    def exercises(self) -> list[dict]:
        return json.loads(self.raw)["records"]["exercises"]

    def value(self, name: str) -> float:
        (found,) = [one for one in self.result.measurements if one.name == name]
        return found.value


@dataclass
class Engines:
    """The engines of a drill; what is accepted is booted anew in a folder of the test."""

    candidate: RunningEngine
    accepted: RunningEngine | None
    folder: Path
    anew: RunningEngine | None = None

    def kill_candidate(self) -> None:
        self.candidate.launcher.crash(self.candidate.launched)

    def stop_accepted(self) -> None:
        self.accepted.launcher.stop(self.accepted.launched, grace_seconds=5.0)

    def boot_accepted(self) -> Side:
        self.anew = boot(self.accepted.bundle, self.accepted.root, self.folder / "anew")
        return side(self.anew, ACCEPTED)


class Broken(Engines):
    """What is accepted boots once, and no more."""

    def boot_accepted(self) -> Side:
        raise NotTakenBack("exited: the engine exited with status 1", is_late=False)


@contextmanager
def staged(
    folder: Path,
    candidate: Side,
    accepted: Side | None,
    running: RunningEngine,
    beside: RunningEngine | None = None,
    kind: type[Engines] = Engines,
) -> Iterator[drill.EnvoyStage]:
    engines = kind(running, beside, folder)
    try:
        with drill.stage(folder / "gateway", candidate=candidate, accepted=accepted, engines=engines) as made:
            yield made
    finally:
        if engines.anew is not None:
            engines.anew.launcher.stop(engines.anew.launched, grace_seconds=5.0)


def drilled(
    stage: drill.EnvoyStage, running: RunningEngine, *, recovery_seconds: str = "20", progress=None, suite=SUITE
) -> Drilled:
    rule = RollbackRule(gate="rollback", suite=suite.digest, recovery_seconds=recovery_seconds)
    context = GateContext(
        bundle=running.bundle,
        root=running.root,
        rule=rule,
        suite=suite,
        endpoint=Endpoint(running.base_url, running.model, LLAMACPP),
        stage=stage,
        progress=progress or (lambda _: None),
    )
    result, raw = catalog.run("rollback", context)
    assert catalog.recompute(raw, suite, None, running.bundle) == result
    return Drilled(result, raw, suite, running.bundle)


def alone(done: Drilled) -> Drilled:
    """Return the same drill as it would be judged had the machine done nothing else meanwhile."""
    body = json.loads(done.raw)
    for each in body["records"]["exercises"]:
        each["machine"]["busy_us"] = each["machine"]["engine_us"]
    raw = canonical_json(body)
    return replace(done, result=catalog.recompute(raw, done.suite, None, done.bundle), raw=raw)


def test_traffic_goes_back_to_the_accepted_bundle_for_every_cause_and_a_second_rollback_changes_nothing(
    tmp_path, candidate
):
    with (
        chain_engine(tmp_path / "accepted") as accepted,
        staged(tmp_path, side(candidate, CANDIDATE), side(accepted, ACCEPTED), candidate, accepted) as stage,
    ):
        done = drilled(stage, candidate)
    assert done.result.verdict is Verdict.PASSED, done.result.summary
    assert ACCEPTED[:19] in done.result.summary
    assert "where its engine had to boot first" in done.result.summary
    assert [each["cause"] for each in done.exercises] == list(CAUSES)
    assert done.value("lost_requests") == done.value("silent_cuts") == 0
    for each in done.exercises:
        assert each["restored"]["revision"] == each["again"]["revision"]
        assert 0 < done.value(f"recovery_{each['cause']}") < 20_000
        assert each["machine"]["engine_us"] > 0
        assert each["machine"]["own_us"] > 0
        assert each["machine"]["busy_us"] * 1.1 > each["machine"]["engine_us"]
        columns = json.loads(done.raw)["records"]["columns"]
        rows = [dict(zip(columns, row, strict=True)) for row in each["requests"]]
        # Both engines had traffic, and their answers tell them apart.
        outputs = {row["served"]: row["output"] for row in rows if row["outcome"] == "ok"}
        assert len(outputs) == len(set(outputs.values())) == 2
    # The engine that had to boot is another one, and the candidate served until it was ready.
    cold = next(each for each in done.exercises if each["cause"] == COLD_START)
    before, after = cold["pids"]["accepted"]
    assert before != after
    assert cold["trigger_us"] < cold["ready_us"] < cold["restored"]["at_us"]
    assert done.value("boot_cold_start") < done.value("recovery_cold_start")
    assert candidate.launcher.state(candidate.launched).condition is Condition.EXITED


def test_on_a_target_that_has_accepted_nothing_everybody_is_told_that_nothing_serves(tmp_path, candidate):
    with staged(tmp_path, side(candidate, CANDIDATE), None, candidate) as stage:
        done = drilled(stage, candidate)
    assert done.result.verdict is Verdict.PASSED, done.result.summary
    assert done.result.summary.startswith("The target has accepted no bundle yet, so going back means no traffic")
    assert done.value("told_no_traffic") > 0
    assert done.value("lost_requests") == 0


def test_an_accepted_bundle_that_does_not_boot_a_second_time_fails(tmp_path, candidate, monkeypatch):
    monkeypatch.setattr(rollback_judgement, "CAUSES", (COLD_START, CRASH))
    with (
        chain_engine(tmp_path / "accepted") as accepted,
        staged(tmp_path, side(candidate, CANDIDATE), side(accepted, ACCEPTED), candidate, accepted, Broken) as stage,
    ):
        done = drilled(stage, candidate)
    assert done.result.verdict is Verdict.FAILED
    assert done.codes == {"accepted-not-booted", "not-recovered"}
    assert "exited: the engine exited with status 1" in done.result.summary
    assert [each["cause"] for each in done.exercises] == [COLD_START]
    # The candidate went on serving: nobody was lost for it.
    assert done.value("lost_requests") == 0


class Withheld(drill.EnvoyStage):
    """Its documents are changed in a folder that Envoy does not watch any more: what is written is never taken."""

    def shift(self, candidate_bp, revision):
        split = super().shift(candidate_bp, revision)
        watched = self.gateway.directory / "xds"
        watched.rename(watched.with_name("watched"))
        shutil.copytree(watched.with_name("watched"), watched)
        self.gateway.deadline_seconds = 0.5
        return split


def test_a_router_that_does_not_go_back_fails(tmp_path, accepted, candidate):
    with staged(tmp_path, side(candidate, CANDIDATE), side(accepted, ACCEPTED), candidate) as stage:
        stage.__class__ = Withheld
        done = alone(drilled(stage, candidate, recovery_seconds="1"))
    assert done.result.verdict is Verdict.FAILED
    assert done.codes == {"router-did-not-go-back", "not-recovered"}
    assert len(done.exercises) == 1


def test_a_candidate_whose_streams_are_cut_fails(tmp_path, accepted, candidate):
    cut = []

    def fault(exchanged: Exchanged):
        if exchanged.path != "/v1/chat/completions" or len(cut) >= 5:
            return exchanged.status, exchanged.content_type, exchanged.body
        cut.append(exchanged)
        first, gap, _ = exchanged.body.partition(b"\n\n")
        return 200, exchanged.content_type, first + gap

    with (
        faulty(candidate.base_url, fault) as url,
        staged(tmp_path, side(candidate, CANDIDATE, url), side(accepted, ACCEPTED), candidate) as stage,
    ):
        done = drilled(stage, candidate)
    assert done.result.verdict is Verdict.FAILED
    assert done.codes == {"requests-lost", "stream-cut-silently"}
    assert done.value("silent_cuts") == len(cut) == 5


def test_answers_that_time_out_while_others_have_the_processors_are_not_held_against_the_candidate(
    tmp_path, accepted, candidate, monkeypatch
):
    monkeypatch.setattr(rollback_judgement, "CAUSES", (MANUAL,))
    suite = SUITE.model_copy(update={"request_seconds": Decimal(2)})
    late = []

    def fault(exchanged: Exchanged):
        if exchanged.path == "/v1/chat/completions" and len(late) < 2:
            late.append(exchanged)
            hang()
        return exchanged.status, exchanged.content_type, exchanged.body

    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        with (
            faulty(candidate.base_url, fault) as url,
            staged(tmp_path, side(candidate, CANDIDATE, url), side(accepted, ACCEPTED), candidate) as stage,
        ):
            done = drilled(stage, candidate, suite=suite)
    finally:
        for process in hogs:
            process.kill()
            process.wait()
    assert done.result.verdict is Verdict.ERRORED
    assert done.codes >= {"machine-busy", "requests-lost"}
    assert done.value("foreign_cpu") > crowding.MAX_FOREIGN_RATIO
    assert alone(done).result.verdict is Verdict.FAILED


def test_what_is_accepted_must_answer_as_it_did_before(tmp_path, accepted, candidate):
    asked = []

    def fault(exchanged: Exchanged):
        if exchanged.path == "/v1/chat/completions":
            asked.append(exchanged)
        is_own = len(asked) <= 2  # asked twice by itself, before anything moves
        return exchanged.status, exchanged.content_type, exchanged.body if is_own else _other(exchanged.body)

    with (
        faulty(accepted.base_url, fault) as url,
        staged(tmp_path, side(candidate, CANDIDATE), side(accepted, ACCEPTED, url), candidate) as stage,
    ):
        done = drilled(stage, candidate)
    assert done.result.verdict is Verdict.FAILED
    assert done.codes == {"answers-differ"}


def _other(body: bytes) -> bytes:
    return body.replace(b'"content":"H"', b'"content":"h"')


def test_a_router_that_dies_is_an_error_of_the_instrument(tmp_path, accepted, candidate):
    with staged(tmp_path, side(candidate, CANDIDATE), side(accepted, ACCEPTED), candidate) as stage:
        done = drilled(stage, candidate, progress=lambda _: stage.end())
    assert done.result.verdict is Verdict.ERRORED
    assert done.codes == {"instrument"}
    assert "router" in done.result.summary


def test_a_candidate_that_dies_by_itself_says_nothing_about_going_back(tmp_path, accepted, candidate):
    with staged(tmp_path, side(candidate, CANDIDATE), side(accepted, ACCEPTED), candidate) as stage:

        def end(line: str) -> None:
            if "gate_failed" in line:
                os.kill(candidate.pid, signal.SIGKILL)

        done = drilled(stage, candidate, progress=end)
    assert done.result.verdict is Verdict.ERRORED
    assert "ended by itself" in done.result.summary or "router did not move" in done.result.summary


def test_without_a_stage_nothing_is_drilled(tmp_path, candidate):
    rule = RollbackRule(gate="rollback", suite=SUITE.digest)
    context = GateContext(bundle=candidate.bundle, root=candidate.root, rule=rule, suite=SUITE)
    assert catalog.run("rollback", context)[0].verdict is Verdict.ERRORED
    with_load = replace(context, suite=None)
    assert catalog.run("rollback", with_load)[0].verdict is Verdict.ERRORED
