"""What differs between two small texts, line by line, bounded and safe to print. Pure."""

import difflib
import re
from collections.abc import Iterator
from typing import Final

from schemas.bundle import Role
from schemas.comparison import FileChange

MOST_BYTES: Final = 64 << 10
"""Bytes of a text that is compared."""
MOST_FILES: Final = 8
"""Files of two bundles whose texts are compared."""
MOST_LINES: Final = 80
"""Lines that are told; the rest is counted."""
_MOST_COMPARED: Final = 2000
_LONGEST_LINE: Final = 160
_ROLES: Final = frozenset({Role.TEMPLATE, Role.CONFIG, Role.GENERATION_CONFIG, Role.QUANTIZATION, Role.PROCESSOR})
_PIECE: Final = re.compile(r".{40,120}?(?:%\}|\}\}|, )|.{1,160}")
"""Where a long line is cut: after what ends a statement, so that one change does not move all that follows."""


def is_compared(change: FileChange) -> bool:
    """Tell whether a file that differs is a small text whose lines say more than its digest."""
    if change.was is None or change.now is None or change.was.sha256 == change.now.sha256:
        return False
    return {change.was.role, change.now.role} <= _ROLES and max(change.was.size, change.now.size) <= MOST_BYTES


def lines(was: bytes, now: bytes) -> list[str]:
    """Return the lines that differ, with two beside them: `-` was, `+` is now, ` ` is in both, `@` tells the place.

    None are returned where one of the two is no text, or has too many lines. What is not printable is U+FFFD.
    """
    try:
        before, after = list(_lines(was.decode())), list(_lines(now.decode()))
    except UnicodeDecodeError:
        return []
    if max(len(before), len(after)) > _MOST_COMPARED:
        return []
    found = list(difflib.unified_diff(before, after, n=2, lineterm=""))[2:]
    more = len(found) - MOST_LINES
    return [*found[:MOST_LINES], *([f"@ and {more} more lines"] if more > 0 else [])]


def _lines(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        shown = "".join(one if one.isprintable() else "\ufffd" for one in line.rstrip("\r").expandtabs(4))
        yield from [shown] if len(shown) <= _LONGEST_LINE else _PIECE.findall(shown)
