"""The whole command line, put together, and the one place where a command ends."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from pydantic import ValidationError
from typer.exceptions import Abort, TyperException

from registry.cli import bundles, evidence, local, policies, releases, runners, runs, suites, targets, tokens
from registry.cli.failures import Exit, Usage
from registry.cli.options import examples, group
from registry.cli.output import Output
from schemas import VERSION
from schemas.problems import InternalError, Problem

PROGRAM = "sluicegate"

app = group("A registry of immutable serving bundles and a release gate for LLM serving.")
app.command("up", context_settings=local.PASSED_ON, epilog=local.UP_EXAMPLES)(local.up)
app.command("demo", context_settings=local.PASSED_ON, epilog=local.DEMO_EXAMPLES)(local.demo)
app.command("login", epilog=local.LOGIN_EXAMPLES)(local.login)
for name, commands in {
    "bundle": bundles.app,
    "policy": policies.app,
    "suite": suites.app,
    "target": targets.app,
    "release": releases.app,
    "gate": runs.app,
    "evidence": evidence.app,
    "runner": runners.app,
    "token": tokens.app,
}.items():
    app.add_typer(commands, name=name)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Never raises, never shows a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    output = Output(as_json="--json" in arguments)
    try:
        status = typer.main.get_command(app).main(args=arguments, prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except Problem as problem:
        return output.refuse(problem)
    except TyperException as error:
        return _misused(error, output)
    except ValidationError as error:
        # What a person wrote was refused where it was read; this is an answer's document.
        what = f"the service holds a {error.title} that this version of the command does not know; --json shows it"
        return output.refuse(InternalError(what))
    except (Abort, KeyboardInterrupt):
        output.note("interrupted", "warn")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE
    except Exception as error:  # edge: a person gets one line; a traceback is for whoever asks for it
        if os.environ.get("SLUICEGATE_TRACEBACK"):
            raise
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return output.refuse(InternalError(f"this is a defect of the command itself ({said})"))
    return status if isinstance(status, int) else Exit.DONE


def _misused(error: TyperException, output: Output) -> Exit:
    said = error.format_message()
    context = getattr(error, "ctx", None)
    if said.startswith("Usage: "):  # a group without a command: what is said is its help
        sys.stderr.write(said + "\n")
        return Exit.INVALID
    if context is not None:
        said = f"{said.rstrip('.')}; see `{context.command_path} --help`"
    return output.refuse(Usage(said))
