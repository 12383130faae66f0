"""Aliases over HTTP: movable names of bundles."""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from sqlalchemy.orm import Session

from registry import alias_patterns, aliases
from registry.api.deps import IfMatch, Perform, PerformDep, ServiceDep, SessionDep, allow, tag
from registry.api.pages import Cursor, Limit, page
from registry.api.problems import declare
from registry.api.routes import Route
from registry.auth import Actor
from schemas.alias import (
    Alias,
    AliasAt,
    AliasChange,
    AliasDelete,
    AliasPattern,
    AliasPatternRemove,
    AliasPatterns,
    AliasPatternSet,
    AliasProtect,
    AliasSet,
)
from schemas.api import Page
from schemas.common import Digest, Instant, Name
from schemas.problems import BundleQuarantined, Conflict, InvalidDocument, NotFound, StaleEdit

router = APIRouter(prefix="/v1/aliases", tags=["documents"], route_class=Route)
patterns = APIRouter(prefix="/v1/alias-patterns", tags=["documents"], route_class=Route)

AliasName = Annotated[Name, Path(description="Name of the alias, without `@`.")]
ReaderDep = Annotated[Actor, allow("read")]


def _done(perform: Perform, response: Response, act: Callable[[Session], Alias]) -> Alias:
    found = perform(act)
    tag(response, found.generation)
    return found


@router.get("", responses=declare(InvalidDocument), operation_id="listAliases")
def list_aliases(
    actor: ReaderDep,
    session: SessionDep,
    after: Cursor,
    bundle: Annotated[Digest | None, Query(description="Only of this bundle.")] = None,
    limit: Limit = 50,
) -> Page[Alias]:
    """List aliases, newest first."""
    rows = aliases.browse(session, actor.project_id, bundle=bundle, after=after, limit=limit + 1)
    return page(rows, limit, lambda row: aliases.wire(session, row), lambda row: row.id)


@router.get("/{name}", responses=declare(NotFound, InvalidDocument), operation_id="getAlias")
def get_alias(name: AliasName, actor: ReaderDep, session: SessionDep, response: Response) -> Alias:
    """Return what an alias names now."""
    found = aliases.wire(session, aliases.get(session, actor.project_id, name))
    tag(response, found.generation)
    return found


@router.put(
    "/{name}",
    responses=declare(NotFound, InvalidDocument, Conflict, StaleEdit, BundleQuarantined),
    operation_id="setAlias",
)
def set_alias(
    name: AliasName,
    body: AliasSet,
    actor: Annotated[Actor, allow("set_alias")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
    if_match: IfMatch = None,
) -> Alias:
    """Make an alias, or move it when it is as the caller saw it: by `expected`, or by `If-Match` with its ETag."""
    return _done(perform, response, lambda session: aliases.put(session, service, actor, name, body, if_match=if_match))


@router.post("/{name}/deletions", responses=declare(NotFound, InvalidDocument, StaleEdit), operation_id="deleteAlias")
def delete_alias(
    name: AliasName,
    body: AliasDelete,
    actor: Annotated[Actor, allow("set_alias")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
    if_match: IfMatch = None,
) -> Alias:
    """Take an alias away. Its history stays."""
    return _done(
        perform, response, lambda session: aliases.delete(session, service, actor, name, body, if_match=if_match)
    )


@router.post(
    "/{name}/protections",
    responses=declare(NotFound, InvalidDocument, StaleEdit, BundleQuarantined),
    operation_id="protectAlias",
)
def protect_alias(
    name: AliasName,
    body: AliasProtect,
    actor: Annotated[Actor, allow("protect_alias")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
    if_match: IfMatch = None,
) -> Alias:
    """Let only managers move an alias, or everybody who proposes again."""
    return _done(
        perform, response, lambda session: aliases.protect(session, service, actor, name, body, if_match=if_match)
    )


@router.get("/{name}/history", responses=declare(NotFound, InvalidDocument), operation_id="getAliasHistory")
def get_alias_history(
    name: AliasName, actor: ReaderDep, session: SessionDep, after: Cursor, limit: Limit = 50
) -> Page[AliasChange]:
    """List the acts on an alias, newest first, also on one that is deleted."""
    row = aliases.get(session, actor.project_id, name, or_deleted=True)
    rows = aliases.history(session, row, after=after, limit=limit + 1)
    return page(rows, limit, aliases.change, lambda entry: entry.id)


@router.get("/{name}/named", responses=declare(NotFound, InvalidDocument), operation_id="getAliasAt")
def get_alias_at(
    name: AliasName,
    actor: ReaderDep,
    session: SessionDep,
    at: Annotated[Instant, Query(description="RFC 3339 with an offset, such as 2026-11-03T14:03:00Z; not to come.")],
) -> AliasAt:
    """Say what an alias named at an instant, by its evidence."""
    return aliases.named_at(session, aliases.get(session, actor.project_id, name, or_deleted=True), at)


@patterns.get("", responses=declare(), operation_id="listAliasPatterns")
def list_alias_patterns(actor: ReaderDep, session: SessionDep) -> AliasPatterns:
    """List the patterns that protect aliases by their names, sorted."""
    return AliasPatterns(items=[alias_patterns.wire(row) for row in alias_patterns.every(session, actor.project_id)])


@patterns.post(
    "",
    responses=declare(InvalidDocument, Conflict, StaleEdit, BundleQuarantined),
    operation_id="setAliasPattern",
)
def set_alias_pattern(
    body: AliasPatternSet,
    actor: Annotated[Actor, allow("protect_alias")],
    service: ServiceDep,
    perform: PerformDep,
    response: Response,
    if_match: IfMatch = None,
) -> AliasPattern:
    """Protect every alias whose name fits a pattern, made or not; whoever has less than the role moves none.

    It changes one that is there when it is as the caller saw it: by `expected`, or by `If-Match` with its ETag.
    """
    done = perform(lambda session: alias_patterns.put(session, service, actor, body, if_match=if_match))
    tag(response, done.generation)
    return done


@patterns.post("/removals", responses=declare(InvalidDocument, NotFound, StaleEdit), operation_id="removeAliasPattern")
def remove_alias_pattern(
    body: AliasPatternRemove,
    actor: Annotated[Actor, allow("protect_alias")],
    service: ServiceDep,
    perform: PerformDep,
    if_match: IfMatch = None,
) -> AliasPattern:
    """Let a pattern protect nothing any more. Returns it as it was."""
    return perform(lambda session: alias_patterns.remove(session, service, actor, body, if_match=if_match))
