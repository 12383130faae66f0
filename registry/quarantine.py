"""Quarantine: a bundle that is trusted no more, until a person answers for it.

Whoever lets something go on with a bundle holds its membership (`documents.hold`) and asks within that transaction;
whoever quarantines it takes the membership whole. So of the two one is first, and the other sees it. Whether a
bundle is quarantined is the fold of its stream; `quarantined_at` is a cache of it.

No release is moved here: each is asked at its next step, and those that wait for nothing are made due: by the sweep
while the bundle is quarantined, and by whoever lifts that, since what was measured before counts no more then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import event, func, select, update
from sqlalchemy.orm import Session, SessionTransaction

from registry import acts, auth, conditions, db, documents, evidence
from registry.auth import Actor
from registry.lifecycle import BEFORE_TRAFFIC
from registry.logged import Logged
from registry.service import Service
from registry.tables import EntryRow, ProjectDocumentRow, ReleaseRow
from schemas.api import Act, Ground, Quarantine, QuarantineState
from schemas.common import Closed
from schemas.evidence import Kind, Quarantined, QuarantineLifted
from schemas.problems import BundleQuarantined, Conflict, NotFound
from schemas.result import GateResult, Verdict

KINDS = (Kind.BUNDLE_QUARANTINED, Kind.QUARANTINE_LIFTED)
SERVICE = "service"
"""Who quarantines what no person did."""
INTEGRITY = "integrity"
"""The gate whose failure is about the bundle's bytes."""
MAX_REASON = 4000
_FREE = "bundles_held_free"
"""Bundles that a transaction holds, and has found not to be quarantined: until it ends they cannot be."""


def impose(session: Session, service: Service, actor: Actor, named: str, body: Act) -> QuarantineState:
    """Quarantine a bundle by hand. Asking twice changes nothing; another person's reason is one more ground.

    Raises:
        NotFound: the project has none of that digest.
        NotPermitted: the actor's token is for some targets only.
    """
    auth.require_whole_project(actor, "quarantine")
    auth.confirm(session, actor)
    member = _take(session, actor.project_id, documents.resolve(session, actor.project_id, "bundle", named))
    grounds = _grounds(session, actor.project_id, [member.digest]).get(member.digest, [])
    if not any(one.actor == actor.name for one in grounds):
        said = Quarantined(digest=member.digest, name=member.name, cause="person", reason=body.reason)
        _quarantine(session, service, member, actor.name, said)
    return _state(session, member)


def lift(
    session: Session, service: Service, actor: Actor, named: str, body: Act, *, if_match: str | None = None
) -> QuarantineState:
    """Let a bundle be used again, whatever it is quarantined for.

    This lets nothing through by itself: a release begins anew, and its gates read every byte again. Results from before
    count no more (`latest`).

    `if_match` is the version of the quarantine that the actor saw; see `registry.conditions`.

    Raises:
        NotFound: the project has none of that digest.
        Conflict: it is not quarantined.
        StaleEdit: it is quarantined for something else by now.
        NotPermitted: the actor's token is for some targets only.
    """
    auth.require_whole_project(actor, "lift_quarantine")
    auth.confirm(session, actor)
    member = _take(session, actor.project_id, documents.resolve(session, actor.project_id, "bundle", named))
    stream = documents.stream(actor.project_id, member.digest)
    grounds = _grounds(session, actor.project_id, [member.digest]).get(member.digest, [])
    if not grounds:
        if (last := evidence.latest(session, stream)) is not None and last.kind == Kind.QUARANTINE_LIFTED:
            if last.actor == actor.name:
                return _state(session, member)
            members = conditions.changed_by(last)
            raise Conflict(f"bundle {member.digest} is not quarantined any more: {last.actor} lifted it", **members)
        raise Conflict(f"bundle {member.digest} is not quarantined")
    conditions.require(f"the quarantine of bundle {member.digest}", _version(grounds), if_match, grounds[-1])
    said = QuarantineLifted(
        digest=member.digest, name=member.name, grounds=[one.entry_digest for one in grounds], reason=body.reason
    )
    _record(session, service, member, "lifted", actor.name, Kind.QUARANTINE_LIFTED, said)
    member.quarantined_at = None
    session.flush()
    _wake(session, member)
    return _state(session, member)


def _wake(session: Session, member: ProjectDocumentRow) -> None:
    """Make the releases of a bundle due that have no traffic yet."""
    waiting = (
        select(ReleaseRow.id)
        .where(
            ReleaseRow.project_id == member.project_id,
            ReleaseRow.bundle == member.digest,
            ReleaseRow.phase.in_(BEFORE_TRAFFIC),
        )
        # Who holds one may wait for the membership, which is held here, so nobody is waited for: they look themselves.
        .with_for_update(skip_locked=True, key_share=True)
    )
    session.execute(
        update(ReleaseRow)
        .where(ReleaseRow.id.in_(session.scalars(waiting).all()))
        .values(due_at=func.clock_timestamp())
        .execution_options(synchronize_session=False)
    )


def of_result(session: Session, service: Service, entry: Logged, bundle: str, result: GateResult) -> None:
    """Quarantine a bundle whose integrity gate failed, by the entry of that result. Other results change nothing."""
    if result.gate != INTEGRITY or result.verdict is not Verdict.FAILED:
        return
    member = _take(session, entry.project_id, bundle, or_deleted=True)
    said = Quarantined(
        digest=bundle,
        name=member.name,
        cause="integrity_gate",
        reason=f"integrity failed: {result.summary}"[:MAX_REASON],
        result=entry.entry_digest,
    )
    _quarantine(session, service, member, SERVICE, said)


@dataclass(frozen=True, slots=True)
class Damage:
    """A blob of the store that was read again and has other bytes."""

    blob: str
    found: str
    seen_by: str | None
    """Who met it; None for somebody in another project."""


def of_blob(session: Session, service: Service, project: UUID, bundle: str, damage: Damage) -> None:
    """Quarantine a bundle that is made of a damaged blob. What is a ground already is none again."""
    member = _take(session, project, bundle, or_deleted=True)
    grounds = _grounds(session, project, [bundle] if member.quarantined_at is not None else []).get(bundle, [])
    if any(evidence.claim_of(one.envelope)["body"].get("blob") == damage.blob for one in grounds):
        return
    met = f"; {damage.seen_by} met it" if damage.seen_by else ""
    said = Quarantined(
        digest=bundle,
        name=member.name,
        cause="blob_damaged",
        reason=f"the store has other bytes under {damage.blob}: {damage.found}{met}",
        blob=damage.blob,
        found=damage.found,
        seen_by=damage.seen_by,
    )
    _quarantine(session, service, member, SERVICE, said)


def require_free(session: Session, project: UUID, bundle: str) -> None:
    """Return when a bundle is not quarantined, nor will be before the transaction ends.

    Raises:
        BundleQuarantined: `grounds` says why, and `quarantined_by` and `quarantined_at` who was first.
    """
    free: set[tuple[UUID, str]] = session.info.setdefault(_FREE, set())
    if (project, bundle) in free:
        return
    is_marked = documents.hold(session, project, bundle)
    found = standing(session, project, [bundle]).get(bundle) if is_marked else None
    if found is None:
        free.add((project, bundle))
        return
    raise BundleQuarantined(
        f"bundle {bundle} is quarantined: {'; '.join(_sentence(one) for one in found.grounds)}; "
        f"a manager may lift it with `sluicegate bundle lift {bundle[7:19]} --reason …`",
        bundle=bundle,
        grounds=[one.model_dump(mode="json") for one in found.grounds],
        quarantined_by=found.grounds[0].by,
        quarantined_at=found.model_dump(mode="json")["since"],
    )


@event.listens_for(Session, "after_transaction_end")
def _let_go(session: Session, transaction: SessionTransaction) -> None:
    if db.is_over(transaction):
        session.info.pop(_FREE, None)


def is_quarantined(session: Session, project: UUID, bundle: str) -> bool:
    """Tell whether a bundle is quarantined now. What goes on by it asks `require_free` instead."""
    return bool(_among(session, project, [bundle]))


def since(session: Session, project: UUID, bundle: str) -> datetime | None:
    """Return since when a bundle is quarantined; None when it is not."""
    return session.scalar(
        select(ProjectDocumentRow.quarantined_at).where(
            ProjectDocumentRow.project_id == project,
            ProjectDocumentRow.digest == bundle,
            ProjectDocumentRow.kind == "bundle",
        )
    )


def reasons(session: Session, project: UUID, bundle: str) -> list[str]:
    """Return why a bundle is quarantined, one sentence each; nothing when it is not."""
    if (project, bundle) in session.info.get(_FREE, ()):
        return []
    found = standing(session, project, [bundle]).get(bundle)
    return [_sentence(one) for one in found.grounds] if found is not None else []


def standing(session: Session, project: UUID, digests: Iterable[str]) -> dict[str, Quarantine]:
    """Return digest → quarantine of those bundles that are quarantined."""
    return {
        digest: Quarantine(
            since=grounds[0].recorded_at, grounds=[_ground(one) for one in grounds], version=_version(grounds)
        )
        for digest, grounds in _grounds(session, project, _among(session, project, digests)).items()
    }


def in_force(rows: Iterable[Logged]) -> list[Logged]:
    """Return what a bundle is quarantined for, from the entries of its stream, oldest first."""
    grounds: list[Logged] = []
    for row in rows:
        if row.kind == Kind.BUNDLE_QUARANTINED:
            grounds.append(row)
        elif row.kind == Kind.QUARANTINE_LIFTED:
            grounds = []
    return grounds


def _among(session: Session, project: UUID, digests: Iterable[str]) -> Sequence[str]:
    """Return those bundles that are quarantined."""
    return session.scalars(
        select(ProjectDocumentRow.digest).where(
            ProjectDocumentRow.project_id == project,
            ProjectDocumentRow.digest.in_(set(digests)),
            ProjectDocumentRow.quarantined_at.is_not(None),
        )
    ).all()


def _grounds(session: Session, project: UUID, digests: Sequence[str]) -> dict[str, list[Logged]]:
    """Return digest → the entries that it is quarantined by."""
    if not digests:
        return {}
    streams = {documents.stream(project, digest): digest for digest in digests}
    rows = session.scalars(
        select(EntryRow)
        .where(EntryRow.stream.in_(streams), EntryRow.kind.in_(KINDS))
        .order_by(EntryRow.stream, EntryRow.position)
    )
    by_bundle: dict[str, list[Logged]] = {}
    for row in rows:
        by_bundle.setdefault(streams[row.stream], []).append(row)
    return {digest: found for digest, log in by_bundle.items() if (found := in_force(log))}


def _take(session: Session, project: UUID, digest: str, *, or_deleted: bool = False) -> ProjectDocumentRow:
    """Return a bundle's membership, which nobody else holds until the transaction ends. Raises NotFound."""
    member = session.scalar(
        select(ProjectDocumentRow)
        .where(
            ProjectDocumentRow.project_id == project,
            ProjectDocumentRow.digest == digest,
            ProjectDocumentRow.kind == "bundle",
        )
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    if member is None or (member.deleted_at is not None and not or_deleted):
        raise NotFound(f"there is no bundle {digest}", digest=digest)
    return member


def _quarantine(session: Session, service: Service, member: ProjectDocumentRow, actor: str, said: Quarantined) -> None:
    session.info.pop(_FREE, None)
    entry = _record(session, service, member, "quarantined", actor, Kind.BUNDLE_QUARANTINED, said)
    if member.quarantined_at is None:
        member.quarantined_at = entry.recorded_at
    session.flush()


def _record(
    session: Session, service: Service, member: ProjectDocumentRow, act: str, actor: str, kind: Kind, said: Closed
) -> Logged:
    stream = documents.stream(member.project_id, member.digest)
    signed = evidence.state(
        acts.signer_of(session, service),
        stream,
        f"{act}:{evidence.next_position(session, stream)}",
        actor,
        kind,
        said,
        subjects={"bundle": member.digest},
        now=acts.moment(session),
    )
    return evidence.append(session, member.project_id, signed)[0]


def _state(session: Session, member: ProjectDocumentRow) -> QuarantineState:
    found = standing(session, member.project_id, [member.digest]).get(member.digest)
    return QuarantineState(digest=member.digest, name=member.name, quarantine=found)


def _version(grounds: Sequence[Logged]) -> str:
    return f"quarantined:{grounds[-1].position}"


def _ground(row: Logged) -> Ground:
    body = Quarantined.model_validate(evidence.claim_of(row.envelope)["body"])
    return Ground(cause=body.cause, reason=body.reason, by=row.actor, at=row.recorded_at, entry=row.entry_digest)


def _sentence(ground: Ground) -> str:
    return f"{ground.by}: {ground.reason}" if ground.cause == "person" else ground.reason
