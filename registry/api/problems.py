"""Every refusal and failure leaves in one shape: RFC 9457, `application/problem+json`, with the request's id."""

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from uuid import UUID

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import DataError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from registry import db
from schemas import problems
from schemas.faults import Schema, fault, sentence
from schemas.problems import InternalError, InvalidDocument, Problem, Unavailable

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_SECONDS = 2
MAX_ERRORS = 100
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

log = structlog.get_logger("registry.api")

Responses = dict[int | str, dict[str, Any]]


class Place(BaseModel):
    """One place that is wrong."""

    pointer: str = Field(description="JSON Pointer into the body; empty for the body as a whole or a parameter.")
    detail: str = Field(description="What is wrong there.")


class ProblemBody(BaseModel):
    """A problem: RFC 9457, with our own members."""

    model_config = ConfigDict(extra="allow", title="Problem")

    type: str = Field(description="URI of the problem's kind; it leads to its description.")
    title: str = Field(description="Name of the kind.")
    status: int = Field(description="HTTP status.")
    detail: str = Field(description="What happened here, and what to do.")
    instance: str = Field(description="URN of this occurrence.")
    request_id: UUID = Field(description="Id under which the service logged the request.")
    errors: list[Place] | None = Field(None, description="Each place that is wrong.")


_BY_STATUS = {
    404: problems.NotFound,
    405: problems.MethodNotAllowed,
    408: problems.TooSlow,
    413: problems.TooLarge,
    415: problems.UnsupportedMediaType,
    503: problems.Unavailable,
}
"""What a refusal of the framework means in our words. Any other 4xx is a request that could not be read."""


def declare(*kinds: type[Problem]) -> Responses:
    """Return what a route that needs a token may answer besides success, for `responses=`."""
    return declare_open(problems.Unauthenticated, problems.NotPermitted, problems.TooManyRequests, *kinds)


def declare_open(*kinds: type[Problem]) -> Responses:
    """Return what a route that needs no token may answer besides success."""
    by_status: dict[int, list[type[Problem]]] = {}
    everywhere: tuple[type[Problem], ...] = (problems.Unavailable, problems.InternalError)
    for kind in (*kinds, *everywhere):
        by_status.setdefault(kind.status, []).append(kind)
    return {
        status: {
            "description": "; ".join(dict.fromkeys(kind.title for kind in by_status[status])),
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted(by_status)
    }


def answer(request: Request, problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """Return a problem as an HTTP answer."""
    identity = str(request.state.request_id)
    body = problem.body(request.app.state.service.settings.public_url)
    body |= {"instance": f"urn:uuid:{identity}", "request_id": identity}
    sent = dict(headers or {})
    if problem.status == HTTPStatus.UNAUTHORIZED:
        sent["WWW-Authenticate"] = "Bearer"
    if problem.status == HTTPStatus.SERVICE_UNAVAILABLE:
        sent["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if problem.status == HTTPStatus.TOO_MANY_REQUESTS:
        sent["Retry-After"] = str(problem.members.get("retry_after_seconds", RETRY_AFTER_SECONDS))
    return JSONResponse(body, status_code=problem.status, headers=sent, media_type=MEDIA_TYPE)


def install(app: FastAPI, page: Callable[[Request, Problem], Response]) -> None:
    """Let every exception that leaves an endpoint be answered in the one shape.

    `page` makes a page of a problem, for a person whose browser asks for an address that no page has.
    """

    def told(request: Request, problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
        if isinstance(problem, problems.NotFound) and _is_a_persons(request):
            return page(request, problem)
        return answer(request, problem, headers)

    @app.exception_handler(Problem)
    async def refused(request: Request, problem: Problem) -> Response:
        return told(request, problem)

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:
        described = _described(request)
        places = [_place(one, error.body, described) for one in error.errors()[:MAX_ERRORS]]
        detail = "; ".join(f"{one['pointer']} {one['detail']}".strip() for one in places[:3])
        return answer(request, InvalidDocument(detail or "the request is not valid", errors=places))

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        return told(request, _translated(request, error), error.headers)

    @app.exception_handler(DBAPIError)
    async def database(request: Request, error: DBAPIError) -> Response:
        return answer(request, unexpected(error))

    @app.exception_handler(PoolTimeout)
    async def exhausted(request: Request, error: PoolTimeout) -> Response:
        return answer(request, unexpected(error))


def unexpected(error: Exception) -> Problem:
    """Return what a caller is told of an error that nobody meant to raise. The details go to the log only."""
    if db.is_away(error):
        log.warning("database_unavailable", error=str(error).splitlines()[0])
        return Unavailable("the database did not answer in time, or takes nothing just now; try again")
    if isinstance(error, DataError):
        log.warning("value_refused_by_database", error=str(error.orig))
        return InvalidDocument("a value cannot be stored", errors=[{"pointer": "", "detail": "cannot be stored"}])
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        log.error("no_room", error=str(error))
        return Unavailable("there is no room left to store it; nothing of it was kept")
    log.error("request_failed", exc_info=error)
    return InternalError("the service failed; its log has the details under the request id")


def _is_a_persons(request: Request) -> bool:
    """Tell whether a browser asks, and not for what is below the API."""
    wants_page = "text/html" in request.headers.get("accept", "")
    return wants_page and request.method in {"GET", "HEAD"} and not request.url.path.startswith(("/v1/", "/static/"))


def _translated(request: Request, error: HTTPException) -> Problem:
    where = f"{request.method} {request.url.path}"
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            return problems.NotFound(f"there is nothing at {where}")
        case HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = (error.headers or {}).get("Allow", "another method")
            return problems.MethodNotAllowed(f"{request.url.path} answers {allowed}, not {request.method}")
    kind = _BY_STATUS.get(error.status_code)
    if kind is not None:
        return kind(str(error.detail))
    if error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
        return InvalidDocument(str(error.detail), errors=[{"pointer": "", "detail": str(error.detail)}])
    return unexpected(error)


@dataclass(frozen=True, slots=True)
class _Described:
    """What the OpenAPI document says of a route: what its body and its parameters may be."""

    body: Schema
    parameters: Mapping[tuple[str, str], Schema]


def _described(request: Request) -> _Described:
    """Return what is known of the route that a request met; of a page nothing."""
    root = request.app.openapi()
    path = getattr(request.scope.get("route"), "path_format", "")
    operation = root["paths"].get(path, {}).get(request.method.lower(), {})
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    parameters = {(one["in"], one["name"]): Schema(one["schema"], root) for one in operation.get("parameters", [])}
    return _Described(Schema(body, root), parameters)


def _place(error: Mapping[str, Any], body: Any, described: _Described) -> dict[str, str]:
    where, *path = error["loc"]
    if error["type"] == "json_invalid":
        return {"pointer": "", "detail": f"is not JSON: {error['ctx']['error']} at character {path[0]}"}
    if where == "body":
        return fault({**error, "loc": tuple(path)}, body, described.body)
    name, *inner = path
    schema = described.parameters.get((where, str(name)), Schema({}, {}))
    said = sentence(error, schema.places(inner, None))
    return {"pointer": "", "detail": f"{where} parameter {'.'.join(map(str, path))}: {said}"}
