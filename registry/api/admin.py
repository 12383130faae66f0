"""Projects and tokens."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Path, Query, Response

from registry import auth, db, projects, quotas, tokens
from registry.api.deps import IfMatch, OnceDep, ServiceDep, SessionDep, allow, tag
from registry.api.pages import Cursor, Limit, page
from registry.api.problems import declare
from registry.api.routes import Route
from registry.auth import Actor
from schemas.api import (
    Act,
    EndedToken,
    LimitsSet,
    Page,
    Project,
    ProjectCreate,
    ProjectUsage,
    Token,
    TokenCreate,
    TokenCreated,
)
from schemas.common import Name
from schemas.problems import Conflict, InvalidDocument, KeyReused, NotFound, StaleEdit

router = APIRouter(tags=["administration"], route_class=Route)

ProjectName = Annotated[Name, Path(description="Name of the project.")]
AdminDep = Annotated[Actor, allow("administer")]


@router.post(
    "/v1/projects", operation_id="createProject", status_code=201, responses=declare(InvalidDocument, Conflict)
)
def create_project(body: ProjectCreate, actor: AdminDep, session: SessionDep, service: ServiceDep) -> Project:
    """Make a project. For administrators of the installation: those of the project `default`."""
    projects.require_installation(actor)
    auth.confirm(session, actor)
    return projects.wire(projects.create(session, service, body.name, by=actor.name))


@router.get("/v1/projects", operation_id="listProjects", responses=declare(InvalidDocument))
def list_projects(actor: AdminDep, session: SessionDep, cursor: Cursor, limit: Limit = 50) -> Page[Project]:
    """List the projects that the caller administers."""
    rows = projects.browse(session, actor, after=cursor, limit=limit + 1)
    return page(rows, limit, projects.wire, lambda row: row.id)


@router.get("/v1/projects/{project}", operation_id="getProject", responses=declare(InvalidDocument, NotFound))
def get_project(
    project: ProjectName,
    actor: Annotated[Actor, allow("read")],
    session: SessionDep,
    service: ServiceDep,
    response: Response,
) -> ProjectUsage:
    """Show what a project holds, and how much it may."""
    found = quotas.shown(session, service.settings, projects.seen(session, actor, project))
    tag(response, found.generation)
    return found


@router.post(
    "/v1/projects/{project}/limits",
    operation_id="setLimits",
    responses=declare(InvalidDocument, NotFound, StaleEdit),
)
def set_limits(
    project: ProjectName,
    body: LimitsSet,
    actor: AdminDep,
    session: SessionDep,
    service: ServiceDep,
    response: Response,
    if_match: IfMatch = None,
) -> ProjectUsage:
    """Set what a project may hold. For administrators of the installation."""
    row = projects.set_limits(session, service, actor, project, body, if_match=if_match)
    done = quotas.shown(session, service.settings, row)
    tag(response, done.generation)
    return done


@router.post(
    "/v1/tokens",
    operation_id="createToken",
    status_code=201,
    responses=declare(InvalidDocument, NotFound, Conflict, KeyReused),
)
def create_token(
    body: TokenCreate, actor: AdminDep, session: SessionDep, service: ServiceDep, once: OnceDep
) -> TokenCreated:
    """Make a token. Its secret is in this answer and nowhere else. It ends no later than the caller's own."""

    def make() -> TokenCreated:
        project = projects.administered(session, actor, body.project)
        auth.hold_project(session, project.id)
        auth.require_no_longer(auth.confirm(session, actor), body.expires_at)
        return auth.create_token(
            session,
            service,
            project,
            body.name,
            body.role,
            by=actor.name,
            now=db.now(session),
            expires_at=body.expires_at,
            targets=body.targets,
            made_by=actor.token,
        )

    return once(body, TokenCreated, make)


@router.get("/v1/tokens", operation_id="listTokens", responses=declare(InvalidDocument, NotFound))
def list_tokens(
    actor: Annotated[Actor, allow("list_tokens")],
    session: SessionDep,
    cursor: Cursor,
    project: Annotated[Name | None, Query(description="Of this project; the caller's own when absent.")] = None,
    limit: Limit = 50,
) -> Page[Token]:
    """List a project's tokens, newest first, also those that count no more. Secrets are not kept and not shown."""
    of = projects.administered(session, actor, project)
    rows = tokens.browse(session, of.id, after=cursor, limit=limit + 1)
    return page(rows, limit, lambda row: tokens.wire(session, row), lambda row: row.id)


@router.post(
    "/v1/tokens/{token}/revocations",
    operation_id="revokeToken",
    responses=declare(InvalidDocument, NotFound, Conflict),
)
def revoke_token(token: UUID, body: Act, actor: AdminDep, session: SessionDep, service: ServiceDep) -> EndedToken:
    """End a token now, as a recorded act. Doing it twice changes nothing; the last administrator's stays.

    `made` says which tokens it made that count on.
    """
    row = tokens.revoke(session, service, actor, token, body)
    made = [tokens.wire(session, one) for one in tokens.made_by(session, actor, row.id)]
    return EndedToken(**tokens.wire(session, row).model_dump(), made=made)
