"""All pages."""

from fastapi import APIRouter

from registry.web import aliases, comparison, inventory, policies, releases, results, suites, visitors
from registry.web.rendering import static

__all__ = ["router", "static"]

router = APIRouter(include_in_schema=False)
for part in (
    visitors.router,
    releases.router,
    results.router,
    comparison.router,
    inventory.router,
    policies.router,
    suites.router,
    aliases.router,
):
    router.include_router(part)
