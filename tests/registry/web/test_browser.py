"""The pages in a real browser: laid out, readable, live, and quiet on the console."""

from collections.abc import Iterator
from uuid import UUID

import pytest
from sqlalchemy import select

from registry import documents, runners
from registry.tables import EntryRow
from schemas.evidence import Kind, Reasoned, Staged
from schemas.result import Finding, GateResult, Measurement, Severity, Verdict
from schemas.runner import RunnerRegistration
from tests.registry.web.test_inventory import EVIL, FINGERPRINT
from tests.support import structured
from tests.support.api import Api
from tests.support.browser import CHROMIUM, MISSING, Browser
from tests.support.factories import (
    policy_body,
    record_act,
    registered_bundle,
    registered_golden,
    registered_policy,
    started_release,
)
from tests.support.outage import Door

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)

# Each text's contrast with what is behind it, by WCAG 2.2, 1.4.3; what is too faint is named.
FAINT = """(() => {
  const parse = (c) => (c.match(/[0-9.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(one).backgroundColor);
      if (a > 0.99) { return [r, g, b]; }
    }
    return [255, 255, 255];
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility() || node.closest("script, svg")) { continue; }
    const style = getComputedStyle(node);
    const [one, two] = [light(parse(style.color)), light(behind(node))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (two + 0.05);
    if (ratio < 4.5) { faint.push(`${ratio.toFixed(2)} ${walker.currentNode.textContent.trim().slice(0, 40)}`); }
  }
  return faint;
})()"""
NAMELESS = """[...document.querySelectorAll("input:not([type=hidden]), select, button, a, img")].filter((one) =>
  one.tagName === "IMG" ? !one.hasAttribute("alt")
  : ["INPUT", "SELECT"].includes(one.tagName) ? !one.labels.length : !one.textContent.trim())
  .map((one) => one.outerHTML)"""
HEADINGS = "[...document.querySelectorAll('h1, h2, h3, h4')].map((one) => Number(one.tagName[1]))"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


RESULT = GateResult(
    gate="compatibility",
    definition="sha256:" + "d" * 64,
    verdict=Verdict.FAILED,
    summary=f"One probe was answered otherwise {EVIL}",
    measurements=[
        Measurement(name="ready", unit="ms", statistic="value", value=732.0, n=1, limit=120_000.0),
        Measurement(name="errors", unit="ratio", statistic="value", value=0.5, n=2, k=1, low=0.1, high=0.9, limit=0.1),
    ],
    findings=[
        Finding(code="probe-differs", severity=Severity.BLOCK, message="It differs.", found=EVIL, advice="Look.")
    ],
    duration_ms=900,
    source="run",
)


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as made:
        made.look(width=1000)
        yield made


def log_in(browser: Browser, url: str, token: str) -> None:
    browser.open(f"{url}/targets")
    assert browser.run("location.pathname") == "/login"
    browser.run(f"document.getElementById('token').value = '{token}'; document.querySelector('form').submit()")
    browser.wait("location.pathname === '/targets' && document.readyState === 'complete'")


@pytest.fixture
def release(committed, actor) -> UUID:
    made = started_release(committed, actor)
    registration = {"name": "node-17", "runner_class": "cpu", "engines": ["llamacpp"], "boot_id": "b"}
    with committed.database.transaction() as session:
        said = RunnerRegistration.model_validate({**registration, "fingerprint": FINGERPRINT})
        runners.register(session, actor.project_id, said)
    record_act(committed, made, Kind.HELD, Reasoned(reasons=[f"inconclusive {EVIL}"], cause="x"))
    return made


def test_every_page_fits_reads_and_has_names_on_a_desk_and_on_a_phone(committed, actor, release, browser):
    bundle = registered_bundle(committed, actor).digest
    wider = {"context_tokens": 1024, "max_sequences": 4, "prefix_caching": True}
    later = registered_bundle(committed, actor, content=b"later weights", runtime=wider, description="Wider.").digest
    with committed.database.transaction() as session:
        (runner,) = (row.id for row in runners.browse(session, actor.project_id, after=None, limit=1))
    contract = structured.suite()
    with committed.database.transaction() as session:
        documents.register(session, committed, actor, "suite", contract.canonical())
    suites = [registered_golden(committed, actor).digest, contract.digest]
    rule = {"gate": "golden", "suite": suites[0], "margin_nat": "0.1", "min_prompts": 2}
    policy = registered_policy(committed, actor, "golden", gates=[*policy_body()["gates"], rule]).digest
    record_act(committed, release, Kind.STAGED, Staged(files=1, size=10, duration_ms=5), "staged")
    record_act(committed, release, Kind.GATE_RECORDED, RESULT, "gate:compatibility")
    with committed.database.transaction() as session:
        entry = session.scalars(select(EntryRow.entry_digest).where(EntryRow.kind == Kind.GATE_RECORDED)).one()
    paths = [
        "/",
        "/policies",
        f"/policies/{policy}",
        "/suites",
        *(f"/suites/{suite}" for suite in suites),
        f"/releases/{release}",
        f"/results/{entry}",
        "/bundles",
        f"/bundles/{bundle}",
        f"/bundles/{bundle}/diff/{later}",
        "/targets",
        "/targets/chat@prod",
        "/runners",
        f"/runners/{runner}",
        "/problems/policy-too-weak",
    ]
    with Api(committed) as api:
        log_in(browser, api.url, api.tokens["engineer"])
        for path in paths:
            for width, dark in ((1000, False), (700, False), (420, True)):
                browser.look(width=width, dark=dark)
                browser.open(api.url + path)
                where = f"{path} at {width}"
                assert browser.run(OVERFLOW) == 0, where
                assert browser.run(FAINT) == [], where
                browser.look(width=width, dark=not dark)
                assert browser.run(FAINT) == [], where
            assert browser.run(NAMELESS) == [], path
            levels = browser.run(HEADINGS)
            assert levels.count(1) == 1, path
            assert all(after <= before + 1 for before, after in zip([0, *levels], levels, strict=False)), path
            assert browser.run("document.querySelectorAll('main').length") == 1
        assert browser.console == []
        # What is not there is a page as well; the browser notes the status of its answer.
        browser.open(f"{api.url}/runners/00000000-0000-7000-8000-000000000000")
        assert browser.run("document.querySelector('h1').textContent") == "Not found"
        assert browser.run("document.querySelectorAll('nav a').length") == 8


def test_a_name_is_never_broken_within_a_word_and_the_state_stands_where_it_stood(committed, release, browser):
    with Api(committed) as api:
        browser.look(width=1280)
        log_in(browser, api.url, api.tokens["engineer"])
        browser.open(f"{api.url}/releases/{release}")
        longer = "document.querySelectorAll('{}').forEach((one) => {{ one.append(' some more words'.repeat({})) }})"
        browser.run(longer.format("td[data-label=Why]", 30))
        lines = browser.run("[...document.querySelectorAll('td.name b')].map((one) => one.getClientRects().length)")
        assert lines, "the policy asks for gates"
        assert set(lines) == {1}
        state = "(() => {{ const at = document.querySelector('.state').getBoundingClientRect(); return [at.{}] }})()"
        before = browser.run(state.format("top, at.right"))
        browser.run(longer.format(".head p:last-child", 9))
        assert browser.run(state.format("top, at.right")) == before


def test_where_a_finding_is_stands_in_whole_words_beside_a_long_message(committed, release, browser):
    place = "model-00001-of-00002.safetensors"
    found = Finding(
        code="dtype-mismatch", severity=Severity.BLOCK, message="word " * 60, found="F16", expected="BF16",
        file=f"draft/{place}", pointer="/quantization_config/modules_to_not_convert", advice="word " * 40,
    )  # fmt: skip
    result = RESULT.model_copy(update={"findings": [found]})
    record_act(committed, release, Kind.STAGED, Staged(files=1, size=10, duration_ms=5), "staged")
    record_act(committed, release, Kind.GATE_RECORDED, result, "gate:compatibility")
    with committed.database.transaction() as session:
        entry = session.scalars(select(EntryRow.entry_digest).where(EntryRow.kind == Kind.GATE_RECORDED)).one()
    with Api(committed) as api:
        log_in(browser, api.url, api.tokens["engineer"])
        for width in (1400, 1000, 700, 400):
            browser.look(width=width)
            browser.open(f"{api.url}/results/{entry}")
            assert browser.run(OVERFLOW) == 0
            # Each text between two places where a line may end is in one line.
            broken = """[...document.querySelectorAll('.where code')].flatMap((code) => [...code.childNodes])
              .filter((one) => one.nodeType === 3).filter((one) => {
                const range = document.createRange(); range.selectNodeContents(one);
                return range.getClientRects().length > 1; }).map((one) => one.data)"""
            assert browser.run(broken) == [], width
            assert browser.run("document.querySelectorAll('.where code').length") == 2


def test_a_page_follows_what_happens_and_is_itself_again_after_an_outage(committed, release, browser):
    with Api(committed) as api:
        door = Door(api.url)
        log_in(browser, door.url, api.tokens["engineer"])
        browser.open(f"{door.url}/releases/{release}")
        browser.run("window.stayed = true")
        assert "Held." in browser.run("document.body.innerText")
        record_act(committed, release, Kind.STAGED, Staged(files=3, size=10, duration_ms=1))
        browser.wait("document.body.innerText.includes('3 files')")
        assert browser.run("document.querySelector('.state .pill').textContent") == "staged"
        assert "staged" in browser.run("document.getElementById('status').textContent")
        assert browser.console == []

        door.shut()
        browser.wait("document.getElementById('live').classList.contains('stale')")
        assert "Not up to date: no connection since " in browser.run("document.body.innerText")
        record_act(committed, release, Kind.HELD, Reasoned(reasons=["while nobody saw"], cause="x"), "later")
        door.open()
        browser.wait("document.body.innerText.includes('while nobody saw')")
        browser.wait("!document.getElementById('live').classList.contains('stale')")
        assert "Not up to date" not in browser.run("document.body.innerText")
        # In place: the page was never loaded anew.
        assert browser.run("window.stayed")
        door.close()


def test_the_list_is_live_and_logging_out_ends_it(committed, release, browser):
    with Api(committed) as api:
        log_in(browser, api.url, api.tokens["engineer"])
        browser.open(f"{api.url}/?phase=staged")
        assert "No release matches" in browser.run("document.body.innerText")
        record_act(committed, release, Kind.STAGED, Staged(files=3, size=10, duration_ms=1))
        browser.wait("document.querySelectorAll('tbody tr').length === 1")
        browser.run("document.querySelector('.who form').submit()")
        browser.wait("location.pathname === '/login' && document.readyState === 'complete'")
        browser.open(f"{api.url}/runners")
        assert browser.run("location.pathname") == "/login"
