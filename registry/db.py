"""The database: engine, unit of work, and the only `commit()` of the product."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from sqlalchemy import Engine, create_engine, event, func, select
from sqlalchemy.orm import Session, sessionmaker

from registry.settings import Settings

AFTER_COMMIT = "after_commit"


def connect(settings: Settings) -> Engine:
    """Return an engine whose connections refuse to wait for ever for a lock, a statement or their own caller.

    A writer that stands still in its transaction would keep what others have committed from those who follow the log.
    """
    limits = {"lock_timeout": "10s", "statement_timeout": "60s", "idle_in_transaction_session_timeout": "60s"}
    return create_engine(
        settings.database_url.get_secret_value(),
        pool_size=settings.database_pool,
        max_overflow=settings.database_pool,
        pool_pre_ping=True,
        connect_args={
            "options": " ".join(f"-c {name}={value}" for name, value in {"timezone": "utc", **limits}.items())
        },
    )


class Database:
    """Hands out units of work: each commits whole or leaves nothing."""

    def __init__(self, engine: Engine) -> None:
        """Wrap an engine."""
        self.engine = engine
        self._sessions = sessionmaker(engine, expire_on_commit=False, autoflush=True)

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
    instant: datetime = session.scalars(select(func.clock_timestamp())).one()
    return instant


def freeze(session: Session) -> None:
    """Let every query of this transaction see one moment. Call it before the first query."""
    session.connection(execution_options={"isolation_level": "REPEATABLE READ"})


def after_commit(session: Session, ring: object) -> None:
    """Call `ring()` once the transaction is committed; never when it is rolled back."""
    session.info.setdefault(AFTER_COMMIT, []).append(ring)


@event.listens_for(Session, "after_rollback")
def _forget(session: Session) -> None:
    session.info.pop(AFTER_COMMIT, None)
