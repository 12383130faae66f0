"""Tokens as an administrator sees them: list them, revoke one. Making and checking them is in `registry.auth`."""

from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry import auth, db
from registry.auth import ADMIN_PROJECT, Actor
from registry.service import Service
from registry.tables import ProjectRow, TokenRow
from schemas.api import Act, Token
from schemas.evidence import Kind, TokenRevoked
from schemas.problems import Conflict, NotFound


def browse(session: Session, project: UUID, *, after: UUID | None, limit: int) -> list[TokenRow]:
    """Return the tokens of a project, valid or not, newest first, before a cursor."""
    query = select(TokenRow).where(TokenRow.project_id == project)
    if after is not None:
        query = query.where(TokenRow.id < after)
    return list(session.scalars(query.order_by(TokenRow.id.desc()).limit(limit)))


def revoke(session: Session, service: Service, actor: Actor, token_id: UUID, body: Act) -> TokenRow:
    """End a token now. Doing it twice changes nothing.

    Raises:
        NotFound: there is no such token, or it is none of the actor's business.
        Conflict: it is the last administrator's of its project.
    """
    found = session.get(TokenRow, token_id)
    if found is None or (found.project_id != actor.project_id and actor.project != ADMIN_PROJECT):
        raise NotFound(f"there is no token {token_id}")
    auth.hold_project(session, found.project_id)
    auth.confirm(session, actor)
    row = session.get_one(TokenRow, token_id, with_for_update=True, populate_existing=True)
    if row.revoked_at is not None:
        return row
    now = db.now(session)
    valid = auth.valid_tokens(session, row.project_id, now)
    if row.role == "admin" and not any(other.role == "admin" and other.id != row.id for other in valid):
        raise Conflict(
            f"the token {row.name} is the last administrator's of its project; make another one first",
            holder=str(row.id),
        )
    row.revoked_at = now
    session.flush()
    told = TokenRevoked(token=row.id, name=row.name, reason=body.reason, revoked_at=now)
    auth.record_token(session, service, row, f"token:{row.id}:revoked", actor.name, Kind.TOKEN_REVOKED, told)
    return row


def made_by(session: Session, actor: Actor, token: UUID) -> list[TokenRow]:
    """Return the tokens that count and were made with one, oldest first, in the projects that somebody administers."""
    query = select(TokenRow).where(TokenRow.made_by == token, TokenRow.revoked_at.is_(None))
    if actor.project != ADMIN_PROJECT:
        query = query.where(TokenRow.project_id == actor.project_id)
    now = db.now(session)
    return [row for row in session.scalars(query.order_by(TokenRow.id)) if auth.is_valid(row, now)]


def wire(session: Session, row: TokenRow) -> Token:
    """Return a token as the service gives it out: never the secret."""
    return Token(
        id=row.id,
        project=session.get_one(ProjectRow, row.project_id).name,
        name=row.name,
        role=row.role,  # type: ignore[arg-type] # the column's CHECK holds the same names
        targets=row.targets,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        made_by=row.made_by,
        is_valid=auth.is_valid(row, db.now(session)),
    )
