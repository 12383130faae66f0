"""Two bundles compared over HTTP: what differs, and which gates must run again for it."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from registry import comparison, db
from registry.api.deps import SessionDep, allow
from registry.api.problems import declare
from registry.api.routes import Route
from registry.auth import Actor
from schemas.comparison import BundleDiff, BundleImpact
from schemas.problems import Conflict, InvalidDocument, NotFound

router = APIRouter(prefix="/v1/bundles", tags=["documents"], route_class=Route)

_PATTERN = r"^(sha256:)?[0-9a-f]{8,64}$"
_SHORT = "Digest, or at least 8 of its hexadecimal digits, with or without `sha256:`."
NamedFirst = Annotated[str, Path(pattern=_PATTERN, description=f"What is compared with. {_SHORT}")]
NamedSecond = Annotated[str, Path(pattern=_PATTERN, description=f"What is looked at. {_SHORT}")]
NAMED = declare(InvalidDocument, NotFound, Conflict)


@router.get("/{digest}/diff/{bundle}", operation_id="diffBundles", responses=NAMED)
def diff_bundles(
    digest: NamedFirst, bundle: NamedSecond, actor: Annotated[Actor, allow("read")], session: SessionDep
) -> BundleDiff:
    """Compare two bundles part by part."""
    return comparison.diff(session, actor.project_id, digest, bundle)


@router.get("/{digest}/impact/{bundle}", operation_id="getBundleImpact", responses=NAMED)
def bundle_impact(
    digest: NamedFirst,
    bundle: NamedSecond,
    actor: Annotated[Actor, allow("read")],
    session: SessionDep,
    policy: Annotated[
        str | None, Query(pattern=_PATTERN, description=f"Only the gates of this policy, by its rules. {_SHORT}")
    ] = None,
) -> BundleImpact:
    """Say which gates must run again for the second bundle, given evidence of the first. It lets nothing pass."""
    return comparison.impact(session, actor.project_id, digest, bundle, policy=policy, now=db.now(session))
