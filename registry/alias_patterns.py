"""Patterns that protect aliases by their names, also those that nobody has made yet: who may move which.

The patterns of a project are one stream, and the rows its fold. Whoever sets or removes one holds all of them, and
whoever moves an alias holds them shared: of the two one is first.
"""

from typing import Final
from uuid import UUID

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from registry import acts, auth, conditions, evidence, quarantine
from registry.auth import Actor
from registry.logged import Logged
from registry.service import Service
from registry.tables import AliasPatternRow, AliasRow
from schemas.alias import AliasPattern, AliasPatternRemove, AliasPatternSet, Movers, PatternMovers
from schemas.api import RoleName
from schemas.evidence import AliasPatternChanged, Kind
from schemas.problems import Conflict, NotFound, NotPermitted

KINDS = (Kind.ALIAS_PATTERN_SET, Kind.ALIAS_PATTERN_REMOVED)
MOST: Final = 100
ORDER: Final[tuple[Movers, ...]] = ("ci", "engineer", "manager", "admin")
"""Who may move an alias, from all who propose to the fewest."""
AT_LEAST: Final[dict[Movers, frozenset[RoleName]]] = {
    "ci": frozenset({"ci", "engineer", "manager", "admin"}),
    "engineer": frozenset({"engineer", "manager", "admin"}),
    "manager": frozenset({"manager", "admin"}),
    "admin": frozenset({"admin"}),
}
"""Least role → roles that have it or more."""


def stream(project: UUID) -> str:
    """Return the stream of a project's patterns."""
    return f"alias-patterns/{project}"


def put(
    session: Session, service: Service, actor: Actor, body: AliasPatternSet, *, if_match: str | None = None
) -> AliasPattern:
    """Protect every alias whose name a pattern fits, or say anew who may move it, when it is as the actor saw it.

    Where it says so already, nothing changes.

    Raises:
        NotPermitted: the actor's token is for some targets only, or has less than a role that the pattern asks for.
        BundleQuarantined: an alias that it fits names a quarantined bundle.
        Conflict: it says something else than expected, or there are as many patterns as a project may have.
        StaleEdit: it is of another generation than `if_match`.
    """
    auth.require_whole_project(actor, "protect_alias")
    auth.confirm(session, actor)
    _hold(session, actor.project_id)
    rows = {row.pattern: row for row in every(session, actor.project_id)}
    row = rows.get(body.pattern)
    for movers in (body.movers, *([] if row is None else [row.movers])):
        _require(actor, movers, body.pattern)
    if row is not None and row.movers == body.movers:
        return wire(row)
    _require_seen(session, actor.project_id, body, row, if_match)
    if row is None and len(rows) >= MOST:
        raise Conflict(f"a project has at most {MOST} patterns; remove one that is not needed")
    for bundle in _named(session, actor.project_id, body.pattern):
        quarantine.require_free(session, actor.project_id, bundle)
    return wire(_record(session, service, actor, body.pattern, body.movers, body.reason))


def remove(
    session: Session, service: Service, actor: Actor, body: AliasPatternRemove, *, if_match: str | None = None
) -> AliasPattern:
    """Let a pattern protect nothing any more. Returns it as it was.

    Raises:
        NotFound, NotPermitted.
        StaleEdit: it is of another generation than `if_match`, or was removed since.
    """
    auth.require_whole_project(actor, "protect_alias")
    auth.confirm(session, actor)
    _hold(session, actor.project_id)
    row = session.get(AliasPatternRow, (actor.project_id, body.pattern), populate_existing=True)
    _require_version(session, actor.project_id, body.pattern, row, if_match)
    if row is None:
        raise NotFound(f"there is no pattern {body.pattern}; `sluicegate alias patterns` lists them")
    _require(actor, row.movers, body.pattern)
    was = wire(row)
    _record(session, service, actor, body.pattern, None, body.reason)
    session.delete(row)
    session.flush()
    return was


def every(session: Session, project: UUID) -> list[AliasPatternRow]:
    """Return a project's patterns, sorted."""
    query = select(AliasPatternRow).where(AliasPatternRow.project_id == project).order_by(AliasPatternRow.pattern)
    return list(session.scalars(query))


def share(session: Session, project: UUID) -> None:
    """Let nobody change the patterns until the transaction ends, for whoever goes by them."""
    session.execute(text("SELECT pg_advisory_xact_lock_shared(hashtextextended(:of, 0))"), {"of": stream(project)})


def fitting(session: Session, project: UUID, name: str) -> list[AliasPatternRow]:
    """Return the patterns that a name fits."""
    return [row for row in every(session, project) if fits(row.pattern, name)]


def fits(pattern: str, name: str) -> bool:
    """Tell whether a name fits a pattern, in which `*` stands for any letters, also none."""
    first, *inner, last = pattern.split("*")
    at, end = len(first), len(name) - len(last)
    if at > end or not name.startswith(first) or not name.endswith(last):
        return False
    for part in inner:  # each where it first fits: then nothing after it has less room
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def least(movers: list[Movers]) -> Movers:
    """Return who may move an alias of which several things are said: the fewest of them."""
    return max(movers, key=ORDER.index, default="ci")


def wire(row: AliasPatternRow) -> AliasPattern:
    """Return a pattern as the service gives it out."""
    return AliasPattern(
        pattern=row.pattern, movers=row.movers, generation=row.generation, set_at=row.set_at, set_by=row.set_by
    )


def _hold(session: Session, project: UUID) -> None:
    session.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:of, 0))"), {"of": stream(project)})


def _require(actor: Actor, movers: Movers, pattern: str) -> None:
    if actor.role not in AT_LEAST[movers]:
        allowed = sorted(AT_LEAST[movers])
        raise NotPermitted(
            f"{actor.name} has the role {actor.role}; the pattern {pattern} is for {', '.join(allowed)}",
            action="protect_alias",
            role=actor.role,
            allowed=allowed,
        )


def _require_version(
    session: Session, project: UUID, pattern: str, row: AliasPatternRow | None, if_match: str | None
) -> None:
    """Refuse to act on a pattern that is of another generation than was seen; of one that is not there, it is 0."""
    if if_match is not None:
        current = str(row.generation if row is not None else 0)
        conditions.require(f"the pattern {pattern}", current, if_match, _latest(session, project, pattern))


def _require_seen(
    session: Session, project: UUID, body: AliasPatternSet, row: AliasPatternRow | None, if_match: str | None
) -> None:
    """Refuse to change a pattern that is not as it was seen: who saw nothing makes it, and changes none."""
    _require_version(session, project, body.pattern, row, if_match)
    current = None if row is None else row.movers
    if (body.expected is None and if_match is not None) or body.expected == current:
        return
    is_now = "is not there" if row is None else f"is for the role {row.movers} (generation {row.generation})"
    wanted = f"expected to be for the role {body.expected}" if body.expected else "expected to be new"
    said = "say what you saw with `--expect ROLE` or `--if-match GENERATION`"
    say = said if row is not None else "make it without `--expect`"
    raise Conflict(
        f"the pattern {body.pattern} {is_now}, and was {wanted}; look again, and {say}",
        movers=current,
        version=str(row.generation if row is not None else 0),
        **conditions.changed_by(_latest(session, project, body.pattern)),
    )


def _latest(session: Session, project: UUID, pattern: str) -> Logged | None:
    """Return the entry of the latest act on a pattern."""
    entries = reversed(evidence.read(session, stream(project)))
    return next((one for one in entries if evidence.claim_of(one.envelope)["body"]["pattern"] == pattern), None)


def _named(session: Session, project: UUID, pattern: str) -> list[str]:
    rows = session.execute(
        select(AliasRow.name, AliasRow.bundle).where(AliasRow.project_id == project, AliasRow.bundle.is_not(None))
    )
    return sorted({bundle for name, bundle in rows if bundle is not None and fits(pattern, name)})


def _record(
    session: Session, service: Service, actor: Actor, pattern: str, movers: PatternMovers | None, reason: str
) -> AliasPatternRow:
    """Record an act on a pattern, and return its row as it is from then on; a removed one is the caller's to delete."""
    of = stream(actor.project_id)
    said = AliasPatternChanged(pattern=pattern, movers=movers, reason=reason)
    signed = evidence.state(
        acts.signer_of(session, service),
        of,
        f"pattern:{evidence.next_position(session, of)}",
        actor.name,
        Kind.ALIAS_PATTERN_REMOVED if movers is None else Kind.ALIAS_PATTERN_SET,
        said,
        subjects={"alias_pattern": evidence.name_digest(pattern)},
        now=acts.moment(session),
    )
    entry, _ = evidence.append(session, actor.project_id, signed)
    row = session.get(AliasPatternRow, (actor.project_id, pattern))
    if row is None:
        row = AliasPatternRow(project_id=actor.project_id, pattern=pattern)
        session.add(row)
    row.movers, row.set_at, row.set_by = movers or row.movers, entry.recorded_at, actor.name
    row.generation = entry.position
    session.flush()
    return row
