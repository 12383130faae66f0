"""FastAPI's default has changed twice: that nothing is answered before it is committed gets a test of its own."""

import httpx
import pytest
from fastapi import APIRouter
from sqlalchemy import event
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from registry import projects
from registry.api.app import create_app
from registry.api.deps import ServiceDep, SessionDep
from registry.api.routes import Route
from registry.db import Database
from schemas.api import Project
from tests.support.api import Api

router = APIRouter(route_class=Route)


@router.post("/probe")
def write(session: SessionDep, service: ServiceDep) -> Project:
    """Write a row that only a commit shows to others."""
    return projects.wire(projects.create(session, service, "probe", by="test"))


@router.post("/broken")
def write_and_break(session: SessionDep, service: ServiceDep) -> Project:
    projects.create(session, service, "broken", by="test")
    raise ZeroDivisionError


@router.post("/nonsense")
def write_and_answer_nonsense(session: SessionDep, service: ServiceDep) -> Project:
    projects.create(session, service, "nonsense", by="test")
    return "no project"


class Order:
    """Wraps the application and notes when the first byte of an answer leaves."""

    def __init__(self, app: ASGIApp, noted: list[str]) -> None:
        self._app, self._noted = app, noted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._noted.append("answered")
            await send(message)

        await self._app(scope, receive, sending)


def names(database: Database) -> set[str]:
    with database.engine.connect() as connection:
        return set(connection.exec_driver_sql("SELECT name FROM projects").scalars())


@pytest.fixture
def noted() -> list[str]:
    return []


@pytest.fixture
async def client(committed, noted):
    app = create_app(committed)
    app.include_router(router)
    event.listen(committed.database.engine, "commit", lambda _: noted.append("committed"))
    transport = httpx.ASGITransport(Order(app, noted), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as made:
        yield made


async def test_the_commit_comes_before_the_answer(client, committed, noted):
    answer = await client.post("/probe")
    assert answer.status_code == 200
    assert noted == ["committed", "answered"]
    assert names(committed.database) == {"probe"}


async def test_an_endpoint_that_breaks_leaves_nothing_and_tells_no_secret(client, committed, noted):
    answer = await client.post("/broken")
    assert answer.status_code == 500
    assert answer.json()["type"].endswith("/internal-error")
    assert "ZeroDivision" not in answer.text
    assert noted == ["answered"]
    assert names(committed.database) == set()


async def test_an_answer_that_cannot_be_written_is_not_committed(client, committed, noted):
    answer = await client.post("/nonsense")
    assert answer.status_code == 500
    assert noted == ["answered"]
    assert names(committed.database) == set()


async def test_a_commit_that_fails_is_not_answered_as_done(client, committed):
    with committed.database.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$"
        )
        connection.exec_driver_sql(
            "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON projects DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
    answer = await client.post("/probe")
    assert answer.status_code == 500
    assert names(committed.database) == set()


def test_what_was_answered_can_be_read_at_once_by_another_connection(committed):
    with Api(committed) as api, committed.database.engine.connect() as connection:
        for number in range(30):
            api.clients["admin"].post("/v1/projects", json={"name": f"p{number}"}).raise_for_status()
            found = connection.exec_driver_sql(f"SELECT 1 FROM projects WHERE name = 'p{number}'").scalar()
            connection.rollback()
            assert found == 1
