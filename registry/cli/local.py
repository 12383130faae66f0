"""`sluicegate login`, `sluicegate up`, `sluicegate demo`."""

import os
import sys
from typing import Annotated, NoReturn

import typer

from registry.cli.failures import Exit
from registry.cli.options import Json, examples, group
from registry.cli.output import Output
from registry.cli.profile import TOKEN_VARIABLE, Profile, client_for, load, save
from schemas.problems import Usage

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""The started program reads its own arguments, `--help` among them."""

LOGIN_EXAMPLES = examples(
    "sluicegate login http://127.0.0.1:8080 --token slg_…",
    "sluicegate login https://sluicegate.example --token - < token",
    "sluicegate login",
)


app = group("Commands that stand by themselves.")


@app.command(epilog=LOGIN_EXAMPLES)
def login(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="Address of the service. Only asks who you are when absent.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option("--token", help=f"The token; `-` reads it. Asked for when absent; or {TOKEN_VARIABLE}."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Keep a service and a token for later commands, once the service has accepted the token."""
    output = Output(as_json=as_json)
    profile = load() if url is None else Profile(url.rstrip("/"), _secret(token))
    with client_for(profile) as client:
        if client.is_in_clear:
            output.note(f"{profile.url} is plain HTTP: others on the way can read the token", "warn")
        identity = client.me()
    told: dict[str, object] = {"url": profile.url, **identity.model_dump()}
    if url is not None:
        told["file"] = str(save(profile))
    bound = "" if identity.targets is None else f", for {' '.join(identity.targets)} alone"
    ends = "" if identity.expires_at is None else f", until {identity.expires_at:%Y-%m-%d %H:%M:%S}Z"
    who = f"{identity.name}, {identity.role} of project {identity.project} at {profile.url}{ends}{bound}"
    output.result(told, lambda out: out.say(who, "good"))
    return Exit.DONE


def _secret(token: str | None) -> str:
    if token == "-":  # noqa: S105 - the sign for standard input
        return sys.stdin.readline().strip()
    found = token or os.environ.get(TOKEN_VARIABLE)
    if found is None and sys.stdin.isatty():
        found = str(typer.prompt("Token", hide_input=True))
    if not found:
        raise Usage(f"give the token with --token, as `--token -` on standard input, or in {TOKEN_VARIABLE}")
    return found


@app.command(context_settings=PASSED_ON)
def up(context: typer.Context) -> int:
    """Start everything on this machine from one directory, watch over it, and stop it on Ctrl-C."""
    return _start("workers.embedded", context.args)


@app.command(context_settings=PASSED_ON)
def demo(context: typer.Context) -> int:
    """Release a real model four times on a stack of its own: promoted, replaced, rejected, taken back."""
    return _start("workers.demo", context.args)


def _start(module: str, arguments: list[str]) -> NoReturn:
    # -P: a folder `workers` where the command is called is not ours.
    become([sys.executable, "-P", "-m", "registry.cli.started", module, *arguments])


def become(command: list[str]) -> NoReturn:
    """Put another program in this one's place: signals, terminal and exit status are then its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted
