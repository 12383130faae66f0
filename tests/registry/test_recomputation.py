"""A verdict is computed again from the stored records, and whatever does not fit is named."""

import json
from datetime import UTC, datetime
from uuid import UUID

import pytest
from sqlalchemy import select, text

from gates import catalog, integrity
from gates.gate import EARLIER, MAX_FINDINGS, GateContext
from gates.static.flaw import flaw
from registry import blobs, evidence, recomputation
from registry.storage.local import LocalBlobs
from registry.tables import EntryRow
from schemas.common import canonical_json, sha256_digest
from schemas.evidence import Agreement, Kind
from schemas.policy import IntegrityRule, StaticRule
from schemas.problems import InvalidDocument, NotFound
from schemas.result import GateResult, Severity, Verdict
from tests.support.factories import WEIGHTS, registered_bundle, registered_policy


@pytest.fixture
def service(scratch):
    return scratch


@pytest.fixture
def measured(service, actor, tmp_path):
    """The integrity gate's result on a registered bundle, with its records."""
    bundle = registered_bundle(service, actor)
    (tmp_path / "model.gguf").write_bytes(WEIGHTS)
    seen = integrity.observe(bundle, tmp_path)
    context = GateContext(bundle=bundle, root=tmp_path, rule=IntegrityRule(gate="integrity"), before_boot=seen)
    return bundle, *catalog.run("integrity", context)


def recorded(service, actor, measured, *, result=None, raw=None, **changes) -> str:
    """Put a result in evidence with its records; return the entry's digest."""
    bundle, true_result, true_raw = measured
    raw = true_raw if raw is None else raw
    blobs.store(service, actor.project_id, sha256_digest(raw), [raw], limit=2**30)
    policy = registered_policy(service, actor, **changes)
    signed = evidence.state(
        service.signer,
        "run/01a2289b-8894-7000-8000-000000000001",
        "gate",
        "runner/r1",
        Kind.GATE_RECORDED,
        result or true_result.model_copy(update={"records": sha256_digest(raw)}),
        subjects={"bundle": bundle.digest, "policy": policy.digest},
        now=datetime.now(UTC),
    )
    with service.database.transaction() as session:
        evidence.append(session, actor.project_id, signed)
        return session.scalars(select(EntryRow.entry_digest).where(EntryRow.kind == "gate_recorded")).one()


def recompute(service, actor, digest):
    with service.database.transaction() as session:
        return recomputation.recompute(session, service, actor.project_id, digest)


def blob_path(service, digest):
    return LocalBlobs(service.settings.storage_dir).path(digest)


def test_records_that_are_untouched_give_the_same_result(service, actor, measured):
    found = recompute(service, actor, recorded(service, actor, measured))
    assert (found.outcome, found.faults) == (Agreement.SAME, [])
    assert (found.gate, found.recorded, found.recomputed) == ("integrity", Verdict.PASSED, Verdict.PASSED)


def test_one_altered_byte_of_the_records_is_named(service, actor, measured):
    digest = recorded(service, actor, measured)
    path = blob_path(service, measured[1].records)
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content.replace(b'"problem":null', b'"problem":nulL', 1))
    found = recompute(service, actor, digest)
    assert found.outcome is Agreement.DIFFERENT
    assert [measured[1].records in fault and "other bytes" in fault for fault in found.faults] == [True]


def test_records_that_are_gone_make_it_impossible_not_good(service, actor, measured):
    digest = recorded(service, actor, measured)
    blob_path(service, measured[1].records).unlink()
    found = recompute(service, actor, digest)
    assert found.outcome is Agreement.IMPOSSIBLE
    assert "not in the store" in found.faults[0]


def test_a_verdict_that_was_written_better_than_measured_is_found(service, actor, measured):
    bundle, _, raw = measured
    body = json.loads(raw)
    body["records"]["passes"][1]["files"][0]["sha256"] = "sha256:" + "1" * 64
    bad = canonical_json(body)
    honest = catalog.recompute(bad, None, None, bundle)
    assert honest.verdict is Verdict.FAILED
    lie = GateResult.model_validate(
        honest.model_dump() | {"verdict": "passed", "findings": [], "summary": "All files were right."}
    )
    found = recompute(service, actor, recorded(service, actor, measured, result=lie, raw=bad))
    assert (found.outcome, found.recorded, found.recomputed) == (Agreement.DIFFERENT, "passed", "failed")
    assert "its verdict is 'passed', but its records say 'failed'" in found.faults
    assert {"its summary are not what its records say", "its findings are not what its records say"} < {*found.faults}


@pytest.mark.parametrize(
    ("change", "outcome", "fault"),
    [
        ({"bundle": "sha256:" + "2" * 64}, Agreement.DIFFERENT, "the records are of the bundle"),
        ({"rule": {"gate": "integrity", "more": 1}}, Agreement.DIFFERENT, "none of the policy"),
        ({"version": 999}, Agreement.IMPOSSIBLE, "version 999"),
        ({"suite": "sha256:" + "2" * 64}, Agreement.IMPOSSIBLE, "there is no suite"),
    ],
)
def test_records_of_something_else_are_told_from_lost_ones(service, actor, measured, change, outcome, fault):
    raw = canonical_json(json.loads(measured[2]) | change)
    found = recompute(service, actor, recorded(service, actor, measured, raw=raw))
    assert found.outcome is outcome
    assert any(fault in one for one in found.faults)


def test_an_altered_entry_is_named(service, actor, measured):
    digest = recorded(service, actor, measured)
    with service.database.transaction() as session:
        session.execute(text("SET LOCAL session_replication_role = replica"))
        statement = text("UPDATE entries SET actor = 'somebody' WHERE entry_digest = :digest")
        assert session.execute(statement, {"digest": digest}).rowcount == 1
    found = recompute(service, actor, digest)
    assert found.outcome is Agreement.DIFFERENT
    assert "its actor is not the one that was signed" in found.faults


def test_only_results_of_the_project_s_gates_are_recomputed(service, actor, measured):
    digest = recorded(service, actor, measured)
    with pytest.raises(NotFound):
        recompute(service, actor, "sha256:" + "0" * 64)
    with service.database.transaction() as session:
        other = session.scalars(select(EntryRow.entry_digest).where(EntryRow.kind == "bundle_registered")).one()
        with pytest.raises(NotFound):
            recomputation.recompute(session, service, UUID(int=1), digest)
    with pytest.raises(InvalidDocument, match="only gate_recorded"):
        recompute(service, actor, other)


CHECKED = [
    {"gate": "integrity"},
    {"gate": "static"},
    {"gate": "compatibility", "boot_seconds": "60", "answer_seconds": "10"},
]


def test_a_result_that_an_older_version_cut_otherwise_is_the_same(service, actor, tmp_path):
    bundle = registered_bundle(service, actor)
    (tmp_path / "model.gguf").write_bytes(WEIGHTS)
    context = GateContext(bundle=bundle, root=tmp_path, rule=StaticRule(gate="static"))
    _, raw = catalog.run("static", context)
    body = json.loads(raw)
    warned = {"severity": Severity.WARN, "expected": None}
    codes = ["total-size-wrong", "shard-orphan", "constant-weight"]
    many = [flaw(code, f"{code} {place}.", found=place, **warned) for code in codes for place in range(200)]
    last = flaw("template-clock", "The template writes the date.", found="now", **warned)
    body["records"]["flaws"] = [one.as_json() for one in (*many, last)]
    raw = canonical_json(body)
    now = catalog.recompute(raw, None, None, bundle)
    older = catalog.recompute(raw, None, None, bundle, EARLIER[-1])
    assert len(now.findings) == len(older.findings) == MAX_FINDINGS
    assert [one.findings[-1].code for one in (now, older)] == ["template-clock", "constant-weight"]
    found = recompute(service, actor, recorded(service, actor, (bundle, older, raw), gates=CHECKED))
    assert (found.outcome, found.faults, found.recomputed) == (Agreement.SAME, [], older.verdict)


def test_findings_that_no_version_would_have_kept_are_different(service, actor, tmp_path):
    bundle = registered_bundle(service, actor)
    (tmp_path / "model.gguf").write_bytes(WEIGHTS)
    context = GateContext(bundle=bundle, root=tmp_path, rule=StaticRule(gate="static"))
    body = json.loads(catalog.run("static", context)[1])
    many = [
        flaw("shard-orphan", f"{place}.", severity=Severity.WARN, found=place, expected=None) for place in range(600)
    ]
    body["records"]["flaws"] = [one.as_json() for one in many]
    raw = canonical_json(body)
    true = catalog.recompute(raw, None, None, bundle)
    lie = true.model_copy(update={"findings": [*true.findings[1:], true.findings[0]]})
    found = recompute(service, actor, recorded(service, actor, (bundle, lie, raw), gates=CHECKED))
    assert (found.outcome, found.faults) == (Agreement.DIFFERENT, ["its findings are not what its records say"])
