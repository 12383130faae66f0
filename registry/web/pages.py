"""All pages."""

from fastapi import APIRouter

from registry.web import (
    aliases,
    comparison,
    inventory,
    journal,
    policies,
    references,
    releases,
    results,
    runs,
    suites,
    visitors,
)
from registry.web.rendering import static

__all__ = ["router", "static"]

router = APIRouter(include_in_schema=False)
for part in (
    visitors.router,
    releases.router,
    results.router,
    runs.router,
    comparison.router,
    inventory.router,
    policies.router,
    suites.router,
    references.router,
    journal.router,
    aliases.router,
):
    router.include_router(part)
