"""Tables for a terminal that is narrower than what is in them. Pure."""

import re
from collections.abc import Collection, Sequence
from textwrap import shorten

from rich.cells import cell_len

from schemas.short import ID_LENGTHS, apart

GAP = 2
"""Columns of the terminal between two columns of a table."""
PROSE = 24
"""Width that is enough for a cell of several words."""
SQUEEZED = 20
"""Width that is still enough where there is no more: a time to the second stays on one line."""
BRIEF = 100
"""Characters of a cell of which the beginning is enough."""
DIGEST_DIGITS = 12
_DIGEST = re.compile(r"(?<![0-9a-f])(?:sha256:)?([0-9a-f]{64})(?![0-9a-f])")
_ID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")

Rows = list[list[str]]


def fitted(
    columns: Sequence[str], rows: Rows, width: int, spare: Sequence[str] = ()
) -> tuple[list[str], Rows, list[str]]:
    """Return columns and rows as a terminal of a width can show them, and the columns that were left out.

    What is too wide first gets its digests and ids cut to beginnings that every command takes and of which no two of
    different ids are the same, then loses columns.
    What is too wide even so (`widths`) is not shown as a table.

    Args:
        columns: headings.
        rows: cells.
        width: of the terminal.
        spare: headings of columns that may be left out, the first one first.
    """
    shown, left = [*columns], rows
    if _width(shown, left) > width:
        characters = apart(found for row in left for cell in row for found in _ID.findall(cell))
        left = [[abbreviated(cell, characters) for cell in row] for row in left]
    gone: list[str] = []
    for name in spare:
        if _width(shown, left) <= width:
            break
        place = shown.index(name)
        shown.pop(place)
        left = [[*row[:place], *row[place + 1 :]] for row in left]
        gone.append(name)
    return shown, left, gone


def widths(columns: Sequence[str], rows: Rows, width: int) -> list[int] | None:
    """Return how wide each column is on a terminal of a width; what is to spare goes to those that need most lines.

    None is returned where rows cannot be side by side without breaking words or squeezing prose.
    """
    for prose in (PROSE, SQUEEZED):
        found = _least(columns, rows, prose)
        room = width - sum(found) - GAP * (len(found) - 1)
        if room < 0:
            continue
        wanted = [max(cell_len(cell) for cell in column) for column in _columns(columns, rows)]
        while room and (short := [place for place, one in enumerate(found) if one < wanted[place]]):
            found[min(short, key=lambda place: found[place] / wanted[place])] += 1
            room -= 1
        return found
    return None


def shortened(columns: Sequence[str], rows: Rows, brief: Sequence[str]) -> tuple[Rows, bool]:
    """Return rows with the beginnings of long cells in the columns named by `brief`, and whether any was cut."""
    places = {place for place, name in enumerate(columns) if name in brief}
    cut = [
        [
            shorten(cell, BRIEF, placeholder=" …") if place in places and len(cell) > BRIEF else cell
            for place, cell in enumerate(row)
        ]
        for row in rows
    ]
    return cut, cut != rows


def abbreviated(text: str, characters: int = ID_LENGTHS[0]) -> str:
    """Return a text with digests and ids cut to what the commands need to find them; ids to so many characters."""
    return _ID.sub(lambda found: found[0][:characters], _DIGEST.sub(lambda found: found[1][:DIGEST_DIGITS], text))


def _width(columns: Sequence[str], rows: Collection[Sequence[str]]) -> int:
    return sum(_least(columns, rows, PROSE)) + GAP * (len(columns) - 1)


def _least(columns: Sequence[str], rows: Collection[Sequence[str]], prose: int) -> list[int]:
    """Return how wide each column has to be at least: prose is wrapped, and words are not."""
    return [
        max(min(cell_len(cell), max(prose, *map(cell_len, cell.split() or [""]))) for cell in column)
        for column in _columns(columns, rows)
    ]


def _columns(columns: Sequence[str], rows: Collection[Sequence[str]]) -> list[list[str]]:
    return [[name, *(row[place] for row in rows)] for place, name in enumerate(columns)]
