"""The index of routes: it finds the route that asking all of them in turn finds, for every address and method."""

import re

import pytest
from starlette.routing import Match, Mount

from registry.api.app import assemble
from registry.api.index import Index

APP = assemble()
ROUTES = [route for route in APP.router.routes if not isinstance(route, Mount)]
PART = "3c3aff2a-0000-7000-8000-000000000000"


def first(routes, scope):
    return next((route for route in routes if route.matches(scope)[0] is Match.FULL), None)


async def served(index, scope, monkeypatch):
    """Return the route that an index hands a request to."""
    met = []

    async def handle(self, *_):
        met.append(self)

    for kind in {type(route) for route in APP.router.routes}:
        monkeypatch.setattr(kind, "handle", handle)
    await index(scope, None, None)
    return met[0]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"])
@pytest.mark.asyncio
async def test_every_address_meets_the_same_route_as_without_the_index(method, monkeypatch):
    index = Index(APP.router)
    found = 0
    for address in sorted({re.sub(r"\{[^}]+\}", PART, route.path) for route in ROUTES}):
        scope = {"type": "http", "method": method, "path": address, "headers": [], "app": APP}
        wanted = first(APP.router.routes, dict(scope))
        if wanted is not None:
            found += 1
            assert await served(index, dict(scope), monkeypatch) is wanted, address
    assert found or method in {"PUT", "PATCH", "DELETE", "HEAD"}


def test_what_may_hold_slashes_comes_after_all_others():
    kinds = [isinstance(route, Mount) or ":" in route.path for route in APP.router.routes]
    assert kinds == sorted(kinds)
