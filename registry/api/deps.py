"""What endpoints ask for: the service, one unit of work, and the caller with a permission."""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, Header, Request, Response
from pydantic import BaseModel
from sqlalchemy.orm import Session

from registry import acts, answers, auth
from registry.api.rates import Rates
from registry.api.routes import Exchange, Given
from registry.auth import Actor
from registry.service import Service
from schemas.problems import TooManyRequests, Unauthenticated

ModelT = TypeVar("ModelT", bound=BaseModel)
ResultT = TypeVar("ResultT")


ServiceDep = Annotated[Service, Given(lambda exchange: exchange.service)]
"""What the application was made with."""
# A request that has a connection holds one of as many places as there are connections to spare. The other half is for
# looks at who calls, which take none.
SessionDep = Annotated[Session, Given(lambda exchange: exchange.session, is_session=True, is_placed=True)]
"""A unit of work, which commits before the answer goes out or leaves nothing behind; see `registry.api.routes`."""


class Perform(Protocol):
    """Does an act; see `registry.acts.perform`."""

    def __call__(self, work: Callable[[Session], ResultT], /) -> ResultT:
        """Return what `work` returned, once it is committed."""


# Its units of work are its own, and it holds a place as one that has a session does.
PerformDep = Annotated[Perform, Given(lambda exchange: partial(acts.perform, exchange.service), is_placed=True)]


def identify(service: Service, secret: str) -> Actor:
    """Return who holds a token. Raises Unauthenticated.

    It has a connection of its own, and gives it back before the request's unit of work takes one.
    """
    with service.database.look() as connection:
        return auth.authenticate(connection, secret)


def bearer(request: Request) -> str:
    """Return the token that a request carries. Raises Unauthenticated."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise Unauthenticated("send a token as `Authorization: Bearer TOKEN`")
    return secret.strip()


def _check(request: Request) -> None:
    """Return when a request carries a token that has not sent too many. Nothing is looked up for the others.

    Raises:
        Unauthenticated, TooManyRequests.
    """
    rates: Rates = request.app.state.rates
    wait = rates.take(auth.fingerprint(bearer(request)))
    if wait:
        seconds = math.ceil(wait)
        raise TooManyRequests(
            f"this token has sent too many requests; wait for {seconds} s", retry_after_seconds=seconds
        )


def _caller(action: str | None, exchange: Exchange) -> Actor:
    request = exchange.request
    secret = bearer(request)
    if exchange.unit is not None:
        actor = auth.authenticate(exchange.unit, secret)
    else:
        actor = identify(exchange.service, secret)
    request.state.caller, request.state.actor = actor, f"{actor.project}/{actor.name}"
    if action is not None:
        auth.require(actor, action)
    return actor


def _gate(action: str | None) -> Given:
    return Given(partial(_caller, action), is_gate=True, check=_check, action=action)


ActorDep = Annotated[Actor, _gate(None)]
"""The caller. Raises Unauthenticated; TooManyRequests before anything is looked up."""


def allow(action: str) -> Any:
    """Return the mark of a parameter that is the caller, provided that the role may do `action`.

    Use: `actor: Annotated[Actor, allow("create_release")]`.

    Raises:
        KeyError: at import, when `action` is not in the table of permissions.
    """
    auth.PERMISSIONS[action]
    return _gate(action)


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

    def __init__(self, request: Request, response: Response, key: str | None) -> None:
        """Take what the request says."""
        self._request, self._response, self._key = request, response, key

    def __call__(self, body: BaseModel, model: type[ModelT], make: Callable[[], ModelT]) -> ModelT:
        """Return what `make` returns, or returned the first time. Raises KeyReused."""
        if self._key is None:
            return make()
        exchange: Exchange = self._request.state.exchange
        asked = answers.Asked(
            key=self._key,
            secret=bearer(self._request),
            request=f"{self._request.method} {self._request.url.path}",
            body=body,
            seconds=exchange.service.settings.idempotency_seconds,
        )
        made, is_known = answers.give(exchange.session, self._request.state.caller, asked, model, make)
        if is_known:
            self._response.headers["idempotency-replayed"] = "true"
        return made


async def _once(
    request: Request,
    response: Response,
    key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            pattern=r"^[!-~]{1,255}$",
            description="Chosen by the caller: the same request under one key is done once and answered alike.",
        ),
    ] = None,
) -> Once:
    return Once(request, response, key)


OnceDep = Annotated[Once, Depends(_once)]
