"""The HTTP application: routers, middleware, problems and the OpenAPI document."""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import anyio
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from registry.api import (
    admin,
    aliases,
    blobs,
    boots,
    comparison,
    documents,
    events,
    evidence,
    meta,
    metrics,
    problems,
    releases,
    runners,
    runs,
    targets,
    uploads,
)
from registry.api.bell import Bell
from registry.api.bodies import Bodies
from registry.api.index import Index
from registry.api.middleware import BodyLimit, Edge
from registry.api.rates import Rates
from registry.api.readings import SHARE, Readings
from registry.brokers import Look
from registry.service import Service
from registry.web import pages, rendering
from schemas import VERSION
from schemas.bundle import Bundle
from schemas.lock import BundleRegistration
from schemas.policy import Policy
from schemas.reference import Reference
from schemas.suite import GoldenSuite, LoadSuite, StructuredSuite

ROUTERS = (
    meta.router,
    admin.router,
    blobs.router,
    uploads.router,
    documents.router,
    comparison.router,
    boots.router,
    aliases.router,
    aliases.patterns,
    targets.router,
    releases.router,
    runs.router,
    runners.router,
    evidence.router,
    events.router,
    metrics.router,
    pages.router,
)
TITLE = "Sluicegate"
SUMMARY = "A registry of immutable serving bundles and a release gate for LLM serving."
KEPT_FOR_READERS = 2
"""Places of a process that requests which change something do not take, where it has more."""
REF = "#/components/schemas/{model}"
COMPONENTS: tuple[Any, ...] = (
    problems.ProblemBody,
    Bundle,
    BundleRegistration,
    Policy,
    GoldenSuite,
    LoadSuite,
    StructuredSuite,
    Reference,
)
"""Models that routes name in their own words, because they read raw bytes or answer problems."""


def create_app(service: Service, *, board: metrics.Board | None = None, place: int = 0) -> FastAPI:
    """Return the application that serves with these parts. It gives the parts back when it shuts down.

    Of several processes each has its `place` on one `board`.
    """
    app = assemble()
    app.state.service = service
    # The pool may grow to twice this; see `deps.SessionDep`.
    pool = service.settings.database_pool
    app.state.places = anyio.CapacityLimiter(pool)
    # Whoever changes something may wait for somebody else's lock: readers, who wait for nobody, have places left.
    app.state.changes = anyio.CapacityLimiter(max(1, pool - KEPT_FOR_READERS))
    app.state.rates = Rates(service.settings.requests_per_second, service.settings.requests_burst)
    app.state.bodies = Bodies(service.settings.body_places)
    app.state.checks = Readings("reading a blob again", share=SHARE)
    app.state.verifications = Readings("verifying evidence")
    app.state.requests = metrics.Requests((route.path for route in _routes(ROUTERS)), board or metrics.Board(), place)
    app.state.broker = Look(service.settings.broker_url.get_secret_value(), service.settings.broker_ca)
    app.state.bell = Bell(service.database.engine.url)
    app.state.lookers = anyio.CapacityLimiter(events.LOOKERS)
    app.add_middleware(BodyLimit)
    app.add_middleware(Edge)
    return app


def assemble() -> FastAPI:
    """Return the application without parts: enough to describe it, not to serve."""
    app = FastAPI(
        title=TITLE,
        version=VERSION,
        summary=SUMMARY,
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
    )
    problems.install(app, rendering.refused)
    # As they are, since each says all about itself: a router that is included looks for its routes anew each time.
    app.router.routes.extend(_routes(ROUTERS))
    app.mount("/static", pages.static)
    app.router.middleware_stack = Index(app.router)
    app.openapi = describe  # type: ignore[method-assign] # FastAPI's documented way to extend it
    return app


def _routes(routers: Iterable[Any]) -> Iterator[Any]:
    """Yield every route, also of those that a router includes."""
    for router in routers:
        for route in router.routes:
            inner = getattr(route, "original_router", None)
            yield from [route] if inner is None else _routes([inner])


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with app.state.bell:
        yield
    await anyio.to_thread.run_sync(app.state.service.close)


@cache
def describe() -> dict[str, Any]:
    """Return the OpenAPI document, with the models that routes name themselves. It is made once in a process.

    Raises:
        ValueError: two models share a name and differ.
    """
    document = get_openapi(title=TITLE, version=VERSION, summary=SUMMARY, routes=list(_routes(ROUTERS)))
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    for model in COMPONENTS:
        _add(document["components"]["schemas"], model)
    return document


def _add(schemas: dict[str, Any], model: Any) -> None:
    schema = TypeAdapter(model).json_schema(ref_template=REF, by_alias=True)
    for name, definition in (*schema.pop("$defs", {}).items(), (schema["title"], schema)):
        if schemas.setdefault(name, definition) != definition:
            raise ValueError(f"two models are called {name}")
