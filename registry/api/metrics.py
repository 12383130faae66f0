"""What the service tells a monitoring system, in Prometheus' text format. Every label has few values, known before."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from sqlalchemy import func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from registry import db, projects
from registry.api.deps import SessionDep, allow
from registry.api.problems import declare
from registry.api.routes import Route
from registry.auth import Actor
from registry.tables import EntryRow, JobRow, ReleaseRow
from schemas.release import Phase
from schemas.runner import JobState

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UNMATCHED = "unmatched"
"""Route of a request that no route answers: its address is the caller's choice, and so no label."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

LABELS = ("method", "route", "status")

router = APIRouter(tags=["service"], route_class=Route)


class Requests:
    """Requests that this process has answered, and how long they took, by method, route and class of status."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._seconds: Counter[tuple[str, str, str]] = Counter()

    def add(self, scope: Mapping[str, Any], status: int, seconds: float) -> None:
        """Count one request."""
        route = getattr(scope.get("route"), "path", UNMATCHED)
        method = scope["method"] if scope["method"] in METHODS else "other"
        labels = (method, route, f"{status // 100}xx")
        with self._lock:
            self._counts[labels] += 1
            self._seconds[labels] += seconds  # type: ignore[assignment] # a Counter adds up floats as well

    def lines(self) -> Iterable[str]:
        """Return what they add up to."""
        with self._lock:
            counts, seconds = dict(self._counts), dict(self._seconds)
        yield from _family("sluicegate_requests_total", "counter", "Requests answered by this process.")
        for labels, count in sorted(counts.items()):
            yield f"sluicegate_requests_total{_labels(labels)} {count}"
        yield from _family("sluicegate_request_seconds_total", "counter", "Seconds spent on them.")
        for labels, total in sorted(seconds.items()):
            yield f"sluicegate_request_seconds_total{_labels(labels)} {total:.6f}"


def _labels(values: tuple[str, str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in zip(LABELS, values, strict=True)) + "}"


def _family(name: str, kind: str, what: str) -> Iterable[str]:
    return f"# HELP {name} {what}", f"# TYPE {name} {kind}"


def _counted(session: Session, column: InstrumentedAttribute[str]) -> dict[str, int]:
    return dict(session.execute(select(column, func.count()).group_by(column)).all())


def stored(session: Session) -> Iterable[str]:
    """Return what the database says: of all projects together."""
    phases = _counted(session, ReleaseRow.phase)
    yield from _family("sluicegate_releases", "gauge", "Releases by phase.")
    yield from (f'sluicegate_releases{{phase="{phase}"}} {phases.get(phase, 0)}' for phase in Phase)
    states = _counted(session, JobRow.state)
    yield from _family("sluicegate_jobs", "gauge", "Jobs of runners by state.")
    yield from (f'sluicegate_jobs{{state="{state}"}} {states.get(state, 0)}' for state in JobState)
    newest = session.scalar(select(func.max(EntryRow.sequence))) or 0
    yield from _family("sluicegate_entries", "gauge", "Sequence of the newest entry of evidence; it grows with each.")
    yield f"sluicegate_entries {newest}"
    now = db.now(session)
    due = session.scalar(select(func.min(ReleaseRow.due_at)).where(ReleaseRow.due_at <= now))
    waits = session.scalar(
        select(func.min(JobRow.due_at)).where(JobRow.state == JobState.PENDING, JobRow.due_at <= now)
    )
    for name, since, what in (
        ("sluicegate_sweep_lag_seconds", due, "How long the release that has waited longest is due for a look."),
        ("sluicegate_job_wait_seconds", waits, "How long the job that has waited longest is due for a runner."),
    ):
        yield from _family(name, "gauge", what)
        yield f"{name} {(now - since).total_seconds() if since else 0.0:.3f}"


@router.get(
    "/v1/metrics",
    operation_id="getMetrics",
    response_class=PlainTextResponse,
    responses={200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}}, **declare()},
)
def get_metrics(actor: Annotated[Actor, allow("read")], session: SessionDep, request: Request) -> PlainTextResponse:
    """Tell numbers for a monitoring system, over all projects: for tokens of the project `default`."""
    projects.require_home(actor)
    requests: Requests = request.app.state.requests
    lines = [*requests.lines(), *stored(session)]
    return PlainTextResponse("\n".join(lines) + "\n", media_type=MEDIA_TYPE)
