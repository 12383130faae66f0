"""What runners say and hear: registration, claims, renewals, reports. Everything is fenced by the lease's token."""

from typing import Annotated
from uuid import UUID

import anyio.to_thread
from fastapi import APIRouter, Path, Query, Request, Response

from registry import blobs, damage, draining, emptying, jobs, runners, runs
from registry.api.blobs import BINARY, BlobDigest
from registry.api.bodies import receive
from registry.api.deps import IfMatch, PerformDep, ServiceDep, SessionDep, allow, tag
from registry.api.documents import RawJson, takes
from registry.api.pages import Cursor, Limit, page
from registry.api.problems import declare
from registry.api.routes import Route
from registry.auth import Actor
from schemas.api import Complete, Page, Progress, Reported, Run, RunnerDetail, RunnerDrain
from schemas.common import MAX_INTEGER, Name, ShortText, Text
from schemas.problems import (
    BundleQuarantined,
    Conflict,
    DigestMismatch,
    InvalidDocument,
    LeaseLost,
    NotFound,
    StaleEdit,
    TooLarge,
    TooSlow,
    TransitionRefused,
    UnsupportedMediaType,
)
from schemas.runner import Claim, Renewal, Report, Runner, RunnerRegistration

router = APIRouter(prefix="/v1", tags=["runners"], route_class=Route)

FencingToken = Annotated[int, Query(ge=0, description="From the claim.")]
BootId = Annotated[
    ShortText | None, Query(description="The host's boot id: where the runner is another machine, it is told.")
]
MOST_RUNS = 20
"""Of a runner that are shown with it."""
MAX_RECORD_BYTES = 512 * 1024 * 1024
HELD = declare(NotFound, InvalidDocument, LeaseLost)


@router.get("/runners", responses=declare(InvalidDocument), operation_id="listRunners")
def list_runners(
    actor: Annotated[Actor, allow("read")], session: SessionDep, after: Cursor, limit: Limit = 50
) -> Page[Runner]:
    """List the project's runners, newest first."""
    rows = runners.browse(session, actor.project_id, after=after, limit=limit + 1)
    return page(rows, limit, lambda row: draining.wire(session, row), lambda row: row.id)


@router.get("/runners/{runner}", responses=declare(NotFound, InvalidDocument), operation_id="getRunner")
def get_runner(
    runner: Annotated[Name, Path(description="Name or identity.")],
    actor: Annotated[Actor, allow("read")],
    session: SessionDep,
    response: Response,
) -> RunnerDetail:
    """Show a runner: what it is, and the newest runs that it holds or held."""
    row = runners.named(session, actor.project_id, runner)
    shown = [jobs.wire(session, job) for job, _ in jobs.of_runner(session, row.id, after=None, limit=MOST_RUNS)]
    told = draining.wire(session, row).model_dump()
    tag(response, told["generation"])
    loses = emptying.losses(session, row)
    return RunnerDetail(**told, registered_at=row.registered_at, runs=shown, loses=loses)


@router.post("/runners", responses=declare(InvalidDocument, Conflict), operation_id="registerRunner")
def register_runner(
    body: RunnerRegistration, actor: Annotated[Actor, allow("run_jobs")], session: SessionDep
) -> Runner:
    """Say who a runner is. Repeating it refreshes what is known, but for another machine while the first one lives."""
    return draining.wire(session, runners.register(session, actor.project_id, body))


@router.post(
    "/runners/{runner}/heartbeats", responses=declare(NotFound, InvalidDocument, Conflict), operation_id="heartbeat"
)
def heartbeat(
    runner: UUID,
    actor: Annotated[Actor, allow("run_jobs")],
    session: SessionDep,
    disk_free_bytes: Annotated[
        int | None, Query(ge=0, le=MAX_INTEGER, description="Disk left where files are staged, in bytes.")
    ] = None,
    boot_id: BootId = None,
) -> Runner:
    """Say that a runner lives."""
    row = runners.heartbeat(session, actor.project_id, runner, disk_free_bytes=disk_free_bytes, boot_id=boot_id)
    return draining.wire(session, row)


RunnerName = Annotated[Name, Path(description="Name or identity.")]


@router.post(
    "/runners/{runner}/drains",
    responses=declare(NotFound, InvalidDocument, Conflict, StaleEdit),
    operation_id="drainRunner",
)
def drain_runner(
    runner: RunnerName,
    body: RunnerDrain,
    actor: Annotated[Actor, allow("drain_runner")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
    if_match: IfMatch = None,
) -> Runner:
    """Have a runner take no job any more, and hand over what serves on it; `drain` says what it waits for.

    With `force_in_seconds` it ends then what it still holds. `loses` of the runner says before what that is.
    What somebody else drains already takes `If-Match` with its ETag.
    """
    done = perform(
        lambda session: draining.wire(session, emptying.drain(session, service, actor, runner, body, if_match=if_match))
    )
    tag(response, done.generation)
    return done


@router.delete(
    "/runners/{runner}/drains", responses=declare(NotFound, InvalidDocument, StaleEdit), operation_id="undrainRunner"
)
def undrain_runner(
    runner: RunnerName,
    actor: Annotated[Actor, allow("drain_runner")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
    reason: Annotated[Text | None, Query(description="Why; kept in evidence.")] = None,
    if_match: IfMatch = None,
) -> Runner:
    """Let a runner take jobs again."""
    done = perform(
        lambda session: draining.wire(
            session, emptying.undrain(session, service, actor, runner, reason, if_match=if_match)
        )
    )
    tag(response, done.generation)
    return done


@router.post(
    "/runners/{runner}/claims",
    responses={204: {"description": "There is nothing to do."}, **declare(NotFound, InvalidDocument, Conflict)},
    response_model=Claim,
    operation_id="claimJob",
)
def claim_job(
    runner: UUID,
    actor: Annotated[Actor, allow("run_jobs")],
    service: ServiceDep,
    session: SessionDep,
    boot_id: BootId = None,
) -> Claim | Response:
    """Take the oldest job that this runner may do."""
    row = runners.heartbeat(session, actor.project_id, runner, boot_id=boot_id)
    claimed = jobs.claim(session, service, row)
    return claimed if claimed is not None else Response(status_code=204)


@router.post("/jobs/{job}/renewals", responses=HELD, operation_id="renewJob")
def renew_job(
    job: UUID, body: Progress, actor: Annotated[Actor, allow("run_jobs")], service: ServiceDep, session: SessionDep
) -> Renewal:
    """Extend a job's lease, and learn whether the job is still wanted."""
    return jobs.renew(session, service, actor.project_id, job, body)


@router.post(
    "/jobs/{job}/reports",
    status_code=201,
    responses=declare(NotFound, InvalidDocument, LeaseLost, TransitionRefused),
    operation_id="reportJob",
)
def report_job(
    job: UUID,
    body: Report,
    actor: Annotated[Actor, allow("run_jobs")],
    service: ServiceDep,
    session: SessionDep,
    response: Response,
) -> Reported:
    """Record what happened in a job, at most once: a known act answers 200 with the entry that stands."""
    digest, is_new = jobs.report(session, service, actor.project_id, job, body)
    response.status_code = 201 if is_new else 200
    return Reported(entry_digest=digest)


@router.post("/jobs/{job}/completions", status_code=204, responses=HELD, operation_id="completeJob")
def complete_job(
    job: UUID, body: Complete, actor: Annotated[Actor, allow("run_jobs")], service: ServiceDep, session: SessionDep
) -> None:
    """End a job, or put it back for another try after a technical problem."""
    jobs.complete(session, service, actor.project_id, job, body)


@router.put(
    "/jobs/{job}/records/{digest}",
    status_code=204,
    responses=declare(NotFound, InvalidDocument, LeaseLost, DigestMismatch, TooLarge, TooSlow),
    openapi_extra={"requestBody": {"required": True, "content": BINARY}},
    operation_id="putRecords",
)
async def put_records(
    job: UUID,
    digest: BlobDigest,
    fencing_token: FencingToken,
    actor: Annotated[Actor, allow("run_jobs")],
    service: ServiceDep,
    request: Request,
) -> None:
    """Send the raw records of a gate, from which its verdict can be recomputed."""

    def held() -> None:
        with service.database.transaction() as session:
            jobs.held(session, actor.project_id, job, fencing_token)

    await anyio.to_thread.run_sync(held)
    await receive(
        request,
        actor,
        service,
        lambda staged: blobs.keep(
            service,
            actor.project_id,
            digest,
            staged,
            is_record=True,
            displaced=lambda: damage.displaced(service, actor, digest),
        ),
        limit=MAX_RECORD_BYTES,
    )


@router.post(
    "/jobs/{job}/references",
    responses=declare(
        NotFound, InvalidDocument, LeaseLost, TooLarge, UnsupportedMediaType, BundleQuarantined, Conflict
    ),
    openapi_extra=takes("Reference"),
    operation_id="postReference",
)
def post_reference(
    job: UUID,
    fencing_token: FencingToken,
    actor: Annotated[Actor, allow("run_jobs")],
    raw: RawJson,
    service: ServiceDep,
    session: SessionDep,
) -> Run:
    """Store the reference that a recording made, and put it in force on the job's target."""
    return jobs.wire(session, runs.store_reference(session, service, actor.project_id, job, fencing_token, raw))
