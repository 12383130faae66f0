"""`gate run` on every engine that is not installed here, which a script stands for: what passes, and what fails.

Each engine speaks as its sources document; a known-bad one says one thing wrong.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gates import environment
from registry.service import Service
from tests.conftest import settings_for
from tests.support import factories, logs
from tests.support.chain_folder import write_chain_folder
from tests.support.command import Command
from tests.support.engine import chain_engine
from tests.support.folder_bundles import VERSIONS
from tests.support.runners import Bench, bench
from tests.support.scripted_containers import ScriptedContainers
from tests.support.speech import SPEECHES, Speech
from tests.support.spoken import MODULES, PROGRAMS, Spoken, Starters, image_of
from workers.engines.table import DRIVERS

pytestmark = pytest.mark.timeout(180)

BEFORE_BOOT = ("integrity", "static", "placement")
GATES = (*BEFORE_BOOT, "compatibility")
BAD = {
    "sglang": replace(SPEECHES["sglang"], flaw="no_done"),
    "trtllm": replace(SPEECHES["trtllm"], flaw="no_finish"),
    "transformers": replace(SPEECHES["transformers"], flaw="wrong_model"),
    "tgi": replace(
        SPEECHES["tgi"], extras={"/info": {**(SPEECHES["tgi"].extras or {})["/info"], "max_total_tokens": 2048}}
    ),
}
SAYS = {
    "sglang": {"stream-cut"},
    "trtllm": {"boot-no-answer"},
    "transformers": {"boot-wrong-model"},
    "tgi": {"boot-identity-differs", "context-differs"},
    "external": {"malformed-server-error"},
}
"""Engine → what blocks its known-bad."""
AS_IT_IS = {"transformers": {"model", "stream-cut", "status", "usage-unasked"}}
"""Engine → what blocks it as its sources document it: callers of OpenAI's API would not be served."""


@dataclass
class Ground:
    """Runners of images and of processes. `runs` are those that the command line asked for, by engine and goodness."""

    bench: Bench
    servers: dict[tuple[str, bool], Spoken]
    elsewhere: str
    runs: dict[tuple[str, bool], str] = field(default_factory=dict)

    def overlay(self, engine: str, name: str, *, is_good: bool) -> dict[str, Any]:
        """Return what the files of a bundle do not tell."""
        named: dict[str, Any] = {"name": engine, "version": VERSIONS[engine], "arguments": []}
        if engine in PROGRAMS:
            named["image"] = image_of(engine)
        elif engine == "external":
            url = self.servers["external", True].url if is_good else self.elsewhere
            named["arguments"] = ["--endpoint", url]
        features = ["chat", "streaming"] if engine == "tgi" else ["chat", "completions", "streaming"]
        serving = {"served_name": name, "features": features}
        return {"engine": named, "runtime": {"context_tokens": 4096, "max_sequences": 8}, "serving": serving}

    def ask(self, command: Command, engine: str, policy: str, *, is_good: bool) -> str:
        """Register a bundle, ask for its gates, and return the run."""
        # Elsewhere, llama.cpp serves CHAIN under its own name.
        name = "chain" if (engine, is_good) == ("external", False) else name_of(is_good=is_good)
        folder = self.bench.folder / "bundles" / f"{engine}-{name}"
        write_chain_folder(folder, context_length=4096)
        if engine == "tgi":
            into_tokenizer_config(folder)
        told = folder.with_suffix(".json")
        told.write_text(json.dumps(self.overlay(engine, name, is_good=is_good)))
        words = ("-f", told, "--licence", "Apache-2.0", "--name", f"{engine}-{name}", "--json")
        digest = command.ok("bundle", "create", folder, *words).json["digest"]
        if engine == "sglang":
            root = self.bench.folder / "runners" / "processes" / "staged" / digest.removeprefix("sha256:")
            server = self.servers[engine, is_good]
            info = {**(SPEECHES[engine].extras or {})["/server_info"], "model_path": str(root)}
            # The other one is of before that route had its name.
            route = "/server_info" if is_good else "/get_server_info"
            server.script = replace(server.script, extras={route: info})
        # A bad one is bad to talk to: what needs no engine is looked at once.
        chosen = () if is_good else ("--gate", "integrity", "--gate", "compatibility")
        asked = ("gate", "run", digest, "--policy", policy, "--runner-class", "cpu", *chosen, "--json")
        return str(command.ok(*asked).json["id"])


def name_of(*, is_good: bool) -> str:
    return "sound" if is_good else "unsound"


def speech_of(engine: str, *, is_good: bool) -> Speech:
    """Return what an engine says."""
    name = name_of(is_good=is_good)
    answers_as = f"{name}@main" if engine == "transformers" else None
    return replace(SPEECHES[engine] if is_good else BAD[engine], served=name, answers_as=answers_as)


def into_tokenizer_config(folder: Path) -> None:
    """Put the template where the engine reads it."""
    template, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template.read_text()}))
    template.unlink()


@pytest.fixture(scope="module")
def _ground(postgres, tmp_path_factory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("every-engine")
    (place := folder / "images").mkdir()
    containers = ScriptedContainers(place)
    keys = [(engine, is_good) for engine in sorted(SPEECHES) for is_good in (True, False)]
    with ExitStack() as stack:
        # What runners of this process are told of engines holds for all that comes after, but for this.
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(environment, "_places", dict(environment._places))
        patch.setitem(DRIVERS, "external", DRIVERS["external"])
        servers = {
            key: stack.enter_context(Spoken(speech_of(key[0], is_good=key[1])))
            for key in keys
            if key != ("external", False)
        }
        starters = {
            engine: Starters(place, engine, {name_of(is_good=good): servers[engine, good] for good in (True, False)})
            for engine in (*PROGRAMS, *MODULES)
        }
        elsewhere = stack.enter_context(chain_engine(folder / "elsewhere"))
        service = Service.build(settings_for(postgres.url(postgres.create()), folder))
        stack.callback(service.close)
        made = stack.enter_context(bench(service, folder, 30.0))
        stack.callback(containers.end)
        images = {image_of(engine): starters[engine].image() for engine in PROGRAMS}
        containers.set(images=list(images), programs=images)
        made.start("images", launcher="container", container_program=str(containers.path), container_network="bridge")
        engines = {engine: starters[engine].environment(VERSIONS[engine]) for engine in MODULES}
        hosts = f"inner:{servers['external', True].url},inner:{elsewhere.base_url}"
        made.start("processes", engines=engines, external_hosts=hosts)
        yield Ground(made, servers, elsewhere.base_url)


@pytest.fixture
def command(_ground, tmp_path, monkeypatch, capsys) -> Iterator[Command]:
    """A manager's command line; the service's log, in this same process, is silent meanwhile."""
    made = Command(tmp_path, monkeypatch, capsys)
    made.be("manager", _ground.bench.api)
    with logs.silent():
        yield made


@pytest.fixture
def ground(_ground, command) -> Ground:
    """The ground of this module, on which all runs were asked for at once."""
    if _ground.runs:
        return _ground
    gates = [{"gate": "integrity"}, {"gate": "static"}, {"gate": "placement", "activation_bytes": 1_000_000}]
    gates.append({"gate": "compatibility", "boot_seconds": "60", "answer_seconds": "10"})
    place = _ground.bench.folder / "policy.json"
    place.write_text(json.dumps(factories.policy_body("every-engine", gates=gates)))
    policy = command.ok("policy", "push", place, "--json").json["digest"]
    for engine, is_good in _ground.servers.keys() | {("external", False)}:
        _ground.runs[engine, is_good] = _ground.ask(command, engine, policy, is_good=is_good)
    for runner in _ground.bench.agents:
        runner.ring()  # there is no broker here
    return _ground


def blocking(results: dict[str, Any]) -> set[str]:
    """Return the codes of what blocks in any gate."""
    return {one["code"] for told in results.values() for one in told["findings"] if one["severity"] == "block"}


@pytest.mark.parametrize("engine", sorted(SPEECHES))
def test_an_engine_that_speaks_as_documented_passes_what_it_can(ground, command, engine):
    ran = command("gate", "watch", ground.runs[engine, True], "--timeout", "120", "--json")
    results = {one["gate"]: one for one in ran.json["results"]}
    assert sorted(results) == sorted(GATES)
    assert blocking(results) == AS_IT_IS.get(engine, set()), results["compatibility"]["findings"]
    assert (ran.status, ran.json["outcome"]) == ((1, "failed") if engine in AS_IT_IS else (0, "passed"))
    (booted,) = [one.body["engine"] for one in ground.bench.entries(ran.json["id"]) if one.kind == "engine_booted"]
    assert (booted["name"], booted["model_ids"]) == (engine, ["sound"])
    assert (booted.get("basis") == "reported") is (engine == "external")


@pytest.mark.parametrize("engine", sorted(SPEECHES))
def test_an_engine_that_is_known_to_be_bad_fails_for_its_reason(ground, command, engine):
    ran = command("gate", "watch", ground.runs[engine, False], "--timeout", "120", "--json")
    results = {one["gate"]: one for one in ran.json["results"]}
    assert (ran.status, ran.json["outcome"]) == (1, "failed"), ran
    assert {gate for gate, one in results.items() if one["verdict"] != "passed"} == {"compatibility"}
    assert blocking(results) == SAYS[engine], results["compatibility"]["findings"]
    if engine == "sglang":
        (booted,) = [one.body for one in ground.bench.entries(ran.json["id"]) if one.kind == "engine_booted"]
        told = {row["item"]: (row["outcome"], row["found_by"]) for row in booted["compared"] if "found_by" in row}
        assert told["version"] == ("equal", "GET /server_info version")
