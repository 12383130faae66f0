"""What people do in the demonstration, by the command line: each act is a `sluicegate` process of its own."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.demo.stack import python_environment

ACT_SECONDS: Final = 300.0


class ActFailed(Exception):
    """A command did not end as it should. The text holds the command and what it said."""


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody with a token and a command line.

    Args:
        name: as evidence shows it.
        url: of the service.
        token: bearer token.
        workdir: where they type.
        home: where the command line keeps what it remembers.
        told: called with the name and the command, as a person would type it.
    """

    name: str
    url: str
    token: str
    workdir: Path
    home: Path
    told: Callable[[str, str], None]

    def act(self, *words: str, statuses: frozenset[int] = frozenset({0})) -> dict[str, Any]:
        """Run one command and return what it answers.

        Raises:
            ActFailed: it ended with none of these statuses, or answered no JSON object.
        """
        self.told(self.name, f"sluicegate {shlex.join(words)}")
        variables = {
            "SLUICEGATE_URL": self.url,
            "SLUICEGATE_TOKEN": self.token,
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
        }
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "registry.cli", *words, "--json"],
                env=python_environment() | variables,
                cwd=self.workdir,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=ACT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ActFailed(f"`sluicegate {shlex.join(words)}` did not end in {ACT_SECONDS:g} s") from error
        said = done.stdout.decode("utf-8", "replace")
        try:
            answer = json.loads(said)
        except ValueError:
            answer = None
        if done.returncode not in statuses or not isinstance(answer, dict):
            why = answer.get("detail") if isinstance(answer, dict) else None
            errors = done.stderr.decode("utf-8", "replace").strip()
            text = f"`sluicegate {shlex.join(words)}` ended with {done.returncode}: {why or errors or said}"
            raise ActFailed(text)
        return answer
