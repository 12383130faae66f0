"""Tables for a terminal that is narrower than what is in them. Pure."""

import re
from collections.abc import Collection, Sequence

from rich.cells import cell_len

from schemas.short import ID_LENGTHS, apart

GAP = 2
"""Columns of the terminal between two columns of a table."""
PROSE = 24
"""Width that is enough for a cell of several words."""
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
    What is too wide even so (`fits`) is not shown as a table.

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


def fits(columns: Sequence[str], rows: Rows, width: int) -> bool:
    """Tell whether a terminal of a width shows rows side by side without breaking words or squeezing prose."""
    return _width(columns, rows) <= width


def abbreviated(text: str, characters: int = ID_LENGTHS[0]) -> str:
    """Return a text with digests and ids cut to what the commands need to find them; ids to so many characters."""
    return _ID.sub(lambda found: found[0][:characters], _DIGEST.sub(lambda found: found[1][:DIGEST_DIGITS], text))


def _width(columns: Sequence[str], rows: Collection[Sequence[str]]) -> int:
    widest = [max(map(_least, (name, *(row[place] for row in rows)))) for place, name in enumerate(columns)]
    return sum(widest) + GAP * (len(columns) - 1)


def _least(cell: str) -> int:
    """Return how wide a cell has to be at least: prose is wrapped, and words are not."""
    return min(cell_len(cell), max(PROSE, *map(cell_len, cell.split() or [""])))
