"""Releases over HTTP: start them, watch them, and the acts of people on them."""

from collections.abc import Callable
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Query, Response
from sqlalchemy.orm import Session

from registry import approvals, releases, targets
from registry.api.deps import IfMatch, OnceDep, Perform, PerformDep, ServiceDep, SessionDep, allow, tag
from registry.api.pages import Cursor, Limit, page
from registry.api.problems import declare
from registry.api.routes import Route
from registry.auth import Actor
from registry.tables import ReleaseRow
from schemas.api import Act, Approve, Page, ReleaseCreate, RollBack, TargetName, Withdraw
from schemas.common import Digest
from schemas.problems import (
    BundleQuarantined,
    Conflict,
    InvalidDocument,
    KeyReused,
    NoRunnerFits,
    NotEligible,
    NotFound,
    ReferenceMissing,
    StaleEdit,
    TransitionRefused,
)
from schemas.release import Phase, Release, ReleaseDetail

router = APIRouter(prefix="/v1/releases", tags=["releases"], route_class=Route)

ACT = declare(NotFound, InvalidDocument, TransitionRefused, StaleEdit)


@router.post(
    "",
    status_code=201,
    responses=declare(
        NotFound, InvalidDocument, ReferenceMissing, Conflict, KeyReused, StaleEdit, BundleQuarantined, NoRunnerFits
    ),
    operation_id="createRelease",
)
def create_release(
    body: ReleaseCreate,
    actor: Annotated[Actor, allow("create_release")],
    service: ServiceDep,
    session: SessionDep,
    once: OnceDep,
    response: Response,
    if_match: IfMatch = None,
) -> Release:
    """Start an attempt to take a bundle live on a target. Everything it will be judged by is frozen now.

    `If-Match` takes the target's ETag.
    """

    def make() -> Release:
        return releases.wire(session, releases.create(session, service, actor, body, if_match=if_match))

    made = once(body, Release, make)
    response.headers["location"] = f"/v1/releases/{made.id}"
    return made


@router.get("", responses=declare(NotFound, InvalidDocument), operation_id="listReleases")
def list_releases(
    actor: Annotated[Actor, allow("read")],
    session: SessionDep,
    after: Cursor,
    target: Annotated[TargetName | None, Query(description="Only of this target.")] = None,
    phase: Annotated[list[Phase] | None, Query(description="Only in these phases.")] = None,
    bundle: Annotated[Digest | None, Query(description="Only of this bundle.")] = None,
    limit: Limit = 50,
) -> Page[Release]:
    """List the project's releases, newest first."""
    of = targets.get(session, actor.project_id, target).id if target else None
    rows = releases.browse(
        session, actor.project_id, target=of, phases=phase or [], bundle=bundle, after=after, limit=limit + 1
    )
    return page(rows, limit, lambda row: releases.wire(session, row), lambda row: row.id)


@router.get("/{release}", responses=declare(NotFound, InvalidDocument), operation_id="getRelease")
def get_release(
    release: UUID, actor: Annotated[Actor, allow("read")], session: SessionDep, response: Response
) -> ReleaseDetail:
    """Show a release with its gates, split and log."""
    found = releases.detail(session, releases.get(session, actor.project_id, release))
    tag(response, found.version)
    return found


def _done(perform: Perform, response: Response, act: Callable[[Session], ReleaseRow]) -> Release:
    """Do an act, and tell what the release is after it."""
    found = perform(lambda session: releases.wire(session, act(session)))
    tag(response, found.version)
    return found


@router.post(
    "/{release}/approvals",
    responses=declare(NotFound, InvalidDocument, NotEligible, BundleQuarantined, TransitionRefused, StaleEdit),
    operation_id="approveRelease",
)
def approve_release(
    release: UUID,
    body: Approve,
    actor: Annotated[Actor, allow("approve")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
    if_match: IfMatch = None,
) -> Release:
    """Approve a gated release, and accept the warnings of its gates that are named."""
    done = _done(
        perform,
        response,
        lambda session: approvals.approve(session, service, actor, release, body, if_match=if_match),
    )
    if done.phase is not Phase.GATED or service.signer.is_quick:
        return done
    return _done(perform, response, lambda session: approvals.look(session, service, release))


@router.post(
    "/{release}/withdrawals",
    responses=declare(NotFound, InvalidDocument, Conflict, TransitionRefused, StaleEdit),
    operation_id="withdrawApproval",
)
def withdraw_approval(
    release: UUID,
    body: Withdraw,
    actor: Annotated[Actor, allow("approve")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
    if_match: IfMatch = None,
) -> Release:
    """Take an approval back while the release has no traffic: it waits for approval again."""
    return _done(
        perform,
        response,
        lambda session: approvals.withdraw(session, service, actor, release, body, if_match=if_match),
    )


@router.post("/{release}/rejections", responses=ACT, operation_id="rejectRelease")
def reject_release(
    release: UUID,
    body: Act,
    actor: Annotated[Actor, allow("reject")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
    if_match: IfMatch = None,
) -> Release:
    """Reject a release that has no traffic yet."""
    return _done(
        perform,
        response,
        lambda session: releases.reject(session, service, actor, release, body, if_match=if_match),
    )


@router.post("/{release}/pauses", responses=ACT, operation_id="pauseRelease")
def pause_release(
    release: UUID,
    body: Act,
    actor: Annotated[Actor, allow("pause")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
    if_match: IfMatch = None,
) -> Release:
    """Stop a release from moving on; stop conditions stay armed."""
    return _done(
        perform,
        response,
        lambda session: releases.pause(session, service, actor, release, body, if_match=if_match),
    )


@router.post("/{release}/resumptions", responses=ACT, operation_id="resumeRelease")
def resume_release(
    release: UUID,
    body: Act,
    actor: Annotated[Actor, allow("resume")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
    if_match: IfMatch = None,
) -> Release:
    """Let a paused release go on, or a held one try again."""
    return _done(
        perform,
        response,
        lambda session: releases.resume(session, service, actor, release, body, if_match=if_match),
    )


@router.post(
    "/{release}/promotions",
    responses=declare(
        NotFound, InvalidDocument, NotEligible, BundleQuarantined, TransitionRefused, Conflict, StaleEdit
    ),
    operation_id="promoteRelease",
)
def promote_release(
    release: UUID,
    body: Act,
    actor: Annotated[Actor, allow("promote")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
    if_match: IfMatch = None,
) -> Release:
    """Ask that the remaining canary steps be skipped."""
    return _done(
        perform,
        response,
        lambda session: releases.promote(session, service, actor, release, body, if_match=if_match),
    )


@router.post(
    "/{release}/rollbacks",
    responses=declare(NotFound, InvalidDocument, Conflict, TransitionRefused, StaleEdit),
    operation_id="rollBackRelease",
)
def roll_back_release(
    release: UUID,
    body: RollBack,
    actor: Annotated[Actor, allow("rollback")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
    if_match: IfMatch = None,
) -> Release:
    """Ask that all traffic be taken back from a release."""
    return _done(
        perform,
        response,
        lambda session: releases.rollback(session, service, actor, release, body, if_match=if_match),
    )
