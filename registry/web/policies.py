"""A policy as a page: which gates with which limits, how traffic moves, and what takes it back."""

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import Response

from registry import documents
from registry.api.deps import SessionDep
from registry.api.pages import Cursor
from registry.web.rendering import PageRoute, render
from registry.web.suites import listed
from registry.web.visitors import VisitorDep
from schemas.policy import SuiteRule
from schemas.words import condition, limits

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/policies")
def policies_page(actor: VisitorDep, session: SessionDep, after: Cursor) -> Response:
    """List policies, newest first."""
    return render("documents.html", actor=actor, **listed(session, actor.project_id, "policy", after))


@router.get("/policies/{digest}")
def policy_page(
    digest: Annotated[str, Path(pattern=r"^(sha256:)?[0-9a-f]{8,64}$")], actor: VisitorDep, session: SessionDep
) -> Response:
    """Show a policy."""
    named = documents.resolve(session, actor.project_id, "policy", digest)
    policy = documents.load_policy(session, actor.project_id, named)
    return render(
        "policy.html",
        actor=actor,
        section="policies",
        policy=policy,
        registered=documents.get(session, actor.project_id, "policy", named),
        gates=[(rule.gate, limits(rule)) for rule in policy.gates],
        names=documents.names(
            session, actor.project_id, [rule.suite for rule in policy.gates if isinstance(rule, SuiteRule)]
        ),
        conditions=[condition(one) for one in policy.canary.stop_conditions],
    )
