"""`sluicegate project`: make one, see what it holds, say how much it may."""

import itertools
import math
import re
from decimal import Decimal
from typing import Annotated

import typer

from registry.cli.failures import Exit, made
from registry.cli.options import Json, Limit, examples, group
from registry.cli.output import Output, size
from registry.cli.profile import connect
from schemas.api import LimitsSet, ProjectCreate, ProjectUsage
from schemas.problems import Usage

app = group("Projects: who owns what, and how much of it there may be.")

_SIZE = re.compile(r"([0-9]{1,16})(B|kB|MB|GB|TB)?")
_UNITS = {None: 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@app.command(epilog=examples("sluicegate project create team-b"))
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the project.")], as_json: Json = False
) -> int:
    """Make a project. Its first token is made with `token create --project`."""
    output = Output(as_json=as_json)
    with connect() as client:
        new = client.projects.create(made(ProjectCreate, "the project", name=name))
    output.result(new, lambda out: out.say(f"created: {new.name}", "good"))
    return Exit.DONE


@app.command("list", epilog=examples("sluicegate project list", "sluicegate project list --json"))
def list_(limit: Limit = 50, as_json: Json = False) -> int:
    """List the projects that you administer."""
    output = Output(as_json=as_json)
    with connect() as client:
        found = list(itertools.islice(client.projects.list(), limit))
    output.result(
        {"items": found},
        lambda out: out.table(
            ["NAME", "CREATED"], ([one.name, f"{one.created_at:%Y-%m-%d %H:%M:%S}Z"] for one in found)
        ),
    )
    return Exit.DONE


@app.command(epilog=examples("sluicegate project show", "sluicegate project show team-b --json"))
def show(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Project; your own when absent.")] = None,
    as_json: Json = False,
) -> int:
    """Show what a project holds, and how much it may."""
    output = Output(as_json=as_json)
    with connect() as client:
        whose = name or client.me().project
        found = client.projects.get(whose)
    output.result(found, lambda out: _show(out, whose, found))
    return Exit.DONE


@app.command(
    epilog=examples(
        "sluicegate project limit team-b --bytes 500GB --documents 10000",
        "sluicegate project limit team-b --jobs 4 --runner-hours 12",
    )
)
def limit(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Project.")],
    bytes_: Annotated[
        str | None,
        typer.Option("--bytes", help="Bytes of blobs, such as 500GB; 0 for any, `default` for the settings'."),
    ] = None,
    uploads: Annotated[
        str | None, typer.Option("--uploads", help="Uploads in pieces under way at once; alike.")
    ] = None,
    documents: Annotated[str | None, typer.Option("--documents", help="Documents; alike.")] = None,
    jobs: Annotated[
        str | None, typer.Option("--jobs", help="Jobs that runners hold at once; 0 or `default` for any.")
    ] = None,
    hours: Annotated[
        str | None,
        typer.Option("--runner-hours", help="Hours of runners for gates and recordings within 24 hours; alike."),
    ] = None,
    if_match: Annotated[
        str | None,
        typer.Option(
            "--if-match", help="Generation that `project show` gave: nothing is done when it has changed since."
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Say how much a project may hold and have runners do.

    What is not named stays as it is; for administrators of the installation.
    """
    output = Output(as_json=as_json)
    if {bytes_, uploads, documents, jobs, hours} == {None}:
        raise Usage("name at least one of --bytes, --uploads, --documents, --jobs and --runner-hours")
    numbers = {"bytes": bytes_, "uploads": uploads, "documents": documents, "jobs": jobs}
    named = {limit: _number(said, f"--{limit}") for limit, said in numbers.items() if said is not None}
    if hours is not None:
        named["runner_seconds"] = _seconds(hours)
    # Only what is named is sent: somebody else may be setting another limit just now.
    body = made(LimitsSet, "the limits", **named)
    with connect() as client:
        found = client.projects.set_limits(name, body, if_match=if_match)
    output.result(found, lambda out: _show(out, name, found))
    return Exit.DONE


def _number(said: str, option: str) -> int | None:
    if said == "default":
        return None
    match = _SIZE.fullmatch(said)
    if match is None or (match[2] and option != "--bytes"):
        raise Usage(f"{option} {said!r} is no number" + (" of bytes, such as 500GB" if option == "--bytes" else ""))
    return int(match[1]) * _UNITS[match[2]]


def _seconds(hours: str) -> int | None:
    if hours == "default":
        return None
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,3})?", hours) is None:
        raise Usage(f"--runner-hours {hours!r} is no number of hours, such as 12 or 1.5")
    return math.ceil(Decimal(hours) * 3600)


def _show(out: Output, name: str, found: ProjectUsage) -> None:
    out.say(f"project {name}")
    coming = f" and {size(found.bytes_coming)} coming" if found.bytes_coming else ""
    held, own = found.limits, found.own_limits
    out.table(
        ["RESOURCE", "USED", "LIMIT", "SET BY"],
        [
            ["bytes", size(found.bytes) + coming, size(held.bytes) if held.bytes else "any", _by(own.bytes)],
            ["uploads", f"{found.uploads:,}", _most(held.uploads), _by(own.uploads)],
            ["documents", f"{found.documents:,}", _most(held.documents), _by(own.documents)],
            ["jobs at once", f"{found.jobs:,}", _most(held.jobs), _by(own.jobs, "nobody")],
            [
                "runner hours a day",
                f"{found.runner_seconds / 3600:,.1f}",
                f"{held.runner_seconds / 3600:,.1f}" if held.runner_seconds else "any",
                _by(own.runner_seconds, "nobody"),
            ],
        ],
    )
    out.say(f"generation {found.generation}")


def _most(limit: int | None) -> str:
    return f"{limit:,}" if limit else "any"


def _by(own: int | None, otherwise: str = "settings") -> str:
    return otherwise if own is None else "administrator"
