from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy.orm import Session

from registry import db, keys, projects
from registry.auth import Actor
from registry.db import Database
from registry.service import Service
from registry.settings import Settings
from registry.storage.local import LocalBlobs
from tests.support.api import Api
from tests.support.postgres import Postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.stop()


def settings_for(url: str, folder: Path) -> Settings:
    return Settings(
        environment="development",
        database_url=SecretStr(url),
        broker_url=SecretStr("redis://127.0.0.1:1/0"),
        storage_dir=folder / "blobs",
        signing_key=folder / "signing.pem",
        public_url="http://sluicegate.test",
    )


@pytest.fixture(scope="session")
def shared_service(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service on a database that keeps nothing but its signing key: tests on it roll back."""
    service = Service.build(settings_for(postgres.url(postgres.create()), tmp_path_factory.mktemp("shared")))
    yield service
    service.close()


@pytest.fixture
def session(shared_service: Service) -> Iterator[Session]:
    """A session whose every commit is a savepoint in a transaction that is rolled back. The default."""
    with shared_service.database.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint", expire_on_commit=False) as made:
            yield made
        outer.rollback()


@pytest.fixture
def database(postgres: Postgres, tmp_path: Path) -> Iterator[Database]:
    """A database of the test's own, with real commits: for locks, triggers and what other connections see."""
    name = postgres.create()
    made = Database(db.connect(settings_for(postgres.url(name), tmp_path)))
    yield made
    made.engine.dispose()
    postgres.drop(name)


@pytest.fixture
def service(database: Database, tmp_path: Path) -> Service:
    """A service on a database of the test's own."""
    settings = settings_for(database.engine.url.render_as_string(hide_password=False), tmp_path)
    signer = keys.Signer.load(settings.signing_key)
    with database.transaction() as session:
        keys.enroll(session, signer, at=db.now(session))
    return Service(settings, database, signer, LocalBlobs(settings.storage_dir))


@pytest.fixture
def actor(service: Service) -> Actor:
    """A manager of the project `default` of `service`."""
    with service.database.transaction() as session:
        project, _ = projects.ensure(session, "default")
        return Actor(project_id=project.id, project="default", name="maria", role="manager")


@pytest.fixture
def api(service: Service) -> Iterator[Api]:
    """The HTTP interface on a free port, with real commits."""
    with Api(service) as running:
        yield running
