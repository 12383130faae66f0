"""Taking a live release back since a person asked for it, once there is somewhere to go; or to nothing, at once."""

from datetime import timedelta

from sqlalchemy.orm import Session

from registry import db, jobs, quarantine, targets, waits
from registry.tables import JobRow, ReleaseRow, TargetRow
from registry.targets import REQUESTED
from schemas.holds import Hold
from schemas.runner import JobState
from workers.control import Control, Held
from workers.facts import SERVE_ATTEMPTS, Facts, serve
from workers.restores import TO_NOTHING, WAIT_SECONDS, restore
from workers.traffic.envoy import EnvoyGateway

UNTAKEN = timedelta(seconds=60)
"""How long the job of a way back may wait for a runner before who asked for it is told."""


def go_back(control: Control, held: Held, facts: Facts, gateway: EnvoyGateway, reason: str) -> float | None:
    """Take a live release's traffic back since a person asked for it, once there is somewhere to go."""
    # While there is nowhere, what serves goes on: the switch would put in force what nobody can reach.
    if facts.stable_bundle is None and not facts.may_leave_nothing:
        gateway.beat(facts.target)
        control.perform(held, lambda session, release: _hold_without_way_back(control, session, release))
        return WAIT_SECONDS
    if facts.stable_bundle is not None and facts.stable is None:
        gateway.beat(facts.target)
        return _wake_stable(control, held)
    reasons = [reason, TO_NOTHING] if facts.is_to_nothing else [reason]
    return restore(control, held, facts, cause=REQUESTED, reasons=reasons)


def _wake_stable(control: Control, held: Held) -> float | None:
    """Boot the last accepted bundle again; traffic stays where it is until it is ready."""
    with control.transaction(held) as (session, release):
        before = targets.way_back(session, release)
        if before is None:
            return None
        _unwant_passed_by(session, release, before)
        job = serve(control, session, session.get_one(TargetRow, release.target_id), before)
        if job is None:
            return WAIT_SECONDS
        act, why = f"held:way_back:{job.id}:{job.attempt}", None if release.held else _why_not_ready(session, job)
    if why is not None:
        # What serves goes on serving: the person who asked for the way back has to know that there is none yet.
        reason = (
            f"bundle {before.bundle} does not become ready again{why}; `sluicegate release rollback {held.id} "
            "--to-nothing --reason …` does not wait for it, and lets the target serve nothing"
        )
        control.perform(
            held, lambda session, release: control.hold(session, release, act, [reason], Hold.WAY_BACK_FAILED)
        )
    return WAIT_SECONDS


def _why_not_ready(session: Session, job: JobRow) -> str | None:
    """Return why who asked for a way back has to be told that it is not there; None while it may still become ready."""
    if job.attempt >= SERVE_ATTEMPTS and job.problem:
        return f", in {job.attempt} attempts: {job.problem}"
    is_untaken = job.state == JobState.PENDING and job.due_at + UNTAKEN < db.now(session)
    return f": its job waits for {waits.for_whom(session, job)}" if is_untaken else None


def _unwant_passed_by(session: Session, release: ReleaseRow, before: ReleaseRow) -> None:
    """Stop what boots to be the way back, and was quarantined before it was."""
    moving = targets.candidate_release(session, release.target_id)
    needed = {release.bundle, before.bundle, *([moving.bundle] if moving is not None else [])}
    for job in jobs.serving(session, release.target_id):
        if job.bundle not in needed and quarantine.is_quarantined(session, job.project_id, job.bundle):
            jobs.unwant(session, job, now=db.now(session))


def _hold_without_way_back(control: Control, session: Session, release: ReleaseRow) -> None:
    """Hold a release whose way back is gone since the rollback was asked for: nobody said that nothing may serve."""
    reason = (
        "the version that traffic was to go back to is gone; release another one, or say with --to-nothing that the "
        "target may serve nothing"
    )
    control.hold(session, release, f"held:no_way_back:{release.lease_token}", [reason], Hold.NO_WAY_BACK)
