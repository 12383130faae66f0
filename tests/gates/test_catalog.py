"""A result always comes with records from which anybody gets the same result again."""

import dataclasses
import json

import pytest

from gates import catalog, integrity
from gates.errors import InstrumentError
from gates.gate import GateContext
from schemas.bundle import COMPONENTS
from schemas.common import canonical_json, sha256_digest
from schemas.policy import IntegrityRule
from schemas.result import Verdict
from tests.support import chain

RULE = IntegrityRule(gate="integrity")


@pytest.fixture
def context(tmp_path):
    root = chain.write_bundle_directory(tmp_path / "chain")
    bundle = chain.describe(root, environment="sha256:" + "0" * 64)
    return GateContext(bundle=bundle, root=root, rule=RULE, before_boot=integrity.observe(bundle, root))


def test_the_result_names_its_records_and_is_recomputed_from_them(context):
    result, raw = catalog.run("integrity", context)
    assert result.records == sha256_digest(raw)
    assert json.loads(raw).keys() == {
        *("gate", "version", "rule", "suite", "reference", "bundle", "duration_ms", "records")
    }
    assert catalog.recompute(raw, None, None, context.bundle) == result
    assert result.definition == catalog.definition("integrity", RULE)


def test_a_failed_instrument_is_errored_and_says_why(context, monkeypatch):
    def fail(_):
        raise InstrumentError("The disk went away; attach it again.")

    monkeypatch.setitem(catalog.CATALOG, "integrity", dataclasses.replace(integrity.GATE, measure=fail))
    result, raw = catalog.run("integrity", context)
    assert result.verdict is Verdict.ERRORED
    assert result.summary == "The disk went away; attach it again."
    assert [finding.message for finding in result.findings] == [result.summary]
    assert catalog.recompute(raw, None, None, context.bundle) == result


@pytest.mark.parametrize(
    "change",
    [
        {"gate": "wish"},
        {"version": 999},
        {"bundle": "sha256:" + "1" * 64},
        {"suite": "sha256:" + "1" * 64},
        {"more": 1},
    ],
)
def test_records_of_something_else_are_refused(context, change):
    _, raw = catalog.run("integrity", context)
    with pytest.raises(ValueError, match="record"):
        catalog.recompute(canonical_json(json.loads(raw) | change), None, None, context.bundle)


def test_records_of_before_identities_were_kept_are_still_read(context):
    _, raw = catalog.run("integrity", context)
    assert "identity" not in json.loads(raw)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"null", b'{"gate":"integrity"}'])
def test_bytes_that_are_no_record_are_refused(context, raw):
    with pytest.raises(ValueError, match=r"JSON|record"):
        catalog.recompute(raw, None, None, context.bundle)


def test_gates_depend_on_components_that_exist():
    for name, gate in catalog.CATALOG.items():
        assert gate.name == name
        assert set(gate.depends_on) <= {*COMPONENTS}
        assert gate.depends_on


@pytest.mark.parametrize("value", ["\ud800", float("nan"), float("inf"), 2**60])
def test_records_that_cannot_be_stored_are_errored(context, value):
    result, raw = catalog.conclude("integrity", context, {"passes": [value]}, duration_ms=1)
    assert result.verdict is Verdict.ERRORED
    assert "cannot be stored" in result.summary
    assert catalog.recompute(raw, None, None, context.bundle) == result
