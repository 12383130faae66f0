"""A policy as a page: which gates with which limits, how traffic moves, and what takes it back."""

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import Response

from registry import documents
from registry.api.deps import SessionDep
from registry.web.rendering import PageRoute, render
from registry.web.visitors import VisitorDep
from schemas.policy import GateRule, StopCondition, TtftCondition

router = APIRouter(include_in_schema=False, route_class=PageRoute)


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
        section="releases",
        policy=policy,
        registered=documents.get(session, actor.project_id, "policy", named),
        gates=[(rule.gate, _limits(rule)) for rule in policy.gates],
        conditions=[_condition(one) for one in policy.canary.stop_conditions],
    )


def _limits(rule: GateRule) -> list[tuple[str, str]]:
    """Return the limits of a gate, each as name and value."""
    limits = rule.model_dump(mode="json", exclude={"gate"}, exclude_none=True)
    return [(name, str(value)) for name, value in limits.items()]


def _condition(condition: StopCondition) -> str:
    if isinstance(condition, TtftCondition):
        return f"TTFT p{float(condition.percentile) * 100:g} above {condition.max_ms} ms"
    return f"error ratio above {condition.max_ratio}"
