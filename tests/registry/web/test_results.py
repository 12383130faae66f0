"""A gate's result as a page: its numbers, its findings, and a load run as curves."""

import re
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import httpx
import pytest

from gates.catalog import conclude
from gates.gate import GateContext
from gates.load_records import read_run
from registry import db, jobs, releases
from registry.web.canary import panels
from registry.web.curves import HEIGHT, WIDTH, curves
from registry.web.results import _sample
from schemas.api import Complete
from schemas.evidence import Entry, Kind
from schemas.result import Measurement, Verdict
from schemas.runner import JobKind, Report
from tests.support.factories import policy_body, registered_policy
from tests.support.load_run import break_row, good_records, load_rule, load_suite
from tests.support.scene import STAGED, Scene

SUITE = load_suite()
RULE = load_rule(SUITE)


def run(**row):
    return read_run(good_records(SUITE, **row), SUITE, requests=RULE.requests)


def numbers(path: str) -> list[float]:
    return [float(found) for found in re.findall(r"[0-9.]+", path)]


def test_a_curve_ends_at_the_share_that_was_answered_and_stays_on_the_chart() -> None:
    ttft, tpot, e2e = curves(run(), RULE, None)
    assert [one.name for one in (ttft, tpot, e2e)] == ["TTFT", "TPOT", "E2E"]
    assert ttft.reading == "TTFT: half within 40 ms, 90 % within 40 ms; bound 500 ms"
    # All were answered alike and well within the bound, which is named, and not drawn.
    assert (ttft.before, ttft.bound_x) == (None, None)
    assert min(map(float, re.findall(r"V([0-9.]+)", ttft.line))) == 16.0
    for one in (ttft, tpot, e2e):
        assert all(0 <= x <= max(WIDTH, HEIGHT) for x in numbers(one.line))
        assert 2 <= len(one.ticks) <= 6
        assert one.ticks[0][1] == "0 ms"


def test_failed_requests_leave_a_curve_below_the_top_and_a_near_bound_is_drawn() -> None:
    records = good_records(SUITE, ttft_ms=400)
    for row in records["requests"][:32]:
        break_row(row)
    slow = read_run(records, SUITE, requests=RULE.requests)
    (ttft, *_) = curves(slow, RULE, run())
    assert ttft.reading == (
        "TTFT: half within 400 ms, 90 % never: too many failed (before: 40 ms and 40 ms); bound 500 ms"
    )
    assert ttft.bound_x is not None
    assert ttft.before is not None
    half = 16 + 0.5 * (HEIGHT - 16 - 26)
    assert min(map(float, re.findall(r"V([0-9.]+)", ttft.line))) == half


@pytest.fixture
def visit(scene: Scene) -> Iterator[httpx.Client]:
    with scene.api.visitor("viewer") as client:
        yield client


def measured(scene: Scene, **row) -> str:
    """Play a runner that has a load run on record. Returns the address of its result."""
    manager = scene.api.actor("manager")
    scene.command.ok("suite", "push", _written(scene, SUITE.model_dump_json(by_alias=True)))
    gates = [*policy_body()["gates"], RULE.model_dump(mode="json")]
    policy = registered_policy(scene.service, manager, "loaded", gates=gates)
    scene.command.ok("gate", "run", scene.bundle.digest, "-p", policy.digest, "--gate", "load")
    claim = scene.runner.runners.claim(scene.runner_id)
    given = GateContext(bundle=scene.bundle, root=Path(), rule=RULE, suite=SUITE)
    result, raw = conclude("load", given, good_records(SUITE, **row), duration_ms=4000)
    scene.runner.jobs.put_records(claim.job, result.records, raw, fencing_token=claim.fencing_token)
    told = result.model_dump(mode="json", exclude_none=True)
    report = Report(fencing_token=claim.fencing_token, act="gate:load", kind="gate_recorded", body=told)
    scene.runner.jobs.report(claim.job, report)
    scene.runner.jobs.complete(claim.job, Complete(fencing_token=claim.fencing_token))
    (entry,) = [
        one
        for one in scene.command.ok("evidence", "list", "--json").json["items"]
        if one["kind"] == "gate_recorded" and one["body"]["gate"] == "load"
    ]
    return f"/results/{entry['entry_digest']}"


def _written(scene: Scene, text: str) -> Path:
    file = scene.command.home / "suite.json"
    file.write_text(text)
    return file


def test_a_load_run_is_drawn_and_every_number_has_its_limit_and_sample(scene, visit):
    address = measured(scene)
    answer = visit.get(address)
    page, said = answer.text, " ".join(re.sub(r"<[^>]*>", " ", answer.text).split())
    assert answer.status_code == 200
    assert page.count('<svg class="chart small"') == 3
    # The widest label ends at its x and is 43 wide in the letters of small charts (15 high): nothing of it is cut.
    assert [int(x) > 43 for x in re.findall(r'x="(\d+)"[^>]*>100%</text>', page)] == [True] * 3
    assert "TTFT: half within 40 ms, 90 % within 40 ms; bound 500 ms" in said
    assert re.search(r"ttft p90 40 ms 500 ms — 64\b", said)
    assert re.search(r"attainment value 100.00% 90.00% [0-9.]+% to [0-9.]+% 64 of 64", said)
    assert f'href="{address}"' in visit.get(f"/bundles/{scene.bundle.digest}").text
    # What was erased is not drawn, and the page says so.
    scene.command.ok("evidence", "erase", address.rsplit("/", 1)[1], "-r", "a customer asked for it")
    erased = visit.get(address).text
    assert "It cannot be drawn" in erased
    assert "chart small" not in erased
    assert re.search(
        r"cannot be computed again:</b> its records were erased by manager at [^<]+: a customer asked", erased
    )


def test_a_result_says_what_was_found_and_what_is_none_is_not_there(scene, visit):
    scene.command.ok("gate", "run", scene.bundle.digest, "-p", scene.policy.digest)
    scene.evaluate(compatibility=Verdict.FAILED)
    (entry,) = [
        one["entry_digest"]
        for one in scene.command.ok("evidence", "list", "--json").json["items"]
        if one["kind"] == "gate_recorded" and one["body"]["verdict"] == "failed"
    ]
    page = visit.get(f"/results/{entry}").text
    for expected in ("first-divergence", "expected token 9", "compare the templates", "No number"):
        assert expected in page
    (other, *_) = scene.command.ok("evidence", "list", "--json").json["items"]
    for address in (other["entry_digest"], "sha256:" + "0" * 64):
        assert visit.get(f"/results/{address}").status_code == 404


def test_the_sample_of_a_count_does_not_repeat_the_count() -> None:
    def told(name: str, k: int, n: int, unit: str = "count", value: float | None = None) -> str:
        value = float(k) if value is None else value
        return _sample(Measurement(name=name, unit=unit, statistic="value", value=value, n=n, k=k))

    assert [told(f"findings_{one}", k, 1) for one, k in (("block", 0), ("warn", 1))] == ["of 1 finding"] * 2
    assert told("findings_info", 0, 0) == "of 0 findings"
    assert told("malformed_refused", 12, 14) == "of 14"
    assert told("attainment", 63, 64, "ratio", 63 / 64) == "63 of 64"
    assert _sample(Measurement(name="cached_prompt_tokens", unit="count", statistic="value", value=8, n=1)) == (
        "in 1 prompt"
    )


def judgement(kind: Kind, step: int, **values: float | None) -> Entry:
    body = {
        "step": step,
        "reasons": ["because"],
        "measurements": [
            {"name": "error_ratio", "unit": "ratio", "statistic": "value", "n": 60, "k": 3, "limit": 0.1, **values},
            {"name": "baseline_error_ratio", "unit": "ratio", "statistic": "value", "n": 80, "k": 0, "value": 0.0},
        ],
    }
    return Entry.model_construct(kind=kind, body=body)


def test_a_canary_is_drawn_step_by_step_beside_the_stable_side_and_its_limit() -> None:
    log = [
        judgement(Kind.STEP_PASSED, 0, value=0.0, low=0.0, high=0.05),
        Entry.model_construct(kind=Kind.HELD, body={"reasons": ["no judgement"]}),
        judgement(Kind.STOP_CONDITION_FIRED, 1, value=0.4, low=0.3, high=0.5),
    ]
    (panel,) = panels(log)
    first, second = panel.looks
    assert [(one.label, one.tone) for one in panel.looks] == [("step 1", "good"), ("step 2", "bad")]
    assert second.said == "step 2: candidate 40 % of 60, at most 50 %; stable 0 % of 80; limit 10 %"
    # Higher is nearer to the top: the second is above the limit, the first and the stable side at the bottom.
    assert second.high < second.y < second.low < panel.limit < first.high < first.y == second.beside
    assert first.x < second.x
    # What could not be measured is not drawn, and nothing judged is no panel.
    (unknown,) = panels([judgement(Kind.STEP_PASSED, 0, value=None)])
    assert unknown.looks[0].y is None
    assert panels(log[1:2]) == []


def test_a_revoked_result_says_so_wherever_it_is_shown(scene, visit) -> None:
    scene.target()
    release = scene.release()["id"]
    scene.act(release, "staged", Kind.STAGED, STAGED)
    with scene.service.database.transaction() as session:
        row = releases.get(session, scene.api.project_id, UUID(release))
        made = jobs.create(
            session, row.project_id, JobKind.EVALUATE, bundle=row.bundle, policy=row.policy, gates=["compatibility"],
            runner_class="cpu", release=row.id, created_by="controller", now=db.now(session),
        )  # fmt: skip
        run = made.id
    scene.evaluate()
    shown = scene.command.ok("release", "show", release, "--json").json
    (entry,) = [gate["entry"] for gate in shown["gates"] if gate["gate"] == "compatibility"]
    pages = (f"/results/{entry}", f"/runs/{run}", f"/releases/{release}")
    assert not any("throttled" in visit.get(page).text for page in pages)
    scene.command.ok("evidence", "revoke", entry, "-r", "the runner was throttled")
    assert "<b>It counts no more.</b> manager said so at " in visit.get(pages[0]).text
    for page in pages[1:]:
        text = " ".join(re.sub(r"<[^>]*>", " ", visit.get(page).text).split())
        assert re.search(r"compatibility revoked (revoked: )?the runner was throttled", text), page
    told = " ".join(scene.command.ok("release", "show", release).out.split())
    assert "compatibility revoked" in told
