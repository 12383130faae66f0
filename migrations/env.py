from alembic import context
from alembic.util.exc import CommandError
from sqlalchemy import Connection, create_engine, text

from registry import db
from registry.tables import Base

LOCK = 0x51_1C_E6_A7E


ELSEWHERE = text(
    "SELECT schemaname FROM pg_tables WHERE tablename = 'signing_keys' AND NOT EXISTS"
    " (SELECT FROM pg_tables WHERE tablename = 'signing_keys' AND schemaname = 'public') LIMIT 1"
)


def _require_one_place(connection: Connection) -> None:
    """Return unless the tables are in a schema that is not looked in: an empty service would stand beside them."""
    elsewhere = connection.scalar(ELSEWHERE)
    connection.rollback()
    if elsewhere is not None:
        raise CommandError(f"the tables are in the schema {elsewhere}: move them to public, where they are looked for")


def run() -> None:
    url = context.config.attributes["url"]
    limits = {"lock_timeout": "5s", "statement_timeout": "300s"}
    engine = create_engine(url, connect_args={"options": db.options(db.MEANING | limits)})
    try:
        with engine.connect() as connection:
            _require_one_place(connection)
            context.configure(
                connection=connection,
                target_metadata=Base.metadata,
                transaction_per_migration=True,
                compare_type=True,
            )
            # One migration run at a time: two instances may start together.
            connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": LOCK})
            connection.commit()
            try:
                with context.begin_transaction():
                    context.run_migrations()
            finally:
                connection.rollback()
                connection.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": LOCK})
                connection.commit()
    finally:
        engine.dispose()


run()
