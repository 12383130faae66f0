"""Projects, and what an installation needs before anybody can call it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import structlog
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from uuid6 import uuid7

from gates.evidence import is_signed
from registry import auth, conditions, db, evidence, keys
from registry.auth import ADMIN_PROJECT, Actor
from registry.logged import Logged
from registry.service import Service
from registry.tables import EntryRow, ProjectRow
from schemas.api import LimitsSet, Project, RoleName
from schemas.evidence import KeyRotated, Kind, ProjectSet
from schemas.problems import Conflict, NotFound, NotPermitted

ADOPTED = 2
"""Version of what is kept with entries: a project made now needs nothing taken over; see `registry.adoption`."""

_BESIDE = {"was_found", "adopted", "keys"}
"""What an entry says of the taking over, and not of the project."""

log = structlog.get_logger(__name__)


def stream(project: UUID) -> str:
    """Return the stream of what happened to a project itself: what it is, and who holds tokens of it."""
    return f"project/{project}"


def create(session: Session, service: Service, name: str, *, by: str) -> ProjectRow:
    """Make a project, as a recorded act. Raises Conflict when the name is taken."""
    row, is_new = ensure(session, service, name, by=by)
    if not is_new:
        raise Conflict(f"the project {row.id} has the name {name} already", name=name, holder=str(row.id))
    return row


def ensure(session: Session, service: Service, name: str, *, by: str) -> tuple[ProjectRow, bool]:
    """Return the project of a name, and whether this call made it. Raises Unavailable: the key is being replaced."""
    added = session.execute(
        insert(ProjectRow)
        .values(id=uuid7(), name=name, created_at=db.now(session))
        .on_conflict_do_nothing(index_elements=["name"])
        .returning(ProjectRow.id)
    )
    is_new = added.first() is not None
    row = named(session, name)
    if is_new:
        entry = record(session, service, row, by=by, said=facts(row) | _still_signing(session, service))
        # A rotation tells every project there is of the new key. One that began since waits for this one to be there.
        keys.require_lasting(session, entry.key_id)
    return row, is_new


def _still_signing(session: Session, service: Service) -> dict[str, list[str]]:
    """Return the keys that sign still, although the one of the service has taken their place: it vouches for them.

    A process that reads another copy of the key's file may go on for a while. Each is one of which a rotation says so
    that is countersigned by the key that came after it.
    """
    own, at = service.signer.key_id, db.now(session)
    rows = {row.key_id: row for row in keys.history(session)}
    ending = {key_id for key_id, row in rows.items() if row.valid_until is not None and row.valid_until > at}
    found, new = list[str](), rows.get(own)
    while ending and new is not None:
        rotated = (EntryRow.kind == Kind.KEY_ROTATED, EntryRow.act == f"key:{new.key_id}")
        envelope = session.scalar(select(EntryRow.envelope).where(*rotated).limit(1))
        said = None if envelope is None else KeyRotated.model_validate(evidence.claim_of(envelope)["body"])
        if said is None or said.retired not in ending:
            break
        if not is_signed(said.payload(), new.key_id, said.countersigned or "", new.public_key_pem):
            break
        ending.remove(said.retired)
        found.append(said.retired)
        new = rows[said.retired]
    return {"keys": found} if found else {}


def record(
    session: Session, service: Service, row: ProjectRow, *, by: str, said: Mapping[str, Any] | None = None
) -> Logged:
    """Record what a project is from now on: as its row is, or as is `said`. Nobody else may change it meanwhile."""
    of, body = stream(row.id), ProjectSet(**{**(facts(row) if said is None else said), "adopted": ADOPTED})
    signed = evidence.state(
        service.signer,
        of,
        f"project:{evidence.next_position(session, of)}",
        by,
        Kind.PROJECT_SET,
        body,
        subjects={"project": evidence.name_digest(row.name)},
        now=db.now(session),
    )
    return evidence.append(session, row.id, signed)[0]


def facts(row: ProjectRow) -> dict[str, Any]:
    """Return what evidence says of a project, by the names of its columns."""
    return {name: getattr(row, name) for name in ProjectSet.model_fields if name not in _BESIDE}


def named(session: Session, name: str) -> ProjectRow:
    """Return the project of a name. Raises NotFound."""
    row = session.scalar(select(ProjectRow).where(ProjectRow.name == name))
    if row is None:
        raise NotFound(f"there is no project {name}", name=name)
    return row


def administered(session: Session, actor: Actor, name: str | None) -> ProjectRow:
    """Return the project that an administrator acts on: the own one, or any for those who administer the installation.

    Raises:
        NotFound: there is no such project, or it is none of the actor's business.
    """
    if name is None or name == actor.project:
        return named(session, actor.project)
    if actor.project != ADMIN_PROJECT:
        raise NotFound(f"there is no project {name}", name=name)
    return named(session, name)


def seen(session: Session, actor: Actor, name: str) -> ProjectRow:
    """Return the project that somebody looks at: the own one; any for those who administer the installation.

    Raises:
        NotFound: there is no such project, or it is none of the actor's business.
    """
    if name != actor.project and actor.role != "admin":
        raise NotFound(f"there is no project {name}", name=name)
    return administered(session, actor, name)


def require_installation(actor: Actor) -> None:
    """Return when the actor administers the whole installation. Raises NotPermitted."""
    auth.require(actor, "administer")
    if actor.project != ADMIN_PROJECT:
        raise NotPermitted(
            f"this concerns the whole installation; administrators of the project {ADMIN_PROJECT} may do it",
            project=actor.project,
        )


def require_home(actor: Actor) -> None:
    """Return when the actor may see numbers of the whole installation. Raises NotPermitted."""
    if actor.project != ADMIN_PROJECT:
        raise NotPermitted(f"this concerns every project; use a token of {ADMIN_PROJECT}", project=actor.project)


def browse(session: Session, actor: Actor, *, after: UUID | None, limit: int) -> list[ProjectRow]:
    """Return the projects that an administrator may see, newest first, before a cursor."""
    query = select(ProjectRow)
    if actor.project != ADMIN_PROJECT:
        query = query.where(ProjectRow.id == actor.project_id)
    if after is not None:
        query = query.where(ProjectRow.id < after)
    return list(session.scalars(query.order_by(ProjectRow.id.desc()).limit(limit)))


def latest(session: Session, project: UUID) -> Logged | None:
    """Return the last entry that says what a project is."""
    query = select(EntryRow).where(EntryRow.stream == stream(project), EntryRow.kind == Kind.PROJECT_SET)
    return session.scalar(query.order_by(EntryRow.position.desc()).limit(1))


def generation(session: Session, project: UUID) -> int:
    """Return what names the state of a project itself: the place of the entry that says it."""
    last = latest(session, project)
    return last.position if last else 0


def set_limits(
    session: Session, service: Service, actor: Actor, name: str, body: LimitsSet, *, if_match: str | None = None
) -> ProjectRow:
    """Set the limits of a project that are named, as a recorded act. What it holds already stays, whatever they are.

    Raises:
        NotFound, NotPermitted.
        StaleEdit: it is of another generation than `if_match`.
    """
    require_installation(actor)
    row = administered(session, actor, name)
    # Before the token, as whoever revokes one does.
    auth.hold_project(session, row.id)
    auth.confirm(session, actor)
    conditions.require(f"project {row.name}", str(generation(session, row.id)), if_match, latest(session, row.id))
    before = facts(row)
    for limit, most in (named := body.model_dump(exclude_unset=True)).items():
        setattr(row, f"max_{limit}", most)
    session.flush()
    if facts(row) != before:
        record(session, service, row, by=actor.name)
    log.info("limits_set", project=name, by=actor.name, **named)
    return row


def wire(row: ProjectRow) -> Project:
    """Return a project as the service gives it out."""
    return Project(id=row.id, name=row.name, created_at=row.created_at)


def bootstrap(service: Service, name: str, secrets: dict[RoleName, str]) -> None:
    """Make sure that a project exists and that these secrets are its tokens. Repeating it changes nothing.

    `secrets` maps a role to the secret of its token.

    Raises:
        Conflict: a secret belongs to a token of another project or role, or to one that no longer counts.
    """
    with service.database.transaction() as session:
        project, _ = ensure(session, service, name, by="bootstrap")
        for role, secret in secrets.items():
            now = db.now(session)
            token = auth.find_token(session, secret)
            if token is None:
                auth.create_token(session, service, project, role, role, by="bootstrap", now=now, secret=secret)
            elif (token.project_id, token.role) != (project.id, role) or not auth.is_valid(token, now):
                raise Conflict(f"the secret given for the role {role} is that of another or a former token")


def secret_from(path: Path) -> str:
    """Return the secret in a file; make one (mode 0600) when there is no file.

    Raises:
        ValueError: the file holds no token of ours.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        secret = path.read_text("utf-8").strip()
    else:
        secret = auth.new_secret()
        with os.fdopen(handle, "w") as file:
            file.write(f"{secret}\n")
    if not auth.is_secret(secret):
        raise ValueError(f"{path} does not hold a token")
    return secret
