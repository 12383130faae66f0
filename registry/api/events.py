"""The log as it grows, over server-sent events: one answer that goes on until somebody ends it."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

import anyio
import structlog
from fastapi import APIRouter, FastAPI, Header, Query, Request
from fastapi.responses import StreamingResponse
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from registry import auth, cursors, db, evidence, targets
from registry.api import problems
from registry.api.bell import Bell, Waiter
from registry.api.deps import SessionDep, bearer
from registry.api.evidence import ReaderDep, StreamName, cursor
from registry.api.problems import declare
from registry.api.routes import Route
from registry.cursors import Cursor
from registry.evidence import Selection
from registry.logged import Logged
from registry.service import Service
from schemas.api import TargetName
from schemas.evidence import Kind
from schemas.problems import InvalidDocument, NotFound, NotPermitted, Unauthenticated, Unavailable

HEARTBEAT_SECONDS = 10.0
"""Longest silence. Callers that hear nothing for much longer may take the connection for lost."""
LOOK_SECONDS = 5.0
"""A stream looks by itself this often: whether its token still counts, and should the bell be lost."""
LOOKERS = 4
"""Streams that read the database at once."""
BATCH = 100
MEDIA_TYPE = "text/event-stream"

log = structlog.get_logger("registry.api")
router = APIRouter(tags=["evidence"], route_class=Route)

AfterEvent = Annotated[str | None, Query(max_length=64, description="Cursor: only what comes after it.")]
LastEventId = Annotated[str | None, Header(max_length=64, description="Cursor; comes before `after`.")]


@router.get(
    "/v1/events",
    operation_id="followEvents",
    response_class=Response,
    responses={
        **declare(InvalidDocument, NotFound),
        200: {
            "description": "Events without end. `id` is a cursor; `data` an Entry. Comments keep the connection alive.",
            "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
        },
    },
)
def follow_events(
    request: Request,
    actor: ReaderDep,
    session: SessionDep,
    *,
    stream: StreamName = None,
    release: Annotated[UUID | None, Query(description="Only of this release.")] = None,
    target: Annotated[TargetName | None, Query(description="Only of this target and its releases.")] = None,
    kind: Annotated[list[Kind] | None, Query(max_length=64, description="Only of these kinds.")] = None,
    after: AfterEvent = None,
    last_event_id: LastEventId = None,
) -> Response:
    """Follow the project's log from a cursor on: what is there, then each new entry once it is certain.

    The answer ends when the token does, and when the service shuts down. Ask again with the last `id`; nothing is
    left out and nothing comes twice.
    """
    if stream is not None and release is not None:
        detail = "query parameter release: name a stream or a release, not both"
        raise InvalidDocument(detail, errors=[{"pointer": "", "detail": detail}])
    of = f"release/{release}" if release is not None else stream
    target_id = targets.get(session, actor.project_id, target).id if target is not None else None
    selection = Selection(stream=of, target=target_id, kinds=tuple(str(one) for one in kind or ()))
    return EventStream(request.app, actor.project_id, bearer(request), selection, cursor(last_event_id or after))


@dataclass(frozen=True, slots=True)
class _Look:
    frames: bytes
    cursor: Cursor
    is_more: bool


class EventStream(Response):
    """Tells a selection of a project's entries for as long as the holder of a token may read them."""

    media_type = MEDIA_TYPE

    def __init__(self, app: FastAPI, project: UUID, secret: str, selection: Selection, after: Cursor) -> None:
        """Prepare it. It holds no connection but while it looks."""
        super().__init__()
        self._service: Service = app.state.service
        self._bell: Bell = app.state.bell
        self._places: anyio.CapacityLimiter = app.state.places
        self._lookers: anyio.CapacityLimiter = app.state.lookers
        self._project, self._secret, self._selection, self._after = project, secret, selection, after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the caller is gone, the token has ended or the server is told to end."""
        who = auth.fingerprint(self._secret)
        if self._bell.is_closing or not self._bell.has_place(who):
            told = "this process serves as many streams as it can, or as one token may have"
            refused = Unavailable(f"{told}; try again, or read /v1/evidence")
            await problems.answer(Request(scope), refused)(scope, receive, send)
            return
        with self._bell.waiting(self._project, self._selection.stream, who) as waiter:
            # A proxy that collects the answer before it passes it on would keep it for ever.
            headers = {"x-accel-buffering": "no"}
            answer = StreamingResponse(self._frames(waiter), media_type=MEDIA_TYPE, headers=headers)
            await answer(scope, receive, send)

    async def _frames(self, waiter: Waiter) -> AsyncIterator[bytes]:
        yield b"retry: 500\n\n"
        at, spoke = self._after, time.monotonic()
        while not self._bell.is_closing:
            waiter.rung.clear()
            found = await self._look(at)
            if found is None:
                return
            at = found.cursor
            if found.frames:
                yield found.frames
                spoke = time.monotonic()
            elif time.monotonic() - spoke >= HEARTBEAT_SECONDS:
                # An id without data is no event, but the caller reads on from there.
                yield f": nothing new\nid: {at}\n\n".encode()
                spoke = time.monotonic()
            if not found.is_more:
                silence = time.monotonic() - spoke
                with anyio.move_on_after(max(0.01, min(LOOK_SECONDS, HEARTBEAT_SECONDS - silence))):
                    await waiter.rung.wait()

    async def _look(self, after: Cursor) -> _Look | None:
        """Return what comes after a cursor; None when the stream has to end."""
        try:
            async with self._places:
                return await anyio.to_thread.run_sync(self._read, after, limiter=self._lookers)
        except (Unauthenticated, NotPermitted):
            return None
        except (DBAPIError, PoolTimeout) as error:
            if not db.is_away(error):
                raise
            # The caller asks again, and is told then that the database is away.
            log.warning("stream_cut_short", error=str(error).splitlines()[0])
            return None

    def _read(self, after: Cursor) -> _Look:
        with self._service.database.transaction() as session:
            actor = auth.authenticate(session, self._secret)
            auth.require(actor, "read")
            # In this order: whatever lies before the horizon is there for the second query.
            horizon = cursors.horizon(session)
            rows = evidence.browse(
                session, self._project, self._selection, after=after, before=horizon, limit=BATCH + 1
            )
        shown, is_more = rows[:BATCH], len(rows) > BATCH
        at = evidence.cursor_of(shown[-1]) if is_more else max(after, Cursor.ahead_of(horizon))
        return _Look("".join(map(frame, shown)).encode(), at, is_more)


def frame(row: Logged) -> str:
    """Return an entry as one event. JSON has no line breaks of its own."""
    return f"id: {evidence.cursor_of(row)}\ndata: {evidence.wire(row).model_dump_json()}\n\n"
