"""Reconcile: take a release one step on. Safe at any time, any number of times, from any worker.

`STEPS` says what each phase waits for or does. A step returns after how many seconds it wants to be called again,
or None when only an entry, a job or a replica can change anything; those make the release due themselves.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from gates.policy import Outcome
from registry import acts, approvals, db, documents, jobs, releases
from registry.tables import JobRow, ReleaseRow, TargetRow
from schemas.evidence import Attempt, Decision, Kind, Reasoned
from schemas.holds import Hold
from schemas.policy import Policy
from schemas.problems import LeaseLost, NotEligible, Problem, Unavailable
from schemas.release import TERMINAL, Phase
from schemas.result import Verdict
from schemas.runner import JobKind
from workers import quarantines, restores, rollout
from workers.control import Control, Held

log = structlog.get_logger(__name__)

MAX_EVALUATIONS = 3
"""An errored gate is run again at most twice by itself; a failed one never."""
TURN_SECONDS = 4.0
"""How long one call may stay with a release that moves fast, before others get their turn."""
RETRY_SECONDS = 2.0

Step = Callable[[Control, Held], float | None]


def reconcile(control: Control, release_id: UUID, *, turn_seconds: float = TURN_SECONDS) -> None:
    """Take a release on until it waits for something, or its turn is over."""
    held = control.claim(release_id)
    if held is None:
        return
    due_in: float | None = RETRY_SECONDS
    ends = time.monotonic() + turn_seconds
    try:
        while True:
            due_in = _step(control, held)
            if due_in is None or due_in > 1 or time.monotonic() + due_in > ends:
                return
            time.sleep(due_in)
            control.renew(held)
    except LeaseLost:
        log.warning("release_lease_lost", release=str(release_id))
    except Problem as problem:
        due_in = RETRY_SECONDS
        _record_attempt(control, held, problem)
    except OSError as error:
        # A full disk, or a folder of the gateway's that may not be written: whoever looks at the release sees why.
        log.exception("release_attempt_failed", release=str(release_id))
        due_in = RETRY_SECONDS
        where = f": {Path(error.filename).name}" if isinstance(error.filename, str) else ""
        _record_attempt(control, held, Unavailable(f"the controller's machine refuses: {error.strerror}{where}"))
    finally:
        control.let_go(held, due_in_seconds=due_in)


def _step(control: Control, held: Held) -> float | None:
    with control.transaction(held) as (_, release):
        phase = Phase(release.phase)
    held.progress = None
    return STEPS[phase](control, held)


def _record_attempt(control: Control, held: Held, problem: Problem) -> None:
    """A technical error moves no phase. It is recorded once per kind and minute, so that a long outage is no flood."""
    log.warning("release_attempt_errored", release=str(held.id), problem=problem.kind, detail=problem.detail)

    def record(session: Session, release: ReleaseRow) -> None:
        if Phase(release.phase) in TERMINAL - {Phase.ROLLED_BACK}:
            return
        minute = acts.moment(session).strftime("%Y%m%dT%H%M")
        act = f"attempt:{problem.kind}:{minute}"
        attempt = Attempt(problem=problem.kind, detail=problem.detail, attempt=1, retry_in_seconds=RETRY_SECONDS)
        releases.act(session, control.service, release, act, "controller", Kind.ATTEMPT_ERRORED, attempt)

    control.perform(held, record)


def evaluate(control: Control, held: Held) -> float | None:
    """Have the gates run, then fold their verdicts."""
    return control.perform(held, lambda session, release: _evaluate(control, session, release))


def _evaluate(control: Control, session: Session, release: ReleaseRow) -> float | None:
    if quarantines.is_rejected(control, session, release):
        return 0.0
    if release.is_paused:
        return None
    policy = documents.load_policy(session, release.project_id, release.policy)
    found = jobs.of_release(session, release.id, JobKind.EVALUATE)
    if not found:
        _start_evaluation(control, session, release, policy, [rule.gate for rule in policy.gates])
        return None
    if found[-1].state in jobs.OPEN:
        return None
    return _decide(control, session, release, policy, found)


def _start_evaluation(
    control: Control, session: Session, release: ReleaseRow, policy: Policy, gates: Sequence[str]
) -> None:
    target = session.get_one(TargetRow, release.target_id)
    chosen = [rule for rule in policy.gates if rule.gate in gates]
    jobs.create(
        session,
        release.project_id,
        JobKind.EVALUATE,
        bundle=release.bundle,
        policy=release.policy,
        gates=[rule.gate for rule in chosen],
        suites=sorted({suite for rule in chosen if (suite := getattr(rule, "suite", None))}),
        references=dict(release.references),
        runner_class=target.runner_class,
        release=release.id,
        created_by="controller",
        now=db.now(session),
    )
    db.after_commit(session, lambda: control.ring(target.runner_class))


def _decide(
    control: Control, session: Session, release: ReleaseRow, policy: Policy, evaluations: list[JobRow]
) -> float | None:
    standing = releases.standing(session, release, policy, now=db.now(session))
    last = evaluations[-1]
    if standing.decision.outcome is Outcome.PASSED and release.phase == Phase.BOOTED:
        gates = {gate: entry.entry_digest for gate, (entry, _) in sorted(standing.results.items())}
        releases.act(session, control.service, release, "gates", "policy", Kind.GATES_PASSED, Decision(gates=gates))
        return 0.0
    if standing.decision.outcome is Outcome.FAILED:
        reasons = [
            f"{gate} failed: {result.summary}"
            for gate, (_, result) in standing.results.items()
            if result.verdict is Verdict.FAILED
        ]
        refused = Reasoned(reasons=reasons or list(standing.decision.reasons), cause="gate_failed")
        releases.act(session, control.service, release, "refusal", "policy", Kind.REFUSED, refused)
        return 0.0
    verdicts = {gate: result.verdict for gate, (_, result) in standing.results.items()}
    unsettled = [
        rule.gate
        for rule in policy.gates
        if verdicts.get(rule.gate) is not Verdict.PASSED or rule.gate in standing.expired
    ]
    is_retryable = Verdict.INCONCLUSIVE not in verdicts.values() and len(evaluations) < MAX_EVALUATIONS
    if (is_retryable and last.problem is None) or _was_resumed_since(session, release, last):
        # A new boot proves its bytes again, whatever else it runs.
        again = [rule.gate for rule in policy.gates if rule.gate in unsettled or rule.gate == "integrity"]
        _start_evaluation(control, session, release, policy, again)
        return None
    reasons = []
    for gate in unsettled:
        result = standing.results.get(gate)
        if gate in standing.expired:
            reasons.append(f"{gate} {standing.expired[gate]}")
            continue
        reasons.append(f"{gate} {result[1].verdict}: {result[1].summary}" if result else f"{gate} has not run")
    if last.problem:
        reasons.append(f"the last run ended with {last.problem}")
    control.hold(session, release, f"held:{last.id}", reasons, Hold.GATES_UNDECIDED)
    return None


def _was_resumed_since(session: Session, release: ReleaseRow, job: JobRow) -> bool:
    entries = releases.log(session, release.id)
    return any(entry.kind == Kind.RESUMED and entry.recorded_at > job.created_at for entry in entries)


def approval(control: Control, held: Held) -> float | None:
    """Wait for people, unless the policy asks for none. What a gate warned of waits for one who answers for it."""
    # An approval may have been withdrawn while a controller moved the first traffic.
    restores.take_back_unrecorded(control, held)
    restores.hand_over_unused(control, held)
    return control.perform(held, lambda session, release: _approval(control, session, release))


def _approval(control: Control, session: Session, release: ReleaseRow) -> float | None:
    if quarantines.is_rejected(control, session, release):
        return 0.0
    if release.is_paused:
        return None
    policy = documents.load_policy(session, release.project_id, release.policy)
    entries = releases.log(session, release.id)
    try:
        found = releases.require_eligible(session, release, policy, now=db.now(session), entries=entries)
    except NotEligible as problem:
        control.hold(session, release, f"held:evidence:{release.lease_token}", [problem.detail], Hold.NOT_ELIGIBLE)
        return None
    if left := approvals.unaccepted(entries, found):
        digests = "".join(found.results[gate][0].entry_digest[7:13] for gate in sorted(left))
        control.hold(session, release, f"held:findings:{digests}", approvals.warnings(left), Hold.FINDINGS_UNACCEPTED)
        return None
    before = release.phase
    approvals.settle(session, control.service, release, policy)
    return 0.0 if release.phase != before else None


STEPS: dict[Phase, Step] = {
    Phase.CANDIDATE: evaluate,
    Phase.STAGED: evaluate,
    Phase.BOOTED: evaluate,
    Phase.GATED: approval,
    Phase.APPROVED: rollout.begin,
    Phase.CANARY: rollout.canary,
    Phase.PROMOTED: rollout.soak,
    Phase.ROLLED_BACK: rollout.settle,
    Phase.REJECTED: rollout.clear,
    Phase.SUPERSEDED: rollout.rest,
}
