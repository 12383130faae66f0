"""Releases as pages: the list, and one release with its log, gate results and split over time."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response

from registry import cursors, db, documents, evidence, releases, targets
from registry.api.deps import SessionDep
from registry.api.events import EventStream
from registry.api.pages import Cursor, page
from registry.auth import Actor
from registry.cursors import Cursor as LogCursor
from registry.evidence import Selection
from registry.web.canary import panels
from registry.web.chart import split_over_time
from registry.web.notices import notices
from registry.web.rendering import HEADERS, PageRoute, render
from registry.web.visitors import COOKIE, VisitorDep
from schemas.problems import InvalidDocument
from schemas.release import LIVE, TERMINAL, Phase, ReleaseDetail
from schemas.stories import TONES, replaces, served_in, tell

PAGE_SIZE = 25
MOST_TARGETS = 200
"""Targets offered as a filter."""

router = APIRouter(include_in_schema=False, route_class=PageRoute)

ChosenTarget = Annotated[str, Query(max_length=130, pattern=r"^[a-z0-9.@-]*$")]
ChosenPhase = Annotated[str, Query(max_length=20)]


@router.get("/")
def list_page(
    actor: VisitorDep, session: SessionDep, after: Cursor, target: ChosenTarget = "", phase: ChosenPhase = ""
) -> Response:
    """List releases, newest first, of a target and in a phase when chosen. An empty choice chooses everything."""
    source = event_source(session)
    chosen = targets.get(session, actor.project_id, target) if target else None
    if phase and phase not in set(Phase):
        raise InvalidDocument(f"there is no phase {phase}")
    rows = releases.lines(
        session,
        actor.project_id,
        target=chosen.id if chosen else None,
        phases=[phase] if phase else [],
        after=after,
        limit=PAGE_SIZE + 1,
    )
    found = page(rows, PAGE_SIZE, lambda line: line.release.id, lambda line: line.release.id)
    filters = {"target": target, "phase": phase}
    return render(
        "releases.html",
        actor=actor,
        section="releases",
        lines=rows[:PAGE_SIZE],
        targets=[row.name for row in targets.browse(session, actor.project_id, after=None, limit=MOST_TARGETS)],
        phases=list(Phase),
        chosen=filters,
        is_first=after is None,
        following=f"/?{urlencode({**filters, 'cursor': found.next})}" if found.next else None,
        events=source if after is None else None,
        now=db.now(session),
    )


@router.get("/releases")
def list_named(request: Request) -> Response:
    """Lead to the list: each other list has its name for an address, and so this one is looked for here."""
    return RedirectResponse(f"/?{query}" if (query := request.url.query) else "/", status_code=303, headers=HEADERS)


@router.get("/releases/{release}")
def release_page(release: UUID, actor: VisitorDep, session: SessionDep) -> Response:
    """Show a release; the page keeps itself up to date."""
    source = event_source(session, release=str(release))
    found = releases.detail(session, releases.get(session, actor.project_id, release))
    required = documents.load_policy(session, actor.project_id, found.policy).approval.required
    names = documents.names(session, actor.project_id, sorted(served_in(found.log)))
    return render("release.html", events=source, **_view(found, actor, db.now(session), required, names))


@router.get("/events")
def events(
    request: Request,
    actor: VisitorDep,
    release: UUID | None = None,
    run: UUID | None = None,
    target: UUID | None = None,
    after: Annotated[str, Query(max_length=64)] = "",
) -> Response:
    """Tell a page what happens, to whoever has its cookie; `/v1/events` is the same for tokens."""
    told = request.headers.get("last-event-id") or after
    try:
        at = LogCursor.parse(told)
    except ValueError as error:
        raise InvalidDocument(f"after: {error}") from None
    stream = evidence.release_stream(release) if release else f"run/{run}" if run else None
    selection = Selection(stream=stream, target=target)
    return EventStream(request.app, actor.project_id, request.cookies.get(COOKIE, ""), selection, at)


def event_source(session: SessionDep, **selection: str) -> str:
    """Return the address of what happens from now on. Ask for it before the page reads anything else."""
    at = LogCursor.ahead_of(cursors.horizon(session))
    return f"/events?{urlencode({**selection, 'after': str(at)})}"


def _view(found: ReleaseDetail, actor: Actor, now: datetime, required: int, names: Mapping[str, str]) -> dict[str, Any]:
    is_over = found.phase in TERMINAL
    return {
        "release": found,
        "actor": actor,
        "section": "releases",
        "notices": notices(found, required=required),
        "replaces": replaces(found),
        "chart": split_over_time(found.log, now=now, is_over=is_over),
        "panels": panels(found.log),
        "log": [(entry, *tell(entry, names)) for entry in reversed(found.log)],
        "tones": TONES,
        "is_over": is_over,
        "is_live": found.phase in LIVE,
        "now": now,
    }
