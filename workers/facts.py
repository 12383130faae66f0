"""What one look at a release stands on: its state, its policy, its replicas, and the arms that follow from them."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy.orm import Session

from gates.router import CANDIDATE, STABLE, WHOLE_BP, Arm, cluster_name
from registry import db, documents, evidence, failures, handover, jobs, releases, rollbacks, targets
from registry.tables import JobRow, ReleaseRow, TargetRow
from schemas.common import sha256_digest
from schemas.evidence import Kind
from schemas.policy import Policy
from schemas.release import TERMINAL, Phase
from schemas.runner import JobKind, ReplicaState
from workers import quarantines
from workers.control import Control, Held
from workers.traffic.envoy import EnvoyGateway

SERVE_ATTEMPTS = 3
"""Boots that may fail before a release holds for it."""


@dataclass(frozen=True, slots=True)
class Live:
    """A replica that is ready to serve."""

    job: UUID
    bundle: str
    address: str
    identity: str
    """Unique for ever: a new boot has a new one, so a gateway cluster is never re-pointed."""

    def arm(self, name: str, target: str, weight_bp: int) -> Arm:
        """Return the replica as one arm of a split."""
        return Arm(name, cluster_name(target, self.bundle, self.identity), self.address, weight_bp)


@dataclass(frozen=True, slots=True)
class Facts:
    """What one look at a release stands on."""

    release: UUID
    phase: Phase
    phase_since: datetime
    bundle: str
    step: int | None
    step_since: datetime | None
    is_paused: bool
    is_held: bool
    target: str
    policy: Policy
    candidate: Live | None
    stable: Live | None
    stable_bundle: str | None
    way_back: UUID | None
    """The accepted release whose bundle that is."""
    rollback_reason: str | None
    is_to_nothing: bool
    """Whether it was said that the target is to serve nothing: then there is no way back, whatever was live before."""
    may_leave_nothing: bool
    """Whether that was said, or there was no way back when the rollback was asked for."""
    quarantined: list[str]
    """Why the release's bundle is quarantined; empty when it is not."""
    is_way_back_quarantined: bool
    is_promotion_requested: bool
    now: datetime


def gateway_of(control: Control, held: Held) -> EnvoyGateway:
    """Return the gateway in front of the release's target, for as long as the release is held."""
    with control.transaction(held) as (session, release):
        return control.gateway(session.get_one(TargetRow, release.target_id)).under(held.require)


def gather(control: Control, held: Held) -> Facts:
    """Read everything that a look at a release stands on, in one transaction."""
    with control.transaction(held) as (session, release):
        target = session.get_one(TargetRow, release.target_id)
        log = releases.log(session, release.id)
        requests = rollbacks.requests(log)
        order = rollbacks.to_nothing(requests)
        reason = None
        if (asked := order or next(iter(requests), None)) is not None:
            reason = f"{asked.actor}: {evidence.claim_of(asked.envelope)['body']['reason']}"
        # In canary what is live has the rest of the traffic, and keeps it.
        is_to_nothing = order is not None and release.phase != Phase.CANARY
        before = None if is_to_nothing else targets.way_back(session, release)
        stable_bundle = before.bundle if before else None
        return Facts(
            release=release.id,
            phase=Phase(release.phase),
            phase_since=release.phase_since,
            bundle=release.bundle,
            step=release.step,
            step_since=release.step_since,
            is_paused=release.is_paused,
            is_held=bool(release.held),
            target=target.name,
            policy=documents.load_policy(session, release.project_id, release.policy),
            candidate=live_bundle(session, target, release.bundle),
            stable=live_bundle(session, target, stable_bundle) if stable_bundle else None,
            stable_bundle=stable_bundle,
            way_back=before.id if before else None,
            rollback_reason=reason,
            is_to_nothing=is_to_nothing,
            may_leave_nothing=rollbacks.may_leave_nothing(requests),
            quarantined=quarantines.sentences(session, release),
            is_way_back_quarantined=before is not None and bool(quarantines.sentences(session, before)),
            is_promotion_requested=any(e.kind == Kind.PROMOTION_REQUESTED for e in log),
            now=db.now(session),
        )


def live_bundle(session: Session, target: TargetRow, bundle: str) -> Live | None:
    """Return a ready replica of a bundle on a target; of two, the one whose runner does not drain."""
    serving = [job for job in jobs.serving(session, target.id) if job.bundle == bundle]
    ready = [live for job in serving if (live := live_of(job)) is not None]
    going = handover.leaving(session, target.id) if len(ready) > 1 else set()
    return min(ready, key=lambda one: one.job in going, default=None)


def live_of(job: JobRow) -> Live | None:
    """Return a serve job's replica when it is ready, None otherwise."""
    report = job.replica
    if report is None or report["state"] != ReplicaState.READY or not job.is_wanted or not report.get("address"):
        return None
    name = f"{report.get('boot_id')}/{report.get('pid')}/{report.get('start_time')}/{report['address']}"
    identity = f"{job.id.hex[-8:]}-{sha256_digest(name.encode())[7:19]}"
    return Live(job.id, job.bundle, report["address"], identity)


def serve(control: Control, session: Session, target: TargetRow, release: ReleaseRow) -> JobRow | None:
    """Return the open serve job of a bundle on a target, made if there is none.

    None when its replica failed for good: it is not tried again before a person lets the release go on.
    """
    for job in jobs.serving(session, target.id):
        if job.bundle == release.bundle and job.is_wanted:
            return job
    for job in jobs.serving(session, target.id):
        if job.bundle == release.bundle:
            # It is being stopped, and a bundle has one open serve job on a target: wait for it to end.
            return job
    # The log of an ended release is closed: it tells nothing of how its replica fares as a way back.
    is_ended = Phase(release.phase) in TERMINAL
    seen = failures.History() if is_ended else failures.history(releases.log(session, release.id))
    if seen.is_over:
        return None
    job = jobs.create(
        session,
        release.project_id,
        JobKind.SERVE,
        bundle=release.bundle,
        policy=release.policy,
        runner_class=target.runner_class,
        release=release.id,
        target=target.id,
        created_by="controller",
        now=db.now(session) + timedelta(seconds=failures.backoff(seen.failures)),
    )
    db.after_commit(session, lambda: control.ring(target.runner_class))
    return job


def hand_over(control: Control, held: Held, facts: Facts, gateway: EnvoyGateway) -> None:
    """End replicas whose traffic is on another of their bundle, and have others boot for those on drained runners.

    For whoever saw that the gateway should have the split that the facts ask for: traffic moves when they name a
    replica that has become ready elsewhere. Nothing ends before the gateway says that it does.
    """
    lives = [live.job for live in (facts.candidate, facts.stable) if live is not None]
    with control.transaction(held) as (session, release):
        made = handover.begin(session, release.target_id, db.now(session))
        for runner_class in {job.runner_class for job in made}:
            db.after_commit(session, lambda one=runner_class: control.ring(one))
        is_over = any(handover.replaced(session, release.target_id, live) for live in lives)
    if not is_over or not gateway.is_in_force():
        return
    with control.transaction(held) as (session, release):
        for live in lives:
            for job in handover.replaced(session, release.target_id, live):
                jobs.unwant(session, job, now=db.now(session))


def arms_at(facts: Facts, step: int) -> tuple[Arm, ...]:
    """Return the arms at a canary step; none while the candidate is not ready."""
    if facts.candidate is None:
        return ()
    weight = facts.policy.canary.steps[step].weight_bp
    if facts.stable is None:
        return (facts.candidate.arm(CANDIDATE, facts.target, WHOLE_BP),)
    return (
        facts.stable.arm(STABLE, facts.target, WHOLE_BP - weight),
        facts.candidate.arm(CANDIDATE, facts.target, weight),
    )


def arms_back(facts: Facts) -> tuple[Arm, ...]:
    """Return where traffic goes back to; the candidate stays an arm of weight 0 until its streams have ended."""
    if facts.stable is None:
        return ()
    back: tuple[Arm, ...] = (facts.stable.arm(STABLE, facts.target, WHOLE_BP),)
    return back + ((facts.candidate.arm(CANDIDATE, facts.target, 0),) if facts.candidate else ())
