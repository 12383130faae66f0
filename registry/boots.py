"""What boots of a bundle took, read out of the log: stage, load, compile, warm, ready and gates."""

from collections.abc import Iterator
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry import evidence
from registry.logged import Logged
from registry.tables import JobRow
from schemas.boots import WARM_PERCENT, Boot
from schemas.evidence import EngineBooted, Kind
from schemas.result import GateResult


def of_bundle(session: Session, project: UUID, bundle: str, *, limit: int) -> list[Boot]:
    """Return the boots of a bundle by its newest jobs, newest first.

    Args:
        session: of the caller.
        project: whose.
        bundle: digest.
        limit: most jobs that are looked into.
    """
    rows = session.scalars(
        select(JobRow)
        .where(JobRow.bundle == bundle, JobRow.project_id == project)
        .order_by(JobRow.id.desc())
        .limit(limit)
    ).all()
    streams: dict[str, list[Logged]] = {}
    found: list[Boot] = []
    for row in rows:
        stream = evidence.release_stream(row.release_id) if row.release_id else f"run/{row.id}"
        if stream not in streams:
            streams[stream] = list(evidence.read(session, stream))
        found += reversed(list(_boots(row, streams[stream])))
    return found


def _boots(job: JobRow, entries: list[Logged]) -> Iterator[Boot]:
    """Yield a job's boots in order. The gates that follow one, before the next, ran on it."""
    booted: tuple[Logged, EngineBooted] | None = None
    gates = 0
    for row in (one for one in entries if one.act.startswith(f"job:{job.id}:")):
        if row.kind == Kind.ENGINE_BOOTED:
            if booted is not None:
                yield _boot(job, *booted, gates)
            booted, gates = (row, EngineBooted.model_validate(evidence.claim_of(row.envelope)["body"])), 0
        elif row.kind == Kind.GATE_RECORDED:
            gates += GateResult.model_validate(evidence.claim_of(row.envelope)["body"]).duration_ms
    if booted is not None:
        yield _boot(job, *booted, gates)


def _boot(job: JobRow, entry: Logged, body: EngineBooted, gates_ms: int) -> Boot:
    in_memory = body.page_cache_percent
    is_cold = None if in_memory is None else in_memory < WARM_PERCENT or body.kernel_cache == "empty"
    return Boot(
        run=job.id,
        kind=job.kind,
        release=job.release_id,
        runner=body.runner,
        entry=entry.entry_digest,
        booted_at=entry.recorded_at,
        is_cold=is_cold,
        was_staged=body.was_staged,
        page_cache_percent=in_memory,
        kernel_cache=body.kernel_cache,
        stage_ms=body.stage_ms,
        loading_ms=body.loading_ms,
        compile_ms=body.compile_ms,
        warming_ms=body.warming_ms,
        ready_ms=body.ready_ms,
        gates_ms=gates_ms or None,
        compared=body.compared,
        findings=body.findings or [],
    )
