"""A gate's result holds for one engine: the one that was there before and is there afterwards."""

import json
from dataclasses import replace

import pytest

from gates import catalog, golden, identity
from gates.dialects.llamacpp import LLAMACPP
from gates.endpoint import Endpoint
from gates.gate import Gate, Judged
from schemas.policy import IntegrityRule
from schemas.result import Verdict
from tests.support import served

PASSED = Judged(Verdict.PASSED, "Good.")
SEEN = {"pid": 7, "models": [["chain", 512]], "facts": {"build_info": "b1"}, "problem": None}
LOST = {"models": None, "facts": None, "problem": "connect: refused"}


def held(after, before=None, judged=PASSED):
    return identity.held_to(judged, {"before": SEEN | (before or {}), "after": SEEN | after})


def test_the_same_engine_changes_nothing():
    assert held({}) is PASSED


@pytest.mark.parametrize("verdict", [Verdict.PASSED, Verdict.FAILED, Verdict.INCONCLUSIVE])
@pytest.mark.parametrize(
    ("after", "named"),
    [
        ({"pid": 8}, "process"),
        ({"models": [["other", 512]]}, "model ids and context"),
        ({"models": [["chain", 256]]}, "model ids and context"),
        ({"facts": {"build_info": "b2"}}, "build and settings"),
    ],
)
def test_any_change_makes_a_result_errored_whatever_was_measured(verdict, after, named):
    judged = held(after, judged=Judged(verdict, "Something."))
    assert judged.verdict is Verdict.ERRORED
    assert named in judged.summary
    assert judged.findings[0].code == "engine-changed"


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ({}, {"pid": None, **LOST}, "engine-unknown"),
        ({}, {"pid": None}, "engine-gone"),
        (LOST, {}, "engine-unknown"),
        (LOST, LOST, "engine-unknown"),
    ],
)
def test_without_an_engine_nothing_passes_and_a_failure_stays_one(before, after, code):
    judged = held(after, before)
    assert (judged.verdict, judged.findings[0].code) == (Verdict.ERRORED, code)
    failed = Judged(Verdict.FAILED, "Bad.")
    assert held(after, before, failed) is failed


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    with served.served(tmp_path_factory.mktemp("chain"), IntegrityRule(gate="integrity")) as context:
        yield context


def test_the_real_engine_says_who_it_is(context):
    seen = identity.look(context)
    assert seen["pid"] == context.process_id()
    assert seen["models"] == [["chain", 512]]
    assert seen["problem"] is None
    assert seen["facts"].keys() == {"build_info", "model_path", "total_slots", "chat_template"}
    assert seen["facts"]["total_slots"] == "4"
    assert identity.look(replace(context, endpoint=None)) is None


def test_an_engine_that_is_exchanged_while_a_gate_runs_makes_it_errored(context, tmp_path, monkeypatch):
    with served.served(tmp_path / "other", IntegrityRule(gate="integrity")) as other:
        here = Endpoint(context.endpoint.base_url, "chain", LLAMACPP)

        def exchange(_):
            here.base_url = other.endpoint.base_url
            return {}

        gate = Gate("golden", 1, golden.GATE.depends_on, measure=exchange, judge=lambda _: PASSED)
        monkeypatch.setitem(catalog.CATALOG, "golden", gate)
        exchanged = replace(context, endpoint=here)
        result, raw = catalog.run("golden", exchanged)
        assert result.verdict is Verdict.ERRORED
        assert "build and settings" in result.summary
        assert json.loads(raw)["identity"]["before"] != json.loads(raw)["identity"]["after"]
        assert catalog.recompute(raw, None, None, context.bundle) == result


def test_an_engine_that_dies_while_a_gate_runs_does_not_pass_it(tmp_path, monkeypatch):
    with served.served(tmp_path / "case", IntegrityRule(gate="integrity")) as context:
        alive = [True]

        def die(_):
            alive[0] = False
            return {}

        gate = Gate("golden", 1, golden.GATE.depends_on, measure=die, judge=lambda _: PASSED)
        monkeypatch.setitem(catalog.CATALOG, "golden", gate)
        result, _ = catalog.run("golden", replace(context, process_id=lambda: 7 if alive[0] else None))
    assert (result.verdict, result.findings[0].code) == (Verdict.ERRORED, "engine-gone")
