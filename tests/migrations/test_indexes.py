"""Indexes of a database that ran its migrations at another time are those of a new one."""

from alembic import command
from sqlalchemy import create_engine, text

from migrations.__main__ import config, upgrade

INDEX = "ix_releases_bundle_id"


def test_an_index_that_an_earlier_migration_came_to_make_is_made_where_it_is_missing(postgres):
    name = postgres.create()
    url = postgres.url(name)
    command.downgrade(config(url), "0004")
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(f"DROP INDEX {INDEX}"))
    upgrade(url)
    with engine.begin() as connection:
        found = set(connection.scalars(text("SELECT indexname FROM pg_indexes WHERE tablename = 'releases'")))
    engine.dispose()
    postgres.drop(name)
    assert {INDEX, "ix_releases_leased"} <= found
