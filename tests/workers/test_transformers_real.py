"""transformers serve for real, where `make engine-transformers` has built its environment; `make test-all` does."""

import asyncio
import json
import subprocess

import pytest

from gates import catalog
from gates.answers import Outcome
from gates.dialects.base import Malformed
from gates.dialects.table import dialect_of
from gates.endpoint import Endpoint, EndpointError
from gates.environment import EnvironmentAltered, NotInstalled, engine_environment, engine_prefix
from gates.gate import GateContext
from gates.static.flexible import check_words
from gates.static.spellings import spellings
from schemas.policy import CompatibilityRule
from schemas.result import Severity, Verdict
from tests.support.chain_folder import describe_folder, write_chain_folder
from workers.engines.base import Launch
from workers.engines.transformers import TRANSFORMERS
from workers.launchers.base import Order
from workers.launchers.process import ProcessLauncher
from workers.serving import Replica

MESSAGES = [{"role": "user", "content": "ping"}]


def compatible(bundle, replica):
    """Return what the gate says of it."""
    context = GateContext(
        bundle=bundle,
        root=replica.workdir,
        rule=CompatibilityRule(gate="compatibility", boot_seconds="300", answer_seconds="20"),
        endpoint=Endpoint(replica.base_url, "chain", dialect_of(bundle.engine)),
        process_id=replica.process_id,
        ready_ms=1,
    )
    return catalog.run("compatibility", context)[0]


def identity():
    try:
        return engine_environment("transformers", is_certain=False)
    except (NotInstalled, EnvironmentAltered) as error:
        return str(error)


@pytest.mark.timeout(300)
async def test_transformers_serve_answers_as_its_dialect_says_and_fails_compatibility(tmp_path):
    found = identity()
    if isinstance(found, str):
        pytest.skip(found)
    write_chain_folder(tmp_path / "bundle")
    engine = {"name": "transformers", "version": found.version, "arguments": ["--device", "cpu"]}
    engine |= {"environment": found.digest, "variables": {"OMP_NUM_THREADS": "1"}}
    runtime = {"context_tokens": 512, "max_sequences": 1}
    bundle = describe_folder(tmp_path / "bundle", environment=found.digest, engine=engine, runtime=runtime)
    assert TRANSFORMERS.check_bundle(bundle) == []
    launcher, run = ProcessLauncher(), tmp_path / "run"
    launch = launcher.place(Order(bundle, tmp_path / "bundle"), run, drain_seconds=5, parent_pid=None)
    assert isinstance(launch, Launch)
    replica = Replica(bundle, launch, workdir=run, launcher=launcher)
    try:
        replica.start()
        assert replica.wait_ready(110).identity.model_ids == ["chain"]
        async with Endpoint(replica.base_url, "chain", dialect_of(bundle.engine)) as endpoint:
            for stream in (False, True):
                said = await endpoint.chat(MESSAGES, max_tokens=8, stream=stream)
                assert (said.outcome, said.text, said.finish_reason) == (Outcome.OK, "Hi", "stop")
                assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (23, 3)
            refused = await endpoint.chat(MESSAGES, max_tokens=8, extra={"bogus": 1})
            assert refused.outcome is Outcome.HTTP_4XX
            assert "Unexpected fields in the request" in refused.detail
            assert (await endpoint.chat(MESSAGES, max_tokens=1)).finish_reason == "length"
            with pytest.raises((EndpointError, Malformed)):
                await endpoint.metrics()
        result = await asyncio.to_thread(compatible, bundle, replica)
        blocking = {one.code for one in result.findings if one.severity is Severity.BLOCK}
        assert result.verdict is Verdict.FAILED
        # "chain@main" answers, streams have no [DONE], and what is malformed is called a server error.
        assert {"model", "stream-cut", "malformed-server-error"} <= blocking
        assert not blocking & {"engine-died", "sentinel-differs", "malformed-hang", "unhealthy-after"}
    finally:
        replica.stop(grace_seconds=10)


READ = """
import json, sys
from transformers.cli.transformers import app
command, taken = app.commands["serve"], []
options = {}
for one in command.params:
    if one.param_type_name == "option":
        options[one.opts[0]] = [sorted({*one.opts[1:], *one.secondary_opts}), one.is_flag, str(one.type)]
for line in json.loads(sys.argv[1]):
    try:
        command.make_context("serve", list(line))
        taken.append(True)
    except Exception:
        taken.append(False)
print(json.dumps([options, taken]))
"""
LINES = [
    "m --compile --no-compile --port 80 --reasoning on --cb-max-memory-percent 0.5",
    "--device -1 --default-seed -3",
    "m --device --compile",
    "--port --compile",
    "--port 8_0",
    "--port=",
    "--reasoning ON",
    "--comp",
    "--cb_block_size 8",
    "--compile=1",
    "--device",
    "--no-port",
    "--nonsense 1",
    "--cb-use-cuda-graph --no-cb-use-cuda-graph",
    "-x",
]


def test_the_table_of_its_arguments_is_what_its_own_command_line_takes():
    found = identity()
    if isinstance(found, str):
        pytest.skip(found)
    lines = [line.split() for line in LINES]
    python = engine_prefix("transformers") / "bin" / "python"
    done = subprocess.run([python, "-c", READ, json.dumps(lines)], capture_output=True, check=True, timeout=120)
    options, taken = json.loads(done.stdout.decode().splitlines()[-1])
    there = spellings("transformers", found.version)
    kinds = {"INT": {"integer"}, "FLOAT": {"number"}, "STRING": {"text", "lowered", "object"}}
    for name, (others, is_flag, kind) in options.items():
        argument = there.arguments[name]
        mine = sorted(one for one, owner in there.names.items() if owner == name and one != name)
        assert (mine, argument["takes"] == "switch") == (others, is_flag), name
        assert is_flag or argument["type"] in kinds.get(kind, {"text"}), name
    assert set(there.arguments) - set(options) == {"--help"}
    blocked = [
        [one for one in check_words("transformers", line, found.version) if one.severity == "block"] for line in lines
    ]
    assert [not one for one in blocked] == taken
