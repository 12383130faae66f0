"""Watching live traffic: reads what the gateway logged since the last look, and lets `gates.canary` judge it."""

from datetime import datetime

from gates.canary import StepJudgement, StepOutcome, judge_step, judge_stop
from gates.router import STABLE, WHOLE_BP, Arm, Split
from gates.tally import Tally
from registry import evidence, releases
from schemas.evidence import Kind, Restored, Traffic
from schemas.release import Phase
from workers.control import Control, Held, Watch
from workers.facts import Facts
from workers.traffic.envoy import EnvoyGateway
from workers.traffic.problems import GatewayDown


def look(control: Control, facts: Facts, gateway: EnvoyGateway, split: Split) -> tuple[StepJudgement, datetime | None]:
    """Read what the gateway logged since the last look, and judge. Returns also when a breach became decidable.

    A breach is told before the gateway is asked anything, so that one that does not answer delays nothing.
    """
    watch = _watch(control, facts, gateway, split)
    breach = _read_on(watch, facts, gateway)
    if breach is not None:
        return breach
    _ask(control, watch, facts, gateway)
    now = control.now()
    conditions = facts.policy.canary.stop_conditions
    if facts.is_paused or facts.is_held or facts.phase is not Phase.CANARY or watch.is_behind:
        return judge_stop(watch.tally, conditions=conditions, now=now), None
    step = facts.policy.canary.steps[facts.step or 0]
    return judge_step(watch.tally, step, conditions=conditions, now=now), None


def _watch(control: Control, facts: Facts, gateway: EnvoyGateway, split: Split) -> Watch:
    """Return what is counted of the present step, from its beginning or from the gateway's start if that was later.

    A gateway that was killed has cut streams and told nobody: no line of the log says so, hence what was counted
    before proves nothing about the step, and it begins anew.

    Where the clock was set back to before the step began, requests count from now on: stop conditions stay armed, and
    nothing passes until the clock has caught up.
    """
    began_at = facts.step_since or facts.phase_since
    watch = control.watches.get(facts.release)
    started_at = watch.started_at if watch else None
    try:
        started_at = gateway.started_at()
    except GatewayDown as problem:
        if watch is not None:
            watch.tally.miss(facts.now, problem.detail)
    if started_at is not None:
        began_at = max(began_at, started_at)
    is_behind = began_at > facts.now
    if is_behind:
        is_known = watch is not None and watch.is_behind and watch.tally.began_at <= facts.now
        began_at = watch.tally.began_at if watch is not None and is_known else facts.now
    if watch is None or watch.tally.split != split or watch.tally.began_at != began_at:
        # Lines before it are passed over by their time and revision.
        position = watch.position if watch else gateway.log.position_at(began_at)
        watch = Watch(Tally(split, began_at), position)
        control.watches[facts.release] = watch
    watch.started_at, watch.is_behind = started_at, is_behind
    return watch


def _read_on(watch: Watch, facts: Facts, gateway: EnvoyGateway) -> tuple[StepJudgement, datetime | None] | None:
    """Count the new lines; return the first breach and when the line ended that made it one, or None."""
    conditions = facts.policy.canary.stop_conditions
    is_more = True
    while is_more:
        batch = gateway.log.read(watch.position)
        mark = watch.tally.mark()
        watch.tally.add(batch.records, garbled=batch.garbled, lost=batch.is_lost)
        watch.position, is_more = batch.until, batch.is_more
        stop = judge_stop(watch.tally, conditions=conditions, now=facts.now)
        if stop.outcome is not StepOutcome.FAILED:
            continue
        before = watch.tally.at(mark)
        for record in batch.records:
            before.add([record])
            if judge_stop(before, conditions=conditions, now=facts.now).outcome is StepOutcome.FAILED:
                return stop, record.ended_at
        return stop, None
    return None


def _ask(control: Control, watch: Watch, facts: Facts, gateway: EnvoyGateway) -> None:
    """Ask the gateway what is open, and for a line in its log. What it does not answer lets nothing pass."""
    at = control.now()
    try:
        open_requests = gateway.open_requests(watch.tally.split)
        gateway.probe(facts.target)
        is_same = gateway.started_at() == watch.started_at
    except GatewayDown as problem:
        watch.tally.miss(at, problem.detail)
        return
    watch.tally.expect(at)
    if is_same:
        watch.tally.see(at, open_requests)
    else:
        watch.tally.miss(at, "it was started again")


def observe_restore(control: Control, held: Held, facts: Facts, gateway: EnvoyGateway, split: Split | None) -> None:
    """Record once that new requests are seen on the restored arm alone."""
    stable = split.arm(STABLE) if split else None
    with control.transaction(held) as (session, release):
        log = {e.act: e for e in releases.log(session, release.id)}
        if "restore:observed" in log or "restore" not in log or split is None or stable is None:
            return
        restore = Traffic.model_validate(evidence.claim_of(log["restore"].envelope)["body"])
    if not _is_in_force(split, stable, restore):
        return
    began_at = restore.requested_at
    watch = control.watches.get(facts.release)
    if watch is None or watch.tally.split != split:
        watch = Watch(Tally(split, began_at), watch.position if watch else gateway.log.position_at(began_at))
        control.watches[facts.release] = watch
    first_at: datetime | None = None
    batch = gateway.log.read(watch.position)
    for record in batch.records:
        if record.target == facts.target and record.route == "split" and record.revision == split.revision:
            first_at = first_at or record.at
    watch.tally.add(batch.records, garbled=batch.garbled, lost=batch.is_lost)
    watch.position = batch.until
    seen = watch.tally.assigned
    if seen.total() == 0 or seen[STABLE] != seen.total():
        return
    breach = restore.breach_at or restore.requested_at
    seconds = max(0.0, ((first_at or facts.now) - breach).total_seconds())
    body = Restored(observed=seen.total(), first_at=first_at, seconds=seconds)
    control.perform(
        held,
        lambda session, release: control.act(session, release, "restore:observed", Kind.RESTORE_OBSERVED, body),
    )


def _is_in_force(split: Split, stable: Arm, restore: Traffic) -> bool:
    """Tell whether a gateway still gives all traffic to the bundle that a restore gave it to.

    It may have been told again since: once the release that has it all is past its soak, or its replica moved.
    """
    whole = [each.bundle for each in restore.desired if each.weight_bp == WHOLE_BP]
    is_that = any(stable.serves(bundle) for bundle in whole)
    return split.revision >= int(restore.revision) and stable.weight_bp == WHOLE_BP and is_that
