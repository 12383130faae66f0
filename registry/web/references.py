"""A golden reference as a page: what was answered, by which bundle, recorded by whom, and where it counts."""

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import Response

from registry import documents, targets
from registry.api.deps import SessionDep
from registry.web.releases import MOST_TARGETS
from registry.web.rendering import PageRoute, render
from registry.web.visitors import VisitorDep

MOST_CASES = 200
"""Prompts on the page; the rest is counted."""
MOST_TEXT = 2000
"""Characters of an answer that are shown."""

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/references/{digest}")
def reference_page(
    digest: Annotated[str, Path(pattern=r"^(sha256:)?[0-9a-f]{8,64}$")], actor: VisitorDep, session: SessionDep
) -> Response:
    """Show a reference with its answers."""
    registered = documents.get(session, actor.project_id, "reference", digest)
    found = documents.load_reference(session, actor.project_id, registered.digest)
    suite = documents.load_suite(session, actor.project_id, found.suite)
    asked = {one.id: one.messages for one in getattr(suite, "prompts", ())}
    cases = [
        (one, asked.get(one.prompt, []), "".join(token.text for token in one.output)[:MOST_TEXT])
        for one in found.recordings[:MOST_CASES]
    ]
    return render(
        "reference.html",
        actor=actor,
        section="suites",
        reference=found,
        registered=registered,
        suite=suite,
        cases=cases,
        more=len(found.recordings) - len(cases),
        in_force=targets.bearing(session, actor.project_id, found.suite, registered.digest, limit=MOST_TARGETS),
        names=documents.names(session, actor.project_id, [found.bundle, found.suite]),
    )
