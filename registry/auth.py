"""Who calls and what they may do: tokens, and one table of permissions."""

import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection, select
from sqlalchemy.orm import Session
from uuid6 import uuid7

from registry import db, evidence
from registry.service import Service
from registry.tables import ProjectRow, TokenRow
from schemas.api import RoleName, TokenCreated
from schemas.common import Closed, format_instant, sha256_digest
from schemas.evidence import Kind
from schemas.evidence import TokenCreated as TokenCreatedBody
from schemas.problems import Conflict, InvalidDocument, NotPermitted, Unauthenticated

PREFIX = "slg_"
SECRET_BYTES = 32
_SECRET = re.compile(r"slg_[A-Za-z0-9_-]{43}")
ADMIN_PROJECT = "default"
"""Administrators of this project also make projects, and tokens for them."""
LIMITABLE: tuple[RoleName, ...] = ("ci", "engineer", "manager")
"""Roles whose tokens may be limited to targets: the others act on none, or answer for all."""
RESERVED = frozenset({"bootstrap", "controller", "policy", "runner", "service"})
"""Names under which the service itself acts in evidence. A runner's token may be called `runner`."""

_ADMIN = frozenset({"admin"})
_MANAGERS = frozenset({"manager", "admin"})
_ENGINEERS = _MANAGERS | {"engineer"}
_PROPOSERS = _ENGINEERS | {"ci"}
_READERS = _PROPOSERS | {"viewer", "auditor"}

PERMISSIONS: dict[str, frozenset[str]] = {
    # Reading. A runner reads the documents and blobs of its jobs, and nothing else.
    "read": _READERS,
    "fetch": _READERS | {"runner"},
    # Proposing.
    "upload_blob": _PROPOSERS,
    "register_bundle": _PROPOSERS,
    "register_suite": _PROPOSERS,
    "create_release": _PROPOSERS,
    "create_run": _PROPOSERS,
    "cancel_run": _PROPOSERS,
    "set_alias": _PROPOSERS,
    # Whoever may read the log may have it sealed: it changes nothing, and is for the reader's own protection.
    "checkpoint": _READERS,
    # Making the rules that bind those who propose.
    "register_policy": _MANAGERS,
    "create_target": _MANAGERS,
    "set_reference": _MANAGERS,
    "delete_bundle": _MANAGERS,
    # Also to move one that is protected.
    "protect_alias": _MANAGERS,
    "erase_records": _MANAGERS,
    "drain_runner": _MANAGERS,
    # Letting through.
    "approve": _MANAGERS,
    "promote": _MANAGERS,
    "revoke_evidence": _MANAGERS | {"auditor"},
    "resume": _MANAGERS,
    "lift_quarantine": _MANAGERS,
    # Stopping: the safe direction, so whoever sees the fault may act. A pipeline sees candidates, not live traffic.
    "reject": _PROPOSERS,
    "pause": _ENGINEERS,
    "rollback": _ENGINEERS,
    "quarantine": _ENGINEERS,
    # Answering for the installation.
    "list_tokens": _ADMIN | {"auditor"},
    "administer": _ADMIN,
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
    token: UUID | None = None
    """Identity of the token; None for one that speaks for itself, such as the bootstrap."""
    targets: frozenset[str] | None = None
    """Targets that the token may act on, as name@environment; None for all."""
    expires_at: datetime | None = None
    """When the token ends; None for one that does not."""


def may(actor: Actor, action: str) -> bool:
    """Tell whether the actor's role may do this."""
    return actor.role in PERMISSIONS.get(action, frozenset())


def require(actor: Actor, action: str) -> None:
    """Return when the actor may do this.

    Raises:
        NotPermitted: the actor's role may not; the problem names the roles that may.
    """
    roles = PERMISSIONS.get(action, frozenset())
    if not may(actor, action):
        allowed = ", ".join(sorted(roles)) or "nobody"
        raise NotPermitted(
            f"{actor.name} has the role {actor.role}; {action} is for {allowed}",
            action=action,
            role=actor.role,
            allowed=sorted(roles),
        )


def require_target(actor: Actor, target: str) -> None:
    """Return when the actor's token is not limited to other targets. Reading is never limited.

    Raises:
        NotPermitted: it is; the problem names the targets that the token is for.
    """
    if actor.targets is not None and target not in actor.targets:
        mine = sorted(actor.targets)
        raise NotPermitted(
            f"the token of {actor.name} is for {', '.join(mine)}, not for {target}", target=target, targets=mine
        )


def require_whole_project(actor: Actor, action: str) -> None:
    """Return when the actor's token is not limited to targets: a rule binds every target of the project.

    Raises:
        NotPermitted.
    """
    if actor.targets is not None:
        mine = sorted(actor.targets)
        raise NotPermitted(
            f"the token of {actor.name} is for {', '.join(mine)} only, and {action} concerns every target",
            action=action,
            targets=mine,
        )


def confirm(session: Session, actor: Actor) -> datetime | None:
    """Return when the actor's token still counts, and keep it from being revoked until the transaction ends.

    A token is looked up before a request's transaction begins. What lets something through asks again within it,
    so that an act and the revocation of its token have an order.

    Returns:
        When the token ends; None for never.

    Raises:
        Unauthenticated: it was revoked or has ended.
    """
    if actor.token is None:
        return None
    found = db.ask_any(session, _CONFIRM, {"token": actor.token})
    if found is None:
        raise Unauthenticated("the token is not known, or no longer valid")
    require_counting(*found)
    ends: datetime | None = found.expires_at
    return ends


def require_no_longer(ends: datetime | None, asked: datetime | None) -> None:
    """Return when a token that somebody makes ends no later than theirs, which ends at `ends`.

    Who is let in for a week would else let themselves in for ever.

    Raises:
        NotPermitted: it would outlive theirs; the problem says when that ends.
    """
    if ends is None or (asked is not None and asked <= ends):
        return
    until = format_instant(ends)
    raise NotPermitted(
        f"your token ends at {until}, and makes none that lasts longer: say when the new one ends, by then",
        expires_at=until,
    )


def require_counting(revoked_at: datetime | None, expires_at: datetime | None, now: datetime) -> None:
    """Return when a token of which this was read counts. Raises Unauthenticated."""
    if not _counts(revoked_at, expires_at, now):
        raise Unauthenticated("the token is not known, or no longer valid")


_CONFIRM = db.Sql("SELECT revoked_at, expires_at, clock_timestamp() FROM tokens WHERE id = :token FOR SHARE")


def fingerprint(secret: str) -> str:
    """Return what is stored of a secret. It has 256 random bits, so a plain hash cannot be searched."""
    return sha256_digest(secret.encode())


def bound(token: TokenRow) -> str:
    """Return what evidence says of a token's secret: it binds the stored one to the token, and tells neither."""
    return sha256_digest(f"token {token.id} {token.secret_sha256}".encode())


def new_secret() -> str:
    """Return a new bearer token."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def is_secret(text: str) -> bool:
    """Tell whether a text has the form of a token with enough random bits."""
    return _SECRET.fullmatch(text) is not None


def authenticate(session: Session | Connection, secret: str, now: datetime | None = None) -> Actor:
    """Return who holds a token, in one statement.

    `now` is by default the database's clock.

    Raises:
        Unauthenticated: unknown, expired or revoked. The answer does not say which.
    """
    sought = fingerprint(secret)
    found = db.ask_any(session, _HOLDER, {"sought": sought})
    stored = found.secret_sha256 if found else fingerprint("")
    if not hmac.compare_digest(stored, sought) or found is None:
        raise Unauthenticated("the token is not known, or no longer valid")
    require_counting(found.revoked_at, found.expires_at, now or found.now)
    targets = None if found.targets is None else frozenset(found.targets)
    return Actor(
        found.project_id,
        found.project,
        found.name,
        found.role,
        token=found.id,
        targets=targets,
        expires_at=found.expires_at,
    )


_HOLDER = db.Sql(
    """
    SELECT clock_timestamp() AS now, token.id, token.name, token.role, token.targets, token.secret_sha256,
        token.expires_at, token.revoked_at, token.project_id, project.name AS project
    FROM tokens AS token JOIN projects AS project ON project.id = token.project_id
    WHERE token.secret_sha256 = :sought
    """
)


def is_valid(token: TokenRow, now: datetime) -> bool:
    """Tell whether a token counts: it is not revoked and has not ended."""
    return _counts(token.revoked_at, token.expires_at, now)


def _counts(revoked_at: datetime | None, expires_at: datetime | None, now: datetime) -> bool:
    return revoked_at is None and (expires_at is None or now < expires_at)


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
    targets: Sequence[str] | None = None,
    made_by: UUID | None = None,
) -> TokenCreated:
    """Make a token and record the act. The secret is in the answer and nowhere else.

    `by` is who makes it, and `made_by` with which token; `secret` one chosen by the operator, by default a new one;
    `targets` those that it may act on, by default all.

    Raises:
        Conflict: a token with this secret exists, or a valid one of this name in the project.
        InvalidDocument: it would have ended before it began, its role acts on no target and it is limited to some, or
            its name is one under which the service acts.
    """
    if name in RESERVED and name != role:
        raise _wrong("name", f"is one under which the service itself acts: {', '.join(sorted(RESERVED))}")
    secret = secret or new_secret()
    if expires_at is not None and expires_at <= now:
        raise _wrong("expires_at", "is not in the future")
    if targets is not None and role not in LIMITABLE:
        raise _wrong("targets", f"is for the roles {', '.join(LIMITABLE)}; a {role} is not bound to targets")
    hold_project(session, project.id)
    if find_token(session, secret) is not None:
        raise Conflict("a token with this secret exists already")
    holder = next((token for token in valid_tokens(session, project.id, now) if token.name == name), None)
    if holder is not None:
        # Who acted is told by name, and whether two people agreed is told by two names.
        raise Conflict(
            f"the token {holder.id} has the name {name} in {project.name}; revoke it or take another name",
            holder=str(holder.id),
        )
    row = TokenRow(
        id=uuid7(),
        project_id=project.id,
        name=name,
        role=role,
        targets=None if targets is None else sorted(set(targets)),
        secret_sha256=fingerprint(secret),
        created_at=now,
        expires_at=expires_at,
        revoked_at=None,
        made_by=made_by,
    )
    session.add(row)
    session.flush()
    body = TokenCreatedBody(
        token=row.id,
        role=role,
        name=name,
        expires_at=expires_at,
        targets=row.targets,
        created_at=now,
        bound=bound(row),
        made_by=made_by,
    )
    record_token(session, service, row, f"token:{row.id}", by, Kind.TOKEN_CREATED, body)
    return TokenCreated(id=row.id, name=name, role=role, secret=secret, expires_at=expires_at, targets=row.targets)


def _wrong(field: str, detail: str) -> InvalidDocument:
    return InvalidDocument(f"{field} {detail}", errors=[{"pointer": f"/{field}", "detail": detail}])


def record_token(
    session: Session, service: Service, token: TokenRow, act: str, by: str, kind: Kind, body: Closed
) -> None:
    """Record an act on a token in its project's stream."""
    signed = evidence.state(
        service.signer,
        f"project/{token.project_id}",
        act,
        by,
        kind,
        body,
        subjects={"token": sha256_digest(str(token.id).encode())},
        now=db.now(session),
    )
    evidence.append(session, token.project_id, signed)


def hold_project(session: Session, project: UUID) -> None:
    """Let nobody else make or revoke tokens of a project until the transaction ends."""
    session.get(ProjectRow, project, with_for_update={"key_share": True}, populate_existing=True)


def valid_tokens(session: Session, project: UUID, now: datetime) -> list[TokenRow]:
    """Return the tokens of a project that count, oldest first."""
    rows = session.scalars(
        select(TokenRow).where(TokenRow.project_id == project, TokenRow.revoked_at.is_(None)).order_by(TokenRow.id)
    )
    return [row for row in rows if is_valid(row, now)]


def find_token(session: Session, secret: str) -> TokenRow | None:
    """Return the token with this secret, valid or not."""
    return session.scalar(select(TokenRow).where(TokenRow.secret_sha256 == fingerprint(secret)))
