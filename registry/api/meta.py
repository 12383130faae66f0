"""What the service is, whether it works, what its problems mean, and who asks."""

from html import escape
from typing import Annotated, Any

from fastapi import APIRouter, Path
from fastapi.responses import HTMLResponse
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from registry.api.deps import ActorDep, SessionDep
from registry.api.problems import declare, declare_open
from schemas import VERSION
from schemas.api import Health, Identity, Version
from schemas.problems import PROBLEMS, InvalidDocument, NotFound, Unavailable

router = APIRouter(tags=["service"])

OPEN: dict[str, Any] = {"security": []}
"""For OpenAPI: this route asks for no token."""


@router.get("/v1/version", operation_id="getVersion", responses=declare_open(), openapi_extra=OPEN)
def get_version() -> Version:
    """Name the software and the version of the interface."""
    return Version(name="sluicegate", version=VERSION, interface="v1")


@router.get("/healthz", operation_id="getHealth", responses=declare_open(), openapi_extra=OPEN)
def get_health() -> Health:
    """Tell that the process answers."""
    return Health(status="alive")


@router.get("/readyz", operation_id="getReadiness", responses=declare_open(), openapi_extra=OPEN)
def get_readiness(session: SessionDep) -> Health:
    """Tell that the service can work: its database answers and is migrated."""
    try:
        session.execute(text("SELECT 1 FROM entries LIMIT 1"))
    except ProgrammingError:
        raise Unavailable("the database is not migrated: run `python -m migrations upgrade head`") from None
    return Health(status="ready")


@router.get("/v1/me", operation_id="getIdentity", responses=declare())
def get_identity(actor: ActorDep) -> Identity:
    """Name the holder of the token."""
    targets = None if actor.targets is None else sorted(actor.targets)
    return Identity(project=actor.project, name=actor.name, role=actor.role, targets=targets)


PROBLEM_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>
<body><main><h1>{title}</h1><p>{text}</p>
<dl><dt>Kind</dt><dd><code>{kind}</code></dd><dt>HTTP status</dt><dd>{status}</dd>
<dt>Try again?</dt><dd>{retry}</dd></dl></main></body></html>
"""


@router.get(
    "/problems/{kind}",
    openapi_extra=OPEN,
    operation_id="getProblem",
    responses=declare_open(InvalidDocument, NotFound),
    response_class=HTMLResponse,
)
def get_problem(kind: Annotated[str, Path(max_length=63, description="Kind of problem.")]) -> HTMLResponse:
    """Explain a kind of problem to a person: this is where a problem's `type` leads."""
    problem = PROBLEMS.get(kind)
    if problem is None:
        raise NotFound(f"there is no kind of problem {kind}")
    page = PROBLEM_PAGE.format(
        title=escape(problem.title),
        text=escape(" ".join((problem.__doc__ or "").split())),
        kind=escape(problem.kind),
        status=problem.status,
        retry="Yes, after a pause." if problem.retryable else "No: change something first.",
    )
    return HTMLResponse(page, headers={"cache-control": "public, max-age=3600"})
