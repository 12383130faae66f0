"""Suites as pages: which there are, and of one what it asks and which policies run it."""

from typing import Annotated, Any
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Path
from fastapi.responses import Response
from sqlalchemy.orm import Session

from registry import documents, suites
from registry.api.deps import SessionDep
from registry.api.pages import Cursor, page
from registry.web.releases import PAGE_SIZE
from registry.web.rendering import PageRoute, render
from registry.web.visitors import VisitorDep
from schemas.reference import Reference
from schemas.suite import StructuredSuite
from schemas.words import suite_facts, suite_kind

MOST_ASKED = 200
"""Prompts of a suite on its page; the rest is counted."""
MOST_USES = 100
"""Policies that name a suite on its page."""

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/suites")
def suites_page(actor: VisitorDep, session: SessionDep, after: Cursor) -> Response:
    """List suites, newest first."""
    return render("documents.html", actor=actor, **listed(session, actor.project_id, "suite", after))


def listed(session: Session, project: UUID, kind: str, after: UUID | None) -> dict[str, Any]:
    """Return what a list of policies or suites shows."""
    rows = documents.browse(session, project, kind, names=[], after=after, limit=PAGE_SIZE + 1)
    found = page(rows, PAGE_SIZE, lambda row: row[1], lambda row: row[0])
    address = {"suite": "/suites", "policy": "/policies"}[kind]
    return {
        "section": address[1:],
        "kind": kind,
        "address": address,
        "found": found.items,
        "is_first": after is None,
        "following": f"{address}?{urlencode({'cursor': found.next})}" if found.next else None,
    }


@router.get("/suites/{digest}")
def suite_page(
    digest: Annotated[str, Path(pattern=r"^(sha256:)?[0-9a-f]{8,64}$")], actor: VisitorDep, session: SessionDep
) -> Response:
    """Show a suite: what it asks, which gates of which policies run it, and what was recorded of it."""
    named = documents.resolve(session, actor.project_id, "suite", digest)
    suite = documents.load_suite(session, actor.project_id, named)
    rows = documents.browse(session, actor.project_id, "reference", names=[named], after=None, limit=MOST_USES)
    recorded = [(row.registered, _recorded(session, actor.project_id, row.registered.digest)) for row in rows]
    items = suite.items if isinstance(suite, StructuredSuite) else []
    return render(
        "suite.html",
        actor=actor,
        section="suites",
        suite=suite,
        kind=suite_kind(suite),
        facts=suite_facts(suite),
        registered=documents.get(session, actor.project_id, "suite", named),
        asked=[] if isinstance(suite, StructuredSuite) else suite.prompts[:MOST_ASKED],
        items=items[:MOST_ASKED],
        more=len(items or getattr(suite, "prompts", ())) - MOST_ASKED,
        uses=suites.used_by(session, actor.project_id, named, limit=MOST_USES),
        recorded=recorded,
        names=documents.names(session, actor.project_id, [one.bundle for _, one in recorded]),
    )


def _recorded(session: Session, project: UUID, reference: str) -> Reference:
    return documents.load_reference(session, project, reference)
