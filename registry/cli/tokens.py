"""`sluicegate token`: who may call, and as what."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, get_args
from uuid import UUID

import typer
from pydantic import ValidationError

from registry.cli.documents import is_beginning, resolve_id
from registry.cli.failures import Exit, invalid_act, made
from registry.cli.options import Json, Limit, Reason, examples, finite, group
from registry.cli.output import Output
from registry.cli.profile import connect
from registry.client import Client
from schemas.api import RoleName, Token, TokenCreate
from schemas.problems import NotFound, Usage

app = group("Tokens: who may call, as what, on which targets, and how long.")

LEAST_DAYS, MOST_DAYS = 0.001, 36_525.0
"""How long a token may count: from a minute and a half to a hundred years."""

Project = Annotated[str | None, typer.Option("--project", help="Project; your own when left out.")]


@app.command(
    epilog=examples(
        "sluicegate token create maria --role manager",
        "sluicegate token create pipeline --role ci --target chat@staging --days 90",
    )
)
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is: shown as actor in evidence.")],
    role: Annotated[str, typer.Option("--role", help=f"One of {', '.join(get_args(RoleName))}.")],
    target: Annotated[
        list[str] | None, typer.Option("--target", "-t", help="Only this NAME@ENVIRONMENT; repeatable.")
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(
            "--days",
            min=LEAST_DAYS,
            max=MOST_DAYS,
            callback=finite,
            help="Days until it ends, parts of one too; never when left out.",
        ),
    ] = None,
    project: Project = None,
    as_json: Json = False,
) -> int:
    """Make a token. Its secret is printed once and kept nowhere."""
    output = Output(as_json=as_json)
    ends = None if days is None else datetime.now(UTC) + timedelta(days=days)
    written = {"name": name, "role": role, "expires_at": ends, "project": project, "targets": target or None}
    with connect() as client:
        token = client.tokens.create(made(TokenCreate, "the token", **written))
        absent = _absent(client, token.targets or []) if project is None else []
    output.result(token, lambda out: out.say(token.secret))
    if not as_json:
        output.note(f"a token of {token.name} as {token.role}, {token.id}; it is not shown again")
    if absent:
        output.note(f"there is no target {', '.join(absent)} yet: `sluicegate target list` shows all of them", "warn")
    return Exit.DONE


def _absent(client: Client, names: list[str]) -> list[str]:
    """Return which targets of a new token are not there: they may be made later, and may be misspelt."""
    found = []
    for name in names:
        try:
            client.targets.get(name)
        except NotFound:
            found.append(name)
    return found


@app.command("list", epilog=examples("sluicegate token list", "sluicegate token list --valid --json"))
def list_(
    valid: Annotated[bool, typer.Option("--valid", help="Only those that count now.")] = False,
    project: Project = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> int:
    """List tokens, newest first, without their secrets."""
    output = Output(as_json=as_json)
    with connect() as client:
        everyone = (token for token in client.tokens.list(project) if token.is_valid or not valid)
        found = output.most(everyone, limit)

    def human(out: Output) -> None:
        out.table(
            ["TOKEN", "NAME", "ROLE", "TARGETS", "CREATED", "MADE BY", "STATE"],
            (
                [
                    one.id,
                    one.name,
                    one.role,
                    ", ".join(one.targets or ["all"]),
                    _day(one.created_at),
                    one.made_by,
                    _state(one),
                ]
                for one in found
            ),
            spare=("CREATED", "MADE BY"),
        )

    output.result({"items": found}, human)
    return Exit.DONE


@app.command(
    epilog=examples(
        'sluicegate token revoke maria --reason "has left the team"',
        'sluicegate token revoke 01a2289b-8894-74d9-8d4f-da769c0550b2 --reason "was in a log"',
    )
)
def revoke(
    token: Annotated[
        str,
        typer.Argument(
            metavar="TOKEN",
            help="Id of the token, or its beginning, as far as no other has it, or the name of a valid one.",
        ),
    ],
    reason: Reason,
    project: Project = None,
    as_json: Json = False,
) -> int:
    """End a token now. What it did stays in evidence, and the tokens that it made count on: they are said."""
    output = Output(as_json=as_json)
    with connect() as client:
        try:
            ended = client.tokens.revoke(_identity(token, client, project), reason)
        except ValidationError as error:
            raise invalid_act(error) from None
    output.result(ended, lambda out: out.say(f"the token {ended.id} of {ended.name} counts no more"))
    for one in ended.made:
        output.note(f"it made {one.id} of {_told(one)}, which counts on: `sluicegate token revoke {one.id}`", "warn")
    return Exit.DONE


def _identity(named: str, client: Client, project: str | None) -> UUID:
    try:
        return UUID(named)
    except ValueError:
        pass
    everyone = list(client.tokens.list(project))
    for token in everyone:
        if token.is_valid and token.name == named:
            return token.id
    if is_beginning(named):
        return resolve_id(named, "token", ((token.id, _told(token)) for token in everyone))
    raise Usage(f"no valid token has the name {named}; `sluicegate token list` shows all of them")


def _told(token: Token) -> str:
    """Return what tells a token from another whose id begins alike."""
    return f"{token.name}, {token.role}, {_state(token)}, created {token.created_at:%Y-%m-%d %H:%M:%S}Z"


def _day(at: datetime) -> str:
    return f"{at:%Y-%m-%d}"


def _state(token: Token) -> str:
    if token.revoked_at is not None:
        return f"revoked {token.revoked_at:%Y-%m-%d %H:%M:%S}Z"
    if token.expires_at is None:
        return "valid"
    end = f"{token.expires_at:%Y-%m-%d %H:%M:%S}Z"
    return f"valid until {end}" if token.is_valid else f"ended {end}"
