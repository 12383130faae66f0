"""Whole releases of the CHAIN model on the embedded stack: only the command line, a real engine, and live streams."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from gates.arrivals import make_suite
from schemas.policy import Policy
from schemas.suite import Arrival, GoldenSuite, LoadSpec, LoadSuite, Message, Prompt
from tests.support.chain import TEMPLATE, write_bundle_directory
from tests.support.embedded import ROOT, Stack
from tests.support.gateway import Answers, ask_many

TARGET = "chat@prod"
WORDS = ("ping", "hello there", "what is 2+2?", "one more")
ENGINE_ARGUMENTS = ("--arg", "--threads", "--arg", "1", "--licence", "Apache-2.0", "--name", "chain")


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Journey:
    """A person with a shell, and the stack that the person started."""

    stack: Stack
    home: Path

    def run(self, *words: object, seconds: float = 150) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "registry.cli", *map(str, words)],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "HOME": str(self.home),
                "XDG_CACHE_HOME": str(self.home / "cache"),
                "SLUICEGATE_URL": self.stack.facts["url"],
                "SLUICEGATE_TOKEN": self.stack.facts["token"],
            },
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def ok(self, *words: object) -> Any:
        ran = self.run(*words, "--json")
        assert ran.status == 0, ran.err
        return ran.json

    def bundle(self, name: str, template: str = TEMPLATE) -> str:
        folder = write_bundle_directory(self.home / "bundles" / name, template=template)
        return str(self.ok("bundle", "create", folder, *ENGINE_ARGUMENTS)["digest"])

    def push(self, kind: str, document: GoldenSuite | LoadSuite | Policy) -> str:
        path = self.home / f"{document.name}.json"
        path.write_bytes(document.canonical())
        return str(self.ok(kind, "push", path)["digest"])

    def release(self, bundle: str, policy: str, until: str = "promoted") -> tuple[Ran, Any]:
        """Create a release and follow it; return what the command said and the release."""
        words = ("--target", TARGET, "--bundle", bundle, "--policy", policy, "--timeout", "120")
        ran = self.run("release", "create", *words, "--until", until)
        return ran, self.ok("release", "show", self.newest())

    def newest(self) -> str:
        return str(self.ok("release", "list")["items"][0]["id"])

    def url(self) -> str:
        return f"{self.stack.facts['gateway_url']}/{TARGET}/v1/chat/completions"


class Traffic:
    """Streams through the gateway, a few at a time, for as long as the block lasts."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[Answers] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        ends = time.monotonic() + 120
        while not self._stop.is_set() and time.monotonic() < ends:
            self.answers.append(ask_many(self.url, 4, concurrency=2))
            self._stop.wait(0.08)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def broken(self) -> int:
        """Streams that were answered by an engine and did not come to their end."""
        return sum(each.broken for each in self.answers)

    @property
    def whole(self) -> int:
        return sum(each.whole for each in self.answers)


def golden(name: str) -> GoldenSuite:
    prompts = [
        Prompt(id=f"p{place}", messages=[Message(role="user", content=word)], max_tokens=8)
        for place, word in enumerate(WORDS)
    ]
    return GoldenSuite(schema_id=GoldenSuite.SCHEMA_ID, name=name, prompts=prompts, top_k=5, repeats=2)


def load(name: str = "chain-load", rate_per_second: str = "20") -> LoadSuite:
    prompts = [Prompt(id=word[:2], messages=[Message(role="user", content=word)], max_tokens=8) for word in WORDS]
    spec = LoadSpec.model_validate(
        {
            "name": name,
            "prompts": [prompt.model_dump() for prompt in prompts],
            "rate_per_second": rate_per_second,
            "requests": 64,
            "warmup_requests": 20,
            "distribution": "gamma",
            "shape": "1",
            "seed": 7,
            "request_seconds": "20",
        }
    )
    return make_suite(spec)


def overlong_in_one_of_seven() -> LoadSuite:
    """Nine of 64 requests do not fit the context: too many to pass p90, too few to fail it."""
    suite = load()
    long = Prompt(id="long", messages=[Message(role="user", content="x" * 3000)], max_tokens=8)
    plan = [
        Arrival(at_us=each.at_us, prompt="long" if place % 7 == 3 else each.prompt)
        for place, each in enumerate(suite.plan)
    ]
    return suite.model_copy(update={"name": "overlong", "prompts": [*suite.prompts, long], "plan": plan})


def policy(name: str, *gates: dict[str, Any]) -> Policy:
    step = {"hold_seconds": "0.5", "min_requests": 29, "max_seconds": "60"}
    return Policy.model_validate(
        {
            "schema": Policy.SCHEMA_ID,
            "name": name,
            "description": "For a test: tiny samples.",
            "gates": [
                {"gate": "integrity"},
                {"gate": "compatibility", "boot_seconds": "60", "answer_seconds": "20"},
                *gates,
            ],
            "approval": {"required": 0},
            "canary": {
                "steps": [{"weight_bp": 5000, **step}, {"weight_bp": 10_000, **step}],
                "stop_conditions": [
                    {"metric": "error_ratio", "max_ratio": "0.1"},
                    {"metric": "ttft", "percentile": "0.9", "max_ms": 5000},
                ],
                "soak_seconds": "1",
                "dead_man_seconds": "60",
                "drain_seconds": "10",
            },
            "evidence_seconds": "86400",
        }
    )


def golden_rule(suite: str) -> dict[str, Any]:
    return {"gate": "golden", "suite": suite, "margin_nat": "0.05", "min_prompts": len(WORDS)}


def load_rule(suite: str, **changes: Any) -> dict[str, Any]:
    rule = {
        "gate": "load",
        "suite": suite,
        "percentile": "0.9",
        "confidence": "0.99",
        "requests": 64,
        "ttft_ms": 5000,
        "tpot_ms": 2000,
        "e2e_ms": 10_000,
        "attainment_min": "0.9",
        "error_max": "0.05",
        "send_lag_ms": 500,
    }
    return rule | changes


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
