"""Acts whose statements are signed while nothing is locked and no transaction is open.

Whether an act may be done, and what it says, is told by what is locked; signing may take a key service half a second.
So the act is begun, and where a statement turns out not to be signed yet, given up again: nothing is left of it, the
statement is signed with nothing held, and the act is begun anew. What it says then is either the same, and has its
signature, or others were first, and it says something else or is refused.
"""

from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from registry import db
from registry.keys import Signer
from registry.service import Service
from schemas.evidence import Envelope
from schemas.problems import Unavailable

TRIES = 24
"""Each statement of an act takes one, and each time that others were first."""
_AHEAD = "signed_ahead"
_MOMENT = "moment"

ResultT = TypeVar("ResultT")


class NotSignedError(Exception):
    """A statement is not among those that were signed ahead."""

    def __init__(self, payload: bytes) -> None:
        """Carry it."""
        super().__init__("the statement is not signed yet")
        self.payload = payload


class Ahead:
    """What was signed ahead for one act, and the one instant at which all of it is stated."""

    def __init__(self, signer: Signer) -> None:
        """Begin with nothing."""
        self._signer = signer
        self._made: dict[bytes, Envelope] = {}
        self._at: datetime | None = None

    def moment(self, session: Session) -> datetime:
        """Return the instant of the act, by the database's clock: the same at every try."""
        if self._at is None:
            self._at = db.now(session)
        return self._at

    def sign(self, payload: bytes) -> Envelope:
        """Return the envelope of a statement. Raises NotSignedError."""
        if payload not in self._made:
            raise NotSignedError(payload)
        return self._made[payload]

    def prepare(self, payload: bytes) -> None:
        """Sign a statement. Nothing may be locked."""
        self._made[payload] = self._signer.sign(payload)


def signer_of(session: Session, service: Service) -> Signer | Ahead:
    """Return what signs in a unit of work."""
    ahead: Ahead | None = session.info.get(_AHEAD)
    return ahead or service.signer


def is_ahead(session: Session) -> bool:
    """Tell whether statements of a unit of work are signed ahead."""
    return _AHEAD in session.info


def moment(session: Session) -> datetime:
    """Return the instant of the act that a unit of work does, by the database's clock: one for all that it states."""
    ahead: Ahead | None = session.info.get(_AHEAD)
    if ahead is not None:
        return ahead.moment(session)
    if _MOMENT not in session.info:
        session.info[_MOMENT] = db.now(session)
    at: datetime = session.info[_MOMENT]
    return at


def note_moment(session: Session, at: datetime) -> None:
    """Say what the database's clock was a moment ago, within this unit of work: `moment` need not ask for it."""
    session.info.setdefault(_MOMENT, at)


@event.listens_for(Session, "after_transaction_end")
def _forget(session: Session, transaction: SessionTransaction) -> None:
    if db.is_over(transaction):
        session.info.pop(_MOMENT, None)


def perform(service: Service, work: Callable[[Session], ResultT]) -> ResultT:
    """Do an act in a unit of work of its own, whole or not at all, with nothing locked while it is signed.

    A key in this process signs within the unit of work: that takes less time than beginning anew would.

    `work` may be called several times. What it says must follow from what it reads and from `moment`, not from the
    identity of an entry that it has just written: that is another one each time.

    Raises:
        Unavailable: others kept changing what the act is about.
    """
    if service.signer.is_quick:
        with service.database.transaction() as session:
            return work(session)
    ahead = Ahead(service.signer)
    for _ in range(TRIES):
        try:
            with service.database.transaction() as session:
                session.info[_AHEAD] = ahead
                return work(session)
        except NotSignedError as missing:
            ahead.prepare(missing.payload)
    raise Unavailable("others kept changing what this act is about; look again")
