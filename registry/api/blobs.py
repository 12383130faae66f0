"""Blobs: ask what is missing, send it, read it back. Bytes are verified while they arrive."""

from collections.abc import Callable, Iterator
from typing import Annotated, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread
from fastapi import APIRouter, Path, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from registry import blobs
from registry.api.deps import ServiceDep, SessionDep, allow
from registry.api.problems import Responses, declare
from registry.auth import Actor
from schemas.api import Missing, MissingBlobs, StoredBlob
from schemas.common import DIGEST_PATTERN
from schemas.problems import DigestMismatch, InvalidDocument, NotFound, TooLarge, Unavailable

router = APIRouter(tags=["blobs"])

CHUNK_BYTES = 1024 * 1024
SILENCE_SECONDS = 60.0
"""A caller that sends nothing for so long has gone."""
UPLOADS = 16
"""Uploads received at once. They have threads of their own, so that slow ones keep nobody else waiting."""

_uploads = anyio.lowlevel.RunVar[anyio.CapacityLimiter]("uploads")

BlobDigest = Annotated[str, Path(pattern=DIGEST_PATTERN, description="SHA-256 of the bytes.")]
BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
ReceivedT = TypeVar("ReceivedT")


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
        **declare(InvalidDocument, DigestMismatch, TooLarge),
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
    limit = service.settings.max_blob_bytes
    size, is_new = await receive(
        request,
        limit,
        lambda chunks: blobs.store(service, actor.project_id, digest, chunks, limit=limit),
    )
    response.status_code = 201 if is_new else 200
    return StoredBlob(digest=digest, size=size)


async def receive(request: Request, limit: int, store: Callable[[Iterator[bytes]], ReceivedT]) -> ReceivedT:
    """Run `store` in a thread on the body's chunks as they arrive, and return what it returns.

    Raises:
        TooLarge: the announced length is above `limit` bytes; nothing was read.
        Unavailable: the caller sent nothing for a minute.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise TooLarge(f"the body is larger than {limit} bytes", limit=limit)
    limiter = _uploads.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(UPLOADS)
        _uploads.set(limiter)
    return await anyio.to_thread.run_sync(lambda: store(_chunks(request)), limiter=limiter)


def _chunks(request: Request) -> Iterator[bytes]:
    """Yield the body, called in a thread while the event loop receives it."""
    stream = request.stream()

    async def following() -> bytes | None:
        part = bytearray()
        with anyio.fail_after(SILENCE_SECONDS):
            async for chunk in stream:
                part += chunk
                if len(part) >= CHUNK_BYTES:
                    break
        return bytes(part) or None

    while True:
        try:
            part = anyio.from_thread.run(following)
        except TimeoutError:
            raise Unavailable(f"the upload was silent for {SILENCE_SECONDS:.0f} s") from None
        except ClientDisconnect:
            raise Unavailable("the caller went away before the body was complete") from None
        if part is None:
            return
        yield part


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
