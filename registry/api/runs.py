"""Runs over HTTP: gates on a bundle without a release, and recordings of golden references."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query, Response

from registry import cancelling, jobs, releases, runs
from registry.api.deps import IfMatch, OnceDep, PerformDep, ServiceDep, SessionDep, allow
from registry.api.pages import Cursor, Limit, page
from registry.api.problems import declare
from registry.api.routes import Route
from registry.auth import Actor
from schemas.api import Act, Page, RecordCreate, Run, RunCreate
from schemas.problems import (
    BundleQuarantined,
    Conflict,
    InvalidDocument,
    KeyReused,
    NoRunnerFits,
    NotFound,
    ReferenceMissing,
    StaleEdit,
    TransitionRefused,
)

router = APIRouter(prefix="/v1", tags=["runs"], route_class=Route)


@router.post(
    "/runs",
    status_code=201,
    responses=declare(NotFound, InvalidDocument, ReferenceMissing, KeyReused, BundleQuarantined, NoRunnerFits),
    operation_id="createRun",
)
def create_run(
    body: RunCreate,
    actor: Annotated[Actor, allow("create_run")],
    service: ServiceDep,
    session: SessionDep,
    once: OnceDep,
    response: Response,
) -> Run:
    """Run a policy's gates, or some of them, on a bundle, as a recorded act. Nothing is released."""
    made = once(body, Run, lambda: jobs.wire(session, runs.create(session, service, actor, body)))
    response.headers["location"] = f"/v1/runs/{made.id}"
    return made


@router.post(
    "/recordings",
    status_code=201,
    responses=declare(NotFound, InvalidDocument, Conflict, StaleEdit, KeyReused, BundleQuarantined, NoRunnerFits),
    operation_id="createRecording",
)
def create_recording(
    body: RecordCreate,
    actor: Annotated[Actor, allow("set_reference")],
    service: ServiceDep,
    session: SessionDep,
    once: OnceDep,
    response: Response,
    if_match: IfMatch = None,
) -> Run:
    """Have a bundle answer a golden suite; its answers become the target's reference, as a recorded act.

    They take the place of the reference that the caller saw, by `expected` or by `If-Match` with the target's ETag.
    Where another is in force, now or when the answers come, nothing is set.
    """
    made = once(body, Run, lambda: jobs.wire(session, runs.record(session, service, actor, body, if_match=if_match)))
    response.headers["location"] = f"/v1/runs/{made.id}"
    return made


@router.get("/runs", responses=declare(NotFound, InvalidDocument), operation_id="listRuns")
def list_runs(
    actor: Annotated[Actor, allow("read")],
    session: SessionDep,
    after: Cursor,
    release: Annotated[UUID | None, Query(description="Only of this release.")] = None,
    limit: Limit = 50,
) -> Page[Run]:
    """List the project's runs, newest first."""
    if release is not None:
        releases.get(session, actor.project_id, release)
    rows = jobs.browse(session, actor.project_id, release=release, after=after, limit=limit + 1)
    return page(rows, limit, lambda row: jobs.wire(session, row), lambda row: row.id)


@router.get("/runs/{run}", responses=declare(NotFound, InvalidDocument), operation_id="getRun")
def get_run(run: UUID, actor: Annotated[Actor, allow("read")], session: SessionDep) -> Run:
    """Show a run with its progress and gate results."""
    return jobs.wire(session, jobs.get(session, actor.project_id, run))


@router.post(
    "/runs/{run}/cancellations",
    responses=declare(NotFound, InvalidDocument, TransitionRefused),
    operation_id="cancelRun",
)
def cancel_run(
    run: UUID, body: Act, actor: Annotated[Actor, allow("cancel_run")], service: ServiceDep, perform: PerformDep
) -> Run:
    """Cancel a run that belongs to no release. A runner that holds it stops; nothing it measures counts any more."""
    return perform(lambda session: jobs.wire(session, cancelling.cancel(session, service, actor, run, body)))
