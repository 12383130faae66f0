"""The log of everything as a page, and the search over all pages."""

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query
from fastapi.responses import RedirectResponse, Response

from registry import db, documents, evidence, journal, searching, targets
from registry.api.deps import SessionDep
from registry.cursors import Cursor
from registry.web.releases import MOST_TARGETS, ChosenTarget, event_source
from registry.web.rendering import HEADERS, PageRoute, render
from registry.web.visitors import VisitorDep
from schemas.evidence import Kind
from schemas.problems import InvalidDocument
from schemas.stories import served_in, tell

PAGE_SIZE = 50

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/log")
def log_page(
    actor: VisitorDep,
    session: SessionDep,
    *,
    after: Annotated[str, Query(max_length=64)] = "",
    kind: Annotated[str, Query(max_length=40)] = "",
    target: ChosenTarget = "",
    by: Annotated[str, Query(max_length=200, alias="actor")] = "",
) -> Response:
    """Show what happened in the project, newest first, of a kind, a target and an actor when chosen."""
    source = event_source(session)
    if kind and kind not in set(Kind):
        raise InvalidDocument(f"there is no kind {kind}")
    try:
        seen = Cursor.parse(after) if after else None
    except ValueError as error:
        raise InvalidDocument(f"after: {error}") from None
    chosen = targets.get(session, actor.project_id, target).id if target else None
    found = journal.newest(
        session, actor.project_id, kind=kind or None, target=chosen, actor=by.strip() or None, after=seen,
        limit=PAGE_SIZE,
    )  # fmt: skip
    entries = [evidence.wire(row) for row in found.rows]
    names = documents.names(session, actor.project_id, sorted(served_in(entries)))
    filters = {name: value for name, value in (("kind", kind), ("target", target), ("actor", by.strip())) if value}
    return render(
        "log.html",
        actor=actor,
        section="log",
        log=[(entry, *entry.stream.split("/", 1), *tell(entry, names)) for entry in entries],
        kinds=list(Kind),
        targets=[row.name for row in targets.browse(session, actor.project_id, after=None, limit=MOST_TARGETS)],
        chosen={"kind": kind, "target": target, "actor": by.strip()},
        first=f"/log?{urlencode(filters)}",
        is_first=seen is None,
        following=f"/log?{urlencode({**filters, 'after': str(found.following)})}" if found.following else None,
        events=source if seen is None else None,
        now=db.now(session),
    )


@router.get("/search")
def search_page(
    actor: VisitorDep, session: SessionDep, q: Annotated[str, Query(max_length=searching.LONGEST)] = ""
) -> Response:
    """Go to what is named, or list all that may be meant."""
    hits = searching.search(session, actor, q)
    if len(hits) == 1:
        return RedirectResponse(hits[0].address, status_code=303, headers=HEADERS)
    return render("search.html", actor=actor, asked=q.strip(), hits=hits, most=searching.MOST_HITS)
