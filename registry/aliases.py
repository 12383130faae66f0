"""Aliases: names of bundles that are moved by compare-and-swap. Their history is their stream; a row is its fold.

An alias is resolved once, by whoever names a bundle with it, and what is recorded is the digest.
"""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from uuid6 import uuid7

from registry import acts, alias_patterns, auth, conditions, db, documents, evidence, quarantine
from registry.auth import Actor
from registry.logged import Logged
from registry.service import Service
from registry.tables import AliasRow, EntryRow
from schemas.alias import Alias, AliasAt, AliasChange, AliasDelete, AliasProtect, AliasSet, Movers
from schemas.evidence import AliasChanged, Kind
from schemas.problems import Conflict, InvalidDocument, NotFound, NotPermitted

MAKE = "sluicegate alias set {} BUNDLE --reason …"
KINDS = (Kind.ALIAS_SET, Kind.ALIAS_DELETED, Kind.ALIAS_PROTECTED)


def stream(project: UUID, name: str) -> str:
    """Return the stream of an alias."""
    return f"alias/{project}/{name}"


def put(
    session: Session, service: Service, actor: Actor, name: str, body: AliasSet, *, if_match: str | None = None
) -> Alias:
    """Make an alias, or move it when it is as the actor saw it. Where it is already, nothing changes.

    Raises:
        NotFound: the project has no such bundle.
        Conflict: it names something else than expected; `bundle` says what.
        StaleEdit: it is of another generation than `if_match`.
        NotPermitted: it is protected, by itself or by a pattern, and not for this actor to move.
        BundleQuarantined: it is protected, and so is the bundle quarantined.
    """
    auth.confirm(session, actor)
    alias_patterns.share(session, actor.project_id)
    row = _taken(session, actor, name, make=True)
    documents.need_bundle(session, actor.project_id, body.bundle)
    movers = _require_mover(session, actor, row)
    if row.bundle == body.bundle:
        return wire(session, row)
    _require_seen(session, row, if_match, body.expected)
    if movers != "ci":
        quarantine.require_free(session, actor.project_id, body.bundle)
    return _change(session, service, actor, row, Kind.ALIAS_SET, body.bundle, row.is_protected, body.reason)


def delete(
    session: Session, service: Service, actor: Actor, name: str, body: AliasDelete, *, if_match: str | None = None
) -> Alias:
    """Take an alias away; its history stays, and it may be made again. It is protected then as before.

    Raises:
        NotFound, StaleEdit, NotPermitted.
    """
    auth.confirm(session, actor)
    alias_patterns.share(session, actor.project_id)
    row = _taken(session, actor, name)
    _require_mover(session, actor, row)
    _require_version(session, row, if_match)
    return _change(session, service, actor, row, Kind.ALIAS_DELETED, None, row.is_protected, body.reason)


def protect(
    session: Session, service: Service, actor: Actor, name: str, body: AliasProtect, *, if_match: str | None = None
) -> Alias:
    """Let only managers move an alias, or everybody who proposes again. Asking twice changes nothing.

    Raises:
        NotFound, StaleEdit.
        BundleQuarantined: what it names is, and a protected alias names no such bundle.
        NotPermitted: the actor's token is for some targets only.
    """
    auth.require_whole_project(actor, "protect_alias")
    auth.confirm(session, actor)
    row = _taken(session, actor, name)
    _require_version(session, row, if_match)
    if row.is_protected == body.is_protected:
        return wire(session, row)
    if body.is_protected and row.bundle is not None:
        quarantine.require_free(session, actor.project_id, row.bundle)
    return _change(session, service, actor, row, Kind.ALIAS_PROTECTED, row.bundle, body.is_protected, body.reason)


def get(session: Session, project: UUID, name: str, *, or_deleted: bool = False) -> AliasRow:
    """Return an alias; with `or_deleted`, also one that names nothing any more. Raises NotFound."""
    row = session.scalar(select(AliasRow).where(AliasRow.project_id == project, AliasRow.name == name))
    if row is None or (row.bundle is None and not or_deleted):
        raise NotFound(f"there is no alias {name}; make one with `{MAKE.format(name)}`", alias=name)
    return row


def browse(session: Session, project: UUID, *, bundle: str | None, after: UUID | None, limit: int) -> list[AliasRow]:
    """Return a project's aliases, newest first, before a cursor; of one bundle when asked."""
    query = select(AliasRow).where(AliasRow.project_id == project, AliasRow.bundle.is_not(None))
    if bundle is not None:
        query = query.where(AliasRow.bundle == bundle)
    if after is not None:
        query = query.where(AliasRow.id < after)
    return list(session.scalars(query.order_by(AliasRow.id.desc()).limit(limit)))


def of_bundle(session: Session, project: UUID, bundle: str) -> list[str]:
    """Return the names of the aliases of a bundle, sorted."""
    names = select(AliasRow.name).where(AliasRow.project_id == project, AliasRow.bundle == bundle)
    return sorted(session.scalars(names))


def history(session: Session, row: AliasRow, *, after: UUID | None, limit: int) -> Sequence[Logged]:
    """Return the acts on an alias, newest first, before the entry named by a cursor. Raises NotFound."""
    query = select(EntryRow).where(EntryRow.stream == stream(row.project_id, row.name))
    if after is not None:
        last = evidence.by_id(session, after)
        if last is None or last.stream != stream(row.project_id, row.name):
            raise NotFound("there is no such entry to go on after")
        query = query.where(EntryRow.position < last.position)
    return session.scalars(query.order_by(EntryRow.position.desc()).limit(limit)).all()


def named_at(session: Session, row: AliasRow, at: datetime) -> AliasAt:
    """Return what an alias named at an instant. Raises InvalidDocument for one that is yet to come."""
    if at > db.now(session):
        detail = "is yet to come"
        raise InvalidDocument(f"the instant {at.isoformat()} {detail}", errors=[{"pointer": "/at", "detail": detail}])
    query = select(EntryRow).where(EntryRow.stream == stream(row.project_id, row.name), EntryRow.recorded_at <= at)
    entry = session.scalar(query.order_by(EntryRow.position.desc()).limit(1))
    found = None if entry is None else change(entry)
    return AliasAt(name=row.name, at=at, bundle=found.bundle if found else None, change=found)


def change(row: Logged) -> AliasChange:
    """Return an entry of an alias's stream as the service gives it out."""
    body = AliasChanged.model_validate(evidence.claim_of(row.envelope)["body"])
    return AliasChange(
        at=row.recorded_at,
        kind=row.kind,
        bundle=body.bundle,
        is_protected=body.is_protected,
        generation=body.generation,
        by=row.actor,
        reason=body.reason,
        entry=row.entry_digest,
    )


def wire(session: Session, row: AliasRow) -> Alias:
    """Return an alias as the service gives it out."""
    names = documents.names(session, row.project_id, [row.bundle]) if row.bundle else {}
    movers, patterns = _guards(session, row)
    return Alias(
        name=row.name,
        bundle=row.bundle,
        bundle_name=names.get(row.bundle or ""),
        is_protected=row.is_protected,
        movers=movers,
        patterns=patterns,
        is_quarantined=row.bundle is not None and quarantine.is_quarantined(session, row.project_id, row.bundle),
        generation=row.generation,
        changed_at=row.changed_at,
        changed_by=row.changed_by,
    )


def _taken(session: Session, actor: Actor, name: str, *, make: bool = False) -> AliasRow:
    """Return an alias that nobody else changes until the transaction ends, made when it never was. Raises NotFound."""
    if make:
        at = db.now(session)
        new = {"id": uuid7(), "project_id": actor.project_id, "name": name, "is_protected": False, "generation": 0}
        session.execute(
            insert(AliasRow)
            .values(**new, bundle=None, changed_at=at, changed_by=actor.name)
            .on_conflict_do_nothing(index_elements=["project_id", "name"])
        )
    row = session.scalar(
        select(AliasRow)
        .where(AliasRow.project_id == actor.project_id, AliasRow.name == name)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    if row is None or (row.bundle is None and not make):
        raise NotFound(f"there is no alias {name}; make one with `{MAKE.format(name)}`", alias=name)
    return row


def _guards(session: Session, row: AliasRow) -> tuple[Movers, list[str]]:
    """Return the least role that may move an alias, and the patterns that its name fits."""
    found = alias_patterns.fitting(session, row.project_id, row.name)
    said: list[Movers] = [one.movers for one in found]
    if row.is_protected:
        said.append("manager")
    return alias_patterns.least(said), [one.pattern for one in found]


def _require_mover(session: Session, actor: Actor, row: AliasRow) -> Movers:
    """Return the least role that may move an alias, which the actor has. Raises NotPermitted."""
    movers, patterns = _guards(session, row)
    allowed = sorted(alias_patterns.AT_LEAST[movers])
    if actor.role not in allowed:
        by = f"the pattern {', '.join(patterns)}" if patterns else "its own protection"
        raise NotPermitted(
            f"{actor.name} has the role {actor.role}; by {by}, alias {row.name} is moved by {', '.join(allowed)}",
            action="set_alias",
            role=actor.role,
            allowed=allowed,
            patterns=patterns,
        )
    if movers != "ci":
        auth.require_whole_project(actor, "protect_alias")
    return movers


def _require_version(session: Session, row: AliasRow, if_match: str | None) -> None:
    last = evidence.latest(session, stream(row.project_id, row.name))
    conditions.require(f"alias {row.name}", str(row.generation), if_match, last)


def _require_seen(session: Session, row: AliasRow, if_match: str | None, expected: str | None) -> None:
    """Refuse to move an alias that is not as it was seen: who saw nothing makes it, and moves none."""
    _require_version(session, row, if_match)
    if (expected is None and if_match is not None) or expected == row.bundle:
        return
    last = evidence.latest(session, stream(row.project_id, row.name))
    is_now = f"names {row.bundle} (generation {row.generation})" if row.bundle else "names nothing"
    wanted = f"expected to name {expected}" if expected else "expected to be new"
    said = "say what you saw with `--expect BUNDLE` or `--if-match GENERATION`"
    say = said if row.bundle else "make it without `--expect`"
    raise Conflict(
        f"alias {row.name} {is_now}, and was {wanted}; look again, and {say}",
        bundle=row.bundle,
        version=str(row.generation),
        **conditions.changed_by(last),
    )


def _change(
    session: Session,
    service: Service,
    actor: Actor,
    row: AliasRow,
    kind: Kind,
    bundle: str | None,
    is_protected: bool,
    reason: str,
) -> Alias:
    generation = row.generation + 1
    named = {"alias": row.name, "bundle": bundle, "previous": row.bundle, "generation": generation}
    said = AliasChanged.model_validate(
        {key: value for key, value in named.items() if value is not None}
        | {"is_protected": is_protected, "reason": reason}
    )
    of = row.bundle if bundle is None else bundle
    signed = evidence.state(
        acts.signer_of(session, service),
        stream(row.project_id, row.name),
        f"generation:{generation}",
        actor.name,
        kind,
        said,
        subjects={"alias": evidence.name_digest(row.name), **({"bundle": of} if of else {})},
        now=acts.moment(session),
    )
    entry, _ = evidence.append(session, row.project_id, signed)
    row.bundle, row.is_protected, row.generation = bundle, is_protected, generation
    row.changed_at, row.changed_by = entry.recorded_at, actor.name
    session.flush()
    return wire(session, row)
