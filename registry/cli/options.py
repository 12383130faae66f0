"""Options that several commands have, and the way help shows examples."""

import math
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperArgument, TyperGroup, TyperOption

_LONGEST_SENTENCE = 1000
_LONGEST_CHOICE = 50
LONGEST_WAIT_SECONDS = 366 * 86_400
MOST_ITEMS = 1_000_000


def finite(value: float | None) -> float | None:
    """Return a number of an option. Raises BadParameter: it is none, which no range refuses."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number")
    return value


Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output; all else goes to standard error.")
]
Reason = Annotated[str, typer.Option("--reason", "-r", help="Why; kept in evidence.")]
Wait = Annotated[bool, typer.Option("--wait", help="Follow it until it is decided.")]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=0,
        max=LONGEST_WAIT_SECONDS,
        callback=finite,
        help="Longest wait in seconds; then the exit status is 3.",
    ),
]
Limit = Annotated[int, typer.Option("--limit", min=1, max=MOST_ITEMS, help="Most items to show.")]
Key = Annotated[
    str | None,
    typer.Option("--key", help="Idempotency key, such as a pipeline's number: the same request is then done once."),
]
IfMatch = Annotated[
    str | None,
    typer.Option("--if-match", help="Version that `release show` gave: nothing is done when it has changed since."),
]
BundleName = Annotated[str, typer.Argument(metavar="BUNDLE", help="Digest, 8 or more of its digits, or @ALIAS.")]
ReleaseId = Annotated[
    str,
    typer.Argument(
        metavar="RELEASE", help="Id of the release, or its beginning, as far as no other has it, such as 01a2289b-8894."
    ),
]


class Until(StrEnum):
    """How far a release is followed."""

    GATED = "gated"
    APPROVED = "approved"
    PROMOTED = "promoted"
    ENDED = "ended"
    ROLLED_BACK = "rolled_back"


def examples(*lines: str) -> str:
    """Return an epilog with command lines that are shown as they are."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class _Argument(TyperArgument):
    """An argument as a person writes it: `FILE`, or `[FILE]` in the usage of what does without it."""

    def display_type_rich(self, ctx: Any) -> str:  # noqa: ARG002 - the library's own form
        """Return no type: the name says what it is."""
        return ""

    def get_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002 - as above
        """Return its name, in brackets where it may be left out."""
        return [self.display_name_raw if self.required else f"[{self.display_name_raw}]"]


def name_values(command: Any) -> None:
    """Have the help of a command, and of all below it, call each argument, and the value of each option, by what it is.

    Not by the type that reads it: `--timeout SECONDS`, and not `<float range>`; a long list of words is not repeated.
    """
    for one in command.params:
        if isinstance(one, TyperArgument):
            one.__class__ = _Argument
        elif isinstance(one, TyperOption) and one.metavar is None and not (one.is_flag or one.count):
            one.metavar = _value(one)
    for below in getattr(command, "commands", {}).values():
        name_values(below)


def _value(option: TyperOption) -> str:
    kind, name = option.type_descriptor, max(option.opts, key=len).lstrip("-").upper()
    words = "|".join(str(one.value if isinstance(one, Enum) else one) for one in kind.choices or ())
    if 0 < len(words) <= _LONGEST_CHOICE:
        return f"<{words}>"
    kinds = {kind.annotation, *get_args(kind.annotation)}
    if float in kinds and "second" in f"{name} {option.help}".lower():
        return "SECONDS"
    return "N" if int in kinds else "FILE" if Path in kinds else name


class WholeGroup(TyperGroup):
    """A group whose help has the first sentence of each command whole, over several lines where it takes them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands and what they do."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(_LONGEST_SENTENCE)) for name, one in commands if one])


def group(help_text: str, *, cls: type[TyperGroup] = WholeGroup) -> typer.Typer:
    """Return an empty group of commands. The whole program's, of a class of its own, offers completion to shells."""
    return typer.Typer(
        cls=cls,
        help=help_text,
        no_args_is_help=True,
        rich_markup_mode=None,
        add_completion=cls is not WholeGroup,
    )
