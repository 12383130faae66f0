"""Lists in pages: a cursor names the last item seen, so nothing is counted or skipped."""

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar
from uuid import UUID

from fastapi import Depends, Query

from schemas.api import Page
from schemas.problems import InvalidDocument

MAX_LIMIT = 200
Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Most items in the page.")]

RowT = TypeVar("RowT")
ItemT = TypeVar("ItemT")


async def _cursor(
    cursor: Annotated[str | None, Query(max_length=64, description="`next` of the page before.")] = None,
) -> UUID | None:
    if cursor is None:
        return None
    try:
        return UUID(bytes=base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, binascii.Error):
        detail = "query parameter cursor: is not one that this service gave out"
        raise InvalidDocument(detail, errors=[{"pointer": "", "detail": detail}]) from None


Cursor = Annotated[UUID | None, Depends(_cursor)]
"""Identity of the last item of the page before, or None for the first page."""


def page(rows: Sequence[RowT], limit: int, wire: Callable[[RowT], ItemT], key: Callable[[RowT], UUID]) -> Page[ItemT]:
    """Return one page.

    Args:
        rows: up to `limit + 1` rows, newest first; the one too many says that there is a next page.
        limit: most items in the page.
        wire: makes an item of a row.
        key: identity of a row: a UUIDv7, by which the rows are ordered.
    """
    shown = rows[:limit]
    following = None
    if len(rows) > limit:
        following = base64.urlsafe_b64encode(key(shown[-1]).bytes).decode().rstrip("=")
    return Page(items=[wire(row) for row in shown], next=following)
