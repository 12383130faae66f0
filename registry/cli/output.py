"""What a command says: results on standard output, everything else on standard error."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TypeVar

from registry.cli.failures import Exit, exit_of, places
from schemas.problems import Problem

if TYPE_CHECKING:  # loaded where something is drawn: what says the version or help needs none of it
    from rich.console import Console

ItemT = TypeVar("ItemT")

_TONES = {"good": "green", "bad": "red", "warn": "yellow", "plain": ""}
LONGEST_WORD = 40
"""Characters of a word that is not broken to make room for prose beside it."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_WIDE = 250
"""Columns when nobody looks: nothing is cut or wrapped for whoever reads a pipe."""


class Output:
    """Standard output and standard error of one command, for a person or, as JSON, for a program."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    @cached_property
    def _out(self) -> "Console":
        return _console(stderr=False)

    @cached_property
    def _err(self) -> "Console":
        return _console(stderr=True)

    def result(self, value: Any, human: Callable[["Output"], None]) -> None:
        """Say what the command found: as one JSON object, or as `human` says it."""
        if self.as_json:
            sys.stdout.write(_json(value))
        else:
            human(self)

    def say(self, text: str, tone: str = "plain") -> None:
        """Print a line for a person."""
        _line(self._out, text, tone)

    def note(self, text: str, tone: str = "plain") -> None:
        """Print a line about the way there, on standard error."""
        _line(self._err, text, tone)

    def follow(self, text: str, tone: str = "plain") -> None:
        """Print a line of something that happens now; on standard error when a program reads the result."""
        (self.note if self.as_json else self.say)(text, tone)

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        empty: str = "none",
        spare: Sequence[str] = (),
        brief: Sequence[str] = (),
    ) -> None:
        """Print rows under headings; nothing in them is interpreted.

        Args:
            columns: headings.
            rows: cells.
            empty: what is said when there are none.
            spare: headings of columns that a narrow terminal need not show, the first one first.
            brief: headings of columns of which a terminal shows the beginning.
        """
        cells = [[_text(value) for value in row] for row in rows]
        if not cells:
            self.say(empty)
            return
        if not self._out.is_terminal:
            # Whoever reads a pipe gets everything whole.
            self._print(columns, cells, None)
            return
        from registry.cli.tables import fitted, shortened, widths  # only where something is drawn

        told, was_cut = shortened(columns, cells, brief)
        shown, narrow, gone = fitted(columns, told, self._out.width, spare)
        room = widths(shown, narrow, self._out.width)
        if room is None:
            self._stack(columns, cells)
            return
        self._print(shown, narrow, room)
        if gone:
            self.note(f"not shown: {', '.join(gone)}; a wider terminal or --json shows it")
        if was_cut:
            self.note(f"cut short: {', '.join(brief)}; --json has it whole")

    def _print(self, columns: Sequence[str], rows: Sequence[Sequence[str]], room: Sequence[int] | None) -> None:
        """Print rows side by side; `room` is the width of each column, or None for what its cells take."""
        from rich.table import Table  # as above
        from rich.text import Text  # as above

        table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
        for place, column in enumerate(columns):
            is_word = all(" " not in row[place] and len(row[place]) <= LONGEST_WORD for row in rows)
            table.add_column(column, overflow="fold", no_wrap=is_word, width=None if room is None else room[place])
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._out.print(table)

    def _stack(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows one below the other, each with its headings, where no table has room for them."""
        for place, row in enumerate(rows):
            if place:
                self.say("")
            self.fields(zip(columns, row, strict=True))

    def fields(self, pairs: Iterable[tuple[str, object]]) -> None:
        """Print names and values; those without a value are left out."""
        from rich.text import Text  # as above

        shown = [(name, _text(value)) for name, value in pairs if value is not None and value not in ("", [])]
        wide = max((len(name) for name, _ in shown), default=0)
        for name, value in shown:
            room = max(20, self._out.width - wide - 2)
            # A digest that is longer than the line stays one word: it is there to be copied.
            for place, said in enumerate(wrap(value, room, break_long_words=False, break_on_hyphens=False) or [""]):
                head = name.ljust(wide) if place == 0 else " " * wide
                self._out.print(Text.assemble((head, "bold"), "  ", said), soft_wrap=True)

    def most(self, items: Iterator[ItemT], limit: int) -> list[ItemT]:
        """Return the first items of a list, and say when there are more."""
        found = list(islice(items, limit + 1))
        if len(found) > limit:
            self.note(f"the first {limit}; there are more: --limit {2 * limit} shows some of them")
        return found[:limit]

    def refuse(self, problem: Problem) -> Exit:
        """Say what went wrong and where, and return the exit status that it means."""
        if self.as_json:
            sys.stdout.write(_json(problem.body()))
        else:
            self.note(f"error: {problem.title}: {problem.detail}", "bad")
            for place, detail in places(problem):
                self.note(f"  {place}: {detail}" if place else f"  {detail}")
            if problem.status >= 500 and "request_id" in problem.members:
                self.note(f"  request id {problem.members['request_id']}")
        return exit_of(problem)

    @contextmanager
    def moving(self, what: str, total_bytes: int | None = None) -> Iterator[Callable[[int, int | None], None]]:
        """Show how bytes move. Yields a function of (bytes that moved, bytes in all if they are known now)."""
        if not self._err.is_terminal:
            yield _unseen
            return
        from rich import progress as bars  # as above

        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(),
            bars.TransferSpeedColumn(),
            bars.TimeRemainingColumn(),
        )
        with bars.Progress(*columns, console=self._err, transient=True) as progress:
            task = progress.add_task(clean(what), total=total_bytes)

            def step(moved: int, total: int | None = None) -> None:
                if total is not None:
                    progress.update(task, total=total)
                progress.advance(task, moved)

            yield step


def _unseen(_moved: int, _total: int | None) -> None:
    """Show nothing: nobody looks."""


def _line(console: "Console", text: str, tone: str) -> None:
    from rich.text import Text  # as above

    console.print(Text(clean(text), style=_TONES[tone]), soft_wrap=True)


def _console(*, stderr: bool) -> "Console":
    from rich.console import Console  # as above

    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def clean(text: str) -> str:
    """Return text without what could move a terminal's cursor or hide words: another person may have written it."""
    return "".join(
        character if character.isprintable() else " " if character.isspace() else "\ufffd" for character in text
    )


def _text(value: object) -> str:
    return clean("" if value is None else str(value))


def _json(value: Any) -> str:
    """Return a value as JSON. What a name has that is no Unicode (bytes of another encoding) becomes U+FFFD."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") if _SURROGATE.search(text) else text


def plain(value: Any) -> Any:
    """Return what JSON can hold."""
    from pydantic import BaseModel  # as above

    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def none(what: str, makes: str, *, is_asked: bool = False) -> str:
    """Return what is said of a list without items.

    Args:
        what: one item, such as bundle.
        makes: the command by which there is a first one, such as bundle create.
        is_asked: only some were asked for, and there may be others.
    """
    return f"no {what} matches" if is_asked else f"no {what} yet; see `sluicegate {makes} --help`"


def size(count: int) -> str:
    """Return a count of bytes for a person."""
    if count < 1000:
        return f"{count} B"
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}"


def percent(basis_points: int | None) -> str:
    """Return a weight for a person."""
    return "" if basis_points is None else f"{basis_points / 100:g} %"


def lasted(seconds: float) -> str:
    """Return how long something took, for a person."""
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds until now."""
        return time.monotonic() - self._start
