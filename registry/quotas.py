"""What a project holds, and how much it may: counted under one lock with what is added, so that two at once agree.

What is stored beyond a limit is refused. What runners would do beyond one waits: it is nobody's fault, and passes.
"""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from registry import db
from registry.settings import Settings
from registry.tables import JobRow, ProjectRow, ProjectUsageRow, UploadRow
from schemas.api import Limits, ProjectUsage
from schemas.problems import QuotaExceeded

_ADVICE = {
    "bytes": "delete bundles that are not needed (`sluicegate bundle delete`), and `sluicegate blob gc`",
    "uploads": "finish or give up uploads that are under way",
    "documents": "delete bundles that are not needed",
}


@dataclass(frozen=True, slots=True)
class Added:
    """What something adds to a project; negative for what it takes away."""

    bytes: int = 0
    documents: int = 0
    uploads: int = 0
    """Of which the bytes are those that will come."""


def require_bytes(session: Session, settings: Settings, project: UUID, size: int) -> None:
    """Return when a project has room for bytes just now. It locks nothing: `count` has the last word.

    Raises:
        QuotaExceeded.
    """
    used, limit = _bytes(session, settings, project)
    _require("bytes", used, size, limit)


def room(session: Session, settings: Settings, project: UUID) -> int | None:
    """Return how many more bytes a project may hold just now; None for any number. It locks nothing."""
    used, limit = _bytes(session, settings, project)
    return max(0, limit - used) if limit else None


def _bytes(session: Session, settings: Settings, project: UUID) -> tuple[int, int]:
    """Return how many bytes a project holds, those under way among them, and how many it may; 0 is any number."""
    found = db.ask_one(session, _ROOM, {"project": project})
    return found.bytes, settings.project_bytes if found.max_bytes is None else found.max_bytes


_ROOM = db.Sql(
    """
    SELECT
        (SELECT max_bytes FROM projects WHERE id = :project) AS max_bytes,
        coalesce((SELECT bytes FROM project_usage WHERE project_id = :project), 0)
            + (SELECT CAST(coalesce(sum(size), 0) AS bigint) FROM uploads WHERE project_id = :project) AS bytes
    """
)


def count(session: Session, settings: Settings, project: UUID, added: Added, *, is_bound: bool = True) -> None:
    """Count what is added, and keep others from adding until the transaction ends. Call it last.

    `is_bound`: whether limits hold for it; what the service itself records is counted and never refused.

    Raises:
        QuotaExceeded: the project would hold more than it may.
    """
    # What an upload brings is counted when it is there.
    lasting = 0 if added.uploads else added.bytes
    counted = db.ask_one(session, _COUNT, {"project": project, "bytes": lasting, "documents": added.documents})
    if not is_bound:
        return
    limit = _limits(settings, counted.max_bytes, counted.max_uploads, counted.max_documents)
    is_asked = bool(added.uploads or (added.bytes > 0 and limit.bytes))
    under_way, coming = _under_way(session, project) if is_asked else (0, 0)
    if added.uploads:  # whose row is written already
        under_way, coming = under_way - added.uploads, coming - added.bytes
    _require("bytes", counted.bytes - lasting + coming, added.bytes, limit.bytes)
    _require("documents", counted.documents - added.documents, added.documents, limit.documents)
    _require("uploads", under_way, added.uploads, limit.uploads)


# The row is locked by whoever is first, whether it is there or not.
_COUNT = db.Sql(
    """
    INSERT INTO project_usage AS held (project_id, bytes, documents) VALUES (:project, :bytes, :documents)
    ON CONFLICT (project_id) DO UPDATE
    SET bytes = held.bytes + excluded.bytes, documents = held.documents + excluded.documents
    RETURNING bytes, documents,
        (SELECT max_bytes FROM projects WHERE id = :project) AS max_bytes,
        (SELECT max_uploads FROM projects WHERE id = :project) AS max_uploads,
        (SELECT max_documents FROM projects WHERE id = :project) AS max_documents
    """
)


def _require(resource: str, used: int, added: int, limit: int | None) -> None:
    if limit and added > 0 and used + added > limit:
        raise QuotaExceeded(
            f"the project holds {used} {resource} of at most {limit}, and {added} more were asked for; "
            f"{_ADVICE[resource]}, or let an administrator raise it (`sluicegate project limit`)",
            resource=resource,
            used=used,
            limit=limit,
            added=added,
        )


def _under_way(session: Session, project: UUID) -> tuple[int, int]:
    """Return how many uploads are under way, and how many bytes they will bring."""
    row = session.execute(
        select(func.count(), func.coalesce(func.sum(UploadRow.size), 0)).where(UploadRow.project_id == project)
    ).one()
    return int(row[0]), int(row[1])


def limits(settings: Settings, project: ProjectRow) -> Limits:
    """Return what a project may hold; 0 is any number."""
    found = _limits(settings, project.max_bytes, project.max_uploads, project.max_documents)
    return found.model_copy(update={"jobs": project.max_jobs or 0, "runner_seconds": project.max_runner_seconds or 0})


def _limits(settings: Settings, size: int | None, uploads: int | None, documents: int | None) -> Limits:
    return Limits(
        bytes=settings.project_bytes if size is None else size,
        uploads=settings.project_uploads if uploads is None else uploads,
        documents=settings.project_documents if documents is None else documents,
        jobs=0,
        runner_seconds=0,
    )


# ------------------------------------------------------------------------------------------- what runners do for it


@dataclass(frozen=True, slots=True)
class Exhausted:
    """Which limits a project has reached, each in one sentence; None for one that it has not."""

    jobs: str | None = None
    """Then runners take nothing more for it but what is live or was."""
    runner_seconds: str | None = None
    """Then they take no gates and recordings."""


def exhausted(session: Session, project: UUID, at: datetime, *, is_claiming: bool = False) -> Exhausted:
    """Return which limits of runners a project has reached; `is_claiming` keeps others from claiming meanwhile."""
    row = session.get_one(ProjectRow, project)
    if not (row.max_jobs or row.max_runner_seconds):
        return Exhausted()
    if is_claiming:
        # Of two runners that claim at once, the second sees what the first has taken.
        session.get_one(ProjectRow, project, with_for_update={"key_share": True}, populate_existing=True)
    jobs, seconds = _worked(session, project, at)
    told = f"the quota of project {row.name}: "
    return Exhausted(
        f"{told}runners hold {jobs} of its jobs, and it may have {row.max_jobs} at once"
        if row.max_jobs and jobs >= row.max_jobs
        else None,
        f"{told}its gates and recordings of the last 24 hours took {seconds / 3600:,.1f} hours of runners, and it may "
        f"have {row.max_runner_seconds / 3600:,.1f}"
        if row.max_runner_seconds and seconds >= row.max_runner_seconds
        else None,
    )


def spend(job: JobRow, until: datetime) -> None:
    """Count the time that an attempt took of a runner, which has ended."""
    if job.claimed_at is not None:
        job.spent_ms = (job.spent_ms or 0) + max(0, round((until - job.claimed_at).total_seconds() * 1000))


def _worked(session: Session, project: UUID, at: datetime) -> tuple[int, int]:
    """Return how many jobs runners hold for a project, and how many seconds they measured for it within a day."""
    row = db.ask_one(session, _WORKED, {"project": project, "at": at})
    return int(row.jobs), int(row.seconds)


_WORKED = db.Sql(
    """
    SELECT
        (SELECT count(*) FROM jobs WHERE project_id = :project AND state = 'claimed' AND lease_until >= :at) AS jobs,
        (SELECT coalesce(sum(CASE WHEN claimed_at >= :at - interval '24 hours'
                THEN coalesce(spent_ms, 0) / 1000.0 ELSE 0 END + CASE state WHEN 'claimed'
                THEN greatest(0, extract(epoch FROM
                    least(lease_until, :at) - greatest(claimed_at, :at - interval '24 hours'))) ELSE 0 END), 0)
            FROM jobs
            WHERE project_id = :project AND kind <> 'serve'
                AND (claimed_at >= :at - interval '24 hours' OR state = 'claimed')) AS seconds
    """
)


def shown(session: Session, settings: Settings, project: ProjectRow) -> ProjectUsage:
    """Return what a project holds beside what it may."""
    usage = session.get(ProjectUsageRow, project.id)
    under_way, coming = _under_way(session, project.id)
    jobs, seconds = _worked(session, project.id, db.now(session))
    return ProjectUsage(
        name=project.name,
        bytes=usage.bytes if usage else 0,
        bytes_coming=coming,
        uploads=under_way,
        documents=usage.documents if usage else 0,
        jobs=jobs,
        runner_seconds=seconds,
        limits=limits(settings, project),
        own_limits=Limits(
            bytes=project.max_bytes,
            uploads=project.max_uploads,
            documents=project.max_documents,
            jobs=project.max_jobs,
            runner_seconds=project.max_runner_seconds,
        ),
    )
