"""Whole releases of the CHAIN model on the embedded stack: only the command line, a real engine, and live streams."""

import json
import time
from collections.abc import Iterator

import pytest

from schemas.suite import Arrival, LoadSuite, Message, Prompt
from tests.support.chain import TEMPLATE
from tests.support.embedded import Stack
from tests.support.gateway import ask_many
from tests.support.journey import TARGET, Journey, Traffic, golden, golden_rule, load, load_rule, policy


def overlong_in_one_of_seven() -> LoadSuite:
    """Nine of 64 requests do not fit the context: too many to pass p90, too few to fail it."""
    suite = load()
    long = Prompt(id="long", messages=[Message(role="user", content="x" * 3000)], max_tokens=8)
    plan = [
        Arrival(at_us=each.at_us, prompt="long" if place % 7 == 3 else each.prompt)
        for place, each in enumerate(suite.plan)
    ]
    return suite.model_copy(update={"name": "overlong", "prompts": [*suite.prompts, long], "plan": plan})


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Journey]:
    home = tmp_path_factory.mktemp("journey")
    stack = Stack(home / "data")
    stack.wait_ready()
    yield Journey(stack, home)
    assert stack.stop() == 0


@pytest.mark.timeout(400)
def test_a_directory_goes_live_is_succeeded_refused_rolled_back_and_every_step_can_be_verified(
    journey: Journey,
) -> None:
    # People prepare: a target, suites, a first bundle, a reference, a policy.
    journey.ok("target", "create", TARGET)
    answers, traffic_plan = journey.push("suite", golden("chain-golden")), journey.push("suite", load())
    first = journey.bundle("first")
    assert journey.bundle("first") == first
    recorded = journey.run(
        "suite", "record", answers, "--bundle", first, "--target", TARGET, "--reason", "the first one", "--wait"
    )
    assert recorded.status == 0, recorded.err
    rules = journey.push("policy", policy("chain", golden_rule(answers), load_rule(traffic_plan)))

    # A first release goes from nothing to everything, with all gates, in under a minute.
    began = time.monotonic()
    with Traffic(journey.url()) as traffic:
        ran, shown = journey.release(first, rules)
    assert ran.status == 0, ran.out + ran.err
    assert shown["phase"] == "promoted"
    assert {gate["gate"]: gate["verdict"] for gate in shown["gates"]} == dict.fromkeys(
        ("integrity", "compatibility", "golden", "load"), "passed"
    )
    assert traffic.broken == 0
    assert time.monotonic() - began < 60

    # A candidate whose template differs is rejected, with the prompt and the first token that differs.
    bad = journey.bundle("bad", TEMPLATE.replace("assistant", "assistent"))
    ran, shown = journey.release(bad, rules)
    assert ran.status == 1
    assert shown["phase"] == "rejected"
    assert "golden failed" in shown["reason"]
    result = next(e["body"] for e in shown["log"] if e["kind"] == "gate_recorded" and e["body"]["gate"] == "golden")
    finding = next(f for f in result["findings"] if f["severity"] == "block")
    assert finding["pointer"].lstrip("/").startswith(("p0", "prompts"))
    assert "'a'" in json.dumps(finding) or "a" in finding["expected"]

    # A good successor takes over step by step; the one before is superseded.
    second = journey.bundle("second", TEMPLATE + "{# second #}")
    with Traffic(journey.url()) as traffic:
        ran, shown = journey.release(second, rules)
        assert ran.status == 0, ran.out + ran.err
        weights = [e["body"]["desired"][-1]["weight_bp"] for e in shown["log"] if e["kind"] == "traffic_shifted"]
        # A step is published again when a replica had to be booted again; its order never changes.
        assert list(dict.fromkeys(weights)) == [5000, 10_000]
        assert weights == sorted(weights)
        # A person takes it back; the accepted bundle serves again.
        back = journey.run("release", "rollback", shown["id"], "--reason", "answers look odd")
        assert back.status == 0, back.err
        assert "takes the traffic back next" in back.err
        watched = journey.run("release", "watch", shown["id"], "--until", "ended", "--timeout", "60")
        assert watched.status == 1, watched.out + watched.err
    assert traffic.broken == 0
    assert traffic.whole > 0
    target = journey.ok("target", "show", TARGET)
    assert target["stable_bundle"] == first
    assert {each["phase"] for each in journey.ok("release", "list", "--target", TARGET)["items"]} == {
        "promoted",
        "rejected",
        "rolled_back",
    }
    assert set(ask_many(journey.url(), 4).statuses) == {200}

    verified = journey.ok("evidence", "verify", "--recompute")
    assert verified["verified"] is True
    again = {(one["gate"], one["recomputed"], one["outcome"]) for one in verified["recomputations"]}
    assert {("load", "passed", "same"), ("golden", "passed", "same"), ("golden", "failed", "same")} < again
    assert {one["outcome"] for one in verified["recomputations"]} == {"same"}
    assert verified["entries"] > 40
    assert verified["faults"] == []


@pytest.mark.timeout(300)
def test_an_inconclusive_and_an_errored_gate_hold_and_say_why(journey: Journey) -> None:
    target = "other@prod"
    journey.ok("target", "create", target)
    bundle = journey.bundle("first")
    overlong = journey.push("suite", overlong_in_one_of_seven())
    undecided = journey.push(
        "policy",
        policy("undecided", load_rule(overlong, attainment_min="0.5", error_max="0.4")),
    )
    words = ("--target", target, "--bundle", bundle, "--timeout", "120")
    ran = journey.run("release", "create", *words, "--policy", undecided, "--until", "gated")
    shown = journey.ok("release", "show", journey.newest())
    assert ran.status == 3, ran.out + ran.err
    assert shown["phase"] == "booted"
    assert "load inconclusive" in shown["held"][0]
    assert shown["weight_bp"] is None
    assert journey.run("release", "reject", shown["id"], "--reason", "not needed").status == 0

    # No generator sends 64 requests in 3 ms: the instrument could not do what the plan says, so nothing is known.
    rush = journey.push("suite", load("rush", rate_per_second="20000"))
    errored = journey.push("policy", policy("errored", load_rule(rush, send_lag_ms=1)))
    ran = journey.run("release", "create", *words, "--policy", errored, "--until", "gated")
    shown = journey.ok("release", "show", journey.newest())
    assert ran.status == 3, ran.out + ran.err
    assert shown["phase"] == "booted"
    assert "load errored" in shown["held"][0]
    verdicts = [
        e["body"]["verdict"] for e in shown["log"] if e["kind"] == "gate_recorded" and e["body"]["gate"] == "load"
    ]
    assert verdicts == ["errored"] * 3
    assert shown["weight_bp"] is None
