"""Suites by what uses them: the policies whose gates run one."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from registry.tables import DocumentRow, ProjectDocumentRow
from schemas.common import strict_json
from schemas.policy import Policy, SuiteRule


@dataclass(frozen=True, slots=True)
class Use:
    """A policy that names a suite, and the gates that do so in it."""

    digest: str
    name: str
    created_at: datetime
    created_by: str
    gates: list[str]


def used_by(session: Session, project: UUID, suite: str, *, limit: int) -> list[Use]:
    """Return the policies of a project whose gates run a suite, newest first."""
    names = func.convert_from(DocumentRow.body, "UTF8").contains(suite, autoescape=True)
    rows = session.execute(
        select(ProjectDocumentRow, DocumentRow.body)
        .join(DocumentRow, DocumentRow.digest == ProjectDocumentRow.digest)
        .where(
            ProjectDocumentRow.project_id == project,
            ProjectDocumentRow.kind == "policy",
            ProjectDocumentRow.deleted_at.is_(None),
            names,
        )
        .order_by(ProjectDocumentRow.id.desc())
        .limit(limit)
    )
    found = []
    for member, body in rows:
        policy = Policy.model_validate(strict_json(body))
        gates = [str(rule.gate) for rule in policy.gates if isinstance(rule, SuiteRule) and rule.suite == suite]
        if gates:  # a description may name it, too
            found.append(Use(member.digest, member.name, member.created_at, member.created_by, gates))
    return found
