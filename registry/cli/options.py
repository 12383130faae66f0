"""Options that several commands have, and the way help shows examples."""

import math
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

_LONGEST_SENTENCE = 1000
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


class _Whole(TyperGroup):
    """A group whose help has the first sentence of each command whole, over several lines where it takes them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands and what they do."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(_LONGEST_SENTENCE)) for name, one in commands if one])


def group(help_text: str, *, completes: bool = False) -> typer.Typer:
    """Return an empty group of commands; with `completes`, one that offers completion to shells."""
    return typer.Typer(
        cls=_Whole, help=help_text, no_args_is_help=True, rich_markup_mode=None, add_completion=completes
    )
