"""A whole release on the real vLLM: it follows llama.cpp on a target, by the command line, through a real Envoy."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chain_folder import describe_folder, write_chain_folder
from tests.support.embedded import Stack
from tests.support.gateway import ask_many
from tests.support.journey import TARGET, Journey, Traffic, golden, golden_rule, load, load_rule, policy

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

GATES = ("integrity", "compatibility", "static", "golden", "load")
SLOWLY = {"ttft_ms": 8000, "tpot_ms": 4000, "e2e_ms": 10_000, "error_max": "0.1", "send_lag_ms": 800}


@pytest.fixture
def journey(tmp_path: Path) -> Iterator[Journey]:
    stack = Stack(tmp_path / "data")
    stack.wait_ready()
    yield Journey(stack, tmp_path)
    assert stack.stop() == 0


def vllm_bundle(journey: Journey) -> str:
    """Register CHAIN as a folder, served by vLLM."""
    folder = write_chain_folder(journey.home / "bundles" / "on-vllm")
    told = describe_folder(folder, environment="sha256:" + "0" * 64).model_dump(mode="json")
    overlay = {
        "engine": {key: told["engine"][key] for key in ("name", "arguments", "variables")},
        "runtime": {"context_tokens": 512, "max_sequences": 4},
        "serving": {"features": ["chat", "completions", "json_schema", "logprobs", "streaming"]},
    }
    place = journey.home / "on-vllm.json"
    place.write_text(json.dumps(overlay))
    made = journey.ok("bundle", "create", folder, "-f", place, "--licence", "Apache-2.0", "--name", "chain")
    return str(made["digest"])


def test_a_bundle_on_vllm_is_gated_approved_tried_promoted_and_taken_back(journey: Journey) -> None:
    # CHAIN is the same model for both engines, so that what llama.cpp answered is what vLLM is held to.
    journey.ok("target", "create", TARGET)
    maria = journey.ok("token", "create", "maria", "--role", "manager")["secret"]
    answers, arrivals = journey.push("suite", golden("chain-golden")), journey.push("suite", load())
    first = journey.bundle("first")
    words = ("--bundle", first, "--target", TARGET, "--reason", "the first one", "--wait")
    journey.ok("suite", "record", answers, *words)
    quick = journey.push("policy", policy("quick"))
    with Traffic(journey.url()) as traffic:
        ran, shown = journey.release(first, quick)
    assert (ran.status, shown["phase"], traffic.broken) == (0, "promoted", 0), ran.err

    second = vllm_bundle(journey)
    gates = ({"gate": "static"}, golden_rule(answers), load_rule(arrivals, **SLOWLY))
    rules = journey.push("policy", policy("on-vllm", *gates, boot_seconds="300", approvals=1))
    asked = ("--target", TARGET, "--bundle", second, "--policy", rules)
    with Traffic(journey.url(), 1000) as traffic:
        ran = journey.run("release", "create", *asked, "--until", "gated", "--timeout", "500", seconds=520)
        release = journey.newest()
        shown = journey.ok("release", "show", release)
        assert (ran.status, shown["phase"]) == (0, "gated"), (ran.err, shown["gates"])
        assert {gate["gate"]: gate["verdict"] for gate in shown["gates"]} == dict.fromkeys(GATES, "passed")
        approved = ("release", "approve", release, "--reason", "answers as before")
        assert journey.run(*approved).status == 4
        journey.ok(*approved, token=maria)
        journey.ok("release", "watch", release, "--until", "promoted", "--timeout", "400", seconds=420)
        served = journey.ok("target", "show", TARGET)
        assert served["stable_bundle"] == second
        assert set(ask_many(journey.url(), 4).statuses) == {200}
        journey.ok("release", "rollback", release, "--reason", "latency")
        back = journey.run("release", "watch", release, "--until", "ended", "--timeout", "60")
        assert back.status == 1, back.err
    assert (traffic.broken, traffic.whole > 60) == (0, True)
    assert journey.ok("target", "show", TARGET)["stable_bundle"] == first

    shown = journey.ok("release", "show", release)
    assert shown["phase"] == "rolled_back"
    booted = [entry["body"]["engine"] for entry in shown["log"] if entry["kind"] == "engine_booted"]
    assert {(one["name"], one["version"]) for one in booted} == {("vllm", "0.32.0")}
    weights = [e["body"]["desired"][-1]["weight_bp"] for e in shown["log"] if e["kind"] == "traffic_shifted"]
    assert list(dict.fromkeys(weights)) == [5000, 10_000]
    verified = journey.ok("evidence", "verify", "--recompute")
    assert (verified["verified"], verified["faults"]) == (True, [])
