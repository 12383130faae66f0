"""What the service is, whether it works, what its problems mean, and who asks."""

from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Path, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from registry.api.deps import ActorDep, ServiceDep
from registry.api.problems import declare, declare_open
from registry.api.routes import Route
from registry.brokers import Look
from registry.service import Service
from registry.web.rendering import render
from registry.web.visitors import perhaps
from schemas import VERSION
from schemas.api import Health, Identity, Readiness, Version
from schemas.problems import PROBLEMS, InvalidDocument, NotFound, Unavailable

router = APIRouter(tags=["service"], route_class=Route)
log = structlog.get_logger("registry.api")

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
def get_readiness(service: ServiceDep, request: Request) -> Readiness:
    """Tell that the service can work: its database answers and is migrated. Says what else answers."""
    # By a look, without a place: requests that wait for each other do not make a process unready.
    try:
        with service.database.look() as connection:
            connection.execute(text("SELECT 1 FROM entries LIMIT 1"))
    except ProgrammingError:
        raise Unavailable("the database is not migrated: run `python -m migrations upgrade head`") from None
    broker: Look = request.app.state.broker
    return Readiness(
        status="ready",
        blobs="reachable" if _has_blobs(service) else "unreachable",
        broker="reachable" if broker.is_reachable() else "unreachable",
    )


def _has_blobs(service: Service) -> bool:
    try:
        service.blobs.check()
    except Unavailable as problem:
        log.warning("blob_store_unavailable", error=str(problem))
        return False
    return True


@router.get("/v1/me", operation_id="getIdentity", responses=declare())
def get_identity(actor: ActorDep) -> Identity:
    """Name the holder of the token."""
    targets = None if actor.targets is None else sorted(actor.targets)
    return Identity(
        project=actor.project, name=actor.name, role=actor.role, targets=targets, expires_at=actor.expires_at
    )


@router.get(
    "/problems/{kind}",
    openapi_extra=OPEN,
    operation_id="getProblem",
    responses=declare_open(InvalidDocument, NotFound),
    response_class=HTMLResponse,
)
def get_problem(
    kind: Annotated[str, Path(max_length=63, description="Kind of problem.")], service: ServiceDep, request: Request
) -> HTMLResponse:
    """Explain a kind of problem to a person: this is where a problem's `type` leads."""
    problem = PROBLEMS.get(kind)
    if problem is None:
        raise NotFound(f"there is no kind of problem {kind}")
    return render(
        "kind.html",
        actor=perhaps(service, request),
        problem=problem,
        text=" ".join((problem.__doc__ or "").split()),
        others=list(PROBLEMS.values()),
    )
