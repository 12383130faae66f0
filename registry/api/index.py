"""Which route answers a request, found by the form of its address instead of by asking all of them in turn."""

from collections import defaultdict
from collections.abc import Sequence

from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send


class Index:
    """Answers as a router does; the router itself does so where no route takes an address with this method.

    Routes of one form keep their order. Mounts and routes whose parameters may hold slashes are left to the router, so
    it must have them after all others.
    """

    def __init__(self, router: Router) -> None:
        """Take the routes of a router that gets no more of them."""
        self._router = router
        by_form: dict[tuple[int, str], list[Route]] = defaultdict(list)
        for route in router.routes:
            if isinstance(route, Route) and not _may_hold_slashes(route):
                parts = route.path.split("/")
                by_form[len(parts), _first_fixed(parts)].append(route)
        self._by_form: dict[tuple[int, str], Sequence[Route]] = dict(by_form)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            parts = scope["path"].split("/")
            for route in self._by_form.get((len(parts), _first_fixed(parts)), ()):
                match, of_route = route.matches(scope)
                if match is Match.FULL:
                    scope["router"] = self._router
                    scope.update(of_route)
                    await route.handle(scope, receive, send)
                    return
        await self._router.app(scope, receive, send)


def _may_hold_slashes(route: Route) -> bool:
    return any(":" in part for part in route.path.split("/"))


def _first_fixed(parts: Sequence[str]) -> str:
    """Return the part that tells what an address is about: the second of `/v1/bundles/…`, the first of another one."""
    return parts[2] if len(parts) > 2 and parts[1] == "v1" else parts[1] if len(parts) > 1 else ""
