"""transformers serve for real, where `make engine-transformers` has built its environment; `make test-all` does."""

import asyncio

import pytest

from gates import catalog
from gates.answers import Outcome
from gates.dialects.base import Malformed
from gates.dialects.table import dialect_of
from gates.endpoint import Endpoint, EndpointError
from gates.environment import EnvironmentAltered, NotInstalled, engine_environment
from gates.gate import GateContext
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
