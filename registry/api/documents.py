"""Bundles, policies, suites and references: posted as raw JSON, answered by digest."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import StringConstraints
from sqlalchemy.orm import Session
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from registry import aliases, deletion, documents, quarantine
from registry.api.deps import IfMatch, PerformDep, ServiceDep, SessionDep, allow, tag
from registry.api.pages import Cursor, Limit, page
from registry.api.problems import Responses, declare
from registry.api.routes import Route
from registry.auth import Actor
from registry.documents import Found
from registry.service import Service
from schemas.api import Act, BundleDeleted, Page, QuarantineState, Registered
from schemas.bundle import MAX_LABELS
from schemas.common import LABEL_PATTERN, Digest, Name
from schemas.problems import (
    BlobsMissing,
    Conflict,
    InvalidDocument,
    NotFound,
    PolicyTooWeak,
    QuotaExceeded,
    StaleEdit,
    SuiteMissing,
    TooLarge,
    UnsupportedMediaType,
)

router = APIRouter(tags=["documents"], route_class=Route)

MEDIA_TYPE = "application/json"


async def raw_json(request: Request) -> bytes:
    """Return the body as it was sent, since a document's own rules decide what JSON it takes.

    Raises:
        UnsupportedMediaType: it is not announced as JSON.
        HTTPException: the caller went away, or it came too slowly; see `registry.api.middleware`.
    """
    announced = request.headers.get("content-type", "").split(";", 1)[0].strip().lower()
    if announced != MEDIA_TYPE:
        raise UnsupportedMediaType(f"send the document as {MEDIA_TYPE}, not as {announced or 'nothing'}")
    try:
        return await request.body()
    except ClientDisconnect:
        raise HTTPException(400, "the caller went away before the body was complete") from None


RawJson = Annotated[bytes, Depends(raw_json)]
ReaderDep = Annotated[Actor, allow("read")]
FetcherDep = Annotated[Actor, allow("fetch")]
NamedDigest = Annotated[
    str,
    Path(
        pattern=r"^(sha256:)?[0-9a-f]{8,64}$",
        description="Digest, or at least 8 of its hexadecimal digits, with or without `sha256:`.",
    ),
]
Names = Annotated[list[Name] | None, Query(description="Only these families; repeatable.")]
Labels = Annotated[
    list[Annotated[str, StringConstraints(pattern=LABEL_PATTERN)]] | None,
    Query(max_length=MAX_LABELS, description="Only with this label, as name=value; repeatable: with all of them."),
]

POSTED = declare(InvalidDocument, TooLarge, UnsupportedMediaType, QuotaExceeded)
LISTED = declare(InvalidDocument)
NAMED = declare(InvalidDocument, NotFound, Conflict)


def takes(*models: str) -> dict[str, Any]:
    """Return the description of a raw JSON body for OpenAPI."""
    refs = [{"$ref": f"#/components/schemas/{model}"} for model in models]
    schema = refs[0] if len(refs) == 1 else {"oneOf": refs}
    return {"requestBody": {"required": True, "content": {MEDIA_TYPE: {"schema": schema}}}}


def known(responses: Responses) -> Responses:
    """Return responses with the answer for a document that was stored before."""
    return {200: {"model": Registered, "description": "It was stored before."}, **responses}


def _register(
    session: Session, service: Service, actor: Actor, *, kind: str, raw: bytes, response: Response
) -> Registered:
    found, is_new = documents.store(session, service, actor, kind, raw)
    (stored,) = _standing(session, actor, [found])
    response.status_code = 201 if is_new else 200
    response.headers["location"] = f"/v1/{'policies' if kind == 'policy' else kind + 's'}/{stored.digest}"
    return stored


def _list(
    session: Session,
    actor: Actor,
    *,
    kind: str,
    names: list[str] | None,
    cursor: Cursor,
    limit: int,
    labels: list[str] | None = None,
    quarantined: bool | None = None,
    file: str | None = None,
) -> Page[Registered]:
    asked = _labels(labels or [])
    rows = documents.browse(
        session,
        actor.project_id,
        kind,
        names=names or [],
        labels=asked,
        quarantined=quarantined,
        file=file,
        after=cursor,
        limit=limit + 1,
    )
    found = page(rows, limit, lambda row: row, lambda row: row.id)
    return Page[Registered](items=_standing(session, actor, found.items), next=found.next)


def _standing(session: Session, actor: Actor, found: Sequence[Found]) -> list[Registered]:
    """Return documents, each bundle with why it is quarantined."""
    marked = [one.registered.digest for one in found if one.is_quarantined]
    if not marked:
        return [one.registered for one in found]
    told = quarantine.standing(session, actor.project_id, marked)
    return [one.registered.model_copy(update={"quarantine": told.get(one.registered.digest)}) for one in found]


def _labels(asked: list[str]) -> dict[str, str]:
    """Return name → value. Raises InvalidDocument when one name is asked for with two values: no bundle has both."""
    found: dict[str, str] = {}
    for one in asked:
        name, _, value = one.partition("=")
        if found.setdefault(name, value) != value:
            detail = f"query parameter label: {name} cannot have two values at once"
            raise InvalidDocument(detail, errors=[{"pointer": "", "detail": detail}])
    return found


@router.post(
    "/v1/bundles",
    operation_id="registerBundle",
    status_code=201,
    responses=known({**POSTED, **declare(InvalidDocument, BlobsMissing)}),
    openapi_extra=takes("Bundle", "BundleRegistration"),
)
def register_bundle(
    actor: Annotated[Actor, allow("register_bundle")],
    raw: RawJson,
    session: SessionDep,
    service: ServiceDep,
    response: Response,
) -> Registered:
    """Store a bundle whose files have been uploaded, alone or with the locks of its sources.

    The locks are kept in its record and are no part of it. Posting it again answers 200 with the same body.
    """
    return _register(session, service, actor, kind="bundle", raw=raw, response=response)


@router.get("/v1/bundles", operation_id="listBundles", responses=LISTED)
def list_bundles(
    actor: ReaderDep,
    session: SessionDep,
    cursor: Cursor,
    name: Names = None,
    label: Labels = None,
    quarantined: Annotated[bool | None, Query(description="Only those that are quarantined, or are not.")] = None,
    file: Annotated[Digest | None, Query(description="Only those made of this file, by its whole digest.")] = None,
    limit: Limit = 50,
) -> Page[Registered]:
    """List bundles, newest first, without the documents themselves."""
    return _list(
        session,
        actor,
        kind="bundle",
        names=name,
        labels=label,
        quarantined=quarantined,
        file=file,
        cursor=cursor,
        limit=limit,
    )


@router.get("/v1/bundles/{digest}", operation_id="getBundle", responses=NAMED)
def get_bundle(digest: NamedDigest, actor: FetcherDep, session: SessionDep) -> Registered:
    """Return a bundle, with the aliases that name it now."""
    (found,) = _standing(session, actor, [documents.find(session, actor.project_id, "bundle", digest)])
    return found.model_copy(update={"aliases": aliases.of_bundle(session, actor.project_id, found.digest)})


@router.post("/v1/bundles/{digest}/deletions", operation_id="deleteBundle", responses=NAMED)
def delete_bundle(
    digest: NamedDigest,
    body: Act,
    actor: Annotated[Actor, allow("delete_bundle")],
    session: SessionDep,
    service: ServiceDep,
) -> BundleDeleted:
    """Delete a bundle that nothing needs, as a recorded act. Its files go after a time of grace."""
    return deletion.delete_bundle(session, service, actor, digest, body)


@router.post("/v1/bundles/{digest}/quarantine", operation_id="quarantineBundle", responses=NAMED)
def quarantine_bundle(
    digest: NamedDigest,
    body: Act,
    actor: Annotated[Actor, allow("quarantine")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
) -> QuarantineState:
    """Let nothing go on with a bundle until a person lifts this. Asking again changes nothing."""
    return _told(response, perform(lambda session: quarantine.impose(session, service, actor, digest, body)))


@router.post(
    "/v1/bundles/{digest}/quarantine/lift",
    operation_id="liftQuarantine",
    responses=declare(InvalidDocument, NotFound, Conflict, StaleEdit),
)
def lift_quarantine(
    digest: NamedDigest,
    body: Act,
    actor: Annotated[Actor, allow("lift_quarantine")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
    if_match: IfMatch = None,
) -> QuarantineState:
    """Let a bundle be used again, whatever it is quarantined for. `If-Match` takes the quarantine's version."""
    return _told(
        response,
        perform(lambda session: quarantine.lift(session, service, actor, digest, body, if_match=if_match)),
    )


def _told(response: Response, state: QuarantineState) -> QuarantineState:
    if state.quarantine is not None:
        tag(response, state.quarantine.version)
    return state


@router.post(
    "/v1/policies",
    operation_id="registerPolicy",
    status_code=201,
    responses=known({**POSTED, **declare(InvalidDocument, SuiteMissing, PolicyTooWeak)}),
    openapi_extra=takes("Policy"),
)
def register_policy(
    actor: Annotated[Actor, allow("register_policy")],
    raw: RawJson,
    session: SessionDep,
    service: ServiceDep,
    response: Response,
) -> Registered:
    """Store a policy that can decide with the samples it asks for. Posting it again answers 200 with the same body."""
    return _register(session, service, actor, kind="policy", raw=raw, response=response)


@router.get("/v1/policies", operation_id="listPolicies", responses=LISTED)
def list_policies(
    actor: ReaderDep, session: SessionDep, cursor: Cursor, name: Names = None, limit: Limit = 50
) -> Page[Registered]:
    """List policies, newest first, without the documents themselves."""
    return _list(session, actor, kind="policy", names=name, cursor=cursor, limit=limit)


@router.get("/v1/policies/{digest}", operation_id="getPolicy", responses=NAMED)
def get_policy(digest: NamedDigest, actor: FetcherDep, session: SessionDep) -> Registered:
    """Return a policy."""
    return documents.get(session, actor.project_id, "policy", digest)


@router.post(
    "/v1/suites",
    operation_id="registerSuite",
    status_code=201,
    responses=known(POSTED),
    openapi_extra=takes("GoldenSuite", "LoadSuite", "StructuredSuite"),
)
def register_suite(
    actor: Annotated[Actor, allow("register_suite")],
    raw: RawJson,
    session: SessionDep,
    service: ServiceDep,
    response: Response,
) -> Registered:
    """Store a suite. Posting it again answers 200 with the same body."""
    return _register(session, service, actor, kind="suite", raw=raw, response=response)


@router.get("/v1/suites", operation_id="listSuites", responses=LISTED)
def list_suites(
    actor: ReaderDep, session: SessionDep, cursor: Cursor, name: Names = None, limit: Limit = 50
) -> Page[Registered]:
    """List suites, newest first, without the documents themselves."""
    return _list(session, actor, kind="suite", names=name, cursor=cursor, limit=limit)


@router.get("/v1/suites/{digest}", operation_id="getSuite", responses=NAMED)
def get_suite(digest: NamedDigest, actor: FetcherDep, session: SessionDep) -> Registered:
    """Return a suite."""
    return documents.get(session, actor.project_id, "suite", digest)


@router.get("/v1/references/{digest}", operation_id="getReference", responses=NAMED)
def get_reference(digest: NamedDigest, actor: FetcherDep, session: SessionDep) -> Registered:
    """Return what an accepted bundle answered to a golden suite."""
    return documents.get(session, actor.project_id, "reference", digest)
