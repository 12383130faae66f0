"""What endpoints ask for: the service, one unit of work, and the caller with a permission."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar

import anyio
from fastapi import Depends, Header, Request, Response
from pydantic import BaseModel
from sqlalchemy.orm import Session

from registry import acts, answers, auth
from registry.api.rates import Rates
from registry.auth import Actor
from registry.service import Service
from schemas.problems import TooManyRequests, Unauthenticated

ModelT = TypeVar("ModelT", bound=BaseModel)
ResultT = TypeVar("ResultT")


async def service_of(request: Request) -> Service:
    """Return the service that the application was made with."""
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(service_of)]


async def unit_of_work(request: Request) -> AsyncIterator[Session]:
    """Yield a session whose transaction commits before the answer goes out, or leaves nothing behind.

    It holds one of as many places as there are connections to spare. A request that has a connection still needs
    threads: to write its answer, to commit. Without places, those threads could all wait for a connection, each held
    by a request that waits for a thread.
    """
    async with request.app.state.places:
        unit = request.app.state.service.database.transaction()

        async def end(*failure: Any) -> None:
            # In a thread that nobody waits for, and to its end also when the caller has gone.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(unit.__exit__, *failure, limiter=anyio.CapacityLimiter(1))

        session = unit.__enter__()  # opens no connection: the first statement does, in the endpoint's thread
        try:
            yield session
        except BaseException as error:
            await end(type(error), error, error.__traceback__)
            raise
        await end(None, None, None)


# The scope ends the transaction when the endpoint returns. FastAPI's default ends it after the answer is sent, and
# a caller could then hold a 201 for a row that never lands.
SessionDep = Annotated[Session, Depends(unit_of_work, scope="function")]


class Perform(Protocol):
    """Does an act; see `registry.acts.perform`."""

    def __call__(self, work: Callable[[Session], ResultT], /) -> ResultT:
        """Return what `work` returned, once it is committed."""


async def _performing(request: Request) -> AsyncIterator[Perform]:
    # Its units of work are its own, and it holds a place as one that has a session does.
    async with request.app.state.places:
        yield partial(acts.perform, request.app.state.service)


PerformDep = Annotated[Perform, Depends(_performing, scope="function")]


def identify(service: Service, secret: str) -> Actor:
    """Return who holds a token. Raises Unauthenticated.

    It has a connection of its own, within one thread, and takes no place: half of the connections are left for it.
    """
    with service.database.look() as connection:
        return auth.authenticate(connection, secret)


def bearer(request: Request) -> str:
    """Return the token that a request carries. Raises Unauthenticated."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise Unauthenticated("send a token as `Authorization: Bearer TOKEN`")
    return secret.strip()


async def actor_of(request: Request) -> Actor:
    """Return the caller. Raises Unauthenticated; TooManyRequests before anything is looked up."""
    known: Actor | None = getattr(request.state, "caller", None)
    if known is not None:
        return known
    secret = bearer(request)
    rates: Rates = request.app.state.rates
    wait = rates.take(auth.fingerprint(secret))
    if wait:
        seconds = math.ceil(wait)
        raise TooManyRequests(
            f"this token has sent too many requests; wait for {seconds} s", retry_after_seconds=seconds
        )
    actor = await anyio.to_thread.run_sync(identify, request.app.state.service, secret)
    request.state.caller, request.state.actor = actor, f"{actor.project}/{actor.name}"
    return actor


ActorDep = Annotated[Actor, Depends(actor_of)]


def allow(action: str) -> Any:
    """Return the dependency that gives the caller, provided that the role may do `action`.

    Use: `actor: Annotated[Actor, allow("create_release")]`.

    Raises:
        KeyError: at import, when `action` is not in the table of permissions.
    """
    return Depends(_permitted(action))


def _permitted(action: str) -> Callable[[Request], Awaitable[Actor]]:
    auth.PERMISSIONS[action]

    async def permitted(request: Request) -> Actor:
        # Called, not asked for: a dependency of a dependency costs more than what it does.
        actor = await actor_of(request)
        auth.require(actor, action)
        return actor

    return permitted


IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        max_length=200,
        description="ETag of what the caller saw: nothing is done when it has changed since.",
    ),
]


def tag(response: Response, version: object) -> None:
    """Say which version an answer shows, for `If-Match`."""
    response.headers["etag"] = f'"{version}"'


class Once:
    """Makes what a request asks for, once for each Idempotency-Key; without a key, each time."""

    def __init__(
        self,
        request: Request,
        response: Response,
        service: Service,
        actor: Actor,
        session: Session,
        key: str | None,
    ) -> None:
        """Take what the request says."""
        self._request, self._response, self._service = request, response, service
        self._actor, self._session, self._key = actor, session, key

    def __call__(self, body: BaseModel, model: type[ModelT], make: Callable[[], ModelT]) -> ModelT:
        """Return what `make` returns, or returned the first time. Raises KeyReused."""
        if self._key is None:
            return make()
        asked = answers.Asked(
            key=self._key,
            secret=bearer(self._request),
            request=f"{self._request.method} {self._request.url.path}",
            body=body,
            seconds=self._service.settings.idempotency_seconds,
        )
        made, is_known = answers.give(self._session, self._actor, asked, model, make)
        if is_known:
            self._response.headers["idempotency-replayed"] = "true"
        return made


async def _once(
    request: Request,
    response: Response,
    service: ServiceDep,
    actor: ActorDep,
    session: SessionDep,
    key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            pattern=r"^[!-~]{1,255}$",
            description="Chosen by the caller: the same request under one key is done once and answered alike.",
        ),
    ] = None,
) -> Once:
    return Once(request, response, service, actor, session, key)


OnceDep = Annotated[Once, Depends(_once, scope="function")]
