"""Taking traffic back, and everything about traffic that the gateway has and the log has not.

Traffic first, record after, and a worker may die between: whoever finds what it left records it, or takes it back.
"""

from contextlib import suppress
from dataclasses import replace
from datetime import datetime

from sqlalchemy.orm import Session

from gates.canary import StepJudgement
from gates.router import CANDIDATE, STABLE, WHOLE_BP, Applied, Arm, Split
from registry import db, evidence, jobs, releases, rollbacks, targets
from registry.tables import ReleaseRow, TargetRow
from schemas.evidence import Attempt, Judgement, Kind, Replaced, SplitEntry, Traffic
from schemas.problems import Problem
from schemas.release import Phase
from workers.control import Control, Held
from workers.facts import Facts, arms_back, gateway_of, gather, hand_over
from workers.traffic.envoy import EnvoyGateway
from workers.traffic.problems import NothingPrepared

TICK_SECONDS = 0.5
"""Between two looks at live traffic: Envoy writes its log at least this often."""
WAIT_SECONDS = 1.0

ALONE = "it serves alone"
SOAKED = "its soak is over: it serves alone"
LET_GO = f"{SOAKED}, and the release before is let go"
TO_NOTHING = "the target serves nothing, as was said: no earlier version is put in its place"
TAKEN_BACK = "the release that was taken back is let go: it serves alone"
MOVED = "another replica of it took the place of the one that served: its weight stands"


def restore(
    control: Control,
    held: Held,
    facts: Facts,
    *,
    cause: str,
    reasons: list[str],
    judgement: StepJudgement | None = None,
    breach_at: datetime | None = None,
) -> float | None:
    """Take all traffic back: first the rename, then the record."""
    gateway = gateway_of(control, held)
    requested_at = control.now()
    try:
        applied = _put_back(gateway, facts)
    except (Problem, OSError):
        # The way back may be in force, and unconfirmed. Why it was taken must not be lost until it is confirmed.
        if (why := judgement) is not None:
            control.perform(
                held, lambda session, release: _record_stop(control, session, release, facts, why, breach_at)
            )
        raise
    _record_restore(
        control, held, facts, applied, cause=cause, reasons=reasons, judgement=judgement, breach_at=breach_at,
        requested_at=requested_at, applied_at=control.now(),
    )  # fmt: skip
    return TICK_SECONDS


def _put_back(gateway: EnvoyGateway, facts: Facts) -> Applied:
    """Put a release's way back in force: the one that was prepared for it, or the one that there is now.

    What another release went back to a moment ago may be in force still, and is not this one's.
    """
    if facts.is_to_nothing:
        # Forgotten first: the switch would put it in force.
        gateway.discard_rollback(facts.target)
        return gateway.apply(next_split(gateway, facts.target, ()))
    if gateway.is_prepared(facts.target) or is_taken_back(gateway, facts, gateway.desired(facts.target)):
        with suppress(NothingPrepared):
            return gateway.restore(facts.target)
    return gateway.apply(next_split(gateway, facts.target, arms_back(facts)))


def _record_restore(
    control: Control,
    held: Held,
    facts: Facts,
    applied: Applied,
    *,
    cause: str,
    reasons: list[str],
    requested_at: datetime,
    applied_at: datetime,
    judgement: StepJudgement | None = None,
    breach_at: datetime | None = None,
) -> None:
    def record(session: Session, release: ReleaseRow) -> None:
        target = targets.lock(session, release.target_id)
        before = _went_back_to(session, release, facts, applied)
        went = replace(facts, stable_bundle=before.bundle if before is not None else facts.stable_bundle)
        body = traffic(went, applied, step=facts.step, requested_at=requested_at, now=applied_at)
        body = body.model_copy(update={"breach_at": breach_at, "cause": cause, "reasons": reasons})
        if judgement is not None:
            _record_stop(control, session, release, facts, judgement, breach_at)
        if applied.split.arms and _goes_to_nothing(session, release):
            # It was said while traffic went back, and comes next: the release is not over yet.
            act = _passed_through(applied.split)
            _move(control, session, target, release, act, Kind.TRAFFIC_SHIFTED, body)
            return
        _move(control, session, target, release, "restore", Kind.TRAFFIC_RESTORED, body)
        if facts.phase is Phase.PROMOTED and before is not None and before.phase == Phase.SUPERSEDED:
            control.act(session, before, f"reinstated:{release.id}", Kind.REINSTATED, Replaced(release=release.id))

    control.perform(held, record)


def _goes_to_nothing(session: Session, release: ReleaseRow) -> bool:
    """Tell whether a person has said of a live release that its target is to serve nothing."""
    return release.phase == Phase.PROMOTED and rollbacks.to_nothing(rollbacks.counting(session, release)) is not None


def _passed_through(split: Split) -> str:
    return f"passed:r{split.revision}"


def _went_back_to(session: Session, release: ReleaseRow, facts: Facts, applied: Applied) -> ReleaseRow | None:
    """Return the accepted release that traffic went back to.

    The gateway has what was the way back when it was prepared or looked at. What it would be now may be another one,
    since a quarantine was imposed or lifted meanwhile.
    """
    arm = applied.split.arm(STABLE)
    if arm is not None:
        for before in targets.accepted_before(session, release):
            if arm.serves(before.bundle):
                return before
    return session.get(ReleaseRow, facts.way_back) if facts.way_back is not None else None


def _record_stop(
    control: Control,
    session: Session,
    release: ReleaseRow,
    facts: Facts,
    judgement: StepJudgement,
    breach_at: datetime | None,
) -> None:
    if is_found(session, release, "stop"):
        return
    stop = Judgement(
        step=(facts.step or 0) if facts.phase is Phase.CANARY else len(facts.policy.canary.steps),
        reasons=list(judgement.reasons),
        measurements=list(judgement.measurements),
        breach_at=breach_at,
    )
    control.act(session, release, "stop", Kind.STOP_CONDITION_FIRED, stop)


def is_taken_back(gateway: EnvoyGateway, facts: Facts, split: Split | None) -> bool:
    """Tell whether this release's prepared rollback is in force, although its log does not say so yet."""
    if split is None:
        return False
    arm = split.arm(CANDIDATE)
    is_ours = not split.arms or (arm is not None and arm.weight_bp == 0 and arm.serves(facts.bundle))
    return is_ours and gateway.is_restored(facts.target)


def record_taken_back(control: Control, held: Held, facts: Facts, gateway: EnvoyGateway) -> float | None:
    """Record a restore whose worker ended, or was not answered, between the rename and its record."""
    applied = gateway.restore(facts.target)
    applied_at = control.now()
    with control.transaction(held) as (session, release):
        stop = next((e for e in releases.log(session, release.id) if e.kind == Kind.STOP_CONDITION_FIRED), None)
        why = Judgement.model_validate(evidence.claim_of(stop.envelope)["body"]) if stop else None
    _record_restore(
        control, held, facts, applied,
        cause="stop_condition" if why else "interrupted",
        reasons=why.reasons if why else ["traffic was taken back by a worker that ended before it could say why"],
        breach_at=why.breach_at if why else None,
        requested_at=facts.now, applied_at=applied_at,
    )  # fmt: skip
    return TICK_SECONDS


def take_back_unrecorded(control: Control, held: Held) -> None:
    """See that a release that may have no traffic has none, nor a way back from traffic that it will not get."""
    with control.transaction(held) as (session, release):
        has_replica = any(job.bundle == release.bundle for job in jobs.serving(session, release.target_id))
    if has_replica:
        facts, gateway = gather(control, held), gateway_of(control, held)
        withdraw(control, held, facts, gateway)
        forget_unused(gateway, facts.target)


def forget_unused(gateway: EnvoyGateway, target: str) -> None:
    """Forget a way back from traffic that did not come: nobody would beat for it."""
    split = gateway.desired(target)
    if gateway.is_prepared(target) and (split is None or split.arm(CANDIDATE) is None):
        gateway.discard_rollback(target)


def hand_over_unused(control: Control, held: Held) -> None:
    """Hand the replica over that a release keeps without having traffic, where its runner drains.

    A release that is approved and paused, or whose approval was withdrawn, may keep one for long.
    """
    with control.transaction(held) as (session, release):
        serving = jobs.serving(session, release.target_id)
        if is_bundle_needed(session, release) or all(job.bundle != release.bundle for job in serving):
            return
    facts, gateway = gather(control, held), gateway_of(control, held)
    if not has_traffic(control, held, facts, gateway):
        # Of its own replicas alone: those of the way back have traffic, which their own release moves first.
        hand_over(control, held, replace(facts, stable=None), gateway)


def has_traffic(control: Control, held: Held, facts: Facts, gateway: EnvoyGateway) -> bool:
    """Tell whether the gateway sends traffic to a release that its log gives none."""
    split = gateway.desired(facts.target)
    arm = split.arm(CANDIDATE) if split else None
    if arm is None or not arm.weight_bp or not arm.serves(facts.bundle):
        return False
    with control.transaction(held) as (session, release):
        return not is_bundle_needed(session, release)


def withdraw(control: Control, held: Held, facts: Facts, gateway: EnvoyGateway) -> bool:
    """Take traffic back that a release has although its log gives it none, and tell whether it had any.

    A worker moves traffic, then records it. Between the two a person may have rejected the release, or the worker may
    have stood still until another one ended it.
    """
    split = gateway.desired(facts.target)
    if split is None or not has_traffic(control, held, facts, gateway):
        return False
    stable = split.arm(STABLE)
    gateway.discard_rollback(facts.target)
    back = (replace(stable, weight_bp=WHOLE_BP),) if stable else ()
    gateway.apply(Split(facts.target, split.revision + 1, back))
    detail = f"traffic was on it at revision {split.revision}, which no entry says; it is taken back"
    body = Attempt(problem="traffic-unrecorded", detail=detail, attempt=1)
    act = f"withdrawn:r{split.revision}"
    control.perform(held, lambda session, release: control.act(session, release, act, Kind.ATTEMPT_ERRORED, body))
    return True


def controller_lost(control: Control, held: Held, facts: Facts, gateway: EnvoyGateway) -> float | None:
    """The dead-man switch took traffic back while no controller lived: record it, then let traffic move again."""
    # The switch is armed again once its notice is taken: it hears now that a controller lives.
    gateway.beat(facts.target)
    notice = gateway.take_notice()
    split = gateway.desired(facts.target)
    if notice is None or split is None:
        return WAIT_SECONDS
    silent, at = notice.get("silent_seconds"), f"switch:{notice.get('at')}"
    reasons = [f"no controller was heard of for {silent} s; the gateway's dead-man switch restored the split"]
    is_named = facts.target in notice.get("targets", [])
    if is_named and facts.phase is Phase.APPROVED:
        # The way back was prepared, and its first traffic never recorded: its log has nothing to restore.
        body = Attempt(problem="controller-lost", detail=reasons[0], attempt=1, retry_in_seconds=TICK_SECONDS)
        control.perform(held, lambda session, release: control.act(session, release, at, Kind.ATTEMPT_ERRORED, body))
    elif is_named and (facts.phase is Phase.CANARY or _is_taken_back_in_soak(split, facts.bundle)):
        seconds = float(notice.get("acknowledged_seconds") or 0.0)
        applied = Applied(split, notice.get("reason", "controller_lost"), seconds, seconds)
        _record_restore(
            control, held, facts, applied, cause="controller_lost", reasons=reasons, requested_at=facts.now,
            applied_at=control.now(),
        )  # fmt: skip
    with control.transaction(held) as (session, release):
        mine = session.get_one(TargetRow, release.target_id)
        named = [targets.by_gateway_name(session, mine.gateway, name) for name in notice.get("targets", [])]
        waiting = [each for target in named if target and (each := _unrecorded(session, target, gateway, at))]
        for each in waiting:
            each.due_at = each.due_at or db.now(session)
    if not waiting:
        gateway.clear_notice()
    return TICK_SECONDS


def _unrecorded(session: Session, target: TargetRow, gateway: EnvoyGateway, at: str) -> ReleaseRow | None:
    """Return the release of a target that the switch took traffic from and that has not said so yet."""
    moving = targets.candidate_release(session, target.id)
    if moving is not None and moving.phase == Phase.CANARY:
        return moving
    if moving is not None and moving.phase == Phase.APPROVED:
        return None if is_found(session, moving, at) else moving
    live, split = targets.stable_release(session, target.id), gateway.desired(target.name)
    if live is None or split is None or not _is_taken_back_in_soak(split, live.bundle):
        return None
    return None if is_found(session, live, _passed_through(split)) else live


def _is_taken_back_in_soak(split: Split, bundle: str) -> bool:
    """Tell whether the switch took traffic from a promoted release.

    In its soak a release is the candidate arm still: the switch left it without weight, or left nothing at all. Of one
    whose soak is over it took nothing, whatever the notice says of the target.
    """
    arm = split.arm(CANDIDATE)
    return not split.arms or (arm is not None and arm.weight_bp == 0 and arm.serves(bundle))


def is_bundle_needed(session: Session, release: ReleaseRow) -> bool:
    """Tell whether another release of the target that is live or under way is of the same bundle."""
    others = [
        targets.stable_release(session, release.target_id),
        targets.candidate_release(session, release.target_id),
    ]
    return any(other is not None and other.id != release.id and other.bundle == release.bundle for other in others)


def next_split(gateway: EnvoyGateway, target: str, arms: tuple[Arm, ...]) -> Split:
    """Return the split to apply: the one in force when it is already that, else one revision on."""
    current = gateway.desired(target)
    if current is not None and current.arms == arms:
        return current
    return Split(target, current.revision + 1 if current else 1, arms)


def traffic(facts: Facts, applied: Applied, *, step: int | None, requested_at: datetime, now: datetime) -> Traffic:
    """Return what an entry says of a split that the gateway acknowledged."""
    bundles = {STABLE: facts.stable_bundle or facts.bundle, CANDIDATE: facts.bundle}
    return Traffic(
        desired=[SplitEntry(bundle=bundles[arm.name], weight_bp=arm.weight_bp) for arm in applied.split.arms],
        revision=f"{applied.split.revision}",
        applied_ms=applied.acknowledged_seconds * 1000,
        step=step,
        requested_at=requested_at,
        applied_at=now,
    )


def record_shift(control: Control, session: Session, release: ReleaseRow, act: str, body: Traffic) -> None:
    """Record that the traffic of a release's target has moved, and keep beside the log what it is now."""
    target = targets.lock(session, release.target_id)
    _move(control, session, target, release, act, Kind.TRAFFIC_SHIFTED, body)


def _move(
    control: Control, session: Session, target: TargetRow, release: ReleaseRow, act: str, kind: Kind, body: Traffic
) -> None:
    """Record that traffic has moved, and keep beside the log what the gateway acknowledged last for a target.

    The target is locked before the entry gets its sequence, so that what is kept is what the last entry says, and
    its generation counts each entry once.
    """
    evidence.hold(session, release.id)
    if is_found(session, release, act):
        return
    control.act(session, release, act, kind, body)
    target.applied = [entry.model_dump(mode="json") for entry in body.desired]
    target.generation += 1
    session.flush()


def record_settled(
    control: Control, held: Held, facts: Facts, gateway: EnvoyGateway, applied: Applied | None, why: str
) -> None:
    """Record on the live release that it serves alone now, and why, under the revision that clients see.

    Asked again after a worker died between the change and its record, it finds the split in force and records that.
    """
    split = gateway.desired(facts.target)
    alone = split.arm(STABLE) if split else None
    if split is None or alone is None or len(split.arms) > 1:
        return
    with control.transaction(held) as (session, release):
        if _is_recorded(session, release, split):
            return
    acknowledged = applied or gateway.apply(split)
    applied_at = control.now()

    def record(session: Session, release: ReleaseRow) -> None:
        target = targets.lock(session, release.target_id)
        live = targets.stable_release(session, target.id)
        if live is None or not alone.serves(live.bundle) or _is_recorded(session, release, split):
            return
        body = Traffic(
            desired=[SplitEntry(bundle=live.bundle, weight_bp=alone.weight_bp)],
            revision=f"{split.revision}",
            applied_ms=acknowledged.acknowledged_seconds * 1000,
            step=live.step,
            requested_at=facts.now,
            applied_at=applied_at,
            reasons=[why],
        )
        record_shift(control, session, live, f"settled:r{split.revision}", body)

    control.perform(held, record)


def _is_recorded(session: Session, release: ReleaseRow, split: Split) -> bool:
    """Tell whether the last change of the target's traffic that the log knows is this split."""
    last = evidence.traffic(session, release.target_id, upto=None, limit=1)
    return bool(last) and evidence.claim_of(last[0].envelope)["body"]["revision"] == f"{split.revision}"


def is_found(session: Session, release: ReleaseRow, act: str) -> bool:
    """Tell whether a release's log has an act."""
    return evidence.find(session, evidence.release_stream(release.id), act) is not None
