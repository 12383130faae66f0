"""Tables are made where the service looks, whatever a role's own settings say."""

import pytest
from alembic.util.exc import CommandError
from sqlalchemy import create_engine, text

from migrations.__main__ import upgrade

TABLES = text("SELECT DISTINCT schemaname FROM pg_tables WHERE tablename IN ('entries', 'signing_keys')")


@pytest.fixture
def empty(postgres):
    """A database without a table, which looks in a schema of somebody's own first."""
    name = postgres.create()
    engine = create_engine(postgres.url(name))
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
        connection.execute(text("CREATE SCHEMA own"))
        connection.execute(text(f"ALTER DATABASE {name} SET search_path = own, public"))
    yield engine, postgres.url(name)
    engine.dispose()
    postgres.drop(name)


def test_tables_are_made_where_the_service_looks(empty):
    engine, url = empty
    upgrade(url)
    with engine.begin() as connection:
        assert connection.scalars(TABLES).all() == ["public"]


def test_no_empty_service_is_made_beside_tables_elsewhere(empty):
    engine, url = empty
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE own.signing_keys (key_id text)"))
    with pytest.raises(CommandError, match="in the schema own: move them to public"):
        upgrade(url)
    with engine.begin() as connection:
        assert connection.scalars(TABLES).all() == ["own"]
