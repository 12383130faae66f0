"""The whole command line, put together."""

import re
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from registry.cli.ending import ended
from registry.cli.options import WholeGroup, examples, group, name_values
from schemas import VERSION
from schemas.problems import NotFound, Problem, Unauthenticated, Unavailable

PROGRAM = "sluicegate"

COMMANDS = {
    "up": ("local", "Start everything on this machine."),
    "demo": ("local", "Show four releases of a real model."),
    "login": ("local", "Keep a service and a token."),
    "bundle": ("bundles", "What is served, named by one digest."),
    "alias": ("aliases", "Movable names of bundles, such as @champion."),
    "blob": ("blobs", "Stored bytes, and what of them nothing needs."),
    "policy": ("policies", "Which gates must pass, how traffic moves, who approves."),
    "suite": ("suites", "Prompts and arrival plans that gates run."),
    "target": ("targets", "Served names, such as chat@prod."),
    "release": ("releases", "Attempts to take a bundle live on a target."),
    "gate": ("runs", "Measurements with a rule, also without a release."),
    "evidence": ("evidence", "The signed log of what happened."),
    "runner": ("runners", "The machines that run models."),
    "token": ("tokens", "Who may call, as what."),
    "project": ("projects", "Who owns what, and how much of it there may be."),
}
"""Name of each command → the module of `registry.cli` that has it, and what help says of it."""

Command = TyperCommand | TyperGroup


class _Commands(MutableMapping[str, Command]):
    """COMMANDS, each made when it is looked up: a command loads what it needs itself, and help and version nothing."""

    def __init__(self) -> None:
        self._made: dict[str, Command] = {}

    def __getitem__(self, name: str) -> Command:
        if name not in self._made:
            self._made[name] = _made(name)
        return self._made[name]

    def __setitem__(self, name: str, command: Command) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS


def _made(name: str) -> Command:
    module, short = COMMANDS[name]
    found = typer.main.get_command(import_module(f"registry.cli.{module}").app)
    # One module may hold several commands that are no group.
    found = getattr(found, "commands", {}).get(name, found)
    if not isinstance(found, TyperCommand | TyperGroup):
        raise TypeError(f"{name} is no command")
    found.name, found.short_help = name, short
    name_values(found)
    return found


class _Program(WholeGroup):
    """The whole command line."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: MutableMapping[str, Any] = _Commands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the library's own form
        """Write the commands and what they do, without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, (_, short) in COMMANDS.items()])


app = group("A registry of immutable serving bundles and a release gate for LLM serving.", cls=_Program)


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"{PROGRAM} {VERSION}\n")
        raise typer.Exit


@app.callback(
    epilog=examples(
        "sluicegate up",
        "sluicegate login http://127.0.0.1:8080 --token slg_…",
        "sluicegate bundle create ./gemma --name gemma-270m",
        "sluicegate release create --target chat@prod --bundle 3c3aff2a --policy 9c1d77aa --wait",
    )
)
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version and exit.")
    ] = False,
) -> None:
    """A registry of immutable serving bundles and a release gate for LLM serving."""


@cache
def command_line() -> TyperGroup:
    """Return the command line as it is parsed."""
    found = typer.main.get_command(app)
    if not isinstance(found, TyperGroup):
        raise TypeError("several commands are a group")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Never raises, never shows a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return ended(command_line, arguments, PROGRAM, as_json="--json" in arguments, advise=_advice)


def _advice(problem: Problem, arguments: Sequence[str]) -> str | None:
    """Return what a person may look at who cannot reach a service, is not let in, or names what is not there."""
    # Here, since it brings in the client.
    from registry.cli import profile

    is_login = next(iter(arguments), "") == "login"
    if isinstance(problem, Unavailable) and "cannot be reached" in problem.detail:
        return f"`sluicegate up` starts a service on this machine; {profile.URL_VARIABLE} names another one"
    if isinstance(problem, Unauthenticated) and "request_id" in problem.members and not is_login:
        return f"the token is {profile.token_origin()}; `sluicegate login URL --token T` keeps another one"
    absent = re.search(r"\bno (\w+) ", problem.detail) if isinstance(problem, NotFound) else None
    if absent is None or "`" in problem.detail:
        return None
    # The refusal does not say what to do about what is not there.
    listed = "list" in getattr(command_line().commands.get(absent[1]), "commands", {})
    whom = ", to administrators" if absent[1] == "project" else ""
    return f"`{PROGRAM} {absent[1]} list` shows all of them{whom}" if listed else None
