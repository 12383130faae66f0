"""Runs `sluicegate` commands in this process, as a person or a pipeline would, and reads what they say."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from registry.cli import main
from tests.support.api import Api


class Ran(NamedTuple):
    """What a command did: its exit status, standard output and standard error."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON value."""
        return json.loads(self.out)


class Command:
    """The command line of one person, who has a home of their own and perhaps a service and a token."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """Give the person an empty home."""
        self.home = home
        self._monkeypatch, self._capsys = monkeypatch, capsys
        for variable in ("SLUICEGATE_URL", "SLUICEGATE_TOKEN"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))

    def use(self, url: str, token: str | None) -> None:
        """Let the environment name a service, and a token."""
        self._monkeypatch.setenv("SLUICEGATE_URL", url)
        if token is None:
            self._monkeypatch.delenv("SLUICEGATE_TOKEN", raising=False)
        else:
            self._monkeypatch.setenv("SLUICEGATE_TOKEN", token)

    def be(self, role: str, api: Api) -> None:
        """Use a running service as the holder of a role's token."""
        self.use(api.url, api.tokens[role])  # type: ignore[index]  # a role by its name

    def __call__(self, *arguments: object) -> Ran:
        """Run one command."""
        self._capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        out, err = self._capsys.readouterr()
        return Ran(status, out, err)

    def ok(self, *arguments: object) -> Ran:
        """Run one command that must succeed."""
        ran = self(*arguments)
        assert ran.status == 0, ran
        return ran
