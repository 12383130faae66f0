"""How to reach an engine that runs elsewhere: any endpoint that speaks as OpenAI's does.

Nothing is booted but a relay on this machine, `relay`. What answers is known only by what it says of itself. Which
hosts may be spoken to, and with which token, is the operator's to say and never the bundle's.
"""

import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from gates.environment import Environment, NotInstalled
from gates.sources.hosts import Place, external_hosts, read_url
from gates.sources.source import SourceRefused, SourceUnavailable
from schemas.bundle import Bundle
from workers.engines import relay
from workers.engines.arguments import Table
from workers.engines.base import Command, Driver, Launch

NAME = "external"
_ENDPOINT = "--endpoint"
_FAILURES = ((r"relay: error: .*in use", "port_in_use"), (r"relay: error:|relay\.py: error:", "bad_argument"))


def _endpoint(bundle: Bundle) -> Place:
    """Return where a bundle's engine is. Raises SourceRefused."""
    given = Table.load(NAME).given(bundle.engine.arguments)
    return read_url(given[_ENDPOINT].value or "")


def _check_bundle(bundle: Bundle) -> list[str]:
    allowed, engine = Table.load(NAME), bundle.engine
    found = allowed.check(engine.arguments) + allowed.check_variables(engine.variables or {})
    if found:
        return found
    if _ENDPOINT not in allowed.given(engine.arguments):
        return [f"an external engine needs {_ENDPOINT} URL"]
    try:
        place = _endpoint(bundle)
    except SourceRefused as refused:
        return [f"{_ENDPOINT} {refused}"]
    if "?" in place.target:
        found.append(f"{_ENDPOINT} {place.bare} has a query")
    named = {"adapters": bundle.adapters, "draft": bundle.draft, "engine.remote_code": engine.remote_code}
    return found + [
        f"what an external engine loads is not said here: leave {name} out" for name in named if named[name]
    ]


@dataclass(frozen=True)
class Admission:
    """What a runner's operator lets bundles reach. `hosts` as in the setting; `tokens` a folder with a file a host."""

    hosts: str = ""
    tokens: Path | None = None

    def problems(self, bundle: Bundle) -> list[str]:
        """Return why a bundle's endpoint is not spoken to; nothing when it is."""
        try:
            place = _endpoint(bundle)
            allowed = external_hosts(self.hosts)
            allowed.check(place.bare)
            allowed.addresses(place.host, place.port)
        except (SourceRefused, SourceUnavailable) as refused:
            return [str(refused)]
        token = self.token_file(place)
        if token is not None and stat.S_IMODE(token.stat().st_mode) & 0o077:
            return [f"the token for {place.host} can be read by others than this runner"]
        return []

    def token_file(self, place: Place) -> Path | None:
        """Return the file with the token for a host; None when it wants none."""
        names = (f"{place.host}:{place.port}", place.host)
        found = [self.tokens / name for name in names if (self.tokens / name).is_file()] if self.tokens else []
        return found[0] if found else None

    def identity(self) -> Environment:
        """Return an identity without a digest. Raises NotInstalled when no host is allowed."""
        if not self.hosts:
            raise NotInstalled("no host of an external engine is allowed here")
        return Environment("", "", (), 0)

    def command(self, bundle: Bundle, launch: Launch) -> Command:
        """Return the relay's command line."""
        place = _endpoint(bundle)
        words = ["--endpoint", place.bare, "--host", launch.host, "--port", str(launch.port)]
        words += ["--port-file", str(launch.port_file), "--drain-seconds", f"{launch.drain_seconds:g}"]
        words += ["--allow", self.hosts]
        if (token := self.token_file(place)) is not None:
            words += ["--token-file", str(token)]
        if launch.parent_pid is not None:
            words += ["--die-with-parent", str(launch.parent_pid)]
        return Command(
            argv=(sys.executable, "-I", str(Path(relay.__file__).resolve()), *words),
            port_file=launch.port_file,
        )


def driver(admission: Admission) -> Driver:
    """Return the driver of external engines as an operator allows them."""
    return Driver(
        name=NAME,
        command=admission.command,
        check_arguments=Table.load(NAME).check,
        check_bundle=_check_bundle,
        identity=admission.identity,
        failure_patterns=_FAILURES,
        admits=admission.problems,
    )


EXTERNAL = driver(Admission())
"""Allows no host: what the agent puts in its place allows those of its settings."""
