"""Where a reader of the whole log has come to, so that nothing is ever skipped.

A sequence is given out when an entry is written, and seen when it is committed: a reader who has gone past a number
would miss an entry with a lower one that is committed later. So entries are ordered by (transaction, sequence), and
only those are given out whose transaction is below every one that still runs. Nothing can appear there any more.

Within a stream an entry has at least the transaction of the entry before it: transactions take their numbers before
they wait for a stream's lock, and a stream is never told out of order. A larger number only makes an entry wait.

Source: PostgreSQL manual, 9.27 "Transaction ID and Snapshot Information Functions".
"""

import base64
import struct
from dataclasses import dataclass
from typing import Self

from sqlalchemy import BindParameter, func, literal, select
from sqlalchemy.orm import Session

from registry.tables import TransactionId
from schemas.common import MAX_INTEGER

_FORM = struct.Struct(">QQ")


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """Everything up to here, and including it, has been read."""

    transaction: int
    sequence: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return a cursor that `str` has written. Raises ValueError."""
        try:
            parsed = cls(*_FORM.unpack(base64.urlsafe_b64decode(text + "==")))
        except (ValueError, struct.error):
            raise ValueError(f"{text[:40]!r} is not a cursor") from None
        if str(parsed) != text or parsed.sequence > MAX_INTEGER:
            raise ValueError(f"{text[:40]!r} is not a cursor")
        return parsed

    @classmethod
    def ahead_of(cls, horizon: int) -> Self:
        """Return the cursor of a reader who has seen everything below a horizon."""
        return cls(horizon - 1, MAX_INTEGER)

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(_FORM.pack(self.transaction, self.sequence)).decode().rstrip("=")


START = Cursor(0, 0)
"""Before every entry."""


def horizon(session: Session) -> int:
    """Return a number below which every transaction has ended: nothing can be added there any more."""
    found: int = session.scalars(select(func.pg_snapshot_xmin(func.pg_current_snapshot(), type_=TransactionId()))).one()
    return found


def ahead(session: Session) -> int:
    """Return a number above that of every transaction whose entries can be seen here."""
    numbers = TransactionId()
    committed = func.pg_snapshot_xmax(func.pg_current_snapshot(), type_=numbers)
    below, own = session.execute(select(committed, func.pg_current_xact_id_if_assigned(type_=numbers))).one()
    return max(below, (own or 0) + 1)


def number(transaction: int) -> BindParameter[int]:
    """Return a transaction's number for a query."""
    return literal(transaction, TransactionId())
