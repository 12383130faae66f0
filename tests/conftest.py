import gc
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy.orm import Session

from gates.bucket import Bucket
from gates.environment import EnvironmentAltered, NotInstalled, engine_environment
from registry import db, keys, projects
from registry.auth import Actor
from registry.db import Database
from registry.service import Service
from registry.settings import Gateway, Settings
from registry.storage.local import LocalBlobs
from tests.support import logs
from tests.support.api import Api
from tests.support.postgres import Postgres, Scratch
from tests.support.s3 import ENVIRONMENT, S3Server


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what collecting makes from being looked through for garbage again and again: it stays to the end.

    With thousands of tests that took a fifth of the processor's time while they run, and a third before.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Count tests on vLLM as not run where it is not installed."""
    marked = [item for item in items if item.get_closest_marker("vllm")]
    if not marked:
        return
    try:
        engine_environment("vllm", is_certain=False)
    except (NotInstalled, EnvironmentAltered) as error:
        for item in marked:
            item.add_marker(pytest.mark.skip(f"not run: {error}; make engine-vllm builds it"))


@pytest.fixture(scope="session", autouse=True)
def _plain_logs() -> None:
    logs.plain()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server, whose clients find their credentials in the environment while the tests run."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        server = S3Server()
        yield server
        server.stop()


@pytest.fixture(scope="session")
def s3_bucket(s3_server: S3Server) -> Iterator[Bucket]:
    """Its bucket: tests use prefixes of their own, since a bucket and a client take a second to make."""
    bucket = Bucket(s3_server.bucket, endpoint=s3_server.url)
    yield bucket
    bucket.close()


def settings_for(url: str, folder: Path) -> Settings:
    return Settings(
        environment="development",
        database_url=SecretStr(url),
        broker_url=SecretStr("redis://127.0.0.1:1/0"),
        storage_dir=folder / "blobs",
        signing_key=folder / "signing.pem",
        public_url="http://sluicegate.test",
        gateways={"local": Gateway(directory=folder / "gateway", url="http://127.0.0.1:1")},
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
def scratch(shared_service: Service) -> Iterator[Service]:
    """A service on one connection, whose every transaction is a savepoint in one that is rolled back.

    A module of tests that need no second connection overrides `service` with it.
    """
    with shared_service.database.engine.connect() as connection:
        outer = connection.begin()
        yield replace(shared_service, database=Scratch(connection))
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
def committed(database: Database, tmp_path: Path) -> Service:
    """A service on a database of the test's own, with real commits."""
    settings = settings_for(database.engine.url.render_as_string(hide_password=False), tmp_path)
    signer = keys.Signer.load(settings.signing_key)
    with database.transaction() as session:
        keys.enroll(session, signer, at=db.now(session))
    return Service(settings, database, signer, LocalBlobs(settings.storage_dir))


@pytest.fixture
def service(committed: Service) -> Service:
    """The service that a test's `actor` belongs to: `committed`, unless the module says `scratch`."""
    return committed


@pytest.fixture
def actor(service: Service) -> Actor:
    """A manager of the project `default` of `service`."""
    with service.database.transaction() as session:
        project, _ = projects.ensure(session, service, "default", by="test")
        return Actor(project_id=project.id, project="default", name="maria", role="manager")


@pytest.fixture
def own_api(committed: Service) -> Iterator[Api]:
    """The HTTP interface on a free port, over a database of the test's own."""
    with Api(committed) as running:
        yield running


@pytest.fixture
def api(own_api: Api) -> Api:
    """The HTTP interface: `own_api`, unless the module says `shared_api`."""
    return own_api


@pytest.fixture(scope="session")
def shared_api(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The HTTP interface over a database that many tests share: for those that are refused, or only read."""
    service = Service.build(settings_for(postgres.url(postgres.create()), tmp_path_factory.mktemp("api")))
    with Api(service) as running:
        yield running
