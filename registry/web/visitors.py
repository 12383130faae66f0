"""Who looks at the pages: log in, log out, and the cookie between."""

from typing import Annotated
from urllib.parse import parse_qs

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from registry import auth
from registry.api.deps import ServiceDep, identify
from registry.api.routes import Given
from registry.auth import Actor
from registry.service import Service
from registry.web.rendering import HEADERS, LoginNeededError, PageRoute, render
from schemas.problems import Problem

COOKIE = "sluicegate_session"
SESSION_SECONDS = 12 * 3600

router = APIRouter(include_in_schema=False, route_class=PageRoute)


def visitor(service: Service, request: Request) -> Actor:
    """Return who is logged in. Raises LoginNeededError."""
    try:
        actor = identify(service, request.cookies.get(COOKIE, ""))
        auth.require(actor, "read")
    except Problem:
        raise LoginNeededError from None
    request.state.visitor = actor
    return actor


def perhaps(service: Service, request: Request) -> Actor | None:
    """Return who is logged in, or None: for pages that anybody may read, also while the database is away."""
    if COOKIE not in request.cookies:
        return None
    try:
        return visitor(service, request)
    except (LoginNeededError, DBAPIError, PoolTimeout):
        return None


VisitorDep = Annotated[Actor, Given(lambda exchange: visitor(exchange.service, exchange.request), is_gate=True)]


@router.get("/login")
def login_form(next: str = "/") -> HTMLResponse:  # noqa: A002 - the field's name in the address
    """Ask for a token."""
    return render("login.html", section="login", next=_local(next), problem=None)


@router.post("/login")
async def login(request: Request, service: ServiceDep) -> Response:
    """Take a token and keep it in a cookie that scripts cannot read."""
    fields = parse_qs((await request.body())[:8192].decode("utf-8", "replace"))
    token, onward = fields.get("token", [""])[0].strip(), _local(fields.get("next", ["/"])[0])
    try:
        # Not in the event loop: while the database does not answer, it would answer nobody.
        auth.require(await anyio.to_thread.run_sync(identify, service, token), "read")
    except Problem as problem:
        return render("login.html", status=401, section="login", next=onward, problem=problem.detail)
    response = RedirectResponse(onward, status_code=303, headers=HEADERS)
    is_secure = service.settings.public_url.startswith("https:")
    response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=is_secure, max_age=SESSION_SECONDS)
    return response


@router.post("/logout")
def logout(service: ServiceDep) -> Response:
    """Forget the token. The cookie is for this site's own forms only, so that no other can log a visitor out."""
    response = RedirectResponse("/login", status_code=303, headers=HEADERS)
    is_secure = service.settings.public_url.startswith("https:")
    response.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=is_secure)
    return response


def _local(address: str) -> str:
    """Return a path on this service: a login never sends its visitor elsewhere."""
    return address if address.startswith("/") and not address.startswith(("//", "/\\")) else "/"
