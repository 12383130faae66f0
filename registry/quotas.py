"""What a project holds, and how much it may: counted with what is added, so that two at once agree.

What is stored beyond a limit is refused. What runners would do beyond one waits: it is nobody's fault, and passes.

Whoever adds what one more of could reach a limit counts alone: nobody else does before that is committed. Everybody
else counts beside others, each in a part of its own; were there one row, each registration would wait until the one
before is on the disk.
"""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from registry import db, projects
from registry.settings import Settings
from registry.tables import JobRow, ProjectRow, UploadRow
from schemas.api import Limits, ProjectUsage
from schemas.problems import QuotaExceeded, Unavailable

NEAR = 1000
"""Documents short of the limit from where on they are counted alone: more than connections can add at once."""
PARTS = 32
"""Rows that a project is counted in: as many can count at once, and a sum of them is read quickly."""

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
        (SELECT CAST(coalesce(sum(bytes), 0) AS bigint) FROM project_usage WHERE project_id = :project)
            + (SELECT CAST(coalesce(sum(size), 0) AS bigint) FROM uploads WHERE project_id = :project) AS bytes
    """
)


def count(session: Session, settings: Settings, project: UUID, added: Added, *, is_bound: bool = True) -> None:
    """Count what is added, and keep others from reaching a limit meanwhile, until the transaction ends. Call it last.

    `is_bound`: whether limits hold for it; what the service itself records is counted and never refused.

    Raises:
        QuotaExceeded: the project would hold more than it may.
        Unavailable: so much was added by others meanwhile that this has to be counted anew.
    """
    # What an upload brings is counted when it is there.
    lasting = 0 if added.uploads else added.bytes
    turn = {
        "project": project, "lock": f"quota/{project}", "is_bound": is_bound, "near": NEAR,
        "bytes": added.bytes, "documents": added.documents, "uploads": added.uploads,
        "usual_bytes": settings.project_bytes, "usual_documents": settings.project_documents,
    }  # fmt: skip
    is_alone = db.ask_one(session, _TURN, turn).is_alone
    counted = db.ask_one(
        session, _COUNT, {"project": project, "bytes": lasting, "documents": added.documents, "parts": PARTS}
    )
    if not is_bound:
        return
    limit = _limits(settings, counted.max_bytes, counted.max_uploads, counted.max_documents)
    if not is_alone and added.documents > 0 and limit.documents and counted.documents > limit.documents - NEAR // 2:
        raise Unavailable("others are adding documents to the project, which has nearly as many as it may; try again")
    is_asked = bool(added.uploads or (added.bytes > 0 and limit.bytes))
    under_way, coming = _under_way(session, project) if is_asked else (0, 0)
    if added.uploads:  # whose row is written already
        under_way, coming = under_way - added.uploads, coming - added.bytes
    _require("bytes", counted.bytes - lasting + coming, added.bytes, limit.bytes)
    _require("documents", counted.documents - added.documents, added.documents, limit.documents)
    _require("uploads", under_way, added.uploads, limit.uploads)


# Held until the transaction ends: alone, or beside others who count. A statement of its own, so that what is read next
# was committed before.
_TURN = db.Sql(
    """
    SELECT is_alone, CASE WHEN is_alone THEN pg_advisory_xact_lock(hashtextextended(:lock, 0))
        ELSE pg_advisory_xact_lock_shared(hashtextextended(:lock, 0)) END
    FROM (
        SELECT :is_bound AND (
            :uploads > 0
            OR (:bytes > 0 AND coalesce(max_bytes, :usual_bytes) <> 0)
            OR (:documents > 0 AND coalesce(max_documents, :usual_documents) <> 0
                AND (SELECT coalesce(sum(documents), 0) FROM project_usage WHERE project_id = :project) + :near
                    > coalesce(max_documents, :usual_documents))
        ) AS is_alone FROM projects WHERE id = :project
    ) AS turn
    """
)
# Whose part it is, is told by the connection: few others have the same.
_COUNT = db.Sql(
    """
    WITH counted AS (
        INSERT INTO project_usage AS held (project_id, part, bytes, documents)
        VALUES (:project, pg_backend_pid() % :parts, :bytes, :documents)
        ON CONFLICT (project_id, part) DO UPDATE
        SET bytes = held.bytes + excluded.bytes, documents = held.documents + excluded.documents
        RETURNING part, bytes, documents
    ), other AS (
        SELECT CAST(coalesce(sum(held.bytes), 0) AS bigint) AS bytes,
            CAST(coalesce(sum(held.documents), 0) AS bigint) AS documents
        FROM project_usage AS held, counted WHERE held.project_id = :project AND held.part <> counted.part
    )
    SELECT counted.bytes + other.bytes AS bytes, counted.documents + other.documents AS documents,
        max_bytes, max_uploads, max_documents
    FROM projects, counted, other WHERE projects.id = :project
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


_HELD = db.Sql(
    """
    SELECT CAST(coalesce(sum(bytes), 0) AS bigint) AS bytes, CAST(coalesce(sum(documents), 0) AS bigint) AS documents
    FROM project_usage WHERE project_id = :project
    """
)


def shown(session: Session, settings: Settings, project: ProjectRow) -> ProjectUsage:
    """Return what a project holds beside what it may."""
    held = db.ask_one(session, _HELD, {"project": project.id})
    under_way, coming = _under_way(session, project.id)
    jobs, seconds = _worked(session, project.id, db.now(session))
    return ProjectUsage(
        name=project.name,
        bytes=held.bytes,
        bytes_coming=coming,
        uploads=under_way,
        documents=held.documents,
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
        generation=projects.generation(session, project.id),
    )
