"""Deleting a bundle: refused while anything needs it, under a lock that whoever begins to need it takes too."""

from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID

from sqlalchemy import and_, delete, func, literal, select
from sqlalchemy.orm import Session, aliased

from registry import aliases, auth, blobs, db, documents, evidence, jobs, quotas, targets
from registry.auth import Actor
from registry.quotas import Added
from registry.service import Service
from registry.tables import (
    IN_PROGRESS,
    BlobRow,
    BundleBlobRow,
    DocumentRow,
    JobRow,
    ProjectDocumentRow,
    ReleaseRow,
    TargetReferenceRow,
    TargetRow,
)
from schemas.api import Act, BundleDeleted
from schemas.common import strict_json
from schemas.evidence import Deleted, Kind
from schemas.problems import Conflict
from schemas.release import Phase

NAMED = 5
"""Users that a refusal names; `users` has all of them."""


def delete_bundle(session: Session, service: Service, actor: Actor, named: str, body: Act) -> BundleDeleted:
    """Delete a bundle, as a recorded act. The document stays in evidence; its files may go after a time of grace.

    Raises:
        NotFound: the project has none of that digest, or no more.
        Conflict: something needs it; `users` says what, and `holder` names the first.
        NotPermitted: the actor's token is for some targets only.
    """
    auth.require_whole_project(actor, "delete_bundle")
    auth.confirm(session, actor)
    digest = documents.resolve(session, actor.project_id, "bundle", named)
    member = session.scalar(
        select(ProjectDocumentRow)
        .where(
            ProjectDocumentRow.project_id == actor.project_id,
            ProjectDocumentRow.digest == digest,
            ProjectDocumentRow.kind == "bundle",
            ProjectDocumentRow.deleted_at.is_(None),
        )
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    if member is None:
        raise documents.absent(session, actor.project_id, "bundle", digest)
    found = list(users(session, actor.project_id, digest))
    if found:
        said = "; ".join(why for _, why in found[:NAMED]) + (f"; and {len(found) - NAMED} more" * (len(found) > NAMED))
        raise Conflict(
            f"bundle {digest} is needed: {said}",
            holder=found[0][0],
            users=[{"holder": holder, "why": why} for holder, why in found],
        )
    at = db.now(session)
    evidence.append(
        session,
        actor.project_id,
        evidence.state(
            service.signer,
            documents.stream(actor.project_id, digest),
            f"deleted:{evidence.next_position(session, documents.stream(actor.project_id, digest))}",
            actor.name,
            Kind.BUNDLE_DELETED,
            Deleted(digest=digest, name=member.name, reason=body.reason),
            subjects={"bundle": digest},
            now=at,
        ),
    )
    freed, size = _let_go(session, actor.project_id, digest)
    blobs.touch(session, actor.project_id, freed, at)
    member.deleted_at = at
    session.flush()
    quotas.count(session, service.settings, actor.project_id, Added(documents=-1), is_bound=False)
    return BundleDeleted(
        digest=digest,
        name=member.name,
        blobs=len(freed),
        bytes=size,
        free_at=at + timedelta(seconds=service.settings.blob_grace_seconds),
    )


def _let_go(session: Session, project: UUID, bundle: str) -> tuple[list[str], int]:
    """Take away what keeps the bundle's blobs. Returns those that no other bundle keeps, and their bytes."""
    mine = set(
        session.scalars(
            delete(BundleBlobRow)
            .where(BundleBlobRow.project_id == project, BundleBlobRow.bundle == bundle)
            .returning(BundleBlobRow.blob)
        )
    )
    shared = session.scalars(
        select(BundleBlobRow.blob).where(BundleBlobRow.project_id == project, BundleBlobRow.blob.in_(mine)).distinct()
    )
    freed = sorted(mine - set(shared))
    size = session.scalar(select(func.sum(BlobRow.size)).where(BlobRow.digest.in_(freed)))
    return freed, int(size or 0)


def users(session: Session, project: UUID, bundle: str) -> Iterator[tuple[str, str]]:
    """Yield (what needs a bundle, in which way): first what serves, then what may, then what names it."""
    open_ = (*IN_PROGRESS, Phase.PROMOTED)
    rows = session.execute(
        select(ReleaseRow, TargetRow.name)
        .join(TargetRow, TargetRow.id == ReleaseRow.target_id)
        .where(ReleaseRow.project_id == project, ReleaseRow.phase.in_(open_))
        .order_by((ReleaseRow.phase != Phase.PROMOTED), ReleaseRow.id)
    ).all()
    for release, target in rows:
        if release.bundle == bundle:
            how = "live" if release.phase == Phase.PROMOTED else f"under way ({release.phase})"
            yield str(release.id), f"it is {how} on {target} by release {release.id}"
    for release, target in rows:
        before = targets.way_back(session, release)
        if before is not None and before.bundle == bundle:
            yield str(before.id), f"it is the rollback target of release {release.id} on {target}"
    for job in session.scalars(
        select(JobRow).where(JobRow.project_id == project, JobRow.bundle == bundle, JobRow.state.in_(jobs.OPEN))
    ):
        yield str(job.id), f"the {job.kind} job {job.id} is under way"
    for alias in aliases.of_bundle(session, project, bundle):
        yield f"@{alias}", f"the alias @{alias} names it"
    yield from _references(session, project, bundle)
    yield from _adapters(session, project, bundle)


def _references(session: Session, project: UUID, bundle: str) -> Iterator[tuple[str, str]]:
    rows = session.execute(
        select(TargetRow.name, TargetReferenceRow.reference, DocumentRow.body)
        .join(TargetRow, TargetRow.id == TargetReferenceRow.target_id)
        .join(DocumentRow, DocumentRow.digest == TargetReferenceRow.reference)
        .where(TargetRow.project_id == project)
    )
    for target, reference, body in rows:
        if strict_json(body).get("bundle") == bundle:
            yield reference, f"reference {reference[:19]} in force on {target} was recorded from it"


def _adapters(session: Session, project: UUID, bundle: str) -> Iterator[tuple[str, str]]:
    """Bundles whose adapters were trained on this one's weights: their documents name the component's digest."""
    base = aliased(DocumentRow)
    weights = session.scalar(select(base.components["weights"].astext).where(base.digest == bundle))
    if weights is None:
        return
    named = func.convert_to(literal(f'"base":"{weights}"'), "UTF8")
    rows = session.execute(
        select(ProjectDocumentRow.digest, ProjectDocumentRow.name)
        .join(DocumentRow, DocumentRow.digest == ProjectDocumentRow.digest)
        .where(
            and_(
                ProjectDocumentRow.project_id == project,
                ProjectDocumentRow.kind == "bundle",
                ProjectDocumentRow.digest != bundle,
                ProjectDocumentRow.deleted_at.is_(None),
            ),
            func.position(named.op("IN")(DocumentRow.body)) > 0,
        )
        .order_by(ProjectDocumentRow.id)
    )
    for digest, name in rows:
        yield digest, f"it is the base of an adapter of bundle {name} {digest[:19]}"
