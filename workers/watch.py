"""Watching live traffic: reads what the gateway logged since the last look, and lets `gates.canary` judge it."""

import copy
from datetime import datetime

from gates.canary import StepJudgement, StepOutcome, Tally, judge_step, judge_stop
from gates.router import STABLE, Split
from registry import evidence, releases
from schemas.evidence import Kind, Restored, Traffic
from schemas.release import Phase
from workers.control import Control, Held, Watch
from workers.facts import Facts
from workers.traffic.envoy import EnvoyGateway


def look(control: Control, facts: Facts, gateway: EnvoyGateway, split: Split) -> tuple[StepJudgement, datetime | None]:
    """Read what the gateway logged since the last look, and judge. Returns also when a breach became decidable."""
    began_at = facts.step_since or facts.phase_since
    watch = control.watches.get(facts.release)
    if watch is None or watch.tally.split != split or watch.tally.began_at != began_at:
        # A new step begins with nothing counted; lines before it are passed over by their time and revision.
        watch = Watch(Tally(split, began_at), watch.position if watch else gateway.log.position_at(began_at))
        control.watches[facts.release] = watch
    watch.tally.expect(control.now())
    gateway.probe(facts.target)
    breach_at: datetime | None = None
    is_more = True
    while is_more:
        batch = gateway.log.read(watch.position)
        before = copy.deepcopy(watch.tally)
        watch.tally.add(batch.records, garbled=batch.garbled, lost=batch.is_lost)
        watch.position, is_more = batch.until, batch.is_more
        stop = judge_stop(watch.tally, conditions=facts.policy.canary.stop_conditions, now=facts.now)
        if stop.outcome is StepOutcome.FAILED and breach_at is None:
            for record in batch.records:
                before.add([record])
                judged = judge_stop(before, conditions=facts.policy.canary.stop_conditions, now=facts.now)
                if judged.outcome is StepOutcome.FAILED:
                    breach_at = record.ended_at
                    break
    now = control.now()
    conditions = facts.policy.canary.stop_conditions
    if facts.is_paused or facts.is_held or facts.phase is not Phase.CANARY:
        return judge_stop(watch.tally, conditions=conditions, now=now), breach_at
    step = facts.policy.canary.steps[facts.step or 0]
    return judge_step(watch.tally, step, conditions=conditions, now=now), breach_at


def observe_restore(control: Control, held: Held, facts: Facts, gateway: EnvoyGateway, split: Split | None) -> None:
    """Record once that new requests are seen on the restored arm alone."""
    stable = split.arm(STABLE) if split else None
    with control.transaction(held) as (session, release):
        log = {e.act: e for e in releases.log(session, release.id)}
        if "restore:observed" in log or "restore" not in log or split is None or stable is None:
            return
        restore = Traffic.model_validate(evidence.claim_of(log["restore"].envelope)["body"])
    if str(split.revision) != restore.revision:
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
    with control.transaction(held) as (session, release):
        body = Restored(observed=seen.total(), first_at=first_at, seconds=seconds)
        control.act(session, release, "restore:observed", Kind.RESTORE_OBSERVED, body)
