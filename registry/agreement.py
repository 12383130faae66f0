"""What is kept beside the log and decides who may do what, and where: it must be what the log says.

The project itself, tokens, targets and the splits in force, and what people said of runners, as the entries of a
project go by while they are verified.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from gates.evidence import Record
from registry import adoption, auth, draining, evidence, projects, targets
from registry.tables import ProjectRow, ReleaseRow, RunnerRow, TargetRow, TokenRow
from schemas.common import format_instant
from schemas.evidence import Fault, Kind

AROUND = timedelta(minutes=1)
"""How far apart an act and its entry may be where an older entry does not say when the act was."""


@dataclass(slots=True)
class Agreement:
    """Takes every entry of a project, and compares what they add up to with what is kept beside them."""

    project: UUID
    _project: dict[str, Any] | None = None
    """What the last entry says that the project is."""
    _adopted: int = 0
    """Up to which version the project's entries say that all has been recorded."""
    _again: list[int] = field(default_factory=list)
    """Positions of entries by which the service took over anew what had been recorded before."""
    _since: int | None = None
    """Sequence of the first such entry: from then on, everything that counts here is written with its entry."""
    _tokens: dict[str, dict[str, Any]] = field(default_factory=dict)
    _found: dict[str, dict[str, Any]] = field(default_factory=dict)
    _revoked: dict[str, dict[str, Any]] = field(default_factory=dict)
    _targets: dict[UUID, dict[str, Any]] = field(default_factory=dict)
    _moved: dict[str, tuple[int, list[Any]]] = field(default_factory=dict)
    """Stream of a release → the last entry that moved its target's traffic: its sequence, and the split from then."""
    _exact_since: float = math.inf
    """Sequence of the first entry of a version that counts each change of a target once."""
    _counted: set[UUID] = field(default_factory=set)
    """Targets made since then: all that they count is in the log."""
    _referred: Counter[UUID] = field(default_factory=Counter)
    """Target → how often a reference was put in force on it since then."""
    _runners: dict[str, list[tuple[str, str, dict[str, Any]]]] = field(default_factory=dict)
    """Stream of a runner → (kind, who, what) of its drains since it last began to take jobs, or of the end of them."""

    def take(self, record: Record, claim: Mapping[str, Any] | None) -> None:
        """Take the next entry. One that cannot be read is a fault already, and what it said is missed here."""
        if claim is None:
            return
        body: dict[str, Any] = claim["body"]
        match record.kind:
            case Kind.PROJECT_SET:
                self._project_set(record, body)
            case Kind.TOKEN_CREATED:
                self._tokens[str(body.get("token"))] = body
            case Kind.TOKEN_FOUND:
                self._found[str(body.get("token"))] = body
            case Kind.TOKEN_REVOKED:
                self._revoked[str(body.get("token"))] = body | {"stated_at": claim["stated_at"]}
            case Kind.REFERENCE_SET if self.counts(record):
                with suppress(ValueError):  # as of a target that was created
                    self._referred[UUID(record.stream.removeprefix("target/"))] += 1
            case Kind.RUNNER_DRAINED | Kind.RUNNER_UNDRAINED:
                self._runner(record, body | {"stated_at": claim["stated_at"]})
            case Kind.TARGET_CREATED:
                self._target_created(record, body | {"created_at": claim["stated_at"]})
            case Kind.TRAFFIC_SHIFTED | Kind.TRAFFIC_RESTORED:
                self._moved[record.stream] = (record.sequence, body.get("desired", []))
            case _:
                pass

    def counts(self, record: Record) -> bool:
        """Tell whether what an entry changed was counted beside it. Streams of projects come before those that ask."""
        return self._since is not None and record.sequence > self._since

    def _project_set(self, record: Record, body: dict[str, Any]) -> None:
        self._project, self._since = body, self._since or record.sequence
        if record.actor == adoption.BY and adoption.version(body) <= self._adopted:
            self._again.append(record.position)
        self._adopted = max(self._adopted, adoption.version(body))
        if self._adopted >= projects.ADOPTED:
            self._exact_since = min(self._exact_since, record.sequence)

    def _target_created(self, record: Record, said: dict[str, Any]) -> None:
        with suppress(ValueError):  # a stream that is no target's says nothing of one
            identity = UUID(record.stream.removeprefix("target/"))
            self._targets[identity] = said
            if record.sequence > self._exact_since:
                self._counted.add(identity)

    def _runner(self, record: Record, body: dict[str, Any]) -> None:
        said = self._runners.setdefault(record.stream, [])
        if record.kind == Kind.RUNNER_UNDRAINED or (said and said[-1][0] == Kind.RUNNER_UNDRAINED):
            said.clear()
        said.append((record.kind, record.actor, body))

    def close(self, session: Session, changes: Mapping[UUID, int]) -> Iterator[Fault]:
        """Yield what is otherwise than the log says. `changes` has target → how often its releases changed it."""
        yield from self._project_faults(session)
        yield from self._token_faults(session)
        yield from self._target_faults(session, changes)
        yield from self._runner_faults(session)

    def _project_faults(self, session: Session) -> Iterator[Fault]:
        of, row = projects.stream(self.project), session.get(ProjectRow, self.project)
        for position in self._again:
            yield Fault(stream=of, position=position, problem="the project was taken over anew: its entries were away")
        if row is None or self._project is None:
            problem = "the project is missing" if row is None else "the project has no entry"
            yield Fault(stream=of, position=0, problem=problem)
            return
        for name, value in projects.facts(row).items():
            if _written(value) != self._project.get(name):
                yield Fault(stream=of, position=0, problem=f"the project has another {name} than its log says")

    def _token_faults(self, session: Session) -> Iterator[Fault]:
        of = projects.stream(self.project)
        rows = {
            str(row.id): row
            for row in session.scalars(
                select(TokenRow).where(TokenRow.project_id == self.project).order_by(TokenRow.id)
            )
        }
        for identity in sorted(rows.keys() | self._tokens.keys()):
            said, row = self._tokens.get(identity), rows.get(identity)
            if row is None:
                # A token that is gone lets nobody in; who had it is in the log.
                yield Fault(stream=of, position=0, problem=f"the token {identity} is missing")
            elif said is None:
                yield Fault(stream=of, position=0, problem=f"the token {identity} ({row.name}) has no entry")
            else:
                for name in _differing(said | self._found.get(identity, {}), self._revoked.get(identity), row):
                    problem = f"the token {identity} has another {name} than its log says"
                    yield Fault(stream=of, position=0, problem=problem)

    def _target_faults(self, session: Session, changes: Mapping[UUID, int]) -> Iterator[Fault]:
        rows = session.scalars(select(TargetRow).where(TargetRow.project_id == self.project).order_by(TargetRow.id))
        found = {row.id: row for row in rows}
        moved = self._moved_by_target(session)
        for identity in sorted(found.keys() | self._targets.keys()):
            stream, said, row = targets.stream(identity), self._targets.get(identity), found.get(identity)
            if row is None or said is None:
                problem = "the target has no entry" if said is None else "its target is missing"
                yield Fault(stream=stream, position=0, problem=problem)
                continue
            kept = {"name": row.name, "runner_class": row.runner_class, "gateway": row.gateway}
            for name, value in (kept | {"created_at": format_instant(row.created_at)}).items():
                if value != said.get(name):
                    yield Fault(stream=stream, position=0, problem=f"its {name} is not the one that was signed")
            if row.applied != moved.get(row.id, []):
                yield Fault(stream=stream, position=0, problem="its split is not the one that its releases' logs say")
            counted = 1 + changes.get(row.id, 0) + self._referred[row.id]
            # Of a target that an older version made, not all that it counted has an entry that is counted here.
            if row.generation < counted or (row.generation > counted and identity in self._counted):
                is_off = "below" if row.generation < counted else "above"
                problem = f"its generation is {row.generation}, {is_off} the {counted} that its log counts"
                yield Fault(stream=stream, position=0, problem=problem)

    def _runner_faults(self, session: Session) -> Iterator[Fault]:
        """A runner drains, or takes jobs, as people said last; of one that nobody spoke of, nothing is kept."""
        rows = session.scalars(select(RunnerRow).where(RunnerRow.project_id == self.project).order_by(RunnerRow.id))
        for row in rows:
            stream = draining.stream(row.id)
            for name in _otherwise(self._runners.pop(stream, []), row):
                yield Fault(stream=stream, position=0, problem=f"the runner has another {name} than its log says")
        for stream in sorted(self._runners):
            yield Fault(stream=stream, position=0, problem="its runner is missing")

    def _moved_by_target(self, session: Session) -> dict[UUID, list[Any]]:
        """Return target → the split that the last entry of its releases put in force."""
        last: dict[UUID, tuple[int, list[Any]]] = {}
        query = select(ReleaseRow.id, ReleaseRow.target_id).where(ReleaseRow.project_id == self.project)
        for release, target in session.execute(query.execution_options(yield_per=1000)):
            told = self._moved.get(evidence.release_stream(release))
            if told is not None and told[0] > last.get(target, (0, []))[0]:
                last[target] = told
        return {target: split for target, (_, split) in last.items()}


def _differing(said: Mapping[str, Any], revoked: Mapping[str, Any] | None, row: TokenRow) -> Iterator[str]:
    """Yield what a token has otherwise than its entries say."""
    kept = {
        "name": row.name,
        "role": row.role,
        "targets": row.targets,
        "expires_at": row.expires_at,
        "created_at": row.created_at,
        "bound": auth.bound(row),
        "made_by": None if row.made_by is None else str(row.made_by),
    }
    names = {"bound": "secret", "made_by": "maker"}
    yield from (names.get(name, name) for name, value in kept.items() if said.get(name) != _written(value))
    ended = said.get("revoked_at") or (revoked and revoked.get("revoked_at", revoked["stated_at"]))
    if ended != _written(row.revoked_at):
        yield "end"


def _otherwise(said: list[tuple[str, str, dict[str, Any]]], row: RunnerRow) -> Iterator[str]:
    """Yield which columns of a runner are otherwise than its entries say."""
    meant: dict[str, Any] = dict.fromkeys(_SAID)
    since: dict[str, Any] = {}
    began = None
    if said and said[-1][0] == Kind.RUNNER_UNDRAINED:
        _, who, since = said[-1]
        meant |= {"undrained_by": who, "undrain_reason": since.get("reason")}
        began = "undrained_at"
    elif said:
        # The first entry says who and why; a deadline takes the place of the one before.
        (_, who, since), (_, _, last) = said[0], said[-1]
        meant |= {"drained_by": who, "drain_reason": since["reason"], "empty_at": last.get("empty_at")}
        began = "drained_at"
    for name, value in meant.items():
        kept = getattr(row, name)
        if not (_is_then(kept, since) if name == began else _written(kept) == value):
            yield name


_SAID = (
    "drained_at",
    "drained_by",
    "drain_reason",
    "empty_at",
    "undrained_at",
    "undrained_by",
    "undrain_reason",
)


def _is_then(at: datetime | None, said: Mapping[str, Any]) -> bool:
    """Tell whether something was when its entry says: older entries say only when they were made, right after it."""
    if at is None or "since" in said:
        return bool(_written(at) == said.get("since"))
    return abs(datetime.fromisoformat(said["stated_at"]) - at) <= AROUND


def _written(value: Any) -> Any:
    """Return a column's value as an entry has it."""
    return format_instant(value) if isinstance(value, datetime) else value
