"""How pages are made: templates that escape, headers that let nothing foreign in, and words for numbers."""

import re
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from gates.difference import shown
from gates.files.refusal import shown as printable
from registry.api.routes import Route
from schemas.failures import FAILURES
from schemas.problems import NotFound, Problem
from schemas.release import Phase
from schemas.short import apart, span
from schemas.stories import job_state, label

PHASE_TONES = {
    Phase.PROMOTED: "good",
    Phase.REJECTED: "bad",
    Phase.ROLLED_BACK: "bad",
    Phase.CANARY: "warn",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
UNITS = ("B", "kB", "MB", "GB", "TB")

static = StaticFiles(directory=Path(__file__).parent / "static")


def short(digest: str) -> str:
    """Return twelve digits of a digest: enough for a person, and for the command line."""
    return digest.removeprefix("sha256:")[:12]


def amount(size: float) -> str:
    """Return bytes in a unit that a person reads."""
    for unit in UNITS[:-1]:
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {UNITS[-1]}"


def percent(weight_bp: int | None) -> str:
    """Return basis points as a percentage; a dash where there never were any."""
    return "—" if weight_bp is None else f"{weight_bp / 100:g} %"


def instant(at: datetime) -> str:
    """Return an instant, to the second."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def ago(at: datetime, now: datetime) -> str:
    """Return how long ago something was, in its largest unit."""
    seconds = max(0, round((now - at).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def lasted(start: datetime, end: datetime | None) -> str:
    """Return how long something took, in the unit that suits it; a dash while it goes on."""
    if end is None:
        return "—"
    seconds = max(0.0, (end - start).total_seconds())
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def words(name: object) -> str:
    """Return a name of ours as words."""
    return str(name).replace("_", " ")


def counted(items: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return each item that differs from the one before it, and how often it comes."""
    return [(item, len(list(same))) for item, same in groupby(items)]


def steps(place: str) -> Markup:
    """Return a path or pointer that is broken, where it must be, after a part of it and not within one."""
    return Markup("<wbr>").join(re.findall(r"[^/._-]+[/._-]*|[/._-]+", place))


def tone(phase: str) -> str:
    """Return the tone of a release's phase."""
    return PHASE_TONES.get(Phase(phase), "plain")


templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=select_autoescape(default=True, default_for_string=True),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
templates.filters.update(
    {
        "short": short,
        "amount": amount,
        "percent": percent,
        "instant": instant,
        "ago": ago,
        "lasted": lasted,
        "span": span,
        "words": words,
        "tone": tone,
        "counted": counted,
        "label": label,
        "job_state": job_state,
        "apart": apart,
        "shown": shown,
        "steps": steps,
        "printable": printable,
    }
)


templates.globals["failures"] = FAILURES
templates.tests["words"] = lambda value: isinstance(value, list)


def render(name: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page."""
    values.setdefault("actor", None)
    values.setdefault("section", None)
    return HTMLResponse(templates.get_template(name).render(**values), status_code=status, headers=HEADERS)


class LoginNeededError(Exception):
    """The visitor has not logged in, or no longer counts as logged in."""


def to_login(request: Request) -> Response:
    """Send a visitor to the form, and back afterwards."""
    return RedirectResponse(f"/login?next={request.url.path}", status_code=303, headers=HEADERS)


class PageRoute(Route):
    """A route whose refusals are pages, for people: the API's own are problems in JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, wrapped."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except LoginNeededError:
                return to_login(request)
            except Problem as problem:
                return refused(request, problem)
            except RequestValidationError:
                return refused(request, NotFound("The address is not one of a page here."))

        return handled


def refused(request: Request, problem: Problem) -> Response:
    """Return a problem as a page, with the way on for whoever is logged in."""
    visitor = getattr(request.state, "visitor", None)
    return render("problem.html", status=problem.status, actor=visitor, problem=problem)
