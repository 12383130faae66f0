import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry import verification
from registry.client import Client
from registry.service import Service
from registry.settings import Gateway
from schemas.api import RoleName
from tests.support import logs
from tests.support.api import Api
from tests.support.command import Command
from tests.support.scene import Scene


@pytest.fixture
def stack(service: Service, tmp_path: Path) -> Iterator[Api]:
    """The HTTP interface of a service that drives one gateway, `local`, in front of which nothing runs."""
    gateways = {"local": Gateway(directory=tmp_path / "gateway", url="http://127.0.0.1:1")}
    settings = service.settings.model_copy(update={"gateways": gateways})
    with Api(Service(settings, service.database, service.signer, service.blobs)) as running:
        yield running


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """The command line, with nothing configured. The service's log, in this same process, is silent meanwhile."""
    home = tmp_path / "home"
    home.mkdir()
    with logs.silent():
        yield Command(home, monkeypatch, capsys)


@pytest.fixture
def scene(stack: Api, command: Command) -> Iterator[Scene]:
    """A bundle, a policy, a target's runner and a manager at the command line, over `stack`."""
    made = Scene(stack, command)
    yield made
    made.runner.close()


@pytest.fixture
def clients(api: Api) -> Iterator[dict[RoleName, Client]]:
    """A client of each role."""
    with contextlib.ExitStack() as opened:
        yield {role: opened.enter_context(Client(api.url, token)) for role, token in api.tokens.items()}


@pytest.fixture
def sound(api: Api) -> Iterator[None]:
    """At the end, everything in the log is as it was signed, and what is kept beside it is what it says."""
    yield
    with api.service.database.transaction() as session:
        told = verification.verify(session, api.project_id)
    assert told.verified, told.faults
