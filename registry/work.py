"""What is kept of jobs beside the log: what a release's jobs measure and serve, and where its replicas answer.

Which job is whose turn, and who holds it until when, is a queue: it decides when something is done, never what.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain
from typing import Any
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from gates.evidence import Record
from registry import evidence, jobs, runs
from registry.tables import DocumentRow, JobRow, ReleaseRow, TargetRow
from schemas.common import format_instant, strict_json
from schemas.evidence import Fault, Kind
from schemas.runner import JobKind, JobState, ReplicaState

AROUND = timedelta(minutes=1)
"""How long after its entry was stated a replica's state may begin: the row is written with it."""
HELD = 500


@dataclass(slots=True)
class _Job:
    """What the log says of a job."""

    stream: str
    about: Mapping[str, str]
    gates: set[str] = field(default_factory=set)
    replica: Mapping[str, Any] | None = None
    stated_at: str = ""


@dataclass(slots=True)
class Work:
    """Takes a project's entries, and compares what they say of jobs with what is kept of those."""

    project: UUID
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _set: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Job that recorded a reference → what it must have then, by column."""
    _policies: dict[str, list[tuple[str, str | None]]] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)
    _cancelled: set[str] = field(default_factory=set)
    _asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Run that belongs to no release → what was asked for."""

    def take(self, record: Record, claim: Mapping[str, Any] | None, about: Mapping[str, str]) -> None:
        """Take the next entry, with name → digest of what its statement is about."""
        if record.kind == Kind.RUN_ENDED:
            self._ended.add(record.stream.removeprefix("run/"))
        if record.kind == Kind.RUN_CANCELLED:
            self._cancelled.add(record.stream.removeprefix("run/"))
        if record.kind == Kind.RUN_ASKED and claim is not None:
            self._asked[record.stream.removeprefix("run/")] = claim["body"]
        identity = record.act.removeprefix("job:").partition(":")[0] if record.act.startswith("job:") else None
        if claim is None or identity is None:
            return
        if record.kind == Kind.REFERENCE_SET:
            said = claim["body"]
            self._set[identity] = {
                "reference": said.get("reference"),
                "bundle": said.get("bundle"),
                "suites": [said.get("suite")],
                "created_by": record.actor,
            }
            return
        told = self._jobs.get(identity)
        if told is None:
            told = self._jobs[identity] = _Job(record.stream, about)
        elif record.kind in (Kind.GATE_RECORDED, Kind.REPLICA_CHANGED):
            told.about = about
        if record.kind == Kind.GATE_RECORDED:
            told.gates.add(str(claim["body"].get("gate")))
        if record.kind == Kind.REPLICA_CHANGED:
            told.replica, told.stated_at = claim["body"].get("replica"), claim["stated_at"]

    def close(self, session: Session) -> Iterator[Fault]:
        """Yield what is otherwise than the log says."""
        rows = session.execute(
            select(JobRow, ReleaseRow, TargetRow.runner_class, TargetRow.name)
            .outerjoin(ReleaseRow, ReleaseRow.id == JobRow.release_id)
            .outerjoin(TargetRow, TargetRow.id == func.coalesce(ReleaseRow.target_id, JobRow.target_id))
            .where(JobRow.project_id == self.project)
            .order_by(JobRow.id)
            .execution_options(yield_per=HELD)
        )
        seen: set[str] = set()
        for job, release, runner_class, target in rows:
            seen.add(str(job.id))
            stream = evidence.release_stream(job.release_id) if job.release_id else f"run/{job.id}"
            problems = self._problems(session, job, stream, release, runner_class)
            for problem in chain(problems, self._unlike_what_was_asked(job, target)):
                yield Fault(stream=stream, position=0, problem=f"the job {job.id} {problem}")
            session.expunge(job)
        for identity, told in sorted(self._jobs.items()):
            yield Fault(stream=told.stream, position=0, problem=f"the job {identity} is missing")
        for identity in sorted(self._set.keys() | (self._ended | self._cancelled | self._asked.keys()) - seen):
            yield Fault(stream=f"run/{identity}", position=0, problem=f"the job {identity} is missing")

    def _problems(
        self, session: Session, job: JobRow, stream: str, release: ReleaseRow | None, runner_class: str | None
    ) -> Iterator[str]:
        told = self._jobs.pop(str(job.id), None)
        if told is not None and told.stream != stream:
            yield "is of another release than its log says"
        if job.release_id is not None and release is None:
            yield "is of a release that is missing"
        meant = self._meant(job, told, release, runner_class)
        for name, value in meant.items():
            if getattr(job, name) != value:
                yield f"has another {name} than its log says"
        if job.kind == JobKind.EVALUATE and job.suites != self._suites(session, job):
            yield "has other suites than its gates have in its policy"
        if told is not None and not told.gates <= set(job.gates):
            yield "has measured gates that it does not have"
        is_run = job.release_id is None and job.kind != JobKind.SERVE
        if (is_run and job.state == JobState.DONE) != (str(job.id) in self._ended):
            yield "has ended otherwise than its log says"
        if is_run and not _is_cancelled_as_told(job, is_told=str(job.id) in self._cancelled):
            yield "is cancelled, or is not, otherwise than its log says"
        if _is_another_replica(job.replica, told):
            yield "has another replica than its log says"

    def _unlike_what_was_asked(self, job: JobRow, target: str | None) -> Iterator[str]:
        """Yield what a job has otherwise than somebody asked for. A release's jobs follow from its log."""
        said = self._asked.get(str(job.id))
        if said is None:
            if job.release_id is None:
                yield "was asked for by nobody: it has no entry"
            return
        if job.release_id is not None:
            yield "is of a release, and was asked for without one"
        for name, value in runs.facts(job, target).items():
            kept = format_instant(value) if isinstance(value, datetime) else value
            if (str(kept) if isinstance(kept, UUID) else kept) != said.get(name):
                yield f"has another {name} than its log says"

    def _suites(self, session: Session, job: JobRow) -> list[Any]:
        """Return the suites of a job's gates; its own where there is no policy to tell, which is a fault elsewhere."""
        if job.policy is not None and job.policy not in self._policies:
            body = session.scalar(select(DocumentRow.body).where(DocumentRow.digest == job.policy))
            with suppress(ValueError, LookupError, TypeError):
                rules = strict_json(body)["gates"] if body is not None else []
                self._policies[job.policy] = [(rule["gate"], rule.get("suite")) for rule in rules]
        if job.policy not in self._policies:
            return list(job.suites)
        return sorted({suite for gate, suite in self._policies[job.policy] if suite and gate in job.gates})

    def _meant(
        self, job: JobRow, told: _Job | None, release: ReleaseRow | None, runner_class: str | None
    ) -> dict[str, Any]:
        """Return what a job must have, by column."""
        meant: dict[str, Any] = {"reference": None}
        if job.kind != JobKind.EVALUATE:
            meant["gates"] = []
        if job.kind == JobKind.SERVE:
            meant["references"] = {}
        if told is not None:
            meant |= {"bundle": told.about.get("bundle", job.bundle), "policy": told.about.get("policy")}
        if job.kind == JobKind.RECORD:
            meant |= {"policy": None, "runner_class": runner_class}
        if release is not None:
            meant |= {"bundle": release.bundle, "policy": release.policy, "runner_class": runner_class}
            meant |= {"target_id": release.target_id if job.kind == JobKind.SERVE else None, "created_by": "controller"}
            if job.kind == JobKind.EVALUATE:
                meant["references"] = release.references
            else:
                meant["suites"] = []
        return meant | self._set.pop(str(job.id), {})


def _is_cancelled_as_told(job: JobRow, *, is_told: bool) -> bool:
    """Tell whether a run is wanted, and ended, as the log says: what is cancelled is not wanted, and never done."""
    if not is_told:
        return job.is_wanted and job.state != JobState.CANCELLED
    return not job.is_wanted and job.state in (JobState.CLAIMED, JobState.CANCELLED)


def _is_another_replica(kept: Any, told: _Job | None) -> bool:
    """Tell whether a job shows a replica that its runner did not report, other than one that is over."""
    if kept is None or told is None or told.replica is None:
        return (kept is None) != (told is None or told.replica is None)
    with suppress(AttributeError, TypeError, ValueError):  # it is written otherwise than replicas are
        shown = {name: value for name, value in kept.items() if name != "since"}
        if shown == {"state": ReplicaState.STOPPED.value, "cause": jobs.UNTOLD}:
            return False  # the service keeps of one whose end its runner never told that it is over
        since = datetime.fromisoformat(kept.get("since")) - datetime.fromisoformat(told.stated_at)
        return shown != told.replica or not timedelta(0) <= since <= AROUND
    return True
