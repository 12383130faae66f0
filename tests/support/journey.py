"""A person with a shell on an embedded stack of their own, and the documents that whole releases of CHAIN need."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gates.arrivals import make_suite
from schemas.policy import Policy
from schemas.suite import GoldenSuite, LoadSpec, LoadSuite, Message, Prompt
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

    def run(self, *words: object, seconds: float = 150, token: str = "") -> Ran:
        """Run a command, as somebody else with their token."""
        done = subprocess.run(
            [sys.executable, "-m", "registry.cli", *map(str, words)],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "HOME": str(self.home),
                "XDG_CACHE_HOME": str(self.home / "cache"),
                "SLUICEGATE_URL": self.stack.facts["url"],
                "SLUICEGATE_TOKEN": token or self.stack.facts["token"],
            },
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def ok(self, *words: object, seconds: float = 150, token: str = "") -> Any:
        """Run a command that must succeed, and return the object that it says."""
        ran = self.run(*words, "--json", seconds=seconds, token=token)
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

    def __init__(self, url: str, seconds: float = 120) -> None:
        self.url = url
        self._seconds = seconds
        self.answers: list[Answers] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        ends = time.monotonic() + self._seconds
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
    body = {"schema": GoldenSuite.SCHEMA_ID, "name": name, "top_k": 5, "repeats": 2}
    return GoldenSuite.model_validate({**body, "prompts": [prompt.model_dump() for prompt in prompts]})


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


def policy(name: str, *gates: dict[str, Any], boot_seconds: str = "60", approvals: int = 0) -> Policy:
    step = {"hold_seconds": "0.5", "min_requests": 29, "max_seconds": "60"}
    return Policy.model_validate(
        {
            "schema": Policy.SCHEMA_ID,
            "name": name,
            "description": "For a test: tiny samples.",
            "gates": [
                {"gate": "integrity"},
                {"gate": "compatibility", "boot_seconds": boot_seconds, "answer_seconds": "20"},
                *gates,
            ],
            "approval": {"required": approvals},
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
