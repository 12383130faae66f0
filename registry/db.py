"""The database: engine, unit of work, and the only `commit()` of the product."""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from select import POLLOUT, poll
from typing import Any

import psycopg
from psycopg.pq import ExecStatus
from psycopg.rows import namedtuple_row
from pydantic_core import from_json
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, InvalidatePoolError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, SessionTransaction, sessionmaker
from sqlalchemy.pool import ConnectionPoolEntry

from registry.settings import Settings

AFTER_COMMIT = "after_commit"
ASKED_SECONDS = 5.0
"""A connection that has rested for so long is asked whether it still stands before it is used."""
MEANING = {"timezone": "utc", "search_path": "public"}
"""What a name means is not for a role's or a database's own settings to say: a clock of somebody's own, found before
the server's, would let what has expired count. PostgreSQL's own names come before those of any schema that is named."""
AWAY_STATES = frozenset({"25006", "25P03", "25P04"})
"""What PostgreSQL says of a transaction that it takes nothing from just now, and that the driver counts among internal
errors: it only reads (a standby, after a failover), or the transaction's time was over (idle, or as a whole)."""
_RESTS_SINCE = "rests_since"
_CURSOR = "cursor_of_plain_statements"
_PARAMETER = re.compile(r"(?<![:\w]):([a-z]\w*)")


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
        connect_args={"options": options(MEANING | limits)},
    )
    event.listen(made, "checkin", _rest)
    event.listen(made, "checkout", _wake)
    return made


def is_away(error: BaseException) -> bool:
    """Tell whether an error says that the database does not answer, or takes nothing, just now: one may try again."""
    if isinstance(error, OperationalError | PoolTimeout):
        return True
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in AWAY_STATES


def options(settings: Mapping[str, str]) -> str:
    """Return settings of PostgreSQL as a connection takes them."""
    return " ".join(f"-c {name}={value}" for name, value in settings.items())


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


class Sql:
    """SQL with `:named` parameters, for `ask`. Of a cast, only `CAST(… AS …)` can be told from a parameter."""

    __slots__ = ("names", "sql", "text")

    def __init__(self, sql: str) -> None:
        """Take SQL as PostgreSQL has it, but for the parameters."""
        self.text = sql
        places = {name: f"${place}" for place, name in enumerate(dict.fromkeys(_PARAMETER.findall(sql)), 1)}
        self.names = tuple(places)
        self.sql = _PARAMETER.sub(lambda found: places[found[1]], sql).encode()


_CLOCK = Sql("SELECT clock_timestamp()")


def ask(session: Session | Connection, statement: Sql, values: Mapping[str, Any] | None = None) -> list[Any]:
    """Return the rows that a statement gives, as named tuples, from the driver itself.

    It is one more statement of the session's transaction. What `session.execute` does around it, to make SQL out of
    objects and objects out of rows, costs as much as the driver does, and is nothing to what is SQL already.

    Raises:
        KeyError: a parameter has no value.
        sqlalchemy.exc.DBAPIError: as `session.execute`.
    """
    if isinstance(session, Session):
        session.flush()
        session = session.connection()
    proxied = session.connection
    cursor: Any = proxied.info.get(_CURSOR)
    if cursor is None:
        cursor = proxied.info[_CURSOR] = psycopg.RawCursor(_driver_of(session), row_factory=namedtuple_row)
    given = tuple([values[name] for name in statement.names]) if values else ()
    try:
        cursor.execute(statement.sql, given)
        result = cursor.pgresult
        return cursor.fetchall() if result is not None and result.status == ExecStatus.TUPLES_OK else []
    except psycopg.Error as error:
        dialect: Any = session.dialect
        is_gone = dialect.is_disconnect(error, _driver_of(session), cursor)
        if is_gone:
            session.invalidate(error)
        raise DBAPIError.instance(
            statement.text, None, error, psycopg.Error, connection_invalidated=is_gone, dialect=dialect
        ) from error
    except BaseException as error:
        if not isinstance(error, Exception):
            # Whoever was told to end in the middle of an answer has left the rest of it in the connection.
            session.invalidate(error)
        raise


def ask_one(session: Session | Connection, statement: Sql, values: Mapping[str, Any] | None = None) -> Any:
    """Return the one row that a statement gives. Raises ValueError for more or fewer, else as `ask`."""
    (row,) = ask(session, statement, values)
    return row


def ask_any(session: Session | Connection, statement: Sql, values: Mapping[str, Any] | None = None) -> Any:
    """Return the row that a statement gives, or None. Raises ValueError for more than one, else as `ask`."""
    rows = ask(session, statement, values)
    if len(rows) > 1:
        raise ValueError(f"one row was expected, and {len(rows)} came")
    return rows[0] if rows else None


def _driver_of(connection: Connection) -> Any:
    driver = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection):
        raise TypeError(f"plain statements are asked of psycopg, not of a {type(driver).__name__}")
    return driver


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
    instant: datetime = ask_one(session, _CLOCK)[0]
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
