from alembic import context
from sqlalchemy import create_engine, text

from registry.tables import Base

LOCK = 0x51_1C_E6_A7E


def run() -> None:
    url = context.config.attributes["url"]
    engine = create_engine(
        url, connect_args={"options": "-c lock_timeout=5s -c statement_timeout=300s -c timezone=utc"}
    )
    with engine.connect() as connection:
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
    engine.dispose()


run()
