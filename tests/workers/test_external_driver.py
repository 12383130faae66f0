import re
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from gates.answers import Outcome
from gates.dialects.table import dialect_of
from gates.endpoint import Endpoint
from gates.environment import NotInstalled
from registry.settings import RunnerSettings
from schemas.runner import ReplicaState
from tests.support.folder_bundles import DIGEST, bundle
from tests.support.scripted_http import ScriptedHttp
from tests.support.speech import flawed
from workers.boot import EngineMismatch, require_engine
from workers.engines import external
from workers.engines.base import Launch
from workers.engines.external import EXTERNAL, Admission
from workers.engines.table import DRIVERS
from workers.launchers.process import ProcessLauncher
from workers.serving import Replica

LAUNCH = Launch(root=Path("/staged"), port_file=Path("/run/port.json"), drain_seconds=5, parent_pid=77)
MESSAGES = [{"role": "user", "content": "ping"}]


def at(url, *more, **sections):
    return bundle("external", engine={"arguments": ["--endpoint", url, *more]}, **sections)


def problems(url, *more, **sections):
    return " | ".join(EXTERNAL.check_bundle(at(url, *more, **sections)))


def test_the_command_line_is_the_relays_with_the_token_by_reference(tmp_path):
    (tmp_path / "models.example").write_text("secret")
    driver = external.driver(Admission("models.example", tmp_path))
    command = driver.command(at("https://models.example/api/v1"), LAUNCH)
    assert command.argv[:2] == (sys.executable, "-I")
    assert command.argv[2].endswith("workers/engines/relay.py")
    assert " ".join(command.argv[3:]) == (
        "--endpoint https://models.example/api/v1 --host 127.0.0.1 --port 0 --port-file /run/port.json"
        f" --drain-seconds 5 --allow models.example --token-file {tmp_path}/models.example --die-with-parent 77"
    )
    assert "secret" not in repr(command)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "an external engine needs --endpoint URL"),
        (["--endpoint"], "--endpoint needs a value"),
        (["--endpoint", "ftp://models.example"], "--endpoint cannot be 'ftp://models.example'"),
        (["--endpoint", "https://user:pw@models.example"], "has a user name or password in it"),
        (["--endpoint", "https://models.example/?key=1"], "has a query"),
        (["--endpoint", "https://models.example", "--token", "s"], "--token is a secret"),
        (["--endpoint", "https://models.example", "--allow-host", "x"], "--allow-host is the operator's to say"),
        (["--endpoint", "https://a.example", "--endpoint", "https://b.example"], "--endpoint is given twice"),
        (["--bogus"], "unknown argument --bogus"),
    ],
)
def test_a_bundle_says_where_and_nothing_else(arguments, says):
    assert says in " | ".join(EXTERNAL.check_bundle(bundle("external", engine={"arguments": arguments})))


def test_what_runs_elsewhere_loads_nothing_of_the_bundles():
    draft = {"method": "ngram", "tokens": 2}
    assert "leave draft out" in problems("https://models.example", draft=draft)


@pytest.mark.parametrize(
    ("hosts", "url", "says"),
    [
        ("", "https://models.example", "no host that may be spoken to"),
        ("other.example", "https://models.example", "no host that may be spoken to"),
        ("models.example", "http://models.example", "carries bytes that anyone could change"),
        ("models.example", "https://models.example:8443", "no host that may be spoken to"),
        ("127.0.0.1", "https://127.0.0.1", "leads to 127.0.0.1"),
        ("10.0.0.1", "https://10.0.0.1", "leads to 10.0.0.1"),
        ("inner:169.254.169.254", "https://169.254.169.254", "own metadata and credentials"),
        ("inner:http://127.0.0.1:1", "http://127.0.0.1:2", "carries bytes that anyone could change"),
    ],
)
def test_only_what_the_operator_allows_is_spoken_to(hosts, url, says):
    assert says in " | ".join(Admission(hosts).problems(at(url)))


def test_an_address_inside_a_network_takes_the_operators_word():
    assert Admission("inner:10.0.0.1:8443").problems(at("https://10.0.0.1:8443/v1")) == []


def test_a_token_that_others_can_read_is_not_used(tmp_path):
    (tmp_path / "10.0.0.1").write_text("secret")
    (tmp_path / "10.0.0.1").chmod(0o644)
    refused = Admission("inner:10.0.0.1", tmp_path).problems(at("https://10.0.0.1"))
    assert refused == ["the token for 10.0.0.1 can be read by others than this runner"]


@pytest.mark.parametrize("told", ["models.example:8443", "https://models.example", "inner:"])
def test_a_setting_that_names_no_host_is_refused_at_the_start(told, tmp_path):
    with pytest.raises(ValidationError, match="external_hosts"):
        RunnerSettings(
            name="r",
            runner_class="cpu",
            api_url="http://127.0.0.1:1",
            token="t",
            broker_url="redis://127.0.0.1:1",
            data_dir=tmp_path,
            external_hosts=told,
        )


def test_a_runner_without_a_host_has_no_external_engine_and_says_so():
    with pytest.raises(NotInstalled):
        EXTERNAL.identity()
    with pytest.raises(EngineMismatch, match=r"does not speak to that endpoint: .*models\.example"):
        require_engine(at("https://models.example"), ProcessLauncher())


@pytest.mark.parametrize("named", [{"image": f"registry.example/x@{DIGEST}"}, {"environment": DIGEST}])
def test_neither_image_nor_environment_names_what_runs_elsewhere(named):
    with pytest.raises(ValidationError, match="neither image nor environment"):
        bundle("external", engine=named)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A replica whose engine is a scripted server, spoken to by a real relay with a token."""
    with ScriptedHttp(flawed("external", "")) as server:
        place = server.url.removeprefix("http://")
        tokens = tmp_path / "tokens"
        tokens.mkdir()
        (tokens / place).write_text("secret\n")
        (tokens / place).chmod(0o600)
        monkeypatch.setitem(DRIVERS, "external", external.driver(Admission(f"inner:{server.url}", tokens)))
        launch = Launch(root=tmp_path, port_file=tmp_path / "run" / "port.json", drain_seconds=5)
        replica = Replica(at(f"{server.url}/v1"), launch, workdir=tmp_path / "run", launcher=ProcessLauncher())
        try:
            yield replica, server
        finally:
            replica.stop(grace_seconds=0)


async def test_a_replica_elsewhere_is_ready_by_a_real_answer_and_known_by_its_word(elsewhere):
    replica, server = elsewhere
    replica.start()
    identity = replica.wait_ready(30).identity
    assert (identity.basis, identity.environment, identity.model_ids) == ("reported", None, ["chain"])
    assert "secret" not in replica.log_path.read_text() + repr(identity)
    assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer secret"}
    async with Endpoint(replica.base_url, "chain", dialect_of(replica.bundle.engine)) as endpoint:
        assert (await endpoint.chat(MESSAGES, max_tokens=8)).text == "Hi"
        assert await endpoint.facts() == {"endpoint": f"{server.url}/v1", "server": "unnamed"}
        asked = len(server.asked)
        for path in ("/metrics", "/v1/files", "/v1/models/chain", "/v1/../models", "/v1/completions"):
            assert (await endpoint.get(path)).status == 404
        assert len(server.asked) == asked
        assert {asked.headers["accept-encoding"] for asked in server.asked} == {"identity"}
        for flaw, outcome in {
            "cut": Outcome.TRUNCATED,
            "error_event": Outcome.ERROR_EVENT,
            "server_error": Outcome.HTTP_5XX,
        }.items():
            server.script = flawed("external", flaw)
            assert (await endpoint.chat(MESSAGES, max_tokens=8)).outcome is outcome
        server.script = lambda _asked: (
            b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"
        )
        assert (await endpoint.get("/v1/models")).status == 302
        server.script = lambda _asked: None
        said = await endpoint.chat(MESSAGES, max_tokens=8, stream=False)
        assert said.outcome is Outcome.HTTP_5XX
        assert re.match(r"502: the endpoint does not answer", said.detail)
    assert replica.stop().code == 0
    assert replica.state is ReplicaState.STOPPED
