"""Blobs: ask what is missing, send it, read it back. Bytes are verified while they arrive."""

from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Path, Request, Response
from starlette.responses import StreamingResponse

from registry import blobs, collection, damage, projects
from registry.api.bodies import CHUNK_BYTES, announced, receive
from registry.api.deps import ServiceDep, SessionDep, allow
from registry.api.problems import Responses, declare
from registry.api.readings import Readings
from registry.api.routes import Route
from registry.auth import Actor
from schemas.api import BlobCheck, Collect, Collected, Missing, MissingBlobs, StoredBlob
from schemas.common import DIGEST_PATTERN
from schemas.problems import DigestMismatch, InvalidDocument, NotFound, QuotaExceeded, TooLarge, TooSlow

router = APIRouter(tags=["blobs"], route_class=Route)

BlobDigest = Annotated[str, Path(pattern=DIGEST_PATTERN, description="SHA-256 of the bytes.")]
BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@router.post("/v1/blobs/missing", operation_id="listMissingBlobs", responses=declare(InvalidDocument))
def list_missing_blobs(
    body: MissingBlobs, actor: Annotated[Actor, allow("upload_blob")], session: SessionDep
) -> Missing:
    """Tell which blobs the project lacks: those that have to be sent."""
    return Missing(missing=blobs.missing(session, actor.project_id, body.digests))


@router.put(
    "/v1/blobs/{digest}",
    operation_id="putBlob",
    status_code=201,
    responses={
        200: {"model": StoredBlob, "description": "The project had it before."},
        **declare(InvalidDocument, DigestMismatch, TooLarge, TooSlow, QuotaExceeded),
    },
    openapi_extra={"requestBody": {"required": True, "content": BINARY}},
)
async def put_blob(
    digest: BlobDigest,
    actor: Annotated[Actor, allow("upload_blob")],
    service: ServiceDep,
    request: Request,
    response: Response,
) -> StoredBlob:
    """Send a blob. Nothing is stored unless the bytes have the digest that the address names."""

    def asked(size: int) -> None:
        with service.database.reading() as session:
            blobs.require_room(session, service, actor.project_id, digest, size)

    def room() -> int | None:
        with service.database.reading() as session:
            return blobs.room(session, service, actor.project_id, digest)

    def grown(size: int) -> None:
        if most is not None and size > most:
            asked(size)

    coming, limit, most = announced(request), service.settings.max_blob_bytes, None
    if 0 < coming <= limit:
        await anyio.to_thread.run_sync(asked, coming)
    elif not coming:
        # Nothing is announced: it is refused by the first byte that there is no room for.
        most = await anyio.to_thread.run_sync(room)
    size, is_new = await receive(
        request,
        actor,
        service,
        lambda staged: blobs.keep(
            service, actor.project_id, digest, staged, displaced=lambda: damage.displaced(service, actor, digest)
        ),
        limit=limit,
        grown=grown,
    )
    response.status_code = 201 if is_new else 200
    return StoredBlob(digest=digest, size=size)


@router.post("/v1/blobs/collections", operation_id="collectBlobs", responses=declare(InvalidDocument))
def collect_blobs(body: Collect, actor: Annotated[Actor, allow("administer")], service: ServiceDep) -> Collected:
    """Clear up blobs that nothing needs, and tell which the store has lost. For administrators of the installation."""
    projects.require_installation(actor)
    return collection.collect(service, is_dry_run=body.is_dry_run)


@router.post(
    "/v1/blobs/{digest}/checks",
    operation_id="checkBlob",
    responses=declare(InvalidDocument, NotFound),
)
async def check_blob(
    digest: BlobDigest, actor: Annotated[Actor, allow("fetch")], service: ServiceDep, request: Request
) -> BlobCheck:
    """Read a stored blob again. When its bytes are others, the bundles that are made of it are quarantined.

    Whoever received wrong bytes asks this: what was wrong may be a disk of its own, and only what is here decides.
    A token has one blob read at a time, and no more of them than leaves time for others: then it is told to wait.
    """

    def read() -> BlobCheck:
        with service.database.reading() as session:
            blobs.size(session, actor.project_id, digest)
        return damage.examine(service, actor, digest)

    checks: Readings = request.app.state.checks
    return await checks.run(actor, read)


def _headers(digest: str, size: int) -> dict[str, str]:
    return {
        "content-length": str(size),
        "etag": f'"{digest}"',
        "cache-control": "private, max-age=31536000, immutable",
    }


BYTES: Responses = {200: {"description": "The bytes.", "content": BINARY}}


@router.get(
    "/v1/blobs/{digest}",
    operation_id="getBlob",
    responses={**BYTES, **declare(InvalidDocument, NotFound, DigestMismatch)},
    response_class=StreamingResponse,
    response_model=None,
)
def get_blob(
    digest: BlobDigest, actor: Annotated[Actor, allow("fetch")], session: SessionDep, service: ServiceDep
) -> StreamingResponse:
    """Return a blob's bytes. They are hashed on their way, and the answer is not whole when they are others."""
    size = blobs.size(session, actor.project_id, digest)
    blobs.require_whole(session, digest)
    pieces = damage.pieces(service, actor, digest, CHUNK_BYTES)
    return StreamingResponse(pieces, headers=_headers(digest, size), media_type="application/octet-stream")


@router.head(
    "/v1/blobs/{digest}",
    operation_id="headBlob",
    responses={**BYTES, **declare(InvalidDocument, NotFound)},
    response_class=Response,
    response_model=None,
)
def head_blob(digest: BlobDigest, actor: Annotated[Actor, allow("fetch")], session: SessionDep) -> Response:
    """Tell whether the project holds a blob, and how large it is."""
    size = blobs.size(session, actor.project_id, digest)
    return Response(headers=_headers(digest, size), media_type="application/octet-stream")
