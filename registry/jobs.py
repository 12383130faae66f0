"""Jobs: what runners do, each under a lease with a fencing token. A stale token changes nothing."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session
from uuid6 import uuid7

from gates import consistency
from registry import (
    attempts,
    db,
    doubts,
    emptying,
    evidence,
    failures,
    preemption,
    quarantine,
    quotas,
    scheduling,
    targets,
    waits,
)
from registry.logged import Logged
from registry.service import Service
from registry.tables import JobRow, RecordRow, ReleaseRow, RunnerRow, TargetRow
from schemas.api import Complete, Progress, Run
from schemas.common import format_instant
from schemas.evidence import BODIES, Kind, ReplicaChanged, RunEnded
from schemas.problems import InvalidDocument, LeaseLost, NotFound
from schemas.release import TERMINAL, Phase
from schemas.result import GateResult, Verdict
from schemas.runner import Claim, JobKind, JobState, Renewal, ReplicaReport, ReplicaState, Report

REPORTED = frozenset({Kind.STAGED, Kind.ENGINE_BOOTED, Kind.GATE_RECORDED, Kind.REPLICA_CHANGED})
"""What a runner may put in evidence."""
OPEN = scheduling.OPEN
ENDED = frozenset({ReplicaState.STOPPED, ReplicaState.FAILED})
"""States of a replica that has no engine any more."""
UNTOLD = "the job is over, and its runner had not told how the replica ended"
QUARANTINED = "bundle-quarantined"
"""Problem of a run that ended because its bundle was quarantined."""


def create(
    session: Session,
    project: UUID,
    kind: JobKind,
    *,
    bundle: str,
    runner_class: str,
    created_by: str,
    now: datetime,
    policy: str | None = None,
    gates: Sequence[str] = (),
    suites: Sequence[str] = (),
    references: dict[str, str] | None = None,
    release: UUID | None = None,
    target: UUID | None = None,
    reason: str | None = None,
    replaces: UUID | None = None,
) -> JobRow:
    """Ask for something to be done by a runner of a class that has what it takes. Raises NotFound."""
    needs = scheduling.needed(session, project, bundle, kind, gates)
    job = JobRow(
        id=uuid7(),
        project_id=project,
        kind=kind,
        release_id=release,
        target_id=target,
        bundle=bundle,
        policy=policy,
        suites=list(suites),
        references=references or {},
        gates=list(gates),
        runner_class=runner_class,
        queue=_queue(session, release, target, created_by),
        devices=[],
        state=JobState.PENDING,
        is_wanted=True,
        attempt=0,
        due_at=now,
        fencing_token=0,
        created_at=now,
        created_by=created_by,
        reason=reason,
        replaces=replaces,
        **({} if needs is None else {"needs": needs.model_dump(mode="json", exclude_none=True)}),
    )
    session.add(job)
    session.flush()
    if kind == JobKind.EVALUATE:
        scheduling.is_needed_anew(session, job, gates)
    return job


def _queue(session: Session, release: UUID | None, target: UUID | None, created_by: str) -> str:
    """Return for whom a job is done: a target, or who asked where there is none."""
    if target is None and release is not None:
        target = session.get_one(ReleaseRow, release).target_id
    return f"by/{created_by}" if target is None else f"target/{target}"


def get(session: Session, project: UUID, job: UUID) -> JobRow:
    """Return a job. Raises NotFound when the project has no such job."""
    row = session.get(JobRow, job)
    if row is None or row.project_id != project:
        raise NotFound(f"there is no run {job}")
    return row


def claim(session: Session, service: Service, runner: RunnerRow) -> Claim | None:
    """Take the first job that a runner may do: one that is due, or one whose holder let its lease run out.

    The new fencing token makes every later word of the former holder void. What the job takes is reserved with it.
    """
    at = db.now(session)
    found = scheduling.next_job(session, runner, at)
    while found is not None and scheduling.is_needed_anew(session, found[0], _unsettled(session, found[0])):
        found = scheduling.next_job(session, runner, at)
    if found is None:
        return None
    job, devices = found
    if not job.is_wanted and not _may_have_engine(job):
        finish(session, service, job, problem=None, at=at)
        return None
    if job.kind == JobKind.RECORD and (why := targets.outdated(session, job)) is not None:
        finish(session, service, job, problem=why, at=at)
        return None
    if not _may_run(session, job):
        if job.release_id is None or not job.is_wanted:
            # Nobody waits for it. Should an engine of it have outlived its runner, the next process there asks for its
            # lease, is refused, and ends the engine.
            finish(session, service, job, problem=QUARANTINED, at=at)
        else:
            # What becomes of it, its release says; others do not wait for that.
            job.state, job.lease_until = JobState.PENDING, None
            job.due_at = at + timedelta(seconds=failures.BACKOFF_SECONDS)
            session.flush()
        return None
    if job.kind != JobKind.SERVE and job.state == JobState.CLAIMED:
        attempts.tell_lost(session, service, job, at=at)
    if job.kind != JobKind.SERVE and job.attempt >= failures.MAX_ATTEMPTS:
        finish(session, service, job, problem="attempts-exhausted", at=at)
        return None
    if job.state == JobState.CLAIMED:
        quotas.spend(job, job.lease_until or at)  # its holder was heard of until then
    job.state = JobState.CLAIMED
    job.runner_id, job.devices, job.claimed_at = runner.id, devices, at
    job.preempted_for = job.avoids = None
    job.attempt += 1
    job.fencing_token += 1
    job.lease_until = at + timedelta(seconds=service.settings.lease_seconds)
    job.progress = "claimed"
    if job.problem in {QUARANTINED, attempts.EMPTIED}:
        job.problem = None  # it was lifted, or its runner was lost before it ended, and the job begins anew
    session.flush()
    return _claim(session, service, job)


def _may_run(session: Session, job: JobRow) -> bool:
    """Tell whether a job's bundle may be booted: one that is quarantined only where it is live, and serves."""
    if not quarantine.is_quarantined(session, job.project_id, job.bundle):
        return True
    if job.kind != JobKind.SERVE or job.target_id is None:
        return False
    # Live, or what traffic goes back to since there is no other.
    live = targets.stable_release(session, job.target_id)
    moving = targets.candidate_release(session, job.target_id)
    accepted = [live, *(targets.way_back(session, one) for one in (live, moving) if one is not None)]
    return any(one is not None and one.bundle == job.bundle for one in accepted)


def _claim(session: Session, service: Service, job: JobRow) -> Claim:
    target = session.get(TargetRow, job.target_id) if job.target_id else None
    replica = job.replica if job.kind == JobKind.SERVE else None
    return Claim(
        job=job.id,
        kind=JobKind(job.kind),
        fencing_token=job.fencing_token,
        lease_seconds=service.settings.lease_seconds,
        release=job.release_id,
        target=target.name if target else None,
        bundle=job.bundle,
        policy=job.policy,
        suites=job.suites,
        references=job.references,
        gates=_unsettled(session, job),
        attempt=job.attempt,
        replica=_identity(replica) if replica else None,
        accepted=targets.accepted_bundle(session, job) if job.kind == JobKind.EVALUATE else None,
        devices=job.devices or [],
        is_wanted=job.is_wanted,
        planned_bytes=(job.needs or {}).get("planned_bytes"),
    )


def _identity(report: dict[str, Any]) -> dict[str, str | int] | None:
    """Return what is needed to adopt a running engine again, when the last report has all of it."""
    names = ("pid", "start_time", "boot_id", "address")
    if any(report.get(name) is None for name in names) or report["state"] in ENDED:
        return None
    return {name: report[name] for name in names}


def held(session: Session, project: UUID, job: UUID, fencing_token: int) -> JobRow:
    """Return a job held under this token, locked. Raises LeaseLost when it is held under another one."""
    row = session.get(JobRow, job, with_for_update=True, populate_existing=True)
    if row is None or row.project_id != project:
        raise NotFound(f"there is no job {job}")
    if row.state != JobState.CLAIMED or row.fencing_token != fencing_token:
        raise LeaseLost(f"job {job} is {row.state} under token {row.fencing_token}; yours is {fencing_token}")
    return row


def renew(session: Session, service: Service, project: UUID, job: UUID, said: Progress) -> Renewal:
    """Extend a lease, also one that ran out but was not taken. Raises LeaseLost."""
    row = held(session, project, job, said.fencing_token)
    row.lease_until = db.now(session) + timedelta(seconds=service.settings.lease_seconds)
    if said.progress is not None:
        row.progress = said.progress
    session.flush()
    is_wanted = row.is_wanted
    if row.kind != JobKind.SERVE and not _may_run(session, row):
        # Why it ends stays known, should the quarantine be lifted before it has.
        is_wanted, row.problem = False, QUARANTINED
        session.flush()
    elif emptying.is_over(session, row, db.now(session)):
        # Why it ends stays known, should the drain be over before it has.
        is_wanted, row.problem = False, attempts.EMPTIED
        session.flush()
    elif preemption.is_to_end(session, row, db.now(session)):
        is_wanted = False
    return Renewal(lease_seconds=service.settings.lease_seconds, is_wanted=is_wanted)


def report(session: Session, service: Service, project: UUID, job: UUID, said: Report) -> tuple[str, bool]:
    """Record what happened in a job.

    Returns:
        The entry's digest, and whether this call wrote it.

    Raises:
        LeaseLost, InvalidDocument, TransitionRefused.
    """
    row = held(session, project, job, said.fencing_token)
    runner = session.get(RunnerRow, row.runner_id) if row.runner_id else None
    actor = f"runner/{runner.name}" if runner else "runner"
    kind, body = _body(row, said)
    if isinstance(body, GateResult):
        _check_result(session, row, said.act, body)
    stream = evidence.release_stream(row.release_id) if row.release_id else f"run/{row.id}"
    subjects = {"bundle": row.bundle, **({"policy": row.policy} if row.policy else {})}
    act = f"job:{row.id}:{said.act}"
    signed = evidence.state(service.signer, stream, act, actor, kind, body, subjects=subjects, now=db.now(session))
    if row.release_id:
        _, is_new = evidence.record(session, signed)
    else:
        _, is_new = evidence.append(session, project, signed)
    if is_new and isinstance(body, ReplicaChanged):
        shown = body.replica.model_dump(mode="json", exclude_none=True)
        row.replica = {**shown, "since": format_instant(db.now(session))}
        _wake_target(session, row)
    session.flush()
    entry = evidence.find(session, stream, act)
    if entry is None:  # pragma: no cover - written or known a moment ago, in this transaction
        raise NotFound(f"the entry {act} is gone")
    if is_new and isinstance(body, GateResult):
        row.progress = None  # how far the gate was is no news once there is its result
        scheduling.plan(session, row, body)
        quarantine.of_result(session, service, entry, row.bundle, body)
        doubts.of_result(session, entry, row.bundle, body)
    return entry.entry_digest, is_new


def _check_result(session: Session, row: JobRow, act: str, result: GateResult) -> None:
    """Take no result of a gate that was not asked for or has failed, and no pass whose numbers cannot all be true."""
    attempts.require_wanted(row)
    if result.gate not in row.gates:
        raise InvalidDocument(f"job {row.id} does not run the gate {result.gate}", errors=[])
    if result.records is not None and session.get(RecordRow, (row.project_id, result.records)) is None:
        detail = f"the records {result.records} have not been sent: they come before the result that names them"
        raise InvalidDocument(detail, errors=[{"pointer": "/body/records", "detail": detail}])
    for entry in recorded(session, row):
        before = GateResult.model_validate(evidence.claim_of(entry.envelope)["body"])
        if before.gate == result.gate and before.verdict is Verdict.FAILED and entry.act != f"job:{row.id}:{act}":
            raise InvalidDocument(
                f"the gate {result.gate} has failed in job {row.id}: what has failed gets no other result", errors=[]
            )
    if result.verdict is Verdict.PASSED and (found := consistency.contradictions(result.measurements)):
        raise InvalidDocument(
            f"the numbers of {result.gate} contradict each other: {'; '.join(one.message for one in found)}",
            errors=[
                {"pointer": f"/body/measurements/{place}", "detail": one.message}
                for one in found
                for place in dict.fromkeys(one.places)
            ],
        )


def _body(row: JobRow, said: Report) -> tuple[Kind, Any]:
    if said.kind not in REPORTED:
        raise InvalidDocument(
            f"a runner does not report {said.kind}", errors=[{"pointer": "/kind", "detail": "is not for runners"}]
        )
    kind = Kind(said.kind)
    if kind is Kind.REPLICA_CHANGED:
        replica = ReplicaReport.model_validate(said.body)
        is_live = row.kind == JobKind.SERVE
        return kind, ReplicaChanged(job=row.id, purpose="live" if is_live else "gates", replica=replica)
    return kind, BODIES[kind].model_validate(said.body)


def _wake_target(session: Session, job: JobRow) -> None:
    """A replica changed: whoever waits for it looks again."""
    if job.target_id is None:
        return
    at = db.now(session)
    for release in session.scalars(
        select(ReleaseRow).where(
            ReleaseRow.target_id == job.target_id,
            ReleaseRow.phase.in_([Phase.GATED, Phase.APPROVED, Phase.CANARY, Phase.PROMOTED]),
        )
    ):
        release.due_at = at


def complete(session: Session, service: Service, project: UUID, job: UUID, said: Complete) -> None:
    """End a job, or put it back for another try when it ended in a technical problem.

    Raises:
        LeaseLost.
    """
    row = held(session, project, job, said.fencing_token)
    at = db.now(session)
    quotas.spend(row, at)
    is_emptied = row.problem == attempts.EMPTIED or emptying.is_over(session, row, at)
    if said.problem is None and row.is_wanted and is_emptied:
        is_left = row.kind == JobKind.SERVE or _is_unfinished(session, row)
        if is_left and emptying.give_back(session, service, row, at):
            _settle_replica(row, at=at)
            _wake_target(session, row)
            return
    if said.problem is None and row.kind == JobKind.SERVE and row.is_wanted:
        # Nobody asked the replica to stop, so however it ended it is a failure, and the bundle must serve again.
        detail = "the replica ended, and nobody had asked for it"
        said = Complete(fencing_token=said.fencing_token, problem="ended-unasked", detail=detail)
    if said.problem is None and row.preempted_for is not None and _is_unfinished(session, row):
        attempts.begin_anew(session, service, row, attempts.PREEMPTED, preemption.made_room(session, row), at=at)
        return
    if said.problem == attempts.STOPPED and row.kind != JobKind.SERVE and _is_unfinished(session, row):
        # Runners are replaced one after another: three of them in an hour are no three failures.
        attempts.begin_anew(session, service, row, attempts.STOPPED, said.detail or "it was stopped", at=at)
        return
    if said.problem is None:
        finish(session, service, row, problem=None, at=at)
        return
    follows = _next_try(session, row, said, at=at)
    said = said.model_copy(update={"detail": failures.told(said.detail or "", follows.cause, said.cause) or None})
    said = said.model_copy(update={"cause": follows.cause})
    act = f"{follows.act}:{row.attempt}"
    attempts.errored(session, service, row, said, at=at, retry_in=follows.wait_seconds, act=act)
    problem = f"{said.problem}: {said.detail or ''}"[:2000]
    if follows.wait_seconds is None:
        finish(session, service, row, problem=problem, at=at)
        return
    row.state = JobState.PENDING
    row.due_at = at + timedelta(seconds=follows.wait_seconds)
    row.lease_until = None
    row.problem = problem
    # A replica whose engine failed begins again soonest where its files are.
    row.avoids = row.runner_id if said.cause is None or row.kind != JobKind.SERVE else None
    row.progress = "waiting to be tried again"
    session.flush()


def _next_try(session: Session, row: JobRow, said: Complete, *, at: datetime) -> failures.Next:
    """Say what follows on a failed attempt."""
    if row.kind == JobKind.RECORD and targets.outdated(session, row) is not None:
        return failures.Next(None, said.cause)
    if not row.is_wanted:
        return failures.Next(None, said.cause)
    if row.kind != JobKind.SERVE:
        return failures.after(row.attempt, said.cause)
    release = session.get(ReleaseRow, row.release_id) if row.release_id else None
    other = session.get(JobRow, row.replaces) if row.replaces is not None else None
    if other is not None and other.is_wanted and other.state in OPEN:
        # What it was to take the place of serves on, and does not fail by this.
        return failures.Next(failures.backoff(row.attempt), said.cause, failures.BESIDE)
    if release is None or Phase(release.phase) in TERMINAL:
        # Its log is closed. It is the way back of another release, which says so when it does not become ready.
        return failures.Next(failures.backoff(row.attempt), said.cause)
    # An engine that served for a month and died is not at its tenth failure because its runner was replaced nine
    # times; nor does a new job begin at its first.
    seen = failures.history(evidence.read(session, evidence.release_stream(release.id)))
    return failures.after_live(seen, said.cause, at)


def _is_unfinished(session: Session, row: JobRow) -> bool:
    """Tell whether a gate or recording still has something to do, and may."""
    if not row.is_wanted or not _may_run(session, row):
        return False
    if row.kind == JobKind.RECORD:
        return row.reference is None
    verdicts = {result.gate: result.verdict for result in results(session, row)}
    return Verdict.FAILED not in verdicts.values() and any(gate not in verdicts for gate in row.gates)


def finish(session: Session, service: Service, row: JobRow, *, problem: str | None, at: datetime) -> None:
    """End a job, held by nobody any more; a run also in its log. `problem` says what came between."""
    is_run = row.release_id is None and row.kind != JobKind.SERVE
    row.state = JobState.DONE if row.is_wanted or not (is_run or row.kind == JobKind.SERVE) else JobState.CANCELLED
    if problem is None and is_run and (row.problem == QUARANTINED or not _may_run(session, row)):
        problem = QUARANTINED if ended_as(session, row) == "undecided" else None
    row.finished_at = at
    row.lease_until = row.progress = None
    row.problem = row.problem if is_run and not row.is_wanted else problem  # who cancelled it, and why
    _settle_replica(row, at=at)
    if row.release_id and (release := session.get(ReleaseRow, row.release_id)) is not None:
        release.due_at = at
    elif is_run and row.is_wanted:
        _run_ended(session, service, row, at=at)
    _wake_target(session, row)
    session.flush()


def _run_ended(session: Session, service: Service, row: JobRow, *, at: datetime) -> None:
    """Record that a run without a release is over: who follows its stream need not ask again and again."""
    # The whole of it is in the attempt's entry.
    ended = RunEnded(outcome=ended_as(session, row), problem=row.problem[:256] if row.problem else None)
    signed = evidence.state(
        service.signer,
        f"run/{row.id}",
        "ended",
        "runner",
        Kind.RUN_ENDED,
        ended,
        subjects={"bundle": row.bundle},
        now=at,
    )
    evidence.append(session, row.project_id, signed)


def ended_as(session: Session, row: JobRow) -> Literal["passed", "failed", "undecided", "recorded"]:
    """Return how a run that is over came out: of a recording, whether it recorded."""
    if row.kind == JobKind.RECORD:
        return "recorded" if row.reference is not None else "undecided"
    return outcome(session, row) or "undecided"


def unwant(session: Session, job: JobRow, *, now: datetime) -> None:
    """Ask the holder to drain and stop; a job that nobody holds ends at once."""
    job.is_wanted = False
    if job.state == JobState.PENDING and not _may_have_engine(job):
        job.state = JobState.CANCELLED
        job.finished_at = now
        _settle_replica(job, at=now)
    session.flush()


def _may_have_engine(job: JobRow) -> bool:
    """Tell whether an engine that outlives its runner was started for a job, and nobody told its end."""
    is_told = job.kind == JobKind.SERVE and job.replica is not None and job.replica.get("pid") is not None
    return is_told and job.replica is not None and job.replica["state"] not in ENDED


def _settle_replica(job: JobRow, *, at: datetime) -> None:
    """Show no replica of an ended serve job as one that serves, where its runner never told how it ended."""
    if job.kind != JobKind.SERVE or job.replica is None or job.replica["state"] in ENDED:
        return
    job.replica = {"state": ReplicaState.STOPPED.value, "cause": UNTOLD, "since": format_instant(at)}


def of_release(session: Session, release: UUID, kind: JobKind) -> list[JobRow]:
    """Return a release's jobs of a kind, oldest first."""
    return list(
        session.scalars(select(JobRow).where(JobRow.release_id == release, JobRow.kind == kind).order_by(JobRow.id))
    )


def serving(session: Session, target: UUID) -> list[JobRow]:
    """Return the open serve jobs of a target, oldest first."""
    return list(
        session.scalars(
            select(JobRow)
            .where(JobRow.target_id == target, JobRow.kind == JobKind.SERVE, JobRow.state.in_(OPEN))
            .order_by(JobRow.id)
        )
    )


def results(session: Session, job: JobRow) -> list[GateResult]:
    """Return the gate results that a job recorded, oldest first."""
    entries = recorded(session, job)
    return [GateResult.model_validate(evidence.claim_of(row.envelope)["body"]) for row in entries]


def recorded(session: Session, job: JobRow) -> list[Logged]:
    """Return the entries with the gate results that a job recorded, oldest first."""
    stream = evidence.release_stream(job.release_id) if job.release_id else f"run/{job.id}"
    prefix = f"job:{job.id}:"
    entries = evidence.read(session, stream)
    return [row for row in entries if row.kind == Kind.GATE_RECORDED and row.act.startswith(prefix)]


def _unsettled(session: Session, job: JobRow) -> list[str]:
    """Return the gates of a job that have no verdict from an earlier attempt, in their order."""
    settled = {result.gate for result in results(session, job)}
    return [gate for gate in job.gates if gate not in settled]


def outcome(session: Session, job: JobRow) -> Literal["passed", "failed", "undecided"] | None:
    """Return passed, failed or undecided for a finished evaluation, None while it goes on."""
    if job.kind != JobKind.EVALUATE or job.state in OPEN:
        return None
    verdicts = {result.gate: result.verdict for result in results(session, job)}
    if Verdict.FAILED in verdicts.values():
        return "failed"
    wanted = job.gates if job.state == JobState.DONE else []
    passed = bool(wanted) and all(verdicts.get(gate) is Verdict.PASSED for gate in wanted)
    return "passed" if passed else "undecided"


def wire(session: Session, row: JobRow) -> Run:
    """Return a job as the service gives it out."""
    runner = session.get(RunnerRow, row.runner_id) if row.runner_id else None
    return Run(
        id=row.id,
        kind=row.kind,
        release=row.release_id,
        bundle=row.bundle,
        policy=row.policy,
        runner_class=row.runner_class,
        runner=runner.name if runner else None,
        state=row.state,
        attempt=row.attempt,
        progress=row.progress,
        outcome=outcome(session, row),
        problem=row.problem,
        created_at=row.created_at,
        results=[result.model_dump(mode="json", exclude_none=True) for result in results(session, row)],
        reference=row.reference,
        waits=waits.of_job(session, row),
        replica=targets.replica_of(row),
    )


def browse(session: Session, project: UUID, *, release: UUID | None, after: UUID | None, limit: int) -> list[JobRow]:
    """Return a project's jobs, newest first, before a cursor; of one release when asked."""
    query = select(JobRow).where(JobRow.project_id == project)
    if release is not None:
        query = query.where(JobRow.release_id == release)
    if after is not None:
        query = query.where(JobRow.id < after)
    return list(session.scalars(query.order_by(JobRow.id.desc()).limit(limit)))


def measured(session: Session, project: UUID, bundle: str, *, limit: int) -> list[tuple[JobRow, Logged, GateResult]]:
    """Return the newest gate results of a bundle, newest first, each with its job and its entry.

    Args:
        session: of the caller.
        project: whose.
        bundle: digest.
        limit: most jobs that are looked into.
    """
    evaluations = session.scalars(
        select(JobRow)
        .where(JobRow.bundle == bundle, JobRow.project_id == project, JobRow.kind == JobKind.EVALUATE)
        .order_by(JobRow.id.desc())
        .limit(limit)
    )
    found = [(row, entry) for row in evaluations for entry in reversed(recorded(session, row))]
    return [(row, entry, GateResult.model_validate(evidence.claim_of(entry.envelope)["body"])) for row, entry in found]


def of_runner(session: Session, runner: UUID, *, after: UUID | None, limit: int) -> list[tuple[JobRow, str | None]]:
    """Return the jobs that a runner holds or held last, newest first, before a cursor, each with its target's name."""
    query = (
        select(JobRow, TargetRow.name)
        .join(TargetRow, TargetRow.id == JobRow.target_id, isouter=True)
        .where(JobRow.runner_id == runner)
    )
    if after is not None:
        query = query.where(JobRow.id < after)
    return [(row, name) for row, name in session.execute(query.order_by(JobRow.id.desc()).limit(limit))]


def held_by(session: Session, runners: Sequence[UUID]) -> list[tuple[JobRow, str | None]]:
    """Return the jobs that these runners hold now, oldest first, each with the name of its target."""
    query = (
        select(JobRow, TargetRow.name)
        .join(TargetRow, TargetRow.id == JobRow.target_id, isouter=True)
        .where(JobRow.runner_id.in_(runners), JobRow.state == JobState.CLAIMED)
        .order_by(JobRow.id)
    )
    return [(row, name) for row, name in session.execute(query)]
