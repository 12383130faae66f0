"""Who calls and what they may do: tokens, and one table of permissions."""

import hmac
import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session
from uuid6 import uuid7

from registry import db, evidence
from registry.service import Service
from registry.tables import ProjectRow, TokenRow
from schemas.api import RoleName, TokenCreated
from schemas.common import sha256_digest
from schemas.evidence import Kind
from schemas.evidence import TokenCreated as TokenCreatedBody
from schemas.problems import Conflict, InvalidDocument, NotPermitted, Unauthenticated

PREFIX = "slg_"
SECRET_BYTES = 32
_SECRET = re.compile(r"slg_[A-Za-z0-9_-]{43}")
ADMIN_PROJECT = "default"
"""Administrators of this project also make projects, and tokens for them."""

_ENGINEERS = frozenset({"engineer", "manager", "admin"})
_MANAGERS = frozenset({"manager", "admin"})
_EVERYONE = frozenset({"engineer", "manager", "admin", "runner"})

PERMISSIONS: dict[str, frozenset[str]] = {
    # Reading. A runner reads the documents and blobs of its jobs, and nothing else.
    "read": _ENGINEERS,
    "fetch": _EVERYONE,
    # Proposing.
    "upload_blob": _ENGINEERS,
    "register_bundle": _ENGINEERS,
    "register_suite": _ENGINEERS,
    "create_release": _ENGINEERS,
    "create_run": _ENGINEERS,
    # Making the rules that bind those who propose.
    "register_policy": _MANAGERS,
    "create_target": _MANAGERS,
    "set_reference": _MANAGERS,
    # Letting through.
    "approve": _MANAGERS,
    "promote": _MANAGERS,
    "resume": _MANAGERS,
    # Stopping: the safe direction, so whoever sees the fault may act.
    "reject": _ENGINEERS,
    "pause": _ENGINEERS,
    "rollback": _ENGINEERS,
    "administer": frozenset({"admin"}),
    "run_jobs": frozenset({"runner"}),
}
"""Action → roles that may do it. What is not here, nobody may."""


@dataclass(frozen=True, slots=True)
class Actor:
    """Whoever holds a token."""

    project_id: UUID
    project: str
    name: str
    role: RoleName


def require(actor: Actor, action: str) -> None:
    """Return when the actor may do this.

    Raises:
        NotPermitted: the actor's role may not; the problem names the roles that may.
    """
    roles = PERMISSIONS.get(action, frozenset())
    if actor.role not in roles:
        allowed = ", ".join(sorted(roles)) or "nobody"
        raise NotPermitted(
            f"{actor.name} has the role {actor.role}; {action} is for {allowed}",
            action=action,
            role=actor.role,
            allowed=sorted(roles),
        )


def fingerprint(secret: str) -> str:
    """Return what is stored of a secret. It has 256 random bits, so a plain hash cannot be searched."""
    return sha256_digest(secret.encode())


def new_secret() -> str:
    """Return a new bearer token."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def is_secret(text: str) -> bool:
    """Tell whether a text has the form of a token with enough random bits."""
    return _SECRET.fullmatch(text) is not None


def authenticate(session: Session, secret: str, now: datetime) -> Actor:
    """Return who holds a token.

    Raises:
        Unauthenticated: unknown, expired or revoked. The answer does not say which.
    """
    sought = fingerprint(secret)
    found = session.execute(
        select(TokenRow, ProjectRow)
        .join(ProjectRow, ProjectRow.id == TokenRow.project_id)
        .where(TokenRow.secret_sha256 == sought)
    ).one_or_none()
    stored = found[0].secret_sha256 if found else fingerprint("")
    if not hmac.compare_digest(stored, sought) or found is None:
        raise Unauthenticated("the token is not known, or no longer valid")
    token, project = found
    if not is_valid(token, now):
        raise Unauthenticated("the token is not known, or no longer valid")
    role: RoleName = token.role  # type: ignore[assignment] # the column's CHECK holds the same four
    return Actor(project_id=project.id, project=project.name, name=token.name, role=role)


def is_valid(token: TokenRow, now: datetime) -> bool:
    """Tell whether a token counts: it is not revoked and has not ended."""
    return token.revoked_at is None and (token.expires_at is None or now < token.expires_at)


def create_token(
    session: Session,
    service: Service,
    project: ProjectRow,
    name: str,
    role: RoleName,
    *,
    by: str,
    now: datetime,
    expires_at: datetime | None = None,
    secret: str | None = None,
) -> TokenCreated:
    """Make a token and record the act. The secret is in the answer and nowhere else.

    `by` is who makes it; `secret` one chosen by the operator, by default a new one.

    Raises:
        Conflict: a token with this secret exists.
        InvalidDocument: it would have ended before it began.
    """
    secret = secret or new_secret()
    if expires_at is not None and expires_at <= now:
        past = "is not in the future"
        raise InvalidDocument(f"expires_at {past}", errors=[{"pointer": "/expires_at", "detail": past}])
    if find_token(session, secret) is not None:
        raise Conflict("a token with this secret exists already")
    row = TokenRow(
        id=uuid7(),
        project_id=project.id,
        name=name,
        role=role,
        secret_sha256=fingerprint(secret),
        created_at=now,
        expires_at=expires_at,
        revoked_at=None,
    )
    session.add(row)
    session.flush()
    signed = evidence.state(
        service.signer,
        f"project/{project.id}",
        f"token:{row.id}",
        by,
        Kind.TOKEN_CREATED,
        TokenCreatedBody(token=row.id, role=role, name=name, expires_at=expires_at),
        subjects={"token": sha256_digest(str(row.id).encode())},
        now=db.now(session),
    )
    evidence.append(session, project.id, signed)
    return TokenCreated(id=row.id, name=name, role=role, secret=secret, expires_at=expires_at)


def find_token(session: Session, secret: str) -> TokenRow | None:
    """Return the token with this secret, valid or not."""
    return session.scalar(select(TokenRow).where(TokenRow.secret_sha256 == fingerprint(secret)))
