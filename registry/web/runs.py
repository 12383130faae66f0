"""Runs as pages: the list, and one run with what it was asked for, how far it is, what gates found, and its log."""

from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter
from fastapi.responses import Response
from sqlalchemy import select
from sqlalchemy.orm import Session

from registry import auth, db, documents, evidence, jobs, releases, targets, waits
from registry.api.deps import SessionDep
from registry.api.pages import Cursor, page
from registry.tables import JobRow, RunnerRow, TargetRow
from registry.web.notices import Notice
from registry.web.releases import event_source
from registry.web.rendering import PageRoute, render
from registry.web.visitors import VisitorDep
from schemas.result import GateResult, Verdict
from schemas.runner import JobKind
from schemas.stories import TONES, served_in, tell

PAGE_SIZE = 25
LOOKS_AGAIN_SECONDS = 5
"""Between two looks of a page at a run that is not over: how far it is stands in no entry."""

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/runs")
def runs_page(actor: VisitorDep, session: SessionDep, after: Cursor) -> Response:
    """List what measures and records, newest first. A replica that serves is on the page of its target."""
    source = event_source(session)
    query = (
        select(JobRow, TargetRow.name)
        .join(TargetRow, TargetRow.id == JobRow.target_id, isouter=True)
        .where(JobRow.project_id == actor.project_id, JobRow.kind != JobKind.SERVE)
    )
    if after is not None:
        query = query.where(JobRow.id < after)
    rows = [(job, name) for job, name in session.execute(query.order_by(JobRow.id.desc()).limit(PAGE_SIZE + 1))]
    found = page(rows, PAGE_SIZE, lambda one: one[0].id, lambda one: one[0].id)
    return render(
        "runs.html",
        actor=actor,
        section="runs",
        runs=[(job, name, None if job.release_id else _outcome(session, job)) for job, name in rows[:PAGE_SIZE]],
        tones=_TONES,
        names=documents.names(session, actor.project_id, [job.bundle for job, _ in rows]),
        is_first=after is None,
        following=f"/runs?{urlencode({'cursor': found.next})}" if found.next else None,
        events=source if after is None else None,
        now=db.now(session),
    )


@router.get("/runs/{run}")
def run_page(run: UUID, actor: VisitorDep, session: SessionDep) -> Response:
    """Show a run; the page keeps itself up to date."""
    source = event_source(session, run=str(run))
    job = jobs.get(session, actor.project_id, run)
    entries = evidence.read(session, evidence.release_stream(job.release_id) if job.release_id else f"run/{job.id}")
    log = [] if job.release_id else [evidence.wire(row) for row in entries]
    recorded = {row.entry_digest: _result(row) for row in jobs.recorded(session, job)}
    latest = {result.gate: (entry, result) for entry, result in recorded.items()}
    named = {job.bundle, *job.suites, *served_in(log), *(one for one in (job.policy, job.reference) if one)}
    names = documents.names(session, actor.project_id, sorted(named))
    is_open = job.state in jobs.OPEN
    return render(
        "run.html",
        actor=actor,
        section="runs",
        run=job,
        target=None if job.target_id is None else session.get_one(TargetRow, job.target_id).name,
        runner=None if job.runner_id is None else session.get_one(RunnerRow, job.runner_id).name,
        replica=targets.replica_of(job),
        outcome=_outcome(session, job),
        notices=_notices(session, job, [result for _, result in latest.values()]),
        gates=[(gate, *latest.get(gate, (None, None))) for gate in job.gates],
        revoked=releases.revocations(entries),
        log=[(entry, *tell(entry, names)) for entry in reversed(log)],
        names=names,
        tones=_TONES,
        is_open=is_open,
        may_cancel=is_open and job.release_id is None and auth.may(actor, "cancel_run"),
        seconds=LOOKS_AGAIN_SECONDS if is_open else None,
        events=source,
        now=db.now(session),
    )


_TONES = TONES | {"recorded": "good", "undecided": "warn"}


def _result(row: Any) -> GateResult:
    return GateResult.model_validate(evidence.claim_of(row.envelope)["body"])


def _outcome(session: Session, job: JobRow) -> str | None:
    """Return how a run ended; None while it goes on, and for a replica, which serves and measures nothing."""
    return None if job.state in jobs.OPEN or job.kind == JobKind.SERVE else jobs.ended_as(session, job)


def _notices(session: Session, job: JobRow, results: list[GateResult]) -> list[Notice]:
    """Return the banners of a run: why it came to what it came to, what it waits for, and what it does."""
    found = [
        Notice(TONES.get(one.verdict, "plain"), f"{one.gate} {one.verdict}.", [one.summary])
        for one in results
        if one.verdict is not Verdict.PASSED
    ]
    if job.problem is not None:
        found.append(Notice("warn", "Problem.", [job.problem]))
    if (waits_for := waits.of_job(session, job)) is not None:
        found.append(Notice("warn", "Waits.", [waits_for]))
    elif job.state in jobs.OPEN and job.progress:
        found.append(Notice("plain", "Under way.", [job.progress]))
    return found
