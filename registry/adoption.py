"""What older versions kept without an entry is recorded once, as it is found: from then on it cannot change unseen.

A project without an entry of its own was made by such a version. In one transaction the service records what the
project is, and which secret each token has whose signed entry does not say so. After that the project has its entry,
and nothing more is ever taken over: a token that nobody's entry tells of stays one that `evidence verify` names.
"""

from collections.abc import Sequence
from uuid import UUID

import structlog
from sqlalchemy import Text, cast, exists, func, select
from sqlalchemy.orm import Session

from registry import auth, evidence, projects
from registry.service import Service
from registry.tables import EntryRow, ProjectRow, TokenRow
from schemas.evidence import Kind, TokenFound

BY = "service"

log = structlog.get_logger(__name__)


def adopt(service: Service) -> None:
    """Record what projects keep that have no entry of their own."""
    with service.database.reading() as session:
        found = _unrecorded(session)
    for project in found:
        with service.database.transaction() as session:
            auth.hold_project(session, project)
            # Another process may have been first.
            if project in _unrecorded(session):
                _adopt(session, service, session.get_one(ProjectRow, project))


def _unrecorded(session: Session) -> Sequence[UUID]:
    recorded = exists().where(
        EntryRow.stream == func.concat("project/", cast(ProjectRow.id, Text)), EntryRow.kind == Kind.PROJECT_SET
    )
    return session.scalars(select(ProjectRow.id).where(~recorded).order_by(ProjectRow.id)).all()


def _adopt(session: Session, service: Service, project: ProjectRow) -> None:
    projects.record(session, service, project, by=BY, was_found=True)
    said = {
        str(body["token"])
        for row in evidence.read(session, projects.stream(project.id))
        if row.kind == Kind.TOKEN_CREATED and "bound" not in (body := evidence.claim_of(row.envelope)["body"])
    }
    tokens = session.scalars(select(TokenRow).where(TokenRow.project_id == project.id).order_by(TokenRow.id))
    found = [token for token in tokens if str(token.id) in said]
    for token in found:
        body = TokenFound(
            token=token.id, created_at=token.created_at, revoked_at=token.revoked_at, bound=auth.bound(token)
        )
        auth.record_token(session, service, token, f"token:{token.id}:found", BY, Kind.TOKEN_FOUND, body)
    log.info("project_adopted", project=project.name, tokens=len(found))
