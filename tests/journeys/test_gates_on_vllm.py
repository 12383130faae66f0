"""Gates on the real vLLM by the command line alone: what is good passes all of them on one boot, what is not fails.

CHAIN is the same model for llama.cpp and for vLLM, so that a reference recorded on one holds the other to it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from registry.service import Service
from registry.settings import Gateway
from registry.storage.local import LocalBlobs
from tests.conftest import settings_for
from tests.support import chain, factories, logs, structured
from tests.support.chain_folder import describe_folder, write_chain_adapter, write_chain_folder
from tests.support.command import Command, Ran
from tests.support.runners import Bench, bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

TARGET = "chain@test"
LICENCE = ("--licence", "Apache-2.0", "--name", "chain")
SEVENS = {
    "type": "object",
    "properties": {"n": {"type": "integer", "multipleOf": 7}},
    "required": ["n"],
    "additionalProperties": False,
}
BOOT = {"gate": "compatibility", "boot_seconds": "300", "answer_seconds": "30"}
EVERY_GATE = ["compatibility", "golden", "integrity", "load", "placement", "static", "structured"]
XGRAMMAR = '{"backend": "xgrammar"}'
ANSWERS_HO = {chain.token("H"): chain.token("o"), chain.token("o"): 4}


@dataclass
class Ground:
    """A service with a runner that has both engines, and the documents that every test needs."""

    bench: Bench
    home: Path
    policy: str = ""
    llamacpp: str = ""

    def overlay(self, name: str, **changes: Any) -> Path:
        """Write what the files of a vLLM bundle do not tell."""
        place = self.home / f"{name}.json"
        told = describe_folder(self.home / name, environment="sha256:" + "0" * 64).model_dump(mode="json")
        engine = {key: told["engine"][key] for key in ("name", "arguments", "variables")}
        engine["arguments"] = [*engine["arguments"], *changes.pop("arguments", [])]
        serving = {"features": ["chat", "completions", "json_schema", "logprobs", "streaming"]}
        runtime = {"context_tokens": 512, "max_sequences": 4} | changes.pop("runtime", {})
        place.write_text(json.dumps({"engine": engine, "runtime": runtime, "serving": serving, **changes}))
        return place

    def bundle(self, command: Command, name: str, *, files: dict[str, Any] | None = None, **changes: Any) -> str:
        """Register a CHAIN variant for vLLM; `files` as `write_chain_folder` takes them."""
        folder = write_chain_folder(self.home / name, **(files or {}))
        made = command.ok("bundle", "create", folder, "-f", self.overlay(name, **changes), *LICENCE, "--json")
        return str(made.json["digest"])

    def gates(self, command: Command, bundle: str, *gates: str) -> tuple[Ran, dict[str, Any]]:
        """Run gates and wait; return what the command said and the results by gate."""
        words = [word for gate in gates for word in ("--gate", gate)]
        run = ("gate", "run", bundle, "--policy", self.policy, "--target", TARGET, "--runner-class", "cpu")
        (runner,) = self.bench.agents
        Timer(0.3, runner.ring).start()  # there is no broker here, and by itself it looks every few seconds
        ran = command(*run, *words, "--wait", "--timeout", "300", "--json")
        return ran, {one["gate"]: one for one in ran.json["results"]}


def documents(folder: Path) -> dict[str, Path]:
    """Write a golden suite, a structured one that asks for multiples of 7, and a load spec."""
    ranking = {token: 90 - 5 * rank for rank, token in enumerate(map(chain.token, '}7"n:{'))}
    ranking |= {chain.token(space): -100 for space in " \n\t\r"}
    sevens = structured.item("sevens", SEVENS, valid=('{"n":7}',), invalid=('{"n":1}',), ranking=None)
    sevens["logit_bias"] = [{"token": token, "bias": str(bias)} for token, bias in ranking.items()]
    prompt = "ping " * 20
    bodies = {
        "golden": factories.golden_body(),
        "structured": structured.suite_body(sevens, repeats=59),
        "load": factories.load_spec_body(
            prompts=[{"id": "long", "messages": [{"role": "user", "content": prompt}], "max_tokens": 8}],
            rate_per_second="20",
        ),
    }
    for name, body in bodies.items():
        (folder / f"{name}.json").write_text(json.dumps(body))
    return {name: folder / f"{name}.json" for name in bodies}


def policy_body(suites: dict[str, str]) -> dict[str, Any]:
    """Return a policy of every gate but the drill, with limits that a busy machine keeps."""
    load = {
        "gate": "load",
        "suite": suites["load"],
        "percentile": "0.9",
        "confidence": "0.95",
        "requests": 60,
        "ttft_ms": 8000,
        "tpot_ms": 4000,
        "e2e_ms": 9000,
        "attainment_min": "0.9",
        "error_max": "0.1",
        "send_lag_ms": 800,
    }
    return factories.policy_body(
        "vllm",
        gates=[
            {"gate": "integrity"},
            {"gate": "static"},
            {"gate": "placement", "activation_bytes": 1_000_000},
            BOOT,
            {"gate": "golden", "suite": suites["golden"], "margin_nat": "0.1", "min_prompts": 2},
            structured.rule_body(
                suites["structured"], validity_min="0.95", truncation_max="0.05", compile_cold_ms=30_000
            ),
            load,
        ],
    )


@pytest.fixture(scope="module")
def _bench(postgres, tmp_path_factory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("vllm")
    settings = settings_for(postgres.url(postgres.create()), folder)
    settings.gateways.update({"local": Gateway(directory=folder / "gateway", url="http://127.0.0.1:1")})
    service = Service.build(settings)
    with bench(service, folder, 30.0) as made:
        made.start()
        yield made
    service.close()


@pytest.fixture
def command(_bench, tmp_path, monkeypatch, capsys) -> Iterator[Command]:
    """A manager's command line; the service's log, in this same process, is silent meanwhile."""
    made = Command(tmp_path, monkeypatch, capsys)
    made.be("manager", _bench.api)
    with logs.silent():
        yield made


@pytest.fixture
def ground(_bench, command) -> Ground:
    """The ground of this module: documents are pushed, and a reference recorded on llama.cpp, once."""
    if (found := getattr(_bench, "ground", None)) is not None:
        return found
    made = Ground(_bench, _bench.folder / "sources")
    made.home.mkdir()
    pushed = {
        name: command.ok("suite", "push", at, "--json").json["digest"] for name, at in documents(made.home).items()
    }
    command.ok("target", "create", TARGET, "--runner-class", "cpu", "--gateway", "local")
    folder = chain.write_bundle_directory(made.home / "gguf")
    arguments = ("--arg", "--threads", "--arg", "1", "--arg=--ctx-size", "--arg=2048", "--arg=--parallel", "--arg=4")
    made.llamacpp = command.ok("bundle", "create", folder, *arguments, *LICENCE, "--json").json["digest"]
    record = ("--bundle", made.llamacpp, "--target", TARGET, "--reason", "read by two people", "--wait", "--json")
    assert command.ok("suite", "record", made.home / "golden.json", *record).json["outcome"] == "recorded"
    (made.home / "policy.json").write_text(json.dumps(policy_body(pushed)))
    made.policy = command.ok("policy", "push", made.home / "policy.json", "--json").json["digest"]
    _bench.ground = made
    return made


def test_a_good_bundle_passes_every_gate_on_one_boot(ground, command):
    bundle = ground.bundle(command, "good")
    ran, results = ground.gates(command, bundle)
    assert (ran.status, ran.json["outcome"]) == (0, "passed"), {
        gate: (one["verdict"], one["summary"], one["findings"]) for gate, one in results.items()
    }
    assert sorted(results) == EVERY_GATE
    assert {one["severity"] for result in results.values() for one in result["findings"]} <= {"info"}
    assert ground.bench.states(ran.json["id"]).count("loading") == 1
    (booted,) = [entry.body for entry in ground.bench.entries(ran.json["id"]) if entry.kind == "engine_booted"]
    assert (booted["engine"]["name"], booted["engine"]["context_tokens"]) == ("vllm", 512)
    verified = command.ok("evidence", "verify", "--recompute", "--json").json
    assert verified["verified"], verified


def failed(ran: Ran, results: dict[str, Any], gate: str) -> list[str]:
    """Return the codes of what blocks in the one gate that failed."""
    assert (ran.status, ran.json["outcome"]) == (1, "failed"), ran
    assert [name for name, one in results.items() if one["verdict"] != "passed"] == [gate], results
    return [one["code"] for one in results[gate]["findings"] if one["severity"] == "block"]


BEFORE_BOOT = {
    "static": ({"files": {"template": "{% for %}"}}, "template-fails"),
    "placement": ({"runtime": {"context_tokens": 2048, "max_sequences": 60_000}}, None),
    "compatibility": ({"arguments": ["--no-such-argument"]}, "boot-unsupported"),
}


@pytest.mark.parametrize("gate", sorted(BEFORE_BOOT))
def test_what_needs_no_engine_to_be_seen_starts_none(ground, command, gate):
    changes, code = BEFORE_BOOT[gate]
    ran, results = ground.gates(command, ground.bundle(command, f"bad-{gate}", **changes), gate)
    codes = failed(ran, results, gate)
    assert code is None or codes == [code]
    assert "engine_booted" not in {entry.kind for entry in ground.bench.entries(ran.json["id"])}


def test_a_damaged_file_is_found_before_an_engine_starts(ground, command):
    bundle = ground.bundle(command, "damaged", files={"generation": {"max_length": 77}})
    files = command.ok("bundle", "show", bundle, "--json").json["document"]["files"]
    (digest,) = [file["sha256"] for file in files if file["path"] == "generation_config.json"]
    blob = LocalBlobs(ground.bench.service.settings.storage_dir).path(digest)
    content = blob.read_bytes()
    blob.unlink()
    blob.write_bytes(content.replace(b"77", b"78"))
    ran, results = ground.gates(command, bundle, "integrity", "compatibility")
    failed(ran, results, "integrity")
    assert "generation_config.json" in results["integrity"]["summary"]
    assert "compatibility" not in results


# ------------------------------------------------------------------------------ one boot each: `make test-all`


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "changes", "codes"),
    [
        ("compatibility", {"runtime": {"context_tokens": 4096}}, {"boot-bad-argument"}),
        ("golden", {"files": {"extra": ANSWERS_HO}}, {"output-differs"}),
        ("structured", {"arguments": ["--structured-outputs-config", XGRAMMAR]}, {"keyword-refused"}),
        ("load", {"runtime": {"context_tokens": 96}}, {"too-many-errors"}),
    ],
)
def test_a_bundle_that_one_gate_is_there_for_fails_it_and_no_other(ground, command, gate, changes, codes):
    """More context than positions; other answers; a grammar without a keyword of the contract; too little context."""
    bundle = ground.bundle(command, f"worse-{gate}", **changes)
    gates = [gate] if gate == "compatibility" else ["compatibility", gate]
    ran, results = ground.gates(command, bundle, *gates)
    assert codes <= set(failed(ran, results, gate)), results[gate]


@pytest.mark.slow
def test_an_adapter_that_changes_nothing_fails_and_one_that_does_is_let_through(ground, command):
    """CHAIN's layer is all zeros: what an adapter adds to the values gets out only where it adds an output as well."""
    folder = ground.home / "adapted"
    write_chain_folder(folder)
    overlay = ground.overlay("adapted", adapters={"loud": "loud", "mute": "mute"})
    write_chain_adapter(folder / "loud", {"self_attn.v_proj": 0.05, "self_attn.o_proj": 0.05})
    write_chain_adapter(folder / "mute", {"self_attn.q_proj": 0.05})
    made = command.ok("bundle", "create", folder, "-f", overlay, *LICENCE, "--json")
    ran, results = ground.gates(command, made.json["digest"], "compatibility")
    failed(ran, results, "compatibility")
    blocks = [
        (one["code"], one["pointer"]) for one in results["compatibility"]["findings"] if one["severity"] == "block"
    ]
    assert blocks == [("adapter-no-effect", "model mute")]


@pytest.mark.slow
def test_a_reference_recorded_on_vllm_holds_llama_cpp_to_it(ground, command):
    suite = ground.home / "golden-of-vllm.json"
    suite.write_text(json.dumps(factories.golden_body("of-vllm", ("ping", "o", "pong"))))
    digest = command.ok("suite", "push", suite, "--json").json["digest"]
    record = ("--target", TARGET, "--reason", "read by two people", "--wait", "--json")
    bundle = ground.bundle(command, "accepted")
    assert command.ok("suite", "record", suite, "--bundle", bundle, *record).json["outcome"] == "recorded"
    policy = ground.home / "of-vllm.json"
    golden = {"gate": "golden", "suite": digest, "margin_nat": "0.1", "min_prompts": 3}
    policy.write_text(json.dumps(factories.policy_body("of-vllm", gates=[{"gate": "integrity"}, BOOT, golden])))
    command.ok("policy", "push", policy)
    other = replace(ground, policy=str(policy))
    ran, results = other.gates(command, ground.llamacpp)
    assert (ran.status, results["golden"]["verdict"]) == (0, "passed"), results
