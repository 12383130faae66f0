"""Projects and tokens."""

from typing import Annotated

from fastapi import APIRouter

from registry import auth, db, projects
from registry.api.deps import ServiceDep, SessionDep, allow
from registry.api.pages import Cursor, Limit, page
from registry.api.problems import declare
from registry.auth import Actor
from schemas.api import Page, Project, ProjectCreate, TokenCreate, TokenCreated
from schemas.problems import Conflict, InvalidDocument, NotFound

router = APIRouter(tags=["administration"])

AdminDep = Annotated[Actor, allow("administer")]


@router.post(
    "/v1/projects", operation_id="createProject", status_code=201, responses=declare(InvalidDocument, Conflict)
)
def create_project(body: ProjectCreate, actor: AdminDep, session: SessionDep) -> Project:
    """Make a project. For administrators of the installation: those of the project `default`."""
    projects.require_installation(actor)
    return projects.wire(projects.create(session, body.name))


@router.get("/v1/projects", operation_id="listProjects", responses=declare(InvalidDocument))
def list_projects(actor: AdminDep, session: SessionDep, cursor: Cursor, limit: Limit = 50) -> Page[Project]:
    """List the projects that the caller administers."""
    rows = projects.browse(session, actor, after=cursor, limit=limit + 1)
    return page(rows, limit, projects.wire, lambda row: row.id)


@router.post(
    "/v1/tokens", operation_id="createToken", status_code=201, responses=declare(InvalidDocument, NotFound, Conflict)
)
def create_token(body: TokenCreate, actor: AdminDep, session: SessionDep, service: ServiceDep) -> TokenCreated:
    """Make a token. Its secret is in this answer and nowhere else."""
    project = projects.administered(session, actor, body.project)
    return auth.create_token(
        session,
        service,
        project,
        body.name,
        body.role,
        by=actor.name,
        now=db.now(session),
        expires_at=body.expires_at,
    )
