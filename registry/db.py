"""The database: engine, unit of work, and the only `commit()` of the product."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from select import POLLOUT, poll

import psycopg
from pydantic_core import from_json
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.orm import Session, SessionTransaction, sessionmaker
from sqlalchemy.pool import ConnectionPoolEntry

from registry.settings import Settings

AFTER_COMMIT = "after_commit"
ASKED_SECONDS = 5.0
"""A connection that has rested for so long is asked whether it still stands before it is used."""
_RESTS_SINCE = "rests_since"
_CLOCK = text("SELECT clock_timestamp()")


def connect(settings: Settings) -> Engine:
    """Return an engine whose connections refuse to wait for ever for a lock, a statement or their own caller.

    A writer that stands still in its transaction would keep what others have committed from those who follow the log.
    """
    limits = {"lock_timeout": "10s", "statement_timeout": "60s", "idle_in_transaction_session_timeout": "60s"}
    made = create_engine(
        settings.database_url.get_secret_value(),
        pool_size=settings.database_pool,
        max_overflow=settings.database_pool,
        json_deserializer=from_json,
        connect_args={
            "options": " ".join(f"-c {name}={value}" for name, value in {"timezone": "utc", **limits}.items())
        },
    )
    event.listen(made, "checkin", _rest)
    event.listen(made, "checkout", _wake)
    return made


def _rest(_: object, record: ConnectionPoolEntry) -> None:
    record.info[_RESTS_SINCE] = time.monotonic()


def _wake(connection: psycopg.Connection, record: ConnectionPoolEntry, _: object) -> None:
    """Hand out no connection that the server has ended. Raises InvalidatePoolError: a new one is made.

    A question to the server for each unit of work would double the cost of the smallest ones. What the server ended
    can be told by the socket, which says nothing else to a connection at rest; what a network lost, by asking after a
    longer rest.
    """
    rested = time.monotonic() - record.info.get(_RESTS_SINCE, time.monotonic())
    socket = poll()
    socket.register(connection.fileno())
    if rested < ASKED_SECONDS and not any(said & ~POLLOUT for _, said in socket.poll(0)):
        return
    try:
        connection.autocommit = True
        connection.execute("SELECT 1")
        connection.autocommit = False
    except psycopg.Error as error:
        raise InvalidatePoolError("the server has ended the connection") from error


class Database:
    """Hands out units of work: each commits whole or leaves nothing."""

    def __init__(self, engine: Engine) -> None:
        """Wrap an engine."""
        self.engine = engine
        self._looking = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._sessions = sessionmaker(engine, expire_on_commit=False, autoflush=True)
        self._readers = sessionmaker(self._looking, expire_on_commit=False, autoflush=False)

    @contextmanager
    def look(self) -> Iterator[Connection]:
        """Yield a connection for one statement that only reads: it needs no transaction around it."""
        with self._looking.connect() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Yield a session whose statements only read and lock nothing: each sees what is committed when it begins.

        That is what they would see in a transaction, which would cost two more questions to the server.
        """
        with self._readers() as session:
            yield session

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Yield a session; commit at the end, roll back on any exception, then ring the bells asked for."""
        session = self._sessions()
        try:
            yield session
            session.commit()
        except BaseException:
            session.rollback()
            raise
        finally:
            session.close()
        for ring in session.info.pop(AFTER_COMMIT, []):
            ring()


def now(session: Session) -> datetime:
    """Return the database's clock, which leases and records use: it does not stand still within a transaction."""
    instant: datetime = session.execute(_CLOCK).scalar_one()
    return instant


def freeze(session: Session) -> None:
    """Let every query of this transaction see one moment. Call it before the first query."""
    session.connection(execution_options={"isolation_level": "REPEATABLE READ"})


def is_over(transaction: SessionTransaction) -> bool:
    """Tell whether a transaction or a savepoint ends with this: a flush ends a part of one, and nothing else."""
    return transaction.parent is None or transaction.nested


def after_commit(session: Session, ring: object) -> None:
    """Call `ring()` once the transaction is committed; never when it is rolled back."""
    session.info.setdefault(AFTER_COMMIT, []).append(ring)


@event.listens_for(Session, "after_rollback")
def _forget(session: Session) -> None:
    session.info.pop(AFTER_COMMIT, None)
