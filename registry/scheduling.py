"""Which job goes to which runner: what fits, what is free, who comes first.

A job is matched when a runner asks for one, never before: what a runner has and what is free on it may have changed.
"""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, and_, case, func, or_, select, true
from sqlalchemy.orm import Session, aliased

from gates import fitting
from gates.fitting import Needs
from registry import db, documents, evidence, quotas, runners, targets, turns
from registry.room import Reserved, offer, read, reserved
from registry.tables import JobRow, ReleaseRow, RunnerRow
from schemas.bundle import Bundle
from schemas.problems import NoRunnerFits
from schemas.release import Phase
from schemas.result import GateResult
from schemas.runner import JobKind, JobState, ReplicaState

OPEN = (JobState.PENDING, JobState.CLAIMED)
DRILL = "rollback"
"""Gate that boots what traffic would go back to beside the candidate."""
PLACEMENT = "placement"
"""Gate whose result says what a replica takes of memory."""
MOST_PLANS = 5
"""Runs of a bundle that are looked into for one."""
AGE_SECONDS = 600.0
"""A gate or recording that has waited so long goes as if it were of the next higher kind, up to a release's gates."""
GATES = 3
"""Rank of a release's gates; what is before it is for traffic, and nothing that waits gets there."""
MOST_NAMED = 4
"""Runners that are named one by one in a sentence; the rest is counted."""


def needed(session: Session, project: UUID, bundle: str, kind: JobKind, gates: Collection[str] = ()) -> Needs | None:
    """Return what a job takes of a machine; None where it starts no engine. Raises NotFound."""
    if kind is JobKind.EVALUATE and fitting.BEFORE_BOOT.issuperset(gates):
        return None
    document = documents.load_bundle(session, project, bundle, or_deleted=True)
    return _planned(session, project, document)


def _planned(session: Session, project: UUID, bundle: Bundle) -> Needs:
    """Return what a bundle takes, with its newest placement plan that passed where one of the last runs has one."""
    needs = Needs.of(bundle)
    query = select(JobRow.id, JobRow.release_id).where(
        JobRow.project_id == project,
        JobRow.bundle == bundle.digest,
        JobRow.kind == JobKind.EVALUATE,
        JobRow.gates.contains([PLACEMENT]),
    )
    for job, release in session.execute(query.order_by(JobRow.id.desc()).limit(MOST_PLANS)):
        stream = evidence.release_stream(release) if release else f"run/{job}"
        entry = evidence.find(session, stream, f"job:{job}:gate:{PLACEMENT}")
        if entry is not None:
            result = GateResult.model_validate(evidence.claim_of(entry.envelope)["body"])
            if (found := fitting.planned(needs, bundle, result)) != needs:
                return found
    return needs


def plan(session: Session, job: JobRow, result: GateResult) -> None:
    """Have a job that runs reserve what its own placement plan says, as soon as that is there."""
    needs = read(job.needs) if job.needs is not None and result.gate == PLACEMENT else None
    if needs is None:
        return
    bundle = documents.load_bundle(session, job.project_id, job.bundle, or_deleted=True)
    job.needs = fitting.planned(needs, bundle, result).model_dump(mode="json", exclude_none=True)
    session.flush()


def with_way_back(
    session: Session, project: UUID, needs: Needs | None, gates: Collection[str], accepted: str | None
) -> Needs | None:
    """Return what gates take of a machine at once: with a drill, also the bundle that traffic would go back to."""
    if needs is None:
        return None
    beside = needed(session, project, accepted, JobKind.SERVE) if accepted and DRILL in gates else None
    return needs.model_copy(update={"beside": beside})


def is_needed_anew(session: Session, job: JobRow, gates: Collection[str]) -> bool:
    """Bring what a job takes up to date with what its target has accepted now, and tell whether that is another.

    `gates` are those of its gates that have no verdict yet.
    """
    if job.needs is None or DRILL not in job.gates:
        return False
    before = Needs.model_validate(job.needs)
    now = with_way_back(session, job.project_id, before, gates, targets.accepted_bundle(session, job))
    if now is None or now == before:
        return False
    job.needs = now.model_dump(mode="json", exclude_none=True)
    session.flush()
    return True


def require_fit(session: Session, project: UUID, runner_class: str, needs: Needs | None) -> None:
    """Return when a runner of the class could run this, or none of the class was ever heard of.

    Raises:
        NoRunnerFits: each of them lacks something, whatever else it does.
    """
    known = _of_class(session, project, runner_class)
    lacks = {} if needs is None else {one.name: fitting.obstacles(needs, offer(one)) for one in known}
    if needs is None or not lacks or not all(lacks.values()):
        return
    others = select(RunnerRow).where(RunnerRow.project_id == project, RunnerRow.runner_class != runner_class)
    fits = [
        {"runner": one.name, "runner_class": one.runner_class}
        for one in session.scalars(others.order_by(RunnerRow.runner_class, RunnerRow.name))
        if not fitting.obstacles(needs, offer(one))
    ]
    named = ", ".join(f"{one['runner']} of class {one['runner_class']}" for one in fits[:MOST_NAMED])
    elsewhere = f"it fits {named}" if fits else "nor does it fit a runner of another class"
    raise NoRunnerFits(
        f"no runner of class {runner_class} has {fitting.asked(needs, map(offer, known))}: {_told(lacks)}; {elsewhere}",
        needs=str(needs),
        runners=[{"runner": name, "lacks": why} for name, why in sorted(lacks.items())],
        fits=fits,
    )


def lacking(job: JobRow, among: Sequence[RunnerRow]) -> str | None:
    """Return what none of some runners has for a job, in one sentence; None when one has it all."""
    if job.needs is None or not among:
        return None
    if (needs := read(job.needs)) is None:
        return "a service of the version that made it: this one cannot tell what it takes"
    lacks = {one.name: fitting.obstacles(needs, offer(one)) for one in among}
    asked = fitting.asked(needs, map(offer, among))
    return f"a runner that has {asked}: {_told(lacks)}" if all(lacks.values()) else None


def occupied(session: Session, job: JobRow, among: Sequence[RunnerRow]) -> str | None:
    """Return which devices or memory a job waits for on runners that fit it, in one sentence; None for none."""
    if job.needs is None:
        return None
    needs, at = read(job.needs), db.now(session)
    if needs is None:
        return None
    told = []
    for one in among:
        if fitting.obstacles(needs, offer(one)):
            continue
        held = reserved(session, one, at)
        if held.room(needs) is not None:
            return None
        told.append(f"{one.name} has reserved {held}")
    if not told:
        return None
    kept = _kept(session, job.project_id, job.runner_class, at)
    if kept is not None and kept[0] == job.id:
        told = [*told[:MOST_NAMED], f"{kept[1].name} takes no other gates until it has it"]
    return f"room for {needs}: {'; '.join(told[: MOST_NAMED + 1])}"


def _of_class(session: Session, project: UUID, runner_class: str) -> list[RunnerRow]:
    query = select(RunnerRow).where(RunnerRow.project_id == project, RunnerRow.runner_class == runner_class)
    return list(session.scalars(query.order_by(RunnerRow.name)))


def _told(lacks: dict[str, list[str]]) -> str:
    named = [f"{name}: {'; '.join(why)}" for name, why in sorted(lacks.items())[:MOST_NAMED]]
    rest = len(lacks) - len(named)
    return ". ".join([*named, *([f"{rest} more lack something too"] if rest else [])])


# ------------------------------------------------------------------------------------------------ who comes first


def next_job(session: Session, runner: RunnerRow, at: datetime) -> tuple[JobRow, list[int]] | None:
    """Return the job that a runner should take now, locked, with the accelerators that it gets; None for none.

    First what is live, then what traffic goes back to, then a candidate's replica or one that is to take the place of
    another that serves; then the gates of releases, gates
    that somebody asked for, and recordings. Within a kind, whose turn was longest ago comes first.
    """
    # Of two claims, the second sees what the first reserved.
    locked = session.get(RunnerRow, runner.id, with_for_update=True, populate_existing=True)
    if locked is None or locked.drained_at is not None:
        return None
    asked = (
        JobRow.project_id == runner.project_id,
        JobRow.runner_class == runner.runner_class,
        JobRow.state.in_(OPEN),
        or_(
            and_(JobRow.state == JobState.PENDING, JobRow.due_at <= at),
            and_(JobRow.state == JobState.CLAIMED, JobRow.lease_until < at),
        ),
    )
    held, machine = reserved(session, runner, at), offer(runner)
    fitting_ones = []
    for needs in session.scalars(select(JobRow.needs).where(*asked, JobRow.needs.is_not(None)).distinct()):
        wanted = read(needs)
        if wanted is not None and held.room(wanted) is not None and not fitting.obstacles(wanted, machine):
            fitting_ones.append(needs)
    kept = _kept(session, runner.project_id, runner.runner_class, at)
    job = session.scalar(
        select(JobRow)
        .join(ReleaseRow, ReleaseRow.id == JobRow.release_id, isouter=True)
        .where(
            *asked,
            _may_take(session, runner, at),
            or_(JobRow.needs.is_(None), JobRow.needs.in_(fitting_ones)),
            JobRow.id.not_in(turns.left_to_others(session, runner, at)),
            true()
            if kept is None or kept[1].id != runner.id
            else or_(JobRow.kind == JobKind.SERVE, JobRow.id == kept[0]),
        )
        .order_by(*_order(at))
        .limit(1)
        .with_for_update(skip_locked=True, of=JobRow)
        .execution_options(populate_existing=True)
    )
    if job is None:
        return None
    return job, _devices(job, runner, held)


def _kept(session: Session, project: UUID, runner_class: str, at: datetime) -> tuple[UUID, RunnerRow] | None:
    """Return for which gate or recording of a class a runner is kept, and which; None for none."""
    due = (
        JobRow.project_id == project,
        JobRow.runner_class == runner_class,
        JobRow.state == JobState.PENDING,
        JobRow.kind != JobKind.SERVE,
        JobRow.is_wanted,
        JobRow.needs.is_not(None),
    )
    long_ago = at - timedelta(seconds=turns.WAITED_SECONDS)
    if session.scalar(select(JobRow.id).where(*due, JobRow.due_at <= long_ago).limit(1)) is None:
        return None
    waiting = (
        select(JobRow)
        .join(ReleaseRow, ReleaseRow.id == JobRow.release_id, isouter=True)
        .where(*due, JobRow.due_at <= at)
        .order_by(*_order(at))
    )
    return turns.kept(session, session.scalars(waiting.limit(turns.MOST_WAITING)).all(), at)


def _order(at: datetime) -> tuple[ColumnElement[Any], ...]:
    """Return who comes first, and within a kind whose turn was longest ago."""
    other = aliased(JobRow)
    turn = (
        select(func.max(other.claimed_at))
        .where(
            other.project_id == JobRow.project_id,
            other.runner_class == JobRow.runner_class,
            other.queue == JobRow.queue,
        )
        .scalar_subquery()
    )
    return _rank(at), turn.nulls_first(), JobRow.due_at.asc()


def _devices(job: JobRow, runner: RunnerRow, held: Reserved) -> list[int]:
    """Return the accelerators that a job gets; one that its runner takes again, those on which its engine may run."""
    if job.needs is None:
        return []
    needs = Needs.model_validate(job.needs)
    if job.runner_id == runner.id and job.state == JobState.CLAIMED and job.devices:
        others = set(range(len(held.fingerprint.accelerators))) - set(job.devices)
        if (had := fitting.positions(needs, held.fingerprint, held.devices | others)) is not None:
            return had
    return held.room(needs) or []


def _rank(at: datetime) -> ColumnElement[int]:
    is_serve = JobRow.kind == JobKind.SERVE
    kind = case(
        (and_(is_serve, is_served_for()), GATES - 1),
        (and_(is_serve, ReleaseRow.phase == Phase.PROMOTED), 0),
        (and_(is_serve, ReleaseRow.phase == Phase.SUPERSEDED), 1),
        (is_serve, GATES - 1),
        (JobRow.kind == JobKind.RECORD, GATES + 2),
        (JobRow.release_id.is_(None), GATES + 1),
        else_=GATES,
    )
    older = func.floor(func.extract("epoch", at - JobRow.created_at) / AGE_SECONDS)
    return case((is_serve, kind), else_=func.greatest(GATES, kind - older))


def _may_take(session: Session, runner: RunnerRow, at: datetime) -> ColumnElement[bool]:
    """The last slot of a runner is for what is live or was: a rollback must not wait for a gate to end.

    So is all room while jobs of it end for that. The first to end would take its place again before the last has.
    What the project's quota holds back is for neither: traffic does not stop for want of it.
    """
    reached = quotas.exhausted(session, runner.project_id, at, is_claiming=True)
    is_kept = runners.has_only_kept_slots(session, runner)
    if reached.jobs or is_kept or _is_making_room(session, runner, at):
        # What another replica serves for meanwhile can wait; who asks for a rollback cannot.
        urgent = and_(is_accepted(), ~is_served_for()) if is_kept else is_accepted()
        # What nobody wants any more is taken to be ended, which frees what it holds.
        return and_(JobRow.kind == JobKind.SERVE, or_(urgent, JobRow.is_wanted.is_(False)))
    return JobRow.kind == JobKind.SERVE if reached.runner_seconds else true()


def is_accepted() -> ColumnElement[bool]:
    """Tell of a serve job whether its bundle is live on its target or was, whichever release it was made for."""
    accepted = aliased(ReleaseRow)
    return (
        select(accepted.id)
        .where(
            accepted.target_id == JobRow.target_id,
            accepted.bundle == JobRow.bundle,
            accepted.phase.in_([Phase.PROMOTED, Phase.SUPERSEDED]),
        )
        .exists()
    )


def is_served_for() -> ColumnElement[bool]:
    """Tell of a serve job whether it is to take the place of a replica that was ready when it was last heard of."""
    before = aliased(JobRow)
    return (
        select(before.id)
        .where(
            before.id == JobRow.replaces,
            before.state == JobState.CLAIMED,
            before.is_wanted,
            before.lease_until >= func.clock_timestamp(),
            before.replica["state"].as_string() == ReplicaState.READY,
        )
        .exists()
    )


def can_wait(session: Session, job: JobRow) -> bool:
    """Tell whether another replica serves meanwhile for what a job is to boot."""
    if job.replaces is None:
        return False
    return session.scalar(select(JobRow.id).where(JobRow.id == job.id, is_served_for())) is not None


def _is_making_room(session: Session, runner: RunnerRow, at: datetime) -> bool:
    urgent = aliased(JobRow)
    ending = (
        select(JobRow.id)
        .join(urgent, urgent.id == JobRow.preempted_for)
        .where(
            JobRow.runner_id == runner.id,
            JobRow.state == JobState.CLAIMED,
            JobRow.lease_until >= at,
            urgent.state == JobState.PENDING,
            urgent.is_wanted,
        )
    )
    return session.scalar(ending.limit(1)) is not None
