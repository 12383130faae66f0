"""What boots of a bundle took, over HTTP."""

from typing import Annotated

from fastapi import APIRouter, Path

from registry import boots, documents
from registry.api.deps import SessionDep, allow
from registry.api.problems import declare
from registry.api.routes import Route
from registry.auth import Actor
from schemas.api import Page
from schemas.boots import Boot
from schemas.problems import Conflict, InvalidDocument, NotFound

router = APIRouter(prefix="/v1/bundles", tags=["documents"], route_class=Route)

MOST_JOBS = 20
"""Newest jobs of a bundle whose boots are told."""
Named = Annotated[
    str,
    Path(
        pattern=r"^(sha256:)?[0-9a-f]{8,64}$",
        description="Digest, or at least 8 of its hexadecimal digits, with or without `sha256:`.",
    ),
]


@router.get("/{digest}/boots", operation_id="listBoots", responses=declare(InvalidDocument, NotFound, Conflict))
def list_boots(digest: Named, actor: Annotated[Actor, allow("read")], session: SessionDep) -> Page[Boot]:
    """Tell what the boots of a bundle took, by its newest jobs, newest first. There is one page of them."""
    named = documents.resolve(session, actor.project_id, "bundle", digest)
    documents.get(session, actor.project_id, "bundle", named)
    return Page[Boot](items=boots.of_bundle(session, actor.project_id, named, limit=MOST_JOBS), next=None)
