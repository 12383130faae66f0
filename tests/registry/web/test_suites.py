"""Suites and policies as pages: what a suite asks, who uses it, and how one gets there."""

import json
from collections.abc import Iterator

import httpx
import pytest
from sqlalchemy import select

from registry import documents, targets
from registry.service import Service
from registry.tables import EntryRow
from schemas.evidence import Kind, Reasoned, Staged
from schemas.result import GateResult, Measurement, Verdict
from schemas.suite import SUITE
from tests.registry.web.test_detail_pages import text_of
from tests.registry.web.test_inventory import linked
from tests.support.api import Api
from tests.support.factories import (
    created_target,
    load_body,
    policy_body,
    record_act,
    reference_body,
    registered_bundle,
    registered_golden,
    registered_policy,
    started_release,
)
from tests.support.load_run import load_rule, load_suite
from tests.support.structured import suite_body

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def visit(committed: Service) -> Iterator[httpx.Client]:
    with Api(committed) as api, api.visitor("engineer") as client:
        yield client


def golden_gates(suite: str) -> list[dict[str, object]]:
    return [*policy_body()["gates"], {"gate": "golden", "suite": suite, "margin_nat": "0.1", "min_prompts": 2}]


def stored(service, actor, body) -> str:
    suite = SUITE.validate_python(body)
    with service.database.transaction() as session:
        raw = suite.model_dump_json(by_alias=True, exclude_none=True).encode()
        return documents.register(session, service, actor, "suite", raw)[0].digest


def test_suites_are_listed_and_one_says_what_it_asks_and_who_uses_it(committed, actor, visit):
    assert "sluicegate suite push FILE" in visit.get("/suites").text
    assert "sluicegate policy push FILE" in visit.get("/policies").text
    golden = registered_golden(committed, actor)
    address = f"/suites/{golden.digest}"
    said = text_of(visit.get(address).text)
    assert "No policy names it" in said
    assert f"sluicegate suite record {golden.digest[7:19]} --bundle BUNDLE" in said

    gates = golden_gates(golden.digest)
    policy = registered_policy(committed, actor, "golden-rules", gates=gates)
    other = registered_policy(committed, actor, "prose", description=f"Not for {golden.digest}.")
    bundle = registered_bundle(committed, actor)
    with committed.database.transaction() as session:
        raw = json.dumps(reference_body(golden, bundle.digest)).encode()
        reference = documents.register(session, committed, actor, "reference", raw)[0].digest
    page = visit.get(address).text
    said = text_of(page)
    assert linked(page, "/policies/") == [policy.digest], f"{other.digest} names it in prose alone"
    assert linked(page, "/bundles/") == [bundle.digest]
    for expected in (
        "Golden suite golden registered",
        f"by {actor.name}",
        golden.digest,
        "prompts 2",
        f"golden-rules {policy.digest[7:19]} golden",
        reference[7:19],
        "p1 user pong 8",
    ):
        assert expected in said, expected
    assert visit.get(f"/suites/{golden.digest[7:17]}").text == page
    assert linked(visit.get("/suites").text, "/suites/") == [golden.digest]
    assert linked(visit.get("/policies").text, "/policies/") == [other.digest, policy.digest]
    for wrong in ("sha256:" + "0" * 64, "zzz", policy.digest):
        assert visit.get(f"/suites/{wrong}").status_code == 404


def test_one_gets_to_a_suite_from_everywhere_that_names_it(committed, actor, visit):
    golden = registered_golden(committed, actor)
    policy = registered_policy(committed, actor, gates=golden_gates(golden.digest))
    page = visit.get(f"/policies/{policy.digest}").text
    assert linked(page, "/suites/") == [golden.digest]
    said = text_of(page)
    assert "evidence counts for 1 day" in said
    assert "boot 1 min, answer 10 s" in said
    assert f"suite golden {golden.digest[7:19]} , margin 0.1 nat, min prompts 2" in said
    for address in ("/", "/targets", "/bundles", "/policies", "/suites", "/runners"):
        navigation = visit.get(address).text.partition("</nav>")[0]
        assert 'href="/suites"' in navigation
        assert 'href="/policies"' in navigation


def test_a_target_names_the_suites_that_it_has_references_for(committed, actor, visit):
    golden, bundle = registered_golden(committed, actor), registered_bundle(committed, actor)
    target = created_target(committed, actor)
    with committed.database.transaction() as session:
        raw = json.dumps(reference_body(golden, bundle.digest)).encode()
        reference = documents.register(session, committed, actor, "reference", raw)[0].digest
        row, named = targets.lock(session, target), {"suite": golden.digest, "bundle": bundle.digest}
        targets.set_reference(session, committed, row, reference=reference, actor="kim", act="reference", **named)
    page = visit.get("/targets/chat@prod").text
    assert linked(page, "/suites/") == [golden.digest]
    assert f"Golden suite Compared with reference golden {golden.digest[7:19]} {reference[7:19]}" in text_of(page)


def test_commands_in_a_banner_stand_out_and_nothing_that_people_wrote_is_taken_for_one(committed, actor, visit):
    release = started_release(committed, actor)
    reasons = [f"one ` alone {EVIL}"]
    record_act(committed, release, Kind.HELD, Reasoned(reasons=reasons, cause="gates_undecided"))
    page = visit.get(f"/releases/{release}").text
    assert f"<code>sluicegate release resume {release} --reason …</code> runs the gates" in page
    assert "one ` alone &lt;script&gt;" in page
    assert EVIL not in page


def test_a_result_leads_to_its_policy_and_suite_and_says_of_what_a_count_is(committed, actor, visit):
    suite = load_suite()
    digest = stored(committed, actor, suite.model_dump(mode="json", by_alias=True, exclude_none=True))
    gates = [*policy_body()["gates"], load_rule(suite).model_dump(mode="json")]
    release = started_release(committed, actor, gates=gates)
    counted = Measurement(name="output_tokens_equal", unit="count", statistic="value", value=24.0, n=2)
    shared = Measurement(name="prompts_equal", unit="ratio", statistic="value", value=0.5, n=2, k=1)
    record_act(committed, release, Kind.STAGED, Staged(files=1, size=10, duration_ms=5), "staged")
    for gate in ("load", "golden"):
        result = GateResult(
            gate=gate,
            definition="sha256:" + "d" * 64,
            verdict=Verdict.PASSED,
            summary="Said.",
            measurements=[counted, shared],
            findings=[],
            duration_ms=900,
            source="run",
        )
        record_act(committed, release, Kind.GATE_RECORDED, result, f"gate:{gate}")
    with committed.database.transaction() as session:
        query = select(EntryRow.entry_digest).where(EntryRow.kind == Kind.GATE_RECORDED).order_by(EntryRow.sequence)
        load, golden = session.scalars(query).all()
    page = visit.get(f"/results/{load}").text
    assert linked(page, "/suites/") == [digest]
    assert len(linked(page, "/policies/")) == 1
    page = visit.get(f"/results/{golden}").text
    assert linked(page, "/suites/") == [], "its policy asks for no golden gate"
    assert "output tokens equal value 24 — — in 2 prompts" in text_of(page)
    assert "prompts equal value 50.00% — — 1 of 2" in text_of(page)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            load_body(),
            ["Load suite", "arrivals constant, 100 a second", "measured 60 requests in 0.6 s", "time-out 10 s"],
        ),
        (suite_body(), ["Structured suite", "1 schema", "it must accept", "it must refuse"]),
    ],
    ids=["load", "structured"],
)
def test_each_kind_of_suite_is_told_in_its_own_words(committed, actor, visit, body, told):
    text = json.loads(json.dumps(body).replace("ping", EVIL))
    page = visit.get(f"/suites/{stored(committed, actor, text)}").text
    for expected in told:
        assert expected in text_of(page), expected
    assert EVIL not in page
