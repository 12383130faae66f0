"""What the demonstration shows: one line an event, and a summary."""

import re
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

_STYLES: Final = {"good": "green", "bad": "red", "warn": "yellow", "plain": "", "quiet": "dim"}
_WIDE: Final = 250
"""Columns when nobody looks: nothing is wrapped for whoever reads a pipe."""
QUIET_SECONDS: Final = 20.0
"""After so long without a line, what goes on is said in a pipe too."""
_HEADLINE: Final = "bold"
_SHORT: Final = re.compile(r"\b[0-9a-f]{12}\b")
"""A digest as lines show it."""


class Screen:
    """Lines with the time since the start. Use as a context manager; one thread writes."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(markup=False, highlight=False, emoji=False)
        if not self._console.is_terminal:
            self._console.width = _WIDE
        self._status: Status | None = None
        self._began = self._said = time.monotonic()
        self._chapter_began = self._began
        self._chapter = ""
        self.chapters: list[tuple[str, float]] = []
        self.names: dict[str, str] = {}
        """First digits of a bundle's digest → its name, so that a line says the name."""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status("", spinner="line")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rest()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def rest(self) -> None:
        """Take the moving line away; nothing happens any more."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def chapter(self, title: str) -> None:
        """Begin a chapter, and say how long the one before took."""
        self.end_chapter()
        self._chapter, self._chapter_began = title, time.monotonic()
        self._console.print()
        self._console.print(Text(f"{self.seconds:6.1f} s  {title}", style=_HEADLINE), soft_wrap=True)

    def end_chapter(self) -> None:
        """End the chapter, if one is under way."""
        if self._chapter:
            took = time.monotonic() - self._chapter_began
            self.chapters.append((self._chapter, took))
            self.line(f"this took {took:.1f} s", "quiet")
        self._chapter = ""

    def line(self, text: str, tone: str = "plain") -> None:
        """Say what has happened."""
        self._line(_SHORT.sub(lambda found: self.names.get(found[0], found[0]), text), tone)

    def _line(self, text: str, tone: str) -> None:
        stamp = Text(f"{self.seconds:6.1f} s  ", style="dim")
        self._console.print(stamp + Text(printable(text), style=_STYLES[tone]), soft_wrap=True)
        self._said = time.monotonic()

    def act(self, person: str, command: str) -> None:
        """Say what a person does."""
        self._line(f"{person} $ {command}", "quiet")

    def now(self, text: str) -> None:
        """Say what goes on at this moment; the next such line takes its place, or comes later where nobody looks."""
        if self._status is not None:
            self._status.update(Text(printable(text), style="dim"))
        elif text and time.monotonic() - self._said >= QUIET_SECONDS:
            self.line(text, "quiet")

    def fields(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Print names and values."""
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in pairs:
            table.add_row(name, Text(printable(value)))
        self._console.print(table)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print rows under headings."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        self._console.print(table)

    def text(self, text: str, tone: str = "plain") -> None:
        """Print lines as they are."""
        for line in text.splitlines():
            self._console.print(Text(printable(line), style=_STYLES[tone]), soft_wrap=True)

    def space(self) -> None:
        """Print an empty line."""
        self._console.print()


def printable(text: str) -> str:
    """Return text without what could move a terminal's cursor: an engine or a log may have written it."""
    return "".join(character if character.isprintable() else " " for character in text)
