"""The log over all releases, the search over all pages, and a golden reference, as pages."""

import html
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import event

from registry import documents, journal, searching, targets
from registry.auth import Actor
from registry.service import Service
from schemas.evidence import Kind, Reasoned
from schemas.reference import Noise, OutputToken, Recording, Reference, TokenChoice
from tests.registry.web.test_browser import FAINT, NAMELESS, OVERFLOW, log_in
from tests.support.api import Api
from tests.support.browser import CHROMIUM, MISSING, Browser
from tests.support.factories import created_target, record_act, registered_bundle, registered_golden, started_release

SIZES = ((1400, False), (700, False), (400, True))


@pytest.fixture
def api(committed: Service) -> Iterator[Api]:
    with Api(committed) as made:
        yield made


@pytest.fixture
def visit(api: Api) -> Iterator[httpx.Client]:
    with api.visitor("viewer") as client:
        yield client


def recorded(service: Service, actor: Actor, target: str = "golden@prod") -> Reference:
    """Put a reference in force on a target."""
    suite, bundle = registered_golden(service, actor), registered_bundle(service, actor)
    made = created_target(service, actor, target)
    token = {"id": 7, "text": "<pong>", "logprob": "-0.1"}
    out = OutputToken(**token, top=[TokenChoice(**token)])
    reference = Reference(
        schema="sluicegate.dev/reference/v1", suite=suite.digest, bundle=bundle.digest, engine="llamacpp 1.0",
        hardware="cpu-x86", noise=Noise(repeats=2, diverging_prompts=0, max_margin_nat="0"),
        recordings=[
            Recording(prompt=one.id, prompt_ids=[1, 2], output=[out], finish_reason="stop") for one in suite.prompts
        ],
    )  # fmt: skip
    with service.database.transaction() as session:
        documents.register(session, service, actor, "reference", reference.canonical())
    with service.database.transaction() as session:
        targets.set_reference(
            session, service, targets.lock(session, made), suite=suite.digest, reference=reference.digest,
            bundle=bundle.digest, actor=actor.name, act="recorded",
        )  # fmt: skip
    return reference


def said(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_a_reference_says_who_answered_what_and_where_it_counts_and_is_linked(committed, actor, visit) -> None:
    reference = recorded(committed, actor)
    answer = visit.get(f"/references/{reference.digest}")
    told = said(answer.text)
    assert answer.status_code == 200
    for expected in ("llamacpp 1.0", "cpu-x86", "0 of", "in 2 runs", f"by {actor.name}", "in force on golden@prod"):
        assert expected in told
    assert "&lt;pong&gt;" in answer.text
    for one in reference.recordings:
        assert f"<b>{one.prompt}</b>" in answer.text
    assert f'href="/bundles/{reference.bundle}"' in answer.text
    for page in ("/targets/golden@prod", f"/suites/{reference.suite}"):
        assert f'href="/references/{reference.digest}"' in visit.get(page).text
    assert visit.get("/references/sha256:" + "0" * 64).status_code == 404


def test_the_log_is_over_all_releases_newest_first_and_filtered(committed, actor, visit, monkeypatch) -> None:
    releases = [started_release(committed, actor, target=f"t{place}@prod") for place in range(2)]
    for place, release in enumerate(releases):
        record_act(committed, release, Kind.HELD, Reasoned(reasons=[f"reason {place}"], cause="x"))
    page = visit.get("/log").text
    assert page.index("reason 1") < page.index("reason 0")
    assert all(f'href="/releases/{release}"' in page for release in releases)
    assert "data-events=" in page
    only = said(visit.get("/log?kind=held&target=t0@prod").text)
    assert ("reason 0" in only, "reason 1" in only) == (True, False)
    assert "Nothing matches." in visit.get("/log?actor=nobody").text
    assert "reason" not in said(visit.get(f"/log?actor={actor.name}").text)
    assert [visit.get(f"/log?{bad}").status_code for bad in ("kind=x", "after=x", "target=no@prod")] == [422, 422, 404]


def test_pages_of_the_log_follow_each_other_and_what_is_rare_is_found_bit_by_bit(
    committed, actor, visit, monkeypatch
) -> None:
    release = started_release(committed, actor)
    for place in range(9):
        record_act(committed, release, Kind.HELD, Reasoned(reasons=[f"reason {place}."], cause="x"), f"act{place}")
    monkeypatch.setattr("registry.web.journal.PAGE_SIZE", 4)
    monkeypatch.setattr(journal, "MOST_LOOKED", 3)

    def all_of(address: str) -> tuple[list[str], list[int]]:
        found: list[str] = []
        sizes = []
        while address:
            page = visit.get(address).text
            sizes.append(page.count("<li>\n      <time"))
            found += re.findall(r"(reason \d)\.", page)
            after = re.search(r'<a href="([^"]+)" rel="next">', page)
            address = html.unescape(after[1]) if after else ""
        return found, sizes

    every = [f"reason {place}" for place in reversed(range(9))]
    found, sizes = all_of("/log")
    assert (found, set(sizes[:-1])) == (every, {4})
    assert all_of("/log?kind=held")[0] == every
    # The first entry of all is rare: pages before it are empty, and none of them is the end.
    found, sizes = all_of("/log?kind=created")
    assert (sum(sizes), sizes[0]) == (1, 0)


def test_a_search_goes_to_what_is_meant_and_lists_what_may_be(committed, actor, api, visit) -> None:
    bundle, other = (registered_bundle(committed, actor, content=one).digest for one in (b"one", b"two"))
    release = started_release(committed, actor, target="chat@prod")
    reference = recorded(committed, actor)

    def goes(text: str) -> str | None:
        answer = visit.get("/search", params={"q": text})
        return answer.headers.get("location") if answer.status_code == 303 else None

    assert goes(bundle[7:19]) == goes(bundle) == goes(f" {bundle.upper()[7:20]} ") == f"/bundles/{bundle}"
    assert goes(str(release)) == f"/releases/{release}"
    assert goes("chat@") == "/targets/chat@prod"
    assert goes(reference.digest[7:17]) == f"/references/{reference.digest}"
    # Names of tokens are told to those who may list them, in the table of permissions.
    assert (visit.get("/search?q=auditor").status_code, goes("auditor")) == (200, None)
    visit.post("/login", data={"token": api.tokens["auditor"], "next": "/"})
    assert goes("auditor") == "/log?actor=auditor"
    assert goes("view") == "/log?actor=viewer"
    with committed.database.transaction() as session:
        name = documents.names(session, actor.project_id, [bundle])[bundle]
    several = visit.get("/search", params={"q": name[:4]}).text
    assert all(f"/bundles/{one}" in several for one in (bundle, other))
    for nothing in ("", "  ", "zzzz", "%", "_", "0" * 64, "'", "<b>zz"):
        answer = visit.get("/search", params={"q": nothing})
        assert answer.status_code == 200, nothing
        assert "<b>zz" not in answer.text
    assert visit.get("/search", params={"q": "\u0000x"}).status_code == 422
    assert visit.get("/search", params={"q": "x" * (searching.LONGEST + 1)}).status_code == 404


def test_no_search_reads_a_table_through(committed, actor) -> None:
    auditor = Actor(actor.project_id, actor.project, "auditor", "auditor")
    asked: list[tuple[str, Any]] = []

    def note(_connection, _cursor, statement, parameters, *_) -> None:
        asked.append((statement, parameters))

    event.listen(committed.database.engine, "before_cursor_execute", note)
    try:
        with committed.database.transaction() as session:
            for text in ("0123abcd", "gemma"):
                searching.search(session, auditor, text)
    finally:
        event.remove(committed.database.engine, "before_cursor_execute", note)
    assert len(asked) >= 11  # documents, entries, releases and runners by digits; each sort of name, twice
    with committed.database.engine.connect() as connection:
        # With a handful of rows the planner reads a table through where an index would do: here it may not.
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        for statement, parameters in asked:
            plan = "\n".join(row[0] for row in connection.exec_driver_sql(f"EXPLAIN {statement}", parameters))
            assert "Seq Scan" not in plan, plan
            assert "Index" in plan, plan


@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_the_pages_fit_and_the_log_is_live(committed, actor, api, tmp_path) -> None:
    release = started_release(committed, actor)
    reference = recorded(committed, actor)
    paths = {
        "log": "/log",
        "reference": f"/references/{reference.digest}",
        "search": "/search?q=g",
        "none": "/search?q=zz",
    }
    with Browser() as browser:
        browser.look(width=1400)
        log_in(browser, api.url, api.tokens["engineer"])
        for name, path in paths.items():
            for width, dark in SIZES:
                browser.look(width=width, dark=dark)
                browser.open(api.url + path)
                assert browser.run(OVERFLOW) == 0, (path, width)
                assert browser.run(FAINT) == [], (path, width)
                browser.screenshot(tmp_path / f"{name}-{width}.png")
            assert browser.run(NAMELESS) == [], path
        browser.look(width=1400)
        browser.open(f"{api.url}/log")
        record_act(committed, release, Kind.HELD, Reasoned(reasons=["while you looked"], cause="x"))
        browser.wait("document.body.innerText.includes('while you looked')")
        browser.run(
            "document.getElementById('find').value = 'chat@prod'; document.querySelector('.find').requestSubmit()"
        )
        browser.wait("location.pathname === '/targets/chat@prod' && document.readyState === 'complete'")
        assert browser.console == []
