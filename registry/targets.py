"""Targets: one served name in one environment, with the references in force on it."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import DateTime, cast, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from uuid6 import uuid7

from registry import auth, conditions, db, documents, evidence, quarantine
from registry.auth import Actor
from registry.logged import Logged
from registry.service import Service
from registry.tables import IN_PROGRESS, EntryRow, JobRow, ReleaseRow, TargetReferenceRow, TargetRow
from schemas.api import TargetCreate
from schemas.common import format_instant
from schemas.evidence import Kind, ReferenceSet, SplitEntry, TargetCreated
from schemas.problems import Conflict, InvalidDocument, NotFound, TransitionRefused
from schemas.release import Phase, Replica, Target
from schemas.runner import JobKind, JobState, ReplicaState

REQUESTED = "requested"
"""Cause of a restore that a person asked for."""


def stream(target: UUID) -> str:
    """Return the evidence stream of a target."""
    return f"target/{target}"


def create(session: Session, service: Service, actor: Actor, body: TargetCreate) -> TargetRow:
    """Make a target.

    Raises:
        Conflict: the project or the gateway has a target of that name.
        InvalidDocument: the gateway is not one that this service drives.
        NotPermitted: the actor's token is for other targets.
    """
    auth.require_target(actor, body.name)
    auth.confirm(session, actor)
    if body.gateway not in service.settings.gateways:
        known = ", ".join(sorted(service.settings.gateways)) or "none"
        raise InvalidDocument(
            f"there is no gateway {body.gateway}; known: {known}",
            errors=[{"pointer": "/gateway", "detail": f"is not a gateway of this service; known: {known}"}],
        )
    at = db.now(session)
    target_id = uuid7()
    inserted = session.scalar(
        insert(TargetRow)
        .values(
            id=target_id,
            project_id=actor.project_id,
            name=body.name,
            runner_class=body.runner_class,
            gateway=body.gateway,
            generation=1,
            applied=[],
            created_at=at,
        )
        .on_conflict_do_nothing()
        .returning(TargetRow.id)
    )
    if inserted is None:
        raise _taken(session, actor, body)
    signed = evidence.state(
        service.signer,
        stream(target_id),
        "created",
        actor.name,
        Kind.TARGET_CREATED,
        TargetCreated(name=body.name, runner_class=body.runner_class, gateway=body.gateway),
        subjects={"target": evidence.name_digest(body.name)},
        now=at,
    )
    evidence.append(session, actor.project_id, signed)
    return get(session, actor.project_id, body.name)


def _taken(session: Session, actor: Actor, body: TargetCreate) -> Conflict:
    """Say who holds a name. What other projects have on a gateway is not told."""
    try:
        holder = get(session, actor.project_id, body.name)
    except NotFound:
        return Conflict(f"the name {body.name} is taken on gateway {body.gateway}", target=body.name)
    return Conflict(
        f"target {holder.id} has the name {body.name} in this project, behind gateway {holder.gateway}",
        target=body.name,
        holder=str(holder.id),
    )


def get(session: Session, project: UUID, name: str, *, lock: bool = False) -> TargetRow:
    """Return a target by `name@environment`; with `lock`, held for the rest of the transaction.

    Raises:
        NotFound: the project has none of that name.
    """
    query = select(TargetRow).where(TargetRow.project_id == project, TargetRow.name == name)
    if lock:
        query = query.with_for_update().execution_options(populate_existing=True)
    row = session.scalar(query)
    if row is None:
        raise NotFound(f"there is no target {name}; make one with `sluicegate target create {name}`", target=name)
    return row


def lock(session: Session, target: UUID) -> TargetRow:
    """Return a target held for the rest of the transaction: cross-release moves are made under this lock."""
    return session.scalars(
        select(TargetRow)
        .where(TargetRow.id == target)
        # Rows that only refer to it need not wait.
        .with_for_update(key_share=True)
        .execution_options(populate_existing=True)
    ).one()


def browse(session: Session, project: UUID, *, after: UUID | None, limit: int) -> list[TargetRow]:
    """Return a project's targets, newest first, before a cursor."""
    query = select(TargetRow).where(TargetRow.project_id == project)
    if after is not None:
        query = query.where(TargetRow.id < after)
    return list(session.scalars(query.order_by(TargetRow.id.desc()).limit(limit)))


def stable_release(session: Session, target: UUID) -> ReleaseRow | None:
    """Return the live release of a target."""
    return session.scalar(select(ReleaseRow).where(ReleaseRow.target_id == target, ReleaseRow.phase == Phase.PROMOTED))


def candidate_release(session: Session, target: UUID) -> ReleaseRow | None:
    """Return the release under way on a target."""
    return session.scalar(select(ReleaseRow).where(ReleaseRow.target_id == target, ReleaseRow.phase.in_(IN_PROGRESS)))


def way_back(session: Session, release: ReleaseRow) -> ReleaseRow | None:
    """Return the accepted release that traffic goes back to, or None: then a stop means no traffic.

    For a release under way it is what is live now, which has the rest of the traffic. The release that was live when
    another one began may have been rolled back since. Then the way back is where that one went: traffic never leaves
    an accepted bundle for a candidate because a person took another one back.
    A release whose bundle was deleted is passed by: only that of what is live or under way cannot be.
    So is one whose bundle is quarantined, unless it is live or kept warm: then traffic is on it, or the way back to
    it is prepared. Where there is no other, it is better than none.
    """
    if release.phase in IN_PROGRESS and (live := stable_release(session, release.target_id)) is not None:
        return live
    return way_back_past_live(session, release)


def way_back_past_live(session: Session, release: ReleaseRow) -> ReleaseRow | None:
    """Return what `way_back` does where nothing is live, or the release is not under way."""
    nearest: ReleaseRow | None = None
    for before in accepted_before(session, release):
        if not documents.is_there(session, before.project_id, "bundle", before.bundle):
            continue
        if nearest is None:
            if not _is_passed_by(session, before):
                return before
            nearest = before
        elif not quarantine.is_quarantined(session, before.project_id, before.bundle):
            return before
    return nearest


def accepted_before(session: Session, release: ReleaseRow) -> Iterator[ReleaseRow]:
    """Yield the accepted releases before one, nearest first; those that were rolled back are left out.

    Behind one that was taken back to nothing is nothing: a person said so, and the next one began as a first one does.
    """
    before: ReleaseRow | None = release
    while before is not None and before.predecessor_id is not None:
        before = session.get(ReleaseRow, before.predecessor_id)
        if before is None or before.phase not in {Phase.PROMOTED, Phase.SUPERSEDED, Phase.ROLLED_BACK}:
            return
        if before.phase != Phase.ROLLED_BACK:
            yield before
        elif _went_to_nothing(session, before):
            return


def _went_to_nothing(session: Session, release: ReleaseRow) -> bool:
    stream = evidence.release_stream(release.id)
    last = evidence.find(session, stream, "restore")
    body = {} if last is None else evidence.claim_of(last.envelope)["body"]
    return body.get("cause") == REQUESTED and not body.get("desired")


def _is_passed_by(session: Session, release: ReleaseRow) -> bool:
    """Tell whether an accepted release is quarantined, and neither live nor kept warm.

    Kept warm is what the split in force has an arm for, since the way back to it is prepared then; and what was ready
    when it was quarantined, while a runner holds it. What only boots is not.
    """
    if release.phase == Phase.PROMOTED:
        return False
    since = quarantine.since(session, release.project_id, release.bundle)
    if since is None:
        return False
    if any(entry["bundle"] == release.bundle for entry in session.get_one(TargetRow, release.target_id).applied):
        return False
    warm = select(JobRow.id).where(
        JobRow.target_id == release.target_id,
        JobRow.bundle == release.bundle,
        JobRow.kind == JobKind.SERVE,
        JobRow.state == JobState.CLAIMED,
        JobRow.lease_until >= func.clock_timestamp(),
        JobRow.is_wanted,
        func.jsonb_extract_path_text(JobRow.replica, "state") == ReplicaState.READY,
        cast(func.jsonb_extract_path_text(JobRow.replica, "since"), DateTime(timezone=True)) <= since,
    )
    return session.scalar(warm.limit(1)) is None


def accepted_bundle(session: Session, job: JobRow) -> str | None:
    """Return the bundle that traffic would go back to from what a job evaluates: last accepted, not last deployed."""
    if job.release_id is not None:
        before = way_back(session, session.get_one(ReleaseRow, job.release_id))
    else:
        before = stable_release(session, job.target_id) if job.target_id is not None else None
    return before.bundle if before is not None else None


def require_way_back(session: Session, release: ReleaseRow, *, soak_seconds: float) -> None:
    """Return when traffic has somewhere to go back to, or the release is still being rolled out.

    Taking back what is not being rolled out, and nothing was before, would switch the target off. What is live again
    since another release was taken back is not being rolled out: it begins no soak, and was accepted long before.

    Raises:
        TransitionRefused: it has not.
    """
    is_over = release.phase == Phase.PROMOTED and (
        db.now(session) >= release.phase_since + timedelta(seconds=soak_seconds) or _was_reinstated(session, release)
    )
    if is_over and way_back(session, release) is None:
        raise TransitionRefused(
            f"release {release.id} is not being rolled out, and there is no earlier version to go back to; "
            "to let the target serve nothing, say so with --to-nothing",
            phase=release.phase,
        )


def _was_reinstated(session: Session, release: ReleaseRow) -> bool:
    again = select(EntryRow.sequence).where(
        EntryRow.stream == evidence.release_stream(release.id), EntryRow.kind == Kind.REINSTATED
    )
    return session.scalar(again.limit(1)) is not None


def references(session: Session, target: UUID) -> dict[str, str]:
    """Return golden suite → reference in force."""
    rows = session.execute(
        select(TargetReferenceRow.suite, TargetReferenceRow.reference).where(TargetReferenceRow.target_id == target)
    )
    return {row.suite: row.reference for row in rows}


def require_reference(session: Session, target: TargetRow, suite: str, expected: str | None) -> None:
    """Return when a target, held by this transaction, has the reference that somebody saw; None is that it has none.

    Raises:
        Conflict: it has another one; `reference` says which, and `changed_by` who put it in force.
    """
    current = references(session, target.id).get(suite)
    if current == expected:
        return
    is_now = f"is {current}" if current else "is none"
    wanted = f"was expected to be {expected}" if expected else "was expected to be none"
    last = _last_set(session, target, suite)
    by = f", set by {last.actor} at {format_instant(last.recorded_at)}" if last else ""
    say = "`--expect REFERENCE` or `--if-match GENERATION`" if current else "nothing of what was"
    raise Conflict(
        f"the reference of {target.name} for golden suite {suite} {is_now}{by}, and {wanted}; "
        f"look again, and say what you saw with {say}",
        reference=current,
        version=str(target.generation),
        **conditions.changed_by(last),
    )


def _last_set(session: Session, target: TargetRow, suite: str) -> Logged | None:
    """Return the entry that put a suite's reference in force on a target last."""
    newest = (
        select(EntryRow)
        .where(EntryRow.stream == stream(target.id), EntryRow.kind == Kind.REFERENCE_SET)
        .order_by(EntryRow.position.desc())
    )
    said = (entry for entry in session.scalars(newest))
    return next((one for one in said if evidence.claim_of(one.envelope)["body"]["suite"] == suite), None)


def bearing(session: Session, project: UUID, suite: str, reference: str, *, limit: int) -> list[str]:
    """Return the names of the targets on which a reference is in force for its suite, at most so many."""
    query = (
        select(TargetRow.name)
        .join(TargetReferenceRow, TargetReferenceRow.target_id == TargetRow.id)
        .where(TargetRow.project_id == project)
        .where(TargetReferenceRow.suite == suite, TargetReferenceRow.reference == reference)
    )
    return list(session.scalars(query.order_by(TargetRow.name).limit(limit)))


def set_reference(
    session: Session,
    service: Service,
    target: TargetRow,
    *,
    suite: str,
    reference: str,
    bundle: str,
    actor: str,
    act: str,
    expected: str | None = None,
) -> str:
    """Put a golden reference in force on a held target, as a recorded act. The old one stays in the log.

    `expected` is the one that it takes the place of.

    Returns:
        The one that the act put in force: an act that was done before stays as it was.

    Raises:
        Conflict: another one is in force; see `require_reference`.
    """
    if (known := evidence.find(session, stream(target.id), act)) is not None:
        return str(evidence.claim_of(known.envelope)["body"]["reference"])
    require_reference(session, target, suite, expected)
    signed = evidence.state(
        service.signer,
        stream(target.id),
        act,
        actor,
        Kind.REFERENCE_SET,
        ReferenceSet(target=target.name, suite=suite, reference=reference, bundle=bundle, previous=expected),
        subjects={"reference": reference, "suite": suite, "bundle": bundle},
        now=db.now(session),
    )
    evidence.append(session, target.project_id, signed)
    session.execute(
        insert(TargetReferenceRow)
        .values(target_id=target.id, suite=suite, reference=reference)
        .on_conflict_do_update(index_elements=["target_id", "suite"], set_={"reference": reference})
    )
    target.generation += 1
    session.flush()
    return reference


def outdated(session: Session, job: JobRow) -> str | None:
    """Return that a recording would be refused, since another reference is in force than it was asked to replace."""
    if job.target_id is None or job.reference is not None:
        return None
    target = session.get_one(TargetRow, job.target_id)
    for suite in job.suites:
        try:
            require_reference(session, target, suite, job.references.get(suite))
        except Conflict as refused:
            return f"{refused.kind}: {refused.detail}"[:2000]
    return None


def replicas(session: Session, target: UUID) -> list[Replica]:
    """Return the replicas that serve or served a target lately, newest first."""
    rows = session.scalars(
        select(JobRow)
        .where(JobRow.target_id == target, JobRow.replica.is_not(None), JobRow.kind == JobKind.SERVE)
        .order_by(JobRow.id.desc())
        .limit(20)
    )
    return [replica for row in rows if (replica := replica_of(row)) is not None]


def replica_of(job: JobRow) -> Replica | None:
    """Return the replica that a job last reported."""
    if job.replica is None:
        return None
    report: dict[str, Any] = job.replica
    return Replica(
        job=job.id,
        bundle=job.bundle,
        purpose="live" if job.kind == JobKind.SERVE else "gates",
        state=report["state"],
        since=report["since"],
        address=report.get("address"),
        cause=report["cause"],
        failure=report.get("failure"),
        log_tail=report.get("log_tail"),
    )


def wire(session: Session, service: Service, row: TargetRow) -> Target:
    """Return a target as the service gives it out."""
    gateway = service.settings.gateways.get(row.gateway)
    stable = stable_release(session, row.id)
    candidate = candidate_release(session, row.id)
    return Target(
        id=row.id,
        name=row.name,
        runner_class=row.runner_class,
        gateway=row.gateway,
        url=f"{gateway.url.rstrip('/')}/{row.name}/v1" if gateway else None,
        generation=row.generation,
        stable_release=stable.id if stable else None,
        stable_bundle=stable.bundle if stable else None,
        candidate_release=candidate.id if candidate else None,
        quarantined=quarantine.reasons(session, row.project_id, stable.bundle) if stable else [],
        references=references(session, row.id),
        applied=[SplitEntry.model_validate(entry) for entry in row.applied],
        replicas=replicas(session, row.id),
        created_at=row.created_at,
    )


def by_gateway_name(session: Session, gateway: str, name: str) -> TargetRow | None:
    """Return the target that a gateway knows under a name, whatever its project."""
    return session.scalar(select(TargetRow).where(TargetRow.gateway == gateway, TargetRow.name == name))
