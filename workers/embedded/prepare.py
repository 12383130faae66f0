"""Makes the database ready for the other parts: `python -m workers.embedded.prepare ROLE PROJECT ADMIN RUNNER`.

It makes the database, migrates it, makes the application's role, and the project with its first tokens in two files.
Settings come from the environment; the database's address there is that of the owner.
Repeating it changes nothing.
"""

import sys

from sqlalchemy import create_engine, make_url, text

from migrations.__main__ import grant, upgrade
from registry import bootstrap
from registry.settings import Settings


def create_database(url: str) -> None:
    """Make the database that an address names, unless it exists."""
    sought = make_url(url)
    engine = create_engine(sought.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        known = connection.scalar(text("SELECT true FROM pg_database WHERE datname = :name"), {"name": sought.database})
        if not known:
            connection.execute(text(f'CREATE DATABASE "{sought.database}"'))
    engine.dispose()


def create_role(url: str, role: str) -> None:
    """Make the application's role, unless it exists, and give it what the application needs."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        if not connection.scalar(text("SELECT true FROM pg_roles WHERE rolname = :name"), {"name": role}):
            connection.execute(text(f'CREATE ROLE "{role}" LOGIN'))
    engine.dispose()
    grant(url, role)


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit status."""
    role, project, admin_file, runner_file = arguments
    url = Settings().database_url.get_secret_value()
    create_database(url)
    upgrade(url)
    create_role(url, role)
    return bootstrap.main(["--project", project, "--admin-token-file", admin_file, "--runner-token-file", runner_file])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
