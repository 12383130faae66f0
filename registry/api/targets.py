"""Targets over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from registry import history, targets
from registry.api.deps import OnceDep, ServiceDep, SessionDep, allow, tag
from registry.api.pages import Cursor, Limit, page
from registry.api.problems import declare
from registry.api.routes import Route
from registry.auth import Actor
from schemas.api import Page, TargetCreate, TargetName
from schemas.common import Instant
from schemas.problems import Conflict, InvalidDocument, KeyReused, NotFound
from schemas.release import ServedAt, Target, TargetChange

router = APIRouter(prefix="/v1/targets", tags=["targets"], route_class=Route)


@router.post("", status_code=201, responses=declare(Conflict, InvalidDocument, KeyReused), operation_id="createTarget")
def create_target(
    body: TargetCreate,
    actor: Annotated[Actor, allow("create_target")],
    service: ServiceDep,
    session: SessionDep,
    once: OnceDep,
) -> Target:
    """Make a target: one served name in one environment."""
    return once(body, Target, lambda: targets.wire(session, service, targets.create(session, service, actor, body)))


@router.get("", responses=declare(InvalidDocument), operation_id="listTargets")
def list_targets(
    actor: Annotated[Actor, allow("read")],
    service: ServiceDep,
    session: SessionDep,
    after: Cursor,
    limit: Limit = 50,
) -> Page[Target]:
    """List the project's targets, newest first."""
    rows = targets.browse(session, actor.project_id, after=after, limit=limit + 1)
    return page(rows, limit, lambda row: targets.wire(session, service, row), lambda row: row.id)


@router.get("/{name}", responses=declare(NotFound, InvalidDocument), operation_id="getTarget")
def get_target(
    name: TargetName,
    actor: Annotated[Actor, allow("read")],
    service: ServiceDep,
    session: SessionDep,
    response: Response,
) -> Target:
    """Show a target with its live and candidate release, references, split and replicas."""
    found = targets.wire(session, service, targets.get(session, actor.project_id, name))
    tag(response, found.generation)
    return found


@router.get("/{name}/history", responses=declare(NotFound, InvalidDocument), operation_id="getTargetHistory")
def get_target_history(
    name: TargetName, actor: Annotated[Actor, allow("read")], session: SessionDep, after: Cursor, limit: Limit = 50
) -> Page[TargetChange]:
    """List what changed in what a target serves, newest first, as its evidence has it."""
    target = targets.get(session, actor.project_id, name)
    rows = history.browse(session, target, after=after, limit=limit + 1)
    return page(rows, limit, lambda row: history.wire(session, row), lambda row: row.id)


@router.get("/{name}/served", responses=declare(NotFound, InvalidDocument), operation_id="getServedAt")
def get_served_at(
    name: TargetName,
    actor: Annotated[Actor, allow("read")],
    session: SessionDep,
    at: Annotated[Instant, Query(description="RFC 3339 with an offset, such as 2026-11-03T14:03:00Z; not to come.")],
) -> ServedAt:
    """Say what a target served at an instant, computed from its evidence."""
    return history.served_at(session, targets.get(session, actor.project_id, name), at)
