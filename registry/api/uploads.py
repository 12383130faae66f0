"""Uploads in pieces: begin, go on at an offset, ask for the offset, give up.

The shape is that of the IETF's resumable uploads and of tus: `Upload-Offset` says where bytes go. The last PATCH
verifies the whole and answers with the stored blob.
"""

from functools import partial
from typing import Annotated
from uuid import UUID

import anyio
from fastapi import APIRouter, Header, Request, Response

from registry import damage, db, uploads
from registry.api.bodies import Bodies, pieces, require_room
from registry.api.deps import ServiceDep, SessionDep, allow
from registry.api.pages import Cursor, Limit, page
from registry.api.problems import declare
from registry.api.routes import Route
from registry.auth import Actor
from schemas.api import Page, Upload, UploadCreate
from schemas.common import MAX_INTEGER
from schemas.problems import DigestMismatch, InvalidDocument, NotFound, OffsetMismatch, QuotaExceeded, TooLarge, TooSlow

router = APIRouter(prefix="/v1/uploads", tags=["blobs"], route_class=Route)

OFFSET = "upload-offset"
UploaderDep = Annotated[Actor, allow("upload_blob")]
Offset = Annotated[
    int, Header(alias="Upload-Offset", ge=0, le=MAX_INTEGER, description="Bytes that have arrived before.")
]
PIECE = {"application/partial-upload": {"schema": {"type": "string", "format": "binary"}}}
SHOWN = declare(InvalidDocument, NotFound)


@router.post(
    "",
    operation_id="createUpload",
    status_code=201,
    responses={
        200: {"model": Upload, "description": "It is under way, or the project has the blob."},
        **declare(InvalidDocument, TooLarge, QuotaExceeded),
    },
)
def create_upload(
    body: UploadCreate, actor: UploaderDep, session: SessionDep, service: ServiceDep, response: Response
) -> Upload:
    """Begin an upload in pieces, or take up the one of the same blob that is under way."""
    found, is_new = uploads.begin(session, service, actor, body)
    response.status_code = 201 if is_new else 200
    response.headers[OFFSET] = str(found.offset)
    if found.id is not None:
        response.headers["location"] = f"/v1/uploads/{found.id}"
    return found


@router.get("", operation_id="listUploads", responses=declare(InvalidDocument))
def list_uploads(
    actor: UploaderDep, session: SessionDep, service: ServiceDep, cursor: Cursor, limit: Limit = 50
) -> Page[Upload]:
    """List the project's uploads that are under way, newest first."""
    rows, at = uploads.browse(session, actor.project_id, after=cursor, limit=limit + 1), db.now(session)
    return page(rows, limit, lambda row: uploads.wire(service, row, at), lambda row: row.id)


@router.get("/{upload}", operation_id="getUpload", responses=SHOWN)
def get_upload(
    upload: UUID, actor: UploaderDep, session: SessionDep, service: ServiceDep, response: Response
) -> Upload:
    """Tell how far an upload is."""
    found = uploads.wire(service, uploads.get(session, actor.project_id, upload), db.now(session))
    response.headers[OFFSET] = str(found.offset)
    return found


@router.head(
    "/{upload}",
    operation_id="headUpload",
    responses={200: {"description": "`Upload-Offset` and `Upload-Length`."}, **SHOWN},
    response_class=Response,
    response_model=None,
)
def head_upload(upload: UUID, actor: UploaderDep, session: SessionDep, service: ServiceDep) -> Response:
    """Tell how far an upload is, in headers."""
    row = uploads.get(session, actor.project_id, upload)
    return Response(headers={OFFSET: str(service.blobs.received(row.id)), "upload-length": str(row.size)})


@router.patch(
    "/{upload}",
    operation_id="patchUpload",
    responses=declare(InvalidDocument, NotFound, OffsetMismatch, QuotaExceeded, DigestMismatch, TooLarge, TooSlow),
    openapi_extra={"requestBody": {"required": True, "content": PIECE}},
)
async def patch_upload(
    upload: UUID, offset: Offset, actor: UploaderDep, service: ServiceDep, request: Request, response: Response
) -> Upload:
    """Send bytes that begin at an offset. What arrives is kept, also when the request is cut.

    The request that brings the last byte is answered when the whole is verified and stored.
    """
    bodies: Bodies = request.app.state.bodies
    with bodies.place(actor):
        row, part = await bodies.write(lambda: uploads.take(service, actor, upload, offset))
        try:
            require_room(request, row.size - offset)
            try:
                async for piece in pieces(request):
                    await bodies.write(partial(part.write, piece, limit=row.size))
            except TooLarge:
                await bodies.write(lambda: part.cut(offset))
                raise
            met = partial(damage.displaced, service, actor, row.digest)
            found = await bodies.seal(lambda: uploads.settle(service, row, part, displaced=met))
        finally:
            with anyio.CancelScope(shield=True):
                await bodies.write(part.close)
    response.headers[OFFSET] = str(found.offset)
    return found


@router.delete("/{upload}", operation_id="deleteUpload", status_code=204, responses=SHOWN)
def delete_upload(upload: UUID, actor: UploaderDep, session: SessionDep, service: ServiceDep) -> None:
    """Give an upload up, with what has arrived of it."""
    uploads.cancel(session, service, actor, upload)
