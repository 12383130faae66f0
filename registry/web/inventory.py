"""Bundles, targets and runners as pages: what there is, what serves where, and who served when."""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Path, Query
from fastapi.responses import Response
from sqlalchemy.orm import Session

from registry import (
    aliases,
    boots,
    db,
    documents,
    draining,
    evidence,
    history,
    jobs,
    quarantine,
    releases,
    runners,
    targets,
)
from registry.api.deps import ServiceDep, SessionDep
from registry.api.pages import Cursor, page
from registry.tables import TargetRow
from registry.web.chart import weights_over_time
from registry.web.colours import colours
from registry.web.comparison import choices
from registry.web.notices import Notice
from registry.web.releases import PAGE_SIZE, event_source
from registry.web.rendering import PageRoute, render
from registry.web.visitors import VisitorDep
from schemas.api import TargetName
from schemas.common import MAX_INTEGER, Name
from schemas.evidence import Kind, SplitEntry, Traffic
from schemas.runner import RUNNING
from schemas.stories import TONES

MOST_FILES = 500
"""Files of a bundle on its page; the rest is counted."""
MOST_EVALUATIONS = 10
"""Evaluations of a bundle whose gate results are on its page."""

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/bundles")
def bundles_page(actor: VisitorDep, session: SessionDep, after: Cursor) -> Response:
    """List bundles, newest first."""
    rows = documents.browse(session, actor.project_id, "bundle", names=[], after=after, limit=PAGE_SIZE + 1)
    found = page(rows, PAGE_SIZE, lambda row: row[1], lambda row: row[0])
    return render(
        "bundles.html",
        actor=actor,
        section="bundles",
        bundles=found.items,
        quarantined=quarantine.standing(session, actor.project_id, [one.digest for one in found.items]),
        is_first=after is None,
        following=f"/bundles?{urlencode({'cursor': found.next})}" if found.next else None,
    )


@router.get("/bundles/{digest}")
def bundle_page(
    digest: Annotated[str, Path(pattern=r"^(sha256:)?[0-9a-f]{8,64}$")],
    actor: VisitorDep,
    session: SessionDep,
    after: Cursor,
) -> Response:
    """Show a bundle: its components, files, engine and origin, what gates measured, and the releases of it."""
    source = event_source(session)
    named = documents.resolve(session, actor.project_id, "bundle", digest)
    bundle = documents.load_bundle(session, actor.project_id, named)
    registered = documents.get(session, actor.project_id, "bundle", named)
    rows = releases.lines(session, actor.project_id, bundle=named, after=after, limit=PAGE_SIZE + 1)
    found = page(rows, PAGE_SIZE, lambda line: line.release.id, lambda line: line.release.id)
    before, later = documents.neighbours(session, actor.project_id, named)
    return render(
        "bundle.html",
        actor=actor,
        section="bundles",
        bundle=bundle,
        registered=registered,
        aliases=aliases.of_bundle(session, actor.project_id, named),
        notices=_quarantined("Quarantined: nothing goes on with it.", session, actor.project_id, named),
        components=sorted((registered.components or {}).items()),
        facts=_facts(bundle.model_dump(mode="json", by_alias=True, exclude_none=True)),
        files=bundle.files[:MOST_FILES],
        size=sum(file.size for file in bundle.files),
        measured=jobs.measured(session, actor.project_id, named, limit=MOST_EVALUATIONS),
        most_evaluations=MOST_EVALUATIONS,
        boots=boots.of_bundle(session, actor.project_id, named, limit=MOST_EVALUATIONS),
        tones=TONES,
        before=before,
        later=later,
        choices=choices(session, actor.project_id, named, bundle.name),
        lines=rows[:PAGE_SIZE],
        is_first=after is None,
        following=f"/bundles/{named}?{urlencode({'cursor': found.next})}" if found.next else None,
        events=source if after is None else None,
        now=db.now(session),
    )


def _quarantined(title: str, session: Session, project: UUID, bundle: str) -> list[Notice]:
    """Return the banner that says why a bundle is quarantined; none when it is not."""
    why = quarantine.reasons(session, project, bundle)
    return [Notice("bad", title, why)] if why else []


def _facts(document: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the sections that are no lists of files, each as name and value."""
    sections = (
        "model",
        "quantization",
        "tokenizer",
        "template",
        "runtime",
        "serving",
        "hardware",
        "topology",
        "licence",
    )
    return [(name, [(key, _plain(value)) for key, value in document[name].items()]) for name in sections]


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_plain(one) for one in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(one)}" for key, one in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


@router.get("/targets")
def targets_page(actor: VisitorDep, session: SessionDep, service: ServiceDep, after: Cursor) -> Response:
    """List targets, newest first."""
    source = event_source(session)
    rows = targets.browse(session, actor.project_id, after=after, limit=PAGE_SIZE + 1)
    found = page(rows, PAGE_SIZE, lambda row: targets.wire(session, service, row), lambda row: row.id)
    return render(
        "targets.html",
        actor=actor,
        section="targets",
        targets=found.items,
        colours=colours([one.applied for one in reversed(found.items)]),
        names=documents.names(session, actor.project_id, [arm.bundle for one in found.items for arm in one.applied]),
        is_first=after is None,
        following=f"/targets?{urlencode({'cursor': found.next})}" if found.next else None,
        events=source,
        now=db.now(session),
    )


@router.get("/targets/{name}")
def target_page(
    name: Annotated[TargetName, Path()],
    actor: VisitorDep,
    session: SessionDep,
    service: ServiceDep,
    after: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
) -> Response:
    """Show a target: what serves it now, on which replicas, compared with what, and who served when."""
    row = targets.get(session, actor.project_id, name)
    source = event_source(session, target=str(row.id))
    target = targets.wire(session, service, row)
    served, following = _served(session, row, after)
    digests = [arm.bundle for one in served for arm in one.arms]
    digests += [arm.bundle for arm in target.applied] + [one.bundle for one in target.replicas]
    now = db.now(session)
    stable, candidate = targets.stable_release(session, row.id), targets.candidate_release(session, row.id)
    return render(
        "target.html",
        actor=actor,
        section="targets",
        target=target,
        notices=_quarantined(
            "What is live here is quarantined, and serves on.", session, actor.project_id, stable.bundle
        )
        if stable
        else [],
        running=[one for one in target.replicas if one.state in RUNNING],
        ended=[one for one in target.replicas if one.state not in RUNNING],
        stable=stable,
        candidate=candidate,
        served=served,
        traffic=weights_over_time([(one.since, one.until, one.arms) for one in reversed(served)], now=now),
        colours=colours([*(one.arms for one in reversed(served)), target.applied]),
        names=documents.names(
            session,
            actor.project_id,
            [*digests, *target.references, *(one.bundle for one in (stable, candidate) if one)],
        ),
        is_first=after is None,
        following=f"/targets/{name}?after={following}" if following else None,
        events=source if after is None else None,
        now=now,
    )


@dataclass(frozen=True, slots=True)
class Served:
    """A split and the time it was in force."""

    since: datetime
    until: datetime | None
    arms: list[SplitEntry]
    actor: str
    """Who moved the traffic: a person, or a part of the service."""
    by: str
    """Who asked for that or let it: people, or who moved it."""
    release: str
    sequence: int
    reasons: list[str]
    """Why traffic was taken back, if it was."""


def _served(session: Session, target: TargetRow, after: int | None) -> tuple[list[Served], int | None]:
    """Return who served when, newest first, and the sequence that the next page goes on after."""
    # The last one of the page before says until when the first one here was in force.
    most = PAGE_SIZE + 1 + (after is not None)
    rows = evidence.traffic(session, target.id, upto=after, limit=most)
    until: datetime | None = None
    served: list[Served] = []
    for number, row in enumerate(rows):
        entry = evidence.wire(row)
        body = Traffic.model_validate(entry.body)
        if number or after is None:
            release = entry.stream.removeprefix("release/")
            reasons = (body.reasons or []) if entry.kind is Kind.TRAFFIC_RESTORED else []
            by = history.who(session, row)
            one = Served(body.applied_at, until, body.desired, entry.actor, by, release, row.sequence, reasons)
            if served and _goes_on(one, served[-1]):
                # Recorded again while nothing changed: the later one began when this one did.
                served[-1] = replace(served[-1], since=one.since, sequence=one.sequence)
            elif len(served) == PAGE_SIZE:
                break
            else:
                served.append(one)
        until = body.applied_at
    return served, served[-1].sequence if served and len(rows) == most else None


def _goes_on(one: Served, later: Served) -> bool:
    """Tell whether a later entry says what was in force already, for the same release and by the same people."""
    same = (one.arms, one.release, one.by, one.actor) == (later.arms, later.release, later.by, later.actor)
    return same and not later.reasons


@router.get("/runners")
def runners_page(actor: VisitorDep, session: SessionDep, after: Cursor) -> Response:
    """List the machines that run models: what they are, whether they live, and what they do."""
    source = event_source(session)
    rows = runners.browse(session, actor.project_id, after=after, limit=PAGE_SIZE + 1)
    found = page(rows, PAGE_SIZE, lambda row: draining.wire(session, row), lambda row: row.id)
    held = jobs.held_by(session, [one.id for one in found.items])
    return render(
        "runners.html",
        actor=actor,
        section="runners",
        runners=[(one, [(job, name) for job, name in held if job.runner_id == one.id]) for one in found.items],
        names=documents.names(session, actor.project_id, [job.bundle for job, _ in held]),
        is_first=after is None,
        following=f"/runners?{urlencode({'cursor': found.next})}" if found.next else None,
        events=source,
        now=db.now(session),
    )


@router.get("/runners/{runner}")
def runner_page(
    runner: Annotated[Name, Path(description="Name or identity.")],
    actor: VisitorDep,
    session: SessionDep,
    after: Cursor,
) -> Response:
    """Show a machine that runs models: what it is, what it does now, and what it did."""
    source = event_source(session)
    row = runners.named(session, actor.project_id, runner)
    rows = jobs.of_runner(session, row.id, after=after, limit=PAGE_SIZE + 1)
    found = page(rows, PAGE_SIZE, lambda one: one[0].id, lambda one: one[0].id)
    return render(
        "runner.html",
        actor=actor,
        section="runners",
        runner=draining.wire(session, row),
        registered_at=row.registered_at,
        jobs=rows[:PAGE_SIZE],
        names=documents.names(session, actor.project_id, [job.bundle for job, _ in rows]),
        is_first=after is None,
        following=f"/runners/{row.id}?{urlencode({'cursor': found.next})}" if found.next else None,
        events=source if after is None else None,
        now=db.now(session),
    )
