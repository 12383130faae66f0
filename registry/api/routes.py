"""Routes whose endpoint is served in one thread, from the look at its caller to the commit and the written answer.

Every change of thread costs a request some time, and much more of it when others are busy: whoever goes on needs the
interpreter's lock, which another thread may keep for milliseconds. FastAPI would change thread for each dependency
that waits, for the endpoint, for its answer and for the commit. Here the event loop reads a request and checks its
parameters; one thread does the rest.
"""

import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, get_args

import anyio.to_thread
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError, ResponseValidationError
from fastapi.routing import APIRoute
from sqlalchemy.orm import Session

from registry.service import Service
from schemas.problems import Problem

REQUEST: Final = "request_of_the_route"
RESPONSE: Final = "response_of_the_route"
SAFE: Final = frozenset({"GET", "HEAD"})
"""Methods whose endpoints only read."""


@dataclass(slots=True)
class Exchange:
    """A request under way, and what its endpoint is given."""

    request: Request
    response: Response | None = None
    """What the endpoint says of its answer: headers, a status."""
    made: dict["Given", Any] = field(default_factory=dict)
    unit: Session | None = None
    """The unit of work, once it is open."""

    @property
    def service(self) -> Service:
        """What the application was made with."""
        service: Service = self.request.app.state.service
        return service

    @property
    def session(self) -> Session:
        """The request's unit of work. Raises RuntimeError when the endpoint has asked for none."""
        if self.unit is None:
            raise RuntimeError("the endpoint has no unit of work: it does not ask for a session")
        return self.unit

    @contextmanager
    def within(self, session: Session) -> Iterator[None]:
        """Be in a unit of work. Whoever asked it for anything once it has ended would take a connection for ever."""
        self.unit = session
        try:
            yield
        finally:
            self.unit = None

    def give(self, given: "Given") -> Any:
        """Return what an endpoint asks for; the same however often it asks. Call it in the endpoint's thread."""
        if given not in self.made:
            self.made[given] = given.make(self)
        return self.made[given]


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Marks a parameter of an endpoint that no caller sends: `Annotated[Session, Given(…)]`. Made in its thread.

    `is_gate`: without it nobody learns anything, not even that the request is wrong otherwise. `check` is asked in the
    event loop before anything of the request is read.
    """

    make: Callable[[Exchange], Any]
    is_session: bool = False
    """Whether a unit of work is open around the endpoint."""
    is_placed: bool = False
    """Whether the endpoint needs a connection for long: it takes one of the places."""
    is_gate: bool = False
    check: Callable[[Request], None] | None = None
    action: str | None = None
    """What the caller must be permitted to do; see `registry.auth.PERMISSIONS`."""


class Route(APIRoute):
    """A route of ours. `router = APIRouter(route_class=Route)`."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Take an endpoint whose parameters may be `Given`."""
        served = endpoint if isinstance(endpoint, _Served) else _Served(endpoint)
        self.given: tuple[Given, ...] = tuple(served.given.values())
        super().__init__(path, served, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler: whoever may not come in is told so first, whatever else is wrong."""
        handle = super().get_route_handler()
        gates = [one for one in self.given if one.is_gate]
        checks = [one.check for one in gates if one.check is not None]

        async def handled(request: Request) -> Response:
            exchange = request.state.exchange = Exchange(request)
            for check in checks:
                check(request)
            try:
                return await handle(request)
            except (RequestValidationError, Problem):
                if any(gate not in exchange.made for gate in gates):
                    await anyio.to_thread.run_sync(_pass, exchange, gates)
                raise

        return handled


def _pass(exchange: Exchange, gates: Iterable[Given]) -> None:
    for gate in gates:
        exchange.give(gate)


class _Served:
    """An endpoint as FastAPI sees it: without what is given, and asynchronous."""

    def __init__(self, endpoint: Callable[..., Any]) -> None:
        signature = inspect.signature(endpoint)
        self.__name__, self.__doc__ = endpoint.__name__, endpoint.__doc__
        self.__module__, self.__qualname__ = endpoint.__module__, endpoint.__qualname__
        self._endpoint = endpoint
        self._is_async = inspect.iscoroutinefunction(endpoint)
        self.given: dict[str, Given] = {}
        kept = []
        for name, parameter in signature.parameters.items():
            given = next((one for one in get_args(parameter.annotation) if isinstance(one, Given)), None)
            if given is not None:
                self.given[name] = given
            else:
                kept.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        if self._is_async and any(one.is_session for one in self.given.values()):
            raise TypeError(f"{endpoint.__name__} runs in the event loop, and a unit of work needs a thread")
        self._gates = [one for one in self.given.values() if one.is_gate]
        self._is_placed = any(one.is_placed for one in self.given.values())
        self._has_session = any(one.is_session for one in self.given.values())
        self._request = _named(kept, Request, REQUEST)
        self._response = _named(kept, Response, RESPONSE)
        self.__signature__ = signature.replace(parameters=kept)

    async def __call__(self, **values: Any) -> Any:
        """Serve one request."""
        request: Request = values[self._request]
        exchange: Exchange = request.state.exchange
        exchange.response = values[self._response]
        values.pop(REQUEST, None)
        values.pop(RESPONSE, None)
        if self._is_async:
            if self._gates:
                await anyio.to_thread.run_sync(_pass, exchange, self._gates)
            return await self._endpoint(**values, **self._all(exchange))
        serve = partial(self._serve, exchange, values)
        if not self._is_placed:
            return await anyio.to_thread.run_sync(serve)
        state = request.app.state
        async with state.changes if request.method not in SAFE else nullcontext():
            return await anyio.to_thread.run_sync(serve, limiter=state.places)

    def _serve(self, exchange: Exchange, values: Mapping[str, Any]) -> Response:
        """Do everything that waits. What cannot be written is not committed; nothing is answered before it is."""
        database = exchange.service.database
        if self._has_session and exchange.request.method in SAFE:
            # Statements that only read stand alone, so the look at the caller is one more of them.
            with database.reading() as session, exchange.within(session):
                _pass(exchange, self._gates)
                return self._answer(exchange, values)
        # Before the unit of work: its connection is another's until then.
        _pass(exchange, self._gates)
        if not self._has_session:
            return self._answer(exchange, values)
        with database.transaction() as session, exchange.within(session):
            return self._answer(exchange, values)

    def _answer(self, exchange: Exchange, values: Mapping[str, Any]) -> Response:
        found = self._endpoint(**values, **self._all(exchange))
        return found if isinstance(found, Response) else _written(exchange, found)

    def _all(self, exchange: Exchange) -> dict[str, Any]:
        return {name: exchange.give(given) for name, given in self.given.items()}


def _named(parameters: list[inspect.Parameter], kind: type, name: str) -> str:
    """Return the name of the parameter of a kind; one is added where the endpoint has none."""
    found = next((one.name for one in parameters if one.annotation is kind), None)
    if found is None:
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind))
    return found or name


def _written(exchange: Exchange, found: Any) -> Response:
    """Return what an endpoint returned as JSON. Raises ResponseValidationError when it is not what was declared."""
    route: Route = exchange.request.scope["route"]
    said = exchange.response
    status = (said and said.status_code) or route.status_code or 200
    if route.response_field is None:
        if found is not None:
            raise TypeError(f"{route.name} declares no answer, and returned a {type(found).__name__}")
        answer = Response(status_code=status)
    else:
        value, errors = route.response_field.validate(found, {}, loc=("response",))
        if errors:
            raise ResponseValidationError(errors=errors, body=found)
        content = route.response_field.serialize_json(value)
        answer = Response(content, status_code=status, media_type="application/json")
    if said is not None:
        answer.raw_headers.extend(said.raw_headers)
    return answer
