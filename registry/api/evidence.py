"""Evidence: read it, verify it, and get the keys to verify it elsewhere."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from registry import checkpoints, cursors, db, erasure, evidence, keys, recomputation, releases, targets, verification
from registry.api.deps import PerformDep, ServiceDep, SessionDep, allow
from registry.api.pages import Limit
from registry.api.problems import declare
from registry.api.readings import Readings
from registry.api.routes import Route
from registry.auth import Actor
from registry.cursors import Cursor
from registry.evidence import Selection
from schemas.api import Erase, Page, PublicKey, Revoke, TargetName
from schemas.checkpoint import Checkpoint
from schemas.common import MAX_INTEGER, Digest
from schemas.evidence import Entry, Kind, Recomputation, RecomputationCreate, Verification
from schemas.problems import Conflict, InvalidDocument, NotFound

router = APIRouter(tags=["evidence"], route_class=Route)

ReaderDep = Annotated[Actor, allow("read")]
StreamName = Annotated[
    str | None,
    Query(pattern=r"^[a-z]+/[A-Za-z0-9:/@.-]{1,200}$", description="Only this stream, such as release/<id>."),
]


After = Annotated[
    str | None,
    Query(max_length=64, description="`next` of the page before: a cursor; of one stream, a sequence."),
]


@router.get("/v1/evidence", operation_id="listEvidence", responses=declare(InvalidDocument, NotFound))
def list_evidence(
    actor: ReaderDep,
    session: SessionDep,
    *,
    stream: StreamName = None,
    target: Annotated[TargetName | None, Query(description="Only of this target and its releases.")] = None,
    kind: Annotated[list[Kind] | None, Query(max_length=64, description="Only of these kinds.")] = None,
    after: After = None,
    envelopes: Annotated[bool, Query(description="Whether to give the signed envelopes too.")] = False,
    newest_first: Annotated[bool, Query(description="Whether to go backwards, from the newest entry on.")] = False,
    limit: Limit = 50,
) -> Page[Entry]:
    """List evidence entries: of one stream by position, of all in an order that no later commit changes."""
    project = actor.project_id
    if stream is not None and target is not None:
        raise _wrong("target", "name a stream or a target, not both")
    if stream is not None:
        seen = MAX_INTEGER if newest_first and after is None else _sequence(after)
        rows = evidence.browse_stream(
            session, project, stream, kinds=kind or (), after=seen, limit=limit + 1, is_newest_first=newest_first
        )
    else:
        of = targets.get(session, project, target).id if target is not None else None
        horizon = cursors.horizon(session)
        where = Cursor.ahead_of(horizon) if newest_first and after is None else cursor(after)
        rows = evidence.browse(
            session,
            project,
            Selection(target=of, kinds=tuple(str(one) for one in kind or ())),
            after=where,
            before=horizon,
            limit=limit + 1,
            is_newest_first=newest_first,
        )
    following = None
    if len(rows) > limit:
        last = rows[limit - 1]
        following = str(last.sequence if stream is not None else evidence.cursor_of(last))
    return Page(items=[evidence.wire(row, with_envelope=envelopes) for row in rows[:limit]], next=following)


def cursor(after: str | None) -> Cursor:
    """Return the cursor that a query names; without one, the beginning. Raises InvalidDocument."""
    if after is None:
        return cursors.START
    try:
        return Cursor.parse(after)
    except ValueError:
        raise _wrong("after", "is not a cursor that this service gave out") from None


def _sequence(after: str | None) -> int:
    if after is None:
        return 0
    if not after.isascii() or not after.isdecimal() or int(after) > MAX_INTEGER:
        raise _wrong("after", f"of one stream is a sequence, 0 to {MAX_INTEGER}")
    return int(after)


def _wrong(parameter: str, why: str) -> InvalidDocument:
    detail = f"query parameter {parameter}: {why}"
    return InvalidDocument(detail, errors=[{"pointer": "", "detail": detail}])


@router.post("/v1/evidence/verifications", operation_id="verifyEvidence", responses=declare(InvalidDocument))
def verify_evidence(
    actor: ReaderDep,
    session: SessionDep,
    service: ServiceDep,
    request: Request,
    stream: StreamName = None,
    checkpoint: Annotated[Digest | None, Query(description="A checkpoint that must still be there.")] = None,
) -> Verification:
    """Recompute chains, signatures, checkpoints and phases from what is stored, all of it as it was at one moment.

    A token has one under way at a time, and a process two; who is more is told to wait.
    """
    verifications: Readings = request.app.state.verifications
    with verifications.place(actor):
        db.freeze(session)
        return verification.verify(
            session, actor.project_id, signer=service.signer.key_id, stream=stream, must_have=checkpoint
        )


@router.post(
    "/v1/evidence/checkpoints",
    status_code=201,
    operation_id="createCheckpoint",
    responses=declare(NotFound) | {200: {"model": Checkpoint, "description": "Nothing is new: the last one."}},
)
def create_checkpoint(
    actor: Annotated[Actor, allow("checkpoint")], service: ServiceDep, response: Response
) -> Checkpoint:
    """Seal everything recorded until now with a signed checkpoint. Keep its digest where the service cannot write."""
    row, is_new = checkpoints.make(service, actor.project_id, by=actor.name)
    response.status_code = 201 if is_new else 200
    return checkpoints.wire(row)


@router.get("/v1/evidence/checkpoints", operation_id="listCheckpoints", responses=declare(InvalidDocument))
def list_checkpoints(
    actor: ReaderDep,
    session: SessionDep,
    *,
    after: Annotated[int, Query(ge=0, le=2**31 - 1, description="`next` of the page before; 0 begins.")] = 0,
    envelopes: Annotated[bool, Query(description="Whether to give the signed envelopes too.")] = False,
    limit: Limit = 50,
) -> Page[Checkpoint]:
    """List signed checkpoints, oldest first."""
    rows = checkpoints.browse(session, actor.project_id, after=after, limit=limit + 1)
    shown = [checkpoints.wire(row, with_envelope=envelopes) for row in rows[:limit]]
    return Page(items=shown, next=str(shown[-1].number) if len(rows) > limit else None)


@router.get(
    "/v1/evidence/checkpoints/{number}/entries",
    operation_id="listSealed",
    responses=declare(InvalidDocument, NotFound),
)
def list_sealed(
    actor: ReaderDep, session: SessionDep, number: Annotated[int, Path(ge=1, le=2**31 - 1, description="Checkpoint.")]
) -> Page[Entry]:
    """List what a checkpoint added to the ones before, with envelopes, in order: all of it, a thousand at most."""
    rows = checkpoints.sealed(session, actor.project_id, number)
    return Page(items=[evidence.wire(row, with_envelope=True) for row in rows], next=None)


@router.post(
    "/v1/evidence/revocations",
    status_code=201,
    operation_id="revokeEvidence",
    responses=declare(InvalidDocument, NotFound, Conflict)
    | {200: {"model": Entry, "description": "It was revoked before."}},
)
def revoke_evidence(
    body: Revoke,
    actor: Annotated[Actor, allow("revoke_evidence")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
) -> Entry:
    """Let a gate result count no more: what stands on it and has no traffic yet holds; what has traffic keeps it."""
    row, is_new = perform(lambda session: releases.revoke(session, service, actor, body))
    response.status_code = 201 if is_new else 200
    return evidence.wire(row)


@router.post(
    "/v1/evidence/erasures",
    status_code=201,
    operation_id="eraseRecords",
    responses=declare(InvalidDocument, NotFound, Conflict)
    | {200: {"model": Entry, "description": "They were erased before."}},
)
def erase_records(
    body: Erase,
    actor: Annotated[Actor, allow("erase_records")],
    service: ServiceDep,
    session: SessionDep,
    response: Response,
) -> Entry:
    """Erase the raw records of a gate's result, as a recorded act. The result stands, and says that they are gone."""
    row, is_new = erasure.erase(session, service, actor, body)
    response.status_code = 201 if is_new else 200
    return evidence.wire(row)


@router.post(
    "/v1/evidence/recomputations", operation_id="recomputeEvidence", responses=declare(NotFound, InvalidDocument)
)
def recompute_evidence(
    body: RecomputationCreate, actor: ReaderDep, session: SessionDep, service: ServiceDep, request: Request
) -> Recomputation:
    """Compute a gate's verdict again from its records, and compare it with the recorded one, bit for bit.

    It counts as a verification that is under way.
    """
    verifications: Readings = request.app.state.verifications
    with verifications.place(actor):
        db.freeze(session)
        return recomputation.recompute(session, service, actor.project_id, body.entry_digest)


@router.get("/v1/keys", operation_id="listKeys", responses=declare())
def list_keys(_actor: ReaderDep, session: SessionDep) -> Page[PublicKey]:
    """List every public key that ever signed evidence, oldest first."""
    items = [
        PublicKey(
            key_id=row.key_id,
            algorithm=row.algorithm,
            public_key_pem=row.public_key_pem,
            valid_from=row.valid_from,
            valid_until=row.valid_until,
        )
        for row in keys.history(session)
    ]
    return Page(items=items, next=None)
