"""Two validators judge an answer, and neither may be led astray by it."""

import json
import time

import pytest

from gates.contracts import Contract, ContractError, suite_faults
from tests.support.structured import NUMBER, item, suite


def contract(**schema):
    return Contract(json.dumps(schema))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"n":1,"n":2}', "twice"),
        ('{"n":NaN}', "NaN"),
        ('{"n":1', "not JSON"),
        ("", "not JSON"),
        ('{"n":1}x', "not JSON"),
        ('{"n":1e999}', "too large"),
        ('{"n":"\\ud800"}', "half a character"),
        ("[" * 1000, "nested"),
    ],
)
def test_what_is_no_strict_json_is_invalid_and_breaks_no_keyword(text, reason):
    checked = Contract(json.dumps(NUMBER)).check(text)
    assert (checked.is_valid, checked.is_json, checked.keywords) == (False, False, frozenset())
    assert reason in checked.reason


@pytest.mark.parametrize(
    ("schema", "good", "bad", "keyword"),
    [
        ({"multipleOf": 0.01}, "0.07", "0.075", "multipleOf"),
        ({"multipleOf": 7}, "14.0", "1", "multipleOf"),
        ({"uniqueItems": True}, "[1,true]", "[1,1.0]", "uniqueItems"),
        ({"format": "date-time"}, '"2026-11-29T12:00:00Z"', '"today"', "format"),
        ({"format": "date"}, '"2026-02-28"', '"2026-02-30"', "format"),
        ({"format": "time"}, '"12:00:00Z"', '"12:00:00"', "format"),
        ({"enum": ["在线", "离线"]}, '"\\u5728\\u7ebf"', '"å\u009c¨çº¿"', "enum"),  # C105
        ({"pattern": "^[a-z]+$"}, '"abc"', '"a1"', "pattern"),
        ({"patternProperties": {"^x": {"type": "integer"}}}, '{"x":1,"y":""}', '{"x":""}', "type"),
        ({"properties": {"a": {}}, "additionalProperties": False}, '{"a":1}', '{"b":1}', "additionalProperties"),
        (
            {"patternProperties": {"^x": {}}, "additionalProperties": False},
            '{"x":1}',
            '{"y":1}',
            "additionalProperties",
        ),
        ({"additionalProperties": {"type": "integer"}}, '{"a":1}', '{"a":""}', "type"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, "1", '"1"', "type"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", '""', "anyOf"),
    ],
)
def test_both_validators_accept_the_good_and_name_the_keyword_of_the_bad(schema, good, bad, keyword):
    judge = Contract(json.dumps(schema))
    assert judge.check(good).is_valid is True
    checked = judge.check(bad)
    assert (checked.is_valid, checked.keywords) == (False, {keyword})
    assert checked.reason


def test_what_only_one_validator_refuses_is_neither_valid_nor_invalid():
    judge = contract(format="email")
    checked = judge.check('"a@b@c"')
    assert checked.is_valid is None
    assert checked.reason.startswith(("jsonschema says", "jsonschema-rs says"))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/nowhere"},
        {"type": "whole"},
        {"pattern": "(?=a)b"},
        {"pattern": "["},
        {"unevaluatedProperties": False},
        {"properties": {"a": {"unevaluatedItems": False}}},
    ],
)
def test_a_schema_that_cannot_be_judged_by_is_refused(schema):
    with pytest.raises(ContractError):
        Contract(json.dumps(schema))


@pytest.mark.parametrize("text", ["[]", "true", "{", '{"type":"string","type":"integer"}'])
def test_a_schema_that_is_no_strict_object_is_refused(text):
    with pytest.raises(ContractError):
        Contract(text)


def test_a_pattern_that_would_take_for_ever_does_not():
    judge = contract(pattern="^(a+)+$")
    started = time.monotonic()
    assert judge.check(json.dumps("a" * 5000 + "!")).is_valid is False
    assert time.monotonic() - started < 5


def test_keywords_are_found_wherever_a_schema_may_stand_and_nowhere_else():
    found = contract(
        title="maximum",
        properties={"minimum": {"type": "string", "pattern": "a", "maxLength": 3}},
        **{"$defs": {"x": {"anyOf": [{"const": 1}, {"items": {"multipleOf": 2}}]}}},
        examples=[{"uniqueItems": True}],
    ).keywords
    assert found == {
        *("properties", "type", "pattern", "maxLength", "pattern+maxLength", "anyOf", "const", "items", "multipleOf"),
    }


def test_a_sound_suite_has_no_fault():
    assert list(suite_faults(suite(item(), item("other", ranking=None)))) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"valid": ('{"n":1}', '{"n":"1"}')}, "valid instance 1 of a is refused"),
        ({"invalid": ('{"n":1}',)}, "invalid instance 0 of a is accepted"),
        ({"schema": {"type": "whole"}}, "the schema of a is no usable schema"),
        ({"schema": {"format": "email"}, "valid": ('"a@b@c"',), "invalid": ('"x"',)}, "divides the judges"),
    ],
)
def test_a_suite_whose_instances_do_not_prove_its_schema_is_unfit(change, fault):
    (found,) = suite_faults(suite(item("a", **change), item("b")))
    assert found[0] == "a"
    assert fault in found[1]
