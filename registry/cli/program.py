"""The whole command line, put together."""

import re
import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated

import typer
from typer.core import TyperGroup

from registry.cli import (
    aliases,
    blobs,
    bundles,
    evidence,
    local,
    policies,
    profile,
    projects,
    releases,
    runners,
    runs,
    suites,
    targets,
    tokens,
)
from registry.cli.ending import ended
from registry.cli.options import examples, group, name_values
from schemas import VERSION
from schemas.problems import NotFound, Problem, Unauthenticated, Unavailable

PROGRAM = "sluicegate"

app = group("A registry of immutable serving bundles and a release gate for LLM serving.", completes=True)
for name, command, short in (
    ("up", local.up, "Start everything on this machine."),
    ("demo", local.demo, "Show four releases of a real model."),
):
    app.command(name, context_settings=local.PASSED_ON, short_help=short)(command)
app.command("login", epilog=local.LOGIN_EXAMPLES, short_help="Keep a service and a token.")(local.login)
for name, commands, short in (
    ("bundle", bundles.app, "What is served, named by one digest."),
    ("alias", aliases.app, "Movable names of bundles, such as @champion."),
    ("blob", blobs.app, "Stored bytes, and what of them nothing needs."),
    ("policy", policies.app, "Which gates must pass, how traffic moves, who approves."),
    ("suite", suites.app, "Prompts and arrival plans that gates run."),
    ("target", targets.app, "Served names, such as chat@prod."),
    ("release", releases.app, "Attempts to take a bundle live on a target."),
    ("gate", runs.app, "Measurements with a rule, also without a release."),
    ("evidence", evidence.app, "The signed log of what happened."),
    ("runner", runners.app, "The machines that run models."),
    ("token", tokens.app, "Who may call, as what."),
    ("project", projects.app, "Who owns what, and how much of it there may be."),
):
    app.add_typer(commands, name=name, short_help=short)


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
    """Return the command line as it is parsed: putting it together takes longer than most commands."""
    found = typer.main.get_command(app)
    if not isinstance(found, TyperGroup):
        raise TypeError("several commands are a group")
    name_values(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Never raises, never shows a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return ended(command_line, arguments, PROGRAM, as_json="--json" in arguments, advise=_advice)


def _advice(problem: Problem, arguments: Sequence[str]) -> str | None:
    """Return what a person may look at who cannot reach a service, is not let in, or names what is not there."""
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
