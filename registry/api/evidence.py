"""Evidence: read it, verify it, and get the keys to verify it elsewhere."""

from typing import Annotated

from fastapi import APIRouter, Query

from registry import db, evidence, keys, verification
from registry.api.deps import SessionDep, allow
from registry.api.pages import Limit
from registry.api.problems import declare
from registry.auth import Actor
from schemas.api import Page, PublicKey
from schemas.common import MAX_INTEGER
from schemas.evidence import Entry, Verification
from schemas.problems import InvalidDocument

router = APIRouter(tags=["evidence"])

ReaderDep = Annotated[Actor, allow("read")]
StreamName = Annotated[
    str | None,
    Query(pattern=r"^[a-z]+/[A-Za-z0-9:/@.-]{1,200}$", description="Only this stream, such as release/<id>."),
]


@router.get("/v1/evidence", operation_id="listEvidence", responses=declare(InvalidDocument))
def list_evidence(
    actor: ReaderDep,
    session: SessionDep,
    *,
    stream: StreamName = None,
    after: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="`next` of the page before; 0 begins.")] = 0,
    envelopes: Annotated[bool, Query(description="Whether to give the signed envelopes too.")] = False,
    limit: Limit = 50,
) -> Page[Entry]:
    """List evidence entries, oldest first."""
    rows = evidence.browse(session, actor.project_id, after=after, limit=limit + 1, stream=stream)
    shown = [evidence.wire(row, with_envelope=envelopes) for row in rows[:limit]]
    return Page(items=shown, next=str(shown[-1].sequence) if len(rows) > limit else None)


@router.post("/v1/evidence/verifications", operation_id="verifyEvidence", responses=declare(InvalidDocument))
def verify_evidence(actor: ReaderDep, session: SessionDep, stream: StreamName = None) -> Verification:
    """Recompute chains, signatures and phases from what is stored, all of it as it was at one moment."""
    db.freeze(session)
    return verification.verify(session, actor.project_id, stream=stream)


@router.get("/v1/keys", operation_id="listKeys", responses=declare(), dependencies=[allow("read")])
def list_keys(session: SessionDep) -> Page[PublicKey]:
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
