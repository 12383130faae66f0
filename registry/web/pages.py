"""The pages: log in, and one release with its live log, gate results and split over time."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs
from uuid import UUID

from fastapi import APIRouter, Cookie, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from registry import auth, db, releases
from registry.api.deps import ServiceDep, SessionDep, identify
from registry.auth import Actor
from registry.web.chart import split_over_time
from schemas.problems import NotFound, Problem, Unauthenticated
from schemas.release import LIVE, TERMINAL, Phase, ReleaseDetail
from schemas.stories import TONES, tell

COOKIE = "sluicegate_session"
PHASE_TONES = {
    Phase.PROMOTED: "good",
    Phase.REJECTED: "bad",
    Phase.ROLLED_BACK: "bad",
    Phase.CANARY: "warn",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}

_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=select_autoescape(default=True, default_for_string=True),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
static = StaticFiles(directory=Path(__file__).parent / "static")
router = APIRouter(include_in_schema=False)


def _render(name: str, status: int = 200, **values: Any) -> HTMLResponse:
    return HTMLResponse(_templates.get_template(name).render(**values), status_code=status, headers=HEADERS)


def _visitor(service: ServiceDep, sluicegate_session: Annotated[str | None, Cookie()] = None) -> Iterator[Actor | None]:
    """Yield who is logged in, or None: a page then sends its visitor to the form."""
    actor = None
    if sluicegate_session:
        try:
            actor = identify(service, sluicegate_session)
            auth.require(actor, "read")
        except Problem:
            actor = None
    yield actor


VisitorDep = Annotated[Actor | None, Depends(_visitor)]


def _to_login(request: Request) -> RedirectResponse:
    return RedirectResponse(f"/login?next={request.url.path}", status_code=303, headers=HEADERS)


@router.get("/login")
def login_form(next: str = "/") -> HTMLResponse:  # noqa: A002 - the field's name in the address
    """Ask for a token."""
    return _render("login.html", next=_local(next), problem=None)


@router.post("/login")
async def login(request: Request, service: ServiceDep) -> Response:
    """Take a token and keep it in a cookie that scripts cannot read."""
    fields = parse_qs((await request.body())[:8192].decode("utf-8", "replace"))
    token, onward = fields.get("token", [""])[0].strip(), _local(fields.get("next", ["/"])[0])
    try:
        auth.require(identify(service, token), "read")
    except Problem as problem:
        return _render("login.html", status=401, next=onward, problem=problem.detail)
    response = RedirectResponse(onward, status_code=303, headers=HEADERS)
    is_secure = service.settings.public_url.startswith("https:")
    response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=is_secure, max_age=12 * 3600)
    return response


def _local(address: str) -> str:
    """Return a path on this service: a login never sends its visitor elsewhere."""
    return address if address.startswith("/") and not address.startswith(("//", "/\\")) else "/"


@router.get("/releases/{release}")
def release_page(release: UUID, request: Request, actor: VisitorDep, session: SessionDep) -> Response:
    """Show a release; the page keeps itself up to date."""
    if actor is None:
        return _to_login(request)
    try:
        found = releases.detail(session, releases.get(session, actor.project_id, release))
    except NotFound as problem:
        return _render("problem.html", status=404, title=problem.title, detail=problem.detail)
    return _render("release.html", **_view(found, actor, db.now(session)))


@router.get("/releases/{release}/live")
def release_fragment(release: UUID, actor: VisitorDep, session: SessionDep) -> Response:
    """Return the part of a release's page that changes."""
    if actor is None:
        raise Unauthenticated("log in again")
    found = releases.detail(session, releases.get(session, actor.project_id, release))
    return _render("release_live.html", **_view(found, actor, db.now(session)))


def _view(found: ReleaseDetail, actor: Actor, now: datetime) -> dict[str, Any]:
    is_over = found.phase in TERMINAL
    return {
        "release": found,
        "actor": actor,
        "chart": split_over_time(found.log, now=now, is_over=is_over),
        "log": [(entry, *tell(entry)) for entry in reversed(found.log)],
        "tone": PHASE_TONES.get(found.phase, "plain"),
        "tones": TONES,
        "is_over": is_over,
        "is_live": found.phase in LIVE,
        "now": now,
    }
