"""Rollout: move a target's traffic to a release step by step, and take all of it back when a stop condition fires.

Desired, applied and observed are three things. A shift is recorded when the gateway has acknowledged it (applied);
a step passes when the requests seen agree with it (observed). The way back is prepared before traffic moves, so
that taking it back is one rename. Every function here may be called again at any moment by any worker.
"""

from datetime import timedelta

from sqlalchemy.orm import Session

from gates.canary import StepJudgement, StepOutcome, progress
from gates.router import CANDIDATE, STABLE, WHOLE_BP, Applied, Split
from registry import db, documents, failures, jobs, quarantine, releases, rollbacks, targets
from registry.tables import JobRow, ReleaseRow, TargetRow
from registry.targets import REQUESTED
from schemas.evidence import Attempt, Judgement, Kind, Note, Replaced
from schemas.holds import Hold
from schemas.problems import BundleQuarantined, NotEligible, Problem, TransitionRefused
from schemas.release import Phase
from schemas.runner import JobKind
from workers import holds, quarantines
from workers.control import Control, Held
from workers.facts import (
    SERVE_ATTEMPTS,
    Facts,
    arms_at,
    arms_back,
    gateway_of,
    gather,
    hand_over,
    live_bundle,
    live_of,
    serve,
)
from workers.going_back import go_back
from workers.permits import is_let_on, why_not_on
from workers.restores import (
    ALONE,
    LET_GO,
    MOVED,
    SOAKED,
    TAKEN_BACK,
    TICK_SECONDS,
    WAIT_SECONDS,
    controller_lost,
    forget_unused,
    hand_over_unused,
    has_traffic,
    is_bundle_needed,
    is_found,
    is_taken_back,
    next_split,
    record_settled,
    record_shift,
    record_taken_back,
    restore,
    take_back_unrecorded,
    traffic,
    withdraw,
)
from workers.traffic.envoy import EnvoyGateway
from workers.watch import look, observe_restore

OBSERVE_SECONDS = 60.0
"""How long a restore is watched for a request that proves it; without traffic there is none."""
SUCCESSOR_SECONDS = 4.0
"""How long a look waits until the gateway reaches a replica that is to take another one's place, which serves on: a bit
more than a health check of Envoy's may take. Meanwhile no stop condition is judged."""


def begin(control: Control, held: Held) -> float | None:
    """Approved: have a replica made ready, then give it its first traffic."""
    try:
        return _begin(control, held)
    except Problem:
        # No gateway has to answer for this. Traffic that no entry says is taken back from a rejected release as well.
        if control.perform(held, lambda session, release: _is_rejected(control, session, release)):
            return 0.0
        raise


def _is_rejected(control: Control, session: Session, release: ReleaseRow) -> bool:
    return release.phase == Phase.APPROVED and quarantines.is_rejected(control, session, release)


def _begin(control: Control, held: Held) -> float | None:
    facts = gather(control, held)
    gateway = gateway_of(control, held)
    if gateway.take_notice() is not None:
        return controller_lost(control, held, facts, gateway)
    if has_traffic(control, held, facts, gateway):
        # A worker died between moving traffic and recording it. It is recorded, and watched from then on; or it goes
        # back, where a person was first, or what it stands on is gone.
        is_broken = facts.candidate is None or (facts.stable_bundle is not None and facts.stable is None)
        if is_broken or facts.is_paused or facts.is_held or facts.quarantined or not is_let_on(control, held):
            withdraw(control, held, facts, gateway)
            return TICK_SECONDS
        return _shift(control, held, 0 if facts.stable_bundle is not None else len(facts.policy.canary.steps) - 1)
    hand_over_unused(control, held)
    first, wait = control.perform(held, lambda session, release: _first_step(control, session, release))
    if first is not None:
        return _shift(control, held, first)
    forget_unused(gateway, facts.target)
    return wait


def _first_step(control: Control, session: Session, release: ReleaseRow) -> tuple[int | None, float | None]:
    """Return the step that an approved release begins with; or None, and when to look again."""
    if quarantines.is_rejected(control, session, release):
        return None, 0.0
    if release.is_paused:
        return None, None
    policy = documents.load_policy(session, release.project_id, release.policy)
    target = session.get_one(TargetRow, release.target_id)
    try:
        releases.require_eligible(session, release, policy, now=db.now(session))
    except NotEligible as problem:
        control.hold(session, release, f"held:evidence:{release.lease_token}", [problem.detail], Hold.NOT_ELIGIBLE)
        return None, None
    stable = targets.stable_release(session, target.id)
    if stable is not None and stable.bundle == release.bundle:
        # It came back while this one was on its way: there is nothing to move traffic between.
        reason = f"the bundle is live already, by release {stable.id}; reject this release"
        control.hold(session, release, f"held:live_already:{release.lease_token}", [reason], Hold.LIVE_ALREADY)
        return None, None
    if release.held:
        return None, None
    if stable is not None and rollbacks.going_back(session, stable) is not None:
        return None, WAIT_SECONDS  # what this one would share traffic with, and go back to, is being taken back
    job = serve(control, session, target, release)
    if job is None or live_of(job) is None:
        _hold_after_failures(control, session, release)
        return None, None
    if stable is None:
        return len(policy.canary.steps) - 1, None
    split = control.gateway(target).desired(target.name)
    arm = split.arm(STABLE) if split else None
    is_settled = arm is not None and arm.weight_bp == WHOLE_BP and arm.serves(stable.bundle)
    if not is_settled or live_bundle(session, target, stable.bundle) is None:
        # The release before is still soaking, or its replica is booting: there is no way back yet.
        return None, WAIT_SECONDS
    return 0, None


def canary(control: Control, held: Held) -> float | None:
    """Canary: judge the present step; go on, wait, hold, or take traffic back."""
    facts = gather(control, held)
    gateway = gateway_of(control, held)
    if gateway.take_notice() is not None:
        return controller_lost(control, held, facts, gateway)
    # Who has not looked at traffic yet, or has to take it back, does not beat: where that fails, the switch does it.
    if facts.rollback_reason is not None:
        return restore(control, held, facts, cause=REQUESTED, reasons=[facts.rollback_reason])
    if facts.quarantined:
        return restore(control, held, facts, cause=quarantines.CAUSE, reasons=facts.quarantined)
    if facts.candidate is None:
        reasons = ["the candidate's replica is not ready any more"]
        return restore(control, held, facts, cause="replica_failed", reasons=reasons)
    step = facts.step or 0
    split = gateway.desired(facts.target)
    if is_taken_back(gateway, facts, split):
        return record_taken_back(control, held, facts, gateway)
    if split is None or not _is_as_wanted(split, facts, step):
        # What is in force is judged first: it serves on for as long as another replica is not reached.
        due_in = _stop(control, held, facts, gateway, split)
        return _shift(control, held, step) if due_in is None else due_in
    hand_over(control, held, facts, gateway)
    return _judge(control, held, facts, gateway, split)


def _stop(control: Control, held: Held, facts: Facts, gateway: EnvoyGateway, split: Split | None) -> float | None:
    """Take traffic back when a stop condition has fired under the split in force; None when none has."""
    if split is None or split.arm(CANDIDATE) is None:
        return None
    judgement, breach_at = look(control, facts, gateway, split)
    if judgement.outcome is not StepOutcome.FAILED:
        gateway.beat(facts.target)
        return None
    return restore(
        control, held, facts, cause="stop_condition", reasons=list(judgement.reasons),
        judgement=judgement, breach_at=breach_at,
    )  # fmt: skip


def _judge(control: Control, held: Held, facts: Facts, gateway: EnvoyGateway, split: Split) -> float | None:
    step = facts.step or 0
    judgement, breach_at = look(control, facts, gateway, split)
    if judgement.outcome is StepOutcome.FAILED:
        return restore(
            control, held, facts, cause="stop_condition", reasons=list(judgement.reasons),
            judgement=judgement, breach_at=breach_at,
        )  # fmt: skip
    gateway.beat(facts.target)
    last = len(facts.policy.canary.steps) - 1
    if _is_asked_to_promote(control, held, facts, judgement):
        return _promote(control, held, judgement) if step == last else _shift(control, held, last)
    if facts.is_held:
        control.perform(held, lambda session, release: _look_at_hold(control, session, release, judgement))
    if facts.is_paused or facts.is_held:
        return TICK_SECONDS
    if judgement.outcome is StepOutcome.WAITING:
        seconds = (facts.now - (facts.step_since or facts.phase_since)).total_seconds()
        held.progress = progress(judgement, facts.policy.canary.steps, step, seconds)
    match judgement.outcome:
        case StepOutcome.PASSED:
            if step == last:
                return _promote(control, held, judgement)
            if not _is_step_recorded(control, held, step, split.revision, judgement):
                return TICK_SECONDS
            return _shift(control, held, step + 1)
        case StepOutcome.INCONCLUSIVE | StepOutcome.ERRORED:
            control.perform(held, lambda session, release: _hold_step(control, session, release, judgement))
    return TICK_SECONDS


def _is_asked_to_promote(control: Control, held: Held, facts: Facts, judgement: StepJudgement) -> bool:
    """Tell whether a person's request is followed now: not while nobody can see what the candidate does."""
    if not facts.is_promotion_requested or facts.is_paused:
        return False
    watch = control.watches.get(facts.release)
    if judgement.outcome is StepOutcome.ERRORED or watch is None or watch.tally.open(CANDIDATE) is None:
        return False
    with control.transaction(held) as (session, release):
        return not holds.is_blind(session, release)


def _hold_step(control: Control, session: Session, release: ReleaseRow, judgement: StepJudgement) -> None:
    act = f"held:step:{release.step or 0}:{judgement.outcome}:{release.step_since:%Y%m%dT%H%M%S%f}"
    if is_found(session, release, "promotion"):
        act += ":asked"  # asking for it ended the hold that there may have been
    control.hold(session, release, act, list(judgement.reasons), Hold(f"step_{judgement.outcome}"))


def _look_at_hold(control: Control, session: Session, release: ReleaseRow, judgement: StepJudgement) -> None:
    """A step that could not be judged holds for what is wrong now; a gateway that is back lets it go on by itself."""
    if judgement.outcome is StepOutcome.ERRORED and holds.is_renewable(session, release):
        _hold_step(control, session, release, judgement)
    watch = control.watches.get(release.id)
    if judgement.outcome is not StepOutcome.WAITING or watch is None or release.is_paused:
        return
    if holds.has_gateway_back(session, release, watch.tally):
        _recovered(control, session, release, "the gateway answers again, and nothing else held the release")


def soak(control: Control, held: Held) -> float | None:
    """Promoted: stop conditions stay armed while the release before is warm; a rollback may be asked for any time."""
    facts = gather(control, held)
    gateway = gateway_of(control, held)
    if gateway.take_notice() is not None:
        return controller_lost(control, held, facts, gateway)
    if _is_other_moving(control, held):
        # The way back that is prepared is that one's; what was asked of this one before it began comes after it.
        return None if facts.rollback_reason is None else WAIT_SECONDS
    if facts.rollback_reason is not None:
        return go_back(control, held, facts, gateway, facts.rollback_reason)
    ends_at = facts.phase_since + timedelta(seconds=float(facts.policy.canary.soak_seconds))
    split = gateway.desired(facts.target)
    if is_taken_back(gateway, facts, split):
        return record_taken_back(control, held, facts, gateway)
    arm = split.arm(CANDIDATE) if split else None
    if arm is not None and arm.weight_bp and not arm.serves(facts.bundle):
        # Another release's traffic has moved, and is recorded next; or that one has ended, and takes it back itself.
        return WAIT_SECONDS
    # One that came back is no candidate: the arm beside it is that of the release which was taken back.
    is_soaking = arm is not None and arm.serves(facts.bundle)
    if facts.now >= ends_at or not is_soaking:
        # The soak's last moments may be seen by nobody but this look: a controller may have been away.
        if is_soaking and (due_in := _stop(control, held, facts, gateway, split)) is not None:
            return due_in
        gateway.beat(facts.target)
        return _finish_soak(control, held, facts, gateway, split)
    if (back := _why_back(facts)) is not None:
        return restore(control, held, facts, cause=back[0], reasons=back[1])
    assert split is not None  # noqa: S101 - is_soaking
    if (due_in := _stop(control, held, facts, gateway, split)) is not None:
        return due_in
    if facts.candidate is None:
        # There is no other version: it boots again.
        control.perform(held, lambda session, release: _serve_again(control, session, release))
    elif not _is_as_wanted(split, facts, len(facts.policy.canary.steps) - 1):
        return _republish(control, held, facts, gateway)
    else:
        hand_over(control, held, facts, gateway)
    return TICK_SECONDS


def _why_back(facts: Facts) -> tuple[str, list[str]] | None:
    """Return why a soaking release goes back without any traffic that says so: a cause and its reasons."""
    if facts.stable is None:
        return None
    if facts.quarantined and not facts.is_way_back_quarantined:
        return quarantines.CAUSE, facts.quarantined
    return None if facts.candidate is not None else ("replica_failed", ["the release's replica is not ready any more"])


def settle(control: Control, held: Held) -> float | None:
    """Rolled back: see that new requests go where they should, let open streams end, then stop the replica."""
    facts = gather(control, held)
    gateway = gateway_of(control, held)
    split = gateway.desired(facts.target)
    observe_restore(control, held, facts, gateway, split)
    since = (facts.now - facts.phase_since).total_seconds()
    if withdraw(control, held, facts, gateway):
        return TICK_SECONDS
    with control.transaction(held) as (session, release):
        if is_bundle_needed(session, release):
            control.watches.pop(release.id, None)
            return None
        is_observed = is_found(session, release, "restore:observed")
    arm = split.arm(CANDIDATE) if split else None
    is_ours = arm is not None and arm.serves(facts.bundle)
    patience = float(facts.policy.canary.drain_seconds)
    if arm is not None and is_ours and not gateway.drained(arm.cluster) and since < patience:
        return TICK_SECONDS
    if split is not None and split.arm(STABLE) is not None and not is_observed and since < OBSERVE_SECONDS:
        return TICK_SECONDS
    applied = None
    if split is not None and is_ours:
        stable = split.arm(STABLE)
        gateway.discard_rollback(facts.target)
        applied = gateway.apply(Split(facts.target, split.revision + 1, (stable,) if stable else ()))
    record_settled(control, held, facts, gateway, applied, TAKEN_BACK if applied else ALONE)
    control.watches.pop(facts.release, None)
    return clear(control, held)


def clear(control: Control, held: Held) -> float | None:
    """Ended: neither traffic, nor an evaluation that still runs, nor its replica is wanted any more."""
    take_back_unrecorded(control, held)
    with control.transaction(held) as (session, release):
        unwanted = [job for job in jobs.of_release(session, release.id, JobKind.EVALUATE) if job.state in jobs.OPEN]
        if not is_bundle_needed(session, release):
            unwanted += [job for job in jobs.serving(session, release.target_id) if job.bundle == release.bundle]
        unwanted += _of_nobody(session, release)
        for job in unwanted:
            jobs.unwant(session, job, now=db.now(session))
    return None


def _of_nobody(session: Session, release: ReleaseRow) -> list[JobRow]:
    """Return what still serves on a target on which nothing is live, and is of no release under way.

    It was kept, or booted again, to be the way back of a release that went to nothing.
    """
    # In this order: who is promoted between the two is seen twice, and never not at all.
    moving = targets.candidate_release(session, release.target_id)
    if targets.stable_release(session, release.target_id) is not None:
        return []
    needed = {release.bundle} | ({moving.bundle} if moving is not None else set())
    return [job for job in jobs.serving(session, release.target_id) if job.bundle not in needed]


def rest(_control: Control, _held: Held) -> float | None:
    """Superseded: nothing to do; the release that took over keeps it warm through its soak."""
    return None


def _hold_after_failures(control: Control, session: Session, release: ReleaseRow) -> None:
    """Hold, and say why, when a release's replica failed several times in a row, in however many jobs."""
    log = releases.log(session, release.id)
    seen = failures.history(log)
    if (seen.is_over or seen.failures >= SERVE_ATTEMPTS) and not release.held:
        reason = f"the replica did not become ready in {seen.failures} attempts: {seen.why}"
        if seen.is_over:
            reason = f"the replica is not tried again before this is resumed: {seen.why}"
        control.hold(session, release, f"held:replica:{log[-1].entry_digest[7:19]}", [reason], Hold.REPLICA_FAILED)


def _is_other_moving(control: Control, held: Held) -> bool:
    with control.transaction(held) as (session, release):
        other = targets.candidate_release(session, release.target_id)
        return other is not None and other.phase == Phase.CANARY


def _is_as_wanted(split: Split, facts: Facts, step: int) -> bool:
    if facts.stable_bundle is not None and facts.stable is None:
        # The stable replica is booting again: its arm cannot be named, and the split in force is the best there is.
        return True
    return split.arms == arms_at(facts, step)


def _shift(control: Control, held: Held, step: int) -> float | None:
    """Prepare the way back, put a step's weights in force, and record what the gateway acknowledged."""
    facts = gather(control, held)
    gateway, arms = gateway_of(control, held), arms_at(facts, step)
    if not arms or (facts.stable_bundle is not None and facts.stable is None):
        return WAIT_SECONDS
    is_more = facts.phase is Phase.APPROVED or step > (facts.step or 0)
    if (facts.is_paused and is_more) or facts.phase not in {Phase.APPROVED, Phase.CANARY}:
        return 0.0  # a person was first
    if facts.quarantined:
        return 0.0  # it has come to that since; the next look takes it back
    if is_more and not is_let_on(control, held):
        return TICK_SECONDS
    if not is_more:
        gateway = gateway.within(SUCCESSOR_SECONDS)
    requested_at = facts.now
    gateway.beat(facts.target)
    silence = float(facts.policy.canary.dead_man_seconds)
    gateway.prepare_rollback(facts.target, arms_back(facts), silence_seconds=silence)
    applied = gateway.apply(next_split(gateway, facts.target, arms))
    applied_at = control.now()
    body = traffic(facts, applied, step=step, requested_at=requested_at, now=applied_at)
    act = f"shift:{step}:r{applied.split.revision}"

    def record(session: Session, release: ReleaseRow) -> float:
        quarantine.require_free(session, release.project_id, release.bundle)
        if is_more and (why := why_not_on(control, session, release)) is not None:
            return _refuse_more(control, session, release, step, applied, why)
        record_shift(control, session, release, act, body)
        return TICK_SECONDS

    try:
        return control.perform(held, record)
    except (TransitionRefused, BundleQuarantined):
        # While the gateway took the split, a person paused or rejected the release, withdrew an approval, revoked a
        # result or quarantined the bundle: they were first.
        gateway.restore(facts.target)
        raise


def _republish(control: Control, held: Held, facts: Facts, gateway: EnvoyGateway) -> float | None:
    """While a release soaks, put a replica in force that took another one's place, at the weights that stand."""
    gateway = gateway.within(SUCCESSOR_SECONDS)
    last = len(facts.policy.canary.steps) - 1
    gateway.prepare_rollback(
        facts.target, arms_back(facts), silence_seconds=float(facts.policy.canary.dead_man_seconds)
    )
    applied = gateway.apply(next_split(gateway, facts.target, arms_at(facts, last)))
    moved = traffic(facts, applied, step=last, requested_at=facts.now, now=control.now())
    body = moved.model_copy(update={"reasons": [MOVED]})

    def record(session: Session, release: ReleaseRow) -> None:
        record_shift(control, session, release, f"shift:{last}:r{applied.split.revision}", body)

    control.perform(held, record)
    if facts.is_held:
        reason = "its replica is ready again"
        control.perform(held, lambda session, release: _recovered(control, session, release, reason))
    return TICK_SECONDS


def _refuse_more(
    control: Control, session: Session, release: ReleaseRow, step: int, applied: Applied, why: str
) -> float:
    """Of a release that may not go on since the gateway took more traffic for it, have the step before put in force.

    The next look finds another split than that of the step that the log says. Raises TransitionRefused when there was
    no step before.
    """
    if release.phase == Phase.APPROVED:
        detail = f"while the gateway took the first traffic of release {release.id}: {why}"
        raise TransitionRefused(detail, phase=release.phase)
    revision = applied.split.revision
    detail = f"while the gateway took step {step + 1} at revision {revision}: {why}; the step before comes back"
    body = Attempt(problem="traffic-unrecorded", detail=detail[:4000], attempt=1)
    control.act(session, release, f"undone:{step}:r{revision}", Kind.ATTEMPT_ERRORED, body)
    return 0.0


def _promote(control: Control, held: Held, judgement: StepJudgement) -> float | None:
    """Make a release the live one; the one before is replaced in the same transaction, under the target's lock."""
    facts = gather(control, held)
    gateway = gateway_of(control, held)
    split = gateway.desired(facts.target)
    revision = split.revision if split else 0
    step = len(facts.policy.canary.steps) - 1

    def record(session: Session, release: ReleaseRow) -> None:
        targets.lock(session, release.target_id)
        if why_not_on(control, session, release) is not None:
            return
        if judgement.outcome is StepOutcome.PASSED:
            _step_entry(control, session, release, step, revision, judgement)
            reason = f"every step passed: {'; '.join(judgement.reasons)}"
        else:
            reason = "promoted by request; no stop condition had fired"
        stable = targets.stable_release(session, release.target_id)
        if stable is not None:
            control.act(session, stable, f"replaced:{release.id}", Kind.REPLACED, Replaced(release=release.id))
        control.act(session, release, "promoted", Kind.PROMOTED, Note(reason=reason))

    control.perform(held, record)
    return TICK_SECONDS


def _is_step_recorded(control: Control, held: Held, step: int, revision: int, judgement: StepJudgement) -> bool:
    """Record that a step passed, and tell whether the release may go on; nothing is recorded when it may not."""

    def record(session: Session, release: ReleaseRow) -> bool:
        if why_not_on(control, session, release) is not None:
            return False
        _step_entry(control, session, release, step, revision, judgement)
        return True

    return control.perform(held, record)


def _step_entry(
    control: Control, session: Session, release: ReleaseRow, step: int, revision: int, judgement: StepJudgement
) -> None:
    body = Judgement(step=step, reasons=list(judgement.reasons), measurements=list(judgement.measurements))
    control.act(session, release, f"step:{step}:r{revision}", Kind.STEP_PASSED, body)


def _finish_soak(
    control: Control, held: Held, facts: Facts, gateway: EnvoyGateway, split: Split | None
) -> float | None:
    """After the soak: the release is the stable arm; the one before drains and stops. Re-publish a moved replica.

    `split` is what was looked at to come here: should another release have moved traffic since, nothing is changed.
    """
    if facts.candidate is None:
        control.perform(held, lambda session, release: _serve_again(control, session, release))
        # While its way back is prepared, the switch waits for looks at it.
        return WAIT_SECONDS if gateway.is_prepared(facts.target) else None
    if facts.is_held:
        reason = "its replica is ready again"
        control.perform(held, lambda session, release: _recovered(control, session, release, reason))
    arm = facts.candidate.arm(STABLE, facts.target, WHOLE_BP)
    leaving = next((each for each in split.arms if not each.serves(facts.bundle)), None) if split else None
    if leaving is not None:
        soaked = float(facts.policy.canary.soak_seconds) if leaving.name == STABLE else 0.0
        waited = (facts.now - facts.phase_since).total_seconds() - soaked
        if not gateway.drained(leaving.cluster) and waited < float(facts.policy.canary.drain_seconds):
            return TICK_SECONDS
    applied = None
    if split is None or split.arms != (arm,):
        gateway.discard_rollback(facts.target)
        applied = gateway.apply(Split(facts.target, split.revision + 1 if split else 1, (arm,)))
    record_settled(control, held, facts, gateway, applied, _why_settled(facts, split) if applied else ALONE)
    control.watches.pop(facts.release, None)
    with control.transaction(held) as (session, release):
        candidate = targets.candidate_release(session, release.target_id)
        for job in jobs.serving(session, release.target_id):
            is_needed = job.bundle == release.bundle or (candidate is not None and job.bundle == candidate.bundle)
            if not is_needed and job.state in jobs.OPEN:
                jobs.unwant(session, job, now=db.now(session))
    hand_over(control, held, facts, gateway)
    return None


def _serve_again(control: Control, session: Session, release: ReleaseRow) -> None:
    serve(control, session, session.get_one(TargetRow, release.target_id), release)
    _hold_after_failures(control, session, release)


def _recovered(control: Control, session: Session, release: ReleaseRow, reason: str) -> None:
    place = releases.log(session, release.id)[-1].position
    control.act(session, release, f"recovered:{place}", Kind.RESUMED, Note(reason=reason))


def _why_settled(facts: Facts, split: Split | None) -> str:
    """Return why a live release is put in force alone, by the split that was in force before."""
    if split is None:
        return ALONE
    arm = split.arm(CANDIDATE)
    if arm is None:
        return MOVED
    if not arm.serves(facts.bundle):
        return TAKEN_BACK
    return SOAKED if split.arm(STABLE) is None else LET_GO
