"""Blobs: ask what is missing, send it, read it back. Bytes are verified while they arrive."""

from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Path, Request, Response
from starlette.responses import StreamingResponse

from registry import blobs, collection, projects
from registry.api.bodies import CHUNK_BYTES, announced, receive
from registry.api.deps import ServiceDep, SessionDep, allow
from registry.api.problems import Responses, declare
from registry.api.routes import Route
from registry.auth import Actor
from schemas.api import Collect, Collected, Missing, MissingBlobs, StoredBlob
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

    def asked() -> None:
        with service.database.reading() as session:
            blobs.require_room(session, service, actor.project_id, digest, coming)

    coming, limit = announced(request), service.settings.max_blob_bytes
    if 0 < coming <= limit:
        await anyio.to_thread.run_sync(asked)
    size, is_new = await receive(
        request,
        actor,
        service,
        lambda staged: blobs.keep(service, actor.project_id, digest, staged),
        limit=limit,
    )
    response.status_code = 201 if is_new else 200
    return StoredBlob(digest=digest, size=size)


@router.post("/v1/blobs/collections", operation_id="collectBlobs", responses=declare(InvalidDocument))
def collect_blobs(body: Collect, actor: Annotated[Actor, allow("administer")], service: ServiceDep) -> Collected:
    """Clear up blobs that nothing needs, and tell which the store has lost. For administrators of the installation."""
    projects.require_installation(actor)
    return collection.collect(service, is_dry_run=body.is_dry_run)


def _headers(digest: str, size: int) -> dict[str, str]:
    return {
        "content-length": str(size),
        "etag": f'"{digest}"',
        "cache-control": "private, max-age=31536000, immutable",
    }


FOUND: Responses = {200: {"description": "The bytes.", "content": BINARY}, **declare(InvalidDocument, NotFound)}


@router.get(
    "/v1/blobs/{digest}", operation_id="getBlob", responses=FOUND, response_class=StreamingResponse, response_model=None
)
def get_blob(
    digest: BlobDigest, actor: Annotated[Actor, allow("fetch")], session: SessionDep, service: ServiceDep
) -> StreamingResponse:
    """Return a blob's bytes."""
    size = blobs.size(session, actor.project_id, digest)
    pieces = blobs.pieces(service, digest, CHUNK_BYTES)
    return StreamingResponse(pieces, headers=_headers(digest, size), media_type="application/octet-stream")


@router.head(
    "/v1/blobs/{digest}", operation_id="headBlob", responses=FOUND, response_class=Response, response_model=None
)
def head_blob(digest: BlobDigest, actor: Annotated[Actor, allow("fetch")], session: SessionDep) -> Response:
    """Tell whether the project holds a blob, and how large it is."""
    size = blobs.size(session, actor.project_id, digest)
    return Response(headers=_headers(digest, size), media_type="application/octet-stream")
