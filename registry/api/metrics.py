"""What the service tells a monitoring system, in Prometheus' text format. Every label has few values, known before."""

import mmap
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from sqlalchemy import func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from registry import db, projects
from registry.api.deps import SessionDep, allow
from registry.api.middleware import CLOSED_STATUS
from registry.api.problems import declare
from registry.api.routes import Route
from registry.auth import Actor
from registry.tables import EntryRow, JobRow, ReleaseRow
from schemas.release import Phase
from schemas.runner import JobState

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UNMATCHED = "unmatched"
"""Route of a request that no route answers: its address is the caller's choice, and so no label."""
OTHER = "other"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

CLOSED = "closed"
"""Class of a request whose caller went away before all of it had come: nobody heard an answer."""
STATUSES = (*(f"{status}xx" for status in range(1, 6)), CLOSED)
LABELS = ("method", "route", "status")
PLACE_BYTES = 256 * 1024
"""Of one process on a board: enough for 300 routes."""

router = APIRouter(tags=["service"], route_class=Route)


class Board:
    """Numbers that the API's processes share: each writes in a place of its own, and any may add all of them up.

    It is memory, and not a file: it ends with the processes. One that takes another's place counts on from there.
    """

    def __init__(self, places: int = 1) -> None:
        """Make one before the processes are forked."""
        self._memory: memoryview[float] = memoryview(mmap.mmap(-1, places * PLACE_BYTES)).cast("d")
        self._places = places

    def at(self, place: int) -> "memoryview[float]":
        """Return the numbers of a place, to be written by its process alone."""
        length = PLACE_BYTES // self._memory.itemsize
        return self._memory[place * length : (place + 1) * length]

    def total(self, number: int) -> float:
        """Return the sum of one number over all places."""
        length = PLACE_BYTES // self._memory.itemsize
        return sum(self._memory[place * length + number] for place in range(self._places))


class Requests:
    """Requests that the API has answered, and how long they took, by method, route and class of status.

    Args:
        routes: the paths of all routes, in the same order in each process.
        board: where they are counted.
        place: of this process on the board.

    Raises:
        ValueError: there are more routes than a board has room for.
    """

    def __init__(self, routes: Iterable[str], board: Board, place: int = 0) -> None:
        self._numbers = _numbered(tuple(sorted(set(routes))))
        self._board, self._mine = board, board.at(place)
        if 2 * len(self._numbers) > len(self._mine):
            raise ValueError(f"a board has no room for {len(self._numbers)} counters")

    def add(self, scope: Mapping[str, Any], status: int, seconds: float) -> None:
        """Count one request. To be called in one thread."""
        route = getattr(scope.get("route"), "path", UNMATCHED)
        method = scope["method"] if scope["method"] in METHODS else OTHER
        number = self._numbers[method, route, CLOSED if status == CLOSED_STATUS else f"{status // 100}xx"]
        self._mine[number] += 1
        self._mine[number + 1] += seconds

    def lines(self) -> Iterable[str]:
        """Return what they add up to, over all processes."""
        counts = {label: self._board.total(number) for label, number in self._numbers.items()}
        known = sorted(label for label, count in counts.items() if count)
        yield from _family("sluicegate_requests_total", "counter", "Requests answered.")
        for label in known:
            yield f"sluicegate_requests_total{_labels(label)} {counts[label]:.0f}"
        yield from _family("sluicegate_request_seconds_total", "counter", "Seconds spent on them.")
        for label in known:
            yield f"sluicegate_request_seconds_total{_labels(label)} {self._board.total(self._numbers[label] + 1):.6f}"


@cache
def _numbered(routes: tuple[str, ...]) -> Mapping[tuple[str, str, str], int]:
    """Return where on a board each counter stands, by its labels. An application that is made again has the same."""
    known, methods = (*routes, UNMATCHED), (*sorted(METHODS), OTHER)
    labels = [(method, route, status) for method in methods for route in known for status in STATUSES]
    return MappingProxyType({label: 2 * number for number, label in enumerate(labels)})


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
