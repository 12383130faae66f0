"""Aliases as a page: which movable names there are, and what they name."""

from urllib.parse import urlencode

from fastapi import APIRouter
from fastapi.responses import Response

from registry import alias_patterns, aliases
from registry.api.deps import SessionDep
from registry.api.pages import Cursor, page
from registry.web.releases import PAGE_SIZE
from registry.web.rendering import PageRoute, render
from registry.web.visitors import VisitorDep

MOVERS = {"ci": "all who propose", "engineer": "engineers", "manager": "managers", "admin": "administrators"}
"""Least role that moves an alias → who that is."""

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/aliases")
def aliases_page(actor: VisitorDep, session: SessionDep, after: Cursor) -> Response:
    """List aliases, newest first."""
    rows = aliases.browse(session, actor.project_id, bundle=None, after=after, limit=PAGE_SIZE + 1)
    found = page(rows, PAGE_SIZE, lambda row: aliases.wire(session, row), lambda row: row.id)
    return render(
        "aliases.html",
        actor=actor,
        section="bundles",
        aliases=found.items,
        patterns=[alias_patterns.wire(row) for row in alias_patterns.every(session, actor.project_id)],
        movers=MOVERS,
        is_first=after is None,
        following=f"/aliases?{urlencode({'cursor': found.next})}" if found.next else None,
    )
