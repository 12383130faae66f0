"""Releases: attempts to take a bundle live on a target. People's acts on them; the workers' are in `workers`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import and_, select
from sqlalchemy.orm import Session
from uuid6 import uuid7

from gates import policy as judgement
from gates.fitting import Needs
from registry import (
    acts,
    advice,
    auth,
    beside,
    conditions,
    db,
    documents,
    evidence,
    holding,
    quarantine,
    rollbacks,
    scheduling,
    targets,
    waits,
)
from registry.advice import Deed
from registry.auth import Actor
from registry.logged import Logged
from registry.service import Service
from registry.tables import ProjectDocumentRow, ReleaseRow, TargetRow
from schemas.api import Act, ReleaseCreate, Revoke, RollBack
from schemas.bundle import Bundle
from schemas.common import Closed
from schemas.evidence import Created, EvidenceRevoked, Kind, Note, Reasoned, RollbackRequested
from schemas.policy import GoldenRule, Policy
from schemas.problems import (
    Conflict,
    NotEligible,
    NotFound,
    NotPermitted,
    ReferenceMissing,
    TransitionRefused,
)
from schemas.release import TERMINAL, GateStatus, Phase, Release, ReleaseDetail
from schemas.result import GateResult, Verdict
from schemas.short import span


def create(
    session: Session, service: Service, actor: Actor, body: ReleaseCreate, *, if_match: str | None = None
) -> ReleaseRow:
    """Start a release: everything it will be judged by is frozen now.

    `if_match` is the generation that the target must have; see `registry.conditions`.

    Raises:
        StaleEdit: the target has changed.
        NotFound: the project lacks target, bundle or policy.
        ReferenceMissing: a golden gate of the policy has no reference on the target.
        Conflict: another release is under way on the target, or the bundle is live there already; the problem
            names the release.
        BundleQuarantined: nothing begins with it.
        NoRunnerFits: no runner of the target's class could ever serve the bundle.
        NotPermitted: the actor's token is for other targets.
    """
    auth.require_target(actor, body.target)
    auth.confirm(session, actor)
    target = targets.lock(session, targets.get(session, actor.project_id, body.target).id)
    conditions.require_target(session, target, if_match)
    bundle = documents.need_bundle(session, actor.project_id, body.bundle)
    quarantine.require_free(session, actor.project_id, body.bundle)
    policy = documents.load_policy(session, actor.project_id, body.policy)
    holder = targets.candidate_release(session, target.id)
    if holder is not None:
        raise Conflict(
            f"release {holder.id} by {holder.created_by} is under way on {target.name} ({holder.phase}); "
            "wait for it, reject it or roll it back",
            holder=str(holder.id),
        )
    references = frozen_references(policy, targets.references(session, target.id), target.name)
    stable = targets.stable_release(session, target.id)
    if stable is not None and stable.bundle == body.bundle:
        raise Conflict(
            f"bundle {body.bundle} is live on {target.name} already, by release {stable.id}", holder=str(stable.id)
        )
    _require_runner(session, target, policy, bundle, stable)
    at = db.now(session)
    release = ReleaseRow(
        id=uuid7(),
        project_id=actor.project_id,
        target_id=target.id,
        bundle=body.bundle,
        policy=body.policy,
        references=references,
        predecessor_id=stable.id if stable else None,
        created_at=at,
        created_by=actor.name,
        lease_token=0,
    )
    created = Created(
        target=target.name,
        bundle=body.bundle,
        serving_digest=bundle.serving_digest,
        policy=body.policy,
        references=references,
        predecessor=release.predecessor_id,
        stable_bundle=stable.bundle if stable else None,
        reason=body.reason,
    )
    signed = evidence.state(
        service.signer,
        evidence.release_stream(release.id),
        "created",
        actor.name,
        Kind.CREATED,
        created,
        subjects=subjects(release),
        now=at,
    )
    evidence.begin(session, release, signed)
    return release


def _require_runner(
    session: Session, target: TargetRow, policy: Policy, bundle: Bundle, stable: ReleaseRow | None
) -> None:
    """Return when a runner of the target's class could run what a release does. Raises NoRunnerFits."""
    gates, live = [rule.gate for rule in policy.gates], stable.bundle if stable else None
    needs = scheduling.with_way_back(session, target.project_id, Needs.of(bundle), gates, live)
    scheduling.require_fit(session, target.project_id, target.runner_class, needs)


def frozen_references(policy: Policy, in_force: dict[str, str], target: str) -> dict[str, str]:
    """Return golden suite → reference for a policy. Raises ReferenceMissing when the target lacks one."""
    frozen = {}
    for rule in policy.gates:
        if isinstance(rule, GoldenRule):
            if rule.suite not in in_force:
                raise ReferenceMissing(
                    f"target {target} has no reference for golden suite {rule.suite}; record one with "
                    f"`sluicegate suite record {rule.suite[7:19]} --target {target} --bundle BUNDLE --reason …`",
                    suite=rule.suite,
                )
            frozen[rule.suite] = in_force[rule.suite]
    return frozen


def subjects(release: ReleaseRow) -> dict[str, str]:
    """Return what every statement about a release is about."""
    return {"bundle": release.bundle, "policy": release.policy}


def get(session: Session, project: UUID, release: UUID) -> ReleaseRow:
    """Return a release. Raises NotFound when the project has no such release."""
    row = session.get(ReleaseRow, release)
    if row is None or row.project_id != project:
        raise NotFound(f"there is no release {release}")
    return row


def browse(
    session: Session,
    project: UUID,
    *,
    target: UUID | None,
    phases: Sequence[str],
    bundle: str | None = None,
    after: UUID | None,
    limit: int,
) -> list[ReleaseRow]:
    """Return a project's releases, newest first, before a cursor; of target, bundle or phases when asked."""
    query = select(ReleaseRow).where(ReleaseRow.project_id == project)
    if target is not None:
        query = query.where(ReleaseRow.target_id == target)
    if bundle is not None:
        query = query.where(ReleaseRow.bundle == bundle)
    if phases:
        query = query.where(ReleaseRow.phase.in_(phases))
    if after is not None:
        query = query.where(ReleaseRow.id < after)
    return list(session.scalars(query.order_by(ReleaseRow.id.desc()).limit(limit)))


@dataclass(frozen=True, slots=True)
class Line:
    """A release as a line of a list: what can be said of it without reading its log."""

    release: ReleaseRow
    target: str
    bundle_name: str


def lines(
    session: Session,
    project: UUID,
    *,
    target: UUID | None = None,
    bundle: str | None = None,
    phases: Sequence[str] = (),
    after: UUID | None,
    limit: int,
) -> list[Line]:
    """Return a project's releases as lines, newest first, before a cursor; of target, bundle or phases when asked."""
    query = (
        select(ReleaseRow, TargetRow.name, ProjectDocumentRow.name)
        .join(TargetRow, TargetRow.id == ReleaseRow.target_id)
        .join(
            ProjectDocumentRow,
            and_(
                ProjectDocumentRow.digest == ReleaseRow.bundle, ProjectDocumentRow.project_id == ReleaseRow.project_id
            ),
        )
        .where(ReleaseRow.project_id == project)
    )
    if target is not None:
        query = query.where(ReleaseRow.target_id == target)
    if bundle is not None:
        query = query.where(ReleaseRow.bundle == bundle)
    if phases:
        query = query.where(ReleaseRow.phase.in_(phases))
    if after is not None:
        query = query.where(ReleaseRow.id < after)
    rows = session.execute(query.order_by(ReleaseRow.id.desc()).limit(limit))
    return [Line(release, of, name) for release, of, name in rows]


def log(session: Session, release: UUID) -> list[Logged]:
    """Return the log of a release, oldest entry first."""
    return evidence.read(session, evidence.release_stream(release))


def act(
    session: Session, service: Service, release: ReleaseRow, name: str, actor: str, kind: Kind, body: Closed
) -> ReleaseRow:
    """Append one act to a release's log. Raises TransitionRefused when it has no place there."""
    signed = evidence.state(
        acts.signer_of(session, service),
        evidence.release_stream(release.id),
        name,
        actor,
        kind,
        body,
        subjects=subjects(release),
        now=acts.moment(session),
    )
    row, _ = evidence.record(session, signed)
    return row


DRILL = "rollback"
"""The gate whose result is about the bundle that traffic goes back to as well."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a release's evidence says now about its gates."""

    decision: judgement.Decision
    results: dict[str, tuple[Logged, GateResult]]
    """Latest result of each gate, however old."""
    expired: dict[str, str]
    """Gates whose latest result does not count any more, with why."""


def standing(
    session: Session,
    release: ReleaseRow,
    policy: Policy,
    *,
    now: datetime,
    entries: Sequence[Logged] | None = None,
) -> Standing:
    """Fold the latest result of each required gate that is neither expired nor revoked. Computed, never stored.

    A drill expires too when traffic would go back to another bundle than it went back to, and whatever did not fail
    when the bundle was quarantined after it: a lift lets nothing through that was measured before.

    `entries` is the release's log, where the caller has read it under the release's lock.
    """
    entries = log(session, release.id) if entries is None else entries
    measured, revoked = _results(entries), revocations(entries)
    # A revoked result uncovers no earlier one: the gate has none until it is measured anew.
    gone = {gate: revoked[entry.entry_digest] for gate, (entry, _) in measured.items() if entry.entry_digest in revoked}
    latest = {gate: found for gate, found in measured.items() if gate not in gone}
    oldest = now - timedelta(seconds=float(policy.evidence_seconds))
    accepted, doubt = beside.facts(session, release)
    expired = {gate: f"was revoked: {why}" for gate, why in gone.items()}
    expired |= {
        gate: f"went back to {result.against or 'no traffic'}, and now traffic would go back to {accepted or 'none'}"
        for gate, (_, result) in latest.items()
        if gate == DRILL and result.verdict is Verdict.PASSED and result.against != accepted
    }
    for gate, (entry, result) in latest.items():
        # A failure stays one: what would be measured again because of its age might pass.
        if entry.recorded_at < oldest and result.verdict is not Verdict.FAILED:
            expired[gate] = f"ran too long ago: its result counts for {span(policy.evidence_seconds)}"
    if doubt is not None:
        for gate, (entry, result) in latest.items():
            if entry.sequence < doubt and result.verdict is not Verdict.FAILED:
                expired[gate] = "ran before the bundle was quarantined, or before that was lifted"
    verdicts: dict[str, Verdict] = {gate: result.verdict for gate, (_, result) in latest.items() if gate not in expired}
    decision = judgement.decide([rule.gate for rule in policy.gates], verdicts, expired=expired)
    return Standing(decision, latest, expired)


def require_eligible(
    session: Session,
    release: ReleaseRow,
    policy: Policy,
    *,
    now: datetime,
    entries: Sequence[Logged] | None = None,
) -> Standing:
    """Return the standing of a release whose gates have all passed.

    Raises:
        NotEligible: they have not.
        BundleQuarantined: its bundle is, whatever the gates say; it will not be before the transaction ends, else.
    """
    quarantine.require_free(session, release.project_id, release.bundle)
    found = standing(session, release, policy, now=now, entries=entries)
    if found.decision.outcome is not judgement.Outcome.PASSED:
        reasons = "; ".join(found.decision.reasons)
        raise NotEligible(f"release {release.id} may not move: {reasons}", reasons=list(found.decision.reasons))
    return found


def reject(
    session: Session, service: Service, actor: Actor, release_id: UUID, body: Act, *, if_match: str | None = None
) -> ReleaseRow:
    """Reject a release that has no traffic yet. Asking twice changes nothing.

    Raises:
        TransitionRefused: it has traffic (roll it back instead) or has ended.
    """
    release = hold(session, actor, release_id, if_match)
    stream = evidence.release_stream(release.id)
    if evidence.find(session, stream, "rejection") is not None:
        return release
    require_place(session, release, Deed.REJECT)
    refused = Reasoned(reasons=[f"rejected by {actor.name}: {body.reason}"], cause="rejected_by_person")
    return act(session, service, release, "rejection", actor.name, Kind.REFUSED, refused)


def pause(
    session: Session, service: Service, actor: Actor, release_id: UUID, body: Act, *, if_match: str | None = None
) -> ReleaseRow:
    """Stop a release from moving on. Stop conditions stay armed.

    Raises:
        TransitionRefused: it is live or over, or was paused very often.
    """
    release = hold(session, actor, release_id, if_match)
    require_place(session, release, Deed.PAUSE)
    if release.is_paused:
        return release
    holding.require_room(release, holding.MOST_TO_REPEAT)
    return act(session, service, release, _once("pause", session), actor.name, Kind.PAUSED, Note(reason=body.reason))


def resume(
    session: Session, service: Service, actor: Actor, release_id: UUID, body: Act, *, if_match: str | None = None
) -> ReleaseRow:
    """Let a paused release go on, or a held one try again.

    Raises:
        TransitionRefused: it is neither paused nor held, or was so very often.
    """
    release = hold(session, actor, release_id, if_match)
    require_place(session, release, Deed.RESUME)
    if release.phase != Phase.PROMOTED:
        holding.require_room(release, holding.MOST_TO_RESUME)
    return act(session, service, release, _once("resume", session), actor.name, Kind.RESUMED, Note(reason=body.reason))


def promote(
    session: Session, service: Service, actor: Actor, release_id: UUID, body: Act, *, if_match: str | None = None
) -> ReleaseRow:
    """Ask that the remaining canary steps be skipped. Stop conditions stay armed and evidence must still hold.

    Asking again changes nothing.

    Raises:
        Conflict: somebody else has asked for it, or that traffic be taken back; the problem names them.
        NotPermitted: the actor is the release's author, and its policy asks for approval.
        NotEligible: evidence expired or is missing.
        TransitionRefused: the release has no traffic, or a stop condition has fired.
    """
    release = hold(session, actor, release_id, if_match)
    policy = documents.load_policy(session, actor.project_id, release.policy)
    if policy.approval.required:
        # A policy that asks nobody's consent to let traffic in asks nobody's to speed it up.
        require_other(release, actor, "promote")
    require_place(session, release, Deed.PROMOTE)
    entries = log(session, release.id)
    if any(e.kind == Kind.STOP_CONDITION_FIRED for e in entries):
        raise TransitionRefused(f"a stop condition of release {release.id} has fired", phase=release.phase)
    for entry in rollbacks.requests(entries):
        raise Conflict(
            f"{entry.actor} has asked that traffic be taken back from release {release.id}",
            holder=entry.actor,
            **conditions.changed_by(entry),
        )
    for entry in entries:
        if entry.kind == Kind.PROMOTION_REQUESTED and entry.actor != actor.name:
            raise Conflict(
                f"{entry.actor} has asked for the promotion of release {release.id} already",
                holder=entry.actor,
                **conditions.changed_by(entry),
            )
    if any(e.kind == Kind.PROMOTION_REQUESTED for e in entries):
        return release
    require_eligible(session, release, policy, now=db.now(session))
    return act(session, service, release, "promotion", actor.name, Kind.PROMOTION_REQUESTED, Note(reason=body.reason))


def revoke(session: Session, service: Service, actor: Actor, body: Revoke) -> tuple[Logged, bool]:
    """Let a gate result of a release count no more. What has traffic keeps it; nothing moves on by that result.

    Returns:
        The entry that says so, and whether this call wrote it: revoking twice changes nothing.

    Raises:
        NotFound: the project has no such entry.
        Conflict: the entry is not a gate result of a release.
    """
    entry = evidence.by_digest(session, actor.project_id, body.entry)
    if entry is None:
        raise NotFound(f"there is no entry {body.entry}", digest=body.entry)
    if entry.kind != Kind.GATE_RECORDED or not entry.stream.startswith("release/"):
        raise Conflict(
            f"entry {body.entry} is {entry.kind} in {entry.stream}: only a release's gate results are revoked"
        )
    release = hold(session, actor, UUID(entry.stream.removeprefix("release/")), None)
    name = f"revoked:{entry.entry_digest}"
    known = evidence.find(session, entry.stream, name)
    if known is not None:
        return known, False
    gate = evidence.claim_of(entry.envelope)["body"]["gate"]
    said = EvidenceRevoked(entry=entry.entry_digest, gate=gate, reason=body.reason)
    act(session, service, release, name, actor.name, Kind.EVIDENCE_REVOKED, said)
    written = evidence.find(session, entry.stream, name)
    if written is None:
        raise NotFound(f"there is no entry {name}")
    return written, True


def rollback(
    session: Session, service: Service, actor: Actor, release_id: UUID, body: Act, *, if_match: str | None = None
) -> ReleaseRow:
    """Ask that all traffic be taken back from a release. Asking twice changes nothing; a `RollBack` may leave nothing.

    It is asked for this time that the release has traffic: when it was replaced and comes back, that is over.

    Raises:
        TransitionRefused: the release has no traffic to take back, or nothing was live before it.
        Conflict: another release has traffic on the target; see `rollbacks.require_alone`.
    """
    release = hold(session, actor, release_id, if_match)
    is_to_nothing = isinstance(body, RollBack) and bool(body.to_nothing)
    name = rollbacks.next_act(release, log(session, release.id), is_to_nothing=is_to_nothing)
    if name is None:
        return release
    require_place(session, release, Deed.ROLLBACK)
    # First what can be done about: with the canary gone, there may be a way back, or `--to-nothing` be meant.
    rollbacks.require_alone(session, release, is_to_nothing=is_to_nothing)
    has_nowhere = not is_to_nothing and targets.way_back(session, release) is None
    if has_nowhere:
        policy = documents.load_policy(session, actor.project_id, release.policy)
        targets.require_way_back(session, release, soak_seconds=float(policy.canary.soak_seconds))
    said = RollbackRequested(reason=body.reason, to_nothing=is_to_nothing or None, no_way_back=has_nowhere or None)
    return act(session, service, release, name, actor.name, Kind.ROLLBACK_REQUESTED, said)


def require_place(session: Session, release: ReleaseRow, deed: Deed) -> None:
    """Refuse a deed that a release in its phase does not take, in words for the person who asked for it."""
    target = session.get_one(TargetRow, release.target_id).name
    try:
        advice.require(deed, evidence.cached(release), release=release.id, target=target)
    except TransitionRefused as refusal:
        last = evidence.latest(session, evidence.release_stream(release.id))
        raise TransitionRefused(refusal.detail, **refusal.members, **conditions.changed_by(last)) from None


def require_other(release: ReleaseRow, actor: Actor, what: str) -> None:
    """Separation of duties: nobody lets their own release through, an administrator neither."""
    if actor.name == release.created_by:
        raise NotPermitted(
            f"{actor.name} is the author of release {release.id}; somebody else has to {what} it",
            author=release.created_by,
        )


def hold(session: Session, actor: Actor, release: UUID, if_match: str | None) -> ReleaseRow:
    """Return a release that a person is about to act on, held for the rest of the transaction.

    Every act of a person begins here: the token must still count and be for this target, and the release must be
    as the person saw it, when they say how they saw it. Raises NotFound, NotPermitted, Unauthenticated, StaleEdit.
    """
    row = holding.take(session, actor, release)
    conditions.require_release(session, row, if_match)
    return row


def _once(name: str, session: Session) -> str:
    """An act that may be repeated later gets the instant into its name."""
    return f"{name}:{acts.moment(session).isoformat()}"


def wire(session: Session, release: ReleaseRow, entries: Sequence[Logged] | None = None) -> Release:
    """Return a release as the service gives it out."""
    return Release(**_fields(session, release, entries if entries is not None else log(session, release.id)))


def detail(session: Session, release: ReleaseRow) -> ReleaseDetail:
    """Return a release with its log."""
    entries = log(session, release.id)
    told = [evidence.wire(entry) for entry in entries]
    return ReleaseDetail(**_fields(session, release, entries), doing=waits.doing(session, release), log=told)


def _fields(session: Session, release: ReleaseRow, entries: Sequence[Logged]) -> dict[str, Any]:
    of = release.project_id
    told = beside.shown(session, release)
    policy = documents.bound_policy(session, release.policy)
    is_over = release.phase in TERMINAL
    return {
        "id": release.id,
        "target": told.target,
        "bundle": release.bundle,
        "bundle_name": told.bundle_name,
        "policy": release.policy,
        "phase": Phase(release.phase),
        "phase_since": release.phase_since,
        "is_paused": release.is_paused,
        "held": release.held,
        "waits": None if is_over else _waits(session, release, told),
        "reason": release.reason,
        "created_at": release.created_at,
        "created_by": release.created_by,
        "predecessor": release.predecessor_id,
        "step": release.step,
        "weight_bp": release.weight_bp,
        "version": conditions.release_version(release, entries[-1] if entries else None),
        "gates": _gates(policy, entries),
        "quarantined": quarantine.reasons(session, of, release.bundle) if told.is_quarantined else [],
    }


def _waits(session: Session, release: ReleaseRow, told: Any) -> str | None:
    """Return what a release waits for that no entry of its log tells, in one sentence; None for nothing."""
    if told.waiting is not None:
        return waits.why(session, told.waiting)
    return rollbacks.waits(session, release) if told.is_asked_back else None


def _results(entries: Sequence[Logged]) -> dict[str, tuple[Logged, GateResult]]:
    """Return the latest result of each gate."""
    latest: dict[str, tuple[Logged, GateResult]] = {}
    for entry in entries:
        if entry.kind == Kind.GATE_RECORDED:
            result = GateResult.model_validate(evidence.claim_of(entry.envelope)["body"])
            latest[result.gate] = (entry, result)
    return latest


def revocations(entries: Sequence[Logged]) -> dict[str, str]:
    """Return entry digest → why it counts no more."""
    bodies = [evidence.claim_of(entry.envelope)["body"] for entry in entries if entry.kind == Kind.EVIDENCE_REVOKED]
    return {body["entry"]: body["reason"] for body in bodies}


def _gates(policy: Policy, entries: Sequence[Logged]) -> list[GateStatus]:
    latest, revoked = _results(entries), revocations(entries)
    statuses = []
    for rule in policy.gates:
        found = latest.get(rule.gate)
        why = revoked.get(found[0].entry_digest) if found else None
        summary = found[1].summary if found else None
        statuses.append(
            GateStatus(
                gate=rule.gate,
                verdict=found[1].verdict if found and why is None else None,
                summary=summary if why is None else f"revoked: {why}",
                entry=found[0].entry_digest if found else None,
                duration_ms=found[1].duration_ms if found else None,
            )
        )
    return statuses
