"""What is kept beside the log and decides who may do what, and where: it must be what the log says.

Tokens, targets and the splits in force, as the entries of a project go by while they are verified.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from gates.evidence import Record
from registry import evidence, targets
from registry.tables import ReleaseRow, TargetRow, TokenRow
from schemas.common import format_instant
from schemas.evidence import Fault, Kind


@dataclass(slots=True)
class Agreement:
    """Takes every entry of a project, and compares what they add up to with what is kept beside them."""

    project: UUID
    _tokens: dict[str, dict[str, Any]] = field(default_factory=dict)
    _revoked: set[str] = field(default_factory=set)
    _targets: dict[UUID, dict[str, Any]] = field(default_factory=dict)
    _moved: dict[str, tuple[int, list[Any]]] = field(default_factory=dict)
    """Stream of a release → the last entry that moved its target's traffic: its sequence, and the split from then."""

    def take(self, record: Record, claim: Mapping[str, Any] | None) -> None:
        """Take the next entry. One that cannot be read is a fault already, and what it said is missed here."""
        if claim is None:
            return
        body: dict[str, Any] = claim["body"]
        match record.kind:
            case Kind.TOKEN_CREATED:
                self._tokens[str(body.get("token"))] = body
            case Kind.TOKEN_REVOKED:
                self._revoked.add(str(body.get("token")))
            case Kind.TARGET_CREATED:
                with suppress(ValueError):  # a stream that is no target's says nothing of one
                    identity = UUID(record.stream.removeprefix("target/"))
                    self._targets[identity] = body | {"created_at": claim["stated_at"]}
            case Kind.TRAFFIC_SHIFTED | Kind.TRAFFIC_RESTORED:
                self._moved[record.stream] = (record.sequence, body.get("desired", []))
            case _:
                pass

    def close(self, session: Session) -> Iterator[Fault]:
        """Yield what is otherwise than the log says."""
        yield from self._token_faults(session)
        yield from self._target_faults(session)

    def _token_faults(self, session: Session) -> Iterator[Fault]:
        of = f"project/{self.project}"
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
                for name in _differing(said, identity in self._revoked, row):
                    problem = f"the token {identity} has another {name} than its log says"
                    yield Fault(stream=of, position=0, problem=problem)

    def _target_faults(self, session: Session) -> Iterator[Fault]:
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

    def _moved_by_target(self, session: Session) -> dict[UUID, list[Any]]:
        """Return target → the split that the last entry of its releases put in force."""
        last: dict[UUID, tuple[int, list[Any]]] = {}
        query = select(ReleaseRow.id, ReleaseRow.target_id).where(ReleaseRow.project_id == self.project)
        for release, target in session.execute(query.execution_options(yield_per=1000)):
            told = self._moved.get(evidence.release_stream(release))
            if told is not None and told[0] > last.get(target, (0, []))[0]:
                last[target] = told
        return {target: split for target, (_, split) in last.items()}


def _differing(said: Mapping[str, Any], is_revoked: bool, row: TokenRow) -> Iterator[str]:
    """Yield what a token has otherwise than its entries say."""
    kept = {
        "name": row.name,
        "role": row.role,
        "targets": row.targets,
        "expires_at": None if row.expires_at is None else format_instant(row.expires_at),
    }
    yield from (name for name, value in kept.items() if said.get(name) != value)
    if is_revoked != (row.revoked_at is not None):
        yield "end"
