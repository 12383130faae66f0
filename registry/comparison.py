"""Two registered bundles compared, and what evidence of the one says of the other. Reads; changes nothing."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from gates import impact as impacts
from gates import text_difference
from gates.difference import diff as differences
from gates.impact import Recorded
from registry import auth, blobs, documents, evidence, jobs, releases
from registry.auth import Actor
from registry.service import Service
from registry.tables import JobRow, ReleaseRow, TargetRow
from schemas.comparison import BundleDiff, BundleImpact
from schemas.problems import DigestMismatch, NotFound, NotPermitted, Unavailable
from schemas.release import Phase

MOST_EVALUATIONS = 50
"""Evaluations of a bundle in which its results are looked for. What lies further back does not count."""


def diff(session: Session, project: UUID, first: str, second: str) -> BundleDiff:
    """Return what differs between two bundles of a project, named by digest or the beginning of it.

    Raises:
        NotFound, Conflict: as `documents.get`.
    """
    ours, theirs = (documents.resolve(session, project, "bundle", named) for named in (first, second))
    return differences(documents.load_bundle(session, project, ours), documents.load_bundle(session, project, theirs))


def texts(session: Session, service: Service, actor: Actor, found: BundleDiff) -> dict[str, list[str]]:
    """Return path → the lines that differ, of small texts in both bundles, for whoever may fetch their bytes.

    What the store does not have whole is left out: the digests tell that the file differs.
    """
    try:
        auth.require(actor, "fetch")
    except NotPermitted:
        return {}
    compared = [one for part in found.changed for one in part.files if text_difference.is_compared(one)]
    told: dict[str, list[str]] = {}
    for one in compared[: text_difference.MOST_FILES]:
        if one.was is None or one.now is None:
            continue
        try:
            was, now = (_small(session, service, actor, side.sha256) for side in (one.was, one.now))
        except (NotFound, DigestMismatch, Unavailable):
            continue
        if lines := text_difference.lines(was, now):
            told[one.path] = lines
    return told


def _small(session: Session, service: Service, actor: Actor, digest: str) -> bytes:
    blobs.size(session, actor.project_id, digest)
    with service.blobs.open(digest, is_verified=True) as file:
        return file.read(text_difference.MOST_BYTES + 1)


def impact(
    session: Session, project: UUID, first: str, second: str, *, policy: str | None = None, now: datetime
) -> BundleImpact:
    """Return which gates must run again for the second bundle, given what is in evidence of the first.

    Args:
        session: of the caller.
        project: whose.
        first: bundle with evidence, by digest or the beginning of it.
        second: bundle that shall be released.
        policy: only the gates of this policy, by its rules.
        now: by which evidence expires.

    Raises:
        NotFound, Conflict: as `documents.get`.
    """
    ours, theirs = (documents.resolve(session, project, "bundle", named) for named in (first, second))
    named = None if policy is None else documents.resolve(session, project, "policy", policy)
    return impacts.impact(
        documents.load_bundle(session, project, ours),
        documents.load_bundle(session, project, theirs),
        policy=None if named is None else documents.load_policy(session, project, named),
        evidence=recorded(session, project, ours),
        now=now,
    )


def accepted(session: Session, project: UUID, *, limit: int) -> list[tuple[str, str]]:
    """Return targets with the bundle that each has accepted, by the target's name."""
    rows = session.execute(
        select(TargetRow.name, ReleaseRow.bundle)
        .join(ReleaseRow, ReleaseRow.target_id == TargetRow.id)
        .where(TargetRow.project_id == project, ReleaseRow.phase == Phase.PROMOTED)
        .order_by(TargetRow.name)
        .limit(limit)
    )
    return [(row.name, row.bundle) for row in rows]


def recorded(session: Session, project: UUID, bundle: str) -> dict[str, Recorded]:
    """Return gate → the newest result of a bundle, also one that counts no more: it withdraws the one before it."""
    found = jobs.measured(session, project, bundle, limit=MOST_EVALUATIONS)
    newest = {
        result.gate: (job, entry, result) for job, entry, result in sorted(found, key=lambda one: one[1].sequence)
    }
    return {
        gate: Recorded(
            entry=entry.entry_digest,
            result=result,
            recorded_at=entry.recorded_at,
            runner=entry.actor.removeprefix("runner/"),
            revoked=_revoked(session, job).get(entry.entry_digest),
        )
        for gate, (job, entry, result) in newest.items()
    }


def _revoked(session: Session, job: JobRow) -> dict[str, str]:
    """Return what was revoked of a release's results. Those of a run without a release cannot be."""
    if job.release_id is None:
        return {}
    return releases.revocations(evidence.read(session, evidence.release_stream(job.release_id)))
