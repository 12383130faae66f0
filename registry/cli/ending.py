"""The one place where a command ends: its exit status, and what a person or a program is told of what went wrong."""

import os
import re
import sys
from collections.abc import Callable, Sequence

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import Abort, TyperException

from registry.cli.failures import Exit
from registry.cli.options import name_values
from registry.cli.output import Output
from schemas.problems import Defect, InternalError, Problem, Usage

Advise = Callable[[Problem, Sequence[str]], str | None]


def single(command: Callable[..., int], epilog: str) -> TyperCommand:
    """Return a program that is one command, with the options of its parameters."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(epilog=epilog)(command)
    found = typer.main.get_command(app)
    if not isinstance(found, TyperCommand):
        raise TypeError("one command is no group")
    name_values(found)
    return found


def ended(
    command: Callable[[], TyperCommand | TyperGroup],
    arguments: list[str],
    program: str,
    *,
    as_json: bool,
    advise: Advise = lambda _problem, _arguments: None,
) -> int:
    """Run a command line and return its exit status. Never raises, never shows a traceback.

    Args:
        command: makes what reads the arguments.
        arguments: without the program's name.
        program: that name, as help shows it.
        as_json: what went wrong is one JSON object on standard output.
        advise: what a person may do about a problem whose detail does not say it.
    """
    output = Output(as_json=as_json)
    try:
        status = command().main(args=arguments, prog_name=program, standalone_mode=False)
        sys.stdout.flush()
        if status == Exit.INTERRUPTED:  # what the library makes of Ctrl-C
            raise KeyboardInterrupt
    except Problem as problem:
        status = output.refuse(problem)
        if (advice := advise(problem, arguments)) and not output.as_json:
            output.note(f"  {advice}")
        return status
    except TyperException as error:
        return _misused(error, output)
    except (Abort, KeyboardInterrupt):
        output.note("interrupted", "warn")
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE
    except Exception as error:  # edge: a person gets one line; a traceback is for whoever asks for it
        if (unknown := _unknown(error)) is not None:
            return output.refuse(unknown)
        if os.environ.get("SLUICEGATE_TRACEBACK"):
            raise
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        advice = "SLUICEGATE_TRACEBACK=1 shows where; nothing is said of what was asked"
        return output.refuse(Defect(f"this is a defect of the command itself ({said}); {advice}"))
    return status if isinstance(status, int) else Exit.DONE


def _unknown(error: Exception) -> InternalError | None:
    """Return what the refusal of an answer's document means. What a person wrote was refused where it was read."""
    from pydantic import ValidationError  # only where it is asked for: it takes a moment

    if not isinstance(error, ValidationError):
        return None
    return InternalError(
        f"the service holds a {error.title} that this version of the command does not know; --json shows it"
    )


def _misused(error: TyperException, output: Output) -> Exit:
    said = error.format_message()
    context = getattr(error, "ctx", None)
    if said.startswith("Usage: "):  # a group without a command: what is said is its help
        sys.stderr.write(said + "\n")
        return Exit.INVALID
    from schemas.faults import near  # as above

    said = said.replace("Value error, ", "")
    if possible := getattr(error, "possibilities", None):
        said = f"{said.partition(' (Possible')[0]}; {near(str(getattr(error, 'option_name', '')), possible)}"
    elif " is not one of " in said:
        wrong, _, allowed = said.partition(" is not one of ")
        meant = near(_quoted(wrong)[-1], _quoted(allowed))
        said = f"{said.rstrip('.')}; {meant}" if meant else said
    if context is not None:
        said = f"{said.rstrip('.?; ')}{'?' if said.endswith('?') else ''}; see `{context.command_path} --help`"
    return output.refuse(Usage(said))


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text) or [""]
