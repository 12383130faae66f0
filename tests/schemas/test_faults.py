"""What is told of JSON that a model refuses: where, what was found, what is allowed, and what was meant."""

import json
import re

import pytest
from pydantic import TypeAdapter, ValidationError

from schemas.api import Approve, TokenCreate
from schemas.bundle import Bundle
from schemas.faults import FORMS, MAX_FAULTS, Schema, faults_of, pointer, shown
from schemas.policy import Policy
from schemas.suite import SUITE, LoadSpec
from tests.support.factories import bundle_body, canary_body, file_entry, golden_body, policy_body

GATES = policy_body()["gates"]
GOLDEN = {"gate": "golden", "suite": "sha256:" + "a" * 64, "margin_nat": "0.1", "min_prompts": 1}


def told(shape, document):
    """Pointer → detail of what is wrong."""
    validate = shape.validate_python if isinstance(shape, TypeAdapter) else shape.model_validate
    with pytest.raises(ValidationError) as refused:
        validate(document)
    return {one["pointer"]: one["detail"] for one in faults_of(refused.value, document, shape)}


@pytest.mark.parametrize(
    ("shape", "document", "place", "detail"),
    [
        (Policy, [], "", "is a list, and has to be an object"),
        (Policy, policy_body(gates=5), "/gates", "is 5, and has to be a list"),
        (Policy, policy_body(descripton="x"), "/descripton", "is no field here; did you mean description?"),
        (
            Policy,
            policy_body(nope=1),
            "/nope",
            "is no field here; the fields are schema, name, description, gates, approval, canary, evidence_seconds",
        ),
        (
            Policy,
            policy_body(gates=[*GATES, GOLDEN | {"Margin-Nat": "1"}]),
            "/gates/2/Margin-Nat",
            "is no field here; did you mean margin_nat?",
        ),
        (
            Policy,
            policy_body(gates=[*GATES, {"gate": "goldn"}]),
            "/gates/2/gate",
            "did you mean golden?",
        ),
        (
            Policy,
            policy_body(gates=[*GATES, {"limit": 1}]),
            "/gates/2/gate",
            "is required: one of integrity, ",
        ),
        (
            Policy,
            policy_body(gates=[*GATES, GOLDEN | {"suite": "3c3aff2a"}]),
            "/gates/2/suite",
            'is "3c3aff2a", and has to be `sha256:` and 64 of the digits 0–9 and a–f',
        ),
        (
            Policy,
            policy_body(gates=[*GATES, GOLDEN | {"margin_nat": 0.1}]),
            "/gates/2/margin_nat",
            'is 0.1, and must be a decimal number in a string, such as "0.05"',
        ),
        (
            Policy,
            policy_body(evidence_seconds="-1"),
            "/evidence_seconds",
            'is "-1", and must be between 0 and 31622400',
        ),
        (Policy, policy_body(description=""), "/description", 'is "", and needs at least 1 character'),
        (Policy, policy_body(description="x" * 5000), "/description", "is 5000 characters long, and may have 4096"),
        (
            Policy,
            policy_body(canary=canary_body((5000, 1000, 10_000))),
            "/canary/steps",
            "steps must rise strictly and end at 10000",
        ),
        (
            Policy,
            policy_body(schema=None) | {"schema": None},
            "/schema",
            'is null, and has to be "sluicegate.dev/policy/v1"',
        ),
        (Policy, policy_body(approval={}), "/approval/required", "is required: approvals by different managers. 0 is "),
        (Bundle, bundle_body(engine={"name": "lamacpp"}), "/engine/name", "did you mean llamacpp?"),
        (Bundle, bundle_body(files=[file_entry("a", b"x", "wieghts")]), "/files/0/role", "did you mean weights?"),
        (Bundle, {"a/b~c": 1, **bundle_body()}, "/a~1b~0c", "is no field here; the fields are "),
        (SUITE, {}, "/schema", "is required: one of sluicegate.dev/suite/golden/v1, sluicegate.dev/suite/load/v1, "),
        (SUITE, golden_body() | {"top_k": 99}, "/top_k", "is 99, and has to be at most 50"),
        (SUITE, golden_body() | {"reapeats": 1}, "/reapeats", "did you mean repeats?"),
        (LoadSpec, {"distribution": "gama"}, "/distribution", "none of gamma, constant; did you mean gamma?"),
        (TokenCreate, {"name": "x", "role": "managr"}, "/role", "did you mean manager?"),
        (TokenCreate, {"name": "x", "role": "ci", "targets": ["chat"]}, "/targets/0", "such as chat@prod"),
        (TokenCreate, {"name": "x", "role": "ci", "expires_at": "soon"}, "/expires_at", "an instant such as 2026"),
        (TokenCreate, {"name": "\ud800", "role": "ci"}, "/name", "is text that Unicode does not have"),
        (Approve, {"reason": "x", "accept": "y"}, "/accept", 'is "y", and has to be a list'),
    ],
)
def test_a_fault_is_told_at_its_place_with_what_was_found_and_what_is_allowed(shape, document, place, detail):
    found = told(shape, document)
    assert place in found, found
    assert detail in found[place]


def test_no_words_of_the_library_reach_the_person():
    wrong = [5, None, True, "", [], {}, "x" * 300, -1, 1.5, "\ud800"]
    for shape, body in ((Policy, policy_body()), (Bundle, bundle_body()), (SUITE, golden_body())):
        for name in body:
            for value in wrong:
                try:
                    faults = told(shape, body | {name: value})
                except pytest.fail.Exception:
                    continue  # it is allowed there
                for place, detail in faults.items():
                    assert not re.search(r"Input|should|Extra|Field req|valid dict|validator", detail), (place, detail)
                    detail.encode()


def test_a_union_is_read_by_the_member_that_the_document_has_chosen():
    rule = GOLDEN | {"percentile": "0.9"}
    detail = told(Policy, policy_body(gates=[*GATES, rule]))["/gates/2/percentile"]
    assert detail == "is no field here; the fields are gate, suite, margin_nat, min_prompts"


def test_nothing_known_is_nothing_promised():
    found = told(Policy, {"nope": 1})
    nowhere = Schema({}, {})
    assert nowhere.places(["a", 0, "b"], {"a": [1]}) == []
    assert nowhere.fields(["a"], None) == []
    assert "/nope" in found


def test_faults_are_told_up_to_a_number():
    document = policy_body() | {f"x{place}": 1 for place in range(3 * MAX_FAULTS)}
    assert len(told(Policy, document)) == MAX_FAULTS


def test_a_pointer_escapes_what_has_a_meaning_in_it():
    assert pointer(("a/b", "c~d", 0)) == "/a~1b/c~0d/0"
    assert pointer(()) == ""


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ([1], "a list"),
        ({"a": 1}, "an object"),
        ("ä\n", '"ä\\n"'),
        ("x" * 100, '"' + "x" * 60 + '…"'),
        (b"\xff", '"\ufffd"'),
        ("\ud800", '"\\ud800"'),
        (10**100, "1" + "0" * 59),
    ],
)
def test_a_value_is_shown_cut_and_as_text_that_can_be_sent(value, said):
    assert shown(value) == said
    json.dumps(shown(value), ensure_ascii=False).encode()


def test_every_pattern_that_is_put_in_words_is_one():
    assert all(re.compile(pattern) and words for pattern, words in FORMS.items())
