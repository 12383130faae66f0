"""Runs as pages: the list, one run with how it went and why, and the ways there."""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import httpx
import pytest

from registry import db, jobs, releases
from schemas.result import Verdict
from schemas.runner import JobKind
from tests.registry.web.test_browser import FAINT, NAMELESS, OVERFLOW, log_in
from tests.support.browser import CHROMIUM, MISSING, Browser
from tests.support.scene import Scene

SIZES = ((1400, False), (1000, False), (700, False), (400, True))


@pytest.fixture
def visit(scene: Scene) -> Iterator[httpx.Client]:
    with scene.api.visitor("engineer") as client:
        yield client


def asked(scene: Scene) -> str:
    """Ask for a run that belongs to no release, and return its id."""
    words = ("gate", "run", scene.bundle.digest, "-p", scene.policy.digest, "--json")
    return str(scene.command.ok(*words).json["id"])


def said(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_a_run_says_how_it_went_and_why_and_all_that_speak_of_it_lead_there(scene, visit):
    assert "No run yet" in said(visit.get("/runs").text)
    run = asked(scene)
    waiting = visit.get(f"/runs/{run}").text
    assert f"`sluicegate gate cancel {run} --reason …`".strip("`") in said(waiting)
    for expected in ("waits", "not yet", "compatibility not run", "asked: runs "):
        assert expected in said(waiting)
    assert ("data-events=" in waiting, "data-seconds=" in waiting) == (True, True)
    scene.evaluate(compatibility=Verdict.FAILED)
    page = visit.get(f"/runs/{run}").text
    for expected in (
        "failed",
        "compatibility said failed",
        "integrity passed",
        "runner-1",
        "once",
        "from asked to ended",
    ):
        assert expected in said(page)
    assert ("gate cancel" in page, "data-seconds=" in page) == (False, False)
    result = re.search(r'href="(/results/sha256:[0-9a-f]+)">compatibility', page)
    assert result is not None
    assert f'href="/bundles/{scene.bundle.digest}"' in page
    ways = ("/runs", "/log", f"/bundles/{scene.bundle.digest}", f"/runners/{scene.runner_id}", result[1])
    for way in ways:
        assert f'href="/runs/{run}"' in visit.get(way).text, way
    listed = said(visit.get("/runs").text)
    assert f"{run[:13]} evaluate itself" in listed
    assert " failed " in listed
    assert visit.get("/runs/00000000-0000-7000-8000-000000000000").status_code == 404


def test_a_run_is_found_by_its_id_and_that_of_a_release_by_its_release(scene, visit):
    run = asked(scene)
    scene.target()
    release = scene.release()["id"]
    with scene.service.database.transaction() as session:
        row = releases.get(session, scene.api.project_id, UUID(release))
        jobs.create(
            session, row.project_id, JobKind.EVALUATE, bundle=row.bundle, policy=row.policy, gates=["integrity"],
            runner_class="cpu", release=row.id, created_by="controller", now=db.now(session),
        )  # fmt: skip
    for named, address in ((run, f"/runs/{run}"), (release, f"/releases/{release}")):
        answer = visit.get("/search", params={"q": named})
        assert (answer.status_code, answer.headers.get("location")) == (303, address)
    (theirs,) = {one["id"] for one in scene.command.ok("gate", "list", "--json").json["items"]} - {run}
    page = visit.get(f"/runs/{theirs}").text
    assert f'href="/releases/{release}"' in page
    assert "<h2>Log</h2>" not in page  # it is that of the release
    scene.command.ok("gate", "cancel", run, "-r", "asked twice")
    told = said(visit.get(f"/runs/{run}").text)
    assert ("cancelled" in told, "asked twice" in told) == (True, True)


def test_a_run_of_another_project_has_no_page(scene, visit):
    scene.command.be("admin", scene.api)
    scene.command.ok("project", "create", "team-b")
    theirs = scene.command.ok("token", "create", "bo", "--role", "viewer", "--project", "team-b", "--json").json
    scene.command.be("engineer", scene.api)
    run = asked(scene)
    assert visit.get(f"/runs/{run}").status_code == 200
    visit.post("/login", data={"token": theirs["secret"], "next": "/"})
    assert visit.get(f"/runs/{run}").status_code == 404
    assert run not in visit.get("/runs").text


def test_pages_of_runs_follow_each_other(scene, visit, monkeypatch):
    monkeypatch.setattr("registry.web.runs.PAGE_SIZE", 2)
    every = [asked(scene) for _ in range(5)]
    address, found = "/runs", []
    while address:
        page = visit.get(address).text
        found += re.findall(r'class="strong" href="/runs/([0-9a-f-]+)"', page)
        after = re.search(r'<a href="([^"]+)" rel="next">', page)
        address = html.unescape(after[1]) if after else ""
    assert found == every[::-1]


@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_the_pages_of_runs_fit_and_follow_what_happens(scene: Scene, tmp_path: Path) -> None:
    run = asked(scene)
    scene.evaluate(compatibility=Verdict.FAILED)
    open_run = asked(scene)
    paths = {"runs": "/runs", "run": f"/runs/{run}", "open": f"/runs/{open_run}"}
    with Browser() as browser:
        browser.look(width=1400)
        log_in(browser, scene.api.url, scene.api.tokens["engineer"])
        for name, path in paths.items():
            for width, dark in SIZES:
                browser.look(width=width, dark=dark)
                browser.open(scene.api.url + path)
                assert browser.run(OVERFLOW) == 0, (path, width)
                assert browser.run(FAINT) == [], (path, width)
                browser.screenshot(tmp_path / f"{name}-{width}.png")
            assert browser.run(NAMELESS) == [], path
        scene.evaluate()
        browser.wait("document.body.innerText.includes('passed')")
        assert browser.console == []
