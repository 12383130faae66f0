"""Two bundles on one page: what differs, which gates must run again for it, and what has to be checked together."""

from typing import Annotated
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Path, Query
from fastapi.responses import RedirectResponse, Response
from sqlalchemy.orm import Session

from registry import comparison, db, documents
from registry.api.deps import ServiceDep, SessionDep
from registry.web.rendering import HEADERS, PageRoute, render
from registry.web.visitors import VisitorDep

MOST_CHOICES = 12
"""Bundles of each kind that the form suggests."""
MOST_FILES = 200
"""Files of a part on the page; the rest is counted."""
MOST_POLICIES = 50

router = APIRouter(include_in_schema=False, route_class=PageRoute)

_PATTERN = r"^(sha256:)?[0-9a-f]{8,64}$"
Named = Annotated[str, Path(pattern=_PATTERN)]


@router.get("/bundles/{digest}/compare")
def compare(
    digest: Named,
    actor: VisitorDep,
    session: SessionDep,
    base: Annotated[str, Query(alias="with", max_length=100)],
) -> Response:
    """Lead from the form on a bundle's page to the comparison with what was written there."""
    named, other = (documents.resolve(session, actor.project_id, "bundle", one) for one in (digest, base.strip()))
    return RedirectResponse(f"/bundles/{other}/diff/{named}", status_code=303, headers=HEADERS)


@router.get("/bundles/{first}/diff/{second}")
def diff_page(
    first: Named,
    second: Named,
    actor: VisitorDep,
    session: SessionDep,
    service: ServiceDep,
    policy: Annotated[str, Query(pattern=rf"^$|{_PATTERN}")] = "",
) -> Response:
    """Show what differs between two bundles, and what that asks for."""
    now = db.now(session)
    found = comparison.diff(session, actor.project_id, first, second)
    ours, theirs = found.first.digest, found.second.digest
    impact = comparison.impact(session, actor.project_id, ours, theirs, policy=policy or None, now=now)
    policies = documents.browse(session, actor.project_id, "policy", names=[], after=None, limit=MOST_POLICIES)
    return render(
        "comparison.html",
        actor=actor,
        section="bundles",
        diff=found,
        impact=impact,
        texts=comparison.texts(session, service, actor, found),
        policies=[one for _, one, _ in policies],
        most_files=MOST_FILES,
        swapped=f"/bundles/{theirs}/diff/{ours}" + (f"?{urlencode({'policy': policy})}" if policy else ""),
        now=now,
    )


def choices(session: Session, project: UUID, bundle: str, name: str) -> list[tuple[str, str]]:
    """Return bundles that one may be compared with, each with what it is: those that targets accepted, its family."""
    found = {
        digest: f"accepted by {target}" for target, digest in comparison.accepted(session, project, limit=MOST_CHOICES)
    }
    family = documents.browse(session, project, "bundle", names=[name], after=None, limit=MOST_CHOICES)
    for _, one, _ in family:
        found.setdefault(one.digest, f"{one.name}, created {one.created_at:%Y-%m-%d %H:%M} UTC")
    found.pop(bundle, None)
    return [*found.items()]
